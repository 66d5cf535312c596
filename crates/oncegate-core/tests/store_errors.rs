//! A store that refuses operations, and values under a key that another program wrote.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::internal::StoreFailure;
use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::marker::{Operation, OperationKind, Token, Verdict};
use oncegate_core::*;
use tokio::sync::Notify;
use tracing_subscriber::fmt::MakeWriter;

/// Longer than any test may take, so that a test fails if it waits for the drain timeout.
const LONG_DRAIN: Duration = Duration::from_secs(3600);

/// How long a consumer runs at most after its store refused an operation and its handlers ended.
const END_WITHIN: Duration = Duration::from_secs(1);

/// A memory store that is shared with another program, and whose user may lose its permissions.
/// Another program has written the keys `unreadable…`, and writes `overwritten…` after the claim.
#[derive(Clone, Default)]
struct SharedStore {
    store: MemoryStore,
    refuses: Arc<AtomicBool>,
    refused_claims: Arc<AtomicU32>,
}

#[async_trait]
impl Store for SharedStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut answers = Vec::new();
        for operation in operations {
            let key = operation.key.as_str();
            let is_unreadable = key.starts_with("unreadable")
                || key.starts_with("overwritten") && operation.kind != OperationKind::Claim;
            answers.push(if self.refuses.load(Ordering::SeqCst) {
                self.refused_claims.fetch_add(
                    u32::from(operation.kind == OperationKind::Claim),
                    Ordering::SeqCst,
                );
                Err(StoreError::Misconfigured(
                    "NOPERM: let the user run SET".into(),
                ))
            } else if is_unreadable {
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

/// For the ids `waiting…`, runs until `may_end`; the second handler that starts notifies `both_run`.
#[derive(Clone, Default)]
struct Waiting {
    started: Arc<AtomicU32>,
    both_run: Arc<Notify>,
    may_end: Arc<Notify>,
    ended: Arc<AtomicU32>,
}

impl Handler for Waiting {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        if cx.id().starts_with("waiting") {
            let may_end = self.may_end.notified();
            if self.started.fetch_add(1, Ordering::SeqCst) == 1 {
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

/// Writes the log lines of this thread to `log`.
fn capture(log: &'static Mutex<Vec<u8>>) -> tracing::subscriber::DefaultGuard {
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(|| log.make_writer())
        .finish();
    let guard = tracing::subscriber::set_default(subscriber);
    // A log callsite that another test registers at the same time does not see this subscriber. The
    // clock may be paused.
    std::thread::sleep(Duration::from_millis(50));
    tracing::callsite::rebuild_interest_cache();
    guard
}

fn consumer(
    broker: &MemoryBroker,
    store: SharedStore,
    handler: Waiting,
) -> Builder<MemorySource, SharedStore, Waiting, RawBytes> {
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store)
        .id(IdSource::header("id"))
        .decode(RawBytes);
    consumer.handler(handler).drain_timeout(LONG_DRAIN)
}

/// How often the log says that the consumer stops because its store is misconfigured.
fn stopping_lines(log: &Mutex<Vec<u8>>) -> usize {
    let log = String::from_utf8(log.lock().expect("no panic").clone()).expect("text");
    log.matches("store misconfigured, stopping").count()
}

#[tokio::test(start_paused = true)]
async fn a_misconfigured_store_stops_a_consumer_without_handlers_within_a_second() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let _guard = capture(&LOG);
    let (broker, store) = (MemoryBroker::new("q"), SharedStore::default());
    let running = tokio::spawn(
        consumer(&broker, store.clone(), Waiting::default())
            .run_until(std::future::pending::<()>()),
    );
    tokio::time::sleep(Duration::from_secs(5)).await;
    store.refuses.store(true, Ordering::SeqCst);
    let began = tokio::time::Instant::now();
    for number in 0..2_000 {
        broker.publish(message(&format!("{number}")));
    }
    let ended = running.await.expect("no panic");
    assert!(
        matches!(ended, Err(Error::Store(StoreError::Misconfigured(_)))),
        "{ended:?}"
    );
    assert!(began.elapsed() < END_WITHIN, "{:?}", began.elapsed());
    assert_eq!(broker.unsettled(), 2_000, "nothing is lost");
    assert_eq!(stopping_lines(&LOG), 1);
}

#[tokio::test(start_paused = true)]
async fn a_misconfigured_store_stops_the_consumer_when_its_handlers_have_ended() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    assert_stops_after_its_handlers(&LOG, Guarantee::EffectivelyOnce, "is handled again").await;
}

/// A store that loses its data, such as a file that was removed, also loses the claim.
#[tokio::test(start_paused = true)]
async fn at_most_once_says_that_a_message_whose_claim_is_lost_runs_again() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let follows = "in doubt, or runs again if the store lost its claim";
    assert_stops_after_its_handlers(&LOG, Guarantee::AtMostOnce, follows).await;
}

async fn assert_stops_after_its_handlers(
    log: &'static Mutex<Vec<u8>>,
    guarantee: Guarantee,
    follows: &str,
) {
    let _guard = capture(log);
    let (broker, store, handler) = (
        MemoryBroker::new("q"),
        SharedStore::default(),
        Waiting::default(),
    );
    for id in ["waiting-a", "waiting-b"] {
        broker.publish(message(id));
    }
    let running = tokio::spawn(
        consumer(&broker, store.clone(), handler.clone())
            .guarantee(guarantee)
            .allow_volatile_store()
            .run_until(std::future::pending::<()>()),
    );
    handler.both_run.notified().await;
    store.refuses.store(true, Ordering::SeqCst);
    for number in 0..50 {
        broker.publish(message(&format!("new-{number}")));
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(store.refused_claims.load(Ordering::SeqCst) > 0);
    assert!(!running.is_finished(), "running handlers may finish");
    handler.may_end.notify_waiters();
    let ended = tokio::time::timeout(END_WITHIN, running)
        .await
        .expect("at once")
        .expect("no panic");
    assert_eq!(stopping_lines(log), 1);
    assert!(
        matches!(ended, Err(Error::Store(StoreError::Misconfigured(_)))),
        "{ended:?}"
    );
    assert_eq!(
        (
            handler.started.load(Ordering::SeqCst),
            handler.ended.load(Ordering::SeqCst)
        ),
        (2, 2)
    );
    assert_eq!(broker.unsettled(), 52, "nothing is lost");
    let claims = store.refused_claims.load(Ordering::SeqCst);
    assert!(claims <= 50, "{claims} claims for 50 messages");
    let lines = String::from_utf8(log.lock().expect("no panic").clone()).expect("text");
    let not_recorded: Vec<&str> = lines
        .lines()
        .filter(|line| line.contains("WARN") && line.contains("outcome not recorded"))
        .collect();
    assert_eq!(not_recorded.len(), 2, "{not_recorded:#?}");
    for id in ["waiting-a", "waiting-b"] {
        let line = not_recorded.iter().find(|line| line.contains(id));
        let line = line.unwrap_or_else(|| panic!("{id} in {not_recorded:#?}"));
        for part in ["attempt=1", r#"outcome="handled""#, "origin=q", follows] {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
}

/// Because `oncegate in-doubt resolve` refuses an id whose marker is unreadable.
#[tokio::test]
async fn the_log_says_to_delete_an_unreadable_marker_before_resolve() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let _guard = capture(&LOG);
    let broker = MemoryBroker::new("q");
    broker.publish(message("unreadable-1"));
    let all = broker.clone();
    let consumer = consumer(&broker, SharedStore::default(), Waiting::default())
        .guarantee(Guarantee::EffectivelyOnce);
    let run = consumer.run_until(async move { all.all_settled().await });
    tokio::time::timeout(Duration::from_secs(20), run)
        .await
        .expect("it is settled")
        .expect("a clean end");
    let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
    let line = log
        .lines()
        .find(|line| line.contains("message in doubt, sending it to the in-doubt queue"))
        .expect("the line");
    assert!(line.contains(r#"id="unreadable-1""#), "{line}");
    let (delete, resolve) = (line.find("delete the key"), line.find("in-doubt resolve"));
    assert!(delete.is_some() && delete < resolve, "{line}");
}

/// A store that loses its keys when a completion arrives. Another delivery has claimed the keys
/// `fenced…` since.
struct LosesKeys(Mutex<MemoryStore>, AtomicBool);

impl LosesKeys {
    fn new() -> Self {
        Self(Mutex::new(MemoryStore::new()), AtomicBool::new(false))
    }
}

#[async_trait]
impl Store for LosesKeys {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let completes = |operation: &&Operation| operation.kind == OperationKind::Complete;
        if let Some(complete) = operations.iter().find(completes)
            && !self.1.swap(true, Ordering::SeqCst)
        {
            let mut after_loss = Operation {
                kind: OperationKind::Claim,
                token: Token(1),
                attempt: 0,
                ..complete.clone()
            };
            after_loss.terms.lease = Duration::from_millis(100);
            let empty = MemoryStore::new();
            if complete.key.as_str().starts_with("fenced") {
                empty.apply(&[after_loss]).await;
            }
            *self.0.lock().expect("no panic") = empty;
        }
        let store = self.0.lock().expect("no panic").clone();
        store.apply(operations).await
    }
}

#[tokio::test]
async fn each_id_whose_claim_was_lost_while_its_handler_ran_is_logged() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let _guard = capture(&LOG);
    for id in ["lost-1", "fenced-1"] {
        let broker = MemoryBroker::new("q");
        broker.publish(message(id));
        let all = broker.clone();
        let consumer = Consumer::builder()
            .source(broker.source())
            .store(LosesKeys::new())
            .id(IdSource::header("id"))
            .decode(RawBytes)
            .handler(Waiting::default());
        let run = consumer.run_until(async move { all.all_settled().await });
        tokio::time::timeout(Duration::from_secs(20), run)
            .await
            .expect("it is settled")
            .expect("a clean end");
    }
    let gate = Gate::builder().store(LosesKeys::new());
    let gate = gate.open().await.expect("a gate");
    let ran = gate.run("lost-2", || async { Ok(7) }).await;
    assert!(matches!(ran, Ok(RunOutcome::Executed(7))), "{ran:?}");

    let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
    for (text, id, origin) in [
        ("marker lost while the handler ran", "lost-1", "origin=q"),
        ("completion refused", "fenced-1", "origin=q"),
        ("marker lost while the handler ran", "lost-2", ""),
    ] {
        let lines: Vec<_> = log.lines().filter(|line| line.contains(id)).collect();
        let lines: Vec<_> = lines.iter().filter(|line| line.contains(text)).collect();
        let [line] = lines[..] else {
            panic!("{id}: {log}")
        };
        for part in ["WARN", "attempt=1", origin, "check the effect of this id"] {
            assert!(line.contains(part), "{part} in {line}");
        }
    }
}

/// A store that may pause claims, as Redis does after a data loss.
#[derive(Clone, Default)]
struct PausesClaims(MemoryStore, Arc<AtomicBool>);

#[async_trait]
impl Store for PausesClaims {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let paused = self.1.load(Ordering::SeqCst);
        let mut answers = Vec::new();
        for operation in operations {
            answers.push(if paused && operation.kind == OperationKind::Claim {
                Err(StoreFailure::claims_paused("the keys are lost; accept that").into())
            } else {
                let operation = std::slice::from_ref(operation);
                self.0.apply(operation).await.remove(0)
            });
        }
        answers
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_whose_claims_are_paused_is_not_available_again() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let _guard = capture(&LOG);
    let (broker, store) = (MemoryBroker::new("q"), PausesClaims::default());
    let handler = Waiting::default();
    for id in ["waiting-a", "waiting-b"] {
        broker.publish(message(id));
    }
    let all = broker.clone();
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store.clone())
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .handler(handler.clone());
    let running = tokio::spawn(consumer.run_until(async move { all.all_settled().await }));
    handler.both_run.notified().await;
    store.1.store(true, Ordering::SeqCst);
    broker.publish(message("c"));
    tokio::time::sleep(Duration::from_secs(15)).await;
    handler.may_end.notify_waiters();
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert_eq!(
        handler.ended.load(Ordering::SeqCst),
        2,
        "granted claims complete"
    );
    let log = || String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
    let count = |text: &str| log().matches(text).count();
    assert!(count("claims paused, because") >= 2, "{}", log());
    assert!(
        log().contains("the keys are lost; accept that"),
        "{}",
        log()
    );
    for wrong in ["check the store and its network", "available again"] {
        assert_eq!(count(wrong), 0, "{}", log());
    }
    store.1.store(false, Ordering::SeqCst);
    running.await.expect("no panic").expect("a clean end");
    assert_eq!(count("store available again"), 1, "{}", log());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreadable_marker_affects_only_its_id() {
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        let (broker, handler) = (MemoryBroker::new("q"), Waiting::default());
        for id in [
            "a",
            "unreadable-1",
            "b",
            "overwritten-1",
            "c",
            "unreadable-2",
        ] {
            broker.publish(message(id));
        }
        let all = broker.clone();
        let consumer = consumer(&broker, SharedStore::default(), handler.clone())
            .guarantee(guarantee)
            .allow_volatile_store();
        let run = consumer.run_until(async move { all.all_settled().await });
        tokio::time::timeout(Duration::from_secs(20), run)
            .await
            .expect("the others are handled")
            .expect("a clean end");
        let mut in_doubt: Vec<_> = broker
            .in_doubt()
            .into_iter()
            .map(|message| {
                (
                    message.reason,
                    message.failure_history.expect("a failure history"),
                )
            })
            .collect();
        in_doubt.sort_by_key(|(_, failure_history)| failure_history.id.clone());
        for (reason, failure_history) in &in_doubt {
            assert_eq!(*reason, Reason::InDoubt(DoubtCause::UnreadableMarker));
            assert_eq!(
                failure_history.last_error.as_deref(),
                Some("another program wrote this key"),
                "{failure_history:?}"
            );
        }
        let ids: Vec<_> = in_doubt
            .into_iter()
            .filter_map(|(_, failure_history)| failure_history.id)
            .collect();
        assert_eq!(
            ids,
            ["overwritten-1", "unreadable-1", "unreadable-2"],
            "{guarantee:?}"
        );
        assert_eq!(
            handler.ended.load(Ordering::SeqCst),
            4,
            "a, b, c and overwritten-1, whose completion was not recorded"
        );
    }
}

#[tokio::test]
async fn a_gate_reports_an_unreadable_marker_at_once_and_other_ids_run() {
    let gate = Gate::builder()
        .store(SharedStore::default())
        .open()
        .await
        .expect("a gate");
    let unreadable = tokio::time::timeout(
        Duration::from_secs(20),
        gate.run("unreadable", || async { Ok(()) }),
    )
    .await
    .expect("at once");
    assert!(
        matches!(
            unreadable,
            Err(GateError::Store(StoreError::UnreadableMarker(_)))
        ),
        "{unreadable:?}"
    );
    assert!(matches!(
        gate.run("another", || async { Ok(7) }).await,
        Ok(RunOutcome::Executed(7))
    ));
}
