//! Checks the ledger of a run for violated invariants.
//!
//! Like Jepsen's `total-queue` checker, it counts attempted, acknowledged, lost, unexpected,
//! duplicated and recovered messages. It also checks the order per key, concurrent handlers, the
//! store verdicts behind acceptances, and what remains at the end. Each violation has its
//! invariant, its id and the history of the id from all logs.

mod acceptances;
mod bounds;
mod commits;
mod effects;
mod ends;
mod faults;
mod handlers;
mod loss;
mod metrics;
mod recovery;
mod rejections;
mod settlements;
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

/// How many violations get a history; reading one takes a pass over the whole ledger.
const MAX_HISTORIES: usize = 100;

/// The guarantee of the consumers of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum TestedGuarantee {
    /// No second effect.
    AtMostOnce,
    /// A second effect only after an interrupted run, never after the completion is recorded.
    EffectivelyOnce,
    /// `SET … NX` and `DEL`, which may lose messages: the negative control.
    Bare,
}

/// Which messages the consumers of a run handle in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ordered {
    /// Messages with the same key in a Kafka topic.
    ByKey,
    /// Messages with the same key in a RabbitMQ queue with a single active consumer.
    ByKeyOfAQueue,
    /// None.
    Not,
}

/// The guarantee, bounds and settings by which a run is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckRules {
    /// The guarantee of the consumers.
    #[serde(rename = "promise")]
    pub guarantee: TestedGuarantee,
    /// Which messages are handled in order.
    pub order: Ordered,
    /// The lease of a claim.
    pub lease: Duration,
    /// How long a handler may still run after it lost its lease, counting only time in which its
    /// process is not frozen.
    pub grace: Duration,
    /// How long after its end a fault may still be the cause of an effect.
    pub aftermath: Duration,
    /// The drain timeout.
    pub drain: Duration,
    /// Whether a failover of the store may lose claims.
    #[serde(default)]
    pub store: ClaimDurability,
    /// The maximum number of messages that a consumer handles at once; 0 in older reports.
    #[serde(default)]
    pub in_flight: u32,
    /// The maximum number of attempts and of crashes of a message; 0 if this is not checked.
    #[serde(default)]
    pub attempts: u32,
    /// What is checked.
    #[serde(default, rename = "looked")]
    pub scope: CheckScope,
}

/// What a run is checked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckScope {
    /// The ledger, recovery times, and passwords in all files.
    #[default]
    #[serde(rename = "everywhere")]
    All,
    /// Only the ledger: in a cell of the matrix no fault has a duration, and there are no
    /// passwords.
    #[serde(rename = "in-the-ledger")]
    LedgerOnly,
}

/// Whether a failover of the store keeps granted claims.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimDurability {
    /// It keeps all of them.
    #[default]
    #[serde(rename = "claims")]
    Kept,
    /// It may lose some: a second effect may happen, with a cause in the fault log.
    #[serde(rename = "not-all")]
    MayBeLost,
}

