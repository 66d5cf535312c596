//! The payments demo: charges payments through oncegate while the provider and workers fail, and
//! counts the charges in the provider's ledger. Start reading at `charge.rs`, the handler.
#![forbid(unsafe_code)]

mod charge;
mod demo;
mod inbox;
mod provider;
#[cfg(feature = "real")]
mod real;
mod report;
#[cfg(feature = "real")]
mod servers;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

/// An error with a text for the user.
type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T, E = Error> = std::result::Result<T, E>;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let ran = match cli.command {
        None => demo::run(&cli).await.map(Some),
        #[cfg(feature = "real")]
        Some(command) => real::run(command, &cli).await,
        #[cfg(not(feature = "real"))]
        Some(_) => Err("not in this build; add --features kafka,rabbitmq".into()),
    };
    match ran {
        Ok(Some(report)) => report.print(cli.json),
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("payments: {error}");
            ExitCode::from(2)
        }
    }
}

/// The guarantee of an inbox, in which the ledger is in the database of the records.
const WITH_INBOX: &str = "exactly-once-in-database";
const GUARANTEES: [&str; 4] = ["at-most-once", "effectively-once", WITH_INBOX, "bare"];

/// Charges payments through oncegate while provider and workers fail, and counts the charges.
///
/// The exit status is 0 only if every payment was charged once or is in doubt, and every
/// malformed message and no payment was dead-lettered.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// One part of the demo on real servers, configured by `oncegate.toml` and `ONCEGATE_`
    /// variables; without it, the whole demo.
    #[arg(value_enum)]
    command: Option<Command>,
    /// The broker; its address is ONCEGATE_KAFKA or ONCEGATE_RABBITMQ.
    #[arg(long, value_enum, default_value_t = BrokerKind::Memory)]
    broker: BrokerKind,
    /// The store of ids: by default `sqlite` with the memory broker, and `redis` at ONCEGATE_REDIS
    /// with the others; `postgres` is at ONCEGATE_POSTGRES.
    #[arg(long, value_parser = ["sqlite", "redis", "postgres"])]
    store: Option<String>,
    /// `at-most-once`: an unknown outcome is looked up at the provider, or left to an operator.
    /// `effectively-once`: a payment runs again after a crash; its id is the provider's idempotency key.
    /// `exactly-once-in-database`: the charge and the record of its message are committed together.
    /// `bare`: uses only `SET NX` and `DEL` in the store, loses payments, and charges some twice.
    #[arg(long, value_parser = GUARANTEES, default_value = GUARANTEES[0])]
    guarantee: String,
    /// How many payments are sent.
    #[arg(long, default_value_t = 2000)]
    payments: usize,
    /// Selects the payments, and which of them are sent twice.
    #[arg(long, default_value_t = 42)]
    seed: u64,
    /// For this many payments, the last ones, the provider never replies and look-ups fail; with
    /// `--guarantee at-most-once` they end in doubt.
    #[arg(long, default_value_t = 0)]
    unsure: usize,
    /// Prints the counts as one JSON object.
    #[arg(long)]
    json: bool,
    /// The directory of the ledger and the SQLite store; a killed run is resumed from it.
    #[arg(long, default_value = "payments-run")]
    run_dir: PathBuf,
    /// Keeps the files of the run. The demo never removes topics, queues and keys on real servers.
    #[arg(long)]
    keep: bool,
    /// `produce`: prefix of the ids; different for each producer.
    #[arg(long, default_value = "pay")]
    prefix: String,
    /// `produce`: messages per second.
    #[arg(long, default_value_t = 2500, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Command {
    /// Sends payments.
    Produce,
    /// Runs a worker, which charges payments until SIGTERM.
    Work,
    /// Prints the counts of all payments so far.
    Report,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BrokerKind {
    Memory,
    Kafka,
    Rabbitmq,
}
