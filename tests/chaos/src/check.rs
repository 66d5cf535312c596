//! Whether a run kept its promises: reads the ledger, and nothing else.
//!
//! In the manner of Jepsen's `total-queue`: what was attempted, what was acknowledged, what is
//! lost, unexpected, duplicated or recovered. Beside that the order per key, the handlers that ran
//! at the same time, the verdicts that acceptances rest on, and what is left at the end. Each
//! violation names its invariant and its id, and tells the id's history from all logs.

mod accepts;
mod again;
mod aside;
mod bounds;
mod commits;
mod effects;
mod ends;
mod faults;
mod handlers;
mod loss;
mod metrics;
mod receipts;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::ledger::{Ledger, Record, What};
use faults::Windows;

pub(crate) use faults::{FAIL_OVER, FREEZE, FREEZE_KAFKA};

/// How many violations are told with their histories.
const STORIES: usize = 100;

/// What the consumers of a run promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Promise {
    /// No effect twice.
    AtMostOnce,
    /// Again after a crash, never after it was done.
    EffectivelyOnce,
    /// `SET … NX` and `DEL`, which loses: the negative control.
    Bare,
}

/// What the consumers of a run handle one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ordered {
    /// Messages with the same key, of a log with offsets.
    ByKey,
    /// Messages with the same key, of a queue that one consumer takes at a time.
    ByKeyOfAQueue,
    /// Nothing.
    Not,
}

/// What a run is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rules {
    /// What its consumers promise.
    pub promise: Promise,
    /// What is handled one after the other.
    pub order: Ordered,
    /// How long a claim holds.
    pub lease: Duration,
    /// For how long a handler that has lost its lease may still run, once its process runs.
    pub grace: Duration,
    /// How long after its end a fault may still be the cause of something.
    pub aftermath: Duration,
    /// How long a drain may take.
    pub drain: Duration,
    /// Whether the store may forget what it has said.
    #[serde(default)]
    pub store: Remembers,
    /// How many messages a consumer may handle at once; older reports do not say.
    #[serde(default)]
    pub in_flight: u32,
    /// How many attempts a message has, and as many crashes; 0 where it was not looked at that.
    #[serde(default)]
    pub attempts: u32,
    /// Where it was looked.
    #[serde(default)]
    pub looked: Looked,
}

/// Where it was looked for what does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Looked {
    /// In the ledger, at the clock, at memory, and in every file for passwords.
    #[default]
    Everywhere,
    /// In the ledger, as in a cell of the matrix, where no fault lasts and there are no passwords.
    InTheLedger,
}

/// What a store still knows after a failover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Remembers {
    /// Each claim that it granted.
    #[default]
    Claims,
    /// Not all: a second effect may happen, and has its cause in the fault log.
    NotAll,
}

/// What must hold, by the names that reports use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Invariant {
    /// Every confirmed message has an effect, or stands in the dead letters or in doubt.
    I1,
    /// At most once: no second effect.
    I2,
    /// Effectively once: one effect that counts, and each other has its cause in the fault log.
    I3,
    /// No two handlers of one id, but for one that lost its lease and was cancelled within its
    /// grace.
    I4,
    /// Messages with the same key have their effects in the order in which they were sent.
    I5,
    /// What a group has committed never goes back.
    I6,
    /// Nothing is committed before all up to it is settled.
    I7,
    /// Each delivery is settled once at the most; the broker closed no channel because of a refused
    /// acknowledgement (406).
    I8,
    /// What is accepted was completed, or was a duplicate, by a verdict of its own.
    I9,
    /// After a fault effects come again within its bound, and at nine tenths of their rate where
    /// the machine has time for that.
    I10,
    /// While the store is away no handler starts, it is asked seldom, and memory and work in flight
    /// stay bounded.
    I11,
    /// What consumers count of themselves is what passed through their source and their store.
    I12,
    /// No secret stands in a log, a panic, a ledger or a Debug output.
    I13,
    /// Everything drains, and no marker is left in progress.
    I14,
    /// What works is not set aside before it has had its attempts.
    Aside,
    /// No effect without a message.
    Unexpected,
    /// A consumer ends only when it is told to, with exit code 0, within its drain, and 3 s.
    Exit,
}

