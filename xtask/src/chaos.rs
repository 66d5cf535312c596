//! `chaos`: real faults on real servers, and what becomes of messages.

use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::setup;
use crate::stopping::Stopping;

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Those of the program: `cargo xtask chaos --help`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(Arguments { arguments }: &Arguments) -> Result<(), Error> {
    let stopping = Stopping::on_signals()?;
    setup::run()?;
    stopping.go_on()?;
    let shown = format!("oncegate-chaos {}", arguments.join(" "));
    let cannot = |source| Error::CannotRun { program: shown.clone(), source };
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["run", "--quiet", "--package", "oncegate-chaos"]);
    // A soak is as fast as its processes are; a single run should start soon.
    if arguments.iter().any(|argument| argument == "--soak") {
        cargo.arg("--release");
    }
    // Points at which a process ends and wrong versions are in a build of their own, and in no other.
    if arguments.iter().any(|argument| argument == "--matrix" || argument == "--mutants") {
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        cargo
            .env("RUSTFLAGS", format!("{flags} --cfg oncegate_chaos").trim())
            .arg("--target-dir")
            .arg(setup::root().join("target/chaos-build"));
    }
    cargo.arg("--").args(arguments).current_dir(setup::root()).stdin(Stdio::null());
    let mut child = cargo.spawn().map_err(cannot)?;
    let mut told = false;
    loop {
        if let Some(status) = child.try_wait().map_err(cannot)? {
            return if status.success() { Ok(()) } else { Err(Error::Failed(shown)) };
        }
        if stopping.is_told() && !told {
            // It stops its servers first; a second word would change nothing.
            told = true;
            let _ = kill_process(Pid::from_child(&child), Signal::TERM);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
