//! `bench`: compares oncegate with the plain clients, and counts instructions per message.

mod guard;

use crate::stopping::StopSignals;
use crate::{Error, chaos, setup};

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Counts instructions per message with a memory broker and store; fails if they exceed the
    /// recorded baseline by more than 10 %.
    #[arg(long)]
    guard: bool,
    /// Records the counts as the new baseline.
    #[arg(long, requires = "guard")]
    record: bool,
    /// Arguments of the benchmark program: see `cargo xtask bench --help`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(
    Arguments {
        guard,
        record,
        arguments,
    }: &Arguments,
) -> Result<(), Error> {
    let stopping = StopSignals::on_signals()?;
    setup::run()?;
    stopping.check()?;
    if *guard {
        return guard::run(if *record {
            guard::BaselineMode::Record
        } else {
            guard::BaselineMode::Compare
        });
    }
    let shown = format!("oncegate-bench {}", arguments.join(" "));
    let mut cargo = setup::cargo();
    // The opt-level with which users of oncegate build SQLite; this workspace lowers it to build
    // faster.
    cargo.args([
        "run",
        "--config",
        "profile.release.package.libsqlite3-sys.opt-level=3",
    ]);
    cargo
        .args(["--release", "--package", "oncegate-bench", "--"])
        .args(arguments);
    chaos::wait(cargo, &shown, &stopping)
}
