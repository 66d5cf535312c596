//! Stops with handlers that outlast the drain timeout: their outcome is unknown, and no crash is
//! counted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Reason;
use oncegate_core::marker::{Ask, Attempts, Doubt, Effect, Marker, Operation, Verdict};
use oncegate_core::*;
use tokio::sync::Notify;

const DRAIN: Duration = Duration::from_millis(50);
/// The documented maximum duration of a stop beyond the drain timeout.
const BOUND: Duration = Duration::from_secs(2);
/// Added to the bound for a busy machine.
const SLACK: Duration = Duration::from_secs(3);
const MESSAGES: usize = 20;

/// Runs until it is dropped, or until `returns` is set.
#[derive(Clone, Default)]
struct Slow(Arc<Watched>);

#[derive(Default)]
struct Watched {
    /// Whether handlers and `reconcile` return.
    returns: AtomicBool,
    /// The number of handlers that have started, and of `reconcile` calls.
    started: AtomicUsize,
    reconciled: AtomicUsize,
    changed: Notify,
    runs: AtomicUsize,
    most_at_once: AtomicUsize,
    attempts: Mutex<HashMap<String, Vec<u32>>>,
}

impl Watched {
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
struct Runs<'a>(&'a AtomicUsize);

impl Drop for Runs<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Handler for Slow {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let now = self.0.runs.fetch_add(1, Ordering::SeqCst) + 1;
        let _runs = Runs(&self.0.runs);
        self.0.most_at_once.fetch_max(now, Ordering::SeqCst);
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

struct World {
    broker: MemoryBroker,
    store: MemoryStore,
    handler: Slow,
    messages: usize,
}

impl World {
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
            .drain_timeout(DRAIN)
    }

