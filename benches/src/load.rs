//! Fills topics, queues and stores before a measurement.

use std::time::Duration;

use futures_util::future::try_join_all;
use lapin::options::{
    BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate::marker::OperationKind;
use oncegate::{Redis, Store as _};
use oncegate_testkit::servers::RedisServer;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode;
use tokio::runtime::Runtime;

use crate::BenchResult;
use crate::side::{Id, operation};

/// The time limit of a flush, a transaction or a store operation.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(120);
/// The maximum number of messages without a confirmation of RabbitMQ.
const UNCONFIRMED: usize = 2_000;

/// The order of message ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ids {
    /// Ascending, like a sequence or UUIDs of version 7.
    InOrder,
    /// Without order, like UUIDs of version 4.
    Random,
}

impl Ids {
    /// The id of a message: 16 digits.
    pub fn of(self, number: usize) -> String {
        match self {
            Self::InOrder => id(number),
            // Multiplication by an odd number is a bijection, so ids are unique.
            Self::Random => format!(
                "{:016x}",
                (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ),
        }
    }
}

/// The id of a message with ascending ids: 16 digits.
pub fn id(number: usize) -> String {
    format!("{number:016}")
}

/// A topic and its messages.
#[derive(Clone, Debug)]
pub struct BenchTopic {
    /// Its name.
    pub name: String,
    /// The number of partitions.
    pub partitions: i32,
    /// The number of messages in all partitions.
    pub messages: usize,
    /// The size of each body in bytes.
    pub body: usize,
    /// The position of the id.
    pub id: Id,
    /// The order of the ids.
    pub ids: Ids,
}

impl BenchTopic {
    /// Creates the topic, and its dead-letter and in-doubt topics, which oncegate requires.
    ///
    /// # Errors
    /// The error of the broker.
    pub async fn create(&self, brokers: &str) -> BenchResult<()> {
        let admin: AdminClient<_> = ClientConfig::new()
            .set("bootstrap.servers", brokers)
            .create()?;
        let others =
            ["dead-letters", "in-doubt"].map(|suffix| (format!("{}.{suffix}", self.name), 1));
        let all: Vec<_> = [(self.name.clone(), self.partitions)]
            .into_iter()
            .chain(others)
            .collect();
        let new = all.iter().map(|(name, partitions)| {
            NewTopic::new(name, *partitions, TopicReplication::Fixed(1))
                .set("retention.ms", "-1")
                .set("retention.bytes", "-1")
        });
        for created in admin
            .create_topics(&new.collect::<Vec<_>>(), &AdminOptions::new())
            .await?
        {
            created.map_err(|(topic, code)| format!("{topic}: {code}"))?;
        }
        Ok(())
    }

    /// Creates and fills it.
    ///
    /// # Errors
    /// The error of the broker.
    pub async fn fill(&self, brokers: &str) -> BenchResult<()> {
        self.create(brokers).await?;
        self.send_all(&KafkaSender::new(brokers, &self.name, "20")?)
    }

    /// Creates and fills it evenly in a transaction; consumers see the messages after
    /// [`UncommittedTopic::commit`].
    ///
    /// # Errors
    /// The error of the broker.
    pub async fn fill_held_back(&self, brokers: &str) -> BenchResult<UncommittedTopic> {
        self.create(brokers).await?;
        let sender = KafkaSender::in_transaction(brokers, &self.name)?;
        self.send_all(&sender)?;
        Ok(UncommittedTopic(sender))
    }

    fn send_all(&self, sender: &KafkaSender) -> BenchResult<()> {
        let body = vec![b'x'; self.body];
        for number in 0..self.messages {
            match self.id {
                Id::Header => {
                    sender.send_to(number as i32 % self.partitions, &self.ids.of(number), &body)?
                }
                Id::Key => sender.send_keyed(&self.ids.of(number), &body)?,
            }
        }
        sender.0.flush(REQUEST_TIMEOUT)?;
        Ok(())
    }
}

/// A filled topic whose messages are in an open transaction.
pub struct UncommittedTopic(KafkaSender);

impl UncommittedTopic {
    /// Commits the transaction, which makes all messages visible.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn commit(self) -> BenchResult<()> {
        Ok(self.0.0.commit_transaction(REQUEST_TIMEOUT)?)
    }
}

