//! What a run says of itself, for people (Markdown) and for programs (JSON).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::check::{Checked, Counts, Invariant, Promise, Rules, Violation};
use crate::schedule::Kind;

/// How many violations a report tells with their histories; the rest is counted.
const TOLD: usize = 20;
/// Of how many pairs of faults it tells how long recovery took.
const PAIRS: usize = 10;

/// What was run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The scenario.
    pub scenario: String,
    /// `kafka` or `rabbitmq`.
    pub broker: String,
    /// The seed of messages and schedule.
    pub seed: u64,
    /// What the run was held to.
    pub rules: Rules,
    /// What was tried, with their versions.
    pub versions: BTreeMap<String, String>,
    /// How long it took, from the first message to the last look, in seconds.
    pub seconds: u64,
    /// How many confirmed messages it lost: each run of `bare` has to be seen to lose some.
    #[serde(default)]
    pub lost: u64,
}

/// How long it took after a fault until effects came at the rate of the publisher again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recovery {
    /// How often it was measured.
    pub times: u64,
    /// The longest, in milliseconds.
    pub longest_ms: u64,
}

/// One run, or the sum of several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The runs that were added up.
    pub runs: Vec<Run>,
    /// What was counted in all of them.
    pub counts: Counts,
    /// By the kind of the fault.
    pub recovery: BTreeMap<String, Recovery>,
    /// For each invariant by how many runs it was looked for.
    pub looked_for: BTreeMap<Invariant, u64>,
    /// How often each was violated.
    pub violated: BTreeMap<Invariant, u64>,
    /// The first violations with their histories.
    pub violations: Vec<Violation>,
}

/// Whether a run is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// What was promised held.
    Held,
    /// `bare` lost messages, as it must: the harness sees.
    SeenToLose,
    /// Something does not hold.
    Broken,
    /// `bare` lost nothing in a run: the harness may be blind.
    Blind,
}

/// Only one of two reports is of `bare`, which loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("runs of bare are not added to others: what they lose would count")]
pub struct Unlike;

impl Verdict {
    /// Whether the run is as it should be.
    pub fn is_right(self) -> bool {
        matches!(self, Self::Held | Self::SeenToLose)
    }
}

impl Report {
    /// Of one run.
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
        violations.truncate(TOLD);
        Self {
            runs: vec![run],
            counts,
            recovery,
            looked_for,
            violated,
            violations,
        }
    }

    /// What is said of the run, or of all of them: `bare` alone is judged by whether it lost.
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
        self.violations.truncate(TOLD);
        Ok(())
    }

    /// One line: what was run, and how it ended.
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
            Verdict::SeenToLose => "bare was seen to lose, as it must".to_owned(),
            Verdict::Blind => "BLIND: bare was not seen to lose in each run".to_owned(),
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

    /// The whole, for people.
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
                "confirmed, and neither an effect nor set aside",
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
                "never confirmed, and had an effect",
            ),
            (
                "raw effects",
                counts.raw_effects,
                "applications at the sink",
            ),
            (
                "unique effects",
                counts.unique_effects,
                "what its unique table took",
            ),
            (
                "explained",
                explained,
                "extra raw effects with a cause in the fault log",
            ),
            (
                "refused",
                counts.refused,
                "effects that came after their attempt was voided",
            ),
            ("dead letters", counts.dead_letters, "ids"),
            ("in doubt", counts.in_doubt, "ids"),
            ("busy", counts.busy, "answers of the store: held elsewhere"),
            (
                "duplicates stopped",
                counts.duplicates_stopped,
                "deliveries accepted because it was done",
            ),
            (
                "fenced",
                counts.fenced,
                "handlers cancelled while another ran already",
            ),
            (
                "commits",
                counts.commits,
                "changes of what the group has committed",
            ),
            (
                "away",
                counts.away_ms / 1_000,
                "s that the store answered nobody",
            ),
            (
                "refusing",
                counts.refusing_ms / 1_000,
                "s that the store answered and took nothing",
            ),
            (
                "questions meanwhile",
                counts.away_questions,
                "the most in a second, of one process (20 may be)",
            ),
            (
                "growth meanwhile",
                counts.away_growth,
                "KiB, the most of one process (51,200 may be)",
            ),
            (
                "memory",
                counts.resident,
                "KiB, the most that a consumer had",
            ),
            (
                "at once",
                counts.at_once,
                "handlers, the most in one process",
            ),
            (
                "metrics compared",
                counts.metrics_exact,
                "processes that ended well: each counter is what the ledger has",
            ),
            (
                "metrics bounded",
                counts.metrics_bounded,
                "processes that did not: what they wrote last is no more than that",
            ),
            (
                "commits overtaken",
                counts.commits_overtaken,
                "went back right after Kafka had been frozen: an earlier one was carried out late",
            ),
            (
                "left without broker",
                counts.left_without_broker,
                "processes that were to drain while it was away, and ended with an error",
            ),
            (
                "refused to begin",
                counts.refused_to_begin,
                "processes, because Redis was a replica",
            ),
            (
                "ends lost",
                counts.ends_lost,
                "markers whose end Redis had recorded, and lost in a failover",
            ),
            (
                "at the same time",
                counts.overlapping,
                "faults that lasted while another one did",
            ),
            (
                "longest fenced",
                counts.fenced_longest_ms,
                "ms that one of these ran beside the other, awake",
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
            let _ = write!(text, "\n## Violations (the first {TOLD} at the most)\n");
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
    fn bare_must_lose_and_nothing_else_may() {
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
    fn bare_must_lose_in_each_run() {
        let mut both = report(Promise::Bare, 3, vec![loss()]);
        both.add(report(Promise::Bare, 0, vec![])).unwrap();
        assert_eq!(both.verdict(), Verdict::Blind);
        assert!(both.line().contains("BLIND"), "{}", both.line());
    }

    #[test]
    fn what_nobody_looked_at_was_not_looked_for() {
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
    fn a_report_tells_what_a_person_needs_and_reads_back() {
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
            text.contains("| I3 | effectively once: one unique effect an id, and for each other one a fault that can have cut off the run before | – | 0 |")
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