impl Invariant {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::I1,
        Self::I2,
        Self::I3,
        Self::I4,
        Self::I5,
        Self::I6,
        Self::I7,
        Self::I8,
        Self::I9,
        Self::I10,
        Self::I11,
        Self::I12,
        Self::I13,
        Self::I14,
        Self::Aside,
        Self::Unexpected,
        Self::Exit,
    ];

    /// What must hold, in a few words.
    pub fn text(self) -> &'static str {
        match self {
            Self::I1 => {
                "no loss: every confirmed message has an effect, or stands in the dead letters or in doubt"
            }
            Self::I2 => "at most once: no id has two effects",
            Self::I3 => {
                "effectively once: one unique effect an id, and for each other one a fault that can have cut off the run before"
            }
            Self::I4 => "no two handlers of one id at once, but for one cancelled within its grace",
            Self::I5 => "order per key",
            Self::I6 => "what is committed never goes back, by the broker's word",
            Self::I7 => "nothing is committed before all up to it is settled",
            Self::I8 => "each delivery is settled once, and no channel was closed with 406",
            Self::I9 => "nothing is accepted without a verdict of its own; `Busy` is none",
            Self::I10 => {
                "after a fault effects come again within its bound; on a machine with time to spare at nine tenths of their rate"
            }
            Self::I11 => {
                "while the store is away or takes nothing no handler starts; away: at most 20 questions a second and 50 MB more a process; never more handlers than may be"
            }
            Self::I12 => "what consumers count of themselves is what the ledger has of them",
            Self::I13 => "no secret in any log, ledger or Debug output",
            Self::I14 => "everything drains, and no marker is left in progress",
            Self::Aside => "what works is not set aside before it has had its attempts",
            Self::Unexpected => "no effect without a message",
            Self::Exit => "consumers end only when told to, with exit code 0, within drain + 3 s",
        }
    }

    /// Whether there was something to look at: a fault whose end could be judged, or a store that
    /// was away.
    pub fn was_tried(self, counts: &Counts) -> bool {
        match self {
            Self::I10 => counts
                .again_judged
                .values()
                .chain(counts.rate_again_judged.values())
                .any(|times| *times > 0),
            Self::I11 => counts.away_ms + counts.refusing_ms > 0,
            _ => true,
        }
    }

    /// Whether a run under these rules is held to it. `bare` is held to nothing but what it must be
    /// seen to break.
    pub fn applies(self, rules: &Rules) -> bool {
        match self {
            Self::I13 => rules.looked == Looked::Everywhere,
            Self::I10 if rules.looked == Looked::InTheLedger => false,
            Self::I1 => true,
            Self::I2 => rules.promise == Promise::AtMostOnce,
            Self::I3 => rules.promise == Promise::EffectivelyOnce,
            // Who has lost its marker handles beside who was granted the next.
            Self::I4 => rules.promise != Promise::Bare && rules.store == Remembers::Claims,
            Self::I5 => rules.promise != Promise::Bare && rules.order != Ordered::Not,
            // A store that may forget counts no attempts.
            Self::Aside => {
                rules.attempts > 0
                    && rules.promise != Promise::Bare
                    && rules.store == Remembers::Claims
            }
            // Kafka alone has offsets.
            Self::I6 | Self::I7 => rules.promise != Promise::Bare && rules.order == Ordered::ByKey,
            _ => rules.promise != Promise::Bare,
        }
    }
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What does not hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// Which of them.
    pub invariant: Invariant,
    /// For which message; none where it is not about one.
    pub id: Option<String>,
    /// What was seen.
    pub why: String,
    /// What all logs know of the id, and the faults meanwhile.
    pub history: Vec<String>,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Ids that were handed to the broker.
    pub attempted: u64,
    /// Ids that the broker has confirmed.
    pub acknowledged: u64,
    /// Confirmed, and nowhere.
    pub lost: u64,
    /// Effects of ids that were never sent.
    pub unexpected: u64,
    /// Ids with more than one raw effect.
    pub duplicated: u64,
    /// Ids that were never confirmed, and had an effect all the same.
    pub recovered: u64,
    /// Applications at the sink.
    pub raw_effects: u64,
    /// What its unique table took.
    pub unique_effects: u64,
    /// Effects that came too late, and were refused because their attempt was void.
    pub refused: u64,
    /// Raw effects beyond the first of their ids, by their cause in the fault log.
    pub explained: BTreeMap<String, u64>,
    /// Ids that stand in the dead letters.
    pub dead_letters: u64,
    /// Ids that stand in doubt.
    pub in_doubt: u64,
    /// Times that a store answered `Busy`.
    pub busy: u64,
    /// Deliveries that were accepted as duplicates.
    pub duplicates_stopped: u64,
    /// Handlers that were cancelled within their grace while another ran already.
    pub fenced: u64,
    /// The longest that one of these ran beside the other, its process awake, in milliseconds.
    pub fenced_longest_ms: u64,
    /// Changes of what the group has committed, as the broker told them.
    #[serde(default)]
    pub commits: u64,
    /// For how long the store was away in the fault log, in milliseconds.
    #[serde(default)]
    pub away_ms: u64,
    /// For how long it answered and took nothing, in milliseconds.
    #[serde(default)]
    pub refusing_ms: u64,
    /// How many faults lasted while another one did.
    #[serde(default)]
    pub overlapping: u64,
    /// The most questions that a process put to a store that was away, in a second.
    #[serde(default)]
    pub away_questions: u64,
    /// The most by which the memory of a process grew while the store was away, in KiB.
    #[serde(default)]
    pub away_growth: u64,
    /// The most handlers that one process ran at once.
    #[serde(default)]
    pub at_once: u64,
    /// The longest until an effect came after the end of a fault, in milliseconds, by its kind.
    #[serde(default)]
    pub again_ms: BTreeMap<String, u64>,
    /// After how many faults it could be judged how soon one came, by kind.
    #[serde(default)]
    pub again_judged: BTreeMap<String, u64>,
    /// The longest until effects came at nine tenths of their rate after the end of a fault, or of
    /// two, in milliseconds, by their kinds: where the machine had time to spare.
    #[serde(default)]
    pub rate_again_ms: BTreeMap<String, u64>,
    /// After how many that could be judged.
    #[serde(default)]
    pub rate_again_judged: BTreeMap<String, u64>,
    /// Processes that ended well, whose counters were compared with the ledger to the last.
    #[serde(default)]
    pub metrics_exact: u64,
    /// Processes that were killed: what they had written of their counters last was compared.
    #[serde(default)]
    pub metrics_bounded: u64,
    /// Markers whose end the store had recorded, and that a failover left in progress.
    #[serde(default)]
    pub ends_lost: u64,
    /// Processes that were told to drain while their broker was away, and ended with an error.
    #[serde(default)]
    pub left_without_broker: u64,
    /// Processes that did not begin, because Redis was a replica.
    #[serde(default)]
    pub refused_to_begin: u64,
    /// Commits that went back because a broker that had been frozen carried out an earlier one
    /// late.
    #[serde(default)]
    pub commits_overtaken: u64,
    /// The most memory that a consumer had, in KiB.
    #[serde(default)]
    pub resident: u64,
    /// Faults that were played, by kind.
    pub faults: BTreeMap<String, u64>,
}

