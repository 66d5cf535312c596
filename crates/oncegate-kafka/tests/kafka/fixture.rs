//! A topic per test on the shared broker, and helpers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Delivery, Incoming, Limit, Position, Settled, Source};
use oncegate_kafka::{GroupProtocol, Kafka, KafkaSource};
use oncegate_testkit::laws::source::accepted;
use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier,
    TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::message::{BorrowedMessage, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};

/// The time limit of each test step, on two busy cores and while a broker starts.
pub(crate) const BOUND: Duration = Duration::from_secs(120);

/// The environment variable with the group protocol of most tests: `classic`, the default, or
/// `consumer`.
const GROUP_PROTOCOL: &str = "ONCEGATE_GROUP_PROTOCOL";

/// The configuration of unlimited retention.
pub(crate) const UNLIMITED_RETENTION: [(&str, &str); 2] =
    [("retention.ms", "-1"), ("retention.bytes", "-1")];

/// A topic of one test.
pub(crate) struct Topic {
    pub(crate) name: String,
    pub(crate) brokers: String,
    producer: FutureProducer,
}

impl Topic {
    /// A topic with its dead-letter and in-doubt topics.
    pub(crate) async fn new(partitions: i32) -> Self {
        let brokers = oncegate_testkit::kafka_brokers().expect("a broker");
        Self::with_destinations_at(brokers, partitions).await
    }

    /// The same, on these brokers.
    pub(crate) async fn with_destinations_at(brokers: String, partitions: i32) -> Self {
        let topic = Self::at(brokers, partitions).await;
        topic
            .create(&topic.dead_letters(), 1, &UNLIMITED_RETENTION)
            .await;
        topic
            .create(&topic.in_doubt(), 1, &UNLIMITED_RETENTION)
            .await;
        topic
    }

    /// A topic whose dead-letter topic has this configuration, beside unlimited retention.
    ///
    /// The topic itself accepts timestamps in the future.
    pub(crate) async fn with_dead_letters(config: &[(&str, &str)]) -> Self {
        let brokers = oncegate_testkit::kafka_brokers().expect("a broker");
        let topic = Self::configured(
            brokers,
            1,
            &[("message.timestamp.after.max.ms", "9223372036854775807")],
        )
        .await;
        topic
            .create(
                &topic.dead_letters(),
                1,
                &[&UNLIMITED_RETENTION, config].concat(),
            )
            .await;
        topic
            .create(&topic.in_doubt(), 1, &UNLIMITED_RETENTION)
            .await;
        topic
    }

    /// A topic for messages of 20 MB, with a dead-letter topic for them.
    pub(crate) async fn of_large_messages() -> Self {
        let brokers = oncegate_testkit::kafka_brokers().expect("a broker");
        let large = [("max.message.bytes", "20971520")];
        let topic = Self::configured(brokers, 1, &large).await;
        topic
            .create(
                &topic.dead_letters(),
                1,
                &[&UNLIMITED_RETENTION[..], &large].concat(),
            )
            .await;
        topic
            .create(&topic.in_doubt(), 1, &UNLIMITED_RETENTION)
            .await;
        topic
    }

    /// A topic without dead-letter and in-doubt topics.
    pub(crate) async fn alone(partitions: i32) -> Self {
        Self::at(
            oncegate_testkit::kafka_brokers().expect("a broker"),
            partitions,
        )
        .await
    }

    /// A topic without dead-letter and in-doubt topics, on this broker.
    pub(crate) async fn at(brokers: String, partitions: i32) -> Self {
        Self::configured(brokers, partitions, &[]).await
    }

    /// A topic with this configuration on this broker, without dead-letter and in-doubt topics.
    pub(crate) async fn configured(
        brokers: String,
        partitions: i32,
        config: &[(&str, &str)],
    ) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock after 1970")
            .as_nanos();
        let name = format!(
            "oncegate-test-{now}-{}",
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        let producer = client(&brokers)
            .set("linger.ms", "1")
            .set("message.max.bytes", "20971520")
            .create()
            .expect("a producer");
        let topic = Self {
            name,
            brokers,
            producer,
        };
        topic.create(&topic.name, partitions, config).await;
        topic
    }

