//! Sends messages to Kafka and RabbitMQ, and reads dead letters and messages in doubt.

use std::collections::HashMap;
use std::time::{Duration, Instant, UNIX_EPOCH};

use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection};
use oncegate::Kafka;
use oncegate_config::Config;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{Consumer, StreamConsumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::time::{sleep, timeout};
use tracing::{Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::Result;
use crate::traffic::{DemoMessage, ID_HEADER, text};

const TIMEOUT: Duration = Duration::from_secs(20);

/// The span of a message until it is confirmed, and its headers: the id, and the trace context that
/// the worker's spans refer to, if traces are exported.
fn sending(message: &DemoMessage) -> (Span, HashMap<String, String>) {
    let id = message.id.as_str();
    let span = info_span!(parent: None, "payments.send", id, otel.kind = "producer");
    let mut headers = HashMap::from([(ID_HEADER.to_owned(), id.to_owned())]);
    TraceContextPropagator::new().inject_context(&span.context(), &mut headers);
    (span, headers)
}

pub(crate) struct Topic {
    kafka: Kafka,
    name: String,
    producer: FutureProducer,
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
        // Spreads messages over all partitions, so that all workers get some.
        let settings = [("linger.ms", "5"), ("sticky.partitioning.linger.ms", "0")];
        let producer = kafka.client(&settings)?;
        Ok(Self {
            kafka,
            name,
            producer,
        })
    }

    pub(crate) async fn send(&self, message: &DemoMessage) -> Result<()> {
        let (_span, headers) = sending(message);
        let headers = headers.iter().map(|(key, value)| (key, Some(value)));
        let headers = headers.map(|(key, value)| Header { key, value });
        // Without a key, so that the copies of a payment reach different workers.
        let record = FutureRecord::<(), str>::to(&self.name);
        let record = record.headers(headers.fold(OwnedHeaders::new(), OwnedHeaders::insert));
        let sent = self.producer.send(record.payload(&message.body), TIMEOUT);
        sent.await.map_err(|(error, _)| error)?;
        Ok(())
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
    channel: Channel,
    name: String,
}

impl Queue {
    pub(crate) async fn open(config: &Config) -> Result<Self> {
        let connection = config.rabbitmq()?.client("payments").await?;
        let channel = connection.create_channel().await?;
        let options = ConfirmSelectOptions::default();
        channel.confirm_select(options).await?;
        let name = config.text("rabbitmq.queue").unwrap_or_default().to_owned();
        Ok(Self {
            connection,
            channel,
            name,
        })
    }

    /// Sends a message; repeats it if RabbitMQ returns or refuses it, as it does until a worker has
    /// declared the queue and the queue has a leader.
    pub(crate) async fn send(&self, message: &DemoMessage) -> Result<()> {
        let (started, (_span, headers)) = (Instant::now(), sending(message));
        let mut table = FieldTable::default();
        for (key, value) in headers {
            table.insert(key.into(), AMQPValue::LongString(value.into()));
        }
        let properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_timestamp(UNIX_EPOCH.elapsed()?.as_secs())
            .with_headers(table);
        let options = BasicPublishOptions {
            mandatory: true,
            ..Default::default()
        };
        loop {
            let (queue, properties) = (self.name.as_str().into(), properties.clone());
            let body = message.body.as_bytes();
            let sent = self
                .channel
                .basic_publish("".into(), queue, options, body, properties);
            let confirmation = sent.await?.await?;
            if confirmation.is_ack() && confirmation.take_message().is_none() {
                return Ok(());
            } else if started.elapsed() > 3 * TIMEOUT {
                let error = "RabbitMQ refuses messages; is a worker running, which declares";
                return Err(format!("{error} the queue {}?", self.name).into());
            }
            sleep(Duration::from_millis(200)).await;
        }
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
