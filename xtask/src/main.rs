//! Development commands of oncegate: `cargo xtask help`.
//!
//! Nothing here links a driver, so this compiles on a machine that has only Rust; `setup` brings
//! the rest.
#![forbid(unsafe_code)]

mod api;
mod bench;
mod book;
mod chaos;
mod faults;
mod kafka_faults;
mod model;
mod published;
mod services;
mod setup;
mod state;
mod stopping;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Development commands of oncegate.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs what the tests need and this machine lacks: servers, a Java runtime, a C++
    /// compiler, headers.
    Setup,
    /// Runs the workspace's tests against real servers that live as long as the tests do.
    ///
    /// Installs what is missing first. A server whose address stands in ONCEGATE_KAFKA,
    /// ONCEGATE_RABBITMQ or ONCEGATE_REDIS is used as it is, the others are started on free ports
    /// and stopped again, also after a failure or Ctrl-C.
    Test(test::Arguments),
    /// Restarts, cuts and confuses RabbitMQ nodes under load, at random times, and one node of
    /// three: nothing is lost or doubled, no acknowledgement refused, and each time it consumes
    /// again within five seconds. Takes some minutes.
    Faults(faults::Arguments),
    /// Stops, freezes and kills Kafka brokers and members of a group for long, and prints what was
    /// lost or happened twice, and how long it took to heal. Some 15 minutes.
    KafkaFaults(kafka_faults::Arguments),
    /// Kills, freezes and cuts off consumers, Redis, Kafka and RabbitMQ under load, counts effects
    /// in a process of their own, and checks what was promised. `--smoke` has each fault once;
    /// `--help` says the rest.
    Chaos(chaos::Arguments),
    /// Compares the bare clients with oncegate, by turns, on servers of its own, and prints rates,
    /// ratios and CPU time a message. `--quick` takes two minutes; `--guard` counts instructions
    /// instead, `--profile` says where the time goes; `--help` says the rest.
    Bench(bench::Arguments),
    /// Explores every interleaving of a small world in which the functions run that decide
    /// everything, and prints what each guarantee withstands.
    Model(model::Arguments),
    /// Builds the book into `target/book`, and fails if there is a warning. Installs mdBook first,
    /// where it is missing.
    Book,
    /// Checks what those who depend on the published crates rely on: the public API, dependencies,
    /// combinations of features, and the workflows that publish. `--help` names the checks.
    Published(published::Arguments),
    /// Compares the public API of each published library with its `api.txt`; `--write` renews these
    /// files.
    Api(api::Arguments),
    /// Starts Kafka, RabbitMQ and Redis for as long as you like, and stops them again.
    Services {
        #[command(subcommand)]
        command: services::Command,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
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
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

/// What a command ends with when it cannot do what it was asked.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// A program ran and failed; its own output stands above.
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
    /// Something must be installed by hand.
    #[error("{0}")]
    ByHand(String),
    /// The state file does not read as one that this program wrote.
    #[error("{0}")]
    State(#[from] state::Unreadable),
    /// A server did not start.
    #[error(transparent)]
    Server(#[from] oncegate_testkit::servers::ServerError),
    /// There is no place for temporary files.
    #[error("cannot create a temporary directory: {0}")]
    Temporary(std::io::Error),
    /// Signals could not be waited for.
    #[error("cannot wait for signals: {0}")]
    Signals(std::io::Error),
    /// Ctrl-C, SIGTERM or SIGHUP; what was started has been stopped.
    #[error("stopped by a signal")]
    Stopped,
}
