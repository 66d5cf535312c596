//! Drains with handlers that exceed the drain timeout: their outcome is unknown, and no crash is
//! counted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Reason;
use oncegate_core::marker::{Attempts, Doubt, Effect, Marker, Operation, OperationKind, Verdict};
use oncegate_core::*;
use tokio::sync::Notify;

const DRAIN_TIMEOUT: Duration = Duration::from_millis(50);
/// The documented maximum duration of a stop beyond the drain timeout.
const STOP_TIMEOUT: Duration = defaults::STOP_TIMEOUT;
/// Added to both timeouts for a busy machine.
const SLACK: Duration = Duration::from_secs(3);
const MESSAGES: usize = 20;

/// Runs until it is dropped, or until `returns` is set.
#[derive(Clone, Default)]
struct Slow(Arc<RunLog>);

#[derive(Default)]
struct RunLog {
    /// Whether handlers and `reconcile` return.
    returns: AtomicBool,
    /// The number of handlers that have started, and of `reconcile` calls.
    started: AtomicUsize,
    reconciled: AtomicUsize,
    changed: Notify,
    /// The number of handlers that run now, and its maximum.
    running: AtomicUsize,
    most_running: AtomicUsize,
    /// The attempt numbers of each id.
    attempts: Mutex<HashMap<String, Vec<u32>>>,
}

impl RunLog {
    async fn until(&self, count: &AtomicUsize, least: usize) {
        while count.load(Ordering::SeqCst) < least {
            let _ = tokio::time::timeout(Duration::from_millis(5), self.changed.notified()).await;
        }
    }

    fn attempts(&self, id: &str) -> Vec<u32> {
        let attempts = self.attempts.lock().expect("no panic inside");
        attempts.get(id).cloned().unwrap_or_default()
    }
}

/// Counts a running handler until it is dropped.
struct CountsRunning<'a>(&'a AtomicUsize);

impl Drop for CountsRunning<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Handler for Slow {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let now = self.0.running.fetch_add(1, Ordering::SeqCst) + 1;
        let _running = CountsRunning(&self.0.running);
        self.0.most_running.fetch_max(now, Ordering::SeqCst);
        self.0
            .attempts
            .lock()
            .expect("no panic inside")
            .entry(cx.id().to_string())
            .or_default()
            .push(cx.attempt());
        self.0.started.fetch_add(1, Ordering::SeqCst);
        self.0.changed.notify_waiters();
        if !self.0.returns.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(())
    }

    async fn reconcile(&self, _: Raw, _: &Context) -> Result<Reconciled, Failure> {
        self.0.reconciled.fetch_add(1, Ordering::SeqCst);
        if !self.0.returns.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        Ok(Reconciled::DidNotHappen)
    }
}

/// A broker with messages, a store and a handler.
struct Fixture {
    broker: MemoryBroker,
    store: MemoryStore,
    handler: Slow,
    messages: usize,
}

impl Fixture {
    fn new(messages: usize) -> Self {
        let broker = MemoryBroker::new("q");
        for number in 0..messages {
            broker.publish(Message::new("x").with_header("id", format!("id-{number}")));
        }
        Self {
            broker,
            store: MemoryStore::new(),
            handler: Slow::default(),
            messages,
        }
    }

    fn consumer<S: Store + 'static>(
        &self,
        guarantee: Guarantee,
        store: S,
    ) -> Builder<MemorySource, S, Slow, RawBytes> {
        Consumer::builder()
            .source(self.broker.source())
            .store(store)
            .handler(self.handler.clone())
            .decode(RawBytes)
            .guarantee(guarantee)
            .id(IdSource::header("id"))
            .allow_volatile_store()
            .lease(Duration::from_millis(400))
            .backoff(Duration::from_millis(5), Duration::from_millis(20))
            .drain_timeout(DRAIN_TIMEOUT)
    }

    /// Starts a consumer, and stops it once all handlers have started. Returns how long the stop took.
    async fn stop_while_all_run<S: Store + 'static>(
        &self,
        consumer: Builder<MemorySource, S, Slow, RawBytes>,
    ) -> Duration {
        let run_log = self.handler.0.clone();
        let all = run_log.started.load(Ordering::SeqCst) + self.messages;
        let stop_began = Arc::new(Mutex::new(None));
        let begins = stop_began.clone();
        let started = async move {
            run_log.until(&run_log.started, all).await;
            *begins.lock().expect("no panic inside") = Some(Instant::now());
        };
        tokio::time::timeout(Duration::from_secs(60), consumer.run_until(started))
            .await
            .expect("all handlers start, and it stops")
            .expect("a clean end");
        let stop_began = stop_began.lock().expect("no panic inside").take();
        stop_began.expect("it was stopped").elapsed()
    }

    /// Lets handlers return from now on, and runs a consumer until every message is settled.
    async fn finish<S: Store + 'static>(&self, consumer: Builder<MemorySource, S, Slow, RawBytes>) {
        self.handler.0.returns.store(true, Ordering::SeqCst);
        self.handler.0.most_running.store(0, Ordering::SeqCst);
        let all = self.broker.clone();
        tokio::time::timeout(
            Duration::from_secs(60),
            consumer.run_until(async move { all.all_settled().await }),
        )
        .await
        .expect("everything is settled")
        .expect("a clean end");
    }

    fn ids(&self) -> impl Iterator<Item = String> {
        (0..self.messages).map(|number| format!("id-{number}"))
    }

    fn marker(&self, id: &str) -> Marker {
        self.store
            .marker(&Key::new(&MessageId::new(id).expect("an id")))
            .0
    }
}

