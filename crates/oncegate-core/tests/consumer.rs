//! The consumer on the in-memory source and store.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::marker::{Marker, Operation, OperationKind, Terms, Token, Verdict};
use oncegate_core::*;
use tokio::sync::Notify;

/// A handler that behaves as the body says, and counts its runs.
#[derive(Clone, Default)]
struct Scripted {
    runs: Arc<Mutex<Vec<(String, u32)>>>,
    effects: Arc<AtomicU32>,
    /// The result of `reconcile`; [`Reconciled::Unknown`] if `None`.
    reconciled: Arc<Mutex<Option<Reconciled>>>,
}

impl Handler for Scripted {
    type Payload = String;

    async fn handle(&self, body: String, cx: &Context) -> Result<(), Failure> {
        let run = {
            let mut runs = self.runs.lock().expect("no panic inside");
            runs.push((cx.id().to_owned(), cx.attempt()));
            runs.iter().filter(|(id, _)| id == cx.id()).count()
        };
        match body.as_str() {
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
            .reconciled
            .lock()
            .expect("no panic inside")
            .unwrap_or(Reconciled::Unknown))
    }
}

/// A broker, a store and a handler.
struct Fixture {
    broker: MemoryBroker,
    store: MemoryStore,
    handler: Scripted,
}

impl Fixture {
    fn new() -> Self {
        Self {
            broker: MemoryBroker::new("q"),
            store: MemoryStore::new(),
            handler: Scripted::default(),
        }
    }

    fn publish(&self, id: &str, body: &str) {
        self.broker
            .publish(Message::new(serde_json::to_vec(body).expect("JSON")).with_header("id", id));
    }

