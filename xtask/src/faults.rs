//! `faults`: repeats RabbitMQ faults (restarts, closed connections, cancelled consumers) under
//! load.

use crate::Error;
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Runs only the scenarios whose names contain this, such as `ten_thousand` or `cluster`.
    scenario: Option<String>,
    /// How often each fault is repeated.
    #[arg(long, default_value_t = 10)]
    rounds: u32,
    /// Published messages per second.
    #[arg(long, default_value_t = 2_000)]
    rate: u32,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut cargo = setup::cargo();
    cargo
        .args([
            "test",
            "--package",
            "oncegate-amqp",
            "--test",
            "faults",
            "--",
        ])
        .args(["--include-ignored", "--nocapture", "--test-threads", "1"])
        .args(&arguments.scenario)
        .env("ONCEGATE_FAULT_ROUNDS", arguments.rounds.to_string())
        .env("ONCEGATE_FAULT_RATE", arguments.rate.to_string());
    setup::run_program(&mut cargo)
}
