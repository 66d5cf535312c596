//! The payments demo: charges payments through oncegate while everything goes wrong that can, and counts what became of
//! them by the provider's own ledger.
#![forbid(unsafe_code)]

mod bank;
mod charge;
mod cli;
mod counters;
mod embedded;
mod faults;
mod ledger;
mod payment;
mod progress;
mod provider;
mod report;
mod traffic;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Broker, Cli, StoreKind};
use crate::counters::Outcomes;
use crate::report::Report;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli).await {
        Ok(report) => show(&cli, &report),
        Err(error) => {
            eprintln!("payments: {error}");
            ExitCode::from(2)
        }
    }
}

async fn run(cli: &Cli) -> Result<Report, Box<dyn std::error::Error>> {
    let outcomes = Outcomes::install();
    match (cli.broker, cli.store) {
        (Broker::Memory, None | Some(StoreKind::Memory)) => {
            if !cli.json {
                eprintln!("payments: {}", cli.promise.guarantee.explained());
            }
            embedded::run(cli, &outcomes).await
        }
        (Broker::Memory, Some(StoreKind::Redis)) => {
            Err("--store: redis is for a broker between processes; take --broker kafka or rabbitmq".into())
        }
        (Broker::Kafka | Broker::Rabbitmq, _) => Err("--broker: not in this build; add --features kafka,rabbitmq".into()),
    }
}

/// Prints the counts; success only if every payment was charged once or stands aside for a person.
fn show(cli: &Cli, report: &Report) -> ExitCode {
    if cli.json {
        println!("{}", serde_json::to_string(report).expect("a struct of numbers is JSON"));
    } else {
        print!("{report}");
    }
    if report.is_right() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
