//! The consumer on the in-memory source and store.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::marker::{Ask, Marker, Operation, Terms, Token, Verdict};
use oncegate_core::*;
use tokio::sync::{Notify, oneshot};

/// A handler that behaves as the body says, and counts its runs.
#[derive(Clone, Default)]
struct Scripted {
    runs: Arc<Mutex<Vec<(String, u32)>>>,
    effects: Arc<AtomicU32>,
    found: Arc<Mutex<Option<Reconciled>>>,
}

impl Handler for Scripted {
    type Payload = String;

    async fn handle(&self, says: String, cx: &Context) -> Result<(), Failure> {
        let run = {
            let mut runs = self.runs.lock().expect("no panic inside");
            runs.push((cx.id().to_owned(), cx.attempt()));
            runs.iter().filter(|(id, _)| id == cx.id()).count()
        };
        match says.as_str() {
            "retry once" if run == 1 => Err("not yet").retry()?,
            "always retry" => Err("never").retry()?,
            "refuse" => Err("no such account").reject()?,
            "doubt" => Err("no answer").in_doubt()?,
            "doubt once" if run == 1 => Err("no answer").in_doubt()?,
            "panic once" if run == 1 => std::panic::panic_any(7),
            "hang" => std::future::pending().await,
            "slow" => tokio::time::sleep(Duration::from_millis(300)).await,
            _ => {}
        }
        self.effects.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    async fn reconcile(&self, _: String, _: &Context) -> Result<Reconciled, Failure> {
        Ok(self
            .found
            .lock()
            .expect("no panic inside")
            .unwrap_or(Reconciled::Unknown))
    }
}

struct World {
    broker: MemoryBroker,
    store: MemoryStore,
    handler: Scripted,
}

impl World {
    fn new() -> Self {
        Self {
            broker: MemoryBroker::new("q"),
            store: MemoryStore::new(),
            handler: Scripted::default(),
        }
    }

    fn publish(&self, id: &str, says: &str) {
        self.broker
            .publish(Message::new(serde_json::to_vec(says).expect("JSON")).with_header("id", id));
    }

    /// Runs a consumer until everything is settled.
    async fn drain(&self, guarantee: Guarantee) {
        let broker = self.broker.clone();
        self.consumer(guarantee)
            .run_until(async move { broker.drained().await })
            .await
            .expect("a clean end");
    }

    fn consumer(&self, guarantee: Guarantee) -> Builder<MemorySource, MemoryStore, Scripted, Json> {
        Consumer::builder()
            .source(self.broker.source())
            .store(self.store.clone())
            .handler(self.handler.clone())
            .guarantee(guarantee)
            .id(IdSource::header("id"))
            .allow_volatile_store()
            .lease(Duration::from_millis(400))
            .backoff(Duration::from_millis(5), Duration::from_millis(20))
            .max_inline_retries(1)
            .max_attempts(2)
            .max_reconciles(2)
            .handler_timeout(Duration::from_millis(900))
            .drain_timeout(Duration::from_secs(5))
    }

    fn runs(&self) -> usize {
        self.handler.runs.lock().expect("no panic inside").len()
    }

    fn effects(&self) -> u32 {
        self.handler.effects.load(Ordering::Relaxed)
    }

    fn marker(&self, id: &str) -> Marker {
        self.store
            .marker(&Key::new(&MessageId::new(id).expect("an id")))
            .0
    }

