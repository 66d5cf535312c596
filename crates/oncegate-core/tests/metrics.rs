//! The metrics of a consumer, and their list, from which the table of the book is generated.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use oncegate_core::metric::{Kind, METRICS};
use oncegate_core::*;
use tokio::sync::Semaphore;

/// Waits for a permit. The id `fails` fails the first time.
struct AwaitsPermit {
    permits: Arc<Semaphore>,
    failed: AtomicBool,
}

impl Handler for AwaitsPermit {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        self.permits
            .acquire()
            .await
            .expect("it is never closed")
            .forget();
        if cx.id() == "fails" && !self.failed.swap(true, Ordering::SeqCst) {
            Err("not yet").retry()
        } else {
            Ok(())
        }
    }
}

/// The values since the last snapshot, by name and label.
fn recorded(snapshotter: &Snapshotter) -> HashMap<String, DebugValue> {
    let all = snapshotter.snapshot().into_vec().into_iter();
    let named = all.map(|(key, _, _, value)| {
        let labels: String = key
            .key()
            .labels()
            .map(|label| format!("/{}", label.value()))
            .collect();
        (format!("{}{labels}", key.key().name()), value)
    });
    named.collect()
}

fn gauge(recorded: &HashMap<String, DebugValue>, name: &str) -> f64 {
    match recorded.get(name) {
        Some(DebugValue::Gauge(value)) => value.into_inner(),
        other => panic!("{name}: {other:?}"),
    }
}

fn histogram(recorded: &HashMap<String, DebugValue>, name: &str) -> Vec<f64> {
    match recorded.get(name) {
        Some(DebugValue::Histogram(values)) => {
            values.iter().map(|value| value.into_inner()).collect()
        }
        other => panic!("{name}: {other:?}"),
    }
}

fn count(recorded: &HashMap<String, DebugValue>, outcome: &str) -> u64 {
    match recorded.get(&format!("oncegate_deliveries_total/{outcome}")) {
        Some(DebugValue::Counter(count)) => *count,
        other => panic!("{outcome}: {other:?}"),
    }
}

#[tokio::test]
async fn gauges_counters_and_durations_are_recorded() {
    const HELD_FOR: Duration = Duration::from_millis(20);
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _here = metrics::set_default_local_recorder(&recorder);

    let (broker, permits, status) = (
        MemoryBroker::new("q"),
        Arc::new(Semaphore::new(0)),
        ConsumerStatus::new(),
    );
    for (id, key) in [("one", "a"), ("two", "a"), ("fails", "b")] {
        broker.publish(Message::new("x").with_key(key).with_message_id(id));
    }
    let consumer = Consumer::builder()
        .source(broker.source())
        // The shadow records its own metric, too.
        .store(Shadow::new(MemoryStore::new(), ShadowReport::new()))
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .max_inline_retries(0)
        .backoff(Duration::from_millis(1), Duration::from_millis(1))
        .decode(RawBytes)
        .handler(AwaitsPermit {
            permits: permits.clone(),
            failed: AtomicBool::new(false),
        })
        .status(status.clone());
    let mut while_waiting = HashMap::new();
    let shutdown = async {
        let two_run = async {
            while !(status.snapshot().in_flight == 2 && status.snapshot().queued == 1) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), two_run)
            .await
            .expect("two run, and one waits behind its key");
        while_waiting = recorded(&snapshotter);
        tokio::time::sleep(HELD_FOR).await;
        permits.add_permits(100);
        broker.all_settled().await;
    };
    consumer.run_until(shutdown).await.expect("a clean end");
    let afterwards = recorded(&snapshotter);

    // A snapshot resets the recorder, so the second one has the changes since the first.
    for (name, value) in [
        ("oncegate_in_flight", 2.0),
        ("oncegate_waiting", 1.0),
        ("oncegate_awaiting_claim", 0.0),
        ("oncegate_isolated", 0.0),
        ("oncegate_store_unavailable", 0.0),
    ] {
        assert_eq!(
            (gauge(&while_waiting, name), gauge(&afterwards, name)),
            (value, -value),
            "{name}"
        );
    }
    // `fails` fails once, backs off, and is claimed and handled again.
    let histograms = [
        "oncegate_handle_seconds",
        "oncegate_complete_seconds",
        "oncegate_lease_age_seconds",
        "oncegate_delivery_seconds",
    ];
    assert_eq!(
        histograms.map(|name| histogram(&afterwards, name).len()),
        [4, 3, 3, 3]
    );
    assert_eq!(
        histogram(&while_waiting, "oncegate_claim_seconds").len()
            + histogram(&afterwards, "oncegate_claim_seconds").len(),
        4
    );
    for name in [
        "oncegate_handle_seconds",
        "oncegate_lease_age_seconds",
        "oncegate_delivery_seconds",
    ] {
        let longest = histogram(&afterwards, name).into_iter().fold(0.0, f64::max);
        assert!(longest >= HELD_FOR.as_secs_f64(), "{name}: {longest}");
    }
    assert_eq!(
        ["completed", "retried", "released", "duplicate"]
            .map(|outcome| count(&afterwards, outcome)),
        [3, 1, 1, 0]
    );
    assert_eq!(
        count(&while_waiting, "unknown_age"),
        3,
        "none has a timestamp"
    );

    // Exactly the listed metrics are recorded.
    let names = |recorded: &HashMap<String, DebugValue>| {
        recorded
            .keys()
            .map(|name| name.split('/').next().unwrap_or_default().to_owned())
            .collect()
    };
    let recorded: BTreeSet<String> = names(&afterwards);
    let listed: BTreeSet<String> = METRICS
        .iter()
        .map(|metric| metric.name.to_owned())
        .collect();
    assert_eq!(recorded, listed);
    for metric in METRICS {
        let ends = |suffix| metric.name.ends_with(suffix);
        assert_eq!(
            metric.kind == Kind::Counter,
            ends("_total"),
            "{}",
            metric.name
        );
        assert_eq!(
            metric.kind == Kind::Histogram,
            ends("_seconds"),
            "{}",
            metric.name
        );
    }
}
