//! The report of a run, as Markdown and JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::check::{CheckRules, Checked, Counts, Invariant, TestedGuarantee, Violation};
use crate::schedule::FaultKind;

/// The maximum number of violations that a report lists; it counts all.
const MAX_LISTED: usize = 20;
/// How many pairs of faults a report lists, those with the longest recovery.
const PAIRS: usize = 10;

/// One run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedRun {
    /// The scenario.
    pub scenario: String,
    /// `kafka` or `rabbitmq`.
    pub broker: String,
    /// The seed of messages and schedule.
    pub seed: u64,
    /// The rules by which it was checked.
    pub rules: CheckRules,
    /// The tested versions.
    pub versions: BTreeMap<String, String>,
    /// The duration, in seconds.
    pub seconds: u64,
    /// Lost confirmed messages; each run of `bare` must lose some.
    #[serde(default)]
    pub lost: u64,
}

/// Recovery times: from the end of a fault until effects reach nine tenths of their rate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// The number of measurements.
    pub times: u64,
    /// The longest time, in milliseconds.
    pub longest_ms: u64,
}

/// One run, or the sum of several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The runs.
    pub runs: Vec<ReportedRun>,
    /// The sums of their counts.
    pub counts: Counts,
    /// Recovery times by kind of fault.
    pub recovery: BTreeMap<String, Recovery>,
    /// The number of runs that checked each invariant.
    #[serde(rename = "looked_for")]
    pub runs_checking: BTreeMap<Invariant, u64>,
    /// The number of violations of each invariant.
    pub violated: BTreeMap<Invariant, u64>,
    /// The first violations with their histories.
    pub violations: Vec<Violation>,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunVerdict {
    /// All invariants held.
    Passed,
    /// `bare` lost messages, as expected, so the harness detects losses.
    LostAsExpected,
    /// An invariant was violated.
    Violated,
    /// `bare` lost nothing in a run: the harness may not detect losses.
    LostNothing,
}

/// Only one of two reports is of `bare`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot add reports of bare to others: its expected losses would count as violations")]
pub struct MixedWithBare;

impl RunVerdict {
    /// Whether the result is the expected one.
    pub fn passed(self) -> bool {
        matches!(self, Self::Passed | Self::LostAsExpected)
    }
}

impl Report {
    /// The report of one run.
    pub fn of(run: ReportedRun, checked: Checked, recovery: BTreeMap<String, Recovery>) -> Self {
        let run = ReportedRun {
            lost: checked.counts.lost,
            ..run
        };
        let runs_checking =
            |it: &Invariant| it.applies(&run.rules) && it.was_tried(&checked.counts);
        let runs_checking = Invariant::ALL
            .into_iter()
            .filter(runs_checking)
            .map(|it| (it, 1))
            .collect();
        let violated = |it: &Invariant| checked.violations_of(*it) as u64;
        let violated = Invariant::ALL
            .into_iter()
            .map(|it| (it, violated(&it)))
            .filter(|(_, times)| *times > 0)
            .collect();
        let Checked {
            counts,
            mut violations,
        } = checked;
        violations.truncate(MAX_LISTED);
        Self {
            runs: vec![run],
            counts,
            recovery,
            runs_checking,
            violated,
            violations,
        }
    }

    /// The result of all runs. `bare` is only checked for losses.
    pub fn verdict(&self) -> RunVerdict {
        match (self.is_of_bare(), self.violated.is_empty()) {
            (true, _) if self.runs.iter().any(|run| run.lost == 0) => RunVerdict::LostNothing,
            (true, _) => RunVerdict::LostAsExpected,
            (false, true) => RunVerdict::Passed,
            (false, false) => RunVerdict::Violated,
        }
    }

    /// Whether all its runs are of `bare`.
    fn is_of_bare(&self) -> bool {
        self.runs
            .iter()
            .all(|run| run.rules.guarantee == TestedGuarantee::Bare)
    }

