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

#[tokio::test]
async fn a_stored_result_is_returned_again() {
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        let gate = gate(guarantee).await;
        let first = gate.run_stored("charge", || async { Ok(vec![4, 2]) }).await;
        assert_eq!(first.expect("ran"), Stored::Executed(vec![4, 2]));
        let again: Stored<Vec<u8>> = gate
            .run_stored("charge", || async { panic!("the work runs once") })
            .await
            .expect("an outcome");
        assert_eq!(again, Stored::Replayed(vec![4, 2]));
        let plain = gate
            .run("charge", work_of_another_type)
            .await
            .expect("an outcome");
        assert_eq!(plain, RunOutcome::AlreadyDone);
    }
}

/// The work never runs again only because its result is not available.
#[tokio::test]
async fn a_missing_result_has_an_answer_of_its_own() {
    let gate = gate(Guarantee::EffectivelyOnce).await;
    gate.run("plain", || async { Ok(1) }).await.expect("ran");
    let without: Stored<u8> = gate
        .run_stored("plain", work_of_another_type)
        .await
        .expect("an outcome");
    assert_eq!(without, Stored::Missing(MissingResult::NotStored));

    let text = "secret-canary".to_owned();
    let stored = gate.run_stored("text", || async { Ok(text.clone()) }).await;
    assert_eq!(stored.expect("ran"), Stored::Executed(text.clone()));
    let number: Stored<u8> = gate
        .run_stored("text", work_of_another_type)
        .await
        .expect("an outcome");
    let Stored::Missing(MissingResult::Undecodable(why)) = number else {
        panic!("{number:?}");
    };
    assert!(
        why.contains("expected u8") && !why.contains("canary"),
        "{why}"
    );
}

async fn work_of_another_type() -> Result<u8, Failure> {
    panic!("the work runs once")
}

#[tokio::test]
async fn a_result_that_cannot_be_stored_is_refused_or_left_out() {
    /// Stores results reversed, and fails to store one of three bytes.
    struct Reversed;
    impl ResultCodec for Reversed {
        fn encode(&self, json: Vec<u8>) -> Result<Vec<u8>, store::BoxError> {
            if json.len() == 3 {
                return Err("no three bytes".into());
            }
            Ok(json.into_iter().rev().collect())
        }
        fn decode(&self, stored: Vec<u8>) -> Result<Vec<u8>, store::BoxError> {
            Ok(stored.into_iter().rev().collect())
        }
    }
    for policy in [UnstorableResult::Refuse, UnstorableResult::CompleteWithout] {
        let gate = Gate::builder()
            .store(MemoryStore::new())
            .max_result_bytes(5)
            .unstorable_result(policy)
            .result_codec(Reversed)
            .open()
            .await
            .expect("a gate");
        let fits = || async { Ok(12_345) };
        assert_eq!(
            gate.run_stored("fits", fits).await.expect("ran"),
            Stored::Executed(12_345)
        );
        assert_eq!(
            gate.run_stored("fits", fits).await.expect("stored"),
            Stored::Replayed(12_345)
        );
        for (id, number, why) in [
            ("long", 123_456, "6 bytes"),
            ("codec", 123, "no three bytes"),
        ] {
            let outcome = gate.run_stored(id, || async { Ok(number) }).await;
            let again = gate
                .run_stored(id, || async { Ok(1) })
                .await
                .expect("an outcome");
            match policy {
                UnstorableResult::CompleteWithout => {
                    assert_eq!(outcome.expect("ran"), Stored::Executed(number));
                    assert_eq!(again, Stored::Missing(MissingResult::NotStored));
                }
                _ => {
                    let error = outcome.expect_err("refused").to_string();
                    assert!(error.contains(why), "{error}");
                    assert_eq!(again, Stored::Executed(1), "effectively once runs again");
                }
            }
        }
    }
}

/// In at most once a result that cannot be stored leaves an outcome for an operator: the work does
/// not run again.
#[tokio::test]
async fn a_refused_result_is_in_doubt_in_at_most_once() {
    let gate = gate(Guarantee::AtMostOnce).await;
    let long = gate
        .run_stored("id", || async { Ok("x".repeat(65_537)) })
        .await;
    assert!(
        matches!(long, Err(GateError::UnstorableResult(_))),
        "{long:?}"
    );
    let again: Result<Stored<u8>, _> = gate.run_stored("id", work_of_another_type).await;
    assert!(matches!(again, Err(GateError::InDoubt(_))), "{again:?}");
}