    pub(crate) async fn create(&self, name: &str, partitions: i32, config: &[(&str, &str)]) {
        let admin: AdminClient<DefaultClientContext> =
            client(&self.brokers).create().expect("an admin client");
        let options = AdminOptions::new().operation_timeout(Some(BOUND));
        let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        let topic = config
            .iter()
            .fold(topic, |topic, (key, value)| topic.set(key, value));
        let created = admin.create_topics([&topic], &options).await;
        assert!(
            created.expect("an answer").iter().all(Result::is_ok),
            "{name} was not created"
        );
    }

    fn admin(&self) -> (AdminClient<DefaultClientContext>, AdminOptions) {
        let admin = client(&self.brokers).create().expect("an admin client");
        (admin, AdminOptions::new().operation_timeout(Some(BOUND)))
    }

    /// Sets the number of partitions.
    pub(crate) async fn grow(&self, partitions: usize) {
        let (admin, options) = self.admin();
        let grown = admin
            .create_partitions(&[NewPartitions::new(&self.name, partitions)], &options)
            .await;
        assert!(
            grown.expect("an answer").iter().all(Result::is_ok),
            "{} did not grow",
            self.name
        );
    }

    /// Removes the messages below an offset of partition 0, as retention would.
    pub(crate) async fn remove_below(&self, offset: i64) {
        let (admin, options) = self.admin();
        let mut partitions = TopicPartitionList::new();
        partitions
            .add_partition_offset(&self.name, 0, Offset::Offset(offset))
            .expect("an offset");
        admin
            .delete_records(&partitions, &options)
            .await
            .expect("removed");
    }

    /// Replaces the configuration of another topic.
    pub(crate) async fn configure(&self, name: &str, config: &[(&str, &str)]) {
        let (admin, options) = self.admin();
        let altered = AlterConfig::new(ResourceSpecifier::Topic(name));
        let altered = config
            .iter()
            .fold(altered, |altered, (key, value)| altered.set(key, value));
        let altered = admin.alter_configs([&altered], &options).await;
        assert!(
            altered.expect("an answer").iter().all(Result::is_ok),
            "{name} was not configured"
        );
    }

    /// Deletes a topic.
    pub(crate) async fn delete(&self, name: &str) {
        let (admin, options) = self.admin();
        let deleted = admin.delete_topics(&[name], &options).await;
        assert!(
            deleted.expect("an answer").iter().all(Result::is_ok),
            "{name} was not deleted"
        );
    }

    /// Whether a topic exists.
    pub(crate) fn exists(&self, name: &str) -> bool {
        // A consumer's metadata request creates no topic.
        let admin_consumer: BaseConsumer = client(&self.brokers).create().expect("a consumer");
        let metadata = admin_consumer
            .fetch_metadata(Some(name), BOUND)
            .expect("an answer");
        metadata
            .topics()
            .iter()
            .all(|topic| topic.error().is_none())
    }

    /// Deletes the topic and creates another one with the same name and one partition.
    pub(crate) async fn recreate(&self) {
        self.delete(&self.name).await;
        self.create(&self.name, 1, &[]).await;
    }

    /// The same topic, with a new producer, which has the metadata of all its partitions.
    pub(crate) fn with_new_producer(&self) -> Self {
        self.on(self.brokers.clone())
    }

    /// The topic of the same name on other brokers.
    pub(crate) fn on(&self, brokers: String) -> Self {
        let producer = client(&brokers)
            .set("linger.ms", "1")
            .create()
            .expect("a producer");
        Self {
            name: self.name.clone(),
            brokers,
            producer,
        }
    }

    /// The id of the topic's cluster.
    pub(crate) async fn cluster_id(&self) -> String {
        let brokers = self.brokers.clone();
        let fetched = tokio::task::spawn_blocking(move || {
            let admin_consumer: BaseConsumer = client(&brokers).create().expect("a consumer");
            admin_consumer.client().fetch_cluster_id(BOUND)
        });
        fetched.await.expect("an answer").expect("a cluster id")
    }

    pub(crate) fn dead_letters(&self) -> String {
        format!("{}.dead-letters", self.name)
    }

    pub(crate) fn in_doubt(&self) -> String {
        format!("{}.in-doubt", self.name)
    }