    /// Starts a consumer, and stops it once all handlers have started. Returns the duration of the stop.
    async fn stop_while_all_run<S: Store + 'static>(
        &self,
        consumer: Builder<MemorySource, S, Slow, RawBytes>,
    ) -> Duration {
        let watched = self.handler.0.clone();
        let all = watched.started.load(Ordering::SeqCst) + self.messages;
        let stopped = Arc::new(Mutex::new(None));
        let stopping = stopped.clone();
        let started = async move {
            watched.until(&watched.started, all).await;
            *stopping.lock().expect("no panic inside") = Some(Instant::now());
        };
        tokio::time::timeout(Duration::from_secs(60), consumer.run_until(started))
            .await
            .expect("all handlers start, and it stops")
            .expect("a clean end");
        let stopped = stopped.lock().expect("no panic inside").take();
        stopped.expect("it was stopped").elapsed()
    }

    /// From now on handlers return: runs a consumer until everything is settled.
    async fn finish<S: Store + 'static>(&self, consumer: Builder<MemorySource, S, Slow, RawBytes>) {
        self.handler.0.returns.store(true, Ordering::SeqCst);
        self.handler.0.most_at_once.store(0, Ordering::SeqCst);
        let all = self.broker.clone();
        tokio::time::timeout(
            Duration::from_secs(60),
            consumer.run_until(async move { all.drained().await }),
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
async fn stops_with_handlers_that_outlast_the_drain_count_no_crash() {
    let world = World::new(MESSAGES);
    let consumer = || {
        world
            .consumer(Guarantee::EffectivelyOnce, world.store.clone())
            .max_attempts(6)
    };
    for stop in 1..=3 {
        let took = world.stop_while_all_run(consumer()).await;
        assert!(took < DRAIN + SLACK, "stop {stop} took {took:?}");
        assert_eq!(world.broker.unsettled(), MESSAGES, "stop {stop}");
        for id in world.ids() {
            let expected = Marker::Cleared {
                attempts: Attempts::new(stop),
                effect: Effect::Unknown,
            };
            assert_eq!(world.marker(&id), expected, "stop {stop}: {id}");
        }
    }
    world.finish(consumer()).await;
    let watched = &world.handler.0;
    assert_eq!(
        watched.most_at_once.load(Ordering::SeqCst),
        MESSAGES,
        "nothing runs alone"
    );
    for id in world.ids() {
        assert_eq!(watched.attempts(&id), [1, 2, 3, 4], "{id}");
    }
    assert!(world.broker.dead_letters().is_empty());
}

#[tokio::test]
async fn each_stop_that_drops_a_handler_spends_an_attempt() {
    let world = World::new(1);
    let consumer = || {
        world
            .consumer(Guarantee::EffectivelyOnce, world.store.clone())
            .max_attempts(2)
    };
    for _ in 0..2 {
        world.stop_while_all_run(consumer()).await;
        assert!(world.broker.dead_letters().is_empty());
    }
    world.finish(consumer()).await;
    assert_eq!(world.handler.0.attempts("id-0"), [1, 2]);
    let letters = world.broker.dead_letters();
    let told: Vec<_> = letters
        .iter()
        .map(|letter| {
            (
                letter.reason,
                letter.failure_history.as_ref().map(|it| it.attempts),
            )
        })
        .collect();
    assert_eq!(told, [(Reason::AttemptsSpent, Some(2))]);
}

#[tokio::test]
async fn at_most_once_a_dropped_handler_is_in_doubt_and_the_next_consumer_reconciles() {
    let world = World::new(MESSAGES);
    let consumer = || world.consumer(Guarantee::AtMostOnce, world.store.clone());
    world.stop_while_all_run(consumer()).await;
    let in_doubt = |expected: Attempts| {
        for id in world.ids() {
            match world.marker(&id) {
                Marker::InDoubt(hold, Doubt::Waiting) => assert_eq!(hold.attempts, expected),
                other => panic!("{id}: {other:?}"),
            }
        }
    };
    in_doubt(Attempts::new(1));

    // A `reconcile` that outlasts the drain is dropped, too.
    let watched = world.handler.0.clone();
    let reconciles = async move { watched.until(&watched.reconciled, MESSAGES).await };
    consumer().run_until(reconciles).await.expect("a clean end");
    in_doubt(Attempts {
        number: 2,
        base: 1,
        crashes: 0,
    });

    world.finish(consumer()).await;
    let watched = &world.handler.0;
    assert_eq!(watched.reconciled.load(Ordering::SeqCst), 2 * MESSAGES);
    assert_eq!(watched.most_at_once.load(Ordering::SeqCst), MESSAGES);
    for id in world.ids() {
        assert_eq!(watched.attempts(&id), [1, 4], "{id}");
    }
    assert!(world.broker.dead_letters().is_empty() && world.broker.in_doubt().is_empty());
}

#[tokio::test]
async fn bare_a_dropped_handler_runs_again() {
    let world = World::new(MESSAGES);
    let consumer = || world.consumer(Guarantee::Bare, world.store.clone());
    world.stop_while_all_run(consumer()).await;
    assert!(world.store.is_empty());
    world.finish(consumer()).await;
    for id in world.ids() {
        assert_eq!(world.handler.0.attempts(&id).len(), 2, "{id}");
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
    asked: AtomicUsize,
}

#[async_trait]
impl Store for FaultyStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let records = |it: &Operation| !matches!(it.ask, Ask::Claim | Ask::Renew);
        let answers = self.store.apply(operations).await;
        if !operations.iter().any(records) {
            return answers;
        }
        let before = self.asked.fetch_add(1, Ordering::SeqCst);
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

impl World {
    fn faulty(&self, fault: Fault) -> FaultyStore {
        FaultyStore {
            store: self.store.clone(),
            fault,
            asked: AtomicUsize::new(0),
        }
    }
}

#[tokio::test]
async fn a_store_that_hangs_delays_a_stop_up_to_the_bound() {
    for guarantee in [Guarantee::EffectivelyOnce, Guarantee::AtMostOnce] {
        let world = World::new(MESSAGES);
        let consumer = world.consumer(guarantee, world.faulty(Fault::NeverAnswers));
        let took = world.stop_while_all_run(consumer).await;
        assert!(took < DRAIN + BOUND + SLACK, "it took {took:?}");
        assert!(took >= DRAIN + BOUND, "it took {took:?}");
        assert_eq!(world.broker.unsettled(), MESSAGES);
        world
            .finish(world.consumer(guarantee, world.store.clone()))
            .await;
    }
}

#[tokio::test]
async fn an_operation_with_a_lost_reply_is_repeated_within_the_bound() {
    let world = World::new(MESSAGES);
    let consumer = world
        .consumer(
            Guarantee::EffectivelyOnce,
            world.faulty(Fault::LosesTheFirstReplies),
        )
        .max_in_flight(MESSAGES);
    let took = world.stop_while_all_run(consumer).await;
    assert!(took < DRAIN + BOUND + SLACK, "it took {took:?}");
    for id in world.ids() {
        let expected = Marker::Cleared {
            attempts: Attempts::new(1),
            effect: Effect::Unknown,
        };
        assert_eq!(world.marker(&id), expected, "{id}");
    }
    world
        .finish(world.consumer(Guarantee::EffectivelyOnce, world.store.clone()))
        .await;
    assert_eq!(world.handler.0.attempts("id-0"), [1, 2]);
}