    fn reasons(&self) -> Vec<Reason> {
        self.broker
            .dead_letters()
            .into_iter()
            .chain(self.broker.in_doubt())
            .map(|letter| letter.reason)
            .collect()
    }
}

#[tokio::test]
async fn duplicates_are_handled_once_in_order_and_at_the_same_time() {
    let world = World::new();
    for id in 0..1000 {
        world.publish(&format!("id-{id}"), "work");
        world.publish(&format!("id-{}", id / 2), "work");
    }
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!(world.effects(), 1000);
    assert_eq!(world.reasons(), []);
}

#[tokio::test]
async fn inline_handlers_give_the_same_result() {
    let world = World::new();
    for id in 0..500 {
        world.publish(
            &format!("id-{}", id / 2),
            if id % 50 == 0 { "slow" } else { "work" },
        );
    }
    let broker = world.broker.clone();
    let consumer = world
        .consumer(Guarantee::EffectivelyOnce)
        .execution(Execution::Inline);
    consumer
        .run_until(async move { broker.drained().await })
        .await
        .expect("a clean end");
    assert_eq!(world.effects(), 250);
}

#[tokio::test]
async fn a_failure_without_an_effect_is_retried_and_then_dead_lettered() {
    let world = World::new();
    world.publish("a", "retry once");
    world.publish("b", "always retry");
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!(world.effects(), 1);
    assert_eq!(
        world.marker("a"),
        Marker::Done(Some(Fingerprint::of(b"\"retry once\"")))
    );
    assert_eq!(world.reasons(), [Reason::AttemptsSpent]);
    assert!(matches!(world.marker("b"), Marker::Rejected { .. }));
    let letter = world.broker.dead_letters().remove(0);
    let failure_history = letter.failure_history.expect("a failure history");
    assert_eq!(
        (failure_history.id.as_deref(), failure_history.attempts),
        (Some("b"), 2)
    );
    assert!(
        failure_history
            .last_error
            .expect("an error")
            .contains("never")
    );
}

#[tokio::test]
async fn messages_without_a_usable_id_or_payload_are_dead_lettered_and_others_are_handled() {
    let world = World::new();
    world
        .broker
        .publish(Message::new("{not json").with_header("id", "broken"));
    world.broker.publish(Message::new("\"no id\""));
    world
        .broker
        .publish(Message::new("\"empty id\"").with_header("id", ""));
    world.broker.publish(
        Message::new("\"two ids\"")
            .with_header("id", "a")
            .with_header("id", "b"),
    );
    world.publish("refused", "refuse");
    world.publish("good", "work");
    world.drain(Guarantee::EffectivelyOnce).await;
    let letters = world.broker.dead_letters();
    let failure_history = letters
        .into_iter()
        .find(|letter| letter.reason == Reason::UnusableId)
        .and_then(|letter| letter.failure_history);
    assert!(
        failure_history
            .and_then(|failure_history| failure_history.first_error)
            .expect("what was found")
            .contains("header `id` is ambiguous")
    );
    let mut reasons = world.reasons();
    reasons.sort_by_key(|reason| reason.as_str());
    assert_eq!(
        reasons,
        [
            Reason::MissingId,
            Reason::MissingId,
            Reason::Refused,
            Reason::Unreadable,
            Reason::UnusableId
        ]
    );
    assert_eq!(world.effects(), 1);
}

#[tokio::test]
async fn the_same_id_with_another_body_is_a_conflict_at_most_once() {
    let world = World::new();
    world.publish("a", "work");
    world.drain(Guarantee::AtMostOnce).await;
    world.publish("a", "other work");
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!(
        (world.effects(), world.reasons()),
        (1, vec![Reason::Conflict])
    );
}

#[tokio::test]
async fn a_panic_is_in_doubt_and_not_run_again_with_at_most_once() {
    let world = World::new();
    world.publish("a", "panic once");
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!((world.runs(), world.effects()), (1, 0));
    assert_eq!(world.reasons(), [Reason::InDoubt(DoubtCause::Panicked)]);
    assert!(matches!(world.marker("a"), Marker::InDoubt(..)));
}

#[tokio::test]
async fn a_panic_runs_again_with_a_higher_attempt_number_with_effectively_once() {
    let world = World::new();
    world.publish("a", "panic once");
    world.drain(Guarantee::EffectivelyOnce).await;
    assert_eq!(
        *world.handler.runs.lock().expect("no panic inside"),
        [("a".to_owned(), 1), ("a".to_owned(), 2)]
    );
    assert_eq!(world.effects(), 1);
}

#[tokio::test]
async fn reconcile_that_finds_the_effect_accepts_without_a_run() {
    let world = World::new();
    *world.handler.found.lock().expect("no panic inside") = Some(Reconciled::Happened);
    world.publish("a", "doubt");
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!((world.runs(), world.reasons().len()), (1, 0));
    assert!(matches!(world.marker("a"), Marker::Done(_)));
}

#[tokio::test]
async fn after_reconcile_finds_no_effect_it_runs_again_with_a_higher_attempt_number() {
    let world = World::new();
    *world.handler.found.lock().expect("no panic inside") = Some(Reconciled::DidNotHappen);
    world.publish("a", "doubt once");
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!(
        *world.handler.runs.lock().expect("no panic inside"),
        [("a".to_owned(), 1), ("a".to_owned(), 2)]
    );
    assert_eq!((world.effects(), world.reasons().len()), (1, 0));
}

#[tokio::test]
async fn a_handler_that_does_not_return_is_in_doubt_at_its_timeout() {
    let world = World::new();
    world.publish("a", "hang");
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!(world.reasons(), [Reason::InDoubt(DoubtCause::TimedOut)]);
}

#[tokio::test]
async fn after_a_crash_in_a_handler_at_most_once_is_in_doubt_and_others_run_again() {
    for (guarantee, runs, in_doubt) in [
        (Guarantee::AtMostOnce, 1, 1),
        (Guarantee::EffectivelyOnce, 2, 0),
        (Guarantee::Bare, 1, 0),
    ] {
        let world = World::new();
        world.publish("a", "slow");
        let (dead, died) = oneshot::channel::<()>();
        let doomed = tokio::spawn(world.consumer(guarantee).run_until(async {
            let _ = died.await;
        }));
        while world.runs() == 0 {
            tokio::task::yield_now().await;
        }
        doomed.abort();
        assert!(doomed.await.expect_err("it was aborted").is_cancelled());
        drop(dead);
        world.drain(guarantee).await;
        assert_eq!(world.runs(), runs, "{guarantee:?}");
        assert_eq!(world.broker.in_doubt().len(), in_doubt, "{guarantee:?}");
        let expected = if guarantee == Guarantee::EffectivelyOnce {
            1
        } else {
            0
        }; // the bare gate loses the message
        assert_eq!(world.effects(), expected, "{guarantee:?}");
    }
}

/// Two consumers with different settings on one queue: a marker of the first one that crashed keeps
/// its lease and its guarantee, whatever the settings of the other.
#[tokio::test]
async fn a_change_of_settings_while_consumers_run_keeps_the_guarantee() {
    use Guarantee::{AtMostOnce, EffectivelyOnce};
    let (short, long) = (Duration::from_millis(400), Duration::from_secs(60));
    for (old, old_lease, new, new_lease) in [
        (AtMostOnce, short, EffectivelyOnce, long),
        (EffectivelyOnce, short, AtMostOnce, long),
        (AtMostOnce, long, EffectivelyOnce, short),
        (EffectivelyOnce, short, EffectivelyOnce, long),
    ] {
        let case = format!("{old:?} {old_lease:?} to {new:?} {new_lease:?}");
        let world = World::new();
        world.publish("crashed-on", "slow");
        let doomed = tokio::spawn(
            world
                .consumer(old)
                .lease(old_lease)
                .run_until(std::future::pending::<()>()),
        );
        while world.runs() == 0 {
            tokio::task::yield_now().await;
        }
        doomed.abort();
        assert!(doomed.await.expect_err("it was aborted").is_cancelled());

        let started = Instant::now();
        (0..50).for_each(|id| world.publish(&format!("id-{id}"), "work"));
        let (settled, runs) = (world.broker.clone(), world.handler.runs.clone());
        let shutdown = async move {
            if old_lease == short {
                settled.drained().await;
            } else {
                // The lease of the new consumer is short, that of the marker is not.
                tokio::time::sleep(2 * short).await;
                let runs = runs
                    .lock()
                    .expect("no panic inside")
                    .iter()
                    .filter(|(id, _)| id == "crashed-on")
                    .count();
                assert_eq!(
                    runs, 1,
                    "a lease of a minute was taken for one of {short:?}"
                );
            }
        };
        let others = world
            .consumer(old)
            .lease(old_lease)
            .dedup_window(Duration::from_secs(3600))
            .run_until(std::future::pending::<()>());
        let others = tokio::spawn(others);
        world
            .consumer(new)
            .lease(new_lease)
            .dedup_window(Duration::from_secs(7200))
            .run_until(shutdown)
            .await
            .expect("a clean end");
        others.abort();
        if old_lease == short {
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "{case}: the lease of the marker applies"
            );
            let strict = old == AtMostOnce || new == AtMostOnce;
            // If either guarantee is at most once, the message is not run again without
            // `reconcile`.
            let in_doubt = world.broker.in_doubt().len();
            let again = world
                .handler
                .runs
                .lock()
                .expect("no panic inside")
                .iter()
                .filter(|(id, _)| id == "crashed-on")
                .count()
                - 1;
            assert_eq!(in_doubt + again, 1, "{case}");
            assert!(
                !(old == AtMostOnce && again > 0),
                "{case}: the marker is at most once"
            );
            assert!(strict || again == 1, "{case}");
        }
        for id in 0..50 {
            let runs = world
                .handler
                .runs
                .lock()
                .expect("no panic inside")
                .iter()
                .filter(|(it, _)| *it == format!("id-{id}"))
                .count();
            assert_eq!(runs, 1, "{case} id-{id}");
        }
    }
}

