//! The report of a run, as Markdown and JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::check::{Checked, Counts, Invariant, Promise, Rules, Violation};
use crate::schedule::Kind;

/// The maximum number of violations that a report lists; it counts all.
const MAX_LISTED: usize = 20;
/// How many pairs of faults a report lists, those with the longest recovery.
const PAIRS: usize = 10;

/// One run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The scenario.
    pub scenario: String,
    /// `kafka` or `rabbitmq`.
    pub broker: String,
    /// The seed of messages and schedule.
    pub seed: u64,
    /// The rules by which it was checked.
    pub rules: Rules,
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
    pub runs: Vec<Run>,
    /// The sums of their counts.
    pub counts: Counts,
    /// Recovery times by kind of fault.
    pub recovery: BTreeMap<String, Recovery>,
    /// The number of runs that checked each invariant.
    pub looked_for: BTreeMap<Invariant, u64>,
    /// The number of violations of each invariant.
    pub violated: BTreeMap<Invariant, u64>,
    /// The first violations with their histories.
    pub violations: Vec<Violation>,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All invariants held.
    Held,
    /// `bare` lost messages, as expected, so the harness detects losses.
    SeenToLose,
    /// An invariant was violated.
    Broken,
    /// `bare` lost nothing in a run: the harness may not detect losses.
    Blind,
}

/// Only one of two reports is of `bare`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot add reports of bare to others: its expected losses would count as violations")]
pub struct Unlike;

impl Verdict {
    /// Whether the result is the expected one.
    pub fn is_right(self) -> bool {
        matches!(self, Self::Held | Self::SeenToLose)
    }
}

