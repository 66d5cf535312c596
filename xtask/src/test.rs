//! `test`: runs the workspace's tests against real servers.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Seek;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use cargo_metadata::MetadataCommand;
use oncegate_testkit::Servers;
use oncegate_testkit::servers::ProcessId;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::Error;
use crate::setup;
use crate::stopping::StopSignals;

/// The environment variable that every process of a test run inherits; its value identifies the
/// run.
const RUN: &str = "ONCEGATE_TEST_RUN";
/// The environment variable with the number of concurrent tests of a program. If it is not set,
/// [`cargo_test`] sets two for each core, because tests mostly wait for servers.
const THREADS: &str = "RUST_TEST_THREADS";
/// How long a process may take to end after SIGTERM; then it gets SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit of a test program whose output is not shown. A program that exceeds it is stopped
/// and counts as failed.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(15 * 60);
/// The test programs that take longest. They start first, so that none runs alone at the end.
const LONGEST_FIRST: [&str; 8] = [
    "cli",
    "kafka",
    "redis",
    "amqp",
    "end_to_end",
    "faults",
    "readme",
    "postgres",
];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Runs only the tests whose names contain this.
    filter: Option<String>,
    /// Runs only the tests of this package; may be given several times.
    #[arg(short, long = "package", value_name = "NAME")]
    packages: Vec<String>,
    /// Runs only this test program, such as `amqp` or `redis`; may be given several times.
    #[arg(long = "test", value_name = "NAME", conflicts_with = "packages")]
    programs: Vec<String>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    setup::run()?;
    if let Some(filter) = &arguments.filter {
        let mut cargo = cargo_test(arguments, &arguments.programs);
        cargo.arg("--").arg(filter);
        return with_servers(vec![cargo]);
    }
    setup::run_program(cargo_test(arguments, &arguments.programs).arg("--no-run"))?;
    with_servers(by_target(arguments)?)
}

/// Runs commands with the addresses of the servers in their environment. The output of a single
/// command is shown while it runs; that of several, which run side by side, after the end of each.
pub(crate) fn with_servers(mut commands: Vec<Command>) -> Result<(), Error> {
    let stopping = StopSignals::on_signals()?;
    println!("test: starting the servers that have no address in the environment");
    let servers = Servers::from_env_or_start()?;
    stopping.check()?;
    for (variable, address) in servers.variables() {
        println!("test: {variable}={address}");
    }

    let run = std::process::id().to_string();
    // Tests that a signal ends do not remove their temporary files. Dropping this directory does.
    let temporary = tempfile::Builder::new()
        .prefix("oncegate-test-")
        .tempdir()
        .map_err(Error::Temporary)?;
    for command in &mut commands {
        command
            .envs(servers.variables())
            .env(RUN, &run)
            .env("TMPDIR", temporary.path());
    }
    let outcome = run_all(commands, &stopping);
    stop_leftover_processes(&run);
    println!("test: stopping the servers that were started");
    drop(servers);
    outcome
}

/// A command for each test program, for the unit tests and for the examples in documentation. Tests
/// often wait for servers, so several programs at once keep the cores busier than one.
fn by_target(arguments: &Arguments) -> Result<Vec<Command>, Error> {
    let of = |programs: &[String]| cargo_test(arguments, programs);
    if !arguments.programs.is_empty() {
        return Ok(arguments.programs.chunks(1).map(of).collect());
    }
    let metadata = MetadataCommand::new()
        .current_dir(setup::root())
        .no_deps()
        .exec()
        .map_err(|error| Error::ActionRequired(format!("cargo metadata: {error}")))?;
    let is_known = |name: &&String| metadata.packages.iter().any(|it| it.name == name.as_str());
    if let Some(unknown) = arguments.packages.iter().find(|name| !is_known(name)) {
        return Err(Error::ActionRequired(format!(
            "there is no package `{unknown}`; name one as `cargo metadata` does, such as oncegate-redis"
        )));
    }
    let tested = metadata.packages.iter().filter(|package| {
        arguments.packages.is_empty() || arguments.packages.iter().any(|name| package.name == *name)
    });
    let (mut names, mut has_library) = (Vec::new(), false);
    for target in tested.flat_map(|package| &package.targets) {
        has_library |= target.is_lib();
        if target.is_test() && !names.contains(&target.name) {
            names.push(target.name.clone());
        }
    }
    names.sort_by_key(|name| {
        let rank = LONGEST_FIRST.iter().position(|long| long == name);
        rank.unwrap_or(LONGEST_FIRST.len())
    });

    let mut commands: Vec<_> = names.chunks(1).map(of).collect();
    let mut units = of(&[]);
    units.arg("--bins");
    if has_library {
        units.arg("--lib");
        let mut documentation = of(&[]);
        documentation.arg("--doc");
        commands.push(documentation);
    }
    commands.push(units);
    Ok(commands)
}

