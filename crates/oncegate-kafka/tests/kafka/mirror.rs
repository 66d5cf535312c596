//! Failover to another cluster with copies of the topic, the group's offsets and their metadata.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{
    Consumer, Context, Error, Failure, Handler, IdSource, MemoryStore, Raw, RawBytes,
};
use oncegate_kafka::{Kafka, TopicCreation};
use oncegate_testkit::servers::{KafkaServer, MirrorMakerServer, ServerError};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::OwnedHeaders;
use rdkafka::{ClientConfig, Message, Offset, TopicPartitionList};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::fixture::*;

/// The id of the target cluster: `oncegate-kafka-2` in base64.
const TARGET_CLUSTER: &str = "b25jZWdhdGUta2Fma2EtMg";

/// How many messages are deleted before the mirror starts, so that offsets on the target cluster
/// are lower.
const DELETED: i64 = 40;

/// A source and a target cluster, of one broker each.
fn two_clusters() -> (KafkaServer, KafkaServer) {
    blocking(|| {
        std::thread::scope(|scope| {
            let source = scope.spawn(KafkaServer::start);
            let target = KafkaServer::start_cluster(TARGET_CLUSTER)?;
            Ok((source.join().expect("no panic")?, target))
        })
    })
}

/// Starts or stops servers, which blocks.
fn blocking<T>(run: impl FnOnce() -> Result<T, ServerError>) -> T {
    tokio::task::block_in_place(run).expect("servers")
}

/// Counts its runs by message id.
#[derive(Clone, Default)]
struct Runs(Arc<Mutex<BTreeMap<String, u32>>>);

impl Handler for Runs {
    type Payload = Raw;

    async fn handle(&self, _: Raw, context: &Context) -> Result<(), Failure> {
        *self
            .0
            .lock()
            .expect("not poisoned")
            .entry(context.id().to_string())
            .or_default() += 1;
        Ok(())
    }
}

impl Runs {
    /// Checks that each of the first `count` ids was handled exactly once, and no other.
    fn assert_each_once(&self, count: usize) {
        let runs = self.0.lock().expect("not poisoned");
        let expected: BTreeSet<String> = (0..count).map(|id| id.to_string()).collect();
        let missing: Vec<_> = expected
            .iter()
            .filter(|id| !runs.contains_key(*id))
            .collect();
        let repeated: Vec<_> = runs.iter().filter(|(_, times)| **times > 1).collect();
        assert!(
            missing.is_empty() && repeated.is_empty() && runs.len() == count,
            "missing {missing:?}, repeated {repeated:?}"
        );
    }
}

/// A consumer that runs until it is stopped.
struct RunningConsumer {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), Error>>,
}

impl RunningConsumer {
    fn start(topic: &Topic, store: &MemoryStore, runs: &Runs) -> Self {
        let consumer = Consumer::builder()
            .source(source(topic))
            .store(store.clone())
            .id(IdSource::key())
            .decode(RawBytes)
            .handler(runs.clone());
        let (stop, stopped) = oneshot::channel::<()>();
        Self {
            stop,
            task: tokio::spawn(consumer.run_until(async move { drop(stopped.await) })),
        }
    }

    async fn stop(self) {
        drop(self.stop);
        self.task.await.expect("no panic").expect("a clean end");
    }
}

fn source(topic: &Topic) -> Kafka {
    topic.source().create_topics(TopicCreation::Create {
        partitions: 1,
        replication: 1,
    })
}

/// Sends messages whose keys are these numbers.
async fn send(topic: &Topic, ids: std::ops::Range<usize>) {
    for id in ids {
        topic
            .send(
                Some(id.to_string().as_bytes()),
                Some(b"x"),
                OwnedHeaders::new(),
            )
            .await;
    }
}

