//! Development commands of oncegate: `cargo xtask help`.
//!
//! This crate links no client library, so it compiles on a machine that has only Rust; `setup`
//! installs the other requirements.
#![forbid(unsafe_code)]

mod api;
mod bench;
mod book;
mod chaos;
mod faults;
mod kafka_faults;
mod model;
mod patched_source;
mod published;
mod services;
mod setup;
mod state;
mod stopping;
mod test;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{self, ExitCode};

use clap::{Parser, Subcommand};
use oncegate_testkit::servers::{SERVER_SET, ServerSet};

/// Development commands of oncegate.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    /// The releases of the servers: debian12 (the packages of the host), today (RabbitMQ 4, Valkey
    /// 9 and PostgreSQL 18), today-redis (the same with Redis 8 in place of Valkey), kafka-3.9 (as
    /// debian12, with an older Kafka). The newer packages are unpacked into the cache and not
    /// installed; that needs root and a Debian host. Default: ONCEGATE_SERVERS, or debian12.
    #[arg(long, global = true, value_name = "SET")]
    servers: Option<ServerSet>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs missing requirements of the tests: servers, a Java runtime, a C++ compiler,
    /// headers.
    Setup,
    /// Runs the workspace's tests against real servers.
    ///
    /// Installs missing requirements first. Uses the servers that ONCEGATE_KAFKA,
    /// ONCEGATE_RABBITMQ, ONCEGATE_REDIS and ONCEGATE_POSTGRES name. Starts those without a
    /// variable on free ports, and stops them at the end, also after a failure or Ctrl-C.
    Test(test::Arguments),
    /// Injects faults into a RabbitMQ node and into one node of a cluster, under load and at random
    /// times. Checks that no message is lost or handled twice, that no acknowledgement is refused,
    /// and that consumption resumes within five seconds. Takes some minutes.
    Faults(faults::Arguments),
    /// Stops, freezes and kills Kafka brokers and group members for long periods. Prints lost and
    /// repeated effects and the recovery times. Takes about 15 minutes.
    KafkaFaults(kafka_faults::Arguments),
    /// Kills, freezes and disconnects consumers, Redis, Kafka and RabbitMQ under load, counts
    /// effects in a separate process, and checks the guarantees. `--smoke` injects each fault once;
    /// `--help` lists the other options.
    Chaos(chaos::Arguments),
    /// Compares oncegate with the plain clients in alternating runs on its own servers. Prints
    /// rates, ratios and CPU time per message. `--quick` takes two minutes, `--guard` counts
    /// instructions, `--profile` samples the CPU time; `--help` lists the other options.
    Bench(bench::Arguments),
    /// Model checking: explores every interleaving of a small system that runs the production state
    /// machines, and prints the faults under which each guarantee holds.
    Model(model::Arguments),
    /// Builds the book into `target/book`, and fails on warnings. Installs mdBook if necessary.
    Book,
    /// Checks the published crates: public API, dependencies, feature combinations, and the GitHub
    /// workflows. `--help` names the checks.
    Published(published::Arguments),
    /// Compares the public API of each published library with its `api.txt`; `--write` updates
    /// these files.
    Api(api::Arguments),
    /// Starts Kafka, RabbitMQ, Redis and PostgreSQL in the background, and stops them.
    Services {
        #[command(subcommand)]
        command: services::Command,
    },
}

fn main() -> ExitCode {
    let outcome = with_server_set().and_then(|()| run());
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// If the arguments contain `--servers SET`, replaces this process by xtask without that option and
/// with `ONCEGATE_SERVERS=SET`, which every program that starts servers reads.
fn with_server_set() -> Result<(), Error> {
    let mut arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let Some(set) = take_servers(&mut arguments)? else {
        return Ok(());
    };
    let program = std::env::current_exe().map_err(|source| Error::CannotRun {
        program: "xtask".to_owned(),
        source,
    })?;
    let source = process::Command::new(&program)
        .args(arguments)
        .env(SERVER_SET, set.name())
        .exec();
    Err(Error::CannotRun {
        program: program.display().to_string(),
        source,
    })
}

/// Removes `--servers SET` or `--servers=SET` from the arguments and returns the set; the last one,
/// if there are several.
fn take_servers(arguments: &mut Vec<OsString>) -> Result<Option<ServerSet>, Error> {
    let mut set = None;
    while let Some(at) = arguments.iter().position(|argument| {
        argument == "--servers" || argument.to_string_lossy().starts_with("--servers=")
    }) {
        let option = arguments.remove(at).to_string_lossy().into_owned();
        let name = match option.split_once('=') {
            Some((_, name)) => name.to_owned(),
            None if at < arguments.len() => arguments.remove(at).to_string_lossy().into_owned(),
            None => String::new(),
        };
        set = Some(name.parse()?);
    }
    Ok(set)
}

fn run() -> Result<(), Error> {
    let arguments = Arguments::parse();
    match arguments.command {
        Command::Setup => setup::run(),
        Command::Test(arguments) => test::run(&arguments),
        Command::Faults(arguments) => faults::run(&arguments),
        Command::KafkaFaults(arguments) => kafka_faults::run(&arguments),
        Command::Chaos(arguments) => chaos::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Model(arguments) => model::run(&arguments),
        Command::Book => book::run(),
        Command::Published(arguments) => published::run(&arguments),
        Command::Api(arguments) => api::run(&arguments),
        Command::Services { command } => services::run(command),
    }
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// A program ran and failed; its output was printed.
    #[error("`{0}` failed, see above")]
    Failed(String),
    /// A program could not be started.
    #[error("cannot run `{program}`: {source}")]
    CannotRun {
        program: String,
        source: std::io::Error,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    File {
        path: std::path::PathBuf,
        source: std::io::Error,
    },
    /// The user has to do something; the text says what.
    #[error("{0}")]
    ActionRequired(String),
    /// The state file has an invalid line.
    #[error("{0}")]
    State(#[from] state::InvalidStateLine),
    /// A server did not start.
    #[error(transparent)]
    Server(#[from] oncegate_testkit::servers::ServerError),
    /// The temporary directory cannot be created.
    #[error("cannot create a temporary directory: {0}")]
    Temporary(std::io::Error),
    /// The signal handlers cannot be installed.
    #[error("cannot install signal handlers: {0}")]
    Signals(std::io::Error),
    /// Ctrl-C, SIGTERM or SIGHUP; the started servers have been stopped.
    #[error("stopped by a signal")]
    Stopped,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_are_an_option_of_each_command() {
        for (line, expected, left) in [
            (
                "chaos --smoke --servers today",
                Some(ServerSet::Today),
                "chaos --smoke",
            ),
            (
                "--servers=today-redis test -p a",
                Some(ServerSet::TodayRedis),
                "test -p a",
            ),
            ("services up", None, "services up"),
        ] {
            let mut arguments: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(take_servers(&mut arguments).expect("a set"), expected);
            assert_eq!(arguments.join(" ".as_ref()), left);
        }
        for unknown in ["test --servers yesterday", "test --servers"] {
            let mut arguments: Vec<OsString> = unknown.split(' ').map(OsString::from).collect();
            let error = take_servers(&mut arguments)
                .expect_err("unknown")
                .to_string();
            assert!(
                error.contains("debian12, today, today-redis or kafka-3.9"),
                "{error}"
            );
        }
    }
}