fn cargo_test(arguments: &Arguments, programs: &[String]) -> Command {
    let mut cargo = setup::cargo();
    cargo.args(["test", "--all-features", "--no-fail-fast"]);
    if arguments.packages.is_empty() {
        cargo.arg("--workspace");
    }
    for package in &arguments.packages {
        cargo.args(["--package", package]);
    }
    for program in programs {
        cargo.args(["--test", program]);
    }
    if std::env::var_os(THREADS).is_none() {
        cargo.env(THREADS, (2 * cores()).to_string());
    }
    cargo
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A running command, and the file with its output if it is not shown.
struct RunningCommand {
    shown: String,
    child: Child,
    output: Option<File>,
    since: Instant,
}

impl RunningCommand {
    /// Starts the command in a process group of its own, so that a signal reaches cargo and the
    /// tests together.
    fn start(mut command: Command, shows_output: bool) -> Result<Self, Error> {
        let shown = shown(&command);
        println!("test: {shown}");
        let output = if shows_output {
            None
        } else {
            let file = tempfile::tempfile().map_err(Error::Temporary)?;
            let again = || file.try_clone().map_err(Error::Temporary);
            command.stdout(again()?).stderr(again()?);
            Some(file)
        };
        let child = command.process_group(0).stdin(Stdio::null()).spawn();
        let child = child.map_err(|source| Error::CannotRun {
            program: shown.clone(),
            source,
        })?;
        Ok(Self {
            shown,
            child,
            output,
            since: Instant::now(),
        })
    }

    /// `None` while the command runs, then whether it succeeded. Prints the output after the end.
    fn succeeded(&mut self) -> Result<Option<bool>, Error> {
        let status = self.child.try_wait().map_err(|source| Error::CannotRun {
            program: self.shown.clone(),
            source,
        })?;
        if status.is_some() {
            self.print_output()?;
        }
        Ok(status.map(|status| status.success()))
    }

    fn print_output(&mut self) -> Result<(), Error> {
        let Some(mut output) = self.output.take() else {
            return Ok(());
        };
        println!("test: {} took {:.0?}", self.shown, self.since.elapsed());
        output.rewind().map_err(Error::Temporary)?;
        std::io::copy(&mut output, &mut std::io::stdout()).map_err(Error::Temporary)?;
        Ok(())
    }

    /// Stops the command, and prints its output so far.
    fn stop(&mut self) -> Result<(), Error> {
        let group = Pid::from_child(&self.child);
        // Fails if the process group has ended.
        let _ = kill_process_group(group, Signal::TERM);
        let deadline = Instant::now() + STOP_TIMEOUT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = kill_process_group(group, Signal::KILL);
        let _ = self.child.wait();
        self.print_output()
    }
}

/// Runs the commands, as many at once as there are cores, and names those that failed.
fn run_all(commands: Vec<Command>, stopping: &StopSignals) -> Result<(), Error> {
    let shows_output = commands.len() == 1;
    let mut waiting = VecDeque::from(commands);
    let (mut running, mut failed) = (Vec::<RunningCommand>::new(), Vec::new());
    while !(waiting.is_empty() && running.is_empty()) {
        if stopping.is_requested() {
            eprintln!("test: a signal was received, stopping the tests");
            for it in &mut running {
                it.stop()?;
            }
            return Err(Error::Stopped);
        }
        while running.len() < cores()
            && let Some(command) = waiting.pop_front()
        {
            running.push(RunningCommand::start(command, shows_output)?);
        }
        for mut it in std::mem::take(&mut running) {
            match it.succeeded()? {
                None if it.since.elapsed() > PROGRAM_TIMEOUT && !shows_output => {
                    eprintln!(
                        "test: {} takes longer than {PROGRAM_TIMEOUT:?}, stopping it",
                        it.shown
                    );
                    failed.push(it.shown.clone());
                    it.stop()?;
                }
                None => running.push(it),
                Some(true) => {}
                Some(false) => failed.push(it.shown),
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    if failed.is_empty() {
        Ok(())
    } else {
        Err(Error::Failed(failed.join("`, `")))
    }
}

fn shown(command: &Command) -> String {
    let words: Vec<_> = command
        .get_args()
        .map(|word| word.to_string_lossy())
        .collect();
    format!("cargo {}", words.join(" "))
}

/// Stops the processes whose environment has the id of this run, because tests that a signal ended
/// do not stop their child processes.
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
    fn failed_commands_are_named_after_all_have_run() {
        let directory = tempfile::tempdir().unwrap();
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).current_dir(directory.path());
            command
        };
        let commands = ["exit 1", "echo ran > ran", "exit 2", "echo ran > last"];
        let stopping = StopSignals::on_signals().unwrap();
        let error = run_all(commands.map(shell).into(), &stopping).unwrap_err();
        let error = error.to_string();
        for failed in ["`cargo -c exit 1`", "`cargo -c exit 2`"] {
            assert!(error.contains(failed), "{error}");
        }
        assert!(["ran", "last"].map(|name| directory.path().join(name).exists()) == [true; 2]);
        assert!(run_all(["true", "true"].map(shell).into(), &stopping).is_ok());
    }

    #[test]
    fn a_program_that_ignores_a_signal_is_killed() {
        let mut command = Command::new("sh");
        command.args(["-c", "trap '' TERM; echo ready; while :; do sleep 60; done"]);
        let mut running = RunningCommand::start(command, false).unwrap();
        while running.output.as_ref().unwrap().metadata().unwrap().len() == 0 {
            std::thread::sleep(Duration::from_millis(20));
        }
        running.stop().unwrap();
        assert!(running.child.try_wait().unwrap().is_some());
    }

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
