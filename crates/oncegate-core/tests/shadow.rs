//! A shadow lets every message run, and counts the messages that would not have run at once without
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::*;

/// Counts the runs that succeed. The first run of `fails` fails, and each of `broken`.
#[derive(Clone, Default)]
struct CountsRuns {
    succeeded: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
}

impl Handler for CountsRuns {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        if cx.id() == "broken" {
            return Err("never").retry();
        }
        if cx.id() == "fails" && self.failed.fetch_add(1, Ordering::SeqCst) == 0 {
            return Err("not yet").retry();
        }
        self.succeeded.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Handles these messages one after the other. Returns the number of successful runs and of dead
/// letters.
async fn handle(
    store: impl Store + 'static,
    messages: &[(&'static str, &'static str)],
) -> (u64, usize) {
    let (broker, runs) = (MemoryBroker::new("payments"), CountsRuns::default());
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store)
        .id(IdSource::message_id())
        .fingerprints(Fingerprints::Body)
        .max_inline_retries(0)
        .backoff(Duration::from_millis(1), Duration::from_millis(1))
        .decode(RawBytes)
        .handler(runs.clone());
    let publish_all = async {
        for (id, body) in messages {
            broker.publish(Message::new(*body).with_message_id(*id));
            while broker.unsettled() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    };
    let handled =
        tokio::time::timeout(Duration::from_secs(60), consumer.run_until(publish_all)).await;
    handled.expect("in time").expect("a clean end");
    (
        runs.succeeded.load(Ordering::SeqCst),
        broker.dead_letters().len(),
    )
}

const MESSAGES: [(&str, &str); 6] = [
    ("a", "1"),
    ("a", "1"),
    ("a", "2"),
    ("b", "1"),
    ("fails", "1"),
    ("fails", "1"),
];

#[tokio::test]
async fn every_message_is_handled_and_the_report_counts_those_that_a_gate_would_have_blocked() {
    let (store, report) = (MemoryStore::new(), ShadowReport::new());
    assert_eq!(
        handle(Shadow::new(store.clone(), report.clone()), &MESSAGES).await,
        (6, 0)
    );
    assert_eq!(
        (
            report.claims(),
            report.count(ShadowOutcome::Duplicate),
            report.count(ShadowOutcome::Conflict)
        ),
        (7, 2, 1)
    );
    let lines = report.to_string();
    assert!(
        lines.starts_with("7 claims; without the shadow, 4 would have been granted at once\n"),
        "{lines}"
    );
    assert!(
        lines.contains("\n         2 handled before, handled again\n"),
        "{lines}"
    );

    // A gate on the same store skips the ids that were handled.
    let more = [("a", "1"), ("b", "1"), ("c", "1")];
    assert_eq!(handle(store, &more).await, (1, 0));
    // A gate from the start, with the same messages.
    assert_eq!(handle(MemoryStore::new(), &MESSAGES).await, (3, 1));
}

#[tokio::test]
async fn a_message_that_always_fails_is_dead_lettered_after_max_attempts() {
    async fn check(store: impl Store + 'static) {
        let report = ShadowReport::new();
        let messages = [("broken", "1"), ("broken", "1")];
        let handled = handle(Shadow::new(store, report.clone()), &messages).await;
        assert_eq!(
            (handled, report.claims()),
            ((0, 2), 2 * u64::from(defaults::MAX_ATTEMPTS))
        );
    }
    check(MemoryStore::new()).await;
    check(Unavailable::default()).await;
}

/// A store that is unavailable.
#[derive(Clone, Default)]
struct Unavailable(Arc<AtomicU64>);

#[async_trait]
impl Store for Unavailable {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.0.fetch_add(1, Ordering::SeqCst);
        operations
            .iter()
            .map(|_| Err(StoreError::Unknown("no reply".into())))
            .collect()
    }

    async fn preflight(&self, _: Guarantee) -> Result<(), StoreError> {
        Err(StoreError::NotApplied("connection refused".into()))
    }
}

#[tokio::test]
async fn no_message_waits_for_an_unavailable_store() {
    let (store, report) = (Unavailable::default(), ShadowReport::new());
    let messages: Vec<_> = (0..200).map(|_| ("a", "1")).collect();
    assert_eq!(
        handle(Shadow::new(store.clone(), report.clone()), &messages).await,
        (200, 0)
    );
    assert_eq!(report.count(ShadowOutcome::StoreUnavailable), 200);
    assert!(
        store.0.load(Ordering::SeqCst) < 100,
        "a request for each message"
    );
}

#[tokio::test]
async fn a_shadow_refuses_at_most_once() {
    let shadow = Shadow::new(MemoryStore::new(), ShadowReport::new());
    let refused = Gate::builder()
        .store(shadow)
        .guarantee(Guarantee::AtMostOnce)
        .allow_volatile_store()
        .open()
        .await;
    let error = refused.expect_err("no effect may happen twice").to_string();
    for words in [
        // As in the error of the configuration.
        "a shadow lets every message run, and in at most once no effect may happen twice",
        "EffectivelyOnce",
    ] {
        assert!(error.contains(words), "{error}");
    }
}