/// For work that cannot run twice in one call, such as an HTTP request whose body was consumed.
#[tokio::test]
async fn a_request_replaces_the_retries_and_the_result_policy_of_its_gate() {
    let gate = gate(Guarantee::AtMostOnce).await;
    let runs = AtomicU32::new(0);
    let failing = gate.request("id").max_inline_retries(0).run(|| async {
        runs.fetch_add(1, Ordering::Relaxed);
        Err::<(), _>(Failure::Retry("busy".into()))
    });
    let failed = failing.await;
    assert!(
        matches!(failed, Err(GateError::Failed(Failure::Retry(_)))),
        "{failed:?}"
    );
    assert_eq!(runs.load(Ordering::Relaxed), 1);

    let request = gate
        .request("id")
        .unstorable_result(UnstorableResult::CompleteWithout);
    let long = "x".repeat(gate.max_result_bytes());
    let ran = request.run_stored(|| async { Ok(long.clone()) }).await;
    assert_eq!(ran.expect("ran"), Stored::Executed(long));
    let again: Stored<String> = gate
        .run_stored("id", || async { panic!("the work runs once") })
        .await
        .expect("an outcome");
    assert_eq!(again, Stored::Missing(MissingResult::NotStored));
}

#[tokio::test]
async fn an_id_with_another_body_does_not_run() {
    let gate = gate(Guarantee::EffectivelyOnce).await;
    let charge = |body: &'static str| {
        gate.request("key")
            .body(body)
            .run_stored(|| async { Ok(1) })
    };
    assert_eq!(charge("4200").await.expect("ran"), Stored::Executed(1));
    assert_eq!(charge("4200").await.expect("stored"), Stored::Replayed(1));
    let other = charge("9900").await;
    assert!(matches!(other, Err(GateError::OtherBody)), "{other:?}");
    let plain = gate
        .request("key")
        .body("9900")
        .run(|| async { Ok(1) })
        .await;
    assert!(matches!(plain, Err(GateError::OtherBody)), "{plain:?}");
}

/// All callers get the result that was recorded, also one whose own run lost its lease.
#[tokio::test]
async fn a_run_that_lost_its_lease_returns_the_recorded_result() {
    let store = MemoryStore::new();
    let open = || async {
        let builder = Gate::builder()
            .store(store.clone())
            .lease(Duration::from_millis(100));
        builder.open().await.expect("a gate")
    };
    let (slow, fast) = (open().await, open().await);
    let key = Key::new(&MessageId::new("id").expect("an id"));
    let first = slow.run_stored("id", || async {
        // Frees the id, as if the lease had ended and a later run had failed.
        let (Marker::InProgress(hold), _) = store.marker(&key) else {
            panic!("the run holds the id");
        };
        let free = Operation {
            key: key.clone(),
            kind: OperationKind::Withdraw,
            token: hold.token,
            attempt: hold.attempts.number,
            terms: Terms {
                guarantee: hold.guarantee,
                lease: hold.lease,
                window: hold.horizon,
                fingerprint: None,
            },
        };
        let freed = store.apply(&[free]).await;
        assert!(matches!(freed[..], [Ok(Verdict::Applied)]), "{freed:?}");
        let other = fast
            .run_stored("id", || async { Ok("fast".to_owned()) })
            .await;
        assert_eq!(other.expect("ran"), Stored::Executed("fast".to_owned()));
        Ok("slow".to_owned())
    });
    let first = first.await.expect("an outcome");
    assert_eq!(first, Stored::Replayed("fast".to_owned()));
}

/// A store that loses the replies to the first requests with results: their changes are made.
struct LosesFirstReplies {
    store: MemoryStore,
    remaining: AtomicU32,
}

impl LosesFirstReplies {
    fn lose<T>(&self, answer: T) -> Result<T, StoreError> {
        let count_down = |remaining: u32| remaining.checked_sub(1);
        match self
            .remaining
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, count_down)
        {
            Ok(_) => Err(StoreError::Unknown("the reply was lost".into())),
            Err(_) => Ok(answer),
        }
    }
}

#[async_trait]
impl Store for LosesFirstReplies {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.store.apply(operations).await
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        Some(self)
    }
}

#[async_trait]
impl ResultStore for LosesFirstReplies {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        self.lose(self.store.complete(completion, result).await?)
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.lose(self.store.read(key, fingerprint).await?)
    }
}

#[tokio::test]
async fn a_lost_reply_changes_no_answer() {
    let gate = |lost| {
        let store = MemoryStore::new();
        let remaining = AtomicU32::new(lost);
        let loses_replies = LosesFirstReplies { store, remaining };
        Gate::builder().store(loses_replies).open()
    };
    let completion = gate(2).await.expect("a gate");
    let first = completion.run_stored("id", || async { Ok(1) }).await;
    assert_eq!(first.expect("ran"), Stored::Executed(1));

    let read = gate(0).await.expect("a gate");
    read.run("id", || async { Ok(()) }).await.expect("ran");
    let missing: Stored<u8> = read
        .run_stored("id", work_of_another_type)
        .await
        .expect("an outcome");
    assert_eq!(missing, Stored::Missing(MissingResult::NotStored));

    // The store never answers: the caller does not know that the work is done, and asks again.
    let never = gate(6).await.expect("a gate");
    let abandoned = never.run_stored("id", || async { Ok(1) }).await;
    assert!(
        matches!(abandoned, Err(GateError::NotRecorded)),
        "{abandoned:?}"
    );
    let again = never.run_stored("id", work_of_another_type).await;
    assert_eq!(again.expect("stored"), Stored::Replayed(1));
}
