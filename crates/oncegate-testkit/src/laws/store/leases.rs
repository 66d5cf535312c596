//! When a lease expires, by the store's clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{Attempts, Marker, Operation, OperationKind, Token, Verdict};
use oncegate_core::{Guarantee, Key, Store};

use crate::laws::fixtures::{
    AT_MOST_ONCE, BOTH_GUARANTEES, CLOCK_TOLERANCE, CRASHED_ONCE, Claimant, EFFECTIVELY_ONCE,
    LONG_LEASE, OTHER_TOKEN, OWN_TOKEN, SHORT_LEASE, TAKEN_OVER, granted, key, verdict, verdicts,
};

/// Long enough to send many claims within it on a busy machine.
const LEASE: Duration = Duration::from_millis(300);

/// A lease is valid for its duration; then the next claim takes it over. `Busy` contains the
/// remaining time, and a claim after that time does not receive `Busy` again.
pub async fn a_lease_ends_after_its_duration(store: Arc<dyn Store>) {
    for guarantee in BOTH_GUARANTEES {
        let key = key(format!("{guarantee:?}"));
        let before = Instant::now();
        let holder = Claimant::new(guarantee, OWN_TOKEN, 1).lease(LEASE);
        assert_eq!(verdict(&*store, holder.claim(&key)).await, granted(1));
        let claimed = Instant::now();
        let claim = Claimant::new(guarantee, OTHER_TOKEN, 0).claim(&key);
        let taken = if guarantee == AT_MOST_ONCE {
            Verdict::InDoubt(CRASHED_ONCE)
        } else {
            Verdict::Granted(TAKEN_OVER)
        };
        let mut busy_count = 0;
        loop {
            let sent = Instant::now();
            let received = verdict(&*store, claim.clone()).await;
            let answered = Instant::now();
            let Verdict::Busy { remaining } = received else {
                assert_eq!(received, taken, "after {:?}", before.elapsed());
                assert!(
                    answered - before + CLOCK_TOLERANCE > LEASE,
                    "taken over after {:?} of {LEASE:?}",
                    answered - before
                );
                break;
            };
            let least = LEASE.saturating_sub(answered - before + CLOCK_TOLERANCE);
            let most = LEASE.saturating_sub(sent - claimed) + CLOCK_TOLERANCE;
            assert!(
                (least..=most).contains(&remaining),
                "the store reports {remaining:?} remaining, not {least:?} to {most:?}"
            );
            assert!(
                sent - claimed < LEASE + CLOCK_TOLERANCE,
                "still busy {:?} after a claim for {LEASE:?}",
                sent - claimed
            );
            busy_count += 1;
            // The first five claims follow at short intervals, the others after the remaining time
            // that the store reports.
            tokio::time::sleep(if busy_count < 5 {
                LEASE / 10
            } else {
                remaining + CLOCK_TOLERANCE
            })
            .await;
        }
    }
}

/// A renewal, a repeated claim with the same token, and a repeated claim of the same doubt restart
/// the lease.
pub async fn a_renewal_restarts_the_lease(store: Arc<dyn Store>) {
    let holder = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1).lease(LEASE);
    let reconciler = Claimant::new(AT_MOST_ONCE, OWN_TOKEN, 2).lease(LEASE);
    let renewed = key("renewed");
    let claimed_again = key("claimed again");
    let doubt_renewed = key("doubt renewed");
    let doubt_claimed_again = key("doubt claimed again");
    let not_renewed = key("not renewed");
    let doubt = |key: &Key| {
        [
            Claimant::new(AT_MOST_ONCE, OTHER_TOKEN, 1).operation(OperationKind::Doubt, key),
            reconciler.claim(key),
        ]
    };
    let [first, second] = [doubt(&doubt_renewed), doubt(&doubt_claimed_again)];
    let setup = [
        &[
            holder.claim(&renewed),
            holder.claim(&claimed_again),
            holder.claim(&not_renewed),
        ][..],
        &first,
        &second,
    ]
    .concat();
    verdicts(&*store, &setup).await;
    tokio::time::sleep(LEASE / 2).await;

    let again = [
        holder.operation(OperationKind::Renew, &renewed),
        holder.claim(&claimed_again),
        reconciler.operation(OperationKind::Renew, &doubt_renewed),
        reconciler.claim(&doubt_claimed_again),
    ];
    // The leases restart between now and the answer.
    let sent = Instant::now();
    let received = verdicts(&*store, &again).await;
    assert_eq!(
        received,
        [
            Verdict::Applied,
            granted(1),
            Verdict::Applied,
            Verdict::InDoubt(Attempts::none_counted(2))
        ]
    );
    // The lease that was not renewed has expired; the renewed ones have not, unless this machine
    // was suspended or slow.
    tokio::time::sleep(LEASE / 2 + CLOCK_TOLERANCE).await;
    let another = Claimant::new(EFFECTIVELY_ONCE, Token(3), 0);
    assert_eq!(
        verdict(&*store, another.claim(&not_renewed)).await,
        Verdict::Granted(TAKEN_OVER)
    );
    let keys = [
        &renewed,
        &claimed_again,
        &doubt_renewed,
        &doubt_claimed_again,
    ];
    let claims: Vec<Operation> = keys.into_iter().map(|key| another.claim(key)).collect();
    let received = verdicts(&*store, &claims).await;
    if sent.elapsed() + CLOCK_TOLERANCE < LEASE {
        assert!(
            received.iter().all(|it| matches!(it, Verdict::Busy { .. })),
            "{received:?} for {keys:?} after a renewal"
        );
    }
}

