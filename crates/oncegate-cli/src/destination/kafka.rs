//! Reads a dead-letter, in-doubt or consumed topic with manually assigned partitions: joins no
//! group and commits no offset. Publishes copies of its records to the consumed topic.

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

use super::{
    AuditedStates, Broker, CopyAge, DeadLetter, DeadLetterState, Destination, PublishError,
    is_omitted_from_copies,
};
use crate::CliContext;
use crate::audit::MessageLocation;
use crate::config::Config;
use crate::error::CliError;

/// The time limit of a request for metadata or watermarks.
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for the next record before the command fails.
const RECORD_TIMEOUT: Duration = Duration::from_secs(30);

/// How long to wait for space in the producer's local queue. The time to deliver a queued record is
/// limited by `message.timeout.ms`.
const PRODUCER_QUEUE_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum number of records that are read before the command asks for them.
const READ_AHEAD: usize = 64;

/// A client with the configuration of the consumer and these additional settings.
pub(crate) fn client<C: FromClientConfig>(
    config: &Config,
    settings: &[(&str, &str)],
) -> Result<C, CliError> {
    let settings = [&[("client.id", "oncegate-cli")], settings].concat();
    let client = config.kafka()?.client(&settings);
    client.map_err(|error| {
        oncegate_config::Error::of_source(oncegate_config::Broker::Kafka, error).into()
    })
}

/// The consumed topic.
pub(crate) fn topic(config: &Config) -> Result<String, CliError> {
    let topic = config.text("kafka.topic").map(str::to_owned);
    topic.ok_or_else(|| CliError::usage("no topic: set kafka.topic, or ONCEGATE_KAFKA_TOPIC"))
}

pub(crate) fn destination_topic(
    config: &Config,
    destination: Destination,
) -> Result<String, CliError> {
    Ok(destination.topic_or_queue(config, "kafka", &topic(config)?))
}

/// A consumer that subscribes to nothing and commits nothing, so it joins no group. librdkafka
/// requires a `group.id` nevertheless.
pub(crate) fn consumer(config: &Config) -> Result<BaseConsumer, CliError> {
    let settings = [
        ("group.id", "oncegate-cli"),
        ("enable.auto.commit", "false"),
        ("enable.auto.offset.store", "false"),
        ("enable.partition.eof", "true"),
        ("auto.offset.reset", "earliest"),
    ];
    client(config, &settings)
}

/// The settings of the producer of copies. A copy is confirmed when all in-sync replicas have it,
/// or fails after 30 seconds.
const PRODUCER_SETTINGS: [(&str, &str); 5] = [
    ("enable.idempotence", "true"),
    ("acks", "all"),
    ("linger.ms", "0"),
    ("message.timeout.ms", "30000"),
    // The highest value that librdkafka accepts, so that only the limit of the broker applies.
    ("message.max.bytes", "1000000000"),
];

/// Reads one topic.
pub(crate) struct TopicReader {
    /// The sum of the offset ranges of all partitions at open, an upper bound on the number of
    /// records.
    pub(crate) total: u64,
    /// The consumed topic, to which messages are redriven.
    pub(crate) source_topic: String,
    dead_letters: mpsc::Receiver<Result<DeadLetter, CliError>>,
    config: Config,
    producer: Option<FutureProducer>,
    /// The state of each message according to the audit.
    audited_states: AuditedStates,
}

impl TopicReader {
    pub(crate) async fn open(
        context: &CliContext,
        destination: Destination,
        audited_states: AuditedStates,
    ) -> Result<Self, CliError> {
        Self::open_topic(
            context,
            destination_topic(&context.config, destination)?,
            audited_states,
        )
        .await
    }

    /// Opens a topic by name, which is a destination or the consumed topic, and starts to read it
    /// on a blocking thread.
    ///
    /// # Errors
    /// The topic does not exist, or the broker does not answer.
    pub(crate) async fn open_topic(
        context: &CliContext,
        name: String,
        audited_states: AuditedStates,
    ) -> Result<Self, CliError> {
        let config = &context.config;
        let (consumer, id_source) = (consumer(config)?, config.id_source()?);
        let brokers = config.text("kafka.brokers").unwrap_or_default().to_owned();
        let (total_tx, total_rx) = tokio::sync::oneshot::channel();
        let (dead_letters_tx, dead_letters) = mpsc::channel(READ_AHEAD);
        tokio::task::spawn_blocking(move || {
            let assignment = assign_from_start(&consumer, &brokers, &name);
            let (total, unread) = match assignment {
                Ok((total, unread)) => (Ok(total), unread),
                Err(failure) => (Err(failure), HashSet::new()),
            };
            if total_tx.send(total).is_ok() {
                read(&consumer, unread, id_source.as_ref(), &dead_letters_tx);
            }
        });
        let total = total_rx.await.map_err(|_| {
            CliError::server(
                "bug in oncegate: the thread that reads the topic panicked; report this",
            )
        })??;
        Ok(Self {
            total,
            source_topic: topic(config)?,
            dead_letters,
            config: config.clone(),
            producer: None,
            audited_states,
        })
    }

