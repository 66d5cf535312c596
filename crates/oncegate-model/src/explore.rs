//! Explores every state of a model and compares the violated properties with the expected ones.

use std::time::Instant;

use oncegate_core::Outage;
use oncegate_core::marker::Guarantee;
use stateright::{Checker, Model};

use crate::system::{EffectsIn, RetriesWait, Rules, Setup, SystemModel};
use crate::trace;

/// The expected result of a [`Line`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Every property holds.
    Holds,
    /// The property whose name starts with this is violated.
    Violated(&'static str),
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// The explored system and its fault budget.
    pub setup: Setup,
    /// The expected result.
    pub expected: Expected,
}

impl Line {
    /// A line in which every property must hold.
    pub fn holds(setup: Setup) -> Self {
        Self {
            setup,
            expected: Expected::Holds,
        }
    }

    /// A line that must violate the property whose name starts with `property`.
    pub fn violates(setup: Setup, property: &'static str) -> Self {
        Self {
            setup,
            expected: Expected::Violated(property),
        }
    }
}

/// The header of the table.
pub fn head() -> String {
    format!(
        "{:<20} {:<90} {:<9} {:>11} {:>6}",
        "guarantee", "fault budget", "verdict", "states", "s"
    )
}

/// Explores a line with these rules and prints the result, with the shortest path to a violation if
/// there is one. Returns whether the result is the expected one.
pub fn explore(line: &Line, rules: Rules) -> bool {
    let started = Instant::now();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (only, threads) = match line.expected {
        Expected::Holds => ("", threads),
        // Only a search with one thread always finds the shortest path to the violation.
        Expected::Violated(property) => (property, 1),
    };
    let checker = SystemModel::new(line.setup, rules, only)
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
    let (guarantee, faults) = (guarantee_name(&line.setup), fault_budget(&line.setup));
    println!(
        "{guarantee:<20} {faults:<90} {verdict:<9} {:>11} {seconds:>6.1}",
        checker.unique_state_count()
    );
    let as_expected = match line.expected {
        Expected::Holds => found.is_empty(),
        Expected::Violated(_) => !found.is_empty(),
    };
    if let Some((property, path)) = found.into_iter().next() {
        println!("    {property}:");
        for (number, line) in trace::lines(path).into_iter().enumerate() {
            println!("    {:>3}. {line}", number + 1);
        }
    }
    if !as_expected {
        println!("    UNEXPECTED: the expected result is {:?}", line.expected);
    }
    as_expected
}

fn guarantee_name(setup: &Setup) -> &'static str {
    if setup.effects == EffectsIn::Inbox {
        return "inbox";
    }
    match setup.guarantees {
        [Guarantee::AtMostOnce, Guarantee::AtMostOnce] => "at-most-once",
        [Guarantee::EffectivelyOnce, Guarantee::EffectivelyOnce] => "effectively-once",
        [Guarantee::Bare, Guarantee::Bare] => "bare",
        _ => "one consumer of each",
    }
}

fn fault_budget(setup: &Setup) -> String {
    let mut text = setup.budget.to_string();
    if setup.attempts != 3 {
        let plural = if setup.attempts == 1 { "" } else { "s" };
        text += &format!("; {} attempt{plural}", setup.attempts);
    }
    if setup.budget.operator_actions > 0 && setup.guarantees[0] != setup.guarantees[1] {
        // The operator's tool has the configuration of the first consumer.
        text += if setup.guarantees[0] == Guarantee::AtMostOnce {
            "; tool at most once"
        } else {
            "; tool effectively once"
        };
    }
    if setup.retries == RetriesWait::InConsumer {
        text += "; retries in the consumer";
    }
    if setup.outage == Outage::PassThrough {
        text += "; passing through";
    }
    text
}
