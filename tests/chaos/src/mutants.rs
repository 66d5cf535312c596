//! Mutants of oncegate: each must violate a certain invariant, or the harness is too weak.

mod scene;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::check::Invariant;
use crate::matrix::servers::Servers;
use crate::{Error, Stopping, lock};
use scene::{Broken, Play};

/// How often the scene of a mutant is repeated until it is detected: a violation may depend on
/// timing.
const TRIES: u32 = 3;
/// How many scenes run in parallel.
const SIDE_BY_SIDE: usize = 6;

/// A mutant.
struct Mutant {
    /// The value of `ONCEGATE_MUTANT` that enables it.
    name: &'static str,
    /// What it does.
    text: &'static str,
    scene: &'static str,
    /// The invariant that it must violate there; another one is not enough.
    breaks: Invariant,
}

const SCENES: [(&str, &str, Play); 10] = [
    (
        "crash-beside-copies",
        "three crashes before the handler, copies beside them",
        scene::crash_beside_copies,
    ),
    (
        "crash-in-the-handler",
        "three crashes inside the handler",
        scene::crash_in_the_handler,
    ),
    (
        "crash-before-completion",
        "three crashes before a completion is sent",
        scene::crash_before_completion,
    ),
    (
        "killed-with-a-gap",
        "killed while one runs and those behind it are done",
        scene::killed_with_a_gap,
    ),
    (
        "panics-after-effects",
        "handlers panic after their effect",
        scene::panics_after_effects,
    ),
    (
        "late-clear",
        "a clear arrives late, in the next run",
        scene::late_clear,
    ),
    (
        "late-resolve",
        "a resolve arrives late, in the next run",
        scene::late_resolve,
    ),
    (
        "lost-claims",
        "the replies to first claims are lost",
        scene::lost_claims,
    ),
    (
        "slow-renewal",
        "a renewal's reply is slow, then silence",
        scene::slow_renewal,
    ),
    (
        "longer-than-the-window",
        "a crash after the effect, and again when the window is over",
        scene::longer_than_the_window,
    ),
];
/// The scene that needs a proxy.
const ANOTHER_CHANNEL: (&str, &str, Play) = (
    "another-channel",
    "connections close while handlers run, then a kill",
    scene::another_channel,
);

const fn mutant(
    name: &'static str,
    text: &'static str,
    scene: &'static str,
    breaks: Invariant,
) -> Mutant {
    Mutant {
        name,
        text,
        scene,
        breaks,
    }
}

const MUTANTS: [Mutant; 12] = [
    mutant(
        "accept-a-busy",
        "accepts a delivery whose id another one holds",
        "crash-beside-copies",
        Invariant::I9,
    ),
    mutant(
        "clear-without-comparing",
        "clears whatever is in progress, whoever holds it",
        "late-clear",
        Invariant::I4,
    ),
    mutant(
        "token-per-delivery",
        "makes one token for a delivery, and claims with it again",
        "late-clear",
        Invariant::I4,
    ),
    mutant(
        "new-token-on-a-retried-claim",
        "asks again about a claim with another token",
        "lost-claims",
        Invariant::I14,
    ),
    mutant(
        "resolve-compares-nothing",
        "takes `did not happen` for whatever stands there",
        "late-resolve",
        Invariant::I4,
    ),
    mutant(
        "unresolved-expires-with-the-window",
        "forgets in at most once what is unresolved",
        "longer-than-the-window",
        Invariant::I2,
    ),
    mutant(
        "panic-is-a-failure",
        "takes a panic for a clean failure in at most once",
        "panics-after-effects",
        Invariant::I2,
    ),
    mutant(
        "renewal-from-the-reply",
        "counts a renewed lease from the reply",
        "slow-renewal",
        Invariant::I4,
    ),
    mutant(
        "complete-before-the-handler",
        "writes that it is done when it is claimed",
        "crash-in-the-handler",
        Invariant::I1,
    ),
    mutant(
        "accept-before-complete",
        "accepts without waiting for the store",
        "crash-before-completion",
        Invariant::I9,
    ),
    mutant(
        "commit-the-highest",
        "commits the highest settled offset",
        "killed-with-a-gap",
        Invariant::I7,
    ),
    mutant(
        "settle-on-another-channel",
        "acknowledges by a tag of a channel that is gone",
        "another-channel",
        Invariant::I1,
    ),
];