    /// Adds another report.
    ///
    /// # Errors
    /// [`MixedWithBare`], and nothing is added.
    pub fn add(&mut self, other: Self) -> Result<(), MixedWithBare> {
        if self.is_of_bare() != other.is_of_bare() {
            return Err(MixedWithBare);
        }
        let Self {
            runs,
            counts,
            recovery,
            runs_checking,
            violated,
            violations,
        } = other;
        self.runs.extend(runs);
        add_counts(&mut self.counts, counts);
        for (kind, Recovery { times, longest_ms }) in recovery {
            let sum = self.recovery.entry(kind).or_default();
            *sum = Recovery {
                times: sum.times + times,
                longest_ms: sum.longest_ms.max(longest_ms),
            };
        }
        add_all(&mut self.runs_checking, runs_checking);
        add_all(&mut self.violated, violated);
        self.violations.extend(violations);
        self.violations.truncate(MAX_LISTED);
        Ok(())
    }

    /// A summary in one line.
    pub fn line(&self) -> String {
        let runs = match self.runs.as_slice() {
            [run] => format!(
                "{} on {}, {}, seed {}",
                run.scenario,
                run.broker,
                name(run.rules.guarantee),
                run.seed
            ),
            runs => format!("{} runs", runs.len()),
        };
        let counts = &self.counts;
        let faults: u64 = counts.faults.values().sum();
        let text = match self.verdict() {
            RunVerdict::Passed => "passed".to_owned(),
            RunVerdict::LostAsExpected => "bare lost messages, as expected".to_owned(),
            RunVerdict::LostNothing => {
                "a run of bare lost no message, so the harness may not detect losses".to_owned()
            }
            RunVerdict::Violated => {
                let broken: Vec<String> = self
                    .violated
                    .iter()
                    .map(|(invariant, times)| format!("{invariant} × {times}"))
                    .collect();
                format!("violated: {}", broken.join(", "))
            }
        };
        let extra = counts.raw_effects - counts.unique_effects;
        format!(
            "{runs}: {} confirmed, {faults} faults, {} lost, {extra} extra effects: {text}",
            counts.acknowledged, counts.lost
        )
    }

