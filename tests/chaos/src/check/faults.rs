//! The fault log, as stretches of time.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use super::micros;
use crate::ledger::{Edge, Ledger, What};

/// The kind of a fault that freezes a consumer.
pub(crate) const FREEZE: &str = "freeze-consumer";
/// That of one in which a Redis loses what its replicas did not know.
pub(crate) const FAIL_OVER: &str = "fail-over-redis";
/// That of one that freezes Kafka.
pub(crate) const FREEZE_KAFKA: &str = "freeze-kafka";
/// Those in which the store answers nobody from their beginning to their end.
const STORE_AWAY: [&str; 2] = ["dark-redis", "freeze-redis"];
/// What a consumer calls it when it did not run though nobody froze it.
const STALL: &str = "stall";
/// What it is called when a message makes a consumer abort.
const ABORT: &str = "abort";

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
    last: u64,
}

impl Windows {
    /// A fault that never ended lasts until the end.
    pub(super) fn of(ledger: &Ledger) -> Self {
        let mut windows: Vec<Window> = Vec::new();
        let mut open: HashMap<u64, usize> = HashMap::new();
        let mut gone = HashMap::new();
        for record in ledger.records() {
            match &record.what {
                What::Fault { number, kind, target, edge: Edge::Begin } => {
                    open.insert(*number, windows.len());
                    windows.push(Window { from: record.at, to: u64::MAX, kind: kind.clone(), target: target.clone() });
                }
                What::Fault { number, edge: Edge::End, .. } => {
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
                What::Aborting { .. } => {
                    windows.push(Window { from: record.at, to: u64::MAX, kind: ABORT.to_owned(), target: Some(record.by.clone()) })
                }
                What::Gone { consumer, .. } => {
                    gone.entry(consumer.clone()).or_insert(record.at);
                }
                _ => {}
            }
        }
        Self { all: windows, gone, last: ledger.records().last().map_or(0, |record| record.at) }
    }

    /// When a process ended, and with it all that ran in it; at the end of the ledger if nobody saw it end.
    pub(super) fn gone(&self, consumer: &str) -> u64 {
        self.aborted(consumer).or_else(|| self.gone.get(consumer).copied()).unwrap_or(self.last)
    }

    /// How many the player played of each kind.
    pub(super) fn counts(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for window in self.all.iter().filter(|window| window.kind != STALL) {
            *counts.entry(window.kind.clone()).or_default() += 1;
        }
        counts
    }

    /// What may be the cause of something that began at one time and was seen at another, to one of these consumers: a
    /// fault of their own before one of a server.
    pub(super) fn cause(&self, from: u64, to: u64, consumers: &[&str], aftermath: Duration) -> Option<&str> {
        let meanwhile = |window: &&Window| window.from <= to && window.to.saturating_add(micros(aftermath)) >= from;
        let own = |window: &&Window| window.target.as_deref().is_some_and(|target| consumers.contains(&target));
        let of_a_server = |window: &&Window| window.target.is_none();
        let found = self.all.iter().filter(meanwhile).find(own).or_else(|| self.all.iter().filter(meanwhile).find(of_a_server));
        found.map(|window| window.kind.as_str())
    }

    /// When no consumer could reach the store, or it could not answer: from when to when.
    pub(super) fn store_away(&self) -> impl Iterator<Item = (u64, u64)> {
        let away = |window: &&Window| STORE_AWAY.contains(&window.kind.as_str()) && window.to != u64::MAX;
        self.all.iter().filter(away).map(|window| (window.from, window.to))
    }

    /// The faults of the player that ended: of which kind, and when.
    pub(super) fn over(&self) -> impl Iterator<Item = (&str, u64)> {
        let of_the_player = |window: &&Window| window.kind != STALL && window.kind != ABORT && window.to != u64::MAX;
        self.all.iter().filter(of_the_player).map(|window| (window.kind.as_str(), window.to))
    }

    /// Whether a fault of this kind had ended at this time, and not long before.
    pub(super) fn is_just_over(&self, kind: &str, at: u64, before: Duration) -> bool {
        self.all.iter().any(|window| window.kind == kind && window.to <= at && at <= window.to.saturating_add(micros(before)))
    }

    /// Whether a fault lasts in this stretch that had not ended when it began. What was done to a consumer is felt for a while,
    /// while its group shares out anew what it had.
    pub(super) fn another_lasts(&self, from: u64, to: u64, felt: u64) -> bool {
        self.all.iter().filter(|window| window.kind != STALL).any(|window| {
            let over = match (&window.target, window.kind.as_str()) {
                (_, ABORT) => window.from.saturating_add(felt),
                (Some(_), _) if window.to != from => window.to.saturating_add(felt),
                _ => window.to,
            };
            window.from <= to && over > from
        })
    }

    /// For how many microseconds of this stretch consumers did not run though nobody had frozen them, all added up.
    pub(super) fn stalled(&self, from: u64, to: u64) -> u64 {
        let stalls = self.all.iter().filter(|window| window.kind == STALL);
        stalls.map(|window| window.to.min(to).saturating_sub(window.from.max(from))).sum()
    }

    /// Whether a failover may have lost what the store said at this time.
    pub(super) fn loses(&self, at: u64, before: Duration) -> bool {
        self.all.iter().any(|window| window.kind == FAIL_OVER && window.from.saturating_sub(micros(before)) <= at && at <= window.to)
    }

    /// When a consumer aborted, if it did.
    pub(super) fn aborted(&self, consumer: &str) -> Option<u64> {
        let of_it = |window: &&Window| window.kind == ABORT && window.target.as_deref() == Some(consumer);
        self.all.iter().find(of_it).map(|window| window.from)
    }

    /// For how many microseconds of this stretch a consumer ran.
    pub(super) fn awake(&self, consumer: &str, from: u64, to: u64) -> u64 {
        let stood = |window: &&Window| window.kind == FREEZE || window.kind == STALL;
        let of_it = |window: &&Window| window.target.as_deref() == Some(consumer);
        let mut stretches: Vec<(u64, u64)> = self.all.iter().filter(stood).filter(of_it).map(|window| (window.from, window.to)).collect();
        stretches.sort_unstable();
        let (mut awake, mut at) = (0, from);
        for (begin, end) in stretches {
            awake += begin.min(to).saturating_sub(at);
            at = at.max(end.min(to));
        }
        awake + to.saturating_sub(at)
    }
}
