//! Kafka, as the demo itself uses it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Headers, Message, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::Error;
use super::check::KAFKA;
use super::traces::{Sending, TRACEPARENT};
use super::wire::Queue;
use crate::payment::ID_HEADER;
use crate::traffic::{self, Outgoing};

/// How long one question to the broker may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long one question takes while it is not known whether anybody answers.
const ONE_QUESTION: Duration = Duration::from_secs(1);
/// How many of the client's events are served after each.
const EVENTS: usize = 32;
const PARTITIONS: i32 = 6;
const ASIDE: [&str; 2] = [".dead-letters", ".in-doubt"];

/// What the client says of brokers that do not answer.
#[derive(Default)]
struct Trouble(Mutex<(Vec<RDKafkaErrorCode>, String)>);

impl Trouble {
    /// Whether no broker answers at all, and why the last one does not.
    fn told(&self) -> (bool, String) {
        let told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (
            told.0.contains(&RDKafkaErrorCode::AllBrokersDown),
            told.1.clone(),
        )
    }
}

impl ClientContext for Trouble {
    fn log(&self, _: RDKafkaLogLevel, _: &str, _: &str) {}

    fn error(&self, error: KafkaError, reason: &str) {
        let Some(code) = error.rdkafka_error_code() else {
            return;
        };
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if code != RDKafkaErrorCode::AllBrokersDown {
            told.1 = reason.to_owned();
        }
        told.0.push(code);
    }
}

impl ConsumerContext for Trouble {}

/// Whether a broker answers.
///
/// # Errors
/// The option, what is wrong, and what to do.
pub(super) async fn check(brokers: &str, patience: Duration) -> Result<(), Error> {
    check_addresses(brokers)?;
    let created =
        client(brokers).create_with_context::<_, BaseConsumer<Trouble>>(Trouble::default());
    let consumer = created.map_err(|error| KAFKA.wrong(format!("{brokers}: {error}")))?;
    let asking = tokio::task::spawn_blocking(move || {
        let begun = Instant::now();
        while consumer.fetch_metadata(None, ONE_QUESTION).is_err() {
            // Nothing may mean that an event was served by a callback: not that none is left.
            (0..EVENTS).for_each(|_| drop(consumer.poll(Duration::ZERO)));
            let (all_down, reason) = consumer.context().told();
            // One that has a second address, or just starts, is asked again.
            if begun.elapsed() >= if all_down { patience / 4 } else { patience } {
                return Err(if reason.is_empty() {
                    format!("no answer within {patience:?}")
                } else {
                    reason
                });
            }
        }
        Ok(())
    });
    asking.await?.map_err(|reason| {
        KAFKA.wrong(format!("Kafka at {brokers} cannot be reached ({reason}); is it running, and are host and port right?"))
    })
}

fn check_addresses(brokers: &str) -> Result<(), Error> {
    match brokers.split(',').find(|entry| !is_address(entry.trim())) {
        Some(entry) => Err(KAFKA.wrong(format!(
            "{entry:?} is no host:port; write host:port, and commas between several"
        ))),
        None => Ok(()),
    }
}

fn is_address(entry: &str) -> bool {
    let is_host = |host: &str| {
        !host.is_empty()
            && !host.contains(|letter: char| letter.is_whitespace() || "/@".contains(letter))
    };
    entry
        .rsplit_once(':')
        .is_some_and(|(host, port)| is_host(host) && matches!(port.parse::<u16>(), Ok(1..)))
}

/// A producer, and what it takes to look.
pub(crate) struct Wire {
    brokers: String,
    queue: Queue,
    producer: FutureProducer,
}

/// Creates the topic and those beside it, where they are missing.
pub(crate) async fn create(brokers: &str, name: &str) -> Result<(), Error> {
    let aside = ASIDE.map(|suffix| format!("{name}{suffix}"));
    let keeping =
        |name| NewTopic::new(name, 1, TopicReplication::Fixed(1)).set("retention.ms", "-1");
    let mut topics = vec![NewTopic::new(name, PARTITIONS, TopicReplication::Fixed(1))];
    topics.extend(aside.iter().map(|name| keeping(name)));
    check_addresses(brokers)?;
    if let Err(absent) = check(brokers, ONE_QUESTION).await {
        eprintln!("payments: {absent} Trying again for {PATIENCE:?}");
    }
    let created = admin(brokers)?.create_topics(&topics, &options()).await;
    let not_created = |error| {
        KAFKA.wrong(format!(
            "the topics of {name} cannot be created at {brokers} ({error}); is Kafka running there?"
        ))
    };
    for result in created.map_err(not_created)? {
        match result {
            Ok(_) | Err((_, RDKafkaErrorCode::TopicAlreadyExists)) => {}
            Err((topic, error)) => {
                return Err(format!("the topic {topic} cannot be created: {error}").into());
            }
        }
    }
    Ok(())
}

impl Wire {
    pub(crate) async fn open(brokers: String, queue: Queue) -> Result<Self, Error> {
        create(&brokers, &queue.name).await?;
        let mut config = client(&brokers);
        config
            .set("enable.idempotence", "true")
            .set("linger.ms", "5");
        config.set("sticky.partitioning.linger.ms", "0"); // each to a partition of its own choice: all workers have some
        let producer = config.create()?;
        Ok(Self {
            brokers,
            queue,
            producer,
        })
    }

