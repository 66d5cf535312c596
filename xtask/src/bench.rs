//! `bench`: compares oncegate with the plain clients, and counts instructions per message.

mod guard;

use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::setup;
use crate::stopping::StopSignals;

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
    let cannot = |source| Error::CannotRun {
        program: shown.clone(),
        source,
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
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
    let mut child = cargo
        .current_dir(setup::root())
        .stdin(Stdio::null())
        .spawn()
        .map_err(cannot)?;
    let mut signal_sent = false;
    loop {
        if let Some(status) = child.try_wait().map_err(cannot)? {
            return if status.success() {
                Ok(())
            } else {
                Err(Error::Failed(shown))
            };
        }
        if stopping.is_requested() && !signal_sent {
            // One SIGTERM, after which the program stops its servers and ends.
            signal_sent = true;
            let _ = kill_process(Pid::from_child(&child), Signal::TERM);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
