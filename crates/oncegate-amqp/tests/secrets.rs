//! No log line at any level contains a password, and none from `INFO` up a payload. In a test binary
//! of its own, because it captures the log of the process.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use oncegate_amqp::{RabbitMq, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{
    Connect, ConnectOptions, Incoming, Limit, Settled, Source, SourceError,
};
use oncegate_testkit::Lines;

#[tokio::test]
async fn no_log_line_contains_a_password_and_none_from_info_up_a_payload() {
    let log = Lines::filtered("trace");
    let broker = oncegate_testkit::rabbitmq_url().expect("a RabbitMQ to test against");
    // The user does not exist, which the broker reports after the whole handshake.
    let url = broker.replacen("guest:guest", "someone:canary%21", 1);
    let refused = RabbitMq::queue("q")
        .urls([url.as_str(), "amqp://someone:canary%21@127.0.0.1:1/%2f"])
        .connect(ConnectOptions::default())
        .await;
    match refused {
        Err(error @ SourceError::Misconfigured { .. }) => {
            assert!(!format!("{error:?}").contains("canary"), "{error:?}")
        }
        other => panic!("{other:?}"),
    }
    let logged = log.text();
    assert!(
        logged.contains("TRACE") && logged.contains("lapin"),
        "nothing was captured: {logged}"
    );
    let leak = logged.lines().find(|line| line.contains("canary"));
    assert!(leak.is_none(), "{leak:?}");
    a_returned_message_is_not_logged(&broker, &log).await;
}

/// The dead-letter queue does not exist, so the message is returned, and the client logs that.
async fn a_returned_message_is_not_logged(broker: &str, log: &Lines) {
    const BODY: &[u8] = b"canary in the body";
    let connection = Connection::connect(broker, ConnectionProperties::default())
        .await
        .expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    let queue = format!("test.secrets.{}", std::process::id());
    let declaring = channel.queue_declare(
        queue.as_str().into(),
        QueueDeclareOptions::default(),
        FieldTable::default(),
    );
    declaring.await.expect("declared");
    let mut headers = FieldTable::default();
    headers.insert(
        "payment-id".into(),
        AMQPValue::LongString("canary in a header".into()),
    );
    let properties = BasicProperties::default().with_headers(headers);
    let publishing = channel.basic_publish(
        "".into(),
        queue.as_str().into(),
        BasicPublishOptions::default(),
        BODY,
        properties,
    );
    publishing.await.expect("sent");
    let mut source = RabbitMq::queue(&queue)
        .url(broker)
        .topology(Topology::Trust)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut into = Vec::new();
    source
        .receive(Limit::new(1, usize::MAX), &mut into)
        .await
        .expect("received");
    let Some(Incoming::Delivery(delivery)) = into.pop() else {
        panic!("{into:?}")
    };
    assert_eq!(&delivery.message.body[..], BODY);
    source
        .settle(&mut vec![Settled::new(
            delivery,
            Settlement::Reject(Reason::Refused),
        )])
        .await
        .expect("settled");
    let deadline = Instant::now() + Duration::from_secs(30);
    while !log.text().contains("returned us a message") {
        assert!(
            Instant::now() < deadline,
            "no message was returned: {}",
            log.text()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(source);
    channel
        .queue_delete(queue.as_str().into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    let logged = log.text();
    // The client logs bytes as numbers.
    let numbers = format!("{BODY:?}");
    let contains_payload =
        |line: &&str| line.contains("canary") || line.contains(numbers.trim_matches(['[', ']']));
    let is_info_or_above = |line: &&str| {
        ["INFO", "WARN", "ERROR"]
            .iter()
            .any(|level| line.contains(level))
    };
    let leak = logged
        .lines()
        .filter(is_info_or_above)
        .find(contains_payload);
    assert!(leak.is_none(), "{leak:?}");
}
