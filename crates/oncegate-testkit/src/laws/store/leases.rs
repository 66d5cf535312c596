//! A lease expires by the store's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{Ask, Attempts, Marker, Operation, Token, Verdict};
use oncegate_core::{Guarantee, Key, Store};

use crate::laws::ask::{
    AT_MOST_ONCE, Asker, BOTH, CRASHED_ONCE, EFFECTIVELY_ONCE, LONG, MINE, SHORT, SLACK,
    TAKEN_OVER, THEIRS, granted, key, verdict, verdicts,
};

/// Long enough to send many claims within it on a busy machine.
const LEASE: Duration = Duration::from_millis(300);

/// A lease is held for its duration and is then given to the next claim. `Busy` contains the
/// remaining time, and a claim after that time is not busy again.
pub async fn a_lease_ends_after_its_duration(store: Arc<dyn Store>) {
    for guarantee in BOTH {
        let key = key(format!("{guarantee:?}"));
        let before = Instant::now();
        let holder = Asker::new(guarantee, MINE, 1).lease(LEASE);
        assert_eq!(verdict(&*store, holder.claims(&key)).await, granted(1));
        let claimed = Instant::now();
        let claim = Asker::new(guarantee, THEIRS, 0).claims(&key);
        let taken = if guarantee == AT_MOST_ONCE {
            Verdict::InDoubt(CRASHED_ONCE)
        } else {
            Verdict::Granted(TAKEN_OVER)
        };
        let mut told_to_wait = 0;
        loop {
            let asked = Instant::now();
            let heard = verdict(&*store, claim.clone()).await;
            let answered = Instant::now();
            let Verdict::Busy { remaining } = heard else {
                assert_eq!(heard, taken, "after {:?}", before.elapsed());
                assert!(
                    answered - before + SLACK > LEASE,
                    "taken over after {:?} of {LEASE:?}",
                    answered - before
                );
                break;
            };
            let least = LEASE.saturating_sub(answered - before + SLACK);
            let most = LEASE.saturating_sub(asked - claimed) + SLACK;
            assert!(
                (least..=most).contains(&remaining),
                "{remaining:?} is said to remain, not {least:?} to {most:?}"
            );
            assert!(
                asked - claimed < LEASE + SLACK,
                "still busy {:?} after a claim for {LEASE:?}",
                asked - claimed
            );
            told_to_wait += 1;
            // The first claims without a pause, then after the time that the store reports.
            tokio::time::sleep(if told_to_wait < 5 {
                LEASE / 10
            } else {
                remaining + SLACK
            })
            .await;
        }
    }
}

/// Renewing, repeating the claim with the same token, and repeating the claim of the same doubt
/// restart the lease.
pub async fn a_renewal_restarts_the_lease(store: Arc<dyn Store>) {
    let holder = Asker::new(EFFECTIVELY_ONCE, MINE, 1).lease(LEASE);
    let doubter = Asker::new(AT_MOST_ONCE, MINE, 2).lease(LEASE);
    let renewed = key("renewed");
    let claimed_again = key("claimed again");
    let doubt_renewed = key("doubt renewed");
    let doubt_claimed_again = key("doubt claimed again");
    let left_alone = key("left alone");
    let doubt = |key: &Key| {
        [
            Asker::new(AT_MOST_ONCE, THEIRS, 1).asks(Ask::Doubt, key),
            doubter.claims(key),
        ]
    };
    let [first, second] = [doubt(&doubt_renewed), doubt(&doubt_claimed_again)];
    let made = [
        &[
            holder.claims(&renewed),
            holder.claims(&claimed_again),
            holder.claims(&left_alone),
        ][..],
        &first,
        &second,
    ]
    .concat();
    verdicts(&*store, &made).await;
    tokio::time::sleep(LEASE / 2).await;

    let again = [
        holder.asks(Ask::Renew, &renewed),
        holder.claims(&claimed_again),
        doubter.asks(Ask::Renew, &doubt_renewed),
        doubter.claims(&doubt_claimed_again),
    ];
    let heard = verdicts(&*store, &again).await;
    assert_eq!(
        heard,
        [
            Verdict::Kept,
            granted(1),
            Verdict::Kept,
            Verdict::InDoubt(Attempts::all_forgiven(2))
        ]
    );
    let answered = Instant::now();
    // Leases that were not renewed have expired; renewed ones have not, unless this machine was
    // suspended.
    tokio::time::sleep(LEASE / 2 + SLACK).await;
    let stranger = Asker::new(EFFECTIVELY_ONCE, Token(3), 0);
    assert_eq!(
        verdict(&*store, stranger.claims(&left_alone)).await,
        Verdict::Granted(TAKEN_OVER)
    );
    let keys = [
        &renewed,
        &claimed_again,
        &doubt_renewed,
        &doubt_claimed_again,
    ];
    let claims: Vec<Operation> = keys.into_iter().map(|key| stranger.claims(key)).collect();
    let heard = verdicts(&*store, &claims).await;
    if answered.elapsed() + SLACK < LEASE {
        assert!(
            heard.iter().all(|it| matches!(it, Verdict::Busy { .. })),
            "{heard:?} for {keys:?} after a renewal"
        );
    }
}

