//! Letters on Kafka: read by assignment, so that no group is joined and no offset moves.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use oncegate::IdSource;
use oncegate::source::headers;
use rdkafka::config::FromClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::mpsc;

use super::{Begins, Broker, Done, Letter, Shelf, State, Unsent, begins_without};
use crate::Context;
use crate::audit::Place;
use crate::config::Config;
use crate::failure::Failure;

/// How long one question to the broker may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How many letters are read ahead of who goes through them.
const AHEAD: usize = 64;

/// A client of the brokers that are configured, made as the consumer makes its own, with these
/// settings over them.
pub(crate) fn client<C: FromClientConfig>(
    config: &Config,
    settings: &[(&str, &str)],
) -> Result<C, Failure> {
    let settings = [&[("client.id", "oncegate-cli")], settings].concat();
    let client = config.kafka()?.client(&settings);
    client.map_err(|error| {
        oncegate_config::Error::of_source(oncegate_config::Broker::Kafka, error).into()
    })
}

/// The topic that is consumed.
pub(crate) fn topic(config: &Config) -> Result<String, Failure> {
    let topic = config.text("kafka.topic").map(str::to_owned);
    topic.ok_or_else(|| Failure::usage("no topic: set kafka.topic, or ONCEGATE_KAFKA_TOPIC"))
}

pub(crate) fn destination(config: &Config, shelf: Shelf) -> Result<String, Failure> {
    let topic = topic(config)?;
    let (named, suffix) = match shelf {
        Shelf::DeadLetters => (config.text("kafka.dead-letters"), "dead-letters"),
        Shelf::InDoubt => (config.text("kafka.in-doubt"), "in-doubt"),
    };
    Ok(named.map_or_else(|| format!("{topic}.{suffix}"), str::to_owned))
}

/// A consumer that belongs to no group: the name stands for nothing, since nothing is subscribed to
/// or committed.
pub(crate) fn consumer(config: &Config) -> Result<BaseConsumer, Failure> {
    let settings = [
        ("group.id", "oncegate-cli"),
        ("enable.auto.commit", "false"),
        ("enable.auto.offset.store", "false"),
        ("enable.partition.eof", "true"),
        ("auto.offset.reset", "earliest"),
    ];
    client(config, &settings)
}

/// A copy counts once all in-sync replicas have it.
const PRODUCER: [(&str, &str); 5] = [
    ("enable.idempotence", "true"),
    ("acks", "all"),
    ("linger.ms", "0"),
    ("message.timeout.ms", "30000"),
    // Which size is too large is for the broker to say; this is the most that librdkafka allows.
    ("message.max.bytes", "1000000000"),
];

/// Goes through one topic.
pub(crate) struct Reader {
    pub(crate) total: u64,
    pub(crate) target: String,
    letters: mpsc::Receiver<Result<Letter, Failure>>,
    config: Config,
    publisher: Option<FutureProducer>,
    done: Done,
}

impl Reader {
    pub(crate) async fn open(context: &Context, shelf: Shelf, done: Done) -> Result<Self, Failure> {
        Self::of(context, destination(&context.config, shelf)?, done).await
    }

    /// Goes through a topic of any name.
    pub(crate) async fn of(context: &Context, name: String, done: Done) -> Result<Self, Failure> {
        let config = &context.config;
        let (consumer, ids) = (consumer(config)?, config.id_source()?);
        let (told, told_of) = tokio::sync::oneshot::channel();
        let (hand_over, letters) = mpsc::channel(AHEAD);
        tokio::task::spawn_blocking(move || {
            let begun = begin(&consumer, &name);
            let (total, unread) = match begun {
                Ok((total, unread)) => (Ok(total), unread),
                Err(failure) => (Err(failure), HashSet::new()),
            };
            if told.send(total).is_ok() {
                read(&consumer, unread, ids.as_ref(), &hand_over);
            }
        });
        let total = told_of
            .await
            .map_err(|_| Failure::server("Kafka: the reader ended"))??;
        Ok(Self {
            total,
            target: topic(config)?,
            letters,
            config: config.clone(),
            publisher: None,
            done,
        })
    }

    pub(crate) async fn next(&mut self) -> Result<Option<Letter>, Failure> {
        let Some(letter) = self.letters.recv().await else {
            return Ok(None);
        };
        let mut letter = letter?;
        // Nothing in the topic that is consumed is a dead letter.
        if letter.place.name == self.target {
            letter.remove_reserved_headers();
        }
        letter.state = self.done.state(&letter);
        letter.elsewhere = letter
            .header(headers::ORIGIN)
            .map(topic_of)
            .filter(|name| *name != self.target)
            .map(str::to_owned);
        Ok(Some(letter))
    }

