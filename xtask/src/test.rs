//! `test`: runs the workspace's tests against real servers.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use oncegate_testkit::Servers;
use oncegate_testkit::servers::ProcessId;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::Error;
use crate::setup;
use crate::stopping::Stopping;

/// The variable that marks every process of a test run; its value identifies the run.
const RUN: &str = "ONCEGATE_TEST_RUN";
/// The variable with the number of concurrent tests. By default two for each core, since tests
/// mostly wait for servers.
const THREADS: &str = "RUST_TEST_THREADS";
/// How long a process left by a test may take to end after SIGTERM before it is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Runs only the tests whose names contain this.
    filter: Option<String>,
    /// Runs only the tests of this package; may be given several times.
    #[arg(short, long = "package", value_name = "NAME")]
    packages: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    with_servers(cargo_test(arguments))
}

/// Runs a command with the addresses of the servers in its environment.
pub(crate) fn with_servers(mut cargo: Command) -> Result<(), Error> {
    let stopping = Stopping::on_signals()?;
    setup::run()?;
    stopping.check()?;

    println!("test: starting the servers that have no address in the environment");
    let servers = Servers::from_env_or_start()?;
    stopping.check()?;
    for (variable, address) in servers.variables() {
        println!("test: {variable}={address}");
    }

    let run = std::process::id().to_string();
    // Tests that a signal ends do not remove their files; dropping this directory does.
    let temporary = tempfile::Builder::new()
        .prefix("oncegate-test-")
        .tempdir()
        .map_err(Error::Temporary)?;
    cargo
        .envs(servers.variables())
        .env(RUN, &run)
        .env("TMPDIR", temporary.path());
    let shown = shown(&cargo);
    println!("test: {shown}");
    // A separate process group, to send a signal to cargo and the tests together.
    let child = cargo.process_group(0).stdin(Stdio::null()).spawn();
    let mut child = child.map_err(|source| Error::CannotRun {
        program: shown.clone(),
        source,
    })?;
    let outcome = wait(&mut child, &shown, &stopping);
    stop_leftover_processes(&run);
    println!("test: stopping the servers that were started");
    drop(servers);
    outcome
}

fn cargo_test(arguments: &Arguments) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args(["test", "--all-features", "--no-fail-fast"])
        .current_dir(setup::root());
    if arguments.packages.is_empty() {
        cargo.arg("--workspace");
    }
    for package in &arguments.packages {
        cargo.args(["--package", package]);
    }
    if std::env::var_os(THREADS).is_none() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        cargo.env(THREADS, (2 * cores).to_string());
    }
    if let Some(filter) = &arguments.filter {
        cargo.arg("--").arg(filter);
    }
    cargo
}

fn shown(command: &Command) -> String {
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    format!("cargo {}", words.join(" "))
}

fn wait(child: &mut Child, shown: &str, stopping: &Stopping) -> Result<(), Error> {
    let cannot = |source| Error::CannotRun {
        program: shown.to_owned(),
        source,
    };
    loop {
        if let Some(status) = child.try_wait().map_err(cannot)? {
            return if status.success() {
                Ok(())
            } else {
                Err(Error::Failed(shown.to_owned()))
            };
        }
        if stopping.is_requested() {
            eprintln!("test: stopping");
            let _ = kill_process_group(Pid::from_child(child), Signal::TERM);
            child.wait().map_err(cannot)?;
            return Err(Error::Stopped);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Stops the processes whose environment has the id of this run: tests that a signal ended do not
/// stop their child processes.
fn stop_leftover_processes(run: &str) {
    let marker = format!("{RUN}={run}");
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for number in numbers.filter(|number| *number != std::process::id()) {
        let environment = std::fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
        let is_of_this_run = environment
            .split(|byte| *byte == 0)
            .any(|variable| variable == marker.as_bytes());
        if let (true, Some(process)) = (is_of_this_run, ProcessId::running(number)) {
            eprintln!("test: stopping process {number}, left running by a test");
            process.stop(STOP_TIMEOUT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn only_leftover_processes_of_this_run_are_stopped() {
        let sleep = |run: &str| {
            Command::new("setsid")
                .args(["sleep", "60"])
                .env(RUN, run)
                .spawn()
                .unwrap()
        };
        let run = format!("unit-{}", std::process::id());
        let (mut ours, mut other) = (sleep(&run), sleep("unit-of-another"));
        // The variable is in the environment of the child only after `exec`, a moment after its
        // name has changed.
        let of_ours = |what: &str| std::fs::read(format!("/proc/{}/{what}", ours.id())).unwrap();
        while !of_ours("comm").starts_with(b"sleep") || of_ours("environ").is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }

        stop_leftover_processes(&run);

        assert_eq!(ours.wait().unwrap().signal(), Some(15));
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