/// An operation without effect does not change when a lease ends.
pub async fn an_operation_without_effect_does_not_extend_a_lease(store: Arc<dyn Store>) {
    let holder = Claimant::new(EFFECTIVELY_ONCE, OWN_TOKEN, 1).lease(LEASE);
    let key = key("k");
    assert_eq!(verdict(&*store, holder.claim(&key)).await, granted(1));
    let claimed = Instant::now();
    let another = Claimant::new(EFFECTIVELY_ONCE, OTHER_TOKEN, 1).lease(LONG_LEASE);
    let without_effect = [
        OperationKind::Renew,
        OperationKind::Complete,
        OperationKind::Doubt,
        OperationKind::Forget {
            seen: Marker::Done(None),
        },
    ]
    .map(|kind| another.operation(kind, &key));
    while claimed.elapsed() < LEASE * 3 / 4 {
        let received = verdicts(&*store, &without_effect).await;
        assert_eq!(received, [Verdict::Lost; 4]);
        if claimed.elapsed() < LEASE / 2 {
            let received = verdict(&*store, another.claim(&key)).await;
            if claimed.elapsed() + CLOCK_TOLERANCE > LEASE {
                return; // This machine was suspended: the lease may have expired.
            }
            assert!(matches!(received, Verdict::Busy { .. }), "{received:?}");
        }
        tokio::time::sleep(LEASE / 10).await;
    }
    tokio::time::sleep((LEASE + CLOCK_TOLERANCE).saturating_sub(claimed.elapsed())).await;
    assert_eq!(
        verdict(&*store, another.claim(&key)).await,
        Verdict::Granted(TAKEN_OVER)
    );
}

/// A lease has the duration of its holder's terms, not of the terms of another claim.
pub async fn the_holders_lease_decides(store: Arc<dyn Store>) {
    let terms = [
        (AT_MOST_ONCE, Verdict::InDoubt(CRASHED_ONCE)),
        (EFFECTIVELY_ONCE, Verdict::Granted(TAKEN_OVER)),
    ];
    for (guarantee, taken) in terms {
        let claims_of = |name: &str, holders: Duration, readers: Duration| {
            let key = key(format!("{name}-{guarantee:?}"));
            (
                Claimant::new(guarantee, OWN_TOKEN, 1)
                    .lease(holders)
                    .claim(&key),
                Claimant::new(guarantee, OTHER_TOKEN, 0)
                    .lease(readers)
                    .claim(&key),
            )
        };
        let (long_held, read) = claims_of("short reader", LONG_LEASE, Duration::from_millis(1));
        let (short_held, long_reader) = claims_of("long reader", SHORT_LEASE, LONG_LEASE);
        assert_eq!(
            verdicts(&*store, &[long_held, short_held]).await,
            [granted(1); 2]
        );
        tokio::time::sleep(SHORT_LEASE + CLOCK_TOLERANCE).await;
        let received = verdicts(&*store, &[read, long_reader]).await;
        assert!(
            matches!(received[0], Verdict::Busy { remaining } if remaining > LONG_LEASE / 2),
            "{received:?}"
        );
        assert_eq!(received[1], taken);
    }
}

/// After a takeover the lease has the duration of the new holder's terms; the lease of a doubt has
/// that of its reconciler's terms.
pub async fn a_takeover_has_the_lease_of_the_new_holder(store: Arc<dyn Store>) {
    let takeover = |guarantee: Guarantee, holders, takers| {
        let key = key(format!("{guarantee:?}-{takers:?}"));
        let claimant = |token, lease| {
            Claimant::new(guarantee, Token(token), 0)
                .lease(lease)
                .claim(&key)
        };
        [
            claimant(1, holders),
            claimant(2, takers),
            claimant(3, LONG_LEASE),
        ]
    };
    let cases = BOTH_GUARANTEES
        .map(|guarantee| {
            [
                takeover(guarantee, SHORT_LEASE, LONG_LEASE),
                takeover(guarantee, SHORT_LEASE, SHORT_LEASE),
            ]
        })
        .concat();
    let step =
        |it: usize| -> Vec<Operation> { cases.iter().map(|claims| claims[it].clone()).collect() };
    assert_eq!(verdicts(&*store, &step(0)).await, [granted(1); 4]);
    tokio::time::sleep(SHORT_LEASE + CLOCK_TOLERANCE).await;
    let (doubt, grant) = (Verdict::InDoubt(CRASHED_ONCE), Verdict::Granted(TAKEN_OVER));
    assert_eq!(
        verdicts(&*store, &step(1)).await,
        [doubt, doubt, grant, grant]
    );
    tokio::time::sleep(SHORT_LEASE + CLOCK_TOLERANCE).await;
    let received = verdicts(&*store, &step(2)).await;
    let busy = |it: usize| matches!(received[it], Verdict::Busy { remaining } if remaining > LONG_LEASE / 2);
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
        busy(0) && received[1] == doubt && busy(2) && received[3] == grant,
        "{received:?}"
    );
}
