//! Mutants of oncegate: each must violate a certain invariant, or the harness is too weak.

mod scenarios;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;
use std::time::Instant;

use oncegate::internal::Lock;
use serde::{Deserialize, Serialize};

use crate::check::Invariant;
use crate::matrix::servers::MatrixServers;
use crate::{Error, Stopping};
use scenarios::{RunScenario, ViolationCounts};

/// How often the scenario of a mutant is repeated until it is detected: a violation may depend on
/// timing.
const TRIES: u32 = 3;
/// How many scenarios run in parallel.
const SIDE_BY_SIDE: usize = 6;

/// A mutant.
struct Mutant {
    /// The value of `ONCEGATE_MUTANT` that enables it.
    name: &'static str,
    /// What it does.
    text: &'static str,
    scenario: &'static str,
    /// The invariant that it must violate there; another one is not enough.
    must_violate: Invariant,
}

const SCENARIOS: [(&str, &str, RunScenario); 14] = [
    (
        "crash-beside-copies",
        "three crashes before the handler, while copies arrive",
        scenarios::crash_beside_copies,
    ),
    (
        "crash-in-the-handler",
        "three crashes in the handler",
        scenarios::crash_in_the_handler,
    ),
    (
        "crash-before-completion",
        "three crashes before a completion is sent",
        scenarios::crash_before_completion,
    ),
    (
        "killed-with-a-gap",
        "the process is killed while one handler runs and later messages are settled",
        scenarios::killed_with_a_gap,
    ),
    (
        "panics-after-effects",
        "handlers panic after their effect",
        scenarios::panics_after_effects,
    ),
    (
        "late-clear",
        "a clear is applied late, during the next run",
        scenarios::late_clear,
    ),
    (
        "late-resolve",
        "a resolve is applied late, during the next run",
        scenarios::late_resolve,
    ),
    (
        "lost-claims",
        "the reply to the first claim of each id is lost",
        scenarios::lost_claims,
    ),
    (
        "slow-renewal",
        "the reply to a renewal is slow, and later requests get none",
        scenarios::slow_renewal,
    ),
    (
        "longer-than-the-window",
        "a crash after the effect, and a redelivery after the window",
        scenarios::longer_than_the_window,
    ),
    (
        "another-channel",
        "connections close while handlers run, then a kill",
        scenarios::another_channel,
    ),
    (
        "crash-after-commit",
        "three crashes of a service with an inbox after its commit",
        scenarios::crash_after_commit,
    ),
    (
        "crash-before-commit",
        "three crashes of a service with an inbox before the commit of a batch",
        scenarios::crash_before_commit,
    ),
    (
        "crash-before-publishing",
        "three crashes of a relay before it publishes",
        scenarios::crash_before_publishing,
    ),
];

const fn mutant(
    name: &'static str,
    text: &'static str,
    scenario: &'static str,
    must_violate: Invariant,
) -> Mutant {
    Mutant {
        name,
        text,
        scenario,
        must_violate,
    }
}

const MUTANTS: [Mutant; 15] = [
    mutant(
        "accept-a-busy",
        "accepts a delivery whose claim is busy",
        "crash-beside-copies",
        Invariant::I9,
    ),
    mutant(
        "clear-without-comparing",
        "clears a marker in progress without comparing the token",
        "late-clear",
        Invariant::I4,
    ),
    mutant(
        "token-per-delivery",
        "uses one token for all claims of a delivery",
        "late-clear",
        Invariant::I4,
    ),
    mutant(
        "new-token-on-a-retried-claim",
        "retries a claim with another token",
        "lost-claims",
        Invariant::I14,
    ),
    mutant(
        "resolve-compares-nothing",
        "applies `DidNotHappen` to any marker without comparing the token",
        "late-resolve",
        Invariant::I4,
    ),
    mutant(
        "unresolved-expires-with-the-window",
        "lets unresolved markers expire with the window in at most once",
        "longer-than-the-window",
        Invariant::I2,
    ),
    mutant(
        "panic-is-a-failure",
        "treats a panic as a failure without an effect in at most once",
        "panics-after-effects",
        Invariant::I2,
    ),
    mutant(
        "renewal-from-the-reply",
        "measures a renewed lease from the reply instead of the request",
        "slow-renewal",
        Invariant::I4,
    ),
    mutant(
        "complete-before-the-handler",
        "records the completion before the handler runs",
        "crash-in-the-handler",
        Invariant::I1,
    ),
    mutant(
        "accept-before-complete",
        "accepts before the store has recorded the completion",
        "crash-before-completion",
        Invariant::I9,
    ),
    mutant(
        "commit-the-highest",
        "commits the highest settled offset although lower ones are unsettled",
        "killed-with-a-gap",
        Invariant::I7,
    ),
    mutant(
        "settle-on-another-channel",
        "acknowledges on the new channel with a delivery tag of the lost one",
        "another-channel",
        Invariant::I1,
    ),
    mutant(
        "commit-without-the-record",
        "commits the rows of the handler without the record of the message",
        "crash-after-commit",
        Invariant::I2,
    ),
    mutant(
        "accept-before-the-commit",
        "accepts the messages of an inbox before their transaction is committed",
        "crash-before-commit",
        Invariant::I1,
    ),
    mutant(
        "remove-before-the-confirm",
        "removes a message from the outbox before the broker has confirmed it",
        "crash-before-publishing",
        Invariant::I1,
    ),
];