#[tokio::test]
async fn a_handler_dropped_at_the_drain_timeout_counts_no_crash() {
    let fixture = Fixture::new(MESSAGES);
    let consumer = || {
        fixture
            .consumer(Guarantee::EffectivelyOnce, fixture.store.clone())
            .max_attempts(6)
    };
    for stop in 1..=3 {
        let took = fixture.stop_while_all_run(consumer()).await;
        assert!(took < DRAIN_TIMEOUT + SLACK, "stop {stop} took {took:?}");
        assert_eq!(fixture.broker.unsettled(), MESSAGES, "stop {stop}");
        for id in fixture.ids() {
            let expected = Marker::Cleared {
                attempts: Attempts::new(stop),
                effect: Effect::Unknown,
            };
            assert_eq!(fixture.marker(&id), expected, "stop {stop}: {id}");
        }
    }
    fixture.finish(consumer()).await;
    let run_log = &fixture.handler.0;
    assert_eq!(
        run_log.most_running.load(Ordering::SeqCst),
        MESSAGES,
        "no message runs in isolation"
    );
    for id in fixture.ids() {
        assert_eq!(run_log.attempts(&id), [1, 2, 3, 4], "{id}");
    }
    assert!(fixture.broker.dead_letters().is_empty());
}

#[tokio::test]
async fn a_handler_dropped_at_the_drain_timeout_spends_an_attempt() {
    let fixture = Fixture::new(1);
    let consumer = || {
        fixture
            .consumer(Guarantee::EffectivelyOnce, fixture.store.clone())
            .max_attempts(2)
    };
    for _ in 0..2 {
        fixture.stop_while_all_run(consumer()).await;
        assert!(fixture.broker.dead_letters().is_empty());
    }
    fixture.finish(consumer()).await;
    assert_eq!(fixture.handler.0.attempts("id-0"), [1, 2]);
    let dead_letters = fixture.broker.dead_letters();
    let reasons: Vec<_> = dead_letters
        .iter()
        .map(|dead_letter| {
            (
                dead_letter.reason,
                dead_letter
                    .failure_history
                    .as_ref()
                    .map(|history| history.attempts),
            )
        })
        .collect();
    assert_eq!(reasons, [(Reason::AttemptsSpent, Some(2))]);
}

#[tokio::test]
async fn at_most_once_a_dropped_handler_is_in_doubt_and_the_next_consumer_reconciles() {
    let fixture = Fixture::new(MESSAGES);
    let consumer = || fixture.consumer(Guarantee::AtMostOnce, fixture.store.clone());
    fixture.stop_while_all_run(consumer()).await;
    let in_doubt = |expected: Attempts| {
        for id in fixture.ids() {
            match fixture.marker(&id) {
                Marker::InDoubt(hold, Doubt::Waiting) => assert_eq!(hold.attempts, expected),
                other => panic!("{id}: {other:?}"),
            }
        }
    };
    in_doubt(Attempts::new(1));

    // A `reconcile` that exceeds the drain timeout is dropped, too.
    let run_log = fixture.handler.0.clone();
    let reconciles = async move { run_log.until(&run_log.reconciled, MESSAGES).await };
    consumer().run_until(reconciles).await.expect("a clean end");
    in_doubt(Attempts {
        number: 2,
        base: 1,
        crashes: 0,
    });

    fixture.finish(consumer()).await;
    let run_log = &fixture.handler.0;
    assert_eq!(run_log.reconciled.load(Ordering::SeqCst), 2 * MESSAGES);
    assert_eq!(run_log.most_running.load(Ordering::SeqCst), MESSAGES);
    for id in fixture.ids() {
        assert_eq!(run_log.attempts(&id), [1, 4], "{id}");
    }
    assert!(fixture.broker.dead_letters().is_empty() && fixture.broker.in_doubt().is_empty());
}

#[tokio::test]
async fn bare_runs_a_dropped_handler_again() {
    let fixture = Fixture::new(MESSAGES);
    let consumer = || fixture.consumer(Guarantee::Bare, fixture.store.clone());
    fixture.stop_while_all_run(consumer()).await;
    assert!(fixture.store.is_empty());
    fixture.finish(consumer()).await;
    for id in fixture.ids() {
        assert_eq!(fixture.handler.0.attempts(&id).len(), 2, "{id}");
    }
}

/// The fault of a store in all operations except claims and renewals.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fault {
    NeverAnswers,
    LosesTheFirstReplies,
}

