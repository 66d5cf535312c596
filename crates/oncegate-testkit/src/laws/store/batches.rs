//! Batches of operations, and lost replies.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use oncegate_core::marker::{
    Attempts, Doubt, Effect, Finding, Guarantee, Marker, Operation, OperationKind, Token,
    UNKNOWN_ATTEMPT, Verdict,
};
use oncegate_core::{Key, Store, StoreError};

use crate::laws::fixtures::{
    AT_MOST_ONCE, Claimant, DONE, DONE_WITH_LOST_MARKER, DOUBTED_ONCE, EFFECTIVELY_ONCE,
    LONG_LEASE, OTHER_TOKEN, OWN_TOKEN, answers, cleared, doubted, granted, hold, key,
    reconciling_attempt, rejected, running, verdict, verdicts,
};
use crate::laws::rows::{matches_expected, probe_operations, setup_operations};
use crate::loses_replies::{LosesReplies, ReplyFault};

const BUSY: Verdict = Verdict::Busy {
    remaining: LONG_LEASE,
};

fn claimant(token: u128, attempt: u32) -> Claimant {
    Claimant::new(EFFECTIVELY_ONCE, Token(token), attempt)
}

/// Compares verdicts with the expected ones.
fn expect(received: &[Verdict], expected: &[Verdict], operations: &[Operation]) {
    assert_eq!(received.len(), expected.len());
    for (it, ((received, expected), operation)) in
        received.iter().zip(expected).zip(operations).enumerate()
    {
        assert!(
            matches_expected(*received, *expected),
            "verdict {it}: {received:?} instead of {expected:?} for {operation:?}"
        );
    }
}

/// Each operation has its verdict at its position, whatever the other operations and terms are.
pub async fn a_batch_is_answered_in_order(store: Arc<dyn Store>) {
    const IDS: u32 = 600;
    assert!(
        answers(&*store, &[]).await.is_empty(),
        "an empty batch has no verdicts"
    );
    let keys: Vec<Key> = (0..IDS).map(|it| key(format!("k{it}"))).collect();
    // Attempts 1 to 3 in turn: the verdicts distinguish the keys.
    let setup: Vec<_> = keys
        .iter()
        .zip(0..)
        .flat_map(|(key, it)| {
            setup_operations(
                key,
                &running(EFFECTIVELY_ONCE, Token(it), it as u32 % 3 + 1),
            )
        })
        .collect();
    let (operations, expected): (Vec<_>, Vec<_>) = setup.into_iter().unzip();
    expect(
        &verdicts(&*store, &operations).await,
        &expected,
        &operations,
    );

    let mixed: Vec<(Operation, Verdict)> = keys
        .iter()
        .zip(0u32..)
        .map(|(key, it)| {
            let attempt = it % 3 + 1;
            let holder = claimant(it.into(), attempt);
            match it % 8 {
                0 => (holder.operation(OperationKind::Complete, key), DONE),
                1 => (
                    claimant(9999, attempt).operation(OperationKind::Complete, key),
                    Verdict::Lost,
                ),
                2 => (claimant(9999, 0).claim(key), BUSY),
                3 => (
                    holder
                        .window(LONG_LEASE)
                        .operation(OperationKind::Renew, key),
                    Verdict::Applied,
                ),
                4 => (holder.claim(key), granted(attempt)),
                5 => (
                    holder.operation(OperationKind::Clear(Effect::Unknown), key),
                    Verdict::Applied,
                ),
                6 => (
                    Claimant::new(AT_MOST_ONCE, Token(it.into()), attempt + 1)
                        .operation(OperationKind::Doubt, key),
                    Verdict::Lost,
                ),
                _ => (
                    Claimant::new(Guarantee::Bare, OWN_TOKEN, 0).claim(key),
                    Verdict::Duplicate,
                ),
            }
        })
        .collect();
    let (operations, expected): (Vec<_>, Vec<_>) = mixed.into_iter().unzip();
    expect(
        &verdicts(&*store, &operations).await,
        &expected,
        &operations,
    );
}

