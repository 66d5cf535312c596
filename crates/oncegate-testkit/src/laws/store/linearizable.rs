//! Concurrent clients: the operations on each key have one order in which each takes effect between
//! its request and its reply.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::marker::{Effect, Marker, Operation, OperationKind, Token, Verdict};
use oncegate_core::{Key, Store, StoreError};
use tokio::sync::Barrier;

use super::concurrency::handles;
use crate::laws::fixtures::{
    BOTH_GUARANTEES, Claimant, HOLDER_OPERATIONS, LONG_LEASE, cleared, key, rejected,
};
use crate::laws::possible_markers::{PossibleEntry, Span, timed_answers};
use crate::laws::random::{repeat_hint, seeds};
use crate::loses_replies::{LosesReplies, ReplyFault};

/// The default number of histories in a run.
const HISTORIES: u64 = 24;
const CLIENTS: usize = 6;
const KEYS: usize = 2;
/// The number of batches of each client. The operations on one key must fit into the bits of a
/// [`OperationSet`].
const BATCHES: usize = 9;

/// Six clients send operations on two keys at once; some replies are lost. The verdicts on each key
/// are those of `marker::apply` in an order in which each operation takes effect between its
/// request and its reply.
pub async fn concurrent_operations_are_linearizable(store: Arc<dyn Store>) {
    let mut undecided = 0;
    let mut histories = 0;
    for seed in seeds(HISTORIES) {
        let keys = [0, 1].map(|it| key(format!("{seed}-{it}")));
        let start = Instant::now();
        let events = run_clients(&store, seed, &keys).await;
        for key in &keys {
            let of_key: Vec<ObservedCall> = events
                .iter()
                .filter(|event| event.operation.key == *key)
                .cloned()
                .collect();
            histories += 1;
            match find_order(start, &of_key) {
                Some(Linearization::Found) => {}
                Some(Linearization::NotFound) => panic!(
                    "no order of the operations explains the verdicts; {}\n{}",
                    repeat_hint(seed),
                    render(start, &of_key)
                ),
                None => undecided += 1,
            }
        }
    }
    assert!(
        undecided * 2 <= histories,
        "{undecided} of {histories} histories have too many orders to try"
    );
}

/// One operation, as its client observed it.
#[derive(Clone, Debug)]
struct ObservedCall {
    client: usize,
    operation: Operation,
    /// From the request to the reply, or to the end of the history if the reply was lost.
    during: Span,
    /// `None` if the reply was lost.
    verdict: Option<Verdict>,
}

/// Runs the clients and collects their operations.
async fn run_clients(store: &Arc<dyn Store>, seed: u64, keys: &[Key; KEYS]) -> Vec<ObservedCall> {
    let ready = Arc::new(Barrier::new(CLIENTS));
    let handles = handles(store);
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let lossy = loses_some_replies(
                handles[client % handles.len()].clone(),
                seed.wrapping_add(client as u64),
            );
            let (keys, ready) = (keys.clone(), ready.clone());
            tokio::spawn(async move {
                ready.wait().await;
                RandomClient::new(client, seed, keys).run(&lossy).await
            })
        })
        .collect();
    let mut events = Vec::new();
    for client in clients {
        events.extend(client.await.expect("the client does not panic"));
    }
    // An operation without a reply may have been applied at any time until now.
    let end = Instant::now();
    events
        .iter_mut()
        .filter(|event| event.verdict.is_none())
        .for_each(|event| event.during.to = end);
    events
}

/// Loses one reply in ten; of that batch a random prefix of the operations is applied.
fn loses_some_replies(store: Arc<dyn Store>, seed: u64) -> impl Store {
    let calls = AtomicU64::new(0);
    LosesReplies::new(store, move |operations: &[Operation]| {
        let call = calls.fetch_add(1, Ordering::Relaxed);
        let mut random = fastrand::Rng::with_seed(seed ^ (call << 32));
        if random.u8(..10) == 0 {
            ReplyFault::Lost {
                applied: random.usize(..=operations.len()),
            }
        } else {
            ReplyFault::Answered
        }
    })
}

/// One client. It sends operations with the token and attempt of one of its grants, usually the
/// last, claims with the tokens of grants and with new tokens, and the operations of an operator.
struct RandomClient {
    number: usize,
    random: fastrand::Rng,
    keys: [Key; KEYS],
    /// The grants and doubts that this client has received, for each key.
    grants: [Vec<Claimant>; KEYS],
    /// The number of tokens made so far.
    claim_count: u128,
}

impl RandomClient {
    fn new(number: usize, seed: u64, keys: [Key; KEYS]) -> Self {
        let random = fastrand::Rng::with_seed(seed.wrapping_mul(31).wrapping_add(number as u64));
        Self {
            number,
            random,
            keys,
            grants: Default::default(),
            claim_count: 0,
        }
    }