struct FaultyStore {
    store: MemoryStore,
    fault: Fault,
    calls: AtomicUsize,
}

#[async_trait]
impl Store for FaultyStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let records = |operation: &Operation| {
            !matches!(operation.kind, OperationKind::Claim | OperationKind::Renew)
        };
        let answers = self.store.apply(operations).await;
        if !operations.iter().any(records) {
            return answers;
        }
        let before = self.calls.fetch_add(1, Ordering::SeqCst);
        match self.fault {
            Fault::NeverAnswers => std::future::pending().await,
            Fault::LosesTheFirstReplies if before < 2 => {
                let lost = |_| Err(StoreError::Unknown("the reply was lost".into()));
                operations.iter().map(lost).collect()
            }
            Fault::LosesTheFirstReplies => answers,
        }
    }
}

impl Fixture {
    fn faulty(&self, fault: Fault) -> FaultyStore {
        FaultyStore {
            store: self.store.clone(),
            fault,
            calls: AtomicUsize::new(0),
        }
    }
}

#[tokio::test]
async fn a_store_that_does_not_answer_delays_a_stop_by_the_stop_timeout() {
    for guarantee in [Guarantee::EffectivelyOnce, Guarantee::AtMostOnce] {
        let fixture = Fixture::new(MESSAGES);
        let consumer = fixture.consumer(guarantee, fixture.faulty(Fault::NeverAnswers));
        let took = fixture.stop_while_all_run(consumer).await;
        assert!(
            took < DRAIN_TIMEOUT + STOP_TIMEOUT + SLACK,
            "it took {took:?}"
        );
        assert!(took >= DRAIN_TIMEOUT + STOP_TIMEOUT, "it took {took:?}");
        assert_eq!(fixture.broker.unsettled(), MESSAGES);
        fixture
            .finish(fixture.consumer(guarantee, fixture.store.clone()))
            .await;
    }
}

#[tokio::test]
async fn an_operation_with_a_lost_reply_is_repeated_within_the_stop_timeout() {
    let fixture = Fixture::new(MESSAGES);
    let consumer = fixture
        .consumer(
            Guarantee::EffectivelyOnce,
            fixture.faulty(Fault::LosesTheFirstReplies),
        )
        .max_in_flight(MESSAGES);
    let took = fixture.stop_while_all_run(consumer).await;
    assert!(
        took < DRAIN_TIMEOUT + STOP_TIMEOUT + SLACK,
        "it took {took:?}"
    );
    for id in fixture.ids() {
        let expected = Marker::Cleared {
            attempts: Attempts::new(1),
            effect: Effect::Unknown,
        };
        assert_eq!(fixture.marker(&id), expected, "{id}");
    }
    fixture
        .finish(fixture.consumer(Guarantee::EffectivelyOnce, fixture.store.clone()))
        .await;
    assert_eq!(fixture.handler.0.attempts("id-0"), [1, 2]);
}

/// An unavailable store. Whether it applied an operation is unknown for its first answers.
struct Unavailable {
    unknown: usize,
    applies: Arc<AtomicUsize>,
}

#[async_trait]
impl Store for Unavailable {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let applied_before = self.applies.fetch_add(1, Ordering::SeqCst);
        let error = || {
            let text = || "connection refused".into();
            if applied_before < self.unknown {
                StoreError::Unknown(text())
            } else {
                StoreError::NotApplied(text())
            }
        };
        operations.iter().map(|_| Err(error())).collect()
    }
}

/// How long a stop takes while the store is unavailable and no handler has run.
async fn stop_without_store(unknown: usize, drain_timeout: Duration) -> Duration {
    let fixture = Fixture::new(MESSAGES);
    let applies = Arc::new(AtomicUsize::new(0));
    let store = Unavailable {
        unknown,
        applies: applies.clone(),
    };
    let began = Arc::new(Mutex::new(None));
    let stop_began = began.clone();
    let consumer = fixture
        .consumer(Guarantee::AtMostOnce, store)
        .drain_timeout(drain_timeout);
    let stop = async move {
        while applies.load(Ordering::SeqCst) < 3 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        *stop_began.lock().expect("no panic inside") = Some(Instant::now());
    };
    consumer.run_until(stop).await.expect("a clean end");
    assert_eq!(fixture.broker.unsettled(), MESSAGES);
    assert_eq!(fixture.handler.0.started.load(Ordering::SeqCst), 0);
    let began = began.lock().expect("no panic inside").take();
    began.expect("it was stopped").elapsed()
}

#[tokio::test]
async fn a_stop_does_not_wait_for_a_store_that_has_no_claim() {
    let took = stop_without_store(0, Duration::from_secs(60)).await;
    assert!(took < STOP_TIMEOUT + SLACK, "{took:?}");
}

#[tokio::test]
async fn a_stop_waits_for_a_store_that_may_have_a_claim() {
    let took = stop_without_store(1, Duration::from_millis(500)).await;
    assert!(took >= Duration::from_millis(500), "{took:?}");
}