/// An operation that is refused or invalid does not affect the others.
pub async fn an_invalid_operation_does_not_affect_the_others(store: Arc<dyn Store>) {
    let taken = key("taken");
    verdicts(&*store, &[claimant(7, 0).claim(&taken)]).await;
    let forever = Duration::from_secs(100 * 365 * 24 * 3600);
    let mut batch = Vec::new();
    for (it, bad) in [
        claimant(8, u32::MAX).operation(OperationKind::Complete, &taken),
        claimant(8, 1).operation(OperationKind::Renew, &key("absent")),
        claimant(8, 1).operation(OperationKind::Resolve(Finding::Happened), &taken),
        claimant(8, 1).operation(
            OperationKind::Forget {
                seen: running(EFFECTIVELY_ONCE, Token(7), 1),
            },
            &taken,
        ),
        claimant(8, 1).operation(
            OperationKind::Forget {
                seen: Marker::Absent,
            },
            &key("absent"),
        ),
        claimant(8, 1).operation(
            OperationKind::Redrive {
                seen: running(EFFECTIVELY_ONCE, Token(7), 1),
                effect: Effect::Nothing,
            },
            &taken,
        ),
        claimant(8, 1)
            .lease(forever)
            .window(Duration::ZERO)
            .operation(OperationKind::Renew, &taken),
        claimant(u128::MAX, 0)
            .lease(Duration::ZERO)
            .window(forever)
            .operation(OperationKind::Renew, &taken),
    ]
    .into_iter()
    .enumerate()
    {
        let good = key(format!("good {it}"));
        batch.extend([
            (claimant(1, 0).claim(&good), granted(1)),
            (bad, Verdict::Lost),
            (
                claimant(1, 1).operation(OperationKind::Complete, &good),
                DONE,
            ),
        ]);
    }
    let (operations, expected): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    expect(
        &verdicts(&*store, &operations).await,
        &expected,
        &operations,
    );
    assert!(
        matches_expected(verdict(&*store, claimant(9, 0).claim(&taken)).await, BUSY),
        "the failed operations changed nothing"
    );
}

/// Operations on one key in one batch are applied in order.
pub async fn operations_on_one_key_in_a_batch_keep_their_order(store: Arc<dyn Store>) {
    let (k, other, doubt) = (key("k"), key("other"), key("doubt"));
    let clear = OperationKind::Clear(Effect::Nothing);
    let at_most_once = |token, attempt| Claimant::new(AT_MOST_ONCE, Token(token), attempt);
    let after_forget = Attempts {
        number: UNKNOWN_ATTEMPT + 1,
        base: UNKNOWN_ATTEMPT,
        crashes: 0,
    };
    let batch = [
        (claimant(1, 0).claim(&k), granted(1)),
        (claimant(9, 0).claim(&other), granted(1)),
        (claimant(2, 0).claim(&k), BUSY),
        (claimant(1, 0).claim(&k), granted(1)),
        (claimant(1, 1).operation(clear, &k), Verdict::Applied),
        (claimant(2, 0).claim(&k), granted(1)),
        (
            claimant(1, 1).operation(OperationKind::Complete, &k),
            Verdict::Lost,
        ),
        (
            claimant(2, 1).operation(OperationKind::Clear(Effect::Unknown), &k),
            Verdict::Applied,
        ),
        (at_most_once(4, 0).claim(&doubt), granted(1)),
        (claimant(3, 0).claim(&k), granted(2)),
        (
            at_most_once(4, 1).operation(OperationKind::Doubt, &doubt),
            Verdict::Applied,
        ),
        (claimant(3, 2).operation(OperationKind::Complete, &k), DONE),
        (
            at_most_once(5, 0).claim(&doubt),
            Verdict::InDoubt(DOUBTED_ONCE),
        ),
        (
            at_most_once(4, 1).operation(OperationKind::Renew, &doubt),
            Verdict::Lost,
        ),
        (claimant(4, 0).claim(&k), Verdict::Duplicate),
        (
            at_most_once(5, 2).operation(OperationKind::Resolve(Finding::DidNotHappen), &doubt),
            Verdict::Applied,
        ),
        (
            claimant(9, 1).operation(OperationKind::Complete, &other),
            DONE,
        ),
        (
            at_most_once(5, 0).claim(&doubt),
            Verdict::Granted(Attempts {
                number: 3,
                ..DOUBTED_ONCE
            }),
        ),
        (
            claimant(4, 0).operation(
                OperationKind::Forget {
                    seen: Marker::Done(None),
                },
                &k,
            ),
            Verdict::Applied,
        ),
        (claimant(4, 0).claim(&k), Verdict::Granted(after_forget)),
    ];
    let (operations, expected): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    expect(
        &verdicts(&*store, &operations).await,
        &expected,
        &operations,
    );
    // Five claims of each of four tokens, and one completion repeated.
    let many = key("many");
    let claims: Vec<_> = (0..20).map(|it| claimant(it % 4, 0).claim(&many)).collect();
    let expected: Vec<_> = (0..20)
        .map(|it| if it % 4 == 0 { granted(1) } else { BUSY })
        .collect();
    expect(&verdicts(&*store, &claims).await, &expected, &claims);
    let completions = vec![claimant(0, 1).operation(OperationKind::Complete, &many); 20];
    expect(
        &verdicts(&*store, &completions).await,
        &[DONE; 20],
        &completions,
    );
}