    async fn run(mut self, store: &dyn Store) -> Vec<ObservedCall> {
        let mut events = Vec::new();
        for _ in 0..BATCHES {
            let index = self.random.usize(..KEYS);
            // Sometimes both keys in one batch.
            let batch: Vec<(usize, Claimant, OperationKind)> = if self.random.u8(..3) == 0 {
                (0..KEYS)
                    .map(|index| self.random_operation(index))
                    .collect()
            } else {
                vec![self.random_operation(index)]
            };
            let operations: Vec<Operation> = batch
                .iter()
                .map(|(index, claimant, kind)| claimant.operation(*kind, &self.keys[*index]))
                .collect();
            let (answers, during) = timed_answers(store, &operations).await;
            for (((index, claimant, _), operation), answer) in
                batch.into_iter().zip(operations).zip(answers)
            {
                // The operation must have had no effect, so it is not part of the order.
                if matches!(answer, Err(StoreError::NotApplied(_))) {
                    continue;
                }
                let verdict = answer.ok();
                if let Some(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) = verdict {
                    self.grants[index].push(Claimant {
                        attempt: attempts.number,
                        ..claimant
                    });
                }
                events.push(ObservedCall {
                    client: self.number,
                    operation,
                    during,
                    verdict,
                });
            }
        }
        events
    }

    fn random_operation(&mut self, index: usize) -> (usize, Claimant, OperationKind) {
        let grants = &self.grants[index];
        let grant = if self.random.u8(..4) == 0 {
            self.random.choice(grants)
        } else {
            grants.last()
        };
        match (grant, self.random.u8(..10)) {
            (Some(grant), 0..=5) => (
                index,
                *grant,
                HOLDER_OPERATIONS[self.random.usize(..HOLDER_OPERATIONS.len())],
            ),
            (Some(grant), 6) => (index, *grant, OperationKind::Claim),
            (Some(grant), 7) => {
                let attempt = grant.attempt;
                let seen = [
                    Marker::Absent,
                    cleared(attempt, Effect::Nothing),
                    cleared(attempt, Effect::Unknown),
                    rejected(attempt, None),
                ];
                let effect = [Effect::Nothing, Effect::Unknown][self.random.usize(..2)];
                let kind = match self.random.usize(..8) {
                    which @ 0..4 => OperationKind::Redrive {
                        seen: seen[which],
                        effect,
                    },
                    _ => OperationKind::Forget {
                        seen: Marker::Done(None),
                    },
                };
                (index, *grant, kind)
            }
            _ => {
                self.claim_count += 1;
                let token = Token((self.number as u128 + 1) << 64 | self.claim_count);
                let lease = if self.random.u8(..3) == 0 {
                    Duration::from_millis(3)
                } else {
                    LONG_LEASE
                };
                (
                    index,
                    Claimant::new(BOTH_GUARANTEES[self.random.usize(..2)], token, 0).lease(lease),
                    OperationKind::Claim,
                )
            }
        }
    }
}

/// Whether an order of the operations explains all verdicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linearization {
    Found,
    NotFound,
}

/// The operations that have taken effect, one bit each.
type OperationSet = u128;

/// The number of states after which the search stops.
const MAX_STATES: usize = 500_000;

/// Searches an order of the operations on one key in which `marker::apply` gives all received
/// verdicts, by the algorithm of Wing and Gong with a set of visited states. Returns `None` if
/// there are more than [`MAX_STATES`].
fn find_order(start: Instant, events: &[ObservedCall]) -> Option<Linearization> {
    assert!(
        events.len() <= OperationSet::BITS as usize,
        "a bit for each event"
    );
    let answered = events
        .iter()
        .enumerate()
        .filter(|(_, event)| event.verdict.is_some())
        .fold(0, |set, (it, _)| set | 1 << it);
    let mut visited: HashSet<(OperationSet, PossibleEntry, Instant)> = HashSet::new();
    let mut to_visit: Vec<(OperationSet, PossibleEntry, Instant)> =
        vec![(0, PossibleEntry::absent(start), start)];
    while let Some(state) = to_visit.pop() {
        let (taken, entry, now) = state;
        if taken & answered == answered {
            return Some(Linearization::Found);
        }
        if !visited.insert(state) {
            continue;
        }
        if visited.len() > MAX_STATES {
            return None;
        }
        let outstanding = || {
            events
                .iter()
                .enumerate()
                .filter(|(it, _)| taken & (1 << it) == 0)
        };
        // An operation whose reply arrived before the request of another precedes the other.
        let first_answer = outstanding()
            .filter_map(|(_, event)| event.verdict.map(|_| event.during.to))
            .min();
        for (it, event) in outstanding()
            .filter(|(_, event)| first_answer.is_none_or(|answer| event.during.from <= answer))
        {
            let from = event.during.from.max(now);
            let during = Span {
                from,
                to: event.during.to.max(from),
            };
            to_visit.extend(
                entry
                    .after(&event.operation, during, event.during, event.verdict)
                    .into_iter()
                    .map(|entry| (taken | 1 << it, entry, from)),
            );
        }
    }
    Some(Linearization::NotFound)
}

