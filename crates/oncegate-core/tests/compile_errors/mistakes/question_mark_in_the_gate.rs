//! `?` in the work of a gate, on an error that does not say whether the effect happened.

use oncegate_core::{Gate, GateError, RunOutcome};

pub async fn settle(gate: &Gate) -> Result<RunOutcome<String>, GateError> {
    gate.run("2026-11-20", || async {
        Ok(std::fs::read_to_string("entries.txt")?)
    })
    .await
}

fn main() {}