/// The results of all mutants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MutantResults {
    /// In the order of the table.
    pub mutants: Vec<MutantResult>,
    /// The violations of the unmodified code in each scenario; none if it passes.
    #[serde(rename = "right")]
    pub unmodified: BTreeMap<String, BTreeMap<Invariant, usize>>,
    /// The scenarios that failed to run with the unmodified code, with the error.
    #[serde(default, rename = "unplayed")]
    pub not_run: BTreeMap<String, String>,
    /// The duration, in seconds.
    pub seconds: u64,
    /// The tested versions.
    pub versions: BTreeMap<String, String>,
}

/// The result of one mutant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MutantResult {
    /// Its name.
    pub name: String,
    /// What it does.
    pub text: String,
    /// Its scenario.
    #[serde(rename = "scene")]
    pub scenario: String,
    /// The invariant that it must violate.
    #[serde(rename = "breaks")]
    pub must_violate: Invariant,
    /// The violated invariants, with counts.
    pub by: BTreeMap<Invariant, usize>,
    /// The number of runs of the scenario.
    pub tries: u32,
}

/// Runs the scenario of each mutant whose name starts with `wanted`, and the same scenarios with the
/// unmodified code.
///
/// # Errors
/// A server does not start, or a signal requested a stop.
pub fn run(wanted: &str, folder: &Path, stopping: &Stopping) -> Result<MutantResults, Error> {
    if !cfg!(oncegate_chaos) {
        return Err("this build has no mutants: run `cargo xtask chaos --mutants`".into());
    }
    std::fs::create_dir_all(folder)?;
    let servers = MatrixServers::start()?;
    let begun = Instant::now();
    let mutants: Vec<&Mutant> = MUTANTS
        .iter()
        .filter(|it| it.name.starts_with(wanted))
        .collect();
    let of_mutants = mutants
        .iter()
        .map(|mutant| (mutant.scenario, Some(*mutant)));
    let of_scenarios = SCENARIOS
        .iter()
        .filter(|scenario| mutants.iter().any(|it| it.scenario == scenario.0))
        .map(|scenario| (scenario.0, None));
    let due = Lock::new(
        of_mutants
            .chain(of_scenarios)
            .collect::<std::collections::VecDeque<_>>(),
    );
    let caught = Lock::new(MutantResults {
        versions: servers.versions(),
        ..MutantResults::default()
    });
    std::thread::scope(|scope| {
        for _ in 0..SIDE_BY_SIDE {
            scope.spawn(|| {
                while stopping.check().is_ok() {
                    let Some((name, mutant)) = due.lock().pop_front() else {
                        return;
                    };
                    let Some((_, _, run)) = SCENARIOS.iter().find(|scenario| scenario.0 == name)
                    else {
                        return;
                    };
                    run_scenario(&caught, name, mutant, |environment, tried| {
                        let place = folder.join(format!(
                            "{name}-{}-{tried}",
                            mutant.map_or("unmodified", |it| it.name)
                        ));
                        run(&servers, environment, &place)
                    });
                }
            });
        }
    });
    stopping.check()?;
    let mut caught = caught.into_inner();
    caught.seconds = begun.elapsed().as_secs();
    caught
        .mutants
        .sort_by_key(|outcome| MUTANTS.iter().position(|it| it.name == outcome.name));
    caught.write(folder)?;
    Ok(caught)
}