    /// The source of most tests. Its group has the topic's name, and the group protocol of the
    /// environment variable [`GROUP_PROTOCOL`].
    pub(crate) fn source(&self) -> Kafka {
        match std::env::var(GROUP_PROTOCOL).as_deref() {
            Ok("consumer") => self
                .classic_source()
                .group_protocol(GroupProtocol::Consumer),
            Err(_) | Ok("" | "classic") => self.classic_source(),
            Ok(other) => panic!("{GROUP_PROTOCOL}={other}: use classic or consumer"),
        }
    }

    /// The same, whose members time out early if the group protocol lets a member choose that: a client
    /// that replaces another one waits until that one's member has timed out.
    pub(crate) fn source_with_short_session(&self) -> Kafka {
        match std::env::var(GROUP_PROTOCOL).as_deref() {
            Ok("consumer") => self.source(),
            _ => self.source().property("session.timeout.ms", "10000"),
        }
    }

    /// A source for tests of what only the classic group protocol has.
    pub(crate) fn classic_source(&self) -> Kafka {
        Kafka::topic(&self.name)
            .brokers(&self.brokers)
            .group(&self.name)
    }

    pub(crate) async fn open(&self) -> KafkaSource {
        self.source()
            .connect(ConnectOptions::default())
            .await
            .expect("a source")
    }

    /// Sends the bodies `0`, `1`, … to one partition.
    pub(crate) async fn send_numbers(&self, partition: i32, count: usize) {
        let bodies: Vec<String> = (0..count).map(|number| number.to_string()).collect();
        let sent: Vec<_> = bodies
            .iter()
            .map(|body| {
                self.producer
                    .send_result(
                        FutureRecord::<[u8], _>::to(&self.name)
                            .partition(partition)
                            .payload(body),
                    )
                    .expect("the producer queue has room")
            })
            .collect();
        for confirm in sent {
            confirm.await.expect("a producer").expect("sent");
        }
    }

    /// Sends one message to partition 0.
    pub(crate) async fn send(
        &self,
        key: Option<&[u8]>,
        body: Option<&[u8]>,
        headers: OwnedHeaders,
    ) {
        self.send_as_of(None, key, body, headers).await;
    }

    /// Sends one message to partition 0 with this timestamp, in milliseconds since 1970.
    pub(crate) async fn send_as_of(
        &self,
        at: Option<i64>,
        key: Option<&[u8]>,
        body: Option<&[u8]>,
        headers: OwnedHeaders,
    ) {
        let mut record = FutureRecord::<[u8], [u8]>::to(&self.name)
            .partition(0)
            .headers(headers);
        (record.timestamp, record.key, record.payload) = (at, key, body);
        self.producer.send(record, BOUND).await.expect("sent");
    }

    /// Commits an offset of partition 0 for the group, from another client.
    pub(crate) async fn commit(&self, offset: i64) {
        self.commit_with(offset, "").await;
    }

