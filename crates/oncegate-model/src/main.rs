//! Prints what the model has seen.
//!
//! `oncegate-model [--deep]`: exit status 0 if every line is as it should be: what promises holds,
//! and what promises nothing is seen to break.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use oncegate_model::lines::{HowFar, lines};
use oncegate_model::{Rules, explore, head};

fn main() -> ExitCode {
    let how_far = match std::env::args().nth(1).as_deref() {
        None => HowFar::Minutes,
        Some("--deep") => HowFar::Deep,
        Some(_) => {
            eprintln!("usage: oncegate-model [--deep]");
            return ExitCode::from(2);
        }
    };
    println!("{}", head());
    let mut right = true;
    for line in lines(how_far) {
        right &= explore(&line, Rules::default());
    }
    println!(
        "{}",
        if right {
            "every line is as it should be"
        } else {
            "NOT as it should be"
        }
    );
    if right {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
