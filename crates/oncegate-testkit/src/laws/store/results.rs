//! The results of completed runs. A store that keeps none
//! ([`Store::results`](oncegate_core::Store::results)) passes these laws.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{Effect, Finding, Marker, Operation, OperationKind, Token, Verdict};
use oncegate_core::{Completion, Key, MemoryStore, ResultStore, Store};

use crate::laws::fixtures::{
    BOTH_GUARANTEES, Claimant, DONE, DONE_WITH_LOST_MARKER, EFFECTIVELY_ONCE, LONG_LEASE,
    OTHER_TOKEN, OWN_TOKEN, SHORT_LEASE, fingerprint, granted, key, verdict,
};
use crate::laws::random::{repeat_hint, seeds};

/// The number of random histories.
const HISTORIES: u64 = 32;
/// The length of a history.
const STEPS: usize = 40;

async fn complete(
    results: &dyn ResultStore,
    claimant: Claimant,
    key: &Key,
    result: &[u8],
) -> Completion {
    results
        .complete(&claimant.operation(OperationKind::Complete, key), result)
        .await
        .expect("the store is available")
}

async fn read(results: &dyn ResultStore, key: &Key) -> Option<Vec<u8>> {
    results
        .read(key, None)
        .await
        .expect("the store is available")
}

/// A result is stored with the done marker, whatever its bytes, and is read by its key only.
pub async fn a_result_is_stored_with_its_completion(store: Arc<dyn Store>) {
    let Some(results) = store.results() else {
        return;
    };
    let every_byte: Vec<u8> = (0..=u8::MAX).cycle().take(100_000).collect();
    for (n, result) in [&b"{\"cents\":4200}"[..], b"", b"\0", &every_byte]
        .into_iter()
        .enumerate()
    {
        for guarantee in BOTH_GUARANTEES {
            let key = key(format!("{guarantee:?}-{n}"));
            let claimant = Claimant::new(guarantee, OWN_TOKEN, 1).fingerprint(fingerprint(7));
            assert_eq!(read(results, &key).await, None);
            assert_eq!(verdict(&*store, claimant.claim(&key)).await, granted(1));
            assert_eq!(read(results, &key).await, None);
            let stored = complete(results, claimant, &key, result).await;
            let completed = Completion {
                verdict: DONE,
                earlier: None,
            };
            assert_eq!(stored, completed);
            assert_eq!(read(results, &key).await.as_deref(), Some(result));
            let other_body = Claimant::new(guarantee, OTHER_TOKEN, 0).fingerprint(fingerprint(8));
            assert_eq!(
                verdict(&*store, other_body.claim(&key)).await,
                Verdict::Conflict
            );
            for (body, expected) in [(7, Some(result)), (8, None)] {
                let read = results.read(&key, fingerprint(body)).await;
                assert_eq!(read.expect("the store is available").as_deref(), expected);
                let late = claimant.fingerprint(fingerprint(body));
                let again = complete(results, late, &key, b"late").await;
                assert_eq!((again.verdict, again.earlier.as_deref()), (DONE, expected));
            }
        }
    }
}

/// Later completions, with or without a result, do not change a result; they return it.
pub async fn the_first_result_is_kept(store: Arc<dyn Store>) {
    let Some(results) = store.results() else {
        return;
    };
    let (own, other) = (
        Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1),
        Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 2),
    );
    let id = key("id");
    // The marker of a run that completes late may be lost.
    let first = complete(results, own, &id, b"first").await;
    let lost = Completion {
        verdict: DONE_WITH_LOST_MARKER,
        earlier: None,
    };
    assert_eq!(first, lost);
    let found = Completion {
        verdict: DONE,
        earlier: Some(b"first".to_vec()),
    };
    assert_eq!(complete(results, other, &id, b"second").await, found);
    let repeated = complete(results, own, &id, b"first").await;
    assert_eq!(repeated, found, "the reply to the completion was lost");
    let plain = other.operation(OperationKind::Complete, &id);
    assert_eq!(verdict(&*store, plain).await, DONE);
    assert_eq!(read(results, &id).await.as_deref(), Some(&b"first"[..]));

    // An id that was completed without a result stays without one.
    let id = key("without");
    let plain = own.operation(OperationKind::Complete, &id);
    assert_eq!(verdict(&*store, plain).await, DONE_WITH_LOST_MARKER);
    let found = Completion {
        verdict: DONE,
        earlier: None,
    };
    assert_eq!(complete(results, other, &id, b"late").await, found);
    assert_eq!(read(results, &id).await, None);
}

/// A completion that does not write the done marker stores no result.
pub async fn a_lost_completion_stores_no_result(store: Arc<dyn Store>) {
    let Some(results) = store.results() else {
        return;
    };
    for guarantee in BOTH_GUARANTEES {
        let id = key(format!("{guarantee:?}"));
        let holder = Claimant::new(guarantee, OTHER_TOKEN, 1);
        assert_eq!(verdict(&*store, holder.claim(&id)).await, granted(1));
        let late = Claimant::new(guarantee, OWN_TOKEN, 1);
        let lost = Completion {
            verdict: Verdict::Lost,
            earlier: None,
        };
        assert_eq!(complete(results, late, &id, b"late").await, lost);
        assert_eq!(read(results, &id).await, None);
        assert_eq!(complete(results, holder, &id, b"right").await.verdict, DONE);
        assert_eq!(read(results, &id).await.as_deref(), Some(&b"right"[..]));
    }
}

