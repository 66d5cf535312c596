//! `chaos`: injects faults into real servers and checks the guarantees.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
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
            let manifest = patched_source()?.join("Cargo.toml");
            cargo.arg("--manifest-path").arg(manifest);
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
        let target = std::env::var_os("CARGO_TARGET_DIR")
            .map_or_else(|| setup::root().join("target"), PathBuf::from);
        Command::new(target.join("debug/oncegate-chaos"))
    };
    program.args(arguments);
    let shown = format!("oncegate-chaos {}", arguments.join(" "));
    wait(program, &shown, &stopping)
}

/// Copies the source to `target/chaos-build/mutants`, and applies the patch that adds the mutants:
/// broken behaviour that the harness must detect. An environment variable selects the mutant.
fn patched_source() -> Result<PathBuf, Error> {
    let into = setup::root().join("target/chaos-build/mutants");
    let shown = "git ls-files";
    let cannot_run = |source| Error::CannotRun {
        program: shown.to_owned(),
        source,
    };
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(setup::root())
        .output()
        .map_err(cannot_run)?;
    if !listed.status.success() {
        return Err(Error::Failed(shown.to_owned()));
    }
    for file in String::from_utf8_lossy(&listed.stdout).split_terminator('\0') {
        copy_if_changed(&setup::root().join(file), &into.join(file)).map_err(cannot_run)?;
    }
    let mut apply = Command::new("git");
    apply
        .arg("apply")
        .arg(setup::root().join("tests/chaos/mutants.patch"))
        .current_dir(&into)
        // Inside the repository, git would skip files outside the current directory.
        .env(
            "GIT_CEILING_DIRECTORIES",
            setup::root().join("target/chaos-build"),
        );
    setup::run_program(&mut apply)?;
    Ok(into)
}

/// Copies a file unless the copy is equal. Cargo does not build an unchanged copy again, because
/// its modification time stays the same.
fn copy_if_changed(from: &Path, to: &Path) -> std::io::Result<()> {
    let Ok(content) = std::fs::read(from) else {
        return Ok(()); // deleted in the working tree
    };
    if std::fs::read(to).is_ok_and(|old| old == content) {
        return Ok(());
    }
    if let Some(directory) = to.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(to, content)
}

fn cargo(arguments: &[&str]) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(arguments);
    cargo
}

/// Runs a program to its end; forwards a stop signal as SIGTERM.
fn wait(mut command: Command, shown: &str, stopping: &StopSignals) -> Result<(), Error> {
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
