//! Kafka by rdkafka.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate::internal::Lock;
use oncegate::source::headers;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::{DESTINATION_SUFFIXES, RejectedMessage};
use crate::Error;
use crate::ledger::{Log, RejectedTo, What};
use crate::message::{ID_HEADER, OutgoingMessage};
use crate::servers::RejectedWrites;

const PARTITIONS: i32 = 4;
/// The timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of a request for committed offsets.
const OFFSETS_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum number of unconfirmed messages.
const OUTSTANDING: u32 = 5_000;

/// How long the producer may get no confirmation, while the broker replies to other clients, until
/// it is replaced: see [`replace_stalled_producer`].
const MAX_CONFIRM_DELAY: Duration = Duration::from_secs(5);
/// The interval of that check, and the timeout of its request.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A topic, its group of the same name, and a producer.
pub struct KafkaClient {
    brokers: String,
    topic: String,
    sending: Arc<Sending>,
    watchdog: JoinHandle<()>,
}

/// The producer and its unconfirmed messages.
struct Sending {
    producer: Lock<FutureProducer>,
    outstanding: Arc<Semaphore>,
    /// The time of the last confirmation.
    confirmed: Lock<Instant>,
}

/// Reads the committed offsets of the consumer group without joining it.
pub struct GroupOffsets {
    consumer: BaseConsumer,
    topic: String,
}

impl fmt::Debug for GroupOffsets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GroupOffsets")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

impl GroupOffsets {
    /// The committed offsets by partition; omits partitions without one.
    ///
    /// # Errors
    /// The broker does not reply.
    pub fn committed(&self) -> Result<Vec<(i32, i64)>, Error> {
        let mut all = TopicPartitionList::new();
        all.add_partition_range(&self.topic, 0, PARTITIONS - 1);
        let committed = self.consumer.committed_offsets(all, OFFSETS_TIMEOUT)?;
        let offset = |offset: Offset| offset.to_raw().filter(|offset| *offset >= 0);
        Ok(committed
            .elements()
            .iter()
            .filter_map(|it| Some((it.partition(), offset(it.offset())?)))
            .collect())
    }
}

impl fmt::Debug for KafkaClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaClient")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

async fn create(admin: &AdminClient<DefaultClientContext>, topic: &str) -> Result<(), Error> {
    let new = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
    for created in admin
        .create_topics(
            [&new],
            &AdminOptions::new().operation_timeout(Some(REQUEST_TIMEOUT)),
        )
        .await?
    {
        created
            .map_err(|(topic, error)| format!("the topic {topic} cannot be created: {error}"))?;
    }
    Ok(())
}

impl KafkaClient {
    pub(super) async fn open(brokers: &str, topic: &str) -> Result<Self, Error> {
        create(&config(brokers).create()?, topic).await?;
        let (outstanding, confirmed) = (
            Arc::new(Semaphore::new(OUTSTANDING as usize)),
            Lock::new(Instant::now()),
        );
        let sending = Arc::new(Sending {
            producer: Lock::new(producer(brokers)?),
            outstanding,
            confirmed,
        });
        let watchdog = tokio::spawn(replace_stalled_producer(
            Arc::clone(&sending),
            brokers.to_owned(),
        ));
        Ok(Self {
            brokers: brokers.to_owned(),
            topic: topic.to_owned(),
            sending,
            watchdog,
        })
    }

    pub(super) async fn publish(
        &self,
        messages: Vec<OutgoingMessage>,
        log: &Arc<Log>,
    ) -> Result<(), Error> {
        for message in messages {
            let sending = Arc::clone(&self.sending);
            let permit = Arc::clone(&sending.outstanding).acquire_owned().await?;
            log.write(What::Attempted {
                id: message.id.clone(),
            });
            let headers = OwnedHeaders::new().insert(Header {
                key: ID_HEADER,
                value: Some(&message.id),
            });
            let mut record = FutureRecord::<str, str>::to(&self.topic)
                .payload(&message.body)
                .headers(headers);
            if let Some(key) = &message.key {
                record = record.key(key);
            }
            let confirmation = sending
                .producer()
                .send_result(record)
                .map_err(|(error, _)| error)?;
            let (id, log) = (message.id.clone(), Arc::clone(log));
            tokio::spawn(async move {
                // A message that failed has no confirmation in the ledger.
                if let Ok(Ok(_)) = confirmation.await {
                    *sending.confirmed.lock() = Instant::now();
                    log.write(What::Confirmed { id });
                }
                drop(permit);
            });
        }
        Ok(())
    }

