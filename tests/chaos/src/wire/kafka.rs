//! Kafka with rdkafka alone.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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

use super::{ASIDE, Letter};
use crate::ledger::{Log, Place, What};
use crate::message::{ID_HEADER, Outgoing};
use crate::stage::Letters;
use crate::{Error, lock};

const PARTITIONS: i32 = 4;
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the broker may take to say what is committed.
const LOOK: Duration = Duration::from_secs(2);
/// How many messages may wait for their confirmation.
const OUTSTANDING: u32 = 5_000;

/// For how long others are answered, and nothing is confirmed of what was sent, until another
/// producer sends: see [`tend`].
const SILENT: Duration = Duration::from_secs(5);
/// How often that is looked at, and how long a broker may take to answer.
const TURN: Duration = Duration::from_secs(1);

/// A topic, its group of the same name, and a producer.
pub struct Wire {
    brokers: String,
    topic: String,
    sending: Arc<Sending>,
    tending: JoinHandle<()>,
}

/// What sends, and what it waits for.
struct Sending {
    producer: Mutex<FutureProducer>,
    outstanding: Arc<Semaphore>,
    /// When something was confirmed last.
    confirmed: Mutex<Instant>,
}

/// The consumers' group, as a client sees it that is no member.
pub struct Group {
    consumer: BaseConsumer,
    topic: String,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

impl Group {
    /// What is committed, by partition; partitions of which nothing is are left out.
    ///
    /// # Errors
    /// If the broker does not say.
    pub fn committed(&self) -> Result<Vec<(i32, i64)>, Error> {
        let mut all = TopicPartitionList::new();
        all.add_partition_range(&self.topic, 0, PARTITIONS - 1);
        let committed = self.consumer.committed_offsets(all, LOOK)?;
        let offset = |offset: Offset| offset.to_raw().filter(|offset| *offset >= 0);
        Ok(committed
            .elements()
            .iter()
            .filter_map(|it| Some((it.partition(), offset(it.offset())?)))
            .collect())
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

async fn create(admin: &AdminClient<DefaultClientContext>, topic: &str) -> Result<(), Error> {
    let new = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
    for created in admin
        .create_topics(
            [&new],
            &AdminOptions::new().operation_timeout(Some(PATIENCE)),
        )
        .await?
    {
        created
            .map_err(|(topic, error)| format!("the topic {topic} cannot be created: {error}"))?;
    }
    Ok(())
}

impl Wire {
    pub(super) async fn open(brokers: &str, topic: &str) -> Result<Self, Error> {
        create(&config(brokers).create()?, topic).await?;
        let (outstanding, confirmed) = (
            Arc::new(Semaphore::new(OUTSTANDING as usize)),
            Mutex::new(Instant::now()),
        );
        let sending = Arc::new(Sending {
            producer: Mutex::new(producer(brokers)?),
            outstanding,
            confirmed,
        });
        let tending = tokio::spawn(tend(Arc::clone(&sending), brokers.to_owned()));
        Ok(Self {
            brokers: brokers.to_owned(),
            topic: topic.to_owned(),
            sending,
            tending,
        })
    }

    pub(super) async fn publish(
        &self,
        messages: Vec<Outgoing>,
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
                // What was given up is attempted, and no more.
                if let Ok(Ok(_)) = confirmation.await {
                    *lock(&sending.confirmed) = Instant::now();
                    log.write(What::Confirmed { id });
                }
                drop(permit);
            });
        }
        Ok(())
    }

    pub(super) async fn flush(&self) {
        // Never closed, so it is an error only when there is nobody to wait for.
        drop(self.sending.outstanding.acquire_many(OUTSTANDING).await);
    }

    /// None if there is no client for it.
    pub(super) fn group(&self) -> Option<Group> {
        // The consumers' group bears the topic's name.
        let consumer = config(&self.brokers)
            .set("group.id", &self.topic)
            .set("enable.auto.commit", "false")
            .create()
            .ok()?;
        Some(Group {
            consumer,
            topic: self.topic.clone(),
        })
    }

    pub(super) async fn make_anew(&self) -> Result<(), Error> {
        let admin: AdminClient<DefaultClientContext> = config(&self.brokers).create()?;
        for deleted in admin
            .delete_topics(
                &[&self.topic],
                &AdminOptions::new().operation_timeout(Some(PATIENCE)),
            )
            .await?
        {
            deleted.map_err(|(topic, error)| {
                format!("the topic {topic} cannot be deleted: {error}")
            })?;
        }
        create(&admin, &self.topic).await
    }