/// Sends to a topic.
pub struct KafkaSender(ThreadedProducer<DefaultProducerContext>, String);

impl KafkaSender {
    /// A producer with this `linger.ms`.
    ///
    /// # Errors
    /// The error of librdkafka.
    pub fn new(brokers: &str, topic: &str, linger: &str) -> BenchResult<Self> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", brokers)
            .set("linger.ms", linger)
            .set("queue.buffering.max.messages", "200000");
        Ok(Self(config.create()?, topic.to_owned()))
    }

    /// A producer that sends all messages in one transaction.
    ///
    /// # Errors
    /// The error of librdkafka.
    fn in_transaction(brokers: &str, topic: &str) -> BenchResult<Self> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", brokers)
            .set("linger.ms", "20")
            .set("queue.buffering.max.messages", "200000");
        config
            .set("transactional.id", topic)
            .set("transaction.timeout.ms", "300000");
        let producer: ThreadedProducer<_> = config.create()?;
        producer.init_transactions(REQUEST_TIMEOUT)?;
        producer.begin_transaction()?;
        Ok(Self(producer, topic.to_owned()))
    }

    /// Sends a message with its id in a header to a partition.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    fn send_to(&self, partition: i32, id: &str, body: &[u8]) -> BenchResult<()> {
        let headers = OwnedHeaders::new().insert(Header {
            key: "id",
            value: Some(id),
        });
        self.send_record(
            BaseRecord::<(), _>::to(&self.1)
                .partition(partition)
                .payload(body)
                .headers(headers),
        )
    }

    /// Sends a message with its id in a header.
    ///
    /// # Errors
    /// The error of librdkafka. Waits while its queue is full.
    pub fn send(&self, id: &str, body: &[u8]) -> BenchResult<()> {
        let headers = OwnedHeaders::new().insert(Header {
            key: "id",
            value: Some(id),
        });
        self.send_record(
            BaseRecord::<(), _>::to(&self.1)
                .payload(body)
                .headers(headers),
        )
    }

    /// Sends a message with its id as the key.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_keyed(&self, id: &str, body: &[u8]) -> BenchResult<()> {
        self.send_record(BaseRecord::to(&self.1).payload(body).key(id))
    }

    fn send_record<K: rdkafka::message::ToBytes + ?Sized>(
        &self,
        mut record: BaseRecord<'_, K, [u8]>,
    ) -> BenchResult<()> {
        loop {
            match self.0.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again)) => {
                    std::thread::sleep(Duration::from_millis(5));
                    record = again;
                }
                Err((error, _)) => return Err(error.into()),
            }
        }
    }
}

/// The type of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchQueueKind {
    /// On one node.
    Classic,
    /// Replicated, here to one node.
    Quorum,
}

impl BenchQueueKind {
    /// The name of the type in RabbitMQ.
    pub fn name(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            Self::Quorum => "quorum",
        }
    }
}

/// A queue and its messages.
#[derive(Clone, Debug)]
pub struct BenchQueue {
    /// Its name.
    pub name: String,
    /// The type.
    pub kind: BenchQueueKind,
    /// The number of messages; their ids are in the property `message_id`.
    pub messages: usize,
    /// The size of each body in bytes.
    pub body: usize,
    /// Whether the messages are persistent.
    pub persistence: MessagePersistence,
}

/// Whether messages are persistent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessagePersistence {
    /// Persistent.
    OnDisk,
    /// Not persistent: a classic queue need not write them to disk.
    InMemory,
}

impl BenchQueue {
    /// Creates and fills it; returns when all messages are confirmed.
    ///
    /// # Errors
    /// The error of the broker.
    pub async fn fill(&self, url: &str) -> BenchResult<()> {
        let (connection, channel) = open(url).await?;
        let mut arguments = FieldTable::default();
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString(self.kind.name().into()),
        );
        let options = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        channel
            .queue_declare(self.name.as_str().into(), options, arguments)
            .await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        let body = vec![b'x'; self.body];
        for first in (0..self.messages).step_by(UNCONFIRMED) {
            let mut sent = Vec::with_capacity(UNCONFIRMED);
            for number in first..self.messages.min(first + UNCONFIRMED) {
                sent.push(
                    publish(&channel, &self.name, self.persistence, &id(number), &body).await?,
                );
            }
            try_join_all(sent).await?;
        }
        connection.close(200, "over".into()).await?;
        Ok(())
    }

    /// Deletes it.
    ///
    /// # Errors
    /// The error of the broker.
    pub async fn delete(&self, url: &str) -> BenchResult<()> {
        let (connection, channel) = open(url).await?;
        channel
            .queue_delete(self.name.as_str().into(), QueueDeleteOptions::default())
            .await?;
        connection.close(200, "over".into()).await?;
        Ok(())
    }
}

