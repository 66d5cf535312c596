//! Batches of operations, and lost replies.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use oncegate_core::marker::{
    Ask, Attempts, Doubt, Effect, Finding, Guarantee, Marker, Operation, Token, UNKNOWN_ATTEMPT,
    Verdict,
};
use oncegate_core::{Key, Store, StoreError};

use crate::laws::ask::{
    AT_MOST_ONCE, Asker, DONE, DONE_WITH_LOST_MARKER, DOUBTED_ONCE, EFFECTIVELY_ONCE, LONG, MINE,
    THEIRS, answers, cleared, doubted, granted, hold, key, reconciled, rejected, running, verdict,
    verdicts,
};
use crate::laws::rows::{alike, questions, setup_operations};
use crate::loses_replies::{LosesReplies, ReplyFault};

const BUSY: Verdict = Verdict::Busy { remaining: LONG };

fn asker(token: u128, attempt: u32) -> Asker {
    Asker::new(EFFECTIVELY_ONCE, Token(token), attempt)
}

/// Compares verdicts with the expected ones.
fn expect(heard: &[Verdict], expected: &[Verdict], asked: &[Operation]) {
    assert_eq!(heard.len(), expected.len());
    for (it, ((heard, expected), asked)) in heard.iter().zip(expected).zip(asked).enumerate() {
        assert!(
            alike(*heard, *expected),
            "answer {it}: {heard:?}, not {expected:?}, to {asked:?}"
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
    let made: Vec<_> = keys
        .iter()
        .zip(0..)
        .flat_map(|(key, it)| {
            setup_operations(
                key,
                &running(EFFECTIVELY_ONCE, Token(it), it as u32 % 3 + 1),
            )
        })
        .collect();
    let (operations, expected): (Vec<_>, Vec<_>) = made.into_iter().unzip();
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
            let holder = asker(it.into(), attempt);
            match it % 8 {
                0 => (holder.asks(Ask::Complete, key), DONE),
                1 => (asker(9999, attempt).asks(Ask::Complete, key), Verdict::Lost),
                2 => (asker(9999, 0).claims(key), BUSY),
                3 => (holder.window(LONG).asks(Ask::Renew, key), Verdict::Kept),
                4 => (holder.claims(key), granted(attempt)),
                5 => (holder.asks(Ask::Clear(Effect::Unknown), key), Verdict::Kept),
                6 => (
                    Asker::new(AT_MOST_ONCE, Token(it.into()), attempt + 1).asks(Ask::Doubt, key),
                    Verdict::Lost,
                ),
                _ => (
                    Asker::new(Guarantee::Bare, MINE, 0).claims(key),
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
    verdicts(&*store, &[asker(7, 0).claims(&taken)]).await;
    let forever = Duration::from_secs(100 * 365 * 24 * 3600);
    let mut batch = Vec::new();
    for (it, bad) in [
        asker(8, u32::MAX).asks(Ask::Complete, &taken),
        asker(8, 1).asks(Ask::Renew, &key("absent")),
        asker(8, 1).asks(Ask::Resolve(Finding::Happened), &taken),
        asker(8, 1).asks(
            Ask::Forget {
                seen: running(EFFECTIVELY_ONCE, Token(7), 1),
            },
            &taken,
        ),
        asker(8, 1).asks(
            Ask::Forget {
                seen: Marker::Absent,
            },
            &key("absent"),
        ),
        asker(8, 1).asks(
            Ask::SendBack {
                seen: running(EFFECTIVELY_ONCE, Token(7), 1),
                effect: Effect::Nothing,
            },
            &taken,
        ),
        asker(8, 1)
            .lease(forever)
            .window(Duration::ZERO)
            .asks(Ask::Renew, &taken),
        asker(u128::MAX, 0)
            .lease(Duration::ZERO)
            .window(forever)
            .asks(Ask::Renew, &taken),
    ]
    .into_iter()
    .enumerate()
    {
        let good = key(format!("good {it}"));
        batch.extend([
            (asker(1, 0).claims(&good), granted(1)),
            (bad, Verdict::Lost),
            (asker(1, 1).asks(Ask::Complete, &good), DONE),
        ]);
    }
    let (operations, expected): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    expect(
        &verdicts(&*store, &operations).await,
        &expected,
        &operations,
    );
    assert!(
        alike(verdict(&*store, asker(9, 0).claims(&taken)).await, BUSY),
        "the failed operations changed nothing"
    );
}

/// Operations on one key in one batch are applied in order.
pub async fn operations_on_one_key_in_a_batch_keep_their_order(store: Arc<dyn Store>) {
    let (k, other, doubt) = (key("k"), key("other"), key("doubt"));
    let clear = Ask::Clear(Effect::Nothing);
    let strict = |token, attempt| Asker::new(AT_MOST_ONCE, Token(token), attempt);
    let after_forget = Attempts {
        number: UNKNOWN_ATTEMPT + 1,
        base: UNKNOWN_ATTEMPT,
        crashes: 0,
    };
    let batch = [
        (asker(1, 0).claims(&k), granted(1)),
        (asker(9, 0).claims(&other), granted(1)),
        (asker(2, 0).claims(&k), BUSY),
        (asker(1, 0).claims(&k), granted(1)),
        (asker(1, 1).asks(clear, &k), Verdict::Kept),
        (asker(2, 0).claims(&k), granted(1)),
        (asker(1, 1).asks(Ask::Complete, &k), Verdict::Lost),
        (
            asker(2, 1).asks(Ask::Clear(Effect::Unknown), &k),
            Verdict::Kept,
        ),
        (strict(4, 0).claims(&doubt), granted(1)),
        (asker(3, 0).claims(&k), granted(2)),
        (strict(4, 1).asks(Ask::Doubt, &doubt), Verdict::Kept),
        (asker(3, 2).asks(Ask::Complete, &k), DONE),
        (strict(5, 0).claims(&doubt), Verdict::InDoubt(DOUBTED_ONCE)),
        (strict(4, 1).asks(Ask::Renew, &doubt), Verdict::Lost),
        (asker(4, 0).claims(&k), Verdict::Duplicate),
        (
            strict(5, 2).asks(Ask::Resolve(Finding::DidNotHappen), &doubt),
            Verdict::Kept,
        ),
        (asker(9, 1).asks(Ask::Complete, &other), DONE),
        (
            strict(5, 0).claims(&doubt),
            Verdict::Granted(Attempts {
                number: 3,
                ..DOUBTED_ONCE
            }),
        ),
        (
            asker(4, 0).asks(
                Ask::Forget {
                    seen: Marker::Done(None),
                },
                &k,
            ),
            Verdict::Kept,
        ),
        (asker(4, 0).claims(&k), Verdict::Granted(after_forget)),
    ];
    let (operations, expected): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
    expect(
        &verdicts(&*store, &operations).await,
        &expected,
        &operations,
    );
    // The same claim repeated many times, and the same completion.
    let many = key("many");
    let claims: Vec<_> = (0..20).map(|it| asker(it % 4, 0).claims(&many)).collect();
    let expected: Vec<_> = (0..20)
        .map(|it| if it % 4 == 0 { granted(1) } else { BUSY })
        .collect();
    expect(&verdicts(&*store, &claims).await, &expected, &claims);
    let completions = vec![asker(0, 1).asks(Ask::Complete, &many); 20];
    expect(
        &verdicts(&*store, &completions).await,
        &[DONE; 20],
        &completions,
    );
}

/// If the reply to a batch is lost, any prefix may have been applied. Repeating the batch with the
/// same tokens gives the lost verdicts and the same markers.
pub async fn a_partly_applied_batch_can_be_repeated(store: Arc<dyn Store>) {
    let mine = |guarantee, attempt| Asker::new(guarantee, MINE, attempt);
    let strict = |attempt| mine(AT_MOST_ONCE, attempt);
    let lax = |attempt| mine(EFFECTIVELY_ONCE, attempt);
    let first = hold(AT_MOST_ONCE, MINE, Attempts::new(1), Effect::Nothing);
    let doubted_anew = hold(
        AT_MOST_ONCE,
        MINE,
        Attempts::all_forgiven(1),
        Effect::Unknown,
    );
    // Given marker, operation, verdict, resulting marker.
    let rows = [
        (
            Marker::Absent,
            lax(0),
            Ask::Claim,
            granted(1),
            running(EFFECTIVELY_ONCE, MINE, 1),
        ),
        (
            Marker::Absent,
            strict(0),
            Ask::Claim,
            granted(1),
            running(AT_MOST_ONCE, MINE, 1),
        ),
        (
            running(EFFECTIVELY_ONCE, MINE, 1),
            lax(1),
            Ask::Complete,
            DONE,
            Marker::Done(None),
        ),
        (
            cleared(2, Effect::Nothing),
            strict(0),
            Ask::Claim,
            granted(3),
            running(AT_MOST_ONCE, MINE, 3),
        ),
        (
            running(EFFECTIVELY_ONCE, MINE, 2),
            lax(2),
            Ask::Clear(Effect::Nothing),
            Verdict::Kept,
            cleared(2, Effect::Nothing),
        ),
        (
            running(AT_MOST_ONCE, MINE, 1),
            strict(1),
            Ask::Clear(Effect::Nothing),
            Verdict::Kept,
            Marker::Absent,
        ),
        (
            running(AT_MOST_ONCE, MINE, 1),
            strict(1),
            Ask::Doubt,
            Verdict::Kept,
            Marker::InDoubt(first, Doubt::Waiting),
        ),
        (
            running(AT_MOST_ONCE, MINE, 1),
            strict(1),
            Ask::Renew,
            Verdict::Kept,
            running(AT_MOST_ONCE, MINE, 1),
        ),
        (
            running(EFFECTIVELY_ONCE, THEIRS, 1),
            lax(0),
            Ask::Claim,
            BUSY,
            running(EFFECTIVELY_ONCE, THEIRS, 1),
        ),
        (
            Marker::Done(None),
            lax(0),
            Ask::Claim,
            Verdict::Duplicate,
            Marker::Done(None),
        ),
        (
            doubted(AT_MOST_ONCE, THEIRS, 1),
            strict(0),
            Ask::Claim,
            Verdict::InDoubt(DOUBTED_ONCE),
            reconciled(MINE, 2),
        ),
        (
            Marker::Absent,
            strict(1),
            Ask::Doubt,
            Verdict::Kept,
            Marker::InDoubt(doubted_anew, Doubt::Waiting),
        ),
    ];
    for applied in 0..=rows.len() {
        let keys: Vec<Key> = (0..rows.len())
            .map(|it| key(format!("{applied}-{it}")))
            .collect();
        let asked: Vec<Operation> = rows
            .iter()
            .zip(&keys)
            .map(|((_, asker, ask, ..), key)| asker.asks(*ask, key))
            .collect();
        let (made, told): (Vec<_>, Vec<_>) = rows
            .iter()
            .zip(&keys)
            .flat_map(|((given, ..), key)| setup_operations(key, given))
            .unzip();
        expect(&verdicts(&*store, &made).await, &told, &made);

        let calls = AtomicUsize::new(0);
        let once = move |_: &[Operation]| match calls.fetch_add(1, Ordering::Relaxed) {
            0 => ReplyFault::Lost { applied },
            _ => ReplyFault::Answered,
        };
        let lossy = LosesReplies::new(store.clone(), once);
        let lost = answers(&lossy, &asked).await;
        assert!(
            lost.iter()
                .all(|answer| matches!(answer, Err(StoreError::Unknown(_)))),
            "{lost:?}"
        );
        // A completion may also find that it was applied, which counts as done, too.
        let expected: Vec<Verdict> = rows.iter().map(|(.., verdict, _)| *verdict).collect();
        expect(&verdicts(&lossy, &asked).await, &expected, &asked);

        let (looks, told): (Vec<_>, Vec<_>) = rows
            .iter()
            .zip(&keys)
            .flat_map(|((.., becomes), key)| questions(key, becomes))
            .unzip();
        expect(&verdicts(&*store, &looks).await, &told, &looks);
    }
}

/// When it is repeated after a lost reply, each operation has the same verdict, or one after which
/// reading the marker tells what happened.
pub async fn an_operation_can_be_repeated_after_a_lost_reply(store: Arc<dyn Store>) {
    let strict = |attempt| Asker::new(AT_MOST_ONCE, MINE, attempt);
    let lax = |attempt| Asker::new(EFFECTIVELY_ONCE, MINE, attempt);
    let lossy = LosesReplies::new(store.clone(), |asked: &[Operation]| ReplyFault::Lost {
        applied: asked.len(),
    });
    let forget = Ask::Forget {
        seen: Marker::Done(None),
    };
    let send_back = Ask::SendBack {
        seen: rejected(4, None),
        effect: Effect::Unknown,
    };
    // Given marker, operation, its verdict when repeated, and the verdict of a claim afterwards.
    let rows = [
        (
            running(AT_MOST_ONCE, MINE, 2),
            strict(2),
            Ask::Reject(Effect::Unknown),
            Verdict::Lost,
            Verdict::Rejected { attempt: 2 },
        ),
        (
            running(EFFECTIVELY_ONCE, MINE, 2),
            lax(2),
            Ask::Reject(Effect::Unknown),
            Verdict::Kept,
            granted(3),
        ),
        (
            running(EFFECTIVELY_ONCE, MINE, 1),
            lax(1),
            Ask::Clear(Effect::Unknown),
            Verdict::Kept,
            granted(2),
        ),
        (
            doubted(AT_MOST_ONCE, MINE, 2),
            strict(2),
            Ask::Resolve(Finding::DidNotHappen),
            Verdict::Lost,
            granted(3),
        ),
        (
            doubted(AT_MOST_ONCE, MINE, 2),
            strict(2),
            Ask::Resolve(Finding::Happened),
            Verdict::Lost,
            Verdict::Duplicate,
        ),
        (
            cleared(2, Effect::Nothing),
            lax(1),
            Ask::Complete,
            DONE,
            Verdict::Duplicate,
        ),
        (
            Marker::Done(None),
            lax(4),
            forget,
            Verdict::Kept,
            Verdict::Granted(Attempts {
                number: 5,
                base: 4,
                crashes: 0,
            }),
        ),
        (
            rejected(4, None),
            strict(0),
            send_back,
            Verdict::Kept,
            Verdict::Granted(Attempts {
                number: 5,
                base: 4,
                crashes: 0,
            }),
        ),
    ];
    for (it, (given, asker, ask, again, told)) in rows.into_iter().enumerate() {
        let key = key(format!("k{it}"));
        let (made, expected): (Vec<_>, Vec<_>) = setup_operations(&key, &given).into_iter().unzip();
        expect(&verdicts(&*store, &made).await, &expected, &made);
        let asked = asker.asks(ask, &key);
        let lost = answers(&lossy, std::slice::from_ref(&asked)).await;
        assert!(matches!(lost[0], Err(StoreError::Unknown(_))), "{lost:?}");
        assert_eq!(
            verdict(&*store, asked.clone()).await,
            again,
            "{asked:?} once more"
        );
        assert_eq!(
            verdict(
                &*store,
                Asker {
                    token: THEIRS,
                    ..asker
                }
                .claims(&key)
            )
            .await,
            told,
            "after {asked:?}"
        );
    }
    // A repeated completion counts a lost marker once: the second time the marker is there.
    let heard = verdicts(
        &*store,
        &[
            lax(1).asks(Ask::Complete, &key("c")),
            lax(1).asks(Ask::Complete, &key("c")),
        ],
    )
    .await;
    assert_eq!(heard, [DONE_WITH_LOST_MARKER, DONE]);
}

/// An apply that is dropped at any moment leaves each of its operations applied or not applied, and
/// the store usable.
pub async fn an_operation_can_be_repeated_after_a_dropped_apply(store: Arc<dyn Store>) {
    for polls in 0..12u32 {
        let claims: Vec<Operation> = (0..20)
            .map(|it| asker(1, 0).claims(&key(format!("{polls}-{it}"))))
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
