//! The consumer with faults of the store and of the handler, under load, and with extreme settings.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Reason;
use oncegate_core::marker::{
    Attempts, Effect, Marker, Operation, OperationKind, Terms, Token, Verdict,
};
use oncegate_core::*;

const fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn message(id: &str) -> Message {
    Message::new("x").with_header("id", id)
}

fn key(id: &str) -> Key {
    Key::new(&MessageId::new(id).expect("an id"))
}

/// The fault of one call to the store.
enum Fault {
    None,
    /// Applied; the reply is delayed.
    Late(Duration),
    /// Applied; the reply is lost.
    ReplyLost,
    /// Not applied.
    Unavailable,
    /// The call hangs.
    Hangs,
    Panics,
}

/// The fault of a call, from its first operation and the number of calls before.
type FaultPlan = Arc<dyn Fn(&Operation, u32) -> Fault + Send + Sync>;

/// A memory store with faults.
#[derive(Clone)]
struct FaultyStore {
    store: MemoryStore,
    fault: FaultPlan,
    calls: Arc<AtomicU32>,
}

impl FaultyStore {
    fn new(fault: impl Fn(&Operation, u32) -> Fault + Send + Sync + 'static) -> Self {
        Self {
            store: MemoryStore::new(),
            fault: Arc::new(fault),
            calls: Arc::default(),
        }
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        match (self.fault)(&operations[0], self.calls.fetch_add(1, Ordering::Relaxed)) {
            Fault::None => self.store.apply(operations).await,
            Fault::Late(after) => {
                let answers = self.store.apply(operations).await;
                tokio::time::sleep(after).await;
                answers
            }
            Fault::ReplyLost => {
                self.store.apply(operations).await;
                operations
                    .iter()
                    .map(|_| Err(StoreError::Unknown("lost".into())))
                    .collect()
            }
            Fault::Unavailable => {
                tokio::time::sleep(ms(20)).await;
                operations
                    .iter()
                    .map(|_| Err(StoreError::NotApplied("unavailable".into())))
                    .collect()
            }
            Fault::Hangs => std::future::pending().await,
            Fault::Panics => panic!("injected panic"),
        }
    }
}

/// A handler that sleeps, and may panic in a drop.
#[derive(Clone, Default)]
struct Slow {
    takes: Duration,
    panics: Panics,
    runs: Arc<AtomicU32>,
    dropped: Arc<Mutex<Vec<Instant>>>,
}

#[derive(Clone, Copy, Default, PartialEq)]
enum Panics {
    #[default]
    Never,
    /// In the drop of a local variable of the handler.
    WhenDropped,
    /// With a panic payload whose drop panics.
    WithPanickingPayload,
}

struct DropRecorder(Slow);

impl Drop for DropRecorder {
    fn drop(&mut self) {
        self.0
            .dropped
            .lock()
            .expect("no panic inside")
            .push(Instant::now());
        assert!(self.0.panics != Panics::WhenDropped, "dropped");
    }
}

struct PanicsInDrop;

impl Drop for PanicsInDrop {
    fn drop(&mut self) {
        panic!("panic in the drop of a panic payload");
    }
}

impl Handler for Slow {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        if self.panics == Panics::WithPanickingPayload {
            std::panic::panic_any(PanicsInDrop);
        }
        let _held = DropRecorder(self.clone());
        tokio::time::sleep(self.takes).await;
        Ok(())
    }
}

fn consumer<S: Store + 'static, H: Handler>(
    broker: &MemoryBroker,
    store: S,
    handler: H,
) -> Builder<MemorySource, S, H, RawBytes> {
    Consumer::builder()
        .source(broker.source())
        .store(store)
        .handler(handler)
        .decode(RawBytes)
        .id(IdSource::header("id"))
        .lease(ms(400))
        .backoff(ms(5), ms(20))
        .drain_timeout(ms(300))
}

fn broker(ids: impl IntoIterator<Item = String>) -> MemoryBroker {
    let broker = MemoryBroker::new("q");
    ids.into_iter().for_each(|id| broker.publish(message(&id)));
    broker
}