    pub(crate) async fn publish(&mut self, letter: &Letter, begins: Begins) -> Result<(), Unsent> {
        let publisher = match &self.publisher {
            Some(publisher) => publisher,
            None => self
                .publisher
                .insert(client(&self.config, &PRODUCER).map_err(Unsent::Refused)?),
        };
        let mut written = OwnedHeaders::new();
        for (name, value) in letter
            .raw_headers
            .iter()
            .filter(|(name, _)| !begins_without(name))
        {
            written = written.insert(Header {
                key: name,
                value: value.as_ref(),
            });
        }
        if let Some(first_seen) = begins.first_seen() {
            written = written.insert(Header {
                key: headers::FIRST_SEEN,
                value: Some(&first_seen),
            });
        }
        // Where it was, so that what has its key is in the same partition, whichever way its
        // producer chose one.
        let partition = letter
            .header(headers::ORIGIN)
            .and_then(|origin| partition_of(origin, &self.target));
        let record = |partition| FutureRecord::<[u8], [u8]> {
            topic: &self.target,
            partition,
            payload: letter.body.as_deref(),
            key: letter.key.as_deref(),
            timestamp: None,
            headers: Some(written.clone()),
        };
        let sent = match publisher.send(record(partition), PATIENCE).await {
            // The topic has fewer partitions by now.
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::UnknownPartition), _))
                if partition.is_some() =>
            {
                publisher.send(record(None), PATIENCE).await
            }
            sent => sent,
        };
        sent.map(drop)
            .map_err(|(error, _)| unsent(&error, &self.target))
    }
}

/// What an error says of a copy.
fn unsent(error: &KafkaError, target: &str) -> Unsent {
    use RDKafkaErrorCode::{
        InvalidTopic, MessageSizeTooLarge, PolicyViolation, QueueFull, TopicAuthorizationFailed,
        UnknownPartition, UnknownTopic, UnknownTopicOrPartition,
    };
    let says = format!("Kafka: {target} does not take the copy: {error}");
    match error {
        // The next one may be smaller.
        KafkaError::MessageProduction(MessageSizeTooLarge) => {
            Unsent::Refused(Failure::not_all(format!("left: {says}")))
        }
        KafkaError::MessageProduction(
            InvalidTopic
            | PolicyViolation
            | QueueFull
            | TopicAuthorizationFailed
            | UnknownPartition
            | UnknownTopic
            | UnknownTopicOrPartition,
        ) => Unsent::Refused(Failure::server(says)),
        _ => Unsent::Unknown(Failure::server(says)),
    }
}

/// The topic in `topic/partition/offset`.
fn topic_of(origin: &str) -> &str {
    origin.rsplitn(3, '/').nth(2).unwrap_or(origin)
}

/// `topic/partition/offset`, if it is this topic.
fn partition_of(origin: &str, topic: &str) -> Option<i32> {
    let (rest, _) = origin.rsplit_once('/')?;
    let (name, partition) = rest.rsplit_once('/')?;
    (name == topic).then(|| partition.parse().ok()).flatten()
}

/// Assigns all partitions from their beginning. Says how many offsets there are up to their ends,
/// and which partitions have any.
fn begin(consumer: &BaseConsumer, topic: &str) -> Result<(u64, HashSet<(i32, i64)>), Failure> {
    let partitions = partitions(consumer, topic)?;
    let (mut total, mut unread, mut assigned) = (0, HashSet::new(), TopicPartitionList::new());
    for partition in partitions {
        let (low, high) = consumer.fetch_watermarks(topic, partition, PATIENCE)?;
        if high > low {
            total += u64::try_from(high - low).unwrap_or(0);
            unread.insert((partition, high));
            assigned.add_partition_offset(topic, partition, Offset::Offset(low))?;
        }
    }
    consumer.assign(&assigned)?;
    Ok((total, unread))
}