    /// Commits an offset of partition 0 with this metadata, from another client.
    pub(crate) async fn commit_with(&self, offset: i64, metadata: &str) {
        let (brokers, name, metadata) =
            (self.brokers.clone(), self.name.clone(), metadata.to_owned());
        let committed = tokio::task::spawn_blocking(move || {
            let other_consumer: BaseConsumer = client(&brokers)
                .set("group.id", &name)
                .create()
                .expect("a consumer");
            let mut partitions = TopicPartitionList::new();
            let mut partition = partitions.add_partition(&name, 0);
            partition
                .set_offset(Offset::Offset(offset))
                .expect("an offset");
            partition.set_metadata(metadata);
            let end = Instant::now() + BOUND;
            // A broker that has just started has no group coordinator yet.
            while let Err(error) = other_consumer.commit(&partitions, CommitMode::Sync) {
                assert!(Instant::now() < end, "not committed: {error}");
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        committed.await.expect("committed");
    }

    /// The committed offset of a partition, as another client reads it.
    pub(crate) async fn committed(&self, partition: i32) -> Option<i64> {
        self.committed_with(partition)
            .await
            .map(|(offset, _)| offset)
    }

    /// The committed offset of a partition and its metadata, as another client reads them.
    pub(crate) async fn committed_with(&self, partition: i32) -> Option<(i64, String)> {
        let (brokers, name) = (self.brokers.clone(), self.name.clone());
        let fetched = tokio::task::spawn_blocking(move || {
            let admin_consumer: BaseConsumer = client(&brokers)
                .set("group.id", &name)
                .create()
                .expect("a consumer");
            let mut partitions = TopicPartitionList::new();
            partitions.add_partition(&name, partition);
            let end = Instant::now() + BOUND;
            // A broker that has just started has no group coordinator yet.
            let answer = loop {
                match admin_consumer.committed_offsets(partitions.clone(), BOUND) {
                    Ok(answer) => break answer,
                    Err(error) => assert!(Instant::now() < end, "no answer: {error}"),
                }
                std::thread::sleep(Duration::from_millis(50));
            };
            let elements = answer.elements();
            match elements[0].offset() {
                Offset::Offset(offset) => Some((offset, elements[0].metadata().to_owned())),
                _ => None,
            }
        });
        fetched.await.expect("an answer")
    }

    /// Waits until the group has committed this offset, and fails if it commits a higher one.
    pub(crate) async fn await_commit(&self, partition: i32, offset: i64) {
        let end = Instant::now() + BOUND;
        loop {
            let committed = self.committed(partition).await;
            if committed == Some(offset) {
                return;
            }
            assert!(
                Instant::now() < end && committed.is_none_or(|it| it < offset),
                "{committed:?} was committed, not {offset}"
            );
        }
    }

    /// Waits until the group has committed exactly this offset, which may be lower than before.
    pub(crate) async fn await_reset(&self, partition: i32, offset: i64) {
        let end = Instant::now() + BOUND;
        loop {
            let committed = self.committed(partition).await;
            if committed == Some(offset) {
                return;
            }
            assert!(
                Instant::now() < end,
                "{committed:?} was committed, not {offset}"
            );
        }
    }

    /// The number of messages in partition 0 of another topic.
    pub(crate) async fn end_of(&self, topic: &str) -> usize {
        let (brokers, topic) = (self.brokers.clone(), topic.to_owned());
        let fetched = tokio::task::spawn_blocking(move || {
            let admin_consumer: BaseConsumer = client(&brokers).create().expect("a consumer");
            admin_consumer
                .fetch_watermarks(&topic, 0, BOUND)
                .expect("an answer")
                .1
        });
        usize::try_from(fetched.await.expect("an answer")).expect("offsets are not negative")
    }

    /// The first messages of partition 0 of another topic, read by a plain consumer.
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        topic: String,
        count: usize,
        copy: fn(&BorrowedMessage<'_>) -> T,
    ) -> Vec<T> {
        let brokers = self.brokers.clone();
        let read = tokio::task::spawn_blocking(move || {
            let reader: BaseConsumer = client(&brokers)
                .set("group.id", "oncegate-test-reader")
                .create()
                .expect("a consumer");
            let mut partitions = TopicPartitionList::new();
            partitions
                .add_partition_offset(&topic, 0, Offset::Beginning)
                .expect("an offset");
            reader.assign(&partitions).expect("an assignment");
            let (mut messages, end) = (Vec::new(), Instant::now() + BOUND);
            while messages.len() < count {
                assert!(
                    Instant::now() < end,
                    "{} of {count} messages are in {topic}",
                    messages.len()
                );
                if let Some(Ok(message)) = reader.poll(Duration::from_millis(100)) {
                    messages.push(copy(&message));
                }
            }
            messages
        });
        read.await.expect("messages")
    }
}

pub(crate) fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config
}

/// Receives this many deliveries.
pub(crate) async fn receive(source: &mut KafkaSource, count: usize) -> Vec<Delivery> {
    let mut deliveries = Vec::new();
    let all = async {
        while deliveries.len() < count {
            let limit = Limit::new(count - deliveries.len(), 1 << 20);
            let mut incoming = Vec::new();
            source
                .receive(limit, &mut incoming)
                .await
                .expect("deliveries");
            deliveries.extend(incoming.into_iter().filter_map(delivery));
        }
    };
    let in_time = tokio::time::timeout(BOUND, all).await.is_ok();
    assert!(
        in_time,
        "{} of {count} deliveries arrived in time",
        deliveries.len()
    );
    deliveries
}

/// Whether nothing is delivered or revoked for this long.
pub(crate) async fn is_silent(source: &mut KafkaSource, time: Duration) -> bool {
    let mut incoming = Vec::new();
    let limit = Limit::new(1, 1 << 20);
    tokio::time::timeout(time, source.receive(limit, &mut incoming))
        .await
        .is_err()
        && incoming.is_empty()
}

pub(crate) fn delivery(incoming: Incoming) -> Option<Delivery> {
    match incoming {
        Incoming::Delivery(delivery) => Some(delivery),
        Incoming::Revoked(_) => None,
    }
}

/// Accepts deliveries.
pub(crate) async fn accept(
    source: &mut KafkaSource,
    deliveries: impl IntoIterator<Item = Delivery>,
) {
    settle(
        source,
        deliveries
            .into_iter()
            .map(|delivery| (delivery, accepted())),
    )
    .await;
}

pub(crate) async fn release(source: &mut KafkaSource, delivery: Delivery) {
    let (after, failures) = (Duration::ZERO, delivery.failures + 1);
    settle(
        source,
        [(delivery, Settlement::Release { after, failures })],
    )
    .await;
}

pub(crate) async fn reject(source: &mut KafkaSource, delivery: Delivery, reason: Reason) {
    settle(source, [(delivery, Settlement::Reject(reason))]).await;
}

async fn settle(
    source: &mut KafkaSource,
    settled: impl IntoIterator<Item = (Delivery, Settlement)>,
) {
    let mut settled = settled
        .into_iter()
        .map(|(delivery, settlement)| Settled::new(delivery, settlement))
        .collect();
    source.settle(&mut settled).await.expect("settled");
    assert!(settled.is_empty());
}

pub(crate) async fn close(source: KafkaSource) {
    Box::new(source)
        .close(Instant::now() + BOUND)
        .await
        .expect("closed");
}

pub(crate) fn offset(delivery: &Delivery) -> i64 {
    match delivery.message.origin.position {
        Position::Offset { offset, .. } => offset,
        _ => unreachable!("the Kafka source sets an offset"),
    }
}

pub(crate) fn offsets(deliveries: &[Delivery]) -> Vec<i64> {
    deliveries.iter().map(offset).collect()
}

/// All headers of a message, which must be text.
pub(crate) fn text_headers(message: &BorrowedMessage<'_>) -> Vec<(String, Option<String>)> {
    use rdkafka::message::Headers;
    let headers = message
        .headers()
        .into_iter()
        .flat_map(|headers| headers.iter());
    headers
        .map(|it| {
            (
                it.key.to_owned(),
                it.value
                    .map(|value| String::from_utf8_lossy(value).into_owned()),
            )
        })
        .collect()
}

/// Settles the due deliveries until the group has committed this offset. On a busy machine the
/// group may remove the member while its broker is down, and deliveries arrive again; or the client
/// is replaced because it does not reach its group, even twice, and each time the next one waits
/// until the member before it has timed out.
pub(crate) async fn settle_until(
    source: &mut KafkaSource,
    topic: &Topic,
    held: &mut BTreeMap<i64, Delivery>,
    is_due: impl Fn(i64) -> bool,
    committed: i64,
) {
    let end = Instant::now() + 3 * BOUND;
    loop {
        let due: Vec<i64> = held
            .keys()
            .copied()
            .filter(|offset| is_due(*offset))
            .collect();
        accept(source, due.iter().filter_map(|offset| held.remove(offset))).await;
        let now = topic.committed(0).await;
        if now == Some(committed) {
            return;
        }
        assert!(
            Instant::now() < end,
            "{now:?} was committed, not {committed}"
        );
        let mut incoming = Vec::new();
        let received = tokio::time::timeout(
            Duration::from_millis(200),
            source.receive(Limit::new(50, 1 << 20), &mut incoming),
        );
        // Also after a timeout: the deliveries that have arrived are kept.
        if let Ok(received) = received.await {
            received.expect("the source does not end");
        }
        held.extend(
            incoming
                .into_iter()
                .filter_map(delivery)
                .map(|it| (offset(&it), it)),
        );
    }
}
