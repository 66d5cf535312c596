//! `chaos`: injects faults into real servers and checks the guarantees.

use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::patched_source::patched_source;
use crate::setup;
use crate::stopping::StopSignals;

#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Arguments of the program: see `cargo xtask chaos --help`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

pub(crate) fn run(Arguments { arguments }: &Arguments) -> Result<(), Error> {
    let stopping = StopSignals::on_signals()?;
    setup::run()?;
    stopping.check()?;
    let has = |wanted: &str| arguments.iter().any(|argument| argument == wanted);
    // Crash points need a separate build, and mutants a patched copy of the source. A soak test
    // uses a release build; a single run uses a debug build, which starts sooner.
    let mut program = if has("--matrix") || has("--mutants") {
        let mut cargo = cargo(&["run", "--quiet", "--package", "oncegate-chaos"]);
        if has("--mutants") {
            let manifest =
                patched_source("tests/chaos/mutants.patch", "target/chaos-build/mutants")?;
            cargo
                .arg("--manifest-path")
                .arg(manifest.join("Cargo.toml"));
        }
        let flags = std::env::var("RUSTFLAGS").unwrap_or_default();
        cargo.env("RUSTFLAGS", format!("{flags} --cfg oncegate_chaos").trim());
        cargo
            .arg("--target-dir")
            .arg(setup::root().join("target/chaos-build"))
            .arg("--");
        cargo
    } else if has("--soak") {
        cargo(&[
            "run",
            "--quiet",
            "--package",
            "oncegate-chaos",
            "--release",
            "--",
        ])
    } else {
        // The same flags as for the tests of the workspace, so that their build is reused.
        let build = [
            "test",
            "--quiet",
            "--workspace",
            "--all-features",
            "--no-run",
            "--test",
            "program",
        ];
        wait(
            cargo(&build),
            &format!("cargo {}", build.join(" ")),
            &stopping,
        )?;
        stopping.check()?;
        let target = setup::target_directory();
        Command::new(target.join("debug/oncegate-chaos"))
    };
    program.args(arguments);
    let shown = format!("oncegate-chaos {}", arguments.join(" "));
    wait(program, &shown, &stopping)
}

fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = setup::cargo();
    cargo.args(arguments);
    cargo
}

/// Runs a program to its end; forwards a stop signal as SIGTERM.
pub(crate) fn wait(mut command: Command, shown: &str, stopping: &StopSignals) -> Result<(), Error> {
    let cannot = |source| Error::CannotRun {
        program: shown.to_owned(),
        source,
    };
    let mut child = command
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
                Err(Error::Failed(shown.to_owned()))
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
