//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

/// Charges payments through oncegate, with every fault that can happen, and counts the charges.
///
/// The exit status is 0 only if every payment was charged once or is in doubt for
/// a person, and every malformed message was dead-lettered and no payment was.
#[derive(Debug, Parser)]
#[command(version)]
pub(crate) struct Cli {
    /// One part of the demo on real servers, configured by `oncegate.toml` and `ONCEGATE_`
    /// variables; without it, the whole demo.
    #[arg(value_enum)]
    pub(crate) command: Option<Command>,
    /// Where messages come from; ONCEGATE_KAFKA or ONCEGATE_RABBITMQ is the address.
    #[arg(long, value_enum, default_value_t = BrokerKind::Memory)]
    pub(crate) broker: BrokerKind,
    /// Stores ids; `sqlite` by default with the memory broker, `redis` at ONCEGATE_REDIS with
    /// others.
    #[arg(long, value_enum)]
    pub(crate) store: Option<StoreKind>,
    #[arg(long, value_enum, default_value_t = Promise::AtMostOnce)]
    pub(crate) guarantee: Promise,
    /// How many payments are sent.
    #[arg(long, default_value_t = 2000)]
    pub(crate) payments: usize,
    /// Selects the payments, and which of them are sent twice.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
    /// For so many payments, the last ones, the provider never tells whether it charged them; with
    /// `--guarantee at-most-once` they end in doubt.
    #[arg(long, default_value_t = 0)]
    pub(crate) unsure: usize,
    /// Prints the counts as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// The directory of the ledger and the SQLite store, which a run that was killed resumes with.
    #[arg(long, default_value = "payments-run")]
    pub(crate) run_dir: PathBuf,
    /// Keeps the files. What was created on real servers remains in any case.
    #[arg(long)]
    pub(crate) keep: bool,
    /// `produce`: prefix of the ids; different for each producer.
    #[arg(long, default_value = "pay")]
    pub(crate) prefix: String,
    /// `produce`: messages per second.
    #[arg(long, default_value_t = 2500, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rate: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Command {
    /// Sends payments.
    Produce,
    /// A worker: charges payments until SIGTERM.
    Work,
    /// Prints the counts of all payments so far.
    Report,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BrokerKind {
    Memory,
    Kafka,
    Rabbitmq,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoreKind {
    Sqlite,
    Redis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Promise {
    /// Never charged again on a guess: looked up at the provider, or left to a person.
    AtMostOnce,
    /// Run again after a crash; the provider takes the id as an idempotency key.
    EffectivelyOnce,
    /// A marker in the store and nothing more: loses payments, and charges some twice.
    Bare,
}

/// The text of a value on the command line.
pub(crate) fn word(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |it| it.get_name().to_owned())
}
