//! `bench`: the bare clients and oncegate by turns, and how many instructions a message costs.

mod guard;

use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::setup;
use crate::stopping::Stopping;

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Counts the instructions of a message's way in memory, and fails where they are a tenth more
    /// than was recorded.
    #[arg(long)]
    guard: bool,
    /// Records what the guard counts.
    #[arg(long, requires = "guard")]
    record: bool,
    /// Those of the program: `cargo xtask bench --help`.
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
    let stopping = Stopping::on_signals()?;
    setup::run()?;
    stopping.go_on()?;
    if *guard {
        return guard::run(if *record {
            guard::Counted::IsRecorded
        } else {
            guard::Counted::IsCompared
        });
    }
    let shown = format!("oncegate-bench {}", arguments.join(" "));
    let cannot = |source| Error::CannotRun {
        program: shown.clone(),
        source,
    };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // SQLite as whoever depends on oncegate builds it; this workspace saves time there for the
    // demo.
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
    let mut told = false;
    loop {
        if let Some(status) = child.try_wait().map_err(cannot)? {
            return if status.success() {
                Ok(())
            } else {
                Err(Error::Failed(shown))
            };
        }
        if stopping.is_told() && !told {
            // It stops its servers first; a second word would change nothing.
            told = true;
            let _ = kill_process(Pid::from_child(&child), Signal::TERM);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