/// The invariants, by their names in reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Invariant {
    /// Every confirmed message has an effect, or is in the dead letters or the in-doubt queue.
    I1,
    /// At most once: no second effect.
    I2,
    /// Effectively once: one unique effect; each other effect has a cause in the fault log.
    I3,
    /// No two concurrent handlers of one id, except one that lost its lease and is cancelled within
    /// [`CheckRules::grace`].
    I4,
    /// Effects of messages with the same key are in the order in which the messages were sent.
    I5,
    /// The committed offset of a group never decreases.
    I6,
    /// No offset is committed before all messages below it are settled.
    I7,
    /// Each delivery is settled at most once; RabbitMQ closed no channel because of an invalid
    /// acknowledgement (406).
    I8,
    /// Each acceptance has its own store verdict: completed, duplicate or resolved.
    I9,
    /// After a fault, effects resume within its bound and, if the machine is not overloaded, reach
    /// nine tenths of their rate.
    I10,
    /// While the store is unavailable, no handler starts, and requests to the store, memory and
    /// messages in flight stay bounded.
    I11,
    /// The metrics of consumers equal the counts in the ledger.
    I12,
    /// No log, panic message, ledger or Debug output contains a secret.
    I13,
    /// All messages are settled at the end, and no marker remains in progress.
    I14,
    /// A message whose handler works is not dead-lettered before its attempts are exhausted.
    #[serde(rename = "Aside")]
    RejectedTooSoon,
    /// No effect of an id that was never sent.
    Unexpected,
    /// A consumer ends only on request, with exit code 0, within its drain timeout plus 3 s.
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
        Self::RejectedTooSoon,
        Self::Unexpected,
        Self::Exit,
    ];

    /// The invariant in a few words.
    pub fn text(self) -> &'static str {
        match self {
            Self::I1 => {
                "no loss: every confirmed message has an effect, or is in the dead letters or the in-doubt queue"
            }
            Self::I2 => "at most once: no id has two effects",
            Self::I3 => {
                "effectively once: one unique effect per id; a fault that can have interrupted the earlier run explains each other effect"
            }
            Self::I4 => {
                "no two concurrent handlers of one id, except one that lost its lease and is cancelled within the grace time"
            }
            Self::I5 => "order per key",
            Self::I6 => "the committed offset never decreases, as the broker reports it",
            Self::I7 => "no offset is committed before all messages below it are settled",
            Self::I8 => "each delivery is settled at most once, and no channel was closed with 406",
            Self::I9 => "each acceptance has its own store verdict; `Busy` does not count",
            Self::I10 => {
                "after a fault, effects resume within its bound; if the machine is not overloaded, at nine tenths of their rate"
            }
            Self::I11 => {
                "while the store is unavailable or refuses writes, no handler starts; while it is unavailable, each process sends at most 20 requests per second and grows by at most 50 MB; handlers never exceed max_in_flight"
            }
            Self::I12 => "the metrics of consumers equal the counts in the ledger",
            Self::I13 => "no secret in any log, ledger or Debug output",
            Self::I14 => "all messages are settled at the end, and no marker remains in progress",
            Self::RejectedTooSoon => {
                "a message whose handler works is not dead-lettered before its attempts are exhausted"
            }
            Self::Unexpected => "no effect of an id that was never sent",
            Self::Exit => {
                "consumers end only on request, with exit code 0, within the drain timeout plus 3 s"
            }
        }
    }

    /// Whether the run could have violated it: it had a fault whose recovery was measured, or a
    /// store outage.
    pub fn was_tried(self, counts: &Counts) -> bool {
        match self {
            Self::I10 => counts
                .first_effects
                .values()
                .chain(counts.rate_recoveries.values())
                .any(|times| *times > 0),
            Self::I11 => counts.store_unavailable_ms + counts.store_refusing_ms > 0,
            _ => true,
        }
    }

    /// Whether it applies under these rules. For `bare` only those apply that show its losses.
    pub fn applies(self, rules: &CheckRules) -> bool {
        match self {
            Self::I13 => rules.scope == CheckScope::All,
            Self::I10 if rules.scope == CheckScope::LedgerOnly => false,
            Self::I1 => true,
            Self::I2 => rules.guarantee == TestedGuarantee::AtMostOnce,
            Self::I3 => rules.guarantee == TestedGuarantee::EffectivelyOnce,
            // After a failover loses a claim, another consumer may be granted the same id.
            Self::I4 => {
                rules.guarantee != TestedGuarantee::Bare && rules.store == ClaimDurability::Kept
            }
            Self::I5 => rules.guarantee != TestedGuarantee::Bare && rules.order != Ordered::Not,
            // A failover that loses markers also loses the count of attempts.
            Self::RejectedTooSoon => {
                rules.attempts > 0
                    && rules.guarantee != TestedGuarantee::Bare
                    && rules.store == ClaimDurability::Kept
            }
            // Only Kafka has offsets.
            Self::I6 | Self::I7 => {
                rules.guarantee != TestedGuarantee::Bare && rules.order == Ordered::ByKey
            }
            _ => rules.guarantee != TestedGuarantee::Bare,
        }
    }
}

impl fmt::Display for Invariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Violation {
    /// The violated invariant.
    pub invariant: Invariant,
    /// The id of the message, if it concerns one.
    pub id: Option<String>,
    /// The observation.
    pub why: String,
    /// The records of the id from all logs, and the faults meanwhile.
    pub history: Vec<String>,
}