#[tokio::test]
async fn a_lease_is_renewed_while_its_handler_runs() {
    let world = World::new();
    for _ in 0..3 {
        world.publish("a", "slow");
    }
    let broker = world.broker.clone();
    let consumer = world
        .consumer(Guarantee::AtMostOnce)
        .lease(Duration::from_millis(120));
    consumer
        .run_until(async move { broker.drained().await })
        .await
        .expect("a clean end");
    assert_eq!(
        (world.runs(), world.effects(), world.reasons().len()),
        (1, 1, 0)
    );
}

#[tokio::test]
async fn keys_stay_in_order_and_do_not_delay_each_other() {
    let world = World::new();
    for n in 0..200 {
        let body = serde_json::to_vec("work").expect("JSON");
        world.broker.publish(
            Message::new(body)
                .with_key(format!("key-{}", n % 7))
                .with_header("id", format!("{}-{n:04}", n % 7)),
        );
    }
    let broker = world.broker.clone();
    world
        .consumer(Guarantee::EffectivelyOnce)
        .order(Order::ByKey)
        .run_until(async move { broker.drained().await })
        .await
        .expect("a clean end");
    let runs = world.handler.runs.lock().expect("no panic inside").clone();
    for key in 0..7 {
        let of_key: Vec<_> = runs
            .iter()
            .filter(|(id, _)| id.starts_with(&format!("{key}-")))
            .map(|(id, _)| id.clone())
            .collect();
        assert!(of_key.is_sorted() && of_key.len() >= 28, "{of_key:?}");
    }
}

