//! Kafka and RabbitMQ, as the demo uses them beside the workers.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection};
use oncegate::Kafka;
use oncegate_config::Config;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tracing::{Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::Error;
use crate::payment::{ID_HEADER, Outgoing, name};

const TIMEOUT: Duration = Duration::from_secs(20);
/// How long the workers may take to declare the queue.
const START: Duration = Duration::from_secs(60);

/// The span of a message until it is confirmed, and its headers: the id, and the trace context that
/// the worker's spans refer to, if traces are exported.
fn sending(system: &str, queue: &str, message: &Outgoing) -> (Span, HashMap<String, String>) {
    let span = info_span!(
        parent: None,
        "payments.send",
        id = message.id,
        otel.kind = "producer",
        messaging.system = system,
        messaging.operation.r#type = "send",
        messaging.destination.name = queue
    );
    let mut headers = HashMap::new();
    TraceContextPropagator::new().inject_context(&span.context(), &mut headers);
    let id = message.id.iter().cloned();
    headers.extend(id.map(|id| (ID_HEADER.to_owned(), id)));
    (span, headers)
}

pub(crate) struct Topic {
    kafka: Kafka,
    name: String,
    producer: FutureProducer,
}

impl Topic {
    /// Creates the topic; an error of a topic that exists is ignored. The workers create those of rejected messages.
    pub(crate) async fn open(config: &Config) -> Result<Self, Error> {
        let (kafka, name) = (config.kafka()?, config.text("kafka.topic"));
        let name = name.unwrap_or_default().to_owned();
        let admin: AdminClient<DefaultClientContext> = kafka.client(&[])?;
        let options = AdminOptions::new().request_timeout(Some(TIMEOUT));
        let topic = NewTopic::new(&name, 6, TopicReplication::Fixed(1));
        let created = admin.create_topics([&topic], &options).await;
        created.map_err(|error| format!("Kafka cannot be reached ({error}); is it running?"))?;
        // Each message to a partition of its own, so that all workers get some.
        let settings = [("linger.ms", "5"), ("sticky.partitioning.linger.ms", "0")];
        Ok(Self {
            producer: kafka.client(&settings)?,
            kafka,
            name,
        })
    }

    pub(crate) async fn send(&self, messages: &[Outgoing]) -> Result<(), Error> {
        let mut confirmations = Vec::new();
        for message in messages {
            let (span, headers) = sending("kafka", &self.name, message);
            let mut record = OwnedHeaders::new();
            for (key, value) in &headers {
                let value = Some(value);
                record = record.insert(Header { key, value });
            }
            // Without a key: the copies of a payment reach different workers.
            let record = FutureRecord::<(), str>::to(&self.name).headers(record);
            let sent = self.producer.send_result(record.payload(&message.body));
            confirmations.push((span, sent.map_err(|(error, _)| error)?));
        }
        for (_span, confirmation) in confirmations {
            confirmation.await?.map_err(|(error, _)| error)?;
        }
        Ok(())
    }

    /// The names of all messages of the topic with this suffix.
    pub(crate) async fn names(&self, suffix: &str) -> Result<Vec<String>, Error> {
        let topic = format!("{}{suffix}", self.name);
        let consumer: BaseConsumer = self.kafka.client(&[("group.id", "payments-report")])?;
        let read = move || {
            let (mut next, end) = consumer.fetch_watermarks(&topic, 0, TIMEOUT)?;
            let mut partitions = TopicPartitionList::new();
            partitions.add_partition_offset(&topic, 0, Offset::Offset(next))?;
            consumer.assign(&partitions)?;
            let mut names = Vec::new();
            while next < end {
                let message = consumer.poll(TIMEOUT).ok_or("Kafka does not answer")??;
                next = message.offset() + 1;
                let mut headers = message.headers().into_iter().flat_map(|it| it.iter());
                let id = headers.find(|it| it.key == ID_HEADER);
                let body = message.payload().unwrap_or_default();
                names.push(name(id.and_then(|it| it.value), body));
            }
            Ok(names)
        };
        tokio::task::spawn_blocking(read).await?
    }
}

pub(crate) struct Queue {
    connection: Connection,
    channel: Channel,
    name: String,
}

impl Queue {
    pub(crate) async fn open(config: &Config) -> Result<Self, Error> {
        let connection = config.rabbitmq()?.client("payments").await?;
        let channel = connection.create_channel().await?;
        let options = ConfirmSelectOptions::default();
        channel.confirm_select(options).await?;
        Ok(Self {
            connection,
            channel,
            name: config.text("rabbitmq.queue").unwrap_or_default().to_owned(),
        })
    }

    /// Sends messages; repeats those that RabbitMQ returns or refuses, as it does until a worker
    /// has declared the queue and the queue has a leader.
    pub(crate) async fn send(&self, messages: &[Outgoing]) -> Result<(), Error> {
        let (begun, mut left) = (Instant::now(), messages.iter().collect::<Vec<_>>());
        loop {
            let mut confirmations = Vec::new();
            for message in left.drain(..) {
                let (span, headers) = sending("rabbitmq", &self.name, message);
                let mut table = FieldTable::default();
                for (key, value) in headers {
                    table.insert(key.into(), AMQPValue::LongString(value.into()));
                }
                let options = BasicPublishOptions {
                    mandatory: true,
                    immediate: false,
                };
                let properties = BasicProperties::default().with_delivery_mode(2);
                let (queue, properties) = (self.name.as_str(), properties.with_headers(table));
                let (channel, body) = (&self.channel, message.body.as_bytes());
                let sent =
                    channel.basic_publish("".into(), queue.into(), options, body, properties);
                confirmations.push((message, span, sent.await?));
            }
            for (message, _span, confirmation) in confirmations {
                let confirmation = confirmation.await?;
                if !confirmation.is_ack() || confirmation.take_message().is_some() {
                    left.push(message);
                }
            }
            if left.is_empty() {
                return Ok(());
            } else if begun.elapsed() > START {
                let error = "RabbitMQ refuses messages; is a worker running, which declares";
                return Err(format!("{error} the queue {}?", self.name).into());
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// The names of all messages of the queue with this suffix.
    pub(crate) async fn names(&self, suffix: &str) -> Result<Vec<String>, Error> {
        let queue = format!("{}{suffix}", self.name);
        // Messages that are not acknowledged return to the queue when the channel closes.
        let channel = self.connection.create_channel().await?;
        let get = || channel.basic_get(queue.as_str().into(), BasicGetOptions::default());
        let mut names = Vec::new();
        while let Some(message) = get().await? {
            let headers = message.delivery.properties.headers().as_ref();
            let id = headers.and_then(|it| it.inner().get(ID_HEADER)?.as_long_string());
            names.push(name(id.map(|it| it.as_bytes()), &message.delivery.data));
        }
        channel.close(200, "OK".into()).await?;
        Ok(names)
    }
}