/// Runs a scenario and adds the result; repeats it until the mutant is detected.
fn run_scenario(
    caught: &Lock<MutantResults>,
    scenario: &str,
    mutant: Option<&Mutant>,
    run: impl Fn(&[(&str, &str)], u32) -> Result<ViolationCounts, Error>,
) {
    let Some(Mutant {
        name,
        text,
        must_violate,
        ..
    }) = mutant
    else {
        match run(&[], 1) {
            Ok(broken) => {
                println!(
                    "chaos: unmodified code, {scenario}: {}",
                    if broken.is_empty() {
                        "passed".to_owned()
                    } else {
                        invariants_text(&broken)
                    }
                );
                caught.lock().unmodified.insert(scenario.to_owned(), broken);
            }
            Err(error) => {
                println!("chaos: unmodified code, {scenario}: {error}");
                caught
                    .lock()
                    .not_run
                    .insert(scenario.to_owned(), error.to_string());
            }
        }
        return;
    };
    let mut outcome = MutantResult {
        name: (*name).to_owned(),
        text: (*text).to_owned(),
        scenario: scenario.to_owned(),
        must_violate: *must_violate,
        by: BTreeMap::new(),
        tries: 0,
    };
    while !outcome.is_caught() && outcome.tries < TRIES {
        outcome.tries += 1;
        match run(&[("ONCEGATE_MUTANT", name)], outcome.tries) {
            Ok(broken) => outcome.by = broken,
            // A scenario that failed to run detects nothing.
            Err(error) => eprintln!("chaos: {name}, {scenario}: {error}"),
        }
    }
    println!(
        "chaos: {name}: {}",
        if outcome.is_caught() {
            format!("caught by {}", invariants_text(&outcome.by))
        } else {
            outcome.survived()
        }
    );
    caught.lock().mutants.push(outcome);
}

/// Invariants with their counts, as text.
fn invariants_text(broken: &BTreeMap<Invariant, usize>) -> String {
    broken
        .iter()
        .map(|(invariant, times)| format!("{invariant} × {times}"))
        .collect::<Vec<_>>()
        .join(", ")
}

impl MutantResult {
    /// Whether it violated the expected invariant.
    pub fn is_caught(&self) -> bool {
        self.by.contains_key(&self.must_violate)
    }

    fn survived(&self) -> String {
        let else_broken = if self.by.is_empty() {
            String::new()
        } else {
            format!(", although it violated {}", invariants_text(&self.by))
        };
        format!("SURVIVED {}{else_broken}", self.must_violate)
    }
}

impl MutantResults {
    /// Whether all mutants were detected, and the unmodified code passed every scenario.
    pub fn passed(&self) -> bool {
        let unmodified_passed =
            self.not_run.is_empty() && self.unmodified.values().all(BTreeMap::is_empty);
        !self.mutants.is_empty()
            && self.mutants.iter().all(MutantResult::is_caught)
            && unmodified_passed
    }

    /// A summary in one line.
    pub fn verdict(&self) -> String {
        let (all, seconds) = (self.mutants.len(), self.seconds);
        let caught = self.mutants.iter().filter(|it| it.is_caught()).count();
        let passed = self
            .unmodified
            .values()
            .filter(|broken| broken.is_empty())
            .count();
        let scenarios = self.unmodified.len() + self.not_run.len();
        format!(
            "mutants: {caught} of {all} caught; the unmodified code passed {passed} of {scenarios} scenarios, {seconds} s"
        )
    }

    fn write(&self, folder: &Path) -> io::Result<()> {
        std::fs::write(folder.join("mutants.md"), self.to_markdown())?;
        std::fs::write(
            folder.join("mutants.json"),
            serde_json::to_vec_pretty(self)?,
        )
    }