#[tokio::test]
async fn a_drain_completes_running_handlers_and_releases_other_deliveries() {
    let world = World::new();
    for id in 0..20 {
        world.publish(&format!("id-{id}"), "slow");
    }
    let handler = world.handler.clone();
    let started = async move {
        while handler.runs.lock().expect("no panic inside").len() < 4 {
            tokio::task::yield_now().await;
        }
    };
    world
        .consumer(Guarantee::AtMostOnce)
        .max_in_flight(4)
        .run_until(started)
        .await
        .expect("a clean end");
    assert_eq!(world.effects(), 4);
    assert_eq!(world.broker.unsettled(), 16);
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!((world.effects(), world.reasons().len()), (20, 0));
}

#[tokio::test]
async fn wrong_settings_are_refused_with_the_setting_and_a_remedy() {
    let world = World::new();
    let base = || world.consumer(Guarantee::EffectivelyOnce);
    let wrong = [
        ("dedup_window", base().dedup_window(Duration::ZERO)),
        (
            "lease",
            base()
                .dedup_window(Duration::from_secs(1))
                .lease(Duration::from_secs(1)),
        ),
        ("max_in_flight", base().max_in_flight(0)),
        ("max_attempts", base().max_attempts(0)),
        ("handler_timeout", base().handler_timeout(Duration::ZERO)),
        (
            "outage",
            base()
                .guarantee(Guarantee::AtMostOnce)
                .outage(Outage::PassThrough),
        ),
        ("scope", base().scope("a|b")),
        ("max_queued", base().max_queued(0)),
        (
            "adaptive_lease",
            base()
                .adaptive_lease(Duration::from_millis(300), Duration::from_secs(1))
                .lease(Duration::from_millis(200)),
        ),
    ];
    for (setting, consumer) in wrong {
        let error = consumer
            .run_until(async {})
            .await
            .expect_err(setting)
            .to_string();
        assert!(error.starts_with(setting), "{error}");
    }
    let volatile = || {
        Consumer::builder()
            .source(world.broker.source())
            .store(MemoryStore::new())
            .handler(Scripted::default())
    };
    let no_id = volatile()
        .run_until(async {})
        .await
        .expect_err("no id")
        .to_string();
    assert!(no_id.starts_with("id:"), "{no_id}");
    let error = volatile()
        .id(IdSource::key())
        .guarantee(Guarantee::AtMostOnce)
        .run_until(std::future::pending::<()>())
        .await
        .expect_err("a volatile store");
    assert!(matches!(error, Error::VolatileStore(_)), "{error}");
}

/// A store that applies claims and loses the replies until `answers` is set.
#[derive(Clone, Default)]
struct LosesReplies {
    store: MemoryStore,
    claims: Arc<AtomicU32>,
    answers: Arc<std::sync::atomic::AtomicBool>,
}