    pub(super) async fn flush(&self) {
        // The semaphore is never closed, so this cannot fail.
        drop(self.sending.outstanding.acquire_many(OUTSTANDING).await);
    }

    /// None if the client cannot be created.
    pub(super) fn group(&self) -> Option<GroupOffsets> {
        // The consumer group has the name of the topic.
        let consumer = config(&self.brokers)
            .set("group.id", &self.topic)
            .set("enable.auto.commit", "false")
            .create()
            .ok()?;
        Some(GroupOffsets {
            consumer,
            topic: self.topic.clone(),
        })
    }

    pub(super) async fn recreate_topic(&self) -> Result<(), Error> {
        let admin: AdminClient<DefaultClientContext> = config(&self.brokers).create()?;
        for deleted in admin
            .delete_topics(
                &[&self.topic],
                &AdminOptions::new().operation_timeout(Some(REQUEST_TIMEOUT)),
            )
            .await?
        {
            deleted.map_err(|(topic, error)| {
                format!("the topic {topic} cannot be deleted: {error}")
            })?;
        }
        create(&admin, &self.topic).await
    }

    pub(super) async fn unsettled(&self) -> Result<u64, Error> {
        self.blocking_request(|consumer, topic| {
            let mut all = TopicPartitionList::new();
            all.add_partition_range(topic, 0, PARTITIONS - 1);
            let mut left = 0;
            for partition in consumer.committed_offsets(all, REQUEST_TIMEOUT)?.elements() {
                let (low, high) =
                    consumer.fetch_watermarks(topic, partition.partition(), REQUEST_TIMEOUT)?;
                let next = partition
                    .offset()
                    .to_raw()
                    .filter(|offset| *offset >= 0)
                    .unwrap_or(low);
                left += u64::try_from(high - next).unwrap_or_default();
            }
            Ok(left)
        })
        .await
    }

    pub(super) async fn rejected_in(
        &self,
        suffix: &'static str,
        place: RejectedTo,
    ) -> Result<Vec<RejectedMessage>, Error> {
        self.blocking_request(move |consumer, topic| {
            let topic = format!("{topic}{suffix}");
            let (low, high) = match consumer.fetch_watermarks(&topic, 0, REQUEST_TIMEOUT) {
                // No consumer has created it yet.
                Err(KafkaError::MetadataFetch(
                    RDKafkaErrorCode::UnknownPartition | RDKafkaErrorCode::UnknownTopicOrPartition,
                )) => {
                    return Ok(Vec::new());
                }
                watermarks => watermarks?,
            };
            let mut all = TopicPartitionList::new();
            all.add_partition_offset(&topic, 0, Offset::Offset(low))?;
            consumer.assign(&all)?;
            let (mut rejected, mut next, until) =
                (Vec::new(), low, Instant::now() + REQUEST_TIMEOUT);
            while next < high {
                if Instant::now() > until {
                    return Err(format!(
                        "{topic} was not read to its end within {REQUEST_TIMEOUT:?}"
                    )
                    .into());
                }
                let Some(message) = consumer.poll(Duration::from_millis(200)) else {
                    continue;
                };
                let message = message?;
                next = message.offset() + 1;
                let header = |name: &str| {
                    let value = message
                        .headers()?
                        .iter()
                        .filter(|it| it.key == name)
                        .last()?
                        .value?;
                    Some(String::from_utf8_lossy(value).into_owned())
                };
                let (id, reason) = (
                    header(ID_HEADER).unwrap_or_default(),
                    header(headers::REASON).unwrap_or_default(),
                );
                rejected.push(RejectedMessage { id, place, reason });
            }
            Ok(rejected)
        })
        .await
    }