    pub(crate) async fn next(&mut self) -> Result<Option<DeadLetter>, CliError> {
        let Some(dead_letter) = self.dead_letters.recv().await else {
            return Ok(None);
        };
        let mut dead_letter = dead_letter?;
        // Producers write the records of the consumed topic, and may forge reserved headers.
        if dead_letter.location.name == self.source_topic {
            dead_letter.remove_reserved_headers();
        }
        dead_letter.state = self.audited_states.state(&dead_letter);
        dead_letter.other_source = dead_letter
            .header(headers::ORIGIN)
            .map(topic_of)
            .filter(|name| *name != self.source_topic)
            .map(str::to_owned);
        Ok(Some(dead_letter))
    }

    pub(crate) async fn publish(
        &mut self,
        dead_letter: &DeadLetter,
        age: CopyAge,
    ) -> Result<(), PublishError> {
        let producer = match &self.producer {
            Some(producer) => producer,
            None => self
                .producer
                .insert(client(&self.config, &PRODUCER_SETTINGS).map_err(PublishError::Refused)?),
        };
        let mut written = OwnedHeaders::new();
        for (name, value) in dead_letter
            .raw_headers
            .iter()
            .filter(|(name, _)| !is_omitted_from_copies(name))
        {
            written = written.insert(Header {
                key: name,
                value: value.as_ref(),
            });
        }
        if let Some(first_seen) = age.first_seen_header() {
            written = written.insert(Header {
                key: headers::FIRST_SEEN,
                value: Some(&first_seen),
            });
        }
        // The original partition, so that records of one key stay in one partition whatever
        // partitioner the original producer used.
        let partition = dead_letter
            .header(headers::ORIGIN)
            .and_then(|origin| partition_of(origin, &self.source_topic));
        let record = |partition| FutureRecord::<[u8], [u8]> {
            topic: &self.source_topic,
            partition,
            payload: dead_letter.body.as_deref(),
            key: dead_letter.key.as_deref(),
            timestamp: None,
            headers: Some(written.clone()),
        };
        let sent = match producer
            .send(record(partition), PRODUCER_QUEUE_TIMEOUT)
            .await
        {
            // The topic was recreated with fewer partitions.
            Err((KafkaError::MessageProduction(RDKafkaErrorCode::UnknownPartition), _))
                if partition.is_some() =>
            {
                producer.send(record(None), PRODUCER_QUEUE_TIMEOUT).await
            }
            sent => sent,
        };
        sent.map(drop)
            .map_err(|(error, _)| publish_error(&error, &self.source_topic))
    }
}

/// Converts the error of a copy: `Refused` if the error proves that no copy was written, else
/// `Unconfirmed`.
fn publish_error(error: &KafkaError, topic: &str) -> PublishError {
    use RDKafkaErrorCode::{
        InvalidTopic, MessageSizeTooLarge, PolicyViolation, QueueFull, TopicAuthorizationFailed,
        UnknownPartition, UnknownTopic, UnknownTopicOrPartition,
    };
    let text = format!("Kafka: the copy for `{topic}` was not confirmed: {error}");
    match error {
        // The next record may be smaller.
        KafkaError::MessageProduction(MessageSizeTooLarge) => {
            PublishError::Refused(CliError::incomplete(format!(
                "skipped: the copy is too large for the topic `{topic}`; raise its max.message.bytes"
            )))
        }
        KafkaError::MessageProduction(
            InvalidTopic
            | PolicyViolation
            | QueueFull
            | TopicAuthorizationFailed
            | UnknownPartition
            | UnknownTopic
            | UnknownTopicOrPartition,
        ) => PublishError::Refused(CliError::server(text)),
        _ => PublishError::Unconfirmed(CliError::server(text)),
    }
}

/// The topic in `topic/partition/offset`.
fn topic_of(origin: &str) -> &str {
    origin.rsplitn(3, '/').nth(2).unwrap_or(origin)
}

/// The partition in `topic/partition/offset`, if it names this topic.
fn partition_of(origin: &str, topic: &str) -> Option<i32> {
    let (topic_partition, _) = origin.rsplit_once('/')?;
    let (name, partition) = topic_partition.rsplit_once('/')?;
    (name == topic).then(|| partition.parse().ok()).flatten()
}