async fn open(url: &str) -> BenchResult<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    Ok((connection, channel))
}

async fn publish(
    channel: &Channel,
    queue: &str,
    persistence: MessagePersistence,
    id: &str,
    body: &[u8],
) -> BenchResult<lapin::PublisherConfirm> {
    let mode = match persistence {
        MessagePersistence::OnDisk => 2,
        MessagePersistence::InMemory => 1,
    };
    let properties = BasicProperties::default()
        .with_delivery_mode(mode)
        .with_message_id(id.into());
    Ok(channel
        .basic_publish(
            "".into(),
            queue.into(),
            BasicPublishOptions::default(),
            body,
            properties,
        )
        .await?)
}

/// Sends to a queue from a thread without a runtime.
pub struct RabbitSender {
    runtime: Runtime,
    channel: Channel,
    queue: String,
    _connection: Connection,
}

impl RabbitSender {
    /// Connects.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn open(url: &str, queue: &str) -> BenchResult<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let (connection, channel) = runtime.block_on(open(url))?;
        Ok(Self {
            runtime,
            channel,
            queue: queue.to_owned(),
            _connection: connection,
        })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The error of the broker.
    pub fn send(&mut self, id: &str, body: &[u8]) -> BenchResult<()> {
        self.runtime
            .block_on(publish(
                &self.channel,
                &self.queue,
                MessagePersistence::OnDisk,
                id,
                body,
            ))
            .map(drop)
    }
}

/// Operations per batch.
const BATCH: usize = 256;

/// Writes this many done markers.
///
/// # Errors
/// The error of the store.
pub async fn fill_redis(url: &str, markers: usize) -> BenchResult<()> {
    let store = Redis::at(url).prefix("old:").timeout(REQUEST_TIMEOUT);
    for first in (0..markers).step_by(BATCH) {
        let batch: Vec<_> = (first..markers.min(first + BATCH))
            .map(|number| operation("old", number, OperationKind::Complete))
            .collect();
        for answer in store.apply(&batch).await {
            answer?;
        }
    }
    Ok(())
}

/// Waits until Redis has finished incremental rehashing, which would slow down measured commands.
/// Each command moves a part of the hash table, so this reads existing markers. Needs
/// `enable-debug-command`.
///
/// # Errors
/// The error of the server.
pub async fn finish_redis_rehashing(server: &RedisServer, markers: usize) -> BenchResult<()> {
    let store = Redis::at(server.url())
        .prefix("old:")
        .timeout(REQUEST_TIMEOUT);
    let mut first = 0;
    while server
        .reply("DEBUG HTSTATS 0")?
        .contains("rehashing target")
    {
        for _ in 0..2_000 {
            let batch: Vec<_> = (first..markers.min(first + BATCH))
                .map(|number| operation("old", number, OperationKind::Claim))
                .collect();
            for answer in store.apply(&batch).await {
                answer?;
            }
            first = if first + BATCH < markers {
                first + BATCH
            } else {
                0
            };
        }
    }
    Ok(())
}

/// Removes the markers of the first `messages` messages.
///
/// # Errors
/// The error of the server.
pub async fn clear_redis(url: &str, prefix: &str, messages: usize) -> BenchResult<()> {
    let mut connection = redis::Client::open(url)?
        .get_multiplexed_async_connection()
        .await?;
    for first in (0..messages).step_by(BATCH) {
        let keys: Vec<String> = (first..messages.min(first + BATCH))
            .map(|number| format!("{prefix}{}", id(number)))
            .collect();
        redis::cmd("DEL")
            .arg(keys)
            .query_async::<()>(&mut connection)
            .await?;
    }
    Ok(())
}
