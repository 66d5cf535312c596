//! The fault log, as stretches of time.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{Rules, micros};
use crate::ledger::{Edge, Ledger, Sent, What};

/// The kind of a fault that freezes a consumer.
pub(crate) const FREEZE: &str = "freeze-consumer";
/// That of one in which a Redis loses what its replicas did not know.
pub(crate) const FAIL_OVER: &str = "fail-over-redis";
/// That of one that freezes Kafka.
pub(crate) const FREEZE_KAFKA: &str = "freeze-kafka";
/// Those in which the store answers nobody from their beginning to their end.
const STORE_UNAVAILABLE: [&str; 2] = ["dark-redis", "freeze-redis"];
/// Those in which it answers, and takes nothing: no memory, no room on its disk, a replica, too few
/// replicas, still loading.
const STORE_REFUSES: [&str; 5] = [
    FILL,
    "fill-disk",
    "demote-redis",
    "strand-redis",
    "load-redis",
];
/// The one of these in which a lease is renewed nevertheless, since that takes no memory.
const FILL: &str = "fill-redis";
/// Those that may keep a consumer from its store, by what their names begin with.
const OF_THE_STORE: [&str; 6] = [
    "kill-redis",
    "reset-redis",
    "drop-replies",
    FAIL_OVER,
    STORE_UNAVAILABLE[0],
    STORE_UNAVAILABLE[1],
];
/// For how long after its end such a fault is felt: connections are made anew.
const FELT: Duration = Duration::from_secs(2);
/// What a consumer calls it when it did not run though nobody froze it.
const STALL: &str = "stall";
/// What it is called when a message makes a consumer abort.
const ABORT: &str = "abort";

/// Whether a store that takes no claims renews leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Renewals {
    Taken,
    Refused,
}

/// From when to when something was wrong, and with whom.
#[derive(Debug)]
struct Window {
    from: u64,
    to: u64,
    kind: String,
    /// A consumer; none if a server, which all consumers feel.
    target: Option<String>,
}

/// All of them, and when processes ended.
#[derive(Debug)]
pub(super) struct Windows {
    all: Vec<Window>,
    gone: HashMap<String, u64>,
    /// From when to when the player waited for the end of a process.
    ended: HashMap<String, (u64, u64)>,
    /// When a consumer's source took away what it had handed over.
    revoked: HashMap<String, Vec<u64>>,
    last: u64,
}

impl Windows {
    /// A fault that never ended lasts until the end.
    pub(super) fn of(ledger: &Ledger) -> Self {
        let mut windows: Vec<Window> = Vec::new();
        let mut open: HashMap<u64, usize> = HashMap::new();
        let (mut gone, mut ended) = (HashMap::new(), HashMap::new());
        let mut revoked: HashMap<String, Vec<u64>> = HashMap::new();
        for record in ledger.records() {
            match &record.what {
                What::Fault {
                    number,
                    kind,
                    target,
                    edge: Edge::Begin,
                } => {
                    open.insert(*number, windows.len());
                    windows.push(Window {
                        from: record.at,
                        to: u64::MAX,
                        kind: kind.clone(),
                        target: target.clone(),
                    });
                }
                What::Fault {
                    number,
                    edge: Edge::End,
                    ..
                } => {
                    if let Some(index) = open.remove(number) {
                        windows[index].to = record.at;
                    }
                }
                What::Stalled { ms } => windows.push(Window {
                    from: record.at.saturating_sub(micros(Duration::from_millis(*ms))),
                    to: record.at,
                    kind: STALL.to_owned(),
                    target: Some(record.by.clone()),
                }),
                // Nothing of this process comes after that.
                What::Aborting { .. } => windows.push(Window {
                    from: record.at,
                    to: u64::MAX,
                    kind: ABORT.to_owned(),
                    target: Some(record.by.clone()),
                }),
                What::Gone {
                    consumer,
                    after,
                    took_ms,
                    ..
                } => {
                    gone.entry(consumer.clone()).or_insert(record.at);
                    if *after != Sent::Nothing {
                        let since = record
                            .at
                            .saturating_sub(micros(Duration::from_millis(*took_ms)));
                        ended.insert(consumer.clone(), (since, record.at));
                    }
                }
                What::Revoked { .. } => revoked
                    .entry(record.by.clone())
                    .or_default()
                    .push(record.at),
                _ => {}
            }
        }
        Self {
            all: windows,
            gone,
            ended,
            revoked,
            last: ledger.records().last().map_or(0, |record| record.at),
        }
    }

    /// When a process ended, and with it all that ran in it; at the end of the ledger if nobody saw
    /// it end.
    pub(super) fn gone(&self, consumer: &str) -> u64 {
        self.aborted(consumer)
            .or_else(|| self.gone.get(consumer).copied())
            .unwrap_or(self.last)
    }

