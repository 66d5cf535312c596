//! The gate without a broker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use oncegate_core::marker::{
    Doubt, Effect, Marker, Operation, OperationKind, Terms, Token, Verdict,
};
use oncegate_core::*;

async fn gate(guarantee: Guarantee) -> Gate {
    let short = Duration::from_millis(200);
    let builder = Gate::builder()
        .store(MemoryStore::new())
        .guarantee(guarantee)
        .scope("tests")
        .lease(short)
        .timeout(Duration::from_millis(700));
    builder
        .backoff(Duration::from_millis(1), Duration::from_millis(5))
        .max_inline_retries(2)
        .allow_volatile_store()
        .open()
        .await
        .expect("a gate")
}

#[tokio::test]
async fn work_runs_once_per_id() {
    let gate = gate(Guarantee::AtMostOnce).await;
    assert_eq!(
        gate.run("day", || async { Ok(7) }).await.expect("ran"),
        RunOutcome::Executed(7)
    );
    assert_eq!(
        gate.run("day", || async { Ok(8) })
            .await
            .expect("an outcome"),
        RunOutcome::AlreadyDone
    );
    assert!(matches!(
        gate.run("", || async { Ok(0) }).await,
        Err(GateError::MissingId)
    ));
}

#[tokio::test]
async fn running_work_keeps_its_id_for_longer_than_one_lease() {
    let gate = gate(Guarantee::AtMostOnce).await;
    let long = gate.run("day", || async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        Ok(1)
    });
    let second = async {
        tokio::time::sleep(Duration::from_millis(400)).await;
        gate.run("day", || async { Ok(2) }).await
    };
    let (first, second) = tokio::join!(long, second);
    assert_eq!(
        (first.expect("ran"), second.expect("held")),
        (RunOutcome::Executed(1), RunOutcome::HeldElsewhere)
    );
}

#[tokio::test]
async fn a_failure_without_an_effect_is_retried_inline_and_frees_the_id() {
    let gate = gate(Guarantee::AtMostOnce).await;
    let runs = AtomicU32::new(0);
    let failed: Result<RunOutcome<()>, _> = gate
        .run("day", || async {
            runs.fetch_add(1, Ordering::Relaxed);
            Err(Failure::Retry("not yet".into()))
        })
        .await;
    assert!(
        matches!(failed, Err(GateError::Failed(Failure::Retry(_)))),
        "{failed:?}"
    );
    assert_eq!(runs.load(Ordering::Relaxed), 3);
    assert_eq!(
        gate.run("day", || async { Ok(1) }).await.expect("free"),
        RunOutcome::Executed(1)
    );
}

#[tokio::test]
async fn after_an_unknown_outcome_only_effectively_once_runs_again() {
    for (guarantee, again) in [
        (Guarantee::AtMostOnce, None),
        (Guarantee::EffectivelyOnce, Some(RunOutcome::Executed(1))),
    ] {
        let gate = gate(guarantee).await;
        let panicked: Result<RunOutcome<u8>, _> =
            gate.run("day", || async { panic!("interrupted") }).await;
        assert!(
            matches!(panicked, Err(GateError::InDoubt(_))),
            "{panicked:?}"
        );
        assert_eq!(
            gate.run("day", || async { Ok(1) }).await.ok(),
            again,
            "{guarantee:?}"
        );
    }
}

/// A gate cannot reconcile: each caller gets the error at once, and an operator can resolve the id
/// at any time.
#[tokio::test]
async fn an_id_in_doubt_is_an_error_for_each_caller_and_can_be_resolved_at_once() {
    let store = MemoryStore::new();
    let gate = Gate::builder()
        .store(store.clone())
        .guarantee(Guarantee::AtMostOnce)
        .allow_volatile_store()
        .open()
        .await
        .expect("a gate");
    let panicked: Result<RunOutcome<u8>, _> =
        gate.run("day", || async { panic!("interrupted") }).await;
    assert!(
        matches!(panicked, Err(GateError::InDoubt(_))),
        "{panicked:?}"
    );
    let key = Key::new(&MessageId::new("day").expect("an id"));
    for call in 0..100 {
        let again = gate.run("day", || async { Ok(1) }).await;
        assert!(
            matches!(&again, Err(GateError::InDoubt(why)) if why.contains("oncegate in-doubt resolve day --happened")),
            "call {call}: {again:?}"
        );
        let seen = store.marker(&key).0;
        assert!(
            matches!(seen, Marker::InDoubt(_, Doubt::Waiting)),
            "after call {call}: {seen:?}"
        );
    }
    let seen = store.marker(&key).0;
    let terms = Terms {
        guarantee: Guarantee::AtMostOnce,
        lease: Duration::from_secs(1),
        window: Duration::from_secs(60),
        fingerprint: None,
    };
    let kind = OperationKind::Redrive {
        seen,
        effect: Effect::Nothing,
    };
    let answers = store
        .apply(&[Operation {
            key,
            kind,
            token: Token(1),
            attempt: 0,
            terms,
        }])
        .await;
    assert!(matches!(answers[..], [Ok(Verdict::Applied)]), "{answers:?}");
    assert_eq!(
        gate.run("day", || async { Ok(1) })
            .await
            .expect("the operator stated that nothing happened"),
        RunOutcome::Executed(1)
    );
}

