//! The payments demo: charges payments through oncegate, with every fault that can happen, and
//! counts the charges by the provider's ledger. Start reading at `charge.rs`, the handler.
#![forbid(unsafe_code)]

mod broker;
mod charge;
mod cli;
mod demo;
mod ledger;
mod payment;
mod provider;
#[cfg(feature = "real")]
mod real;
mod report;
#[cfg(feature = "real")]
mod servers;

use std::process::ExitCode;

use clap::Parser;

/// An error with a text for the user.
type Error = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let cli = cli::Cli::parse();
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