/// If the reply to a batch is lost, any prefix may have been applied. Repeating the batch with the
/// same tokens gives the lost verdicts and the same markers.
pub async fn a_partly_applied_batch_can_be_repeated(store: Arc<dyn Store>) {
    let mine = |guarantee, attempt| Claimant::new(guarantee, OWN_TOKEN, attempt);
    let at_most_once = |attempt| mine(AT_MOST_ONCE, attempt);
    let effectively_once = |attempt| mine(EFFECTIVELY_ONCE, attempt);
    let first = hold(AT_MOST_ONCE, OWN_TOKEN, Attempts::new(1), Effect::Nothing);
    let new_doubt = hold(
        AT_MOST_ONCE,
        OWN_TOKEN,
        Attempts::none_counted(1),
        Effect::Unknown,
    );
    // Given marker, operation, verdict, resulting marker.
    let rows = [
        (
            Marker::Absent,
            effectively_once(0),
            OperationKind::Claim,
            granted(1),
            running(EFFECTIVELY_ONCE, OWN_TOKEN, 1),
        ),
        (
            Marker::Absent,
            at_most_once(0),
            OperationKind::Claim,
            granted(1),
            running(AT_MOST_ONCE, OWN_TOKEN, 1),
        ),
        (
            running(EFFECTIVELY_ONCE, OWN_TOKEN, 1),
            effectively_once(1),
            OperationKind::Complete,
            DONE,
            Marker::Done(None),
        ),
        (
            cleared(2, Effect::Nothing),
            at_most_once(0),
            OperationKind::Claim,
            granted(3),
            running(AT_MOST_ONCE, OWN_TOKEN, 3),
        ),
        (
            running(EFFECTIVELY_ONCE, OWN_TOKEN, 2),
            effectively_once(2),
            OperationKind::Clear(Effect::Nothing),
            Verdict::Applied,
            cleared(2, Effect::Nothing),
        ),
        (
            running(AT_MOST_ONCE, OWN_TOKEN, 1),
            at_most_once(1),
            OperationKind::Clear(Effect::Nothing),
            Verdict::Applied,
            Marker::Absent,
        ),
        (
            running(AT_MOST_ONCE, OWN_TOKEN, 1),
            at_most_once(1),
            OperationKind::Doubt,
            Verdict::Applied,
            Marker::InDoubt(first, Doubt::Waiting),
        ),
        (
            running(AT_MOST_ONCE, OWN_TOKEN, 1),
            at_most_once(1),
            OperationKind::Renew,
            Verdict::Applied,
            running(AT_MOST_ONCE, OWN_TOKEN, 1),
        ),
        (
            running(EFFECTIVELY_ONCE, OTHER_TOKEN, 1),
            effectively_once(0),
            OperationKind::Claim,
            BUSY,
            running(EFFECTIVELY_ONCE, OTHER_TOKEN, 1),
        ),
        (
            Marker::Done(None),
            effectively_once(0),
            OperationKind::Claim,
            Verdict::Duplicate,
            Marker::Done(None),
        ),
        (
            doubted(AT_MOST_ONCE, OTHER_TOKEN, 1),
            at_most_once(0),
            OperationKind::Claim,
            Verdict::InDoubt(DOUBTED_ONCE),
            reconciling_attempt(OWN_TOKEN, 2),
        ),
        (
            Marker::Absent,
            at_most_once(1),
            OperationKind::Doubt,
            Verdict::Applied,
            Marker::InDoubt(new_doubt, Doubt::Waiting),
        ),
    ];
    for applied in 0..=rows.len() {
        let keys: Vec<Key> = (0..rows.len())
            .map(|it| key(format!("{applied}-{it}")))
            .collect();
        let operations: Vec<Operation> = rows
            .iter()
            .zip(&keys)
            .map(|((_, claimant, kind, ..), key)| claimant.operation(*kind, key))
            .collect();
        let (setup, expected): (Vec<_>, Vec<_>) = rows
            .iter()
            .zip(&keys)
            .flat_map(|((given, ..), key)| setup_operations(key, given))
            .unzip();
        expect(&verdicts(&*store, &setup).await, &expected, &setup);

        let calls = AtomicUsize::new(0);
        let lose_first_reply = move |_: &[Operation]| match calls.fetch_add(1, Ordering::Relaxed) {
            0 => ReplyFault::Lost { applied },
            _ => ReplyFault::Answered,
        };
        let lossy = LosesReplies::new(store.clone(), lose_first_reply);
        let lost = answers(&lossy, &operations).await;
        assert!(
            lost.iter()
                .all(|answer| matches!(answer, Err(StoreError::Unknown(_)))),
            "{lost:?}"
        );
        // A repeated completion is also `DONE` if the first was applied.
        let expected: Vec<Verdict> = rows.iter().map(|(.., verdict, _)| *verdict).collect();
        expect(&verdicts(&lossy, &operations).await, &expected, &operations);

        let (probes, expected): (Vec<_>, Vec<_>) = rows
            .iter()
            .zip(&keys)
            .flat_map(|((.., becomes), key)| probe_operations(key, becomes))
            .unzip();
        expect(&verdicts(&*store, &probes).await, &expected, &probes);
    }
}