/// An operation without effect neither lengthens nor shortens a lease.
pub async fn an_operation_without_effect_does_not_extend_a_lease(store: Arc<dyn Store>) {
    let holder = Asker::new(EFFECTIVELY_ONCE, MINE, 1).lease(LEASE);
    let key = key("k");
    assert_eq!(verdict(&*store, holder.claims(&key)).await, granted(1));
    let claimed = Instant::now();
    let stranger = Asker::new(EFFECTIVELY_ONCE, THEIRS, 1).lease(LONG);
    let in_vain = [
        Ask::Renew,
        Ask::Complete,
        Ask::Doubt,
        Ask::Forget {
            seen: Marker::Done(None),
        },
    ]
    .map(|ask| stranger.asks(ask, &key));
    while claimed.elapsed() < LEASE * 3 / 4 {
        let heard = verdicts(&*store, &in_vain).await;
        assert_eq!(heard, [Verdict::Lost; 4]);
        if claimed.elapsed() < LEASE / 2 {
            let heard = verdict(&*store, stranger.claims(&key)).await;
            if claimed.elapsed() + SLACK > LEASE {
                return; // This machine was suspended: the lease may have expired.
            }
            assert!(matches!(heard, Verdict::Busy { .. }), "{heard:?}");
        }
        tokio::time::sleep(LEASE / 10).await;
    }
    tokio::time::sleep((LEASE + SLACK).saturating_sub(claimed.elapsed())).await;
    assert_eq!(
        verdict(&*store, stranger.claims(&key)).await,
        Verdict::Granted(TAKEN_OVER)
    );
}

/// The lease of a hold is that of its holder's terms, not of the reader's.
pub async fn the_holders_lease_decides(store: Arc<dyn Store>) {
    let terms = [
        (AT_MOST_ONCE, Verdict::InDoubt(CRASHED_ONCE)),
        (EFFECTIVELY_ONCE, Verdict::Granted(TAKEN_OVER)),
    ];
    for (guarantee, taken) in terms {
        let ask = |name: &str, holders: Duration, readers: Duration| {
            let key = key(format!("{name}-{guarantee:?}"));
            (
                Asker::new(guarantee, MINE, 1).lease(holders).claims(&key),
                Asker::new(guarantee, THEIRS, 0).lease(readers).claims(&key),
            )
        };
        let (held, read) = ask("short reader", LONG, Duration::from_millis(1));
        let (brief, patient) = ask("long reader", SHORT, LONG);
        assert_eq!(verdicts(&*store, &[held, brief]).await, [granted(1); 2]);
        tokio::time::sleep(SHORT + SLACK).await;
        let heard = verdicts(&*store, &[read, patient]).await;
        assert!(
            matches!(heard[0], Verdict::Busy { remaining } if remaining > LONG / 2),
            "{heard:?}"
        );
        assert_eq!(heard[1], taken);
    }
}

/// A takeover has the lease of the new holder, and a doubt that of its reconciler.
pub async fn a_takeover_has_the_lease_of_the_new_holder(store: Arc<dyn Store>) {
    let takeover = |guarantee: Guarantee, holders, takers| {
        let key = key(format!("{guarantee:?}-{takers:?}"));
        let asker = |token, lease| {
            Asker::new(guarantee, Token(token), 0)
                .lease(lease)
                .claims(&key)
        };
        [asker(1, holders), asker(2, takers), asker(3, LONG)]
    };
    let cases = BOTH
        .map(|guarantee| {
            [
                takeover(guarantee, SHORT, LONG),
                takeover(guarantee, SHORT, SHORT),
            ]
        })
        .concat();
    let step =
        |it: usize| -> Vec<Operation> { cases.iter().map(|claims| claims[it].clone()).collect() };
    assert_eq!(verdicts(&*store, &step(0)).await, [granted(1); 4]);
    tokio::time::sleep(SHORT + SLACK).await;
    let (doubt, grant) = (Verdict::InDoubt(CRASHED_ONCE), Verdict::Granted(TAKEN_OVER));
    assert_eq!(
        verdicts(&*store, &step(1)).await,
        [doubt, doubt, grant, grant]
    );
    tokio::time::sleep(SHORT + SLACK).await;
    let heard = verdicts(&*store, &step(2)).await;
    let busy = |it: usize| matches!(heard[it], Verdict::Busy { remaining } if remaining > LONG / 2);
    let doubt = Verdict::InDoubt(Attempts {
        number: 3,
        base: 3,
        crashes: 2,
    });
    let grant = Verdict::Granted(Attempts {
        number: 3,
        base: 2,
        crashes: 2,
    });
    assert!(
        busy(0) && heard[1] == doubt && busy(2) && heard[3] == grant,
        "{heard:?}"
    );
}
