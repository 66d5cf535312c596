//! Concurrent clients: to each key everything happened in some one order, each operation between
//! its question and its answer.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::marker::{Ask, Effect, Marker, Operation, Token, Verdict};
use oncegate_core::{Key, Store};
use tokio::sync::Barrier;

use super::concurrency::handles;
use crate::laws::ask::{Asker, BOTH, HOLDERS_ASKS, LONG, answers, cleared, key, rejected};
use crate::laws::belief::{Entry, Span};
use crate::laws::random::{repeat, seeds};
use crate::loses_replies::{Fate, LosesReplies};

/// How many histories a run has, unless the environment says otherwise.
const HISTORIES: u64 = 24;
const CLIENTS: usize = 6;
const KEYS: usize = 2;
/// How often each client asks. All that is asked of one key has to fit in the bits of a [`Set`].
const APPLIES: usize = 9;

/// Six clients ask at once about two keys; some replies are lost. To each key everything happened
/// in one order that the reference allows.
pub async fn what_concurrent_clients_saw_has_one_order(store: Arc<dyn Store>) {
    let mut undecided = 0;
    let mut histories = 0;
    for seed in seeds(HISTORIES) {
        let keys = [0, 1].map(|it| key(format!("{seed}-{it}")));
        let start = Instant::now();
        let events = events(&store, seed, &keys).await;
        for key in &keys {
            let of_key: Vec<Event> = events
                .iter()
                .filter(|event| event.operation.key == *key)
                .cloned()
                .collect();
            histories += 1;
            match one_order(start, &of_key) {
                Some(Order::Found) => {}
                Some(Order::None) => panic!(
                    "no order explains this; {}\n{}",
                    repeat(seed),
                    shown(start, &of_key)
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

/// One operation, as its client saw it.
#[derive(Clone, Debug)]
struct Event {
    client: usize,
    operation: Operation,
    /// From the question to the answer; to the end, where none was heard.
    during: Span,
    heard: Option<Verdict>,
}

/// Lets the clients loose, and gathers what they saw.
async fn events(store: &Arc<dyn Store>, seed: u64, keys: &[Key; KEYS]) -> Vec<Event> {
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
                Client::new(client, seed, keys).run(&lossy).await
            })
        })
        .collect();
    let mut events = Vec::new();
    for client in clients {
        events.extend(client.await.expect("a client tells what it saw"));
    }
    // What nobody heard of may have been applied at any time until now.
    let end = Instant::now();
    events
        .iter_mut()
        .filter(|event| event.heard.is_none())
        .for_each(|event| event.during.to = end);
    events
}

/// One reply in ten is lost; then all of what was asked was applied, or a part.
fn loses_some_replies(store: Arc<dyn Store>, seed: u64) -> impl Store {
    let calls = AtomicU64::new(0);
    LosesReplies::new(store, move |asked: &[Operation]| {
        let call = calls.fetch_add(1, Ordering::Relaxed);
        let mut random = fastrand::Rng::with_seed(seed ^ (call << 32));
        if random.u8(..10) == 0 {
            Fate::Lost {
                applied: random.usize(..=asked.len()),
            }
        } else {
            Fate::Answered
        }
    })
}

/// One of those who ask: it holds what it was granted, forgets what it should have held on to, and
/// uses old permits.
struct Client {
    number: usize,
    random: fastrand::Rng,
    keys: [Key; KEYS],
    permits: [Vec<Asker>; KEYS],
    claims: u128,
}

impl Client {
    fn new(number: usize, seed: u64, keys: [Key; KEYS]) -> Self {
        let random = fastrand::Rng::with_seed(seed.wrapping_mul(31).wrapping_add(number as u64));
        Self {
            number,
            random,
            keys,
            permits: Default::default(),
            claims: 0,
        }
    }

    async fn run(mut self, store: &dyn Store) -> Vec<Event> {
        let mut events = Vec::new();
        for _ in 0..APPLIES {
            let of = self.random.usize(..KEYS);
            // Sometimes both keys in one batch.
            let asked: Vec<(usize, Asker, Ask)> = if self.random.u8(..3) == 0 {
                (0..KEYS).map(|of| self.question(of)).collect()
            } else {
                vec![self.question(of)]
            };
            let operations: Vec<Operation> = asked
                .iter()
                .map(|(of, asker, ask)| asker.asks(*ask, &self.keys[*of]))
                .collect();
            let from = Instant::now();
            let answers = answers(store, &operations).await;
            let during = Span {
                from,
                to: Instant::now(),
            };
            for (((of, asker, _), operation), answer) in
                asked.into_iter().zip(operations).zip(answers)
            {
                let heard = answer.ok();
                if let Some(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) = heard {
                    self.permits[of].push(Asker {
                        attempt: attempts.number,
                        ..asker
                    });
                }
                events.push(Event {
                    client: self.number,
                    operation,
                    during,
                    heard,
                });
            }
        }
        events
    }

    fn question(&mut self, of: usize) -> (usize, Asker, Ask) {
        let permits = &self.permits[of];
        let permit = if self.random.u8(..4) == 0 {
            self.random.choice(permits)
        } else {
            permits.last()
        };
        match (permit, self.random.u8(..10)) {
            (Some(permit), 0..=5) => (
                of,
                *permit,
                HOLDERS_ASKS[self.random.usize(..HOLDERS_ASKS.len())],
            ),
            (Some(permit), 6) => (of, *permit, Ask::Claim),
            (Some(permit), 7) => {
                let attempt = permit.attempt;
                let seen = [
                    Marker::Absent,
                    cleared(attempt, Effect::Nothing),
                    cleared(attempt, Effect::Unknown),
                    rejected(attempt, None),
                ];
                let effect = [Effect::Nothing, Effect::Unknown][self.random.usize(..2)];
                let ask = match self.random.usize(..8) {
                    which @ 0..4 => Ask::SendBack {
                        seen: seen[which],
                        effect,
                    },
                    _ => Ask::Forget {
                        seen: Marker::Done(None),
                    },
                };
                (of, *permit, ask)
            }
            _ => {
                self.claims += 1;
                let token = Token((self.number as u128 + 1) << 64 | self.claims);
                let lease = if self.random.u8(..3) == 0 {
                    Duration::from_millis(3)
                } else {
                    LONG
                };
                (
                    of,
                    Asker::new(BOTH[self.random.usize(..2)], token, 0).lease(lease),
                    Ask::Claim,
                )
            }
        }
    }
}

/// Whether there is an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Found,
    None,
}