    pub(crate) async fn send(&self, messages: &[Outgoing]) -> Result<(), Error> {
        let mut confirmations = Vec::with_capacity(messages.len());
        for message in messages {
            // Without a key, so that the two copies of a payment meet different workers.
            let sending =
                Sending::begin(("kafka", "send"), &self.queue.name, message.id.as_deref());
            let headers = [
                (ID_HEADER, message.id.clone()),
                (TRACEPARENT, sending.header()),
            ];
            let headers = headers.iter().filter_map(|(key, value)| {
                Some(Header {
                    key,
                    value: Some(value.as_ref()?),
                })
            });
            let headers = headers.fold(OwnedHeaders::new(), OwnedHeaders::insert);
            let record = FutureRecord::<(), str>::to(&self.queue.name)
                .payload(&message.body)
                .headers(headers);
            confirmations.push((
                sending,
                self.producer
                    .send_result(record)
                    .map_err(|(error, _)| error)?,
            ));
        }
        for (_sending, confirmation) in confirmations {
            confirmation.await?.map_err(|(error, _)| error)?;
        }
        Ok(())
    }

    /// How far the group is behind.
    pub(crate) async fn backlog(&self) -> Result<u64, Error> {
        let topic = self.queue.name.clone();
        self.look(move |consumer| {
            let mut partitions = TopicPartitionList::new();
            partitions.add_partition_range(&topic, 0, PARTITIONS - 1);
            let committed = consumer.committed_offsets(partitions, PATIENCE)?;
            let mut behind = 0;
            for partition in committed.elements() {
                let (first, end) =
                    consumer.fetch_watermarks(&topic, partition.partition(), PATIENCE)?;
                let next = if let Offset::Offset(next) = partition.offset() {
                    next
                } else {
                    first
                };
                behind += u64::try_from(end - next).unwrap_or_default();
            }
            Ok(behind)
        })
        .await
    }

    /// The names of all messages beside the topic.
    pub(crate) async fn names(&self, suffix: &str) -> Result<Vec<String>, Error> {
        let topic = format!("{}{suffix}", self.queue.name);
        self.look(move |consumer| {
            let (first, end) = consumer.fetch_watermarks(&topic, 0, PATIENCE)?;
            let mut partitions = TopicPartitionList::new();
            partitions.add_partition_offset(&topic, 0, Offset::Offset(first))?;
            consumer.assign(&partitions)?;
            let (mut names, mut next, begun) = (Vec::new(), first, Instant::now());
            while next < end {
                if begun.elapsed() > PATIENCE {
                    return Err(
                        format!("{topic} could not be read to its end in {PATIENCE:?}").into(),
                    );
                }
                let Some(message) = consumer.poll(Duration::from_millis(200)) else {
                    continue;
                };
                let message = message?;
                next = message.offset() + 1;
                let id = message
                    .headers()
                    .into_iter()
                    .flat_map(|headers| headers.iter())
                    .find(|header| header.key == ID_HEADER);
                let id = id
                    .and_then(|header| header.value)
                    .map(|id| String::from_utf8_lossy(id).into_owned());
                names.push(traffic::name(id, message.payload().unwrap_or_default()));
            }
            Ok(names)
        })
        .await
    }

    pub(crate) async fn remove(&self) -> Result<(), Error> {
        let aside = ASIDE.map(|suffix| format!("{}{suffix}", self.queue.name));
        let topics: Vec<&str> = aside
            .iter()
            .map(String::as_str)
            .chain([self.queue.name.as_str()])
            .collect();
        admin(&self.brokers)?
            .delete_topics(&topics, &options())
            .await?;
        Ok(())
    }

    /// librdkafka waits where it is asked: on a thread that may.
    async fn look<T: Send + 'static>(
        &self,
        ask: impl FnOnce(BaseConsumer) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let consumer: BaseConsumer = client(&self.brokers)
            .set("group.id", &self.queue.group)
            .set("enable.auto.commit", "false")
            .create()?;
        tokio::task::spawn_blocking(move || ask(consumer)).await?
    }
}

fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config
}

fn admin(brokers: &str) -> Result<AdminClient<DefaultClientContext>, Error> {
    Ok(client(brokers).create()?)
}

fn options() -> AdminOptions {
    AdminOptions::new()
        .operation_timeout(Some(PATIENCE))
        .request_timeout(Some(PATIENCE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_question_that_is_not_answered_says_why() {
        let told = check("127.0.0.1:1", ONE_QUESTION)
            .await
            .expect_err("nobody listens there")
            .to_string();
        assert!(told.contains("refused"), "{told}");
    }

    #[tokio::test]
    async fn what_is_no_address_of_a_broker_is_told_before_any_is_asked() {
        for (brokers, entry) in [
            ("http://x y", "http://x y"),
            ("localhost:99999", "localhost:99999"),
            ("a:1,,b:2", ""),
            ("a", "a"),
        ] {
            let told = check(brokers, Duration::ZERO)
                .await
                .expect_err(brokers)
                .to_string();
            let wanted = format!(
                "--kafka (or ONCEGATE_KAFKA): {entry:?} is no host:port; write host:port, and commas between several"
            );
            assert_eq!(told, wanted);
        }
        assert!(
            ["localhost:9092", "[::1]:9092", "a.example:1"]
                .into_iter()
                .all(is_address)
        );
    }
}
