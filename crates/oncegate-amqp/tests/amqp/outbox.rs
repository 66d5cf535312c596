//! The publisher of an outbox.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqPublisher};
use oncegate_core::IdSource;
use oncegate_core::outbox::{NotPublished, OutboxMessage, Publisher};
use oncegate_testkit::servers::{RabbitOptions, RabbitServer};

use crate::fixture::*;

fn message(destination: &str, number: usize) -> OutboxMessage {
    OutboxMessage::new(format!("t-{number}/1"), destination, number.to_string())
}

async fn declare(fixture: &QueueFixture) {
    let durable = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    let queue = fixture.queue.as_str().into();
    let declared = fixture
        .channel
        .queue_declare(queue, durable, FieldTable::default());
    declared.await.expect("a queue");
}

fn not_confirmed(result: Result<(), NotPublished>) -> String {
    match result {
        Err(NotPublished::NoDestination(error) | NotPublished::NotConfirmed(error)) => {
            error.to_string()
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_arrives_with_its_id_key_headers_and_body() {
    let fixture = QueueFixture::new().await;
    let source = fixture.source(QueueKind::Quorum);
    let publisher = source.publisher();
    let mut source = open(source.key_header("message-key")).await;
    let mut sent = message(&fixture.queue, 7);
    sent.key = Some("k".into());
    sent.headers = vec![
        ("currency".into(), "EUR".into()),
        ("content-type".into(), "application/json".into()),
    ];
    publisher.publish(&sent).await.expect("confirmed");
    let (delivered, _) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
    let received = &delivered[0].message;
    let id = IdSource::message_id().read(received).expect("an id");
    assert_eq!(id.as_str(), "t-7/1");
    assert_eq!(received.key.as_deref(), Some(&b"k"[..]));
    assert_eq!(received.headers.last("currency"), Some(&b"EUR"[..]));
    assert_eq!(&received.body[..], b"7");
    assert!(received.sent_at.is_some(), "at most once needs a timestamp");
    for delivery in delivered {
        settle(&mut source, delivery, accept()).await;
    }
    close(source).await;

    publisher.publish(&sent).await.expect("confirmed");
    let raw = fixture
        .channel
        .basic_get(fixture.queue.as_str().into(), Default::default());
    let raw = raw.await.expect("an answer").expect("a message");
    assert_eq!(*raw.properties.delivery_mode(), Some(2), "persistent");
    let content_type = raw.properties.content_type().as_ref();
    assert_eq!(content_type.map(|it| it.as_str()), Some("application/json"));
    fixture.delete_queues().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_for_a_missing_queue_is_not_confirmed_and_others_are() {
    let (fixture, missing) = (QueueFixture::new().await, QueueFixture::new().await);
    declare(&fixture).await;
    let publisher = fixture.source(QueueKind::Quorum).publisher();
    let messages: Vec<_> = (0..500)
        .map(|number| match number % 50 {
            0 => message(&missing.queue, number),
            _ => message(&fixture.queue, number),
        })
        .collect();
    let results = join_all(messages.iter().map(|message| publisher.publish(message))).await;
    for (number, result) in results.into_iter().enumerate() {
        match number % 50 {
            0 => assert!(not_confirmed(result).contains("create the queue")),
            _ => result.expect("confirmed"),
        }
    }
    assert_eq!(fixture.ready_messages(&fixture.queue).await, 490);
    declare(&missing).await;
    publisher.publish(&messages[0]).await.expect("confirmed");
    fixture.delete_queues().await;
    missing.delete_queues().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_goes_through_its_exchange_to_a_bound_queue() {
    let fixture = QueueFixture::new().await;
    declare(&fixture).await;
    let publisher = fixture.source(QueueKind::Quorum).publisher();
    let mut sent = message("ledger.booked", 1);
    sent.exchange = format!("{}.events", fixture.queue);
    let error = not_confirmed(publisher.publish(&sent).await);
    assert!(error.contains("create the exchange"), "{error}");
    let exchange = || sent.exchange.as_str().into();
    let (options, none) = (ExchangeDeclareOptions::default(), FieldTable::default());
    let channel = &fixture.channel;
    let declared = channel.exchange_declare(exchange(), ExchangeKind::Topic, options, none);
    declared.await.expect("an exchange");
    let error = not_confirmed(publisher.publish(&sent).await);
    assert!(error.contains("NO_ROUTE"), "{error}");
    let (queue, key) = (fixture.queue.as_str().into(), "ledger.*".into());
    let (options, none) = (QueueBindOptions::default(), FieldTable::default());
    let bound = channel.queue_bind(queue, exchange(), key, options, none);
    bound.await.expect("bound");
    publisher.publish(&sent).await.expect("confirmed");
    assert_eq!(fixture.ready_messages(&fixture.queue).await, 1);
    let deleted = channel.exchange_delete(exchange(), Default::default());
    deleted.await.expect("deleted");
    fixture.delete_queues().await;
}

fn at(server: &RabbitServer) -> RabbitMqPublisher {
    RabbitMq::queue("any").url(server.url()).publisher()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_too_large_is_refused_and_a_lost_connection_is_replaced() {
    let options = RabbitOptions::new().setting("max_message_size", "1000");
    let mut server = RabbitServer::start_with(&options).expect("a server");
    let fixture = QueueFixture::at(&server.url()).await;
    declare(&fixture).await;
    let publisher = at(&server);
    let large = OutboxMessage::new("t/1", &fixture.queue, vec![0; 1_001]);
    let messages = [
        large,
        message(&fixture.queue, 2),
        message(&fixture.queue, 3),
    ];
    let results = join_all(messages.iter().map(|message| publisher.publish(message))).await;
    let [refused, second, third] = results.try_into().expect("three results");
    assert!(
        matches!(refused, Err(NotPublished::Refused(_))),
        "{refused:?}"
    );
    second.and(third).expect("confirmed");

    let mut headers = message(&fixture.queue, 4);
    headers.headers = vec![("h".into(), "v".repeat(200_000))];
    let refused = publisher.publish(&headers).await;
    assert!(
        matches!(refused, Err(NotPublished::Refused(_))),
        "{refused:?}"
    );

    server.kill();
    not_confirmed(publisher.publish(&messages[1]).await);
    server.start_again().expect("started");
    let deadline = Instant::now() + Duration::from_secs(120);
    while let Err(error) = publisher.publish(&messages[1]).await {
        assert!(Instant::now() < deadline, "not published: {error:?}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
