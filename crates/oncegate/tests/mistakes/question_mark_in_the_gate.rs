//! `?` in the work of a gate, on an error that does not say whether the effect happened.
// error: say what is known: `.retry()?` if nothing happened, `.reject()?` if it will never work, `.in_doubt()?` if it may have happened

use oncegate::{Gate, GateError, RunOutcome};

pub async fn settle(gate: &Gate) -> Result<RunOutcome<String>, GateError> {
    gate.run("2026-11-20", || async { Ok(std::fs::read_to_string("entries.txt")?) }).await
}

fn main() {}
