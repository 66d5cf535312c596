//! Each policy for an unexpected log is logged by its name and counted. Alone in its process,
//! because it captures all log lines and installs the global metrics recorder.
#![forbid(unsafe_code)]

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/fixture.rs"]
mod fixture;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, Raw, RawBytes};
use oncegate_kafka::KafkaStatus;
use oncegate_testkit::Lines;

use crate::fixture::*;

/// The value of each counter.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(
            self.0
                .lock()
                .expect("not poisoned")
                .entry(key.name().to_owned())
                .or_default()
                .clone(),
        )
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

struct Observed {
    lines: Lines,
    logged: Mutex<Vec<String>>,
    counters: Counters,
}

impl Observed {
    /// Waits until a line of this level contains this name and topic, and the counter is at least
    /// `count`.
    async fn wait_for(&self, level: &str, name: &str, topic: &Topic, counter: &str, count: u64) {
        let counter = format!("oncegate_kafka_{counter}_total");
        let end = Instant::now() + BOUND;
        while let Err(otherwise) = self.check(level, name, topic, &counter, count) {
            assert!(Instant::now() < end, "{otherwise}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn counted(&self, counter: &str) -> u64 {
        self.counters
            .0
            .lock()
            .expect("not poisoned")
            .get(counter)
            .map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// The log lines and counters, for a failed assertion.
    fn check(
        &self,
        level: &str,
        name: &str,
        topic: &Topic,
        counter: &str,
        count: u64,
    ) -> Result<(), String> {
        let counted = self.counted(counter);
        let mut logged = self.logged.lock().expect("not poisoned");
        logged.extend(self.lines.take().into_iter().map(|(_, line)| line));
        let is_logged = logged
            .iter()
            .any(|it| it.contains(level) && it.contains(name) && it.contains(&topic.name));
        if counted >= count && is_logged {
            Ok(())
        } else {
            Err(format!(
                "{level} {name}, {counter} is {counted} and not yet {count}: {logged:#?}"
            ))
        }
    }
}

/// Sequential, because the log and the recorder are global.
#[tokio::test(flavor = "multi_thread")]
async fn each_policy_has_a_name_in_the_log_and_a_counter() {
    let (lines, logged, counters) = (
        Lines::of_this_process(),
        Mutex::default(),
        Counters::default(),
    );
    metrics::set_global_recorder(counters.clone())
        .unwrap_or_else(|_| panic!("there is another recorder"));
    let observed = Observed {
        lines,
        logged,
        counters,
    };
    messages_expired(&observed).await;
    log_truncated(&observed).await;
    partition_added(&observed).await;
    partition_was_empty(&observed).await;
    replica_topic(&observed).await;
    let counters = [
        "messages_expired",
        "logs_truncated",
        "partitions_added",
        "replica_offsets",
        "topics_recreated",
    ];
    assert_eq!(
        counters.map(|it| observed.counted(&format!("oncegate_kafka_{it}_total"))),
        [7, 1, 1, 1, 0]
    );
    client_replaced(&observed).await;
    // Last, because its counts depend on how often partitions are lost and assigned meanwhile.
    topic_recreated(&observed).await;
}

async fn messages_expired(observed: &Observed) {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 20).await;
    topic.commit(5).await;
    topic.remove_below(12).await;
    let mut source = topic.open().await;
    receive(&mut source, 8).await;
    observed
        .wait_for("ERROR", "messages expired", &topic, "messages_expired", 7)
        .await;
    close(source).await;
}

async fn log_truncated(observed: &Observed) {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    topic.commit(50).await;
    let mut source = topic.open().await;
    receive(&mut source, 10).await;
    observed
        .wait_for("ERROR", "log truncated", &topic, "logs_truncated", 1)
        .await;
    close(source).await;
}

/// Also if a group without an offset starts at the beginning.
async fn partition_added(observed: &Observed) {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 3).await;
    topic.commit(3).await;
    let mut source = topic
        .source()
        .property("topic.metadata.refresh.interval.ms", "500")
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    topic.grow(2).await;
    topic.with_new_producer().send_numbers(1, 5).await;
    assert!(
        receive(&mut source, 5)
            .await
            .iter()
            .all(|it| it.receipt.partition == 1)
    );
    observed
        .wait_for("WARN", "partition added", &topic, "partitions_added", 1)
        .await;
    close(source).await;
}

/// A partition that was empty at the first assignment is not taken for an added one at the next,
/// although only another one had messages.
async fn partition_was_empty(observed: &Observed) {
    let topic = Topic::new(3).await;
    topic.send_numbers(0, 3).await;
    let mut source = topic.open().await;
    let first = receive(&mut source, 3).await;
    accept(&mut source, first).await;
    topic.await_commit(0, 3).await;
    topic.await_commit(1, 0).await;
    topic.await_commit(2, 0).await;
    close(source).await;
    topic.send_numbers(1, 2).await;
    let mut source = topic.open().await;
    assert!(
        receive(&mut source, 2)
            .await
            .iter()
            .all(|it| it.receipt.partition == 1)
    );
    observed
        .wait_for("INFO", "partition=1", &topic, "partitions_added", 1)
        .await;
    assert_eq!(observed.counted("oncegate_kafka_partitions_added_total"), 1);
    close(source).await;
}

/// The warning names both clusters.
async fn replica_topic(observed: &Observed) {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    topic
        .commit_with(4, "topic-id=q5BZ55PYTTyxda8B1C5Amg cluster-id=another")
        .await;
    let mut source = topic.open().await;
    receive(&mut source, 6).await;
    observed
        .wait_for("WARN", "replica topic", &topic, "replica_offsets", 1)
        .await;
    let fields = format!(
        "partition=0 offset=4 cluster={:?} committed_cluster=\"another\"",
        topic.cluster_id().await
    );
    observed
        .wait_for("WARN", &fields, &topic, "replica_offsets", 1)
        .await;
    close(source).await;
}

/// This client fetches nothing more while a fetched message is not received.
async fn client_replaced(observed: &Observed) {
    let (topic, status) = (Topic::new(1).await, KafkaStatus::new());
    topic.send_numbers(0, 5).await;
    let stalling = [
        ("queued.min.messages", "1"),
        ("fetch.queue.backoff.ms", "300000"),
    ];
    let kafka = stalling.iter().fold(topic.source(), |kafka, (key, value)| {
        kafka.property(*key, *value)
    });
    let source = kafka
        .status(status.clone())
        .stalled_after(Duration::from_secs(1))
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let end = Instant::now() + BOUND;
    while status.clients_replaced() == 0 {
        assert!(Instant::now() < end, "the stall is not detected");
        // A stall is detected only while the log grows.
        topic.send_numbers(0, 1).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    observed
        .wait_for("ERROR", "client replaced", &topic, "clients_replaced", 1)
        .await;
    close(source).await;
}

/// Counts its runs.
#[derive(Clone, Default)]
struct Runs(Arc<AtomicU64>);

impl Handler for Runs {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// With `IdSource::position()`; the new topic has more messages than the deleted one.
async fn topic_recreated(observed: &Observed) {
    let (topic, runs) = (Topic::new(1).await, Runs::default());
    topic.send_numbers(0, 5).await;
    let consumer = Consumer::builder()
        .source(
            topic
                .source()
                .property("topic.metadata.refresh.interval.ms", "500"),
        )
        .store(MemoryStore::new())
        .id(IdSource::position())
        .decode(RawBytes)
        .handler(runs.clone());
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async move { drop(ended.await) }));
    topic.await_commit(0, 5).await;
    topic.recreate().await;
    topic.send_numbers(0, 12).await;
    topic.await_reset(0, 12).await;
    observed
        .wait_for("ERROR", "topic recreated", &topic, "topics_recreated", 1)
        .await;
    // Skipped messages are reported; the others were handled.
    observed
        .wait_for("ERROR", "ids repeated", &topic, "ids_repeated", 5)
        .await;
    assert_eq!(runs.0.load(Ordering::Relaxed), 12);
    drop(end);
    running.await.expect("no panic").expect("a clean end");
}