/// Which events have taken place, a bit each.
type Set = u128;

/// When so many states have been seen, the search is given up.
const STATES: usize = 500_000;

/// Looks for an order of the events of one key that the reference allows (the search of Wing and
/// Gong, which remembers where it has been). Nothing, if there are too many to try.
fn one_order(start: Instant, events: &[Event]) -> Option<Order> {
    assert!(events.len() <= Set::BITS as usize, "a bit for each event");
    let heard = events
        .iter()
        .enumerate()
        .filter(|(_, event)| event.heard.is_some())
        .fold(0, |set, (it, _)| set | 1 << it);
    let mut seen: HashSet<(Set, Entry, Instant)> = HashSet::new();
    let mut left: Vec<(Set, Entry, Instant)> = vec![(0, Entry::absent(start), start)];
    while let Some(state) = left.pop() {
        let (taken, entry, now) = state;
        if taken & heard == heard {
            return Some(Order::Found);
        }
        if !seen.insert(state) {
            continue;
        }
        if seen.len() > STATES {
            return None;
        }
        let outstanding = || {
            events
                .iter()
                .enumerate()
                .filter(|(it, _)| taken & (1 << it) == 0)
        };
        // Whatever was answered before another was asked came before it.
        let first_answer = outstanding()
            .filter_map(|(_, event)| event.heard.map(|_| event.during.to))
            .min();
        for (it, event) in outstanding()
            .filter(|(_, event)| first_answer.is_none_or(|answer| event.during.from <= answer))
        {
            let from = event.during.from.max(now);
            let during = Span {
                from,
                to: event.during.to.max(from),
            };
            left.extend(
                entry
                    .after(&event.operation, during, event.heard)
                    .into_iter()
                    .map(|entry| (taken | 1 << it, entry, from)),
            );
        }
    }
    Some(Order::None)
}

