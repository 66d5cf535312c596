//! Explores every interleaving of a small world in which oncegate's two pure functions run, and prints what it saw.
//!
//! `oncegate-model [--deep]`: exit status 0 if every line is as it should be: what promises holds, and what promises
//! nothing is seen to break.
#![forbid(unsafe_code)]

mod model;
mod story;
mod world;

use std::process::ExitCode;
use std::time::Instant;

use oncegate_core::marker::Guarantee;
use stateright::{Checker, Model};

use crate::model::Trial;
use crate::world::{Budget, mode};

/// How much trouble is allowed for at once.
#[derive(Clone, Copy, PartialEq)]
enum HowFar {
    /// What fits into a minute.
    AMinute,
    /// Everything once, together: some 33 million states, and as many as memory holds.
    Deep,
}

/// What a line of the table is to say.
#[derive(Clone, Copy, PartialEq)]
enum Expected {
    Holds,
    /// With a property whose name begins so.
    Violated(&'static str),
}

fn main() -> ExitCode {
    let how_far = match std::env::args().nth(1).as_deref() {
        None => HowFar::AMinute,
        Some("--deep") => HowFar::Deep,
        Some(_) => {
            eprintln!("usage: oncegate-model [--deep]");
            return ExitCode::from(2);
        }
    };
    println!("{:<17} {:<78} {:<9} {:>11} {:>6}", "mode", "at most so much trouble", "verdict", "states", "s");
    let mut right = true;
    for (guarantees, budget, expected) in lines(how_far) {
        right &= explore(guarantees, budget, expected);
    }
    println!("{}", if right { "every line is as it should be" } else { "NOT as it should be" });
    if right { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn explore(guarantees: [Guarantee; 2], budget: Budget, expected: Expected) -> bool {
    let started = Instant::now();
    // One thread finds the shortest way into trouble.
    let (only, threads) = match expected {
        Expected::Holds => ("", std::thread::available_parallelism().map_or(1, |it| it.get())),
        Expected::Violated(what) => (what, 1),
    };
    let checker = Trial::new(guarantees, budget, only).checker().threads(threads).spawn_bfs().join();
    let found = checker.discoveries();
    let verdict = if found.is_empty() { "holds" } else { "violated" };
    let seconds = started.elapsed().as_secs_f64();
    println!("{:<17} {:<78} {verdict:<9} {:>11} {seconds:>6.1}", mode(guarantees), budget.to_string(), checker.unique_state_count());
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(_, path)| path.clone().into_vec().len());
    let as_expected = match expected {
        Expected::Holds => found.is_empty(),
        Expected::Violated(what) => found.iter().any(|(property, _)| property.starts_with(what)),
    };
    if let Some((property, path)) = found.into_iter().find(|(property, _)| match expected {
        Expected::Holds => true,
        Expected::Violated(what) => property.starts_with(what),
    }) {
        println!("    {property}:");
        for (number, line) in story::tell(path).into_iter().enumerate() {
            println!("    {:>3}. {line}", number + 1);
        }
    }
    if !as_expected {
        println!("    NOT as it should be");
    }
    as_expected
}

fn lines(how_far: HowFar) -> Vec<([Guarantee; 2], Budget, Expected)> {
    use Expected::{Holds, Violated};
    use Guarantee::{AtMostOnce, Bare, EffectivelyOnce};
    let none = Budget::default();
    let each = [
        Budget { losses: 1, ..none },
        Budget { crashes: 1, ..none },
        Budget { copies: 1, failures: 1, ..none },
        Budget { copies: 1, unknowns: 1, ..none },
    ];
    let mut lines = vec![([Bare; 2], none, Holds)];
    for (budget, what) in each.into_iter().zip(["lost", "lost", "lost", "doubled"]) {
        lines.push(([Bare; 2], budget, Violated(what)));
    }
    let together = [
        Budget { crashes: 1, losses: 1, expiries: 1, failures: 1, copies: 1, ..none },
        Budget { crashes: 1, losses: 1, expiries: 1, unknowns: 1, copies: 1, ..none },
        Budget { crashes: 1, losses: 1, expiries: 1, unknowns: 1, drains: 1, ..none },
        Budget { losses: 2, expiries: 2, copies: 1, ..none },
    ];
    let all = Budget { crashes: 1, losses: 1, expiries: 1, failures: 1, unknowns: 1, copies: 1, drains: 1, forgotten: 0 };
    for guarantee in [AtMostOnce, EffectivelyOnce] {
        for budget in each.into_iter().chain(together) {
            lines.push(([guarantee; 2], budget, Holds));
        }
        if how_far == HowFar::Deep {
            lines.push(([guarantee; 2], all, Holds));
        }
    }
    // While consumers with the one guarantee replace consumers with the other: what both promise.
    for (place, budget) in together.into_iter().enumerate() {
        if place % 2 == 0 || how_far == HowFar::Deep {
            lines.push(([AtMostOnce, EffectivelyOnce], budget, Holds));
        }
    }
    // What no store-side design can give: an effect that is not idempotent does not survive a marker that is forgotten.
    lines.push(([AtMostOnce; 2], Budget { forgotten: 1, copies: 1, ..none }, Violated("doubled")));
    lines.push(([EffectivelyOnce; 2], Budget { forgotten: 1, copies: 1, ..none }, Violated("started after it was done")));
    lines
}

impl std::fmt::Display for Budget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { crashes, losses, expiries, failures, unknowns, copies, drains, forgotten } = *self;
        let parts = [
            (crashes, "crash", "crashes"),
            (losses, "lost reply", "lost replies"),
            (expiries, "expiry", "expiries"),
            (failures, "failure", "failures"),
            (unknowns, "unknown outcome", "unknown outcomes"),
            (copies, "redelivery", "redeliveries"),
            (drains, "drain", "drains"),
            (forgotten, "lost marker", "lost markers"),
        ];
        let parts = parts.into_iter().filter(|(count, ..)| *count > 0);
        let named: Vec<String> = parts.map(|(count, one, many)| format!("{count} {}", if count == 1 { one } else { many })).collect();
        f.pad(&if named.is_empty() { "none".into() } else { named.join(", ") })
    }
}