/// The operations in the order of their requests, with times in microseconds since `start`.
fn render(start: Instant, events: &[ObservedCall]) -> String {
    let mut events: Vec<&ObservedCall> = events.iter().collect();
    events.sort_by_key(|event| event.during.from);
    let at = |moment: Instant| moment.saturating_duration_since(start).as_micros();
    events.into_iter().fold(String::new(), |mut text, event| {
        let ObservedCall { client, operation: Operation { kind, token, attempt, terms, .. }, during, verdict } = event;
        let (from, to, mode, lease) = (at(during.from), at(during.to), terms.guarantee, terms.lease);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{from:>8} to {to:>8}: client {client} {kind:?} by {token:x?}, attempt {attempt}, {mode:?}, {lease:?}: {verdict:?}"
        );
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::laws::fixtures::{DONE, EFFECTIVELY_ONCE, granted};

    /// Operations on one key by several claims: token, operation, time of request, time of reply,
    /// verdict.
    fn events(
        rows: &[(u128, OperationKind, u64, u64, Option<Verdict>)],
    ) -> (Instant, Vec<ObservedCall>) {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let event = |(token, kind, from, to, verdict): &(
            u128,
            OperationKind,
            u64,
            u64,
            Option<Verdict>,
        )| {
            ObservedCall {
                client: *token as usize,
                operation: Claimant::new(EFFECTIVELY_ONCE, Token(*token), 1)
                    .operation(*kind, &key("k")),
                during: Span {
                    from: at(*from),
                    to: at(*to),
                },
                verdict: *verdict,
            }
        };
        (start, rows.iter().map(event).collect())
    }

    fn order(rows: &[(u128, OperationKind, u64, u64, Option<Verdict>)]) -> Option<Linearization> {
        let (start, events) = events(rows);
        find_order(start, &events)
    }

    /// The store reads the clock for a claim, and commits it only after another client has read the
    /// key without a marker.
    #[test]
    fn a_lease_may_begin_before_the_claim_is_committed() {
        let busy = |ms| {
            Some(Verdict::Busy {
                remaining: LONG_LEASE - Duration::from_millis(ms),
            })
        };
        let claimed = [
            (1, OperationKind::Claim, 0, 100, GRANTED),
            (2, OperationKind::Withdraw, 60, 61, Some(Verdict::Lost)),
        ];
        let then = |verdict| {
            [
                &claimed[..],
                &[(3, OperationKind::Claim, 101, 102, verdict)],
            ]
            .concat()
        };
        assert_eq!(order(&then(busy(100))), Some(Linearization::Found));
        assert_eq!(order(&then(busy(130))), Some(Linearization::NotFound));
    }

    const BUSY: Option<Verdict> = Some(Verdict::Busy {
        remaining: LONG_LEASE,
    });
    const GRANTED: Option<Verdict> = Some(granted(1));

    #[test]
    fn only_overlapping_operations_may_have_either_order() {
        assert_eq!(
            order(&[
                (1, OperationKind::Claim, 0, 5, BUSY),
                (2, OperationKind::Claim, 1, 6, GRANTED)
            ]),
            Some(Linearization::Found)
        );
        assert_eq!(
            order(&[
                (1, OperationKind::Claim, 0, 5, BUSY),
                (2, OperationKind::Claim, 6, 9, GRANTED)
            ]),
            Some(Linearization::NotFound)
        );
        assert_eq!(
            order(&[
                (1, OperationKind::Claim, 0, 5, GRANTED),
                (2, OperationKind::Claim, 1, 6, GRANTED)
            ]),
            Some(Linearization::NotFound)
        );
    }

    #[test]
    fn an_operation_without_a_reply_may_have_been_applied_or_not() {
        let claims = [
            (1, OperationKind::Claim, 0, 9, None),
            (2, OperationKind::Claim, 1, 3, GRANTED),
        ];
        assert_eq!(order(&claims), Some(Linearization::Found));
        assert_eq!(
            order(&[claims[0], (2, OperationKind::Claim, 1, 3, BUSY)]),
            Some(Linearization::Found)
        );
        assert_eq!(
            order(&[(2, OperationKind::Claim, 1, 3, BUSY)]),
            Some(Linearization::NotFound)
        );
        assert_eq!(
            order(&[
                claims[0],
                (1, OperationKind::Complete, 4, 5, Some(DONE)),
                (2, OperationKind::Claim, 6, 7, BUSY)
            ]),
            Some(Linearization::NotFound)
        );
    }
}