/// A closure may panic before it returns its future.
#[tokio::test]
async fn work_that_panics_before_its_first_await_is_in_doubt() {
    async fn never_awaited() -> Result<u8, Failure> {
        Ok(1)
    }
    let gate = gate(Guarantee::AtMostOnce).await;
    let panicked = gate
        .run("day", || {
            assert!(std::hint::black_box(false), "before anything was awaited");
            never_awaited()
        })
        .await;
    assert!(
        matches!(&panicked, Err(GateError::InDoubt(why)) if why.contains("before anything was awaited")),
        "{panicked:?}"
    );
    assert!(
        matches!(
            gate.run("day", || async { Ok(1) }).await,
            Err(GateError::InDoubt(_))
        ),
        "and it is not run again"
    );
}

#[tokio::test]
async fn at_most_once_work_that_is_dropped_while_it_runs_is_in_doubt() {
    let gate = gate(Guarantee::AtMostOnce).await;
    let endless = gate.run("day", std::future::pending::<Result<(), Failure>>);
    assert!(
        tokio::time::timeout(Duration::from_millis(20), endless)
            .await
            .is_err()
    );
    assert_eq!(
        gate.run("day", || async { Ok(1) }).await.expect("held"),
        RunOutcome::HeldElsewhere
    );
    tokio::time::sleep(Duration::from_millis(250)).await; // the lease ends by the store's clock
    assert!(matches!(
        gate.run("day", || async { Ok(1) }).await,
        Err(GateError::InDoubt(_))
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn work_that_is_retried_inline_keeps_its_lease() {
    let gate = Gate::builder()
        .store(MemoryStore::new())
        .lease(Duration::from_millis(200))
        .timeout(Duration::from_millis(700));
    let gate = gate
        .max_inline_retries(2)
        .backoff(Duration::from_millis(1), Duration::from_millis(5))
        .open()
        .await
        .expect("a gate");
    let (now, most, tries) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
    let first = gate.run("x", || async {
        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(650)).await;
        now.fetch_sub(1, Ordering::SeqCst);
        if tries.fetch_add(1, Ordering::SeqCst) == 0 {
            Err(Failure::Retry("again".into()))
        } else {
            Ok(1)
        }
    });
    let second = async {
        tokio::time::sleep(Duration::from_millis(1100)).await;
        gate.run("x", || async {
            most.fetch_max(now.load(Ordering::SeqCst) + 1, Ordering::SeqCst);
            Ok(2)
        })
        .await
    };
    let (first, second) = tokio::join!(first, second);
    assert_eq!(
        (first.expect("it ran"), second.expect("an answer")),
        (RunOutcome::Executed(1), RunOutcome::HeldElsewhere)
    );
    assert_eq!(most.load(Ordering::SeqCst), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn each_when_held_while_another_run_is_in_progress() {
    let store = MemoryStore::new();
    let open = async |when_held: WhenHeld| {
        let gate = Gate::builder()
            .store(store.clone())
            .when_held(when_held)
            .backoff(Duration::from_millis(5), Duration::from_millis(20));
        gate.max_inline_retries(0).open().await.expect("a gate")
    };
    let holder = open(WhenHeld::Skip).await;
    let hold = |id: &'static str, outcome: Result<u32, ()>| {
        let gate = holder.clone();
        let (started, has_started) = tokio::sync::oneshot::channel();
        let mut started = Some(started);
        let held = tokio::spawn(async move {
            gate.run(id, || {
                started.take().map(|started| started.send(()));
                async move {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    outcome.map_err(|()| Failure::Retry("not today".into()))
                }
            })
            .await
        });
        (held, has_started)
    };
    let run_beside =
        async |when_held: WhenHeld, id| open(when_held).await.run(id, || async { Ok(2) }).await;

    let (held, started) = hold("a", Ok(1));
    started.await.expect("it starts");
    assert_eq!(
        run_beside(WhenHeld::Skip, "a").await.expect("an answer"),
        RunOutcome::HeldElsewhere
    );
    assert!(matches!(
        run_beside(WhenHeld::GiveUp, "a").await,
        Err(GateError::HeldElsewhere)
    ));
    assert!(matches!(
        run_beside(WhenHeld::Wait(Duration::from_millis(50)), "a").await,
        Err(GateError::HeldElsewhere)
    ));
    assert_eq!(
        run_beside(WhenHeld::Wait(Duration::MAX), "a")
            .await
            .expect("an answer"),
        RunOutcome::AlreadyDone,
        "the other run succeeded"
    );
    assert_eq!(
        held.await.expect("no panic").expect("it ran"),
        RunOutcome::Executed(1)
    );

    let (held, started) = hold("b", Err(()));
    started.await.expect("it starts");
    assert_eq!(
        run_beside(WhenHeld::Wait(Duration::from_secs(10)), "b")
            .await
            .expect("an answer"),
        RunOutcome::Executed(2),
        "the other run failed"
    );
    assert!(matches!(
        held.await.expect("no panic"),
        Err(GateError::Failed(_))
    ));
}

/// A store that is unavailable until `available` is set, and counts the requests.
#[derive(Clone, Default)]
struct Unavailable {
    store: MemoryStore,
    requests: Arc<AtomicU32>,
    available: Arc<AtomicBool>,
}

impl Unavailable {
    fn request_succeeds(&self) -> bool {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.available.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl Store for Unavailable {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.request_succeeds() {
            return self.store.apply(operations).await;
        }
        operations
            .iter()
            .map(|_| Err(StoreError::NotApplied("refused".into())))
            .collect()
    }

    async fn preflight(&self, _: Guarantee) -> Result<(), StoreError> {
        if self.request_succeeds() {
            Ok(())
        } else {
            Err(StoreError::NotApplied("refused".into()))
        }
    }
}

/// Checks the limit of 20 requests a second, plus those in progress when the outage began.
fn check_request_rate(requests: u32, since: Instant) {
    let bound = 20.0 * since.elapsed().as_secs_f64() + 5.0;
    assert!(
        f64::from(requests) <= bound,
        "{requests} requests in {:?}",
        since.elapsed()
    );
}

#[tokio::test]
async fn all_callers_together_send_an_unavailable_store_few_requests_a_second() {
    let store = Unavailable::default();
    store.available.store(true, Ordering::Relaxed);
    let pause = Duration::from_millis(1);
    let gate = Gate::builder()
        .store(store.clone())
        .backoff(pause, pause)
        .open()
        .await
        .expect("a gate");
    store.available.store(false, Ordering::Relaxed);
    store.requests.store(0, Ordering::Relaxed);
    let since = Instant::now();
    let ran = join_all((0..300).map(|id| gate.run(format!("id-{id}"), || async { Ok(()) }))).await;
    assert!(
        ran.iter()
            .all(|result| matches!(result, Err(GateError::Store(_))))
    );
    check_request_rate(store.requests.load(Ordering::Relaxed), since);
    store.available.store(true, Ordering::Relaxed);
    assert_eq!(
        gate.run("id-1", || async { Ok(()) })
            .await
            .expect("the store is available again"),
        RunOutcome::Executed(())
    );
}

#[tokio::test]
async fn opening_a_gate_sends_an_unavailable_store_few_requests_a_second() {
    let (store, since, pause) = (
        Unavailable::default(),
        Instant::now(),
        Duration::from_millis(1),
    );
    let opening = Gate::builder()
        .store(store.clone())
        .backoff(pause, pause)
        .open();
    assert!(
        tokio::time::timeout(Duration::from_secs(1), opening)
            .await
            .is_err()
    );
    check_request_rate(store.requests.load(Ordering::Relaxed), since);
}