#[async_trait]
impl Store for LosesReplies {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.claims.fetch_add(
            operations.iter().filter(|it| it.ask == Ask::Claim).count() as u32,
            Ordering::Relaxed,
        );
        let verdicts = self.store.apply(operations).await;
        if self.answers.load(Ordering::Relaxed) {
            return verdicts;
        }
        operations
            .iter()
            .map(|_| Err(StoreError::Unknown("the reply was lost".into())))
            .collect()
    }
}

#[tokio::test]
async fn a_drain_withdraws_claims_whose_replies_were_lost() {
    let world = World::new();
    for id in 0..50 {
        world.publish(&format!("id-{id}"), "work");
    }
    let store = LosesReplies {
        store: world.store.clone(),
        ..LosesReplies::default()
    };
    let (claims, answers) = (store.claims.clone(), store.answers.clone());
    let shutdown = async move {
        while claims.load(Ordering::Relaxed) < 150 {
            tokio::task::yield_now().await;
        }
        answers.store(true, Ordering::Relaxed);
    };
    let consumer = world
        .consumer(Guarantee::AtMostOnce)
        .store(store)
        .lease(Duration::from_secs(20))
        .backoff(Duration::from_millis(2), Duration::from_millis(4));
    consumer.run_until(shutdown).await.expect("a clean end");
    for id in 0..50 {
        let marker = world.marker(&format!("id-{id}"));
        assert!(
            matches!(marker, Marker::Absent | Marker::Done(_)),
            "id-{id}: {marker:?}"
        );
    }
    world.drain(Guarantee::AtMostOnce).await;
    assert_eq!((world.effects(), world.reasons().len()), (50, 0));
}

/// A source whose deliveries are revoked on request.
struct Revoking {
    source: MemorySource,
    epoch: u64,
    revoke: Arc<Notify>,
    released: Arc<Notify>,
}

#[async_trait]
impl Connect for Revoking {
    type Source = Self;

    async fn connect(self, _: ConnectOptions) -> Result<Self, SourceError> {
        Ok(self)
    }
}

#[async_trait]
impl Source for Revoking {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        tokio::select! {
            biased;
            () = self.revoke.notified() => into.push(Incoming::Revoked(self.epoch)),
            received = self.source.receive(limit, into) => received?,
        }
        if let Some(Incoming::Delivery(delivery)) = into.last() {
            self.epoch = delivery.receipt.epoch;
        }
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        if settled
            .iter()
            .any(|it| matches!(it.settlement, Settlement::Release { .. }))
        {
            self.released.notify_one();
        }
        self.source.settle(settled).await
    }

    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        Box::new(self.source).close(deadline).await
    }
}

#[tokio::test]
async fn a_full_consumer_releases_revoked_deliveries() {
    let world = World::new();
    let terms = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        lease: Duration::from_secs(60),
        window: Duration::from_secs(600),
        fingerprint: None,
    };
    let key = Key::new(&MessageId::new("id").expect("an id"));
    let elsewhere = Operation {
        key,
        ask: Ask::Claim,
        token: Token(1),
        attempt: 0,
        terms,
    };
    assert!(matches!(
        world.store.apply(&[elsewhere]).await[..],
        [Ok(Verdict::Granted { .. })]
    ));
    world.publish("id", "work");

    let (revoke, released) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let source = Revoking {
        source: world.broker.source(),
        epoch: 0,
        revoke: revoke.clone(),
        released: released.clone(),
    };
    let shutdown = async move {
        tokio::time::sleep(Duration::from_millis(50)).await; // by now it is in flight, and waits for the holder
        revoke.notify_one();
        tokio::time::timeout(Duration::from_secs(5), released.notified())
            .await
            .expect("released");
    };
    let consumer = world
        .consumer(Guarantee::EffectivelyOnce)
        .source(source)
        .lease(Duration::from_secs(60))
        .max_in_flight(1);
    consumer.run_until(shutdown).await.expect("a clean end");
    assert_eq!(world.runs(), 0);
}

/// Sleeps for most of the handler timeout, by tokio's clock.
struct Slept;

impl Handler for Slept {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        tokio::time::sleep(Duration::from_secs(200)).await;
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn with_paused_time_each_run_has_its_whole_timeout() {
    let broker = MemoryBroker::new("q");
    ["a", "b", "c"]
        .iter()
        .for_each(|id| broker.publish(Message::new("x").with_message_id(*id)));
    let all = broker.clone();
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .max_in_flight(1)
        .max_attempts(1)
        .handler_timeout(Duration::from_secs(300))
        .decode(RawBytes)
        .handler(Slept);
    consumer
        .run_until(async move { all.drained().await })
        .await
        .expect("a clean end");
    assert_eq!(broker.dead_letters(), []);
}