    /// The table.
    pub fn to_markdown(&self) -> String {
        let mut text = format!(
            "# {}\n\n| mutant | scenario | must violate | violated |\n| --- | --- | --- | --- |\n",
            self.verdict()
        );
        for outcome in &self.mutants {
            let MutantResult {
                name,
                text: does,
                scenario,
                must_violate,
                by,
                tries,
            } = outcome;
            let scenario = SCENARIOS
                .iter()
                .find(|it| it.0 == scenario)
                .map_or(scenario.as_str(), |it| it.1);
            let by = if by.is_empty() {
                "nothing".to_owned()
            } else {
                invariants_text(by)
            };
            let by = if outcome.is_caught() {
                by
            } else {
                format!("**{by}**")
            };
            let again = if *tries > 1 {
                format!(" (at try {tries})")
            } else {
                String::new()
            };
            let _ = writeln!(
                text,
                "| `{name}`: {does} | {scenario} | {must_violate} | {by}{again} |"
            );
        }
        for (scenario, broken) in self
            .unmodified
            .iter()
            .filter(|(_, broken)| !broken.is_empty())
        {
            let _ = write!(
                text,
                "\nThe unmodified code violated in {scenario}: {}.\n",
                invariants_text(broken)
            );
        }
        for (scenario, why) in &self.not_run {
            let _ = write!(
                text,
                "\nThe scenario {scenario} failed to run with the unmodified code: {why}.\n"
            );
        }
        let versions: Vec<String> = self
            .versions
            .iter()
            .map(|(what, version)| format!("{what} {version}"))
            .collect();
        let _ = write!(text, "\nVersions: {}.\n", versions.join(", "));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_mutant_has_a_unique_name_and_a_scene() {
        let names: std::collections::HashSet<&str> = MUTANTS.iter().map(|it| it.name).collect();
        assert_eq!(names.len(), MUTANTS.len());
        for mutant in &MUTANTS {
            assert!(
                SCENARIOS
                    .iter()
                    .any(|scenario| scenario.0 == mutant.scenario),
                "{}",
                mutant.scenario
            );
        }
    }

    #[test]
    fn a_surviving_mutant_or_a_violation_of_the_unmodified_code_fails() {
        let broken = |by: &[Invariant]| by.iter().map(|it| (*it, 2)).collect::<BTreeMap<_, _>>();
        let outcome = |by: &[Invariant]| MutantResult {
            name: "accept-a-busy".into(),
            text: "accepts".into(),
            scenario: "crash-beside-copies".into(),
            must_violate: Invariant::I9,
            by: broken(by),
            tries: 1,
        };
        let caught = |by: &[Invariant], right: &[Invariant]| MutantResults {
            mutants: vec![outcome(&[Invariant::I9]), outcome(by)],
            unmodified: BTreeMap::from([("crash-beside-copies".to_owned(), broken(right))]),
            ..MutantResults::default()
        };
        assert!(
            caught(&[Invariant::I1, Invariant::I9], &[]).passed()
                && !MutantResults::default().passed()
        );
        assert!(
            !caught(&[], &[]).passed() && caught(&[], &[]).to_markdown().contains("**nothing**")
        );
        let of_another = caught(&[Invariant::I1], &[]);
        assert!(
            !of_another.passed() && of_another.to_markdown().contains("| I9 | **I1 × 2** |"),
            "{}",
            of_another.to_markdown()
        );
        assert!(!caught(&[Invariant::I9], &[Invariant::I4]).passed());
        let not_run = BTreeMap::from([("late-clear".to_owned(), "no server".to_owned())]);
        assert!(
            !MutantResults {
                not_run,
                ..caught(&[Invariant::I9], &[])
            }
            .passed()
        );
        assert!(
            caught(&[], &[])
                .verdict()
                .starts_with("mutants: 1 of 2 caught")
        );
    }

    /// `cargo xtask chaos --mutants` applies the patch to a copy of the source.
    #[test]
    fn the_patch_has_each_mutant_and_applies() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let patch = root.join("tests/chaos/mutants.patch");
        let text = std::fs::read_to_string(&patch).expect("the patch");
        for mutant in MUTANTS {
            assert!(
                text.contains(&format!("(\"{}\"", mutant.name)),
                "mutants.patch lacks {}",
                mutant.name
            );
        }
        let checked = std::process::Command::new("git")
            .args(["apply", "--check"])
            .arg(&patch)
            .current_dir(&root)
            .output()
            .expect("git");
        assert!(
            checked.status.success(),
            "renew tests/chaos/mutants.patch as its first lines say:\n{}",
            String::from_utf8_lossy(&checked.stderr)
        );
    }
}
