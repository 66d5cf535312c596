//! The fault log as time intervals.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::{CheckRules, micros};
use crate::ledger::{FaultEdge, Ledger, SentSignal, What};

/// The kind of the fault that freezes a consumer.
pub(crate) const FREEZE: &str = "freeze-consumer";
/// The kind of the fault in which Redis loses writes that were not replicated.
pub(crate) const FAIL_OVER: &str = "fail-over-redis";
/// The kind of the fault that freezes Kafka.
pub(crate) const FREEZE_KAFKA: &str = "freeze-kafka";
/// The kinds during which the store does not reply.
const STORE_UNAVAILABLE: [&str; 2] = ["dark-redis", "freeze-redis"];
/// The kinds during which the store replies but refuses writes: out of memory, disk full, read-only
/// replica, too few replicas, loading.
const STORE_REFUSES: [&str; 5] = [
    FILL,
    "fill-disk",
    "demote-redis",
    "strand-redis",
    "load-redis",
];
/// The kind of these during which leases are renewed, since a renewal needs no memory.
const FILL: &str = "fill-redis";
/// Name prefixes of the kinds that may interrupt the connection of a consumer to its store.
const STORE_FAULTS: [&str; 6] = [
    "kill-redis",
    "reset-redis",
    "drop-replies",
    FAIL_OVER,
    STORE_UNAVAILABLE[0],
    STORE_UNAVAILABLE[1],
];
/// How long after its end such a fault may have an effect: clients reconnect.
const RECONNECT_TIME: Duration = Duration::from_secs(2);
/// The kind of an interval in which a consumer was not scheduled although it was not frozen.
const STALL: &str = "stall";
/// The kind of an abort that a message caused.
const ABORT: &str = "abort";

/// Whether a store that refuses claims renews leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeaseRenewals {
    Accepted,
    Refused,
}

/// One fault: its interval and its target.
#[derive(Debug)]
struct Window {
    from: u64,
    to: u64,
    kind: String,
    /// The consumer; none for a server, which affects all consumers.
    target: Option<String>,
}

/// All faults, and when processes ended.
#[derive(Debug)]
pub(super) struct Windows {
    all: Vec<Window>,
    gone: HashMap<String, u64>,
    /// The interval in which the harness waited for the end of a process.
    ended: HashMap<String, (u64, u64)>,
    /// When the source of a consumer revoked its deliveries.
    revoked: HashMap<String, Vec<u64>>,
    last: u64,
}