fn broker_with_one_message() -> MemoryBroker {
    broker(["a".to_owned()])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_without_the_gate_ignores_the_lease_of_an_earlier_grant() {
    let (broker, handler) = (broker_with_one_message(), Slow::default());
    // The grant arrives after its lease has ended, and the store is unavailable for the next claim.
    let store = FaultyStore::new(|operation, call| match (operation.kind, call) {
        (OperationKind::Claim, 0) => Fault::Late(ms(600)),
        (OperationKind::Renew, _) => Fault::None,
        _ => Fault::Unavailable,
    });
    let all = broker.clone();
    let run = consumer(&broker, store, handler.clone())
        .outage(Outage::PassThrough)
        .run_until(async move { all.all_settled().await });
    tokio::time::timeout(ms(10_000), run)
        .await
        .expect("it is handled")
        .expect("a clean end");
    assert_eq!(handler.runs.load(Ordering::Relaxed), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_without_the_gate_is_recorded_when_the_store_is_available_again() {
    let (broker, handler) = (broker_with_one_message(), Slow::default());
    let store = FaultyStore::new(|operation, call| {
        if operation.kind == OperationKind::Claim && call == 0 {
            Fault::ReplyLost
        } else {
            Fault::None
        }
    });
    let (all, markers) = (broker.clone(), store.store.clone());
    let run = consumer(&broker, store, handler.clone())
        .outage(Outage::PassThrough)
        .run_until(async move { all.all_settled().await });
    run.await.expect("a clean end");
    assert_eq!(
        markers.marker(&key("a")).0,
        Marker::Done(None),
        "completed before the end, with the token of the unanswered claim"
    );
    assert_eq!(handler.runs.load(Ordering::Relaxed), 1);
}

/// While the first message runs without the store, the store becomes available again. It is busy with
/// another message when the run ends and a duplicate arrives: the late completion has to be sent
/// before the claim of the duplicate.
#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_of_a_run_without_the_gate_does_not_run_after_the_outage() {
    let (broker, handler) = (
        broker_with_one_message(),
        Slow {
            takes: ms(1500),
            ..Slow::default()
        },
    );
    let store = FaultyStore::new(|operation, call| match operation.key.as_str() {
        "a" if call == 0 => Fault::Unavailable,
        "slow" if operation.kind == OperationKind::Claim => Fault::Late(ms(800)),
        _ => Fault::None,
    });
    let (all, markers) = (broker.clone(), store.store.clone());
    let until = async move {
        for (after, id) in [(1000, "quick"), (100, "slow"), (500, "a")] {
            tokio::time::sleep(ms(after)).await;
            all.publish(message(id));
        }
        all.all_settled().await;
    };
    let run = consumer(&broker, store, handler.clone())
        .outage(Outage::PassThrough)
        .lease(ms(6000))
        .run_until(until);
    run.await.expect("a clean end");
    assert_eq!(markers.marker(&key("a")).0, Marker::Done(None));
    assert_eq!(handler.runs.load(Ordering::Relaxed), 3, "each id once");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unavailable_store_gets_few_requests_a_second() {
    let broker = broker((0..3000).map(|id| id.to_string()));
    let outage = Arc::new(AtomicBool::new(false));
    let unavailable = outage.clone();
    let store = FaultyStore::new(move |_, _| {
        if unavailable.load(Ordering::Relaxed) {
            Fault::Unavailable
        } else {
            Fault::None
        }
    });
    let calls = store.calls.clone();
    let handler = Slow {
        takes: ms(100),
        ..Slow::default()
    };
    let (all, runs) = (broker.clone(), handler.runs.clone());
    let shutdown = async move {
        tokio::time::sleep(ms(150)).await; // some handlers run, and their leases are renewed or completed meanwhile
        outage.store(true, Ordering::Relaxed);
        let before = calls.load(Ordering::Relaxed);
        tokio::time::sleep(ms(3000)).await;
        let requests = calls.load(Ordering::Relaxed) - before;
        assert!(requests <= 60, "{requests} requests in three seconds");
        outage.store(false, Ordering::Relaxed);
        tokio::time::timeout(ms(20_000), all.all_settled())
            .await
            .expect("every message is settled after the outage");
    };
    consumer(&broker, store, handler)
        .lease(ms(6000))
        .run_until(shutdown)
        .await
        .expect("a clean end");
    assert_eq!(runs.load(Ordering::Relaxed), 3000);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_handler_is_dropped_at_the_end_of_its_lease_while_the_store_hangs() {
    let broker = broker((0..2000).map(|id| id.to_string()));
    let store = FaultyStore::new(|operation, _| {
        if operation.kind == OperationKind::Renew {
            Fault::Hangs
        } else {
            Fault::None
        }
    });
    let handler = Slow {
        takes: ms(60_000),
        ..Slow::default()
    };
    let started = Instant::now();
    let run = consumer(&broker, store, handler.clone())
        .lease(ms(600))
        .max_in_flight(2000)
        .run_until(tokio::time::sleep(ms(2500)));
    run.await.expect("a clean end");
    let mut dropped: Vec<Duration> = handler
        .dropped
        .lock()
        .expect("no panic")
        .iter()
        .map(|at| at.duration_since(started))
        .collect();
    dropped.sort_unstable();
    assert!(
        dropped[1999] < ms(1400),
        "the last of the first 2,000 was dropped after {:?}, with a lease of 600 ms",
        dropped[1999]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn renewals_continue_after_a_panic_of_the_store() {
    let (broker, panicked) = (broker_with_one_message(), AtomicBool::new(false));
    let store = FaultyStore::new(move |operation, _| match operation.kind {
        OperationKind::Renew if !panicked.swap(true, Ordering::Relaxed) => Fault::Panics,
        _ => Fault::None,
    });
    let handler = Slow {
        takes: ms(1500),
        ..Slow::default()
    };
    let all = broker.clone();
    consumer(&broker, store, handler.clone())
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(
        handler.runs.load(Ordering::Relaxed),
        1,
        "its lease was renewed"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_panic_in_the_drop_of_a_handler_is_an_unknown_outcome() {
    for (panics, handlers) in [
        (Panics::WhenDropped, Execution::Spawned),
        (Panics::WithPanickingPayload, Execution::Spawned),
        (Panics::WithPanickingPayload, Execution::Inline),
    ] {
        let broker = broker_with_one_message();
        let handler = Slow {
            takes: ms(60_000),
            panics,
            ..Slow::default()
        };
        let all = broker.clone();
        let run = consumer(&broker, MemoryStore::new(), handler)
            .handler_timeout(ms(300))
            .max_attempts(1)
            .execution(handlers);
        let run = run.run_until(async move { all.all_settled().await });
        tokio::time::timeout(ms(10_000), run)
            .await
            .expect("it is settled")
            .expect("a clean end");
        assert_eq!(broker.dead_letters()[0].reason, Reason::AttemptsSpent);
    }
}

#[tokio::test]
async fn a_panic_of_the_function_that_reads_the_id_is_an_unusable_id() {
    let broker = broker(["bad".to_owned(), "good".to_owned()]);
    let (handler, all) = (Slow::default(), broker.clone());
    let id = IdSource::by(|message| {
        let id = message.headers.last("id")?.to_vec();
        assert_ne!(id, b"bad", "an unexpected id");
        Some(id)
    });
    consumer(&broker, MemoryStore::new(), handler.clone())
        .id(id)
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
    let dead_letter = broker.dead_letters().remove(0);
    assert_eq!(dead_letter.reason, Reason::UnusableId);
    let error = dead_letter
        .failure_history
        .and_then(|failure_history| failure_history.first_error)
        .expect("a failure history");
    assert!(error.contains("an unexpected id"), "{error}");
    assert_eq!(handler.runs.load(Ordering::Relaxed), 1);
}

#[test]
fn thousands_of_deliveries_of_one_ordering_key_settle_without_a_stack_overflow() {
    const WAITING: usize = 20_000;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let broker = MemoryBroker::new("q");
        broker.publish(message("head").with_key("k"));
        (0..WAITING).for_each(|_| broker.publish(Message::new("without an id").with_key("k")));
        let handler = Slow {
            takes: ms(500),
            ..Slow::default()
        };
        let all = broker.clone();
        let run = consumer(&broker, MemoryStore::new(), handler)
            .order(Order::ByKey)
            .max_in_flight(WAITING + 1);
        let run = tokio::spawn(run.run_until(async move { all.all_settled().await }));
        run.await.expect("no overflow").expect("a clean end");
        assert_eq!(broker.dead_letters().len(), WAITING);
    });
}

#[tokio::test]
async fn durations_longer_than_ten_years_are_refused() {
    type Set = fn(
        Builder<MemorySource, MemoryStore, Slow, RawBytes>,
    ) -> Builder<MemorySource, MemoryStore, Slow, RawBytes>;
    let wrong: [(&str, Set); 5] = [
        ("drain_timeout", |builder| {
            builder.drain_timeout(Duration::MAX)
        }),
        ("handler_timeout", |builder| {
            builder.handler_timeout(Duration::MAX)
        }),
        ("backoff", |builder| builder.backoff(ms(100), Duration::MAX)),
        ("backoff", |builder| {
            builder.backoff(Duration::ZERO, Duration::ZERO)
        }),
        ("dedup_window", |builder| {
            builder.dedup_window(Duration::MAX)
        }),
    ];
    for (setting, set) in wrong {
        let error = set(consumer(
            &broker_with_one_message(),
            MemoryStore::new(),
            Slow::default(),
        ))
        .run_until(std::future::pending::<()>())
        .await
        .expect_err(setting);
        assert!(error.to_string().starts_with(setting), "{error}");
    }
    let most = Duration::from_secs(3650 * 24 * 3600);
    let broker = broker_with_one_message();
    let all = broker.clone();
    let longest = consumer(&broker, MemoryStore::new(), Slow::default())
        .drain_timeout(most)
        .handler_timeout(most)
        .backoff(ms(1), most)
        .dedup_window(most);
    longest
        .max_inline_retries(u32::MAX)
        .run_until(async move { all.all_settled().await })
        .await
        .expect("3650 days are allowed");
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_reports_whether_messages_are_received() {
    assert_readiness_follows_the_store(Outage::Hold).await;
}

/// The message is handled meanwhile, so only its late completion shows that the store answers again.
#[tokio::test(flavor = "multi_thread")]
async fn readiness_returns_with_the_answer_to_a_late_completion() {
    assert_readiness_follows_the_store(Outage::PassThrough).await;
}

async fn assert_readiness_follows_the_store(during_an_outage: Outage) {
    let (broker, readiness, outage) = (
        broker_with_one_message(),
        Readiness::new(),
        Arc::new(AtomicBool::new(true)),
    );
    let unavailable = outage.clone();
    let store = FaultyStore::new(move |_, _| {
        if unavailable.load(Ordering::Relaxed) {
            Fault::Unavailable
        } else {
            Fault::None
        }
    });
    let (all, seen) = (broker.clone(), readiness.clone());
    let becomes = async |ready: bool| {
        let changed = async {
            while seen.is_ready() != ready {
                tokio::time::sleep(ms(5)).await;
            }
        };
        tokio::time::timeout(ms(10_000), changed)
            .await
            .unwrap_or_else(|_| panic!("readiness becomes {ready}"));
    };
    assert!(!readiness.is_ready(), "it has not started");
    let shutdown = async {
        tokio::time::sleep(ms(100)).await;
        becomes(false).await; // a claim was not answered
        outage.store(false, Ordering::Relaxed);
        becomes(true).await;
        all.all_settled().await;
    };
    consumer(&broker, store, Slow::default())
        .outage(during_an_outage)
        .readiness(readiness.clone())
        .run_until(shutdown)
        .await
        .expect("a clean end");
    assert!(!readiness.is_ready(), "it has ended");
}

/// Records the ids of runs, and the maximum of concurrent runs.
#[derive(Clone, Default)]
struct CountsConcurrency {
    now: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
    ran: Arc<Mutex<Vec<String>>>,
}

impl Handler for CountsConcurrency {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        self.most.fetch_max(
            self.now.fetch_add(1, Ordering::SeqCst) + 1,
            Ordering::SeqCst,
        );
        self.ran
            .lock()
            .expect("no panic inside")
            .push(cx.id().to_owned());
        tokio::time::sleep(ms(if cx.id() == "b" { 300 } else { 1 })).await;
        self.now.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

/// With `max_in_flight` 1, `b` runs while the completion of `a` is unanswered. Then the store answers
/// that the claim of `a` was lost, and `a` has to run again.
#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_run_respects_max_in_flight() {
    let (counts, store) = (
        CountsConcurrency::default(),
        LosesMarkerOnce {
            store: MemoryStore::new(),
            lost: AtomicBool::new(false),
        },
    );
    let broker = broker(["a", "b"].map(str::to_owned));
    let all = broker.clone();
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store)
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .max_in_flight(1);
    consumer
        .handler(counts.clone())
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(
        *counts.ran.lock().expect("no panic inside"),
        ["a", "b", "a"]
    );
    assert_eq!(counts.most.load(Ordering::SeqCst), 1, "concurrent runs");
}

/// Answers `Lost` to the first completion of `a`, and removes its marker.
struct LosesMarkerOnce {
    store: MemoryStore,
    lost: AtomicBool,
}

#[async_trait]
impl Store for LosesMarkerOnce {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut answers = Vec::new();
        for operation in operations {
            let is_lost = operation.key == key("a")
                && operation.kind == OperationKind::Complete
                && !self.lost.swap(true, Ordering::Relaxed);
            if !is_lost {
                answers.append(&mut self.store.apply(std::slice::from_ref(operation)).await);
                continue;
            }
            self.store
                .apply(&[Operation {
                    kind: OperationKind::Clear(Effect::Nothing),
                    ..operation.clone()
                }])
                .await;
            answers.push(Ok(Verdict::Lost));
        }
        answers
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adaptive_lease_depends_on_the_duration_of_handlers() {
    let broker = broker((0..600).map(|id| id.to_string()));
    let leases = Arc::new(Mutex::new(Vec::new()));
    let asked = leases.clone();
    let store = FaultyStore::new(move |operation, _| {
        if operation.kind == OperationKind::Claim {
            asked.lock().expect("no panic").push(operation.terms.lease);
        }
        Fault::None
    });
    let (all, more) = (broker.clone(), broker.clone());
    let shutdown = async move {
        all.all_settled().await;
        more.publish(message("last"));
        all.all_settled().await;
    };
    let handler = Slow {
        takes: ms(20),
        ..Slow::default()
    };
    let run = consumer(&broker, store, handler).adaptive_lease(ms(300), ms(30_000));
    run.run_until(shutdown).await.expect("a clean end");
    let leases = leases.lock().expect("no panic");
    assert_eq!(leases.first(), Some(&ms(30_000)), "no run was measured yet");
    let last = *leases.last().expect("claims");
    assert!(
        last > ms(1000) && last < ms(5000),
        "{last:?} for handlers of 20 ms"
    );
}

/// A handler that is in doubt in the first run, and sleeps in the second.
#[derive(Clone, Default)]
struct InDoubtOnce(Arc<Mutex<HashSet<String>>>);

impl Handler for InDoubtOnce {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        if self.0.lock().expect("no panic").insert(cx.id().to_owned()) {
            return Err(Failure::InDoubt("no answer".into()));
        }
        tokio::time::sleep(ms(100)).await;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_failed_without_a_crash_run_concurrently() {
    let broker = broker((0..50).map(|id| id.to_string()));
    let (all, started) = (broker.clone(), Instant::now());
    consumer(&broker, MemoryStore::new(), InDoubtOnce::default())
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
    assert!(
        started.elapsed() < ms(2500),
        "one after the other would take 5 s: {:?}",
        started.elapsed()
    );
}

/// Messages that may have crashed an earlier process run in isolation. The last of them wait for
/// longer than a lease is renewed for one grant, three seconds here, and their runs complete.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_for_isolation_does_not_shorten_the_time_for_a_run() {
    let ids: Vec<String> = (0..13).map(|id| id.to_string()).collect();
    let store = MemoryStore::new();
    for id in &ids {
        let terms = Terms {
            guarantee: Guarantee::EffectivelyOnce,
            lease: ms(1),
            window: ms(60_000),
            fingerprint: None,
        };
        let claim = Operation {
            key: key(id),
            kind: OperationKind::Claim,
            token: Token(7),
            attempt: 0,
            terms,
        };
        assert!(matches!(
            store.apply(&[claim]).await[..],
            [Ok(Verdict::Granted(Attempts { number: 1, .. }))]
        ));
    }
    tokio::time::sleep(ms(20)).await; // their leases have ended
    let (broker, handler) = (
        broker(ids),
        Slow {
            takes: ms(350),
            ..Slow::default()
        },
    );
    let all = broker.clone();
    let run = consumer(&broker, store, handler.clone())
        .lease(ms(1000))
        .handler_timeout(ms(1000))
        .max_inline_retries(0)
        .max_reconciles(1);
    run.run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(
        handler.runs.load(Ordering::Relaxed),
        13,
        "a run was dropped and repeated"
    );
}

/// A handler that returns `Retry` while the consumer drains, and never returns in a second run.
#[derive(Clone, Default)]
struct RetriesInDrain(Arc<AtomicU32>);

impl Handler for RetriesInDrain {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
            tokio::time::sleep(ms(300)).await;
            return Err(Failure::Retry("nothing happened".into()));
        }
        std::future::pending().await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_inline_retry_starts_in_a_drain() {
    let (broker, store, handler) = (
        broker_with_one_message(),
        MemoryStore::new(),
        RetriesInDrain::default(),
    );
    let run = consumer(&broker, store.clone(), handler.clone())
        .guarantee(Guarantee::AtMostOnce)
        .allow_volatile_store()
        .drain_timeout(ms(2000));
    run.run_until(tokio::time::sleep(ms(100)))
        .await
        .expect("a clean end");
    assert_eq!(handler.0.load(Ordering::Relaxed), 1);
    assert_eq!(
        store.marker(&key("a")).0,
        Marker::Absent,
        "free for the next claim"
    );
}