/// Of several completions of one key at a time, one stores its result, and all others return it.
pub async fn concurrent_completions_agree_on_one_result(store: Arc<dyn Store>) {
    if store.results().is_none() {
        return;
    }
    for round in 0..20 {
        let id = key(format!("round-{round}"));
        let mut running = tokio::task::JoinSet::new();
        for n in 0..6_u8 {
            let (store, id) = (store.clone(), id.clone());
            running.spawn(async move {
                let results = store.results().expect("the store keeps results");
                let claimant = Claimant::new(EFFECTIVELY_ONCE, Token(u128::from(n) + 1), 1);
                let completion = complete(results, claimant, &id, &[n]).await;
                completion.earlier.unwrap_or(vec![n])
            });
        }
        let answers = running.join_all().await;
        let results = store.results().expect("the store keeps results");
        let stored = read(results, &id).await.expect("a result");
        assert!(
            answers.iter().all(|answer| *answer == stored),
            "stored {stored:?}, answered {answers:?}"
        );
    }
}

/// A forgotten id has no result, also when it is done again without one.
pub async fn a_forgotten_id_has_no_result(store: Arc<dyn Store>) {
    let Some(results) = store.results() else {
        return;
    };
    let (id, claimant) = (key("id"), Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1));
    complete(results, claimant, &id, b"first").await;
    let forget = OperationKind::Forget {
        seen: Marker::Done(None),
    };
    let forgotten = verdict(&*store, claimant.operation(forget, &id)).await;
    assert_eq!(forgotten, Verdict::Applied);
    assert_eq!(read(results, &id).await, None);
    let next = Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 2);
    let again = verdict(&*store, next.claim(&id)).await;
    assert!(matches!(again, Verdict::Granted(_)), "{again:?}");
    let plain = next.operation(OperationKind::Complete, &id);
    assert_eq!(verdict(&*store, plain).await, DONE);
    assert_eq!(read(results, &id).await, None);
}

/// A result expires together with its marker: while the id is a duplicate it has its result.
pub async fn a_result_expires_with_its_marker(store: Arc<dyn Store>) {
    let Some(results) = store.results() else {
        return;
    };
    let window = Duration::from_secs(1);
    let (id, claimant) = (
        key("id"),
        Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1)
            .lease(SHORT_LEASE)
            .window(window),
    );
    let started = Instant::now();
    complete(results, claimant, &id, b"first").await;
    let probe = Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 0).lease(SHORT_LEASE);
    loop {
        let result = read(results, &id).await;
        // Read first: whoever finds the id done afterwards found its result before.
        match verdict(&*store, probe.claim(&id)).await {
            Verdict::Duplicate => assert_eq!(result.as_deref(), Some(&b"first"[..])),
            other => {
                assert_eq!(other, granted(1));
                break;
            }
        }
        assert!(
            started.elapsed() < 10 * window,
            "the marker does not expire"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(started.elapsed() >= window);
    assert_eq!(read(results, &id).await, None);
    let next = Claimant {
        attempt: 1,
        ..probe
    };
    let plain = next.operation(OperationKind::Complete, &id);
    verdict(&*store, plain).await;
    assert_eq!(read(results, &id).await, None, "of the expired marker");
}

fn without_time(verdict: Verdict) -> Verdict {
    match verdict {
        Verdict::Busy { .. } => Verdict::Busy {
            remaining: Duration::ZERO,
        },
        other => other,
    }
}

/// In random histories, verdicts and results equal those of the memory store.
pub async fn random_results_match_the_memory_store(store: Arc<dyn Store>) {
    if store.results().is_none() {
        return;
    }
    for seed in seeds(HISTORIES) {
        let reference = MemoryStore::new();
        let mut random = fastrand::Rng::with_seed(seed);
        for step in 0..STEPS {
            let id = key(format!("{seed}-{}", random.u8(..2)));
            let guarantee = BOTH_GUARANTEES[random.usize(..2)];
            let claimant = Claimant::new(
                guarantee,
                Token(u128::from(random.u8(1..4))),
                random.u32(1..4),
            )
            .lease(LONG_LEASE)
            .fingerprint(fingerprint(random.u64(..2)));
            let (seen, _) = reference.marker(&id);
            let kind = match random.u8(..13) {
                0..4 => OperationKind::Claim,
                4 => OperationKind::Complete,
                5 => OperationKind::Clear(Effect::Nothing),
                6 => OperationKind::Doubt,
                7 => OperationKind::Reject(Effect::Unknown),
                8 => OperationKind::Forget { seen },
                9 => OperationKind::Redrive {
                    seen,
                    effect: Effect::Nothing,
                },
                last => {
                    let kind = match last {
                        12 => OperationKind::Resolve(Finding::Happened),
                        _ => OperationKind::Complete,
                    };
                    let (operation, result) = (claimant.operation(kind, &id), [step as u8]);
                    let results = store.results().expect("the store keeps results");
                    let own = reference.complete(&operation, &result).await;
                    let actual = results.complete(&operation, &result).await;
                    let available = "the store is available";
                    assert_eq!(
                        actual.expect(available),
                        own.expect(available),
                        "step {step}, {}",
                        repeat_hint(seed)
                    );
                    continue;
                }
            };
            let operation: Operation = claimant.operation(kind, &id);
            let own = without_time(verdict(&reference, operation.clone()).await);
            let actual = without_time(verdict(&*store, operation).await);
            assert_eq!(actual, own, "{kind:?}, step {step}, {}", repeat_hint(seed));
            let results = store.results().expect("the store keeps results");
            assert_eq!(
                read(results, &id).await,
                read(&reference, &id).await,
                "after {kind:?}, step {step}, {}",
                repeat_hint(seed)
            );
        }
    }
}
