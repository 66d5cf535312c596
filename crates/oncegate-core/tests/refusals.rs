//! A store that refuses permission, and values that another program wrote under a key.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::marker::{Ask, Operation, Verdict};
use oncegate_core::*;
use tokio::sync::Notify;
use tracing_subscriber::fmt::MakeWriter;

/// Longer than any test may take, so that a test fails if it waits for the drain timeout.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// A memory store that is shared with another program, and whose user may lose its permissions.
#[derive(Clone, Default)]
struct Shared {
    store: MemoryStore,
    refuses: Arc<AtomicBool>,
    asked: Arc<AtomicU32>,
}

#[async_trait]
impl Store for Shared {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut answers = Vec::new();
        for operation in operations {
            let first = operation.key.as_str().starts_with("theirs");
            let late = operation.key.as_str().starts_with("later") && operation.ask != Ask::Claim;
            answers.push(if self.refuses.load(Ordering::SeqCst) {
                self.asked
                    .fetch_add(u32::from(operation.ask == Ask::Claim), Ordering::SeqCst);
                Err(StoreError::Misconfigured(
                    "NOPERM: let the user run SET".into(),
                ))
            } else if first || late {
                Err(StoreError::UnreadableMarker(
                    "another program wrote this key".into(),
                ))
            } else {
                self.store
                    .apply(std::slice::from_ref(operation))
                    .await
                    .remove(0)
            });
        }
        answers
    }
}

/// Runs until `may_end`; the second handler that starts notifies `both_run`.
#[derive(Clone, Default)]
struct Held {
    began: Arc<AtomicU32>,
    both_run: Arc<Notify>,
    may_end: Arc<Notify>,
    ended: Arc<AtomicU32>,
}

impl Handler for Held {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        if cx.id().starts_with("held") {
            let may_end = self.may_end.notified();
            if self.began.fetch_add(1, Ordering::SeqCst) == 1 {
                self.both_run.notify_one();
            }
            may_end.await;
        }
        self.ended.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

fn message(id: &str) -> Message {
    Message::new("x").with_header("id", id)
}

fn consumer(
    broker: &MemoryBroker,
    store: Shared,
    handler: Held,
) -> Builder<MemorySource, Shared, Held, RawBytes> {
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store)
        .id(IdSource::header("id"))
        .decode(RawBytes);
    consumer.handler(handler).drain_timeout(FOR_EVER)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_misconfigured_store_stops_the_consumer_when_its_handlers_have_ended() {
    let (broker, store, handler) = (MemoryBroker::new("q"), Shared::default(), Held::default());
    for id in ["held-a", "held-b"] {
        broker.publish(message(id));
    }
    let running = tokio::spawn(
        consumer(&broker, store.clone(), handler.clone()).run_until(std::future::pending::<()>()),
    );
    handler.both_run.notified().await;
    store.refuses.store(true, Ordering::SeqCst);
    for number in 0..50 {
        broker.publish(message(&format!("new-{number}")));
    }
    while store.asked.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!(!running.is_finished(), "what runs may finish");
    handler.may_end.notify_waiters();
    let ended = tokio::time::timeout(Duration::from_secs(20), running)
        .await
        .expect("before the drain timeout")
        .expect("no panic");
    assert!(
        matches!(ended, Err(Error::Store(StoreError::Misconfigured(_)))),
        "{ended:?}"
    );
    assert_eq!(
        (
            handler.began.load(Ordering::SeqCst),
            handler.ended.load(Ordering::SeqCst)
        ),
        (2, 2)
    );
    assert_eq!(broker.unsettled(), 52, "nothing is lost");
    let asked = store.asked.load(Ordering::SeqCst);
    assert!(asked <= 50, "asked {asked} claims for 50 messages");
}

/// `in-doubt resolve` refuses an id whose marker is unreadable.
#[tokio::test]
async fn the_log_says_to_delete_an_unreadable_marker_before_resolve() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(|| LOG.make_writer())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    // A callsite that another test registers at the same time misses this subscriber.
    tokio::time::sleep(Duration::from_millis(50)).await;
    tracing::callsite::rebuild_interest_cache();
    let broker = MemoryBroker::new("q");
    broker.publish(message("theirs-1"));
    let all = broker.clone();
    let consumer =
        consumer(&broker, Shared::default(), Held::default()).guarantee(Guarantee::EffectivelyOnce);
    let run = consumer.run_until(async move { all.drained().await });
    tokio::time::timeout(Duration::from_secs(20), run)
        .await
        .expect("it is settled")
        .expect("a clean end");
    let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
    let line = log
        .lines()
        .find(|line| line.contains("message in doubt, sending it to the in-doubt queue"))
        .expect("the line");
    let (delete, resolve) = (line.find("delete the key"), line.find("in-doubt resolve"));
    assert!(delete.is_some() && delete < resolve, "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_marker_affects_only_its_id() {
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        let (broker, handler) = (MemoryBroker::new("q"), Held::default());
        for id in ["a", "theirs-1", "b", "later-1", "c", "theirs-2"] {
            broker.publish(message(id));
        }
        let all = broker.clone();
        let consumer = consumer(&broker, Shared::default(), handler.clone())
            .guarantee(guarantee)
            .allow_volatile_store();
        let run = consumer.run_until(async move { all.drained().await });
        tokio::time::timeout(Duration::from_secs(20), run)
            .await
            .expect("the others are handled")
            .expect("a clean end");
        let mut ids: Vec<_> = broker
            .in_doubt()
            .into_iter()
            .map(|letter| {
                (
                    letter.reason,
                    letter.failure_history.expect("a failure history"),
                )
            })
            .collect();
        ids.sort_by_key(|(_, failure_history)| failure_history.id.clone());
        for (reason, failure_history) in &ids {
            assert_eq!(*reason, Reason::InDoubt(DoubtCause::UnreadableMarker));
            assert_eq!(
                failure_history.last_error.as_deref(),
                Some("another program wrote this key"),
                "{failure_history:?}"
            );
        }
        let ids: Vec<_> = ids
            .into_iter()
            .filter_map(|(_, failure_history)| failure_history.id)
            .collect();
        assert_eq!(ids, ["later-1", "theirs-1", "theirs-2"], "{guarantee:?}");
        assert_eq!(
            handler.ended.load(Ordering::SeqCst),
            4,
            "a, b and c; later-1 could not be recorded"
        );
    }
}

#[tokio::test]
async fn a_gate_reports_an_unreadable_marker_at_once_and_other_ids_run() {
    let gate = Gate::builder()
        .store(Shared::default())
        .open()
        .await
        .expect("a gate");
    let theirs = tokio::time::timeout(
        Duration::from_secs(20),
        gate.run("theirs", || async { Ok(()) }),
    )
    .await
    .expect("at once");
    assert!(
        matches!(
            theirs,
            Err(GateError::Store(StoreError::UnreadableMarker(_)))
        ),
        "{theirs:?}"
    );
    assert!(matches!(
        gate.run("ours", || async { Ok(7) }).await,
        Ok(RunOutcome::Executed(7))
    ));
}
