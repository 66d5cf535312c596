//! The consumer process of a matrix cell, with the settings that steps and mutants need.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::{Args, ValueEnum};
use oncegate::internal::Lock;
use oncegate::internal::fault;
use oncegate::source::Connect;
use oncegate::{
    Consumer, Context, Failure, FailureExt, Handler, IdSource, Reconciled, Redis, Rejects, Sqlite,
    Store, Topology,
};

use super::store_faults::{FaultyStore, StallRecorder, StoreFault};
use crate::Error;
use crate::ledger::{HandlerEnd, Log};
use crate::message::{ID_HEADER, Work};
use crate::recorded::Recorded;
use crate::sink::Sink;
use crate::worker::{Broker, CommonArguments, RecordedRun, Worker, reconcile};

/// The handler timeout: longer than the handling of any message of a cell.
const TIMEOUT: Duration = Duration::from_secs(8);

/// Where messages are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum TestedStore {
    /// In a Redis.
    Redis,
    /// In a SQLite file.
    Sqlite,
    /// By an inbox in PostgreSQL, in a transaction for each message; with an outbox.
    PostgresInbox,
    /// The same, with transactions for batches of messages.
    PostgresBatches,
}

/// The arguments of a consumer of a cell.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    common: CommonArguments,
    /// The kind of the marker store.
    #[arg(long, value_enum)]
    markers: TestedStore,
    /// The URL or file of the marker store.
    #[arg(long)]
    store: String,
    /// The first backoff, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pause_ms: u64,
    /// The maximum backoff, in milliseconds.
    #[arg(long, default_value_t = 300)]
    longest_pause_ms: u64,
    /// The deduplication window, in milliseconds.
    #[arg(long, default_value_t = 3_600_000)]
    window_ms: u64,
    /// Whether the consumer declares the RabbitMQ queues.
    #[arg(long, value_enum, default_value_t = Declares::Consumer)]
    topology: Declares,
    /// Which way rejected messages reach the dead letters on RabbitMQ.
    #[arg(long, value_enum, default_value_t = RejectRoute::Consumer)]
    rejects: RejectRoute,
    /// The network fault between the consumer and its store.
    #[arg(long, value_enum, default_value_t = StoreFault::None)]
    store_fault: StoreFault,
}

/// Consumes until SIGTERM, then drains. Ends at once when its standard input ends, since its parent
/// process has ended.
///
/// # Errors
/// The error of the consumer.
pub async fn run(arguments: Arguments) -> Result<(), Error> {
    let worker = Worker::begin(&arguments.common).await?;
    match arguments.common.broker {
        Broker::Kafka => {
            let source = arguments
                .common
                .kafka()
                .property("session.timeout.ms", "1000")
                .property("heartbeat.interval.ms", "200")
                .property("auto.commit.interval.ms", "200");
            consume(source, &arguments, worker).await
        }
        Broker::Rabbitmq => {
            let topology = if arguments.topology == Declares::Consumer {
                Topology::Declare
            } else {
                Topology::Check
            };
            let rejects = if arguments.rejects == RejectRoute::Consumer {
                Rejects::Published
            } else {
                Rejects::ByQueue
            };
            consume(
                arguments
                    .common
                    .rabbit()
                    .topology(topology)
                    .rejects(rejects),
                &arguments,
                worker,
            )
            .await
        }
    }
}

/// Whether the consumer declares the RabbitMQ queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Declares {
    /// It declares them.
    Consumer,
    /// They exist; it only checks them and has no delay queues.
    #[value(name = "check")]
    Existing,
}

/// Which way rejected messages reach the dead letters on RabbitMQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RejectRoute {
    /// The consumer publishes it.
    Consumer,
    /// The queue's own dead-letter exchange.
    ByQueue,
}

async fn consume(source: impl Connect, arguments: &Arguments, worker: Worker) -> Result<(), Error> {
    let common = &arguments.common;
    let (log, sink) = (Arc::clone(&worker.log), worker.sink.clone());
    let store: Arc<dyn Store> = match arguments.markers {
        TestedStore::Redis => Arc::new(Redis::at(&arguments.store)),
        TestedStore::Sqlite => Arc::new(Sqlite::file(&arguments.store)),
        _ => return Err("an inbox has a process of its own".into()),
    };
    let store = Arc::new(StallRecorder::new(store, Arc::clone(&log)));
    let mut builder = Consumer::builder();
    if arguments.markers == TestedStore::Sqlite {
        // Its file is on a memory file system. Only processes crash here, not the machine.
        builder = builder.allow_volatile_store();
    }
    let consumer = builder
        .source(Recorded::new(source, Arc::clone(&log)))
        .store(Recorded::new(
            FaultyStore::new(store, arguments.store_fault),
            Arc::clone(&log),
        ))
        .handler(MatrixHandler {
            sink,
            log,
            runs: AtomicU64::new(0),
            of_id: Lock::default(),
        })
        .guarantee(common.guarantee())
        .id(IdSource::header(ID_HEADER))
        .scope(&common.from)
        .lease(common.lease())
        .dedup_window(Duration::from_millis(arguments.window_ms))
        .backoff(
            Duration::from_millis(arguments.pause_ms),
            Duration::from_millis(arguments.longest_pause_ms),
        )
        .max_attempts(3)
        .max_inline_retries(0)
        .max_reconciles(3)
        .handler_timeout(TIMEOUT)
        .max_in_flight(common.in_flight)
        .drain_timeout(common.drain());
    worker
        .run(|terminated| consumer.run_until(terminated.wait()))
        .await
}

/// A handler that applies the effect of a message at the sink halfway through its running time, or
/// fails as the prefix of the id says.
struct MatrixHandler {
    sink: Sink,
    log: Arc<Log>,
    runs: AtomicU64,
    /// The number of runs of each id in this process.
    of_id: Lock<HashMap<String, u32>>,
}

impl Handler for MatrixHandler {
    type Payload = Work;

    async fn handle(&self, work: Work, cx: &Context) -> Result<(), Failure> {
        let (id, attempt) = (cx.id(), cx.attempt());
        let first = {
            let mut of_id = self.of_id.lock();
            let runs = of_id.entry(id.to_owned()).or_default();
            *runs += 1;
            *runs == 1
        };
        let mut running =
            RecordedRun::begin(&self.log, cx, self.runs.fetch_add(1, Ordering::Relaxed));
        running.how = HandlerEnd::Failed;
        match (id.split_once('-').map_or(id, |(before, _)| before), first) {
            ("fail", _) | ("once", true) => Err("as its id says").retry()?,
            ("refuse", _) => Err("as its id says").reject()?,
            ("panic", _) | ("trip", true) => panic!("as its id says"),
            _ => {}
        }
        running.how = HandlerEnd::Dropped;
        let half = Duration::from_millis(work.ms) / 2;
        tokio::time::sleep(half).await;
        fault::point("effect.before");
        let applied = self.sink.apply(id, attempt).await;
        fault::point("effect.after");
        running.how = HandlerEnd::Failed;
        applied.in_doubt()?.in_doubt()?;
        if id.starts_with("late-") {
            panic!("after its effect, as its id says");
        }
        running.how = HandlerEnd::Dropped;
        tokio::time::sleep(half).await;
        running.how = HandlerEnd::Ok;
        Ok(())
    }

    async fn reconcile(&self, _: Work, cx: &Context) -> Result<Reconciled, Failure> {
        let found = reconcile(&self.sink, cx).await?;
        fault::point("reconcile.found");
        Ok(found)
    }
}