    /// Runs a consumer until every message is settled.
    async fn drain(&self, guarantee: Guarantee) {
        let broker = self.broker.clone();
        self.consumer(guarantee)
            .run_until(async move { broker.all_settled().await })
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

    /// Why messages were dead-lettered or sent to the in-doubt queue.
    fn reasons(&self) -> Vec<Reason> {
        self.broker
            .dead_letters()
            .into_iter()
            .chain(self.broker.in_doubt())
            .map(|dead_letter| dead_letter.reason)
            .collect()
    }
}

#[tokio::test]
async fn a_duplicate_is_handled_once_whether_it_arrives_later_or_at_the_same_time() {
    let fixture = Fixture::new();
    for id in 0..1000 {
        fixture.publish(&format!("id-{id}"), "work");
        fixture.publish(&format!("id-{}", id / 2), "work");
    }
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!(fixture.effects(), 1000);
    assert_eq!(fixture.reasons(), []);
}

#[tokio::test]
async fn inline_execution_handles_each_id_once() {
    let fixture = Fixture::new();
    for id in 0..500 {
        fixture.publish(
            &format!("id-{}", id / 2),
            if id % 50 == 0 { "slow" } else { "work" },
        );
    }
    let broker = fixture.broker.clone();
    let consumer = fixture
        .consumer(Guarantee::EffectivelyOnce)
        .execution(Execution::Inline);
    consumer
        .run_until(async move { broker.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(fixture.effects(), 250);
}

#[tokio::test]
async fn a_failure_without_an_effect_is_retried_and_then_dead_lettered() {
    let fixture = Fixture::new();
    fixture.publish("a", "retry once");
    fixture.publish("b", "always retry");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!(fixture.effects(), 1);
    assert_eq!(
        fixture.marker("a"),
        Marker::Done(Some(Fingerprint::of(b"\"retry once\"")))
    );
    assert_eq!(fixture.reasons(), [Reason::AttemptsSpent]);
    assert!(matches!(fixture.marker("b"), Marker::Rejected { .. }));
    let dead_letter = fixture.broker.dead_letters().remove(0);
    let failure_history = dead_letter.failure_history.expect("a failure history");
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
async fn only_messages_without_a_usable_id_or_payload_are_dead_lettered() {
    let fixture = Fixture::new();
    fixture
        .broker
        .publish(Message::new("{not json").with_header("id", "broken"));
    fixture.broker.publish(Message::new("\"no id\""));
    fixture
        .broker
        .publish(Message::new("\"empty id\"").with_header("id", ""));
    fixture.broker.publish(
        Message::new("\"two ids\"")
            .with_header("id", "a")
            .with_header("id", "b"),
    );
    fixture.publish("refused", "refuse");
    fixture.publish("good", "work");
    fixture.drain(Guarantee::EffectivelyOnce).await;
    let failure_history = fixture
        .broker
        .dead_letters()
        .into_iter()
        .find(|dead_letter| dead_letter.reason == Reason::UnusableId)
        .and_then(|dead_letter| dead_letter.failure_history);
    assert!(
        failure_history
            .and_then(|failure_history| failure_history.first_error)
            .expect("what was found")
            .contains("header `id` is ambiguous")
    );
    let mut reasons = fixture.reasons();
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
    assert_eq!(fixture.effects(), 1);
    let attempts = |reason| {
        let mut all = fixture.broker.dead_letters().into_iter();
        let of_reason = all.find(|dead_letter| dead_letter.reason == reason);
        let history = of_reason.and_then(|dead_letter| dead_letter.failure_history);
        history.map(|history| history.attempts)
    };
    assert_eq!(attempts(Reason::Refused), Some(1));
    assert_eq!(
        attempts(Reason::Unreadable),
        Some(0),
        "the handler was not run"
    );
}

#[tokio::test]
async fn at_most_once_a_message_older_than_max_age_is_in_doubt_without_an_attempt() {
    let fixture = Fixture::new();
    let two_days_ago = std::time::SystemTime::now() - Duration::from_secs(48 * 3600);
    let mut message = Message::new("\"work\"").with_header("id", "old");
    message.sent_at = Some(two_days_ago);
    fixture.broker.publish(message);
    fixture.drain(Guarantee::AtMostOnce).await;
    let in_doubt = fixture.broker.in_doubt();
    let history = in_doubt[0].failure_history.as_ref().expect("a history");
    assert_eq!(
        (in_doubt[0].reason, history.attempts),
        (Reason::InDoubt(DoubtCause::TooOld), 0)
    );
}

#[tokio::test]
async fn at_most_once_the_same_id_with_another_body_is_a_conflict() {
    let fixture = Fixture::new();
    fixture.publish("a", "work");
    fixture.drain(Guarantee::AtMostOnce).await;
    fixture.publish("a", "other work");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!(
        (fixture.effects(), fixture.reasons()),
        (1, vec![Reason::Conflict])
    );
}

#[tokio::test]
async fn at_most_once_a_panic_is_in_doubt_and_not_run_again() {
    let fixture = Fixture::new();
    fixture.publish("a", "panic once");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!((fixture.runs(), fixture.effects()), (1, 0));
    assert_eq!(fixture.reasons(), [Reason::InDoubt(DoubtCause::Panicked)]);
    assert!(matches!(fixture.marker("a"), Marker::InDoubt(..)));
}

#[tokio::test]
async fn effectively_once_runs_again_after_a_panic_with_a_higher_attempt_number() {
    let fixture = Fixture::new();
    fixture.publish("a", "panic once");
    fixture.drain(Guarantee::EffectivelyOnce).await;
    assert_eq!(
        *fixture.handler.runs.lock().expect("no panic inside"),
        [("a".to_owned(), 1), ("a".to_owned(), 2)]
    );
    assert_eq!(fixture.effects(), 1);
}

#[tokio::test]
async fn reconcile_that_finds_the_effect_accepts_without_a_run() {
    let fixture = Fixture::new();
    *fixture.handler.reconciled.lock().expect("no panic inside") = Some(Reconciled::Happened);
    fixture.publish("a", "doubt");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!((fixture.runs(), fixture.reasons().len()), (1, 0));
    assert!(matches!(fixture.marker("a"), Marker::Done(_)));
}

#[tokio::test]
async fn reconcile_that_finds_no_effect_leads_to_a_run_with_a_higher_attempt_number() {
    let fixture = Fixture::new();
    *fixture.handler.reconciled.lock().expect("no panic inside") = Some(Reconciled::DidNotHappen);
    fixture.publish("a", "doubt once");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!(
        *fixture.handler.runs.lock().expect("no panic inside"),
        [("a".to_owned(), 1), ("a".to_owned(), 2)]
    );
    assert_eq!((fixture.effects(), fixture.reasons().len()), (1, 0));
}

/// An error whose text cannot be formatted.
#[derive(Debug)]
struct PanicsInDisplay;

impl std::fmt::Display for PanicsInDisplay {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("the text of the error")
    }
}

impl std::error::Error for PanicsInDisplay {}

/// Its `reconcile` fails with an error whose text panics, and records the attempts.
struct ReconcilePanicsLate(Arc<Mutex<Vec<u32>>>);

impl Handler for ReconcilePanicsLate {
    type Payload = String;

    async fn handle(&self, _: String, _: &Context) -> Result<(), Failure> {
        Err("no answer").in_doubt()
    }

    async fn reconcile(&self, _: String, cx: &Context) -> Result<Reconciled, Failure> {
        self.0.lock().expect("no panic inside").push(cx.attempt());
        Err(PanicsInDisplay).retry()
    }
}

#[tokio::test]
async fn reconcile_whose_error_panics_as_text_is_repeated_and_then_in_doubt() {
    let (fixture, attempts) = (Fixture::new(), Arc::default());
    fixture.publish("a", "doubt");
    let broker = fixture.broker.clone();
    fixture
        .consumer(Guarantee::AtMostOnce)
        .handler(ReconcilePanicsLate(Arc::clone(&attempts)))
        .run_until(async move { broker.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(*attempts.lock().expect("no panic inside"), [1, 1]);
    let reason = Reason::InDoubt(DoubtCause::HandlerReported);
    assert_eq!(fixture.reasons(), [reason]);
}

#[tokio::test]
async fn at_most_once_a_handler_that_exceeds_its_timeout_is_in_doubt() {
    let fixture = Fixture::new();
    fixture.publish("a", "hang");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!(fixture.reasons(), [Reason::InDoubt(DoubtCause::TimedOut)]);
}

#[tokio::test]
async fn each_guarantee_after_a_crash_during_the_handler() {
    for (guarantee, runs, in_doubt) in [
        (Guarantee::AtMostOnce, 1, 1),
        (Guarantee::EffectivelyOnce, 2, 0),
        (Guarantee::Bare, 1, 0),
    ] {
        let fixture = Fixture::new();
        fixture.publish("a", "slow");
        let crashing = tokio::spawn(
            fixture
                .consumer(guarantee)
                .run_until(std::future::pending::<()>()),
        );
        while fixture.runs() == 0 {
            tokio::task::yield_now().await;
        }
        crashing.abort();
        assert!(crashing.await.expect_err("it was aborted").is_cancelled());
        fixture.drain(guarantee).await;
        assert_eq!(fixture.runs(), runs, "{guarantee:?}");
        assert_eq!(fixture.broker.in_doubt().len(), in_doubt, "{guarantee:?}");
        let expected = if guarantee == Guarantee::EffectivelyOnce {
            1
        } else {
            0
        }; // the bare gate loses the message
        assert_eq!(fixture.effects(), expected, "{guarantee:?}");
    }
}

/// Consumers with different settings on one queue: the marker of a crashed consumer keeps its lease
/// and its guarantee, whatever the settings of the others.
#[tokio::test]
async fn a_rolling_change_of_guarantee_and_lease_keeps_the_guarantee() {
    use Guarantee::{AtMostOnce, EffectivelyOnce};
    let (short, long) = (Duration::from_millis(400), Duration::from_secs(60));
    for (old, old_lease, new, new_lease) in [
        (AtMostOnce, short, EffectivelyOnce, long),
        (EffectivelyOnce, short, AtMostOnce, long),
        (AtMostOnce, long, EffectivelyOnce, short),
        (EffectivelyOnce, short, EffectivelyOnce, long),
    ] {
        let case = format!("{old:?} {old_lease:?} to {new:?} {new_lease:?}");
        let fixture = Fixture::new();
        fixture.publish("crashing", "slow");
        let crashing = tokio::spawn(
            fixture
                .consumer(old)
                .lease(old_lease)
                .run_until(std::future::pending::<()>()),
        );
        while fixture.runs() == 0 {
            tokio::task::yield_now().await;
        }
        crashing.abort();
        assert!(crashing.await.expect_err("it was aborted").is_cancelled());

        let started = Instant::now();
        (0..50).for_each(|id| fixture.publish(&format!("id-{id}"), "work"));
        let (settled, runs) = (fixture.broker.clone(), fixture.handler.runs.clone());
        let shutdown = async move {
            if old_lease == short {
                settled.all_settled().await;
            } else {
                // The lease of the new consumer is short, and that of the marker is a minute.
                tokio::time::sleep(2 * short).await;
                let runs = runs
                    .lock()
                    .expect("no panic inside")
                    .iter()
                    .filter(|(id, _)| id == "crashing")
                    .count();
                assert_eq!(
                    runs, 1,
                    "the lease of the new consumer was applied to the marker"
                );
            }
        };
        let others = fixture
            .consumer(old)
            .lease(old_lease)
            .dedup_window(Duration::from_secs(3600))
            .run_until(std::future::pending::<()>());
        let others = tokio::spawn(others);
        fixture
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
            // If either guarantee is at most once, the message does not run again without `reconcile`.
            let is_at_most_once = old == AtMostOnce || new == AtMostOnce;
            let in_doubt = fixture.broker.in_doubt().len();
            let further_runs = fixture
                .handler
                .runs
                .lock()
                .expect("no panic inside")
                .iter()
                .filter(|(id, _)| id == "crashing")
                .count()
                - 1;
            assert_eq!(in_doubt + further_runs, 1, "{case}");
            assert!(
                !(old == AtMostOnce && further_runs > 0),
                "{case}: the marker is at most once"
            );
            assert!(is_at_most_once || further_runs == 1, "{case}");
        }
        for id in 0..50 {
            let runs = fixture
                .handler
                .runs
                .lock()
                .expect("no panic inside")
                .iter()
                .filter(|(run_id, _)| *run_id == format!("id-{id}"))
                .count();
            assert_eq!(runs, 1, "{case} id-{id}");
        }
    }
}

#[tokio::test]
async fn a_lease_is_renewed_while_its_handler_runs() {
    let fixture = Fixture::new();
    for _ in 0..3 {
        fixture.publish("a", "slow");
    }
    let broker = fixture.broker.clone();
    let consumer = fixture
        .consumer(Guarantee::AtMostOnce)
        .lease(Duration::from_millis(120));
    consumer
        .run_until(async move { broker.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(
        (fixture.runs(), fixture.effects(), fixture.reasons().len()),
        (1, 1, 0)
    );
}

#[tokio::test]
async fn messages_of_a_key_are_handled_in_order() {
    let fixture = Fixture::new();
    for n in 0..200 {
        let body = serde_json::to_vec("work").expect("JSON");
        fixture.broker.publish(
            Message::new(body)
                .with_key(format!("key-{}", n % 7))
                .with_header("id", format!("{}-{n:04}", n % 7)),
        );
    }
    let broker = fixture.broker.clone();
    fixture
        .consumer(Guarantee::EffectivelyOnce)
        .order(Order::ByKey)
        .run_until(async move { broker.all_settled().await })
        .await
        .expect("a clean end");
    let runs = fixture
        .handler
        .runs
        .lock()
        .expect("no panic inside")
        .clone();
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
    let fixture = Fixture::new();
    for id in 0..20 {
        fixture.publish(&format!("id-{id}"), "slow");
    }
    let handler = fixture.handler.clone();
    let started = async move {
        while handler.runs.lock().expect("no panic inside").len() < 4 {
            tokio::task::yield_now().await;
        }
    };
    fixture
        .consumer(Guarantee::AtMostOnce)
        .max_in_flight(4)
        .run_until(started)
        .await
        .expect("a clean end");
    assert_eq!(fixture.effects(), 4);
    assert_eq!(fixture.broker.unsettled(), 16);
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!((fixture.effects(), fixture.reasons().len()), (20, 0));
}

#[tokio::test]
async fn the_error_of_a_wrong_setting_begins_with_its_name() {
    let fixture = Fixture::new();
    let base = || fixture.consumer(Guarantee::EffectivelyOnce);
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
            "backoff",
            base().backoff(Duration::from_secs(2), Duration::from_secs(1)),
        ),
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
    let with_memory_store = || {
        Consumer::builder()
            .source(fixture.broker.source())
            .store(MemoryStore::new())
            .handler(Scripted::default())
    };
    let no_id = with_memory_store()
        .run_until(async {})
        .await
        .expect_err("no id")
        .to_string();
    assert!(no_id.starts_with("id:"), "{no_id}");
    let error = with_memory_store()
        .id(IdSource::key())
        .guarantee(Guarantee::AtMostOnce)
        .run_until(std::future::pending::<()>())
        .await
        .expect_err("a volatile store");
    assert!(matches!(error, Error::VolatileStore(_)), "{error}");
}

/// A store that applies operations and loses the replies until `answers` is set.
#[derive(Clone, Default)]
struct LostReplies {
    store: MemoryStore,
    claims: Arc<AtomicU32>,
    answers: Arc<std::sync::atomic::AtomicBool>,
}

#[async_trait]
impl Store for LostReplies {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.claims.fetch_add(
            operations
                .iter()
                .filter(|operation| operation.kind == OperationKind::Claim)
                .count() as u32,
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
    let fixture = Fixture::new();
    for id in 0..50 {
        fixture.publish(&format!("id-{id}"), "work");
    }
    let store = LostReplies {
        store: fixture.store.clone(),
        ..LostReplies::default()
    };
    let (claims, answers) = (store.claims.clone(), store.answers.clone());
    let shutdown = async move {
        while claims.load(Ordering::Relaxed) < 150 {
            tokio::task::yield_now().await;
        }
        answers.store(true, Ordering::Relaxed);
    };
    let consumer = fixture
        .consumer(Guarantee::AtMostOnce)
        .store(store)
        .lease(Duration::from_secs(20))
        .backoff(Duration::from_millis(2), Duration::from_millis(4));
    consumer.run_until(shutdown).await.expect("a clean end");
    for id in 0..50 {
        let marker = fixture.marker(&format!("id-{id}"));
        assert!(
            matches!(marker, Marker::Absent | Marker::Done(_)),
            "id-{id}: {marker:?}"
        );
    }
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!((fixture.effects(), fixture.reasons().len()), (50, 0));
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
            .any(|settled| matches!(settled.settlement, Settlement::Release { .. }))
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
    let fixture = Fixture::new();
    let terms = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        lease: Duration::from_secs(60),
        window: Duration::from_secs(600),
        fingerprint: None,
    };
    let key = Key::new(&MessageId::new("id").expect("an id"));
    let claim_of_another_holder = Operation {
        key,
        kind: OperationKind::Claim,
        token: Token(1),
        attempt: 0,
        terms,
    };
    assert!(matches!(
        fixture.store.apply(&[claim_of_another_holder]).await[..],
        [Ok(Verdict::Granted { .. })]
    ));
    fixture.publish("id", "work");

    let (revoke, released) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let source = Revoking {
        source: fixture.broker.source(),
        epoch: 0,
        revoke: revoke.clone(),
        released: released.clone(),
    };
    let shutdown = async move {
        tokio::time::sleep(Duration::from_millis(50)).await; // by then it is in flight, and waits for the holder
        revoke.notify_one();
        tokio::time::timeout(Duration::from_secs(5), released.notified())
            .await
            .expect("the delivery is released");
    };
    let consumer = fixture
        .consumer(Guarantee::EffectivelyOnce)
        .source(source)
        .lease(Duration::from_secs(60))
        .max_in_flight(1);
    consumer.run_until(shutdown).await.expect("a clean end");
    assert_eq!(fixture.runs(), 0);
}

/// Sleeps for most of the handler timeout, by tokio's clock.
struct Sleeps;

impl Handler for Sleeps {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        tokio::time::sleep(Duration::from_secs(200)).await;
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn the_handler_timeout_of_a_queued_delivery_begins_with_its_run() {
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
        .handler(Sleeps);
    consumer
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(broker.dead_letters(), []);
}