    /// Writes `report.md` and `report.json` into a folder.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        std::fs::write(folder.join("report.md"), self.to_markdown())?;
        std::fs::write(folder.join("report.json"), serde_json::to_vec_pretty(self)?)
    }

    /// The whole report as Markdown.
    pub fn to_markdown(&self) -> String {
        let mut text = format!("# {}\n\n", self.line());
        let counts = &self.counts;
        // Writing to a String cannot fail.
        let _ = self.write_runs(&mut text);
        let explained: u64 = counts.explained.values().sum();
        let rows = [
            ("attempted", counts.attempted, "ids that were published"),
            (
                "acknowledged",
                counts.acknowledged,
                "confirmed by the broker",
            ),
            (
                "lost",
                counts.lost,
                "confirmed, but without an effect, a dead letter or an in-doubt message",
            ),
            (
                "unexpected",
                counts.unexpected,
                "effects of ids that were never sent",
            ),
            (
                "duplicated",
                counts.duplicated,
                "ids with more than one raw effect",
            ),
            (
                "recovered",
                counts.recovered,
                "never confirmed, but with an effect",
            ),
            ("raw effects", counts.raw_effects, "effects at the sink"),
            (
                "unique effects",
                counts.unique_effects,
                "first effects of their ids",
            ),
            (
                "explained",
                explained,
                "extra raw effects with a cause in the fault log",
            ),
            (
                "refused",
                counts.refused,
                "effects whose attempt was voided before",
            ),
            ("dead letters", counts.dead_letters, "ids"),
            ("in doubt", counts.in_doubt, "ids"),
            ("busy", counts.busy, "store verdicts: held by another claim"),
            (
                "duplicates stopped",
                counts.duplicates_stopped,
                "deliveries accepted as duplicates",
            ),
            (
                "fenced",
                counts.fenced,
                "handlers cancelled while another handler of the id ran",
            ),
            (
                "commits",
                counts.commits,
                "changes of the committed offsets",
            ),
            (
                "store unavailable",
                counts.store_unavailable_ms / 1_000,
                "seconds",
            ),
            (
                "store refused writes",
                counts.store_refusing_ms / 1_000,
                "seconds",
            ),
            (
                "requests to an unavailable store",
                counts.max_requests_while_unavailable,
                "the maximum per second of one process (limit 20)",
            ),
            (
                "memory growth in an outage",
                counts.max_growth_while_unavailable,
                "KiB, the maximum of one process (limit 51,200)",
            ),
            ("memory", counts.resident, "KiB, the maximum of a consumer"),
            (
                "concurrent handlers",
                counts.max_concurrent_handlers,
                "the maximum in one process",
            ),
            (
                "metrics compared",
                counts.metrics_exact,
                "processes with success: final counters equal the ledger",
            ),
            (
                "metrics bounded",
                counts.metrics_bounded,
                "other processes: last written counters do not exceed the ledger",
            ),
            (
                "commits applied late",
                counts.commits_applied_late,
                "decreases of a committed offset after a freeze of Kafka, which applied an earlier commit late",
            ),
            (
                "stopped without broker",
                counts.stopped_without_broker,
                "processes that drained while the broker was unavailable and ended with an error",
            ),
            (
                "refused to start",
                counts.refused_to_start,
                "processes, because Redis was a replica",
            ),
            (
                "completions lost",
                counts.completions_lost,
                "completions that Redis recorded and lost in a failover",
            ),
            (
                "overlapping",
                counts.overlapping,
                "faults that overlapped another fault",
            ),
            (
                "longest fenced, ms",
                counts.fenced_longest_ms,
                "the longest time that a fenced handler ran concurrently, excluding frozen time",
            ),
        ];
        text += "## Counts\n\n| what | count | |\n| --- | ---: | --- |\n";
        for (what, count, means) in rows {
            let _ = writeln!(text, "| {what} | {count} | {means} |");
        }
        if counts.lost == 0 && counts.acknowledged > 0 {
            let bound = 3.0 / counts.acknowledged as f64;
            let _ = write!(
                text,
                "\nNo loss in {} messages: the rate is below {bound:.1e} (95 %).\n",
                counts.acknowledged
            );
        }
        text += "\n## Faults\n\nFirst effect: the time from the end of the fault to the next effect, measured if no other fault lasted. Recovery: the \
                 time until effects reach nine tenths of the publishing rate for a second; checked if the machine was not overloaded. A longer \
                 time than the bound violates I10.\n\n\
                 | fault | injected | extra effects | measured | longest first effect, ms | longest recovery, ms | checked | longest of these, ms | bound, ms |\n\
                 | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        for (kind, times) in &counts.faults {
            let extra = counts.explained.get(kind).copied().unwrap_or_default();
            let or_none = |ms: Option<u128>| ms.map_or_else(|| "–".to_owned(), |ms| ms.to_string());
            let recovery = or_none(
                self.recovery
                    .get(kind)
                    .map(|recovery| recovery.longest_ms.into()),
            );
            let bound = or_none(FaultKind::of(kind).map(|kind| kind.recovery_bound().as_millis()));
            let first_effect = or_none(counts.first_effect_ms.get(kind).map(|ms| (*ms).into()));
            let measured = counts.first_effects.get(kind).copied().unwrap_or_default();
            let rate = or_none(counts.rate_recovery_ms.get(kind).map(|ms| (*ms).into()));
            let checked = counts
                .rate_recoveries
                .get(kind)
                .copied()
                .unwrap_or_default();
            let _ = writeln!(
                text,
                "| {kind} | {times} | {extra} | {measured} | {first_effect} | {recovery} | {checked} | {rate} | {bound} |"
            );
        }
        let mut pairs: Vec<(&String, &Recovery)> = self
            .recovery
            .iter()
            .filter(|(what, _)| what.contains(" + "))
            .collect();
        if !pairs.is_empty() {
            let times: u64 = pairs.iter().map(|(_, recovery)| recovery.times).sum();
            let _ = write!(
                text,
                "\n{times} pairs of {} kinds. Those with the longest recovery:\n\n",
                pairs.len()
            );
            text += "| faults | injected | longest recovery, ms | checked |\n| --- | ---: | ---: | ---: |\n";
            pairs.sort_by_key(|(_, recovery)| std::cmp::Reverse(recovery.longest_ms));
            for (what, recovery) in pairs.into_iter().take(PAIRS) {
                let checked = counts
                    .rate_recoveries
                    .get(what)
                    .copied()
                    .unwrap_or_default();
                let _ = writeln!(
                    text,
                    "| {what} | {} | {} | {checked} |",
                    recovery.times, recovery.longest_ms
                );
            }
        }
        text += "\n## Invariants\n\n| | what must hold | checked in | violations |\n| --- | --- | ---: | ---: |\n";
        for invariant in Invariant::ALL {
            let runs = self
                .runs_checking
                .get(&invariant)
                .map_or_else(|| "–".to_owned(), |runs| format!("{runs} runs"));
            let violated = self.violated.get(&invariant).copied().unwrap_or_default();
            let _ = writeln!(
                text,
                "| {invariant} | {} | {runs} | {violated} |",
                invariant.text()
            );
        }
        if !self.violations.is_empty() {
            let _ = write!(text, "\n## Violations (at most the first {MAX_LISTED})\n");
        }
        for Violation {
            invariant,
            id,
            why,
            history,
        } in &self.violations
        {
            let id = id.as_ref().map(|id| format!(" {id}")).unwrap_or_default();
            let _ = write!(
                text,
                "\n### {invariant}{id}: {why}\n\n```text\n{}\n```\n",
                history.join("\n")
            );
        }
        text
    }

    fn write_runs(&self, text: &mut String) -> std::fmt::Result {
        text.push_str("| scenario | broker | guarantee | seed | seconds |\n| --- | --- | --- | ---: | ---: |\n");
        for ReportedRun {
            scenario,
            broker,
            seed,
            rules,
            seconds,
            ..
        } in &self.runs
        {
            writeln!(
                text,
                "| {scenario} | {broker} | {} | {seed} | {seconds} |",
                name(rules.guarantee)
            )?;
        }
        let versions: BTreeSet<(&String, &String)> =
            self.runs.iter().flat_map(|run| &run.versions).collect();
        let versions: Vec<String> = versions
            .into_iter()
            .map(|(what, version)| format!("{what} {version}"))
            .collect();
        write!(text, "\nVersions: {}.\n\n", versions.join(", "))
    }
}