/// An operation that is repeated after a lost reply has the same verdict, or `Lost`, after which a
/// claim shows what the first request did.
pub async fn an_operation_can_be_repeated_after_a_lost_reply(store: Arc<dyn Store>) {
    let at_most_once = |attempt| Claimant::new(AT_MOST_ONCE, OWN_TOKEN, attempt);
    let effectively_once = |attempt| Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, attempt);
    let lossy = LosesReplies::new(store.clone(), |operations: &[Operation]| ReplyFault::Lost {
        applied: operations.len(),
    });
    let forget = OperationKind::Forget {
        seen: Marker::Done(None),
    };
    let redrive = OperationKind::Redrive {
        seen: rejected(4, None),
        effect: Effect::Unknown,
    };
    // Given marker, operation, its verdict when repeated, and the verdict of a claim afterwards.
    let rows = [
        (
            running(AT_MOST_ONCE, OWN_TOKEN, 2),
            at_most_once(2),
            OperationKind::Reject(Effect::Unknown),
            Verdict::Lost,
            Verdict::Rejected { attempt: 2 },
        ),
        (
            running(EFFECTIVELY_ONCE, OWN_TOKEN, 2),
            effectively_once(2),
            OperationKind::Reject(Effect::Unknown),
            Verdict::Applied,
            granted(3),
        ),
        (
            running(EFFECTIVELY_ONCE, OWN_TOKEN, 1),
            effectively_once(1),
            OperationKind::Clear(Effect::Unknown),
            Verdict::Applied,
            granted(2),
        ),
        (
            doubted(AT_MOST_ONCE, OWN_TOKEN, 2),
            at_most_once(2),
            OperationKind::Resolve(Finding::DidNotHappen),
            Verdict::Lost,
            granted(3),
        ),
        (
            doubted(AT_MOST_ONCE, OWN_TOKEN, 2),
            at_most_once(2),
            OperationKind::Resolve(Finding::Happened),
            Verdict::Lost,
            Verdict::Duplicate,
        ),
        (
            cleared(2, Effect::Nothing),
            effectively_once(1),
            OperationKind::Complete,
            DONE,
            Verdict::Duplicate,
        ),
        (
            Marker::Done(None),
            effectively_once(4),
            forget,
            Verdict::Applied,
            Verdict::Granted(Attempts {
                number: 5,
                base: 4,
                crashes: 0,
            }),
        ),
        (
            rejected(4, None),
            at_most_once(0),
            redrive,
            Verdict::Applied,
            Verdict::Granted(Attempts {
                number: 5,
                base: 4,
                crashes: 0,
            }),
        ),
    ];
    for (it, (given, claimant, kind, repeated, afterwards)) in rows.into_iter().enumerate() {
        let key = key(format!("k{it}"));
        let (setup, expected): (Vec<_>, Vec<_>) =
            setup_operations(&key, &given).into_iter().unzip();
        expect(&verdicts(&*store, &setup).await, &expected, &setup);
        let operation = claimant.operation(kind, &key);
        let lost = answers(&lossy, std::slice::from_ref(&operation)).await;
        assert!(matches!(lost[0], Err(StoreError::Unknown(_))), "{lost:?}");
        assert_eq!(
            verdict(&*store, operation.clone()).await,
            repeated,
            "{operation:?}, repeated"
        );
        assert_eq!(
            verdict(
                &*store,
                Claimant {
                    token: OTHER_TOKEN,
                    ..claimant
                }
                .claim(&key)
            )
            .await,
            afterwards,
            "after {operation:?}"
        );
    }
    // A lost marker is reported once: the repeated completion finds the marker of the first.
    let received = verdicts(
        &*store,
        &[
            effectively_once(1).operation(OperationKind::Complete, &key("c")),
            effectively_once(1).operation(OperationKind::Complete, &key("c")),
        ],
    )
    .await;
    assert_eq!(received, [DONE_WITH_LOST_MARKER, DONE]);
}

/// After the future of `apply` was dropped at any moment, each of its operations is applied or not
/// applied, and the store can be used.
pub async fn an_operation_can_be_repeated_after_a_dropped_apply(store: Arc<dyn Store>) {
    for polls in 0..12u32 {
        let claims: Vec<Operation> = (0..20)
            .map(|it| claimant(1, 0).claim(&key(format!("{polls}-{it}"))))
            .collect();
        let mut apply = Box::pin(store.apply(&claims));
        for _ in 0..polls {
            if poll_fn(|cx| Poll::Ready(apply.as_mut().poll(cx).is_ready())).await {
                break;
            }
            tokio::time::sleep(Duration::from_micros(200 * u64::from(polls))).await;
        }
        drop(apply);
        expect(
            &verdicts(&*store, &claims).await,
            &[granted(1); 20],
            &claims,
        );
    }
}
