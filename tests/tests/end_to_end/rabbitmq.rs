//! RabbitMQ by lapin.

use std::time::{Duration, Instant};

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate::source::{Connect, ConnectOptions};
use oncegate::{RabbitMq, Source};

use crate::broker::{RejectedMessage, Sent};

/// The suffixes of the other queues that the source declares.
const RELATED_QUEUES: [&str; 7] = [
    ".dead-letters",
    ".in-doubt",
    ".delay.1000",
    ".delay.5000",
    ".delay.30000",
    ".delay.120000",
    ".delay.600000",
];

/// Declares the queues with the arguments of the source.
pub(crate) async fn create(url: &str, queue: &str) {
    let source = RabbitMq::queue(queue)
        .url(url)
        .connect(ConnectOptions::default())
        .await
        .expect("the queues are declared");
    let source: Box<dyn Source> = Box::new(source);
    source
        .close(Instant::now() + Duration::from_secs(5))
        .await
        .expect("a clean end");
}

pub(crate) async fn publish(url: &str, queue: &str, messages: &[Sent]) {
    let (connection, channel) = open(url).await;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .expect("confirms");
    let mut sent = Vec::new();
    for message in messages {
        let mut properties = BasicProperties::default().with_delivery_mode(2);
        if let Some(id) = &message.id {
            let mut headers = FieldTable::default();
            headers.insert("id".into(), AMQPValue::LongString(id.as_str().into()));
            properties = properties.with_headers(headers);
        }
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let published = channel.basic_publish(
            "".into(),
            queue.into(),
            options,
            message.body.as_bytes(),
            properties,
        );
        sent.push(published.await.expect("a channel"));
    }
    for confirmed in sent {
        let confirmed = confirmed.await.expect("an answer");
        assert!(
            confirmed.is_ack() && confirmed.take_message().is_none(),
            "it was not taken"
        );
    }
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
}

pub(crate) async fn rejected_messages(url: &str, queue: &str) -> Vec<RejectedMessage> {
    let (connection, channel) = open(url).await;
    let mut rejected_messages = Vec::new();
    // Unacknowledged messages return to the queue when the connection closes.
    while let Some(message) = channel
        .basic_get(queue.into(), BasicGetOptions::default())
        .await
        .expect("the queue")
    {
        let headers = message
            .delivery
            .properties
            .headers()
            .clone()
            .unwrap_or_default();
        rejected_messages.push(RejectedMessage {
            headers: headers
                .inner()
                .iter()
                .map(|(name, value)| (name.to_string(), text(value)))
                .collect(),
            body: String::from_utf8_lossy(&message.delivery.data).into_owned(),
        });
    }
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
    rejected_messages
}

pub(crate) async fn left(url: &str, queue: &str) -> u64 {
    let (connection, channel) = open(url).await;
    let mut left = 0;
    for name in std::iter::once(queue.to_owned()).chain(
        RELATED_QUEUES[2..]
            .iter()
            .map(|beside| format!("{queue}{beside}")),
    ) {
        let options = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let found = channel
            .queue_declare(name.into(), options, FieldTable::default())
            .await
            .expect("the queue");
        left += u64::from(found.message_count());
    }
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
    left
}

pub(crate) async fn remove(url: &str, queue: &str) {
    let (connection, channel) = open(url).await;
    for beside in std::iter::once("").chain(RELATED_QUEUES) {
        let name: ShortString = format!("{queue}{beside}").into();
        channel
            .queue_delete(name, QueueDeleteOptions::default())
            .await
            .expect("deleting is idempotent");
    }
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
}

async fn open(url: &str) -> (Connection, Channel) {
    let connection = Connection::connect(url, ConnectionProperties::default())
        .await
        .expect("RabbitMQ answers");
    let channel = connection.create_channel().await.expect("a channel");
    (connection, channel)
}

fn text(value: &AMQPValue) -> String {
    match value {
        AMQPValue::LongString(text) => String::from_utf8_lossy(text.as_bytes()).into_owned(),
        AMQPValue::ShortString(text) => text.to_string(),
        other => format!("{other:?}"),
    }
}
