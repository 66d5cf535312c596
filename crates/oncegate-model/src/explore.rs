//! Goes through every state of a trial, and says whether it is as it should be.

use std::time::Instant;

use oncegate_core::Outage;
use oncegate_core::driver::OnRelease;
use oncegate_core::marker::Guarantee;
use stateright::{Checker, Model};

use crate::story;
use crate::trial::{Rules, Setup, Trial};

/// What is to come of a trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Every property holds.
    Holds,
    /// The property whose name begins so is violated.
    Violated(&'static str),
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// What is tried.
    pub setup: Setup,
    /// What is to come of it.
    pub expected: Expected,
}

impl Line {
    /// A line that holds.
    pub fn holds(setup: Setup) -> Self {
        Self {
            setup,
            expected: Expected::Holds,
        }
    }

    /// A line that violates this property.
    pub fn violates(setup: Setup, property: &'static str) -> Self {
        Self {
            setup,
            expected: Expected::Violated(property),
        }
    }
}

/// The head of the table.
pub fn head() -> String {
    format!(
        "{:<17} {:<90} {:<9} {:>11} {:>6}",
        "mode", "fault budget", "verdict", "states", "s"
    )
}

/// Explores a line with these rules, prints it, and the way into trouble where there is one.
/// Whether it is as expected.
pub fn explore(line: &Line, rules: Rules) -> bool {
    let started = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, |it| it.get());
    let (only, threads) = match line.expected {
        Expected::Holds => ("", threads),
        // One thread finds the shortest way into trouble.
        Expected::Violated(what) => (what, 1),
    };
    let checker = Trial::new(line.setup, rules, only)
        .checker()
        .threads(threads)
        .spawn_bfs()
        .join();
    let mut found: Vec<_> = checker.discoveries().into_iter().collect();
    found.sort_by_key(|(_, path)| path.clone().into_vec().len());
    let verdict = if found.is_empty() {
        "holds"
    } else {
        "violated"
    };
    let seconds = started.elapsed().as_secs_f64();
    let (mode, trouble) = (mode(line.setup.guarantees), trouble(&line.setup));
    println!(
        "{mode:<17} {trouble:<90} {verdict:<9} {:>11} {seconds:>6.1}",
        checker.unique_state_count()
    );
    let as_expected = match line.expected {
        Expected::Holds => found.is_empty(),
        Expected::Violated(_) => !found.is_empty(),
    };
    if let Some((property, path)) = found.into_iter().next() {
        println!("    {property}:");
        for (number, line) in story::tell(path).into_iter().enumerate() {
            println!("    {:>3}. {line}", number + 1);
        }
    }
    if !as_expected {
        println!("    UNEXPECTED");
    }
    as_expected
}

fn mode(guarantees: [Guarantee; 2]) -> &'static str {
    match guarantees {
        [Guarantee::AtMostOnce, Guarantee::AtMostOnce] => "at-most-once",
        [Guarantee::EffectivelyOnce, Guarantee::EffectivelyOnce] => "effectively-once",
        [Guarantee::Bare, Guarantee::Bare] => "bare",
        _ => "one of each",
    }
}

fn trouble(setup: &Setup) -> String {
    let mut text = setup.budget.to_string();
    if setup.attempts != 3 {
        text += &format!("; {} attempts", setup.attempts);
    }
    if setup.budget.people > 0 && setup.guarantees[0] != setup.guarantees[1] {
        // A person's tool is configured as one of the two is.
        text += if setup.guarantees[0] == Guarantee::AtMostOnce {
            "; tool at most once"
        } else {
            "; tool effectively once"
        };
    }
    if setup.keeps == OnRelease::KeepPlace {
        text += "; in order";
    }
    if setup.outage == Outage::PassThrough {
        text += "; passing through";
    }
    text
}