/// What the checker found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// What was counted.
    pub counts: Counts,
    /// What does not hold; empty if all does.
    pub violations: Vec<Violation>,
}

impl Checked {
    /// How many violations of one invariant there are.
    pub fn violations_of(&self, invariant: Invariant) -> usize {
        self.violations
            .iter()
            .filter(|violation| violation.invariant == invariant)
            .count()
    }
}

/// Checks a ledger.
pub fn check(ledger: &Ledger, rules: &Rules) -> Checked {
    let windows = Windows::of(ledger);
    let mut finder = Finder {
        ledger,
        rules,
        windows: &windows,
        checked: Checked::default(),
    };
    finder.checked.counts.faults = windows.counts();
    finder.checked.counts.overlapping = windows.overlapping();
    let mut ids: Vec<&str> = ledger.ids().collect();
    ids.sort_unstable();
    for id in ids {
        loss::check(&mut finder, id);
        effects::check(&mut finder, id);
        handlers::check(&mut finder, id);
        accepts::check(&mut finder, id);
        ends::check_id(&mut finder, id);
        aside::check(&mut finder, id);
    }
    effects::check_order(&mut finder);
    commits::check(&mut finder);
    receipts::check(&mut finder);
    metrics::check(&mut finder);
    again::check(&mut finder);
    bounds::check(&mut finder);
    ends::check(&mut finder);
    finder
        .checked
        .violations
        .sort_by(|a, b| (a.invariant, &a.id).cmp(&(b.invariant, &b.id)));
    finder.checked
}

/// What the parts of the checker share.
struct Finder<'a> {
    ledger: &'a Ledger,
    rules: &'a Rules,
    windows: &'a Windows,
    checked: Checked,
}

impl<'a> Finder<'a> {
    fn history(&self, id: &str) -> impl Iterator<Item = &'a Record> + Clone + use<'a> {
        self.ledger.history(id)
    }

    /// Notes a violation, if the run is held to that.
    fn found(&mut self, invariant: Invariant, id: Option<&str>, why: String) {
        if invariant.applies(self.rules) {
            // Each story is a walk through the whole ledger: when everything is broken, some tell
            // enough.
            let told = self.checked.violations.len() < STORIES;
            let history = id
                .filter(|_| told)
                .map(|id| self.story(id))
                .unwrap_or_default();
            self.checked.violations.push(Violation {
                invariant,
                id: id.map(str::to_owned),
                why,
                history,
            });
        }
    }

    /// All that is known of an id, with the faults in between and shortly before.
    fn story(&self, id: &str) -> Vec<String> {
        let times = self.history(id).map(|record| record.at);
        let before = micros(self.rules.aftermath);
        let span = times
            .clone()
            .min()
            .unwrap_or_default()
            .saturating_sub(before)..=times.max().unwrap_or_default();
        let told = |record: &&Record| match &record.what {
            What::Fault { .. } | What::Gone { .. } | What::Stalled { .. } => {
                span.contains(&record.at)
            }
            what => what.id() == Some(id),
        };
        self.ledger
            .records()
            .iter()
            .filter(told)
            .map(ToString::to_string)
            .collect()
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