/// Assigns all partitions that have records, from their log start offsets. Returns the number of
/// offsets in all of them, and the id and end offset of each.
fn assign_from_start(
    consumer: &BaseConsumer,
    brokers: &str,
    topic: &str,
) -> Result<(u64, HashSet<(i32, i64)>), CliError> {
    let partitions = partitions(consumer, brokers, topic)?;
    let (mut total, mut unread, mut assigned) = (0, HashSet::new(), TopicPartitionList::new());
    for partition in partitions {
        let (low, high) = consumer.fetch_watermarks(topic, partition, REQUEST_TIMEOUT)?;
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
/// The topic does not exist, or the broker does not answer.
fn partitions(consumer: &BaseConsumer, brokers: &str, topic: &str) -> Result<Vec<i32>, CliError> {
    let metadata = consumer
        .fetch_metadata(Some(topic), REQUEST_TIMEOUT)
        .map_err(|error| {
            CliError::server(format!(
                "Kafka at {brokers}: cannot fetch the metadata of the topic `{topic}`: {error}; check that Kafka is running, and that kafka.brokers and \
                 the TLS and SASL settings are correct"
            ))
        })?;
    let metadata = metadata.topics().first();
    match metadata.map(|topic| topic.error().map(RDKafkaErrorCode::from)) {
        Some(None) => Ok(metadata
            .map(|topic| topic.partitions().iter().map(|it| it.id()).collect())
            .unwrap_or_default()),
        Some(Some(RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic))
        | None => Err(CliError::server(format!(
            "Kafka: the topic `{topic}` does not exist; check the name; without kafka.create-partitions, create it before the consumer starts"
        ))),
        Some(Some(code)) => Err(CliError::server(format!(
            "Kafka: cannot inspect the topic `{topic}`: {code}"
        ))),
    }
}

/// Reads each partition up to its end offset in `unread`, and sends the records to
/// `dead_letters_tx`. Ends after an error, which it sends, too, or when the receiver is dropped.
fn read(
    consumer: &BaseConsumer,
    mut unread: HashSet<(i32, i64)>,
    id_source: Option<&IdSource>,
    dead_letters_tx: &mpsc::Sender<Result<DeadLetter, CliError>>,
) {
    let mut last_progress = Instant::now();
    while !unread.is_empty() {
        let dead_letter = match consumer.poll(Duration::from_millis(200)) {
            None if last_progress.elapsed() < RECORD_TIMEOUT => continue,
            None => Err(CliError::server(format!(
                "Kafka: no record arrived within {RECORD_TIMEOUT:?}, before the end of the topic; run the command again"
            ))),
            Some(Err(KafkaError::PartitionEOF(partition))) => {
                unread.retain(|(it, _)| *it != partition);
                last_progress = Instant::now();
                continue;
            }
            // librdkafka reconnects by itself.
            Some(Err(_)) if last_progress.elapsed() < RECORD_TIMEOUT => continue,
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
                // The last offsets before the end may have no records (compaction, transaction
                // markers). Then the first record at or after the end shows that the partition is
                // read.
                if next > end {
                    continue;
                }
                last_progress = Instant::now();
                Ok(dead_letter(&message, id_source))
            }
        };
        let failed = dead_letter.is_err();
        // Sending fails once the receiver is dropped.
        if dead_letters_tx.blocking_send(dead_letter).is_err() || failed {
            return;
        }
    }
}

/// Copies a record. Header names that are not UTF-8 cannot be read; they are counted in
/// [`DeadLetter::lost_headers`].
fn dead_letter(message: &BorrowedMessage<'_>, id_source: Option<&IdSource>) -> DeadLetter {
    let (mut raw_headers, mut unnamed) = (Vec::new(), 0);
    if let Some(headers) = message.headers() {
        // The iterator panics on a name that is not UTF-8.
        for index in 0..headers.count() {
            let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let header = headers.get(index);
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
    let mut dead_letter = DeadLetter {
        location: MessageLocation {
            broker: Broker::Kafka.name().to_owned(),
            name: message.topic().to_owned(),
            partition: Some(message.partition()),
            offset: Some(message.offset()),
            written_ms,
        },
        state: DeadLetterState::Waiting,
        headers: raw_headers
            .iter()
            .map(|(name, value)| (name.clone(), text(value)))
            .collect(),
        key: message.key().map(<[u8]>::to_vec),
        body: message.payload().map(<[u8]>::to_vec),
        sent_ms: None,
        rejected_at_ms: written_ms,
        other_source: None,
        lost_headers: (unnamed > 0)
            .then(|| format!("{unnamed} of its headers have names that are not UTF-8")),
        #[cfg(feature = "rabbitmq")]
        delivery: None,
        raw_headers,
        delivery_count: None,
        extracted_id: None,
    };
    dead_letter.extracted_id = id_source
        .and_then(|source| source.read(&as_message(&dead_letter)).ok())
        .map(|id| id.to_string());
    dead_letter
}

/// The message as a consumer receives it, from which `gate.id` reads the id.
fn as_message(dead_letter: &DeadLetter) -> oncegate::Message {
    let mut message = oncegate::Message::new(dead_letter.bytes().to_vec());
    for (name, value) in &dead_letter.raw_headers {
        message = message.with_header(name, value.clone().unwrap_or_default());
    }
    if let Some(key) = &dead_letter.key {
        message = message.with_key(key.clone());
    }
    if let (Some(partition), Some(offset)) =
        (dead_letter.location.partition, dead_letter.location.offset)
    {
        let position = oncegate::Position::Offset { partition, offset };
        message.origin = oncegate::Origin::new(dead_letter.location.name.as_str())
            .with_position(position)
            .with_system("kafka");
    }
    message
}