fn name(guarantee: TestedGuarantee) -> &'static str {
    match guarantee {
        TestedGuarantee::AtMostOnce => "at most once",
        TestedGuarantee::EffectivelyOnce => "effectively once",
        TestedGuarantee::Bare => "bare",
    }
}

fn add_all<K: Ord>(to: &mut BTreeMap<K, u64>, from: BTreeMap<K, u64>) {
    for (key, times) in from {
        *to.entry(key).or_default() += times;
    }
}

fn add_counts(to: &mut Counts, from: Counts) {
    to.attempted += from.attempted;
    to.acknowledged += from.acknowledged;
    to.lost += from.lost;
    to.unexpected += from.unexpected;
    to.duplicated += from.duplicated;
    to.recovered += from.recovered;
    to.raw_effects += from.raw_effects;
    to.unique_effects += from.unique_effects;
    to.refused += from.refused;
    to.dead_letters += from.dead_letters;
    to.in_doubt += from.in_doubt;
    to.busy += from.busy;
    to.duplicates_stopped += from.duplicates_stopped;
    to.fenced += from.fenced;
    to.commits += from.commits;
    to.store_unavailable_ms += from.store_unavailable_ms;
    to.store_refusing_ms += from.store_refusing_ms;
    to.overlapping += from.overlapping;
    to.metrics_exact += from.metrics_exact;
    to.metrics_bounded += from.metrics_bounded;
    to.completions_lost += from.completions_lost;
    to.refused_to_start += from.refused_to_start;
    to.stopped_without_broker += from.stopped_without_broker;
    to.commits_applied_late += from.commits_applied_late;
    for (to, from) in [
        (&mut to.first_effect_ms, from.first_effect_ms),
        (&mut to.rate_recovery_ms, from.rate_recovery_ms),
    ] {
        for (kind, ms) in from {
            let longest = to.entry(kind).or_default();
            *longest = (*longest).max(ms);
        }
    }
    for (to, from) in [
        (&mut to.fenced_longest_ms, from.fenced_longest_ms),
        (
            &mut to.max_requests_while_unavailable,
            from.max_requests_while_unavailable,
        ),
        (
            &mut to.max_growth_while_unavailable,
            from.max_growth_while_unavailable,
        ),
        (
            &mut to.max_concurrent_handlers,
            from.max_concurrent_handlers,
        ),
        (&mut to.resident, from.resident),
    ] {
        *to = (*to).max(from);
    }
    add_all(&mut to.first_effects, from.first_effects);
    add_all(&mut to.rate_recoveries, from.rate_recoveries);
    add_all(&mut to.explained, from.explained);
    add_all(&mut to.faults, from.faults);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::check::{CheckScope, ClaimDurability, Ordered};

    fn run(guarantee: TestedGuarantee) -> ReportedRun {
        let second = Duration::from_secs(1);
        let rules = CheckRules {
            guarantee,
            order: Ordered::Not,
            lease: 2 * second,
            grace: second,
            aftermath: second,
            drain: second,
            store: ClaimDurability::Kept,
            in_flight: 64,
            attempts: 0,
            scope: CheckScope::All,
        };
        let versions = BTreeMap::from([("Redis".to_owned(), "7.0.15".to_owned())]);
        ReportedRun {
            scenario: "mixed".into(),
            broker: "kafka".into(),
            seed: 7,
            rules,
            versions,
            seconds: 60,
            lost: 0,
        }
    }

    fn report(guarantee: TestedGuarantee, lost: u64, violations: Vec<Violation>) -> Report {
        let faults = BTreeMap::from([("kill-redis".to_owned(), 2)]);
        let counts = Counts {
            acknowledged: 300,
            lost,
            raw_effects: 301,
            unique_effects: 300,
            faults,
            ..Counts::default()
        };
        let recovery = BTreeMap::from([(
            "kill-redis".to_owned(),
            Recovery {
                times: 2,
                longest_ms: 900,
            },
        )]);
        Report::of(run(guarantee), Checked { counts, violations }, recovery)
    }

    fn loss() -> Violation {
        let history = vec!["1.000000 harness  confirmed".to_owned()];
        Violation {
            invariant: Invariant::I1,
            id: Some("u-7".into()),
            why: "confirmed, and neither".into(),
            history,
        }
    }

    #[test]
    fn bare_must_lose_messages_and_no_other_guarantee_may() {
        assert_eq!(
            report(TestedGuarantee::AtMostOnce, 0, vec![]).verdict(),
            RunVerdict::Passed
        );
        assert_eq!(
            report(TestedGuarantee::AtMostOnce, 1, vec![loss()]).verdict(),
            RunVerdict::Violated
        );
        assert_eq!(
            report(TestedGuarantee::Bare, 1, vec![loss()]).verdict(),
            RunVerdict::LostAsExpected
        );
        assert_eq!(
            report(TestedGuarantee::Bare, 0, vec![]).verdict(),
            RunVerdict::LostNothing
        );
        assert!(!RunVerdict::LostNothing.passed() && !RunVerdict::Violated.passed());
    }

    #[test]
    fn each_run_of_bare_must_lose_messages() {
        let mut both = report(TestedGuarantee::Bare, 3, vec![loss()]);
        both.add(report(TestedGuarantee::Bare, 0, vec![])).unwrap();
        assert_eq!(both.verdict(), RunVerdict::LostNothing);
        assert!(both.line().contains("lost no message"), "{}", both.line());
    }

    #[test]
    fn only_invariants_that_a_run_can_violate_count_as_checked() {
        let runs_checking = |scope, counts| {
            let run = run(TestedGuarantee::AtMostOnce);
            let run = ReportedRun {
                rules: CheckRules { scope, ..run.rules },
                ..run
            };
            Report::of(
                run,
                Checked {
                    counts,
                    violations: vec![],
                },
                BTreeMap::new(),
            )
            .runs_checking
            .into_keys()
            .collect::<Vec<_>>()
        };
        use Invariant::*;
        let first_effects = BTreeMap::from([("kill-redis".to_owned(), 1)]);
        let tried = Counts {
            first_effects,
            store_unavailable_ms: 3_000,
            ..Counts::default()
        };
        let all = runs_checking(CheckScope::All, tried.clone());
        assert_eq!(
            all,
            [
                I1, I2, I4, I8, I9, I10, I11, I12, I13, I14, Unexpected, Exit
            ]
        );
        assert_eq!(
            runs_checking(CheckScope::All, Counts::default()),
            [I1, I2, I4, I8, I9, I12, I13, I14, Unexpected, Exit]
        );
        assert_eq!(
            runs_checking(CheckScope::LedgerOnly, tried),
            [I1, I2, I4, I8, I9, I11, I12, I14, Unexpected, Exit]
        );
    }

    #[test]
    fn reports_add_up() {
        let mut sum = report(TestedGuarantee::AtMostOnce, 0, vec![]);
        sum.add(report(TestedGuarantee::EffectivelyOnce, 1, vec![loss()]))
            .unwrap();
        assert_eq!(
            sum.add(report(TestedGuarantee::Bare, 1, vec![loss()])),
            Err(MixedWithBare)
        );
        assert_eq!(
            (
                sum.counts.acknowledged,
                sum.counts.lost,
                sum.counts.faults["kill-redis"],
                sum.runs.len()
            ),
            (600, 1, 4, 2)
        );
        assert_eq!(
            (
                sum.recovery["kill-redis"].times,
                sum.runs_checking[&Invariant::I2],
                sum.runs_checking[&Invariant::I1]
            ),
            (4, 1, 2)
        );
        assert_eq!(
            (sum.violated[&Invariant::I1], sum.verdict()),
            (1, RunVerdict::Violated)
        );
        assert!(sum.line().ends_with("violated: I1 × 1"), "{}", sum.line());
    }

    #[test]
    fn a_report_has_all_sections_and_parses_again() {
        let report = report(TestedGuarantee::AtMostOnce, 1, vec![loss()]);
        let text = report.to_markdown();
        for part in [
            "| mixed | kafka | at most once | 7 | 60 |",
            "Redis 7.0.15",
            "| kill-redis | 2 | 0 | 0 | – | 900 | 0 | – | 5000 |",
            "### I1 u-7",
            "harness  confirmed",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(
            text.contains("| I3 | effectively once: one unique effect per id; a fault that can have interrupted the earlier run explains each other effect | – | 0 |")
        );
        assert_eq!(
            serde_json::from_str::<Report>(&serde_json::to_string(&report).unwrap()).unwrap(),
            report
        );
        assert!(!text.contains("95 %"));
        assert!(
            super::tests::report(TestedGuarantee::AtMostOnce, 0, vec![])
                .to_markdown()
                .contains("below 1.0e-2 (95 %)")
        );
    }
}
