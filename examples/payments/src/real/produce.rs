//! `payments produce`: sends payments.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use tokio::time::Instant;

use super::rundir::RunDir;
use super::traces::Traces;
use super::wire::{Queue, Wire};
use super::{Error, Servers};
use crate::cli::{Broker, Traffic};
use crate::sent::Sending;
use crate::traffic;

/// How many messages are sent before their confirmations are waited for.
const BATCH: usize = 250;
/// How often it is said how far it is.
const SAYING: Duration = Duration::from_secs(5);

/// The producer's settings.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where to send.
    #[arg(long, value_enum)]
    broker: Broker,
    #[command(flatten)]
    servers: Servers,
    #[command(flatten)]
    queue: Queue,
    #[command(flatten)]
    traffic: Traffic,
    /// What the ids begin with: producers of one run need different ones.
    #[arg(long, default_value = "pay")]
    prefix: String,
    /// How many messages a second; 0 is as many as the broker takes.
    #[arg(long, default_value_t = 0)]
    rate: u32,
    /// Where it is written down what was sent.
    #[arg(long, default_value = "payments-run")]
    run_dir: PathBuf,
}

/// Sends all, confirmed.
pub(super) async fn run(arguments: &Arguments) -> Result<(), Error> {
    let run_dir = RunDir::at(&arguments.run_dir)?;
    let _traces = Traces::begin("payments-producer")?;
    let payments = arguments.traffic.payments(&arguments.prefix)?;
    let messages = traffic::of(&payments, arguments.traffic.seed);
    let wire = Wire::open(arguments.broker, &arguments.servers, &arguments.queue).await?;
    let batch = if arguments.rate == 0 {
        BATCH
    } else {
        BATCH.min(arguments.rate.div_ceil(10) as usize)
    };
    let step = Duration::from_secs_f64(if arguments.rate == 0 {
        0.0
    } else {
        batch as f64 / f64::from(arguments.rate)
    });
    let (mut sent, mut said) = (0, Instant::now());
    for batch in messages.chunks(batch) {
        let next = Instant::now() + step;
        run_dir.note_sent(Sending::Attempted, batch)?;
        wire.send(batch).await?;
        run_dir.note_sent(Sending::Confirmed, batch)?;
        sent += batch.len();
        if said.elapsed() >= SAYING {
            eprintln!("payments: sent {sent} of {} messages", messages.len());
            said = Instant::now();
        }
        tokio::time::sleep_until(next).await;
    }
    eprintln!("payments: sent {} messages", messages.len());
    Ok(())
}
