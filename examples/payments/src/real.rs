//! The demo on real servers: workers, provider and producer in processes of their own.

mod admin;
mod check;
mod demo;
mod fleet;
#[cfg(feature = "kafka")]
mod kafka;
mod produce;
mod provider;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
mod rundir;
mod servers;
pub(crate) mod traces;
mod watch;
mod wire;
mod work;

pub(crate) use demo::run;
pub(crate) use servers::Servers;

use clap::Subcommand;

use crate::report::Report;

pub(crate) use crate::Error;

/// The demo in pieces. They share a run directory, where each writes what it did.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The payment provider, over HTTP, with its ledger in a file.
    Provider(provider::Arguments),
    /// Sends payments.
    Produce(produce::Arguments),
    /// A worker: charges what comes, until SIGTERM.
    Work(work::Arguments),
    /// Counts what became of the payments.
    Report(demo::Arguments),
}

impl Command {
    /// Runs this piece; a report is to be shown.
    ///
    /// # Errors
    /// Says what a person has to change.
    pub(crate) async fn run(&self) -> Result<Option<Report>, Error> {
        match self {
            Self::Provider(arguments) => provider::run(arguments).await.map(|()| None),
            Self::Produce(arguments) => produce::run(arguments).await.map(|()| None),
            Self::Work(arguments) => work::run(arguments).await.map(|()| None),
            Self::Report(arguments) => demo::report(arguments).await.map(Some),
        }
    }
}
