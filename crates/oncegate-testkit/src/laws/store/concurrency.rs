//! Many concurrent clients.

use std::sync::Arc;

use oncegate_core::marker::{Attempts, Guarantee, Operation, OperationKind, Token, Verdict};
use oncegate_core::{Key, Store};
use tokio::sync::Barrier;

use crate::laws::fixtures::{
    AT_MOST_ONCE, BOTH_GUARANTEES, CLOCK_TOLERANCE, CRASHED_ONCE, Claimant, DONE, EFFECTIVELY_ONCE,
    OTHER_TOKEN, OWN_TOKEN, SHORT_LEASE, TAKEN_OVER, granted, key, verdict, verdicts,
};

/// The store and its handle for renewals, which has a connection of its own, like another process.
/// A store without such a handle is returned twice.
pub(crate) fn handles(store: &Arc<dyn Store>) -> [Arc<dyn Store>; 2] {
    [
        store.clone(),
        store.for_renewals().unwrap_or_else(|| store.clone()),
    ]
}

/// Sends an operation a hundred times concurrently, each time with another token.
async fn a_hundred_at_once(
    store: &Arc<dyn Store>,
    operation_of: impl Fn(Token) -> Operation,
) -> Vec<Verdict> {
    const CLIENTS: usize = 100;
    let ready = Arc::new(Barrier::new(CLIENTS));
    let handles = handles(store);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (store, ready, operation) = (
                handles[client % 2].clone(),
                ready.clone(),
                operation_of(Token(1000 + client as u128)),
            );
            tokio::spawn(async move {
                ready.wait().await;
                verdict(&*store, operation).await
            })
        })
        .collect();
    let mut received = Vec::with_capacity(CLIENTS);
    for client in clients {
        received.push(client.await.expect("the client does not panic"));
    }
    received
}

fn count(received: &[Verdict], is_counted: impl Fn(&Verdict) -> bool) -> usize {
    received
        .iter()
        .filter(|verdict| is_counted(verdict))
        .count()
}

/// Of a hundred concurrent claims of a new id one is granted; all others receive `Busy`, or
/// `Duplicate` in [`Guarantee::Bare`].
pub async fn of_a_hundred_simultaneous_claims_one_is_granted(store: Arc<dyn Store>) {
    for guarantee in [AT_MOST_ONCE, EFFECTIVELY_ONCE, Guarantee::Bare] {
        for round in 0..5 {
            let key = key(format!("{guarantee:?}-{round}"));
            let received = a_hundred_at_once(&store, |token| {
                Claimant::new(guarantee, token, 0).claim(&key)
            })
            .await;
            assert_eq!(count(&received, |it| *it == granted(1)), 1, "{received:?}");
            let is_refused = |it: &Verdict| {
                if guarantee == Guarantee::Bare {
                    *it == Verdict::Duplicate
                } else {
                    matches!(it, Verdict::Busy { .. })
                }
            };
            assert_eq!(count(&received, is_refused), 99, "{received:?}");
        }
    }
}

/// Of a hundred concurrent claims of an id with an expired lease exactly one takes it over.
pub async fn of_a_hundred_simultaneous_takeovers_one_wins(store: Arc<dyn Store>) {
    for (guarantee, taken) in [
        (AT_MOST_ONCE, Verdict::InDoubt(CRASHED_ONCE)),
        (EFFECTIVELY_ONCE, Verdict::Granted(TAKEN_OVER)),
    ] {
        for round in 0..5 {
            let key = key(format!("{guarantee:?}-{round}"));
            assert_eq!(
                verdict(
                    &*store,
                    Claimant::new(guarantee, OWN_TOKEN, 0)
                        .lease(SHORT_LEASE)
                        .claim(&key)
                )
                .await,
                granted(1)
            );
            tokio::time::sleep(SHORT_LEASE + CLOCK_TOLERANCE).await;
            let received = a_hundred_at_once(&store, |token| {
                Claimant::new(guarantee, token, 0).claim(&key)
            })
            .await;
            assert_eq!(count(&received, |it| *it == taken), 1, "{received:?}");
            assert_eq!(
                count(&received, |it| matches!(it, Verdict::Busy { .. })),
                99,
                "{received:?}"
            );
        }
    }
}

/// Of a hundred concurrent claims of an id in doubt exactly one receives [`Verdict::InDoubt`]; all
/// others receive `Busy`.
pub async fn of_a_hundred_simultaneous_claims_of_a_doubt_one_reconciles(store: Arc<dyn Store>) {
    for round in 0..5 {
        let key = key(format!("k{round}"));
        assert_eq!(
            verdict(
                &*store,
                Claimant::new(AT_MOST_ONCE, OWN_TOKEN, 1).operation(OperationKind::Doubt, &key)
            )
            .await,
            Verdict::Applied
        );
        let received = a_hundred_at_once(&store, |token| {
            Claimant::new(AT_MOST_ONCE, token, 0).claim(&key)
        })
        .await;
        assert_eq!(
            count(&received, |it| *it
                == Verdict::InDoubt(Attempts::none_counted(2))),
            1,
            "{received:?}"
        );
        assert_eq!(
            count(&received, |it| matches!(it, Verdict::Busy { .. })),
            99,
            "{received:?}"
        );
    }
}

/// The handle for renewals is the same store, used from a thread and a runtime of its own: each
/// reads what the other writes.
pub async fn the_handle_for_renewals_is_the_same_store(store: Arc<dyn Store>) {
    let handle = handles(&store)[1].clone();
    let claim = |guarantee, key: &Key| Claimant::new(guarantee, OWN_TOKEN, 1).claim(key);
    let keys = BOTH_GUARANTEES.map(|guarantee| (guarantee, key(format!("{guarantee:?}"))));
    for (guarantee, key) in &keys {
        assert_eq!(verdict(&*store, claim(*guarantee, key)).await, granted(1));
    }
    let handle_keys = keys.clone();
    let renewals = std::thread::spawn(move || {
        // As in the consumer, only the runtime of this thread uses the handle.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("the runtime starts");
        runtime.block_on(async {
            for (guarantee, key) in &handle_keys {
                let mine = Claimant::new(*guarantee, OWN_TOKEN, 1);
                let another = Claimant::new(*guarantee, OTHER_TOKEN, 1);
                assert_eq!(
                    verdict(&*handle, mine.operation(OperationKind::Renew, key)).await,
                    Verdict::Applied
                );
                assert_eq!(
                    verdict(&*handle, another.operation(OperationKind::Renew, key)).await,
                    Verdict::Lost
                );
            }
        });
    });
    tokio::task::spawn_blocking(move || renewals.join())
        .await
        .expect("the blocking task is not cancelled")
        .expect("the handle renews");
    let completed: Vec<Operation> = keys
        .iter()
        .map(|(of, key)| Claimant::new(*of, OWN_TOKEN, 1).operation(OperationKind::Complete, key))
        .collect();
    assert_eq!(verdicts(&*store, &completed).await, [DONE; 2]);
}