/// The partitions of a topic.
///
/// # Errors
/// It does not exist, or nobody answers.
pub(crate) fn partitions(consumer: &BaseConsumer, topic: &str) -> Result<Vec<i32>, Failure> {
    let metadata = consumer
        .fetch_metadata(Some(topic), PATIENCE)
        .map_err(|error| Failure::server(format!("Kafka does not answer: {error}")))?;
    let found = metadata.topics().first();
    match found.map(|topic| topic.error().map(RDKafkaErrorCode::from)) {
        Some(None) => Ok(found
            .map(|topic| topic.partitions().iter().map(|it| it.id()).collect())
            .unwrap_or_default()),
        Some(Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic))
        | None => Err(Failure::server(format!(
            "Kafka: the topic `{topic}` does not exist"
        ))),
        Some(Some(code)) => Err(Failure::server(format!(
            "Kafka: the topic `{topic}`: {code}"
        ))),
    }
}

/// Reads each partition to the end that it had when the reading began.
fn read(
    consumer: &BaseConsumer,
    mut unread: HashSet<(i32, i64)>,
    ids: Option<&IdSource>,
    hand_over: &mpsc::Sender<Result<Letter, Failure>>,
) {
    let mut last = Instant::now();
    while !unread.is_empty() {
        let letter = match consumer.poll(Duration::from_millis(200)) {
            None if last.elapsed() < PATIENCE * 3 => continue,
            None => Err(Failure::server(
                "Kafka says nothing more; not all of the topic was read",
            )),
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                unread.retain(|(it, _)| *it != partition);
                last = Instant::now();
                continue;
            }
            // The client connects again by itself.
            Some(Err(_)) if last.elapsed() < PATIENCE * 3 => continue,
            Some(Err(error)) => Err(error.into()),
            Some(Ok(message)) => {
                let (partition, next) = (message.partition(), message.offset() + 1);
                let end = unread
                    .iter()
                    .find(|(it, _)| *it == partition)
                    .map(|(_, end)| *end);
                let Some(end) = end else { continue };
                if next >= end {
                    unread.remove(&(partition, end));
                }
                // Gaps may let the first one at or after the end be a later one.
                if next > end {
                    continue;
                }
                last = Instant::now();
                Ok(letter(&message, ids))
            }
        };
        let failed = letter.is_err();
        // Who goes through them has seen enough.
        if hand_over.blocking_send(letter).is_err() || failed {
            return;
        }
    }
}

fn letter(message: &BorrowedMessage<'_>, ids: Option<&IdSource>) -> Letter {
    let (mut raw_headers, mut unnamed) = (Vec::new(), 0);
    if let Some(headers) = message.headers() {
        // A name that is not UTF-8 makes the iterator panic.
        for at in 0..headers.count() {
            let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let header = headers.get(at);
                (header.key.to_owned(), header.value.map(<[u8]>::to_vec))
            }));
            match read {
                Ok(header) => raw_headers.push(header),
                Err(_) => unnamed += 1,
            }
        }
    }
    let text = |value: &Option<Vec<u8>>| {
        String::from_utf8_lossy(value.as_deref().unwrap_or_default()).into_owned()
    };
    let written_ms = message
        .timestamp()
        .to_millis()
        .and_then(|ms| u64::try_from(ms).ok());
    let mut letter = Letter {
        place: Place {
            broker: Broker::Kafka.name().to_owned(),
            name: message.topic().to_owned(),
            partition: Some(message.partition()),
            offset: Some(message.offset()),
            written_ms,
        },
        state: State::Waiting,
        headers: raw_headers
            .iter()
            .map(|(name, value)| (name.clone(), text(value)))
            .collect(),
        key: message.key().map(<[u8]>::to_vec),
        body: message.payload().map(<[u8]>::to_vec),
        sent_ms: None,
        set_aside_ms: written_ms,
        elsewhere: None,
        lacks: (unnamed > 0)
            .then(|| format!("{unnamed} of its headers have names that are no text")),
        #[cfg(feature = "rabbitmq")]
        delivery: None,
        raw_headers,
        looks: None,
        read_id: None,
    };
    letter.read_id = ids
        .and_then(|ids| ids.read(&as_message(&letter)).ok())
        .map(|id| id.to_string());
    letter
}

/// As a consumer would read it.
fn as_message(letter: &Letter) -> oncegate::Message {
    let mut message = oncegate::Message::new(letter.bytes().to_vec());
    for (name, value) in &letter.raw_headers {
        message = message.with_header(name, value.clone().unwrap_or_default());
    }
    if let Some(key) = &letter.key {
        message = message.with_key(key.clone());
    }
    if let (Some(partition), Some(offset)) = (letter.place.partition, letter.place.offset) {
        let position = oncegate::Position::Offset { partition, offset };
        message.origin = oncegate::Origin {
            name: letter.place.name.as_str().into(),
            position,
            system: Some("kafka"),
        };
    }
    message
}