    /// How many the player played of each kind.
    pub(super) fn counts(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for window in self.all.iter().filter(|window| window.kind != STALL) {
            *counts.entry(window.kind.clone()).or_default() += 1;
        }
        counts
    }

    /// Where the store may forget: what may be the cause of something that began at one time and
    /// was seen at another, to one of these consumers, a fault of their own before one of a server.
    pub(super) fn cause(
        &self,
        from: u64,
        to: u64,
        consumers: &[&str],
        aftermath: Duration,
    ) -> Option<&str> {
        let meanwhile = |window: &&Window| {
            window.from <= to && window.to.saturating_add(micros(aftermath)) >= from
        };
        let own = |window: &&Window| {
            window
                .target
                .as_deref()
                .is_some_and(|target| consumers.contains(&target))
        };
        let of_a_server = |window: &&Window| window.target.is_none();
        let found = self
            .all
            .iter()
            .filter(meanwhile)
            .find(own)
            .or_else(|| self.all.iter().filter(meanwhile).find(of_a_server));
        found.map(|window| window.kind.as_str())
    }

    /// What can have cut off a run of this consumer's between two times: a fault that was played on
    /// it, or that it did not run for a quarter of a lease; one that kept it from its store; or
    /// any, if its source took away then what it had handed over.
    pub(super) fn cut_off(
        &self,
        consumer: &str,
        from: u64,
        to: u64,
        rules: &Rules,
    ) -> Option<&str> {
        let own =
            |window: &&Window| window.target.as_deref() == Some(consumer) && window.kind != STALL;
        let meanwhile = |window: &&Window, felt: Duration| {
            window.from <= to && window.to.saturating_add(micros(felt)) >= from
        };
        let played = || {
            self.all
                .iter()
                .filter(own)
                .find(|window| meanwhile(window, Duration::ZERO))
        };
        let stalled = || {
            let of_it = |window: &&Window| {
                window.target.as_deref() == Some(consumer) && window.kind == STALL
            };
            let stalls: Vec<&Window> = self
                .all
                .iter()
                .filter(of_it)
                .filter(|window| meanwhile(window, Duration::ZERO))
                .collect();
            let time: u64 = stalls.iter().map(|window| window.to - window.from).sum();
            stalls
                .first()
                .copied()
                .filter(|_| time >= micros(rules.lease / 4))
        };
        // A fault that takes several consumers away one after the other is played on none by name.
        let told_to_end = || {
            let (since, at) = *self
                .ended
                .get(consumer)
                .filter(|(since, at)| *since <= to && *at >= from)?;
            self.all
                .iter()
                .find(|window| window.target.is_none() && window.from <= since && window.to >= at)
        };
        let of_the_store = || {
            self.all
                .iter()
                .filter(|window| is_of_the_store(window))
                .find(|window| meanwhile(window, FELT))
        };
        let revoked = || {
            let times = self
                .revoked
                .get(consumer)
                .into_iter()
                .flatten()
                .filter(|at| (from..=to).contains(*at));
            let shortly_before = |at: u64| {
                let mut of_the_player = self
                    .all
                    .iter()
                    .filter(|window| window.kind != STALL && window.from <= at);
                let over = |window: &&Window| {
                    if window.kind == ABORT {
                        window.from
                    } else {
                        window.to
                    }
                };
                of_the_player
                    .rfind(|window| over(window).saturating_add(micros(rules.aftermath)) >= at)
            };
            times.copied().find_map(shortly_before)
        };
        let found = played()
            .or_else(stalled)
            .or_else(told_to_end)
            .or_else(of_the_store)
            .or_else(revoked);
        found.map(|window| window.kind.as_str())
    }

    /// When no consumer could reach the store, or it could not answer: from when to when.
    pub(super) fn store_away(&self) -> impl Iterator<Item = (u64, u64)> {
        let away = |window: &&Window| {
            STORE_UNAVAILABLE.contains(&window.kind.as_str()) && window.to != u64::MAX
        };
        self.all
            .iter()
            .filter(away)
            .map(|window| (window.from, window.to))
    }

    /// When the store answered and took nothing: from when to when, and whether it renewed leases
    /// nevertheless.
    pub(super) fn store_refuses(&self) -> impl Iterator<Item = (u64, u64, Renewals)> {
        let refuses = |window: &&Window| {
            STORE_REFUSES.contains(&window.kind.as_str()) && window.to != u64::MAX
        };
        let renewals = |window: &Window| {
            if window.kind == FILL {
                Renewals::Taken
            } else {
                Renewals::Refused
            }
        };
        self.all
            .iter()
            .filter(refuses)
            .map(move |window| (window.from, window.to, renewals(window)))
    }