impl Windows {
    /// A fault without a recorded end lasts forever.
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
                    edge: FaultEdge::Begin,
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
                    edge: FaultEdge::End,
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
                // The process writes nothing after that.
                What::Aborting { .. } => windows.push(Window {
                    from: record.at,
                    to: u64::MAX,
                    kind: ABORT.to_owned(),
                    target: Some(record.by.clone()),
                }),
                What::ProcessEnded {
                    consumer,
                    after,
                    took_ms,
                    ..
                } => {
                    gone.entry(consumer.clone()).or_insert(record.at);
                    if *after != SentSignal::Nothing {
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

    /// When a process ended; the end of the ledger if no end is recorded.
    pub(super) fn end_of_process(&self, consumer: &str) -> u64 {
        self.aborted(consumer)
            .or_else(|| self.gone.get(consumer).copied())
            .unwrap_or(self.last)
    }

    /// The number of injected faults by kind.
    pub(super) fn counts(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for window in self.all.iter().filter(|window| window.kind != STALL) {
            *counts.entry(window.kind.clone()).or_default() += 1;
        }
        counts
    }

    /// If a failover may lose claims: the fault that may have caused an effect between two times at
    /// one of these consumers. Prefers a fault of the consumer to one of a server.
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

    /// The fault that may have interrupted a run of this consumer between two times: a fault of
    /// this consumer, a stall of at least a quarter of a lease, a fault of the store, or any recent
    /// fault if its deliveries were revoked.
    pub(super) fn interruption(
        &self,
        consumer: &str,
        from: u64,
        to: u64,
        rules: &CheckRules,
    ) -> Option<&str> {
        let own =
            |window: &&Window| window.target.as_deref() == Some(consumer) && window.kind != STALL;
        let meanwhile = |window: &&Window, aftermath: Duration| {
            window.from <= to && window.to.saturating_add(micros(aftermath)) >= from
        };
        let own_fault = || {
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
        // A fault that ends several consumers one after the other has no target.
        let ended_by_fault = || {
            let (since, at) = *self
                .ended
                .get(consumer)
                .filter(|(since, at)| *since <= to && *at >= from)?;
            self.all
                .iter()
                .find(|window| window.target.is_none() && window.from <= since && window.to >= at)
        };
        let affects_store = || {
            self.all
                .iter()
                .filter(|window| is_store_fault(window))
                .find(|window| meanwhile(window, RECONNECT_TIME))
        };
        let revoked = || {
            let times = self
                .revoked
                .get(consumer)
                .into_iter()
                .flatten()
                .filter(|at| (from..=to).contains(*at));
            let shortly_before = |at: u64| {
                let mut injected = self
                    .all
                    .iter()
                    .filter(|window| window.kind != STALL && window.from <= at);
                let end = |window: &&Window| {
                    if window.kind == ABORT {
                        window.from
                    } else {
                        window.to
                    }
                };
                injected.rfind(|window| end(window).saturating_add(micros(rules.aftermath)) >= at)
            };
            times.copied().find_map(shortly_before)
        };
        let found = own_fault()
            .or_else(stalled)
            .or_else(ended_by_fault)
            .or_else(affects_store)
            .or_else(revoked);
        found.map(|window| window.kind.as_str())
    }

    /// The intervals in which the store was unavailable.
    pub(super) fn store_outages(&self) -> impl Iterator<Item = (u64, u64)> {
        let away = |window: &&Window| {
            STORE_UNAVAILABLE.contains(&window.kind.as_str()) && window.to != u64::MAX
        };
        self.all
            .iter()
            .filter(away)
            .map(|window| (window.from, window.to))
    }

    /// The intervals in which the store refused writes, and whether it renewed leases meanwhile.
    pub(super) fn store_refusals(&self) -> impl Iterator<Item = (u64, u64, LeaseRenewals)> {
        let refuses = |window: &&Window| {
            STORE_REFUSES.contains(&window.kind.as_str()) && window.to != u64::MAX
        };
        let renewals = |window: &Window| {
            if window.kind == FILL {
                LeaseRenewals::Accepted
            } else {
                LeaseRenewals::Refused
            }
        };
        self.all
            .iter()
            .filter(refuses)
            .map(move |window| (window.from, window.to, renewals(window)))
    }

    /// The number of injected faults that overlapped another one.
    pub(super) fn overlapping(&self) -> u64 {
        let injected: Vec<&Window> = self
            .all
            .iter()
            .filter(|window| window.kind != STALL && window.kind != ABORT)
            .collect();
        let beside = |index: usize, window: &Window| {
            injected
                .iter()
                .enumerate()
                .any(|(other, it)| other != index && it.from < window.to && it.to > window.from)
        };
        injected
            .iter()
            .enumerate()
            .filter(|(index, window)| beside(*index, window))
            .count() as u64
    }

    /// The times at which messages made consumers abort.
    pub(super) fn aborts(&self) -> impl Iterator<Item = u64> {
        self.all
            .iter()
            .filter(|window| window.kind == ABORT)
            .map(|window| window.from)
    }

    /// The kinds and end times of the injected faults that ended.
    pub(super) fn ended_faults(&self) -> impl Iterator<Item = (&str, u64)> {
        let injected = |window: &&Window| {
            window.kind != STALL && window.kind != ABORT && window.to != u64::MAX
        };
        self.all
            .iter()
            .filter(injected)
            .map(|window| (window.kind.as_str(), window.to))
    }

    /// The end of the last fault of this kind that ended within `before` ahead of this time.
    pub(super) fn last_end(&self, kind: &str, at: u64, before: Duration) -> Option<u64> {
        let just_over = |window: &&Window| {
            window.kind == kind && window.to <= at && at <= window.to.saturating_add(micros(before))
        };
        self.all
            .iter()
            .filter(just_over)
            .map(|window| window.to)
            .max()
    }

    /// Whether another fault that is active at `from` or later overlaps this interval.
    pub(super) fn overlaps_another(&self, from: u64, to: u64) -> bool {
        self.all
            .iter()
            .filter(|window| window.kind != STALL)
            .any(|window| {
                let end = if window.kind == ABORT {
                    window.from
                } else {
                    window.to
                };
                window.from <= to && end > from
            })
    }

    /// The time within this interval, in microseconds, in which any consumer was stalled.
    pub(super) fn stalled(&self, from: u64, to: u64) -> u64 {
        let stalls = self.all.iter().filter(|window| window.kind == STALL);
        let mut intervals: Vec<(u64, u64)> = stalls
            .map(|window| (window.from.max(from), window.to.min(to)))
            .collect();
        intervals.sort_unstable();
        let (mut stalled, mut at) = (0, from);
        for (begin, end) in intervals {
            stalled += end.saturating_sub(begin.max(at));
            at = at.max(end);
        }
        stalled
    }

    /// Whether a fault of this kind was active at this time or within `before` ahead of it.
    pub(super) fn was_active(&self, kind: &str, at: u64, before: Duration) -> bool {
        self.all.iter().any(|window| {
            window.kind == kind
                && window.from <= at
                && at <= window.to.saturating_add(micros(before))
        })
    }

    /// Whether a failover may have lost a write of this time.
    pub(super) fn may_lose(&self, at: u64, before: Duration) -> bool {
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

    /// The time within this interval, in microseconds, in which a consumer was neither frozen nor
    /// stalled.
    pub(super) fn awake(&self, consumer: &str, from: u64, to: u64) -> u64 {
        let paused = |window: &&Window| window.kind == FREEZE || window.kind == STALL;
        let of_it = |window: &&Window| window.target.as_deref() == Some(consumer);
        let mut intervals: Vec<(u64, u64)> = self
            .all
            .iter()
            .filter(paused)
            .filter(of_it)
            .map(|window| (window.from, window.to))
            .collect();
        intervals.sort_unstable();
        let (mut awake, mut at) = (0, from);
        for (begin, end) in intervals {
            awake += begin.min(to).saturating_sub(at);
            at = at.max(end.min(to));
        }
        awake + to.saturating_sub(at)
    }
}

fn is_store_fault(window: &Window) -> bool {
    STORE_FAULTS
        .iter()
        .chain(&STORE_REFUSES)
        .any(|kind| window.kind.starts_with(kind))
}
