//! The payments demo: charges payments through oncegate while everything goes wrong that can, and
//! counts what became of them by the provider's own ledger.
#![forbid(unsafe_code)]

mod bank;
mod charge;
mod cli;
mod counters;
mod embedded;
mod faults;
mod folder;
#[cfg(feature = "real")]
mod http;
mod ledger;
mod operate;
mod payment;
mod progress;
mod provider;
#[cfg(feature = "real")]
mod real;
mod report;
mod sent;
mod traffic;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Broker, Cli, StoreKind};
use crate::counters::Outcomes;
use crate::report::Report;

/// Whatever went wrong, with a text for the user.
pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli).await {
        Ok(Some(report)) => show(&cli, &report),
        Ok(None) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("payments: {error}");
            ExitCode::from(2)
        }
    }
}

async fn run(cli: &Cli) -> Result<Option<Report>, Error> {
    #[cfg(feature = "real")]
    if let Some(command) = &cli.command {
        return command.run().await;
    }
    if !cli.json {
        eprintln!("payments: {}", cli.promise.guarantee.explained());
    }
    match (cli.broker, cli.store) {
        (Broker::Memory, None | Some(StoreKind::Sqlite | StoreKind::Memory)) => embedded::run(cli, &Outcomes::install()).await.map(Some),
        (Broker::Memory, Some(StoreKind::Redis)) => {
            Err("--store: redis is for workers in processes of their own; take --broker kafka or rabbitmq".into())
        }
        (_, Some(StoreKind::Memory)) => Err("--store: workers in processes of their own share no memory; take redis or sqlite".into()),
        #[cfg(feature = "real")]
        (_, None | Some(StoreKind::Redis | StoreKind::Sqlite)) => real::run(cli).await.map(Some),
        #[cfg(not(feature = "real"))]
        (_, None | Some(StoreKind::Redis | StoreKind::Sqlite)) => Err("--broker: not in this build; add --features kafka,rabbitmq".into()),
    }
}

/// Prints the counts, and what is wrong; success only if nothing is.
fn show(cli: &Cli, report: &Report) -> ExitCode {
    if cli.wants_json() {
        println!(
            "{}",
            serde_json::to_string(report).expect("a struct of numbers is JSON")
        );
    } else {
        print!("{report}");
    }
    for wrong in report.wrong() {
        eprintln!("payments: wrong: {wrong}");
    }
    if report.is_right() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