    /// How many of the player's faults lasted while another one did.
    pub(super) fn overlapping(&self) -> u64 {
        let of_the_player: Vec<&Window> = self
            .all
            .iter()
            .filter(|window| window.kind != STALL && window.kind != ABORT)
            .collect();
        let beside = |index: usize, window: &Window| {
            of_the_player
                .iter()
                .enumerate()
                .any(|(other, it)| other != index && it.from < window.to && it.to > window.from)
        };
        of_the_player
            .iter()
            .enumerate()
            .filter(|(index, window)| beside(*index, window))
            .count() as u64
    }

    /// When messages made consumers abort.
    pub(super) fn aborts(&self) -> impl Iterator<Item = u64> {
        self.all
            .iter()
            .filter(|window| window.kind == ABORT)
            .map(|window| window.from)
    }

    /// The faults of the player that ended: of which kind, and when.
    pub(super) fn over(&self) -> impl Iterator<Item = (&str, u64)> {
        let of_the_player = |window: &&Window| {
            window.kind != STALL && window.kind != ABORT && window.to != u64::MAX
        };
        self.all
            .iter()
            .filter(of_the_player)
            .map(|window| (window.kind.as_str(), window.to))
    }

    /// When the last fault of this kind had ended at this time, and not long before.
    pub(super) fn last_over(&self, kind: &str, at: u64, before: Duration) -> Option<u64> {
        let just_over = |window: &&Window| {
            window.kind == kind && window.to <= at && at <= window.to.saturating_add(micros(before))
        };
        self.all
            .iter()
            .filter(just_over)
            .map(|window| window.to)
            .max()
    }

    /// Whether a fault lasts in this stretch that had not ended when it began.
    pub(super) fn another_lasts(&self, from: u64, to: u64) -> bool {
        self.all
            .iter()
            .filter(|window| window.kind != STALL)
            .any(|window| {
                let over = if window.kind == ABORT {
                    window.from
                } else {
                    window.to
                };
                window.from <= to && over > from
            })
    }

    /// For how many microseconds of this stretch some consumer did not run though nobody had frozen
    /// it.
    pub(super) fn stalled(&self, from: u64, to: u64) -> u64 {
        let stalls = self.all.iter().filter(|window| window.kind == STALL);
        let mut stretches: Vec<(u64, u64)> = stalls
            .map(|window| (window.from.max(from), window.to.min(to)))
            .collect();
        stretches.sort_unstable();
        let (mut stalled, mut at) = (0, from);
        for (begin, end) in stretches {
            stalled += end.saturating_sub(begin.max(at));
            at = at.max(end);
        }
        stalled
    }

    /// Whether a fault of this kind lasted at this time, or not long before.
    pub(super) fn lasted(&self, kind: &str, at: u64, before: Duration) -> bool {
        self.all.iter().any(|window| {
            window.kind == kind
                && window.from <= at
                && at <= window.to.saturating_add(micros(before))
        })
    }

    /// Whether a failover may have lost what the store said at this time.
    pub(super) fn loses(&self, at: u64, before: Duration) -> bool {
        self.all.iter().any(|window| {
            window.kind == FAIL_OVER
                && window.from.saturating_sub(micros(before)) <= at
                && at <= window.to
        })
    }

    /// When a consumer aborted, if it did.
    pub(super) fn aborted(&self, consumer: &str) -> Option<u64> {
        let of_it =
            |window: &&Window| window.kind == ABORT && window.target.as_deref() == Some(consumer);
        self.all.iter().find(of_it).map(|window| window.from)
    }

    /// For how many microseconds of this stretch a consumer ran.
    pub(super) fn awake(&self, consumer: &str, from: u64, to: u64) -> u64 {
        let stood = |window: &&Window| window.kind == FREEZE || window.kind == STALL;
        let of_it = |window: &&Window| window.target.as_deref() == Some(consumer);
        let mut stretches: Vec<(u64, u64)> = self
            .all
            .iter()
            .filter(stood)
            .filter(of_it)
            .map(|window| (window.from, window.to))
            .collect();
        stretches.sort_unstable();
        let (mut awake, mut at) = (0, from);
        for (begin, end) in stretches {
            awake += begin.min(to).saturating_sub(at);
            at = at.max(end.min(to));
        }
        awake + to.saturating_sub(at)
    }
}

fn is_of_the_store(window: &Window) -> bool {
    OF_THE_STORE
        .iter()
        .chain(&STORE_REFUSES)
        .any(|kind| window.kind.starts_with(kind))
}