/// Waits until the condition is true; otherwise fails with the text `what`.
async fn wait_until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let end = Instant::now() + BOUND;
    while !condition().await {
        assert!(Instant::now() < end, "{what}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Every offset that was committed for partition 0, in order, as the broker has recorded them in
/// `__consumer_offsets`.
async fn committed_offsets(topic: &Topic) -> Vec<i64> {
    let (brokers, name) = (topic.brokers.clone(), topic.name.clone());
    let read = tokio::task::spawn_blocking(move || {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", brokers)
            .set("group.id", "oncegate-test-reader")
            .set("enable.partition.eof", "true");
        let reader: BaseConsumer = config.create().expect("a consumer");
        let metadata = reader
            .fetch_metadata(Some(OFFSETS), BOUND)
            .expect("an answer");
        let mut partitions = TopicPartitionList::new();
        for partition in metadata.topics()[0].partitions() {
            partitions
                .add_partition_offset(OFFSETS, partition.id(), Offset::Beginning)
                .expect("an offset");
        }
        reader.assign(&partitions).expect("an assignment");
        let (mut offsets, mut ended) = (Vec::new(), BTreeSet::new());
        let end = Instant::now() + BOUND;
        while ended.len() < partitions.count() {
            assert!(Instant::now() < end, "{OFFSETS} is not read to its end");
            match reader.poll(Duration::from_millis(100)) {
                Some(Ok(record)) => {
                    offsets.extend(committed_offset(record.key(), record.payload(), &name))
                }
                Some(Err(KafkaError::PartitionEOF(partition))) => drop(ended.insert(partition)),
                Some(Err(error)) => panic!("{error}"),
                None => {}
            }
        }
        offsets
    });
    read.await.expect("offsets")
}

const OFFSETS: &str = "__consumer_offsets";

/// The offset in a record of `__consumer_offsets`, if it belongs to partition 0 of this topic and
/// the group of the same name: the key is a version of 0 or 1, group, topic and partition, and the
/// value starts with a version and the offset.
fn committed_offset(key: Option<&[u8]>, value: Option<&[u8]>, name: &str) -> Option<i64> {
    let length = i16::try_from(name.len())
        .expect("a short name")
        .to_be_bytes();
    let text = [&length[..], name.as_bytes()].concat();
    let of_this = |version: i16| {
        [
            &version.to_be_bytes()[..],
            &text,
            &text,
            &0_i32.to_be_bytes(),
        ]
        .concat()
    };
    let is_of_this = (0..=1).any(|version| key == Some(&of_this(version)));
    let offset = value?.get(2..10)?.try_into().ok()?;
    is_of_this.then(|| i64::from_be_bytes(offset))
}

/// Checks that the group continued at `translated` and that committed offsets never decreased.
async fn assert_commits_never_decrease(topic: &Topic, translated: i64, last: i64) {
    let offsets = committed_offsets(topic).await;
    assert!(
        offsets.is_sorted() && offsets.contains(&translated) && offsets.last() == Some(&last),
        "{offsets:?} were committed"
    );
}

/// With MirrorMaker 2, and a new process on the target cluster.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_fails_over_to_a_mirrored_topic_continues_at_the_translated_offset() {
    let (mut source_cluster, target_cluster) = two_clusters();
    let (store, runs) = (MemoryStore::new(), Runs::default());
    let topic = Topic::at(source_cluster.brokers(), 1).await;
    let running = RunningConsumer::start(&topic, &store, &runs);
    send(&topic, 0..80).await;
    topic.await_commit(0, 80).await;
    running.stop().await;
    let (_, metadata) = topic.committed_with(0).await.expect("an offset");
    topic.remove_below(DELETED).await;

    let replica = topic.on(target_cluster.brokers());
    let mut mirror = blocking(|| {
        MirrorMakerServer::start(&source_cluster, &target_cluster, &topic.name, &topic.name)
    });
    wait_until("no offset was translated", || async {
        replica.committed(0).await.is_some_and(|offset| offset > 0)
    })
    .await;
    send(&topic, 80..100).await;
    wait_until("not all was copied", || async {
        replica.end_of(&replica.name).await == 60
    })
    .await;
    blocking(|| {
        mirror.stop();
        source_cluster.kill();
        Ok(())
    });

    let (translated, copied) = replica.committed_with(0).await.expect("an offset");
    assert_eq!(copied, metadata, "MirrorMaker 2 copies metadata");
    assert!((1..=80 - DELETED).contains(&translated), "{translated}");
    let mut first = source(&replica)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    assert_eq!(offsets(&receive(&mut first, 1).await), [translated]);
    close(first).await;
    let running = RunningConsumer::start(&replica, &store, &runs);
    replica.await_commit(0, 60).await;
    running.stop().await;
    runs.assert_each_once(100);
    assert_commits_never_decrease(&replica, translated, 60).await;
    let (_, metadata) = replica.committed_with(0).await.expect("an offset");
    assert!(metadata.contains(TARGET_CLUSTER), "{metadata}");
}

/// As if a host name were pointed to the target cluster. Offsets and metadata are copied as
/// MirrorMaker 2 copies them.
#[tokio::test(flavor = "multi_thread")]
async fn a_running_consumer_whose_brokers_become_those_of_the_mirror_continues_at_the_translated_offset()
 {
    let (mut source_cluster, mut target_cluster) = two_clusters();
    let (store, runs) = (MemoryStore::new(), Runs::default());
    let topic = Topic::at(source_cluster.brokers(), 1).await;
    let running = RunningConsumer::start(&topic, &store, &runs);
    send(&topic, 0..80).await;
    topic.await_commit(0, 80).await;
    let (_, metadata) = topic.committed_with(0).await.expect("an offset");

    let replica = topic.on(target_cluster.brokers());
    replica.create(&replica.name, 1, &[]).await;
    send(&replica, 40..100).await;
    let translated = 30;
    replica.commit_with(translated, &metadata).await;
    blocking(|| {
        target_cluster.stop();
        source_cluster.kill();
        target_cluster.take_port_of(&source_cluster)?;
        target_cluster.start_again()
    });
    topic.await_reset(0, 60).await;
    running.stop().await;
    runs.assert_each_once(100);
    assert_commits_never_decrease(&topic, translated, 60).await;
}
