//! Prints the results of the model checker.
//!
//! Usage: `oncegate-model [--deep]`. The exit status is 0 if every line has the expected result:
//! either all properties hold, or the line violates the expected property.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use oncegate_model::lines::{Depth, lines};
use oncegate_model::{Rules, explore, head};

fn main() -> ExitCode {
    let depth = match std::env::args().nth(1).as_deref() {
        None => Depth::Minutes,
        Some("--deep") => Depth::Deep,
        Some(_) => {
            eprintln!("usage: oncegate-model [--deep]");
            return ExitCode::from(2);
        }
    };
    println!("{}", head());
    let mut as_expected = true;
    for line in lines(depth) {
        as_expected &= explore(&line, Rules::default());
    }
    println!(
        "{}",
        if as_expected {
            "every line has the expected result"
        } else {
            "UNEXPECTED results"
        }
    );
    if as_expected {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