impl Report {
    /// The report of one run.
    pub fn of(run: Run, checked: Checked, recovery: BTreeMap<String, Recovery>) -> Self {
        let run = Run {
            lost: checked.counts.lost,
            ..run
        };
        let looked_for = |it: &Invariant| it.applies(&run.rules) && it.was_tried(&checked.counts);
        let looked_for = Invariant::ALL
            .into_iter()
            .filter(looked_for)
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
            looked_for,
            violated,
            violations,
        }
    }

    /// The result of all runs. `bare` is only checked for losses.
    pub fn verdict(&self) -> Verdict {
        match (self.is_of_bare(), self.violated.is_empty()) {
            (true, _) if self.runs.iter().any(|run| run.lost == 0) => Verdict::Blind,
            (true, _) => Verdict::SeenToLose,
            (false, true) => Verdict::Held,
            (false, false) => Verdict::Broken,
        }
    }

    /// Whether all its runs are of `bare`.
    fn is_of_bare(&self) -> bool {
        self.runs
            .iter()
            .all(|run| run.rules.promise == Promise::Bare)
    }

    /// Adds another report.
    ///
    /// # Errors
    /// [`Unlike`], and nothing is added.
    pub fn add(&mut self, other: Self) -> Result<(), Unlike> {
        if self.is_of_bare() != other.is_of_bare() {
            return Err(Unlike);
        }
        let Self {
            runs,
            counts,
            recovery,
            looked_for,
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
        add_all(&mut self.looked_for, looked_for);
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
                name(run.rules.promise),
                run.seed
            ),
            runs => format!("{} runs", runs.len()),
        };
        let counts = &self.counts;
        let faults: u64 = counts.faults.values().sum();
        let said = match self.verdict() {
            Verdict::Held => "held".to_owned(),
            Verdict::SeenToLose => "bare lost messages, as expected".to_owned(),
            Verdict::Blind => "BLIND: a run of bare lost no message".to_owned(),
            Verdict::Broken => {
                let broken: Vec<String> = self
                    .violated
                    .iter()
                    .map(|(invariant, times)| format!("{invariant} × {times}"))
                    .collect();
                format!("BROKEN: {}", broken.join(", "))
            }
        };
        let extra = counts.raw_effects - counts.unique_effects;
        format!(
            "{runs}: {} confirmed, {faults} faults, {} lost, {extra} extra effects: {said}",
            counts.acknowledged, counts.lost
        )
    }

    /// Writes `report.md` and `report.json` into a folder.
    ///
    /// # Errors
    /// What the file system said.
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
            ("attempted", counts.attempted, "handed to the broker"),
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
                "away",
                counts.away_ms / 1_000,
                "s in which the store was unavailable",
            ),
            (
                "refusing",
                counts.refusing_ms / 1_000,
                "s in which the store refused writes",
            ),
            (
                "requests meanwhile",
                counts.away_questions,
                "the maximum per second of one process (limit 20)",
            ),
            (
                "growth meanwhile",
                counts.away_growth,
                "KiB, the maximum of one process (limit 51,200)",
            ),
            ("memory", counts.resident, "KiB, the maximum of a consumer"),
            (
                "at once",
                counts.at_once,
                "handlers, the maximum in one process",
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
                "commits overtaken",
                counts.commits_overtaken,
                "decreases after a freeze of Kafka, which applied an earlier commit late",
            ),
            (
                "left without broker",
                counts.left_without_broker,
                "processes that drained while the broker was unavailable and ended with an error",
            ),
            (
                "refused to start",
                counts.refused_to_begin,
                "processes, because Redis was a replica",
            ),
            (
                "ends lost",
                counts.ends_lost,
                "completions that Redis recorded and lost in a failover",
            ),
            (
                "at the same time",
                counts.overlapping,
                "faults that overlapped another one",
            ),
            (
                "longest fenced",
                counts.fenced_longest_ms,
                "ms in which one of these ran concurrently, excluding frozen time",
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
        text += "\n## Faults\n\nFirst effect: from the end of the fault, where no other lasts. Recovery: until effects come at nine tenths of the \
                 publisher's rate for a second; judged where the machine had time to spare. Later than the bound breaks I10.\n\n\
                 | fault | played | extra effects | judged | first effect, ms | longest recovery, ms | judged | longest of these, ms | to reach, ms |\n\
                 | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        for (kind, times) in &counts.faults {
            let extra = counts.explained.get(kind).copied().unwrap_or_default();
            let or_none = |ms: Option<u128>| ms.map_or_else(|| "–".to_owned(), |ms| ms.to_string());
            let recovery = or_none(
                self.recovery
                    .get(kind)
                    .map(|recovery| recovery.longest_ms.into()),
            );
            let bound = or_none(Kind::of(kind).map(|kind| kind.recovery_bound().as_millis()));
            let again = or_none(counts.again_ms.get(kind).map(|ms| (*ms).into()));
            let judged = counts.again_judged.get(kind).copied().unwrap_or_default();
            let rate = or_none(counts.rate_again_ms.get(kind).map(|ms| (*ms).into()));
            let of_rate = counts
                .rate_again_judged
                .get(kind)
                .copied()
                .unwrap_or_default();
            let _ = writeln!(
                text,
                "| {kind} | {times} | {extra} | {judged} | {again} | {recovery} | {of_rate} | {rate} | {bound} |"
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
                "\n{times} pairs of {} kinds. Those after which recovery took longest:\n\n",
                pairs.len()
            );
            text += "| faults | played | longest recovery, ms | judged |\n| --- | ---: | ---: | ---: |\n";
            pairs.sort_by_key(|(_, recovery)| std::cmp::Reverse(recovery.longest_ms));
            for (what, recovery) in pairs.into_iter().take(PAIRS) {
                let judged = counts
                    .rate_again_judged
                    .get(what)
                    .copied()
                    .unwrap_or_default();
                let _ = writeln!(
                    text,
                    "| {what} | {} | {} | {judged} |",
                    recovery.times, recovery.longest_ms
                );
            }
        }
        text += "\n## Invariants\n\n| | what must hold | looked for in | violations |\n| --- | --- | ---: | ---: |\n";
        for invariant in Invariant::ALL {
            let runs = self
                .looked_for
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
        for Run {
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
                name(rules.promise)
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

fn name(promise: Promise) -> &'static str {
    match promise {
        Promise::AtMostOnce => "at most once",
        Promise::EffectivelyOnce => "effectively once",
        Promise::Bare => "bare",
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
    to.away_ms += from.away_ms;
    to.refusing_ms += from.refusing_ms;
    to.overlapping += from.overlapping;
    to.metrics_exact += from.metrics_exact;
    to.metrics_bounded += from.metrics_bounded;
    to.ends_lost += from.ends_lost;
    to.refused_to_begin += from.refused_to_begin;
    to.left_without_broker += from.left_without_broker;
    to.commits_overtaken += from.commits_overtaken;
    for (to, from) in [
        (&mut to.again_ms, from.again_ms),
        (&mut to.rate_again_ms, from.rate_again_ms),
    ] {
        for (kind, ms) in from {
            let longest = to.entry(kind).or_default();
            *longest = (*longest).max(ms);
        }
    }
    for (to, from) in [
        (&mut to.fenced_longest_ms, from.fenced_longest_ms),
        (&mut to.away_questions, from.away_questions),
        (&mut to.away_growth, from.away_growth),
        (&mut to.at_once, from.at_once),
        (&mut to.resident, from.resident),
    ] {
        *to = (*to).max(from);
    }
    add_all(&mut to.again_judged, from.again_judged);
    add_all(&mut to.rate_again_judged, from.rate_again_judged);
    add_all(&mut to.explained, from.explained);
    add_all(&mut to.faults, from.faults);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::check::{Looked, Ordered, Remembers};

    fn run(promise: Promise) -> Run {
        let second = Duration::from_secs(1);
        let rules = Rules {
            promise,
            order: Ordered::Not,
            lease: 2 * second,
            grace: second,
            aftermath: second,
            drain: second,
            store: Remembers::Claims,
            in_flight: 64,
            attempts: 0,
            looked: Looked::Everywhere,
        };
        let versions = BTreeMap::from([("Redis".to_owned(), "7.0.15".to_owned())]);
        Run {
            scenario: "mixed".into(),
            broker: "kafka".into(),
            seed: 7,
            rules,
            versions,
            seconds: 60,
            lost: 0,
        }
    }

    fn report(promise: Promise, lost: u64, violations: Vec<Violation>) -> Report {
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
        Report::of(run(promise), Checked { counts, violations }, recovery)
    }

    fn loss() -> Violation {
        let history = vec!["1.000000 player   confirmed".to_owned()];
        Violation {
            invariant: Invariant::I1,
            id: Some("u-7".into()),
            why: "confirmed, and neither".into(),
            history,
        }
    }

    #[test]
    fn only_bare_may_lose_messages_and_must() {
        assert_eq!(
            report(Promise::AtMostOnce, 0, vec![]).verdict(),
            Verdict::Held
        );
        assert_eq!(
            report(Promise::AtMostOnce, 1, vec![loss()]).verdict(),
            Verdict::Broken
        );
        assert_eq!(
            report(Promise::Bare, 1, vec![loss()]).verdict(),
            Verdict::SeenToLose
        );
        assert_eq!(report(Promise::Bare, 0, vec![]).verdict(), Verdict::Blind);
        assert!(!Verdict::Blind.is_right() && !Verdict::Broken.is_right());
    }

    #[test]
    fn each_run_of_bare_must_lose_messages() {
        let mut both = report(Promise::Bare, 3, vec![loss()]);
        both.add(report(Promise::Bare, 0, vec![])).unwrap();
        assert_eq!(both.verdict(), Verdict::Blind);
        assert!(both.line().contains("BLIND"), "{}", both.line());
    }

    #[test]
    fn only_invariants_that_a_run_can_violate_count_as_checked() {
        let looked_for = |looked, counts| {
            let run = run(Promise::AtMostOnce);
            let run = Run {
                rules: Rules {
                    looked,
                    ..run.rules
                },
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
            .looked_for
            .into_keys()
            .collect::<Vec<_>>()
        };
        use Invariant::*;
        let again_judged = BTreeMap::from([("kill-redis".to_owned(), 1)]);
        let tried = Counts {
            again_judged,
            away_ms: 3_000,
            ..Counts::default()
        };
        let all = looked_for(Looked::Everywhere, tried.clone());
        assert_eq!(
            all,
            [
                I1, I2, I4, I8, I9, I10, I11, I12, I13, I14, Unexpected, Exit
            ]
        );
        assert_eq!(
            looked_for(Looked::Everywhere, Counts::default()),
            [I1, I2, I4, I8, I9, I12, I13, I14, Unexpected, Exit]
        );
        assert_eq!(
            looked_for(Looked::InTheLedger, tried),
            [I1, I2, I4, I8, I9, I11, I12, I14, Unexpected, Exit]
        );
    }

    #[test]
    fn reports_add_up() {
        let mut sum = report(Promise::AtMostOnce, 0, vec![]);
        sum.add(report(Promise::EffectivelyOnce, 1, vec![loss()]))
            .unwrap();
        assert_eq!(sum.add(report(Promise::Bare, 1, vec![loss()])), Err(Unlike));
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
                sum.looked_for[&Invariant::I2],
                sum.looked_for[&Invariant::I1]
            ),
            (4, 1, 2)
        );
        assert_eq!(
            (sum.violated[&Invariant::I1], sum.verdict()),
            (1, Verdict::Broken)
        );
        assert!(sum.line().ends_with("BROKEN: I1 × 1"), "{}", sum.line());
    }

    #[test]
    fn a_report_has_all_sections_and_parses_again() {
        let report = report(Promise::AtMostOnce, 1, vec![loss()]);
        let text = report.to_markdown();
        for part in [
            "| mixed | kafka | at most once | 7 | 60 |",
            "Redis 7.0.15",
            "| kill-redis | 2 | 0 | 0 | – | 900 | 0 | – | 5000 |",
            "### I1 u-7",
            "player   confirmed",
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
            super::tests::report(Promise::AtMostOnce, 0, vec![])
                .to_markdown()
                .contains("below 1.0e-2 (95 %)")
        );
    }
}
