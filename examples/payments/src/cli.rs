//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};

use crate::payment::Payment;

/// More attempts than faults of the provider can cost one payment.
pub(crate) const ATTEMPTS: u32 = 20;

/// Charges payments through oncegate, with everything going wrong that can, and counts what became
/// of them.
///
/// The exit status is 0 only if every payment was charged once, with its amount, or stands in doubt
/// for a person, every broken message was set aside, and as many workers were killed as were asked
/// for. Nothing is wrong with a valid payment, so it must not be a dead letter either; one that is
/// and was not charged counts as lost.
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) traffic: Traffic,
    #[command(flatten)]
    pub(crate) promise: Promise,
    /// Where messages come from. `memory` needs nothing else.
    #[arg(long, value_enum, default_value_t = Broker::Memory)]
    pub(crate) broker: Broker,
    /// What remembers ids. By default `sqlite` on the memory broker, `redis` on the others.
    #[arg(long, value_enum)]
    pub(crate) store: Option<StoreKind>,
    /// How many workers.
    #[arg(long, default_value_t = 4)]
    pub(crate) workers: usize,
    /// How many workers are killed while it goes.
    #[arg(long, default_value_t = 5)]
    pub(crate) kills: usize,
    /// Of how many payments, the last ones, the provider never says whether it charged them. They
    /// have to stand in doubt at the end: for a person, who finds them charged in the provider's
    /// ledger.
    #[arg(long, default_value_t = 0)]
    pub(crate) unsure: usize,
    /// Prints the counts as one JSON object. `charged`, `charged_twice` and `lost` come from the
    /// provider's ledger, `in_doubt` and `dead_letters` from the broker. The rest but `sent` is
    /// what the workers counted: those in processes of their own write it down five times a second,
    /// so a killed one takes its last counts along, and `delivered`, `duplicates_stopped`,
    /// `retried` and `reconciled_…` may be too low.
    #[arg(long)]
    pub(crate) json: bool,
    /// Where a run with the store `sqlite` has its files: `payments.db`, and the provider's ledger.
    /// They are removed at its end. A run on the memory broker that was killed leaves them, and
    /// goes on with them when it is started again.
    #[arg(long, default_value = "payments-run")]
    pub(crate) run_dir: PathBuf,
    /// Keeps what a run leaves: its ledger and store, or its counts and logs, and what it made on
    /// real servers.
    #[arg(long)]
    pub(crate) keep: bool,
    #[cfg(feature = "real")]
    #[command(flatten)]
    pub(crate) servers: crate::real::Servers,
    #[cfg(feature = "real")]
    #[command(subcommand)]
    pub(crate) command: Option<crate::real::Command>,
}

impl Cli {
    /// How many attempts a payment gets, and how many kills may hit it. A fault of the provider
    /// costs an attempt, and no valid payment may run out of them.
    pub(crate) fn attempts(&self) -> u32 {
        u32::try_from(self.kills)
            .unwrap_or(u32::MAX)
            .saturating_add(ATTEMPTS)
    }

    /// The ids of the payments that the provider is unsure of.
    ///
    /// # Errors
    /// If there are not so many, or the guarantee knows no doubt.
    pub(crate) fn unsure_of(&self, payments: &[Payment]) -> Result<Vec<String>, crate::Error> {
        if self.unsure > 0 && self.promise.guarantee != Guaranteed::AtMostOnce {
            return Err("--unsure: only --guarantee at-most-once leaves a payment in doubt".into());
        }
        let others = payments.len().checked_sub(self.unsure);
        let others = others.ok_or_else(|| {
            format!(
                "--unsure: {} are more than the {} payments",
                self.unsure,
                payments.len()
            )
        })?;
        Ok(payments[others..]
            .iter()
            .map(|payment| payment.id.clone())
            .collect())
    }

    /// Whether the counts are wanted as JSON.
    pub(crate) fn wants_json(&self) -> bool {
        #[cfg(feature = "real")]
        if let Some(crate::real::Command::Report(arguments)) = &self.command {
            return arguments.json;
        }
        self.json
    }
}

/// What is sent.
#[derive(Clone, Debug, Args)]
pub(crate) struct Traffic {
    /// How many payments are made up and sent.
    #[arg(long, default_value_t = 2000)]
    pub(crate) payments: usize,
    /// Sends the payments of this file instead: one JSON object with `id`, `card` and `amount` (in
    /// cents) a line.
    #[arg(long)]
    pub(crate) input: Option<PathBuf>,
    /// Decides what is sent and what goes wrong.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
}

/// What is promised, and what the provider helps with.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Promise {
    /// What is promised of each payment.
    #[arg(long, value_enum, default_value_t = Guaranteed::AtMostOnce)]
    pub(crate) guarantee: Guaranteed,
    /// The provider takes the payment's id as an idempotency key. On by itself with `--guarantee
    /// effectively-once`, which promises nothing for an effect that cannot bear a second run.
    #[arg(long)]
    pub(crate) provider_deduplicates: bool,
}

/// A guarantee, by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Guaranteed {
    /// Never charged again on a guess: asked at the provider, or left to a person.
    AtMostOnce,
    /// Run again after a crash: for effects that can bear it.
    EffectivelyOnce,
    /// A marker in the store and nothing more: loses payments.
    Bare,
}

/// A broker, by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Broker {
    /// In this process.
    Memory,
    /// Kafka.
    Kafka,
    /// RabbitMQ.
    Rabbitmq,
}

/// A store, by its name on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum StoreKind {
    /// In a file, `payments.db`.
    Sqlite,
    /// In this process.
    Memory,
    /// Redis.
    Redis,
}

impl Guaranteed {
    /// The guarantee itself.
    pub(crate) fn guarantee(self) -> oncegate::Guarantee {
        match self {
            Self::AtMostOnce => oncegate::Guarantee::AtMostOnce,
            Self::EffectivelyOnce => oncegate::Guarantee::EffectivelyOnce,
            Self::Bare => oncegate::Guarantee::Bare,
        }
    }

    /// What this run shows.
    pub(crate) fn explained(self) -> &'static str {
        match self {
            Self::AtMostOnce => {
                "at most once: what is unknown is asked at the provider, and never charged on a guess"
            }
            Self::EffectivelyOnce => {
                "effectively once: run again after a crash, so the provider takes the payment's id as its idempotency key"
            }
            Self::Bare => {
                "bare: a marker in the store and nothing more; this run is meant to lose payments, and to charge some twice"
            }
        }
    }
}

impl Promise {
    /// What the provider does with a second charge under one id.
    pub(crate) fn repeats(self) -> crate::ledger::Repeats {
        if self.provider_deduplicates || self.guarantee == Guaranteed::EffectivelyOnce {
            crate::ledger::Repeats::Deduplicated
        } else {
            crate::ledger::Repeats::ChargeAgain
        }
    }
}

impl Traffic {
    /// The payments that are sent.
    ///
    /// # Errors
    /// If the input cannot be read.
    pub(crate) fn payments(&self, prefix: &str) -> std::io::Result<Vec<Payment>> {
        match &self.input {
            Some(path) => crate::traffic::read(path).map_err(|error| {
                std::io::Error::new(error.kind(), format!("--input {}: {error}", path.display()))
            }),
            None => Ok(crate::traffic::payments(self.payments, prefix, self.seed)),
        }
    }
}