/// The results of all mutants.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caught {
    /// In the order of the table.
    pub mutants: Vec<Outcome>,
    /// The violations of the unmodified code in each scene; none if it passes.
    pub right: BTreeMap<String, BTreeMap<Invariant, usize>>,
    /// The scenes that failed to run with the unmodified code, with the error.
    #[serde(default)]
    pub unplayed: BTreeMap<String, String>,
    /// The duration, in seconds.
    pub seconds: u64,
    /// The tested versions.
    pub versions: BTreeMap<String, String>,
}

/// The result of one mutant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Its name.
    pub name: String,
    /// What it does.
    pub text: String,
    /// Its scene.
    pub scene: String,
    /// The invariant that it must violate.
    pub breaks: Invariant,
    /// The violated invariants, with counts.
    pub by: BTreeMap<Invariant, usize>,
    /// The number of runs of the scene.
    pub tries: u32,
}

/// Runs the scene of each mutant whose name starts with `wanted`, and the same scenes with the
/// unmodified code.
///
/// # Errors
/// A server does not start, or a signal requested a stop.
pub fn run(wanted: &str, folder: &Path, stopping: &Stopping) -> Result<Caught, Error> {
    if !cfg!(oncegate_chaos) {
        return Err("this build has no mutants: run `cargo xtask chaos --mutants`".into());
    }
    std::fs::create_dir_all(folder)?;
    let servers = Servers::start()?;
    let begun = Instant::now();
    let mutants: Vec<&Mutant> = MUTANTS
        .iter()
        .filter(|it| it.name.starts_with(wanted))
        .collect();
    let scenes = || SCENES.iter().chain([&ANOTHER_CHANNEL]);
    let of_mutants = mutants.iter().map(|mutant| (mutant.scene, Some(*mutant)));
    let of_scenes = scenes()
        .filter(|scene| mutants.iter().any(|it| it.scene == scene.0))
        .map(|scene| (scene.0, None));
    let due = Mutex::new(
        of_mutants
            .chain(of_scenes)
            .collect::<std::collections::VecDeque<_>>(),
    );
    let caught = Mutex::new(Caught {
        versions: servers.versions(),
        ..Caught::default()
    });
    std::thread::scope(|scope| {
        for _ in 0..SIDE_BY_SIDE {
            scope.spawn(|| {
                while stopping.go_on().is_ok() {
                    let Some((name, mutant)) = lock(&due).pop_front() else {
                        return;
                    };
                    let Some((_, _, play)) = scenes().find(|scene| scene.0 == name) else {
                        return;
                    };
                    run_scene(&caught, name, mutant, |environment, tried| {
                        let place = folder.join(format!(
                            "{name}-{}-{tried}",
                            mutant.map_or("right", |it| it.name)
                        ));
                        play(&servers, environment, &place)
                    });
                }
            });
        }
    });
    stopping.go_on()?;
    let mut caught = caught.into_inner().unwrap_or_else(PoisonError::into_inner);
    caught.seconds = begun.elapsed().as_secs();
    caught
        .mutants
        .sort_by_key(|outcome| MUTANTS.iter().position(|it| it.name == outcome.name));
    caught.write(folder)?;
    Ok(caught)
}