/// The counts of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Ids that were published.
    pub attempted: u64,
    /// Ids that the broker has confirmed.
    pub acknowledged: u64,
    /// Confirmed ids without an effect, dead letter or in-doubt message.
    pub lost: u64,
    /// Effects of ids that were never sent.
    pub unexpected: u64,
    /// Ids with more than one raw effect.
    pub duplicated: u64,
    /// Ids with an effect whose publication was never confirmed.
    pub recovered: u64,
    /// Effects that the sink applied.
    pub raw_effects: u64,
    /// First effects of their ids.
    pub unique_effects: u64,
    /// Effects that the sink refused because their attempt was voided.
    pub refused: u64,
    /// Raw effects after the first of their id, by their cause in the fault log.
    pub explained: BTreeMap<String, u64>,
    /// Ids in the dead letters.
    pub dead_letters: u64,
    /// Ids in the in-doubt queue.
    pub in_doubt: u64,
    /// `Busy` verdicts of the store.
    pub busy: u64,
    /// Deliveries that were accepted as duplicates.
    pub duplicates_stopped: u64,
    /// Handlers that were cancelled within the grace time while another handler of the id ran.
    pub fenced: u64,
    /// The longest time that one of these ran concurrently with the other handler, excluding time
    /// in which its process was frozen, in milliseconds.
    pub fenced_longest_ms: u64,
    /// Observed changes of the committed offsets of the group.
    #[serde(default)]
    pub commits: u64,
    /// How long the store was unavailable according to the fault log, in milliseconds.
    #[serde(default, rename = "away_ms")]
    pub store_unavailable_ms: u64,
    /// How long the store refused writes, in milliseconds.
    #[serde(default, rename = "refusing_ms")]
    pub store_refusing_ms: u64,
    /// Faults that overlapped another fault.
    #[serde(default)]
    pub overlapping: u64,
    /// The maximum number of requests that a process sent in one second to an unavailable store.
    #[serde(default, rename = "away_questions")]
    pub max_requests_while_unavailable: u64,
    /// The maximum growth of the memory of a process while the store was unavailable, in KiB.
    #[serde(default, rename = "away_growth")]
    pub max_growth_while_unavailable: u64,
    /// The maximum number of concurrent handlers in one process.
    #[serde(default, rename = "at_once")]
    pub max_concurrent_handlers: u64,
    /// The longest time from the end of a fault to the next effect, in milliseconds, by its kind.
    #[serde(default, rename = "again_ms")]
    pub first_effect_ms: BTreeMap<String, u64>,
    /// The number of faults for which that time was measured, by kind.
    #[serde(default, rename = "again_judged")]
    pub first_effects: BTreeMap<String, u64>,
    /// The longest time from the end of one or two faults until effects reached nine tenths of
    /// their rate, in milliseconds, by their kinds. Not measured while the machine was overloaded.
    #[serde(default, rename = "rate_again_ms")]
    pub rate_recovery_ms: BTreeMap<String, u64>,
    /// The number of times that was measured, by kinds.
    #[serde(default, rename = "rate_again_judged")]
    pub rate_recoveries: BTreeMap<String, u64>,
    /// Processes that ended with success, whose final counters were compared with the ledger.
    #[serde(default)]
    pub metrics_exact: u64,
    /// Processes that did not, whose last written counters were compared with the ledger.
    #[serde(default)]
    pub metrics_bounded: u64,
    /// Markers in progress whose completion the store had recorded and lost in a failover.
    #[serde(default, rename = "ends_lost")]
    pub completions_lost: u64,
    /// Processes that received SIGTERM while the broker was unavailable and ended with an error.
    #[serde(default, rename = "left_without_broker")]
    pub stopped_without_broker: u64,
    /// Processes that did not start because Redis was a replica.
    #[serde(default, rename = "refused_to_begin")]
    pub refused_to_start: u64,
    /// Decreases of a committed offset because Kafka applied an earlier commit after it was frozen.
    #[serde(default, rename = "commits_overtaken")]
    pub commits_applied_late: u64,
    /// The maximum resident memory of a consumer, in KiB.
    #[serde(default)]
    pub resident: u64,
    /// Injected faults, by kind.
    pub faults: BTreeMap<String, u64>,
}

/// The result of [`check`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checked {
    /// The counts.
    pub counts: Counts,
    /// The violations; empty if all invariants hold.
    pub violations: Vec<Violation>,
}

impl Checked {
    /// The number of violations of an invariant.
    pub fn violations_of(&self, invariant: Invariant) -> usize {
        self.violations
            .iter()
            .filter(|violation| violation.invariant == invariant)
            .count()
    }
}

/// Checks a ledger.
pub fn check(ledger: &Ledger, rules: &CheckRules) -> Checked {
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
        acceptances::check(&mut finder, id);
        ends::check_id(&mut finder, id);
        rejections::check(&mut finder, id);
    }
    effects::check_order(&mut finder);
    commits::check(&mut finder);
    settlements::check(&mut finder);
    metrics::check(&mut finder);
    recovery::check(&mut finder);
    bounds::check(&mut finder);
    ends::check(&mut finder);
    finder
        .checked
        .violations
        .sort_by(|a, b| (a.invariant, &a.id).cmp(&(b.invariant, &b.id)));
    finder.checked
}

/// The state that all checks share.
struct Finder<'a> {
    ledger: &'a Ledger,
    rules: &'a CheckRules,
    windows: &'a Windows,
    checked: Checked,
}

impl<'a> Finder<'a> {
    fn history(&self, id: &str) -> impl Iterator<Item = &'a Record> + Clone + use<'a> {
        self.ledger.history(id)
    }

    /// Adds a violation if the invariant applies to the run.
    fn report_violation(&mut self, invariant: Invariant, id: Option<&str>, why: String) {
        if invariant.applies(self.rules) {
            // Each history takes a pass over the whole ledger.
            let has_history = self.checked.violations.len() < MAX_HISTORIES;
            let history = id
                .filter(|_| has_history)
                .map(|id| self.event_history(id))
                .unwrap_or_default();
            self.checked.violations.push(Violation {
                invariant,
                id: id.map(str::to_owned),
                why,
                history,
            });
        }
    }

    /// The records of an id, with the faults meanwhile and shortly before.
    fn event_history(&self, id: &str) -> Vec<String> {
        let times = self.history(id).map(|record| record.at);
        let before = micros(self.rules.aftermath);
        let span = times
            .clone()
            .min()
            .unwrap_or_default()
            .saturating_sub(before)..=times.max().unwrap_or_default();
        let is_relevant = |record: &&Record| match &record.what {
            What::Fault { .. } | What::ProcessEnded { .. } | What::Stalled { .. } => {
                span.contains(&record.at)
            }
            what => what.id() == Some(id),
        };
        self.ledger
            .records()
            .iter()
            .filter(is_relevant)
            .map(ToString::to_string)
            .collect()
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
