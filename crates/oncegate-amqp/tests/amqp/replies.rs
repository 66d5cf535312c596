//! Requests and replies over queues (RPC), with a client of RabbitMQ's direct reply-to and with queues
//! of the sender.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lapin::BasicProperties;
use lapin::options::{BasicConsumeOptions, BasicPublishOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use oncegate_amqp::QueueKind;
use oncegate_core::replies::{Replies, ReplyingHandler};
use oncegate_core::{Consumer, Context, Failure, IdSource, MemoryStore};

use crate::fixture::QueueFixture;

/// Replies with the number of the run.
struct Charge(Arc<AtomicU32>);

impl ReplyingHandler for Charge {
    type Payload = u32;
    type Reply = (u32, u32);

    async fn handle(&self, cents: u32, _: &Context) -> Result<(u32, u32), Failure> {
        Ok((self.0.fetch_add(1, Ordering::SeqCst), cents))
    }
}

fn request(id: u32, queue: &str, correlation: &str) -> BasicProperties {
    BasicProperties::default()
        .with_message_id(format!("payment-{id}").as_str().into())
        .with_reply_to(queue.into())
        .with_correlation_id(correlation.into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_copy_of_a_request_gets_the_reply_of_the_first_run() {
    const REQUESTS: u32 = 20;
    const COPIES: u32 = 3;
    let fixture = QueueFixture::new().await;
    let runs = Arc::new(AtomicU32::new(0));
    let source = fixture.source(QueueKind::Quorum);
    let replies = Replies::by(source.publisher()).timeout(Duration::from_secs(1));
    let consumer = Consumer::builder()
        .source(source)
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .replying_handler(Charge(runs.clone()), replies);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let deadline = Instant::now() + Duration::from_secs(60);
    let to_missing_queue = || request(999, "a.missing.queue", "unused");
    while !fixture.try_publish("1", to_missing_queue()).await {
        assert!(Instant::now() < deadline, "the consumer declared no queue");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    let exclusive = QueueDeclareOptions {
        exclusive: true,
        ..QueueDeclareOptions::default()
    };
    let own = fixture
        .channel
        .queue_declare("".into(), exclusive, FieldTable::default())
        .await
        .expect("a queue");
    let direct = "amq.rabbitmq.reply-to";
    let mut received: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let no_ack = BasicConsumeOptions {
        no_ack: true,
        ..BasicConsumeOptions::default()
    };
    // The client of direct reply-to publishes on the channel on which it consumes.
    let mut direct_replies = fixture
        .channel
        .basic_consume(direct.into(), "".into(), no_ack, FieldTable::default())
        .await
        .expect("direct reply-to");
    let mut own_replies = fixture
        .channel
        .basic_consume(own.name().clone(), "".into(), no_ack, FieldTable::default())
        .await
        .expect("the queue");
    for copy in 0..COPIES {
        for id in 0..REQUESTS {
            let queue = if (copy + id).is_multiple_of(2) {
                direct
            } else {
                own.name().as_str()
            };
            let properties = request(id, queue, &format!("{id}/{copy}"));
            fixture
                .channel
                .basic_publish(
                    "".into(),
                    fixture.queue.as_str().into(),
                    BasicPublishOptions::default(),
                    id.to_string().as_bytes(),
                    properties,
                )
                .await
                .expect("published");
        }
    }
    for _ in 0..REQUESTS * COPIES {
        let next = async {
            tokio::select! {
                reply = direct_replies.next() => reply,
                reply = own_replies.next() => reply,
            }
        };
        let reply = tokio::time::timeout_at(deadline.into(), next).await;
        let reply = reply
            .expect("a reply in time")
            .expect("a reply")
            .expect("a reply");
        let properties = &reply.properties;
        let correlation = properties
            .correlation_id()
            .clone()
            .expect("a correlation id");
        let (id, _) = correlation.as_str().split_once('/').expect("an id");
        let message_id = properties.message_id().clone().expect("a message id");
        assert_eq!(message_id.as_str(), format!("payment-{id}/reply"));
        let content_type = properties.content_type().clone().expect("a content type");
        assert_eq!(content_type.as_str(), "application/json");
        let body = String::from_utf8(reply.data).expect("JSON is UTF-8");
        received.entry(id.to_owned()).or_default().push(body);
    }
    // Each reply is sent once.
    let more = tokio::time::timeout(Duration::from_secs(2), direct_replies.next()).await;
    assert!(more.is_err(), "{more:?}");
    assert_eq!(received.len(), REQUESTS as usize);
    for (id, bodies) in &received {
        assert_eq!(bodies.len(), COPIES as usize, "{id}: {bodies:?}");
        assert!(
            bodies
                .iter()
                .all(|body| *body == bodies[0] && body.ends_with(&format!(",{id}]"))),
            "{id}: {bodies:?}"
        );
    }
    // Includes the request whose reply queue does not exist.
    assert_eq!(runs.load(Ordering::SeqCst), REQUESTS + 1);
    drop(stop);
    running.await.expect("it does not panic").expect("no error");
    assert_eq!(fixture.ready_messages(&fixture.queue).await, 0);
    fixture.delete_queues().await;
}