/// Runs a scene and adds the result; repeats it until the mutant is detected.
fn run_scene(
    caught: &Mutex<Caught>,
    scene: &str,
    mutant: Option<&Mutant>,
    play: impl Fn(&[(&str, &str)], u32) -> Result<Broken, Error>,
) {
    let Some(Mutant {
        name, text, breaks, ..
    }) = mutant
    else {
        match play(&[], 1) {
            Ok(broken) => {
                println!(
                    "chaos: unmodified code, {scene}: {}",
                    if broken.is_empty() {
                        "held".to_owned()
                    } else {
                        invariants_text(&broken)
                    }
                );
                lock(caught).right.insert(scene.to_owned(), broken);
            }
            Err(error) => {
                println!("chaos: unmodified code, {scene}: {error}");
                lock(caught)
                    .unplayed
                    .insert(scene.to_owned(), error.to_string());
            }
        }
        return;
    };
    let mut outcome = Outcome {
        name: (*name).to_owned(),
        text: (*text).to_owned(),
        scene: scene.to_owned(),
        breaks: *breaks,
        by: BTreeMap::new(),
        tries: 0,
    };
    while !outcome.is_caught() && outcome.tries < TRIES {
        outcome.tries += 1;
        match play(&[("ONCEGATE_MUTANT", name)], outcome.tries) {
            Ok(broken) => outcome.by = broken,
            // A scene that failed to run detects nothing.
            Err(error) => eprintln!("chaos: {name}, {scene}: {error}"),
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
    lock(caught).mutants.push(outcome);
}

/// Invariants with their counts, as text.
fn invariants_text(broken: &BTreeMap<Invariant, usize>) -> String {
    broken
        .iter()
        .map(|(invariant, times)| format!("{invariant} × {times}"))
        .collect::<Vec<_>>()
        .join(", ")
}

impl Outcome {
    /// Whether it violated the expected invariant.
    pub fn is_caught(&self) -> bool {
        self.by.contains_key(&self.breaks)
    }

    fn survived(&self) -> String {
        let else_broken = if self.by.is_empty() {
            String::new()
        } else {
            format!(", although it violated {}", invariants_text(&self.by))
        };
        format!("SURVIVED {}{else_broken}", self.breaks)
    }
}

impl Caught {
    /// Whether all mutants were detected, and the unmodified code passed every scene.
    pub fn is_right(&self) -> bool {
        let right = self.unplayed.is_empty() && self.right.values().all(BTreeMap::is_empty);
        !self.mutants.is_empty() && self.mutants.iter().all(Outcome::is_caught) && right
    }

    /// A summary in one line.
    pub fn verdict(&self) -> String {
        let (all, seconds) = (self.mutants.len(), self.seconds);
        let caught = self.mutants.iter().filter(|it| it.is_caught()).count();
        let held = self
            .right
            .values()
            .filter(|broken| broken.is_empty())
            .count();
        let scenes = self.right.len() + self.unplayed.len();
        format!(
            "mutants: {caught} of {all} caught; the unmodified code passed {held} of {scenes} scenes, {seconds} s"
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
            "# {}\n\n| mutant | scene | must violate | violated |\n| --- | --- | --- | --- |\n",
            self.verdict()
        );
        for outcome in &self.mutants {
            let Outcome {
                name,
                text: does,
                scene,
                breaks,
                by,
                tries,
            } = outcome;
            let scene = SCENES
                .iter()
                .chain([&ANOTHER_CHANNEL])
                .find(|it| it.0 == scene)
                .map_or(scene.as_str(), |it| it.1);
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
                "| `{name}`: {does} | {scene} | {breaks} | {by}{again} |"
            );
        }
        for (scene, broken) in self.right.iter().filter(|(_, broken)| !broken.is_empty()) {
            let _ = write!(
                text,
                "\nThe unmodified code violated in {scene}: {}.\n",
                invariants_text(broken)
            );
        }
        for (scene, why) in &self.unplayed {
            let _ = write!(
                text,
                "\nThe scene {scene} failed to run with the unmodified code: {why}.\n"
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
    fn each_wrong_version_has_a_name_of_its_own_and_a_scene() {
        let names: std::collections::HashSet<&str> = MUTANTS.iter().map(|it| it.name).collect();
        assert_eq!(names.len(), 12);
        for mutant in &MUTANTS {
            assert!(
                SCENES
                    .iter()
                    .chain([&ANOTHER_CHANNEL])
                    .any(|scene| scene.0 == mutant.scene),
                "{}",
                mutant.scene
            );
        }
    }

    #[test]
    fn one_that_survives_and_a_right_version_that_breaks_are_red() {
        let broken = |by: &[Invariant]| by.iter().map(|it| (*it, 2)).collect::<BTreeMap<_, _>>();
        let outcome = |by: &[Invariant]| Outcome {
            name: "accept-a-busy".into(),
            text: "accepts".into(),
            scene: "crash-beside-copies".into(),
            breaks: Invariant::I9,
            by: broken(by),
            tries: 1,
        };
        let caught = |by: &[Invariant], right: &[Invariant]| Caught {
            mutants: vec![outcome(&[Invariant::I9]), outcome(by)],
            right: BTreeMap::from([("crash-beside-copies".to_owned(), broken(right))]),
            ..Caught::default()
        };
        assert!(
            caught(&[Invariant::I1, Invariant::I9], &[]).is_right()
                && !Caught::default().is_right()
        );
        assert!(
            !caught(&[], &[]).is_right() && caught(&[], &[]).to_markdown().contains("**nothing**")
        );
        let of_another = caught(&[Invariant::I1], &[]);
        assert!(
            !of_another.is_right() && of_another.to_markdown().contains("| I9 | **I1 × 2** |"),
            "{}",
            of_another.to_markdown()
        );
        assert!(!caught(&[Invariant::I9], &[Invariant::I4]).is_right());
        let unplayed = BTreeMap::from([("late-clear".to_owned(), "no server".to_owned())]);
        assert!(
            !Caught {
                unplayed,
                ..caught(&[Invariant::I9], &[])
            }
            .is_right()
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
