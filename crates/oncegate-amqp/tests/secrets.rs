//! No line at any level holds a password, and none for an operator a payload. Alone in its process,
//! because it listens to all that is logged.
#![forbid(unsafe_code)]

use std::io;
use std::sync::{Arc, Mutex};

use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use oncegate_amqp::{RabbitMq, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Incoming, Limit, Open, Settled, Source, SourceError};

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn take(&self) -> String {
        String::from_utf8_lossy(&std::mem::take(
            &mut *self.0.lock().expect("nobody panics with it"),
        ))
        .into_owned()
    }
}

impl io::Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .expect("nobody panics with it")
            .extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn no_line_at_any_level_holds_a_password_and_none_for_an_operator_a_payload() {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .init();
    let broker = oncegate_testkit::rabbitmq_url().expect("a RabbitMQ to test against");
    // It knows no such user; the whole handshake is gone through all the same.
    let url = broker.replacen("guest:guest", "someone:canary%21", 1);
    let refused = RabbitMq::queue("q")
        .urls([url.as_str(), "amqp://someone:canary%21@127.0.0.1:1/%2f"])
        .open()
        .await;
    match refused {
        Err(error @ SourceError::Misconfigured { .. }) => {
            assert!(!format!("{error:?}").contains("canary"), "{error:?}")
        }
        other => panic!("{other:?}"),
    }
    let said = log.take();
    assert!(
        said.contains("TRACE") && said.contains("lapin"),
        "nothing was listened to: {said}"
    );
    let leak = said.lines().find(|line| line.contains("canary"));
    assert!(leak.is_none(), "{leak:?}");
    a_message_that_comes_back_is_not_written_out(&broker, &log).await;
}

/// Its dead-letter queue does not exist: what is published there comes back, and the client says
/// so.
async fn a_message_that_comes_back_is_not_written_out(broker: &str, log: &Log) {
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
        .open()
        .await
        .expect("a source");
    let mut into = Vec::new();
    source
        .receive(
            Limit {
                count: 1,
                bytes: usize::MAX,
            },
            &mut into,
        )
        .await
        .expect("received");
    let Some(Incoming::Delivery(delivery)) = into.pop() else {
        panic!("{into:?}")
    };
    assert_eq!(&delivery.message.body[..], BODY);
    source
        .settle(&mut vec![Settled {
            delivery,
            settlement: Settlement::Reject(Reason::Refused),
            story: None,
        }])
        .await
        .expect("told");
    let (patience, mut said) = (Instant::now() + Duration::from_secs(30), String::new());
    while !said.contains("returned us a message") {
        assert!(Instant::now() < patience, "nothing came back: {said}");
        tokio::time::sleep(Duration::from_millis(20)).await;
        said.push_str(&log.take());
    }
    drop(source);
    channel
        .queue_delete(queue.as_str().into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    said.push_str(&log.take());
    // The client shows bytes as numbers.
    let numbers = format!("{BODY:?}");
    let shows =
        |line: &&str| line.contains("canary") || line.contains(numbers.trim_matches(['[', ']']));
    let for_operators = |line: &&str| {
        ["INFO", "WARN", "ERROR"]
            .iter()
            .any(|level| line.contains(level))
    };
    let leak = said.lines().filter(for_operators).find(shows);
    assert!(leak.is_none(), "{leak:?}");
}