/// The events in the order in which they were asked, in microseconds.
fn shown(start: Instant, events: &[Event]) -> String {
    let mut events: Vec<&Event> = events.iter().collect();
    events.sort_by_key(|event| event.during.from);
    let at = |moment: Instant| moment.saturating_duration_since(start).as_micros();
    events.into_iter().fold(String::new(), |mut text, event| {
        let Event { client, operation: Operation { ask, token, attempt, terms, .. }, during, heard } = event;
        let (from, to, mode, lease) = (at(during.from), at(during.to), terms.guarantee, terms.lease);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{from:>8} to {to:>8}: client {client} {ask:?} by {token:x?}, attempt {attempt}, {mode:?}, {lease:?}: {heard:?}"
        );
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::laws::ask::{DONE, EFFECTIVELY_ONCE, granted};

    /// Events of one key by several claims: who asks what, from when to when, and what was heard.
    fn events(rows: &[(u128, Ask, u64, u64, Option<Verdict>)]) -> (Instant, Vec<Event>) {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let event =
            |(token, ask, from, to, heard): &(u128, Ask, u64, u64, Option<Verdict>)| Event {
                client: *token as usize,
                operation: Asker::new(EFFECTIVELY_ONCE, Token(*token), 1).asks(*ask, &key("k")),
                during: Span {
                    from: at(*from),
                    to: at(*to),
                },
                heard: *heard,
            };
        (start, rows.iter().map(event).collect())
    }

    fn order(rows: &[(u128, Ask, u64, u64, Option<Verdict>)]) -> Option<Order> {
        let (start, events) = events(rows);
        one_order(start, &events)
    }

    const BUSY: Option<Verdict> = Some(Verdict::Busy { remaining: LONG });
    const GRANTED: Option<Verdict> = Some(granted(1));

    #[test]
    fn what_overlaps_may_have_happened_in_either_order_and_what_does_not_may_not() {
        assert_eq!(
            order(&[(1, Ask::Claim, 0, 5, BUSY), (2, Ask::Claim, 1, 6, GRANTED)]),
            Some(Order::Found)
        );
        assert_eq!(
            order(&[(1, Ask::Claim, 0, 5, BUSY), (2, Ask::Claim, 6, 9, GRANTED)]),
            Some(Order::None)
        );
        assert_eq!(
            order(&[
                (1, Ask::Claim, 0, 5, GRANTED),
                (2, Ask::Claim, 1, 6, GRANTED)
            ]),
            Some(Order::None)
        );
    }

    #[test]
    fn what_nobody_heard_of_may_have_happened_or_not() {
        let claims = [(1, Ask::Claim, 0, 9, None), (2, Ask::Claim, 1, 3, GRANTED)];
        assert_eq!(order(&claims), Some(Order::Found));
        assert_eq!(
            order(&[claims[0], (2, Ask::Claim, 1, 3, BUSY)]),
            Some(Order::Found)
        );
        assert_eq!(order(&[(2, Ask::Claim, 1, 3, BUSY)]), Some(Order::None));
        assert_eq!(
            order(&[
                claims[0],
                (1, Ask::Complete, 4, 5, Some(DONE)),
                (2, Ask::Claim, 6, 7, BUSY)
            ]),
            Some(Order::None)
        );
    }
}
