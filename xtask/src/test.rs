//! `test`: the workspace's tests with real servers around them.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use oncegate_testkit::Servers;
use oncegate_testkit::servers::ProcessId;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::Error;
use crate::setup;
use crate::stopping::Stopping;

/// A name for this run in the environment of everything that the tests start.
const RUN: &str = "ONCEGATE_TEST_RUN";
/// How many tests run at the same time. They wait for servers most of the time: two for each core
/// finish in half the time.
const THREADS: &str = "RUST_TEST_THREADS";
/// How long what the tests left behind may take to end in good order.
const STOP_PATIENCE: Duration = Duration::from_secs(5);

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

/// Runs this with the servers in its environment.
pub(crate) fn with_servers(mut cargo: Command) -> Result<(), Error> {
    let stopping = Stopping::on_signals()?;
    setup::run()?;
    stopping.go_on()?;

    println!("test: starting the servers that have no address in the environment");
    let servers = Servers::from_env_or_start()?;
    stopping.go_on()?;
    for (variable, address) in servers.variables() {
        println!("test: {variable}={address}");
    }

    let run = std::process::id().to_string();
    // A test that is ended by a signal removes nothing; this goes with all that is in it.
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
    // A group of its own: a signal is passed on to cargo and to the tests together.
    let child = cargo.process_group(0).stdin(Stdio::null()).spawn();
    let mut child = child.map_err(|source| Error::CannotRun {
        program: shown.clone(),
        source,
    })?;
    let outcome = wait(&mut child, &shown, &stopping);
    stop_what_is_left(&run);
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
        if stopping.is_told() {
            eprintln!("test: stopping");
            let _ = kill_process_group(Pid::from_child(child), Signal::TERM);
            child.wait().map_err(cannot)?;
            return Err(Error::Stopped);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A test that was ended by a signal has stopped nothing: whatever bears this run's name is its.
fn stop_what_is_left(run: &str) {
    let marker = format!("{RUN}={run}");
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for number in numbers.filter(|number| *number != std::process::id()) {
        let environment = std::fs::read(format!("/proc/{number}/environ")).unwrap_or_default();
        let is_ours = environment
            .split(|byte| *byte == 0)
            .any(|variable| variable == marker.as_bytes());
        if let (true, Some(process)) = (is_ours, ProcessId::running(number)) {
            eprintln!("test: stopping process {number}, which a test has left behind");
            process.stop(STOP_PATIENCE);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn what_a_test_leaves_behind_is_stopped_and_nothing_else() {
        let sleep = |run: &str| {
            Command::new("setsid")
                .args(["sleep", "60"])
                .env(RUN, run)
                .spawn()
                .unwrap()
        };
        let run = format!("unit-{}", std::process::id());
        let (mut ours, mut other) = (sleep(&run), sleep("unit-of-another"));
        // The marker is in the environment of the child only once it has become another program, a
        // moment after it has its name.
        let of_ours = |what: &str| std::fs::read(format!("/proc/{}/{what}", ours.id())).unwrap();
        while !of_ours("comm").starts_with(b"sleep") || of_ours("environ").is_empty() {
            std::thread::sleep(Duration::from_millis(5));
        }

        stop_what_is_left(&run);

        assert_eq!(ours.wait().unwrap().signal(), Some(15));
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
