//! Sends messages to Kafka and RabbitMQ, and reads dead letters and messages in doubt.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lapin::Connection;
use lapin::options::BasicGetOptions;
use oncegate::outbox::{OutboxMessage, Publisher};
use oncegate::{Kafka, KafkaPublisher, RabbitMqPublisher};
use oncegate_config::Config;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Headers, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::time::{sleep, timeout};
use tracing::info_span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::Result;
use crate::traffic::{DemoMessage, ID_HEADER, text};

const TIMEOUT: Duration = Duration::from_secs(20);

/// Sends a message until it is confirmed: RabbitMQ returns it until a worker has declared the queue
/// and the queue has a leader.
pub(crate) async fn publish(to: &impl Publisher, name: &str, message: &DemoMessage) -> Result<()> {
    let (started, id) = (Instant::now(), message.id.as_str());
    // Until the message is confirmed. The worker's spans refer to it, if traces are exported.
    let span = info_span!(parent: None, "payments.send", id, otel.kind = "producer");
    let mut headers = HashMap::from([(ID_HEADER.to_owned(), id.to_owned())]);
    TraceContextPropagator::new().inject_context(&span.context(), &mut headers);
    let mut copy = OutboxMessage::new(id, name, message.body.clone());
    copy.headers = headers.into_iter().collect();
    // The copies of a payment have different keys, so that they reach different workers.
    copy.key = Some(fastrand::u64(..).to_string().into());
    while let Err(error) = to.publish(&copy).await {
        if started.elapsed() > 3 * TIMEOUT {
            let advice = "is a worker running, which declares the queue";
            return Err(format!("{error}; {advice} {name}?").into());
        }
        sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}

pub(crate) struct Topic {
    kafka: Kafka,
    pub(crate) name: String,
    pub(crate) publisher: KafkaPublisher,
}

impl Topic {
    /// Creates the topic, unless it exists. Workers create the dead-letter and in-doubt topics.
    pub(crate) async fn open(config: &Config) -> Result<Self> {
        let (kafka, name) = (config.kafka()?, config.text("kafka.topic"));
        let name = name.unwrap_or_default().to_owned();
        let admin: AdminClient<DefaultClientContext> = kafka.client(&[])?;
        let options = AdminOptions::new().request_timeout(Some(TIMEOUT));
        let topic = NewTopic::new(&name, 6, TopicReplication::Fixed(1));
        let created = admin.create_topics([&topic], &options).await;
        created.map_err(|error| format!("Kafka cannot be reached ({error}); is it running?"))?;
        Ok(Self {
            publisher: kafka.publisher(),
            kafka,
            name,
        })
    }

    /// The ids of all messages of the topic with this suffix.
    pub(crate) async fn ids(&self, suffix: &str) -> Result<Vec<String>> {
        let settings = [("group.id", "report"), ("enable.partition.eof", "true")];
        let consumer: StreamConsumer = self.kafka.client(&settings)?;
        let (topic, mut partitions) = (self.name.clone() + suffix, TopicPartitionList::new());
        partitions.add_partition_offset(&topic, 0, Offset::Beginning)?;
        consumer.assign(&partitions)?;
        let mut ids = Vec::new();
        loop {
            let message = match timeout(TIMEOUT, consumer.recv()).await? {
                Err(KafkaError::PartitionEOF(_)) => return Ok(ids),
                message => message?,
            };
            let mut headers = message.headers().into_iter().flat_map(|it| it.iter());
            let id = headers.find(|it| it.key == ID_HEADER);
            ids.push(text(id.and_then(|it| it.value)));
        }
    }
}

pub(crate) struct Queue {
    connection: Connection,
    pub(crate) publisher: RabbitMqPublisher,
    pub(crate) name: String,
}

impl Queue {
    pub(crate) async fn open(config: &Config) -> Result<Self> {
        let rabbitmq = config.rabbitmq()?;
        let name = config.text("rabbitmq.queue").unwrap_or_default().to_owned();
        Ok(Self {
            connection: rabbitmq.client("payments").await?,
            publisher: rabbitmq.publisher(),
            name,
        })
    }

    /// The ids of all messages of the queue with this suffix.
    pub(crate) async fn ids(&self, suffix: &str) -> Result<Vec<String>> {
        let queue = format!("{}{suffix}", self.name);
        // Messages that are not acknowledged return to the queue when the channel closes.
        let channel = self.connection.create_channel().await?;
        let get = || channel.basic_get(queue.as_str().into(), BasicGetOptions::default());
        let mut ids = Vec::new();
        while let Some(message) = get().await? {
            let headers = message.delivery.properties.headers().as_ref();
            let id = headers.and_then(|it| it.inner().get(ID_HEADER)?.as_long_string());
            ids.push(text(id.map(|it| it.as_bytes())));
        }
        channel.close(200, "OK".into()).await?;
        Ok(ids)
    }
}