    /// Runs a blocking request on another thread.
    async fn blocking_request<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&BaseConsumer, &str) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (brokers, topic) = (self.brokers.clone(), self.topic.clone());
        tokio::task::spawn_blocking(move || {
            // The consumer group has the name of the topic.
            let consumer: BaseConsumer = config(&brokers)
                .set("group.id", &topic)
                .set("enable.auto.commit", "false")
                .create()?;
            ask(&consumer, &topic)
        })
        .await?
    }
}

impl Drop for KafkaClient {
    fn drop(&mut self) {
        self.watchdog.abort();
    }
}

impl Sending {
    fn producer(&self) -> FutureProducer {
        self.producer.lock().clone()
    }

    /// Whether messages are unconfirmed and none was confirmed for [`MAX_CONFIRM_DELAY`].
    fn is_stalled(&self) -> bool {
        self.outstanding.available_permits() < OUTSTANDING as usize
            && self.confirmed.lock().elapsed() >= MAX_CONFIRM_DELAY
    }
}

fn producer(brokers: &str) -> Result<FutureProducer, Error> {
    let producer = config(brokers)
        .set("enable.idempotence", "true")
        .set("linger.ms", "5")
        .set("message.timeout.ms", "120000")
        .set("reconnect.backoff.max.ms", "1000")
        // Spreads messages without a key over all partitions, so that copies reach different
        // consumers.
        .set("sticky.partitioning.linger.ms", "0")
        .create()?;
    Ok(producer)
}

/// Replaces a producer that lost the broker's metadata after a freeze of Kafka; its unsent messages
/// fail. Otherwise the run would wait for them.
async fn replace_stalled_producer(sending: Arc<Sending>, brokers: String) {
    let mut answered: Option<Instant> = None;
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        if !sending.is_stalled() || !broker_replies(brokers.clone()).await {
            answered = None;
            continue;
        }
        if answered.get_or_insert_with(Instant::now).elapsed() < MAX_CONFIRM_DELAY {
            continue;
        }
        answered = None;
        let Ok(another) = producer(&brokers) else {
            continue;
        };
        eprintln!(
            "chaos: the producer got no confirmation although the broker replies; replacing it"
        );
        let before = std::mem::replace(&mut *sending.producer.lock(), another);
        // Dropping a producer blocks until its thread has ended.
        tokio::task::spawn_blocking(move || drop(before));
    }
}

async fn broker_replies(brokers: String) -> bool {
    let asked = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = config(&brokers).create().ok()?;
        Some(
            !consumer
                .fetch_metadata(None, CHECK_INTERVAL)
                .ok()?
                .brokers()
                .is_empty(),
        )
    });
    asked.await.ok().flatten().unwrap_or(false)
}

/// Makes Kafka refuse or accept writes to the dead-letter and in-doubt topics: it refuses them if
/// two in-sync replicas are required, since there is only one.
pub(crate) fn set_rejected_writes(
    brokers: &str,
    topic: &str,
    writes: RejectedWrites,
) -> Result<(), Error> {
    let replicas = if writes == RejectedWrites::Refused {
        "2"
    } else {
        "1"
    };
    let names = DESTINATION_SUFFIXES.map(|(suffix, _)| format!("{topic}{suffix}"));
    // `alter_configs` resets all other settings to their defaults.
    let set = |name| {
        let config =
            AlterConfig::new(ResourceSpecifier::Topic(name)).set("min.insync.replicas", replicas);
        config
            .set("retention.ms", "-1")
            .set("retention.bytes", "-1")
    };
    let configs: Vec<AlterConfig<'_>> = names.iter().map(|name| set(name.as_str())).collect();
    let admin: AdminClient<DefaultClientContext> = config(brokers).create()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let answers = runtime.block_on(admin.alter_configs(
        &configs,
        &AdminOptions::new().request_timeout(Some(REQUEST_TIMEOUT)),
    ))?;
    for answer in answers {
        answer.map_err(|(resource, error)| format!("{resource:?} cannot be set: {error}"))?;
    }
    Ok(())
}

fn config(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("log_level", "2");
    config
}
