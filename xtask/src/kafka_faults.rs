//! `kafka-faults`: the long-running tests with faults of Kafka brokers and group members.

use crate::Error;
use crate::setup;
use crate::test;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Runs only the scenarios whose names contain this, such as `members` or `memory`.
    scenario: Option<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut cargo = setup::cargo();
    cargo.args([
        "test",
        "--package",
        "oncegate-tests",
        "--test",
        "kafka_faults",
    ]);
    // One at a time, so that concurrent tests do not distort the measured times.
    cargo
        .args(["--", "--ignored", "--nocapture", "--test-threads", "1"])
        .args(&arguments.scenario);
    setup::run()?;
    test::with_servers(vec![cargo])
}