    pub(super) async fn left(&self) -> Result<u64, Error> {
        self.look(|consumer, topic| {
            let mut all = TopicPartitionList::new();
            all.add_partition_range(topic, 0, PARTITIONS - 1);
            let mut left = 0;
            for partition in consumer.committed_offsets(all, PATIENCE)?.elements() {
                let (low, high) =
                    consumer.fetch_watermarks(topic, partition.partition(), PATIENCE)?;
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

    pub(super) async fn letters(
        &self,
        suffix: &'static str,
        place: Place,
    ) -> Result<Vec<Letter>, Error> {
        self.look(move |consumer, topic| {
            let topic = format!("{topic}{suffix}");
            let (low, high) = match consumer.fetch_watermarks(&topic, 0, PATIENCE) {
                // No consumer has come as far as to make it.
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
            let (mut letters, mut next, until) = (Vec::new(), low, Instant::now() + PATIENCE);
            while next < high {
                if Instant::now() > until {
                    return Err(
                        format!("{topic} was not read to its end within {PATIENCE:?}").into(),
                    );
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
                letters.push(Letter { id, place, reason });
            }
            Ok(letters)
        })
        .await
    }

    /// The client waits without yielding, so it does so elsewhere.
    async fn look<T: Send + 'static>(
        &self,
        ask: impl FnOnce(&BaseConsumer, &str) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let (brokers, topic) = (self.brokers.clone(), self.topic.clone());
        tokio::task::spawn_blocking(move || {
            // The consumers' group bears the topic's name.
            let consumer: BaseConsumer = config(&brokers)
                .set("group.id", &topic)
                .set("enable.auto.commit", "false")
                .create()?;
            ask(&consumer, &topic)
        })
        .await?
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.tending.abort();
    }
}

impl Sending {
    fn producer(&self) -> FutureProducer {
        lock(&self.producer).clone()
    }

    /// Whether something is to be confirmed, and nothing has been for a while.
    fn is_silent(&self) -> bool {
        self.outstanding.available_permits() < OUTSTANDING as usize
            && lock(&self.confirmed).elapsed() >= SILENT
    }
}

fn producer(brokers: &str) -> Result<FutureProducer, Error> {
    let producer = config(brokers)
        .set("enable.idempotence", "true")
        .set("linger.ms", "5")
        .set("message.timeout.ms", "120000")
        .set("reconnect.backoff.max.ms", "1000")
        // What has no key goes everywhere, so that copies meet different consumers.
        .set("sticky.partitioning.linger.ms", "0")
        .create()?;
    Ok(producer)
}

/// A producer, too, may forget its broker after that stood still. What it has not sent by then is
/// given up, and another one sends what follows: else a run would wait for its own messages.
async fn tend(sending: Arc<Sending>, brokers: String) {
    let mut answered: Option<Instant> = None;
    loop {
        tokio::time::sleep(TURN).await;
        if !sending.is_silent() || !does_answer(brokers.clone()).await {
            answered = None;
            continue;
        }
        if answered.get_or_insert_with(Instant::now).elapsed() < SILENT {
            continue;
        }
        answered = None;
        let Ok(another) = producer(&brokers) else {
            continue;
        };
        eprintln!("chaos: the producer has forgotten its broker, and another one takes its place");
        let before = std::mem::replace(&mut *lock(&sending.producer), another);
        // It joins its thread.
        tokio::task::spawn_blocking(move || drop(before));
    }
}

async fn does_answer(brokers: String) -> bool {
    let asked = tokio::task::spawn_blocking(move || {
        let consumer: BaseConsumer = config(&brokers).create().ok()?;
        Some(
            !consumer
                .fetch_metadata(None, TURN)
                .ok()?
                .brokers()
                .is_empty(),
        )
    });
    asked.await.ok().flatten().unwrap_or(false)
}

/// Lets a topic's dead letters and in-doubt messages be refused, or taken again: there is one
/// replica, and two are asked for.
pub(crate) fn refuse_letters(brokers: &str, topic: &str, letters: Letters) -> Result<(), Error> {
    let replicas = if letters == Letters::Refused {
        "2"
    } else {
        "1"
    };
    let names = ASIDE.map(|(suffix, _)| format!("{topic}{suffix}"));
    // All that is not named goes back to its default.
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
        &AdminOptions::new().request_timeout(Some(PATIENCE)),
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
