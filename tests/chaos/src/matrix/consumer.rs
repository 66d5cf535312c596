//! The consumer process of a cell: as small as can be, with what a step or a wrong version needs to
//! show itself.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, ValueEnum};
use oncegate::{
    Connect, Consumer, Context, Failure, FailureExt, Handler, IdSource, Reconciled, Redis, Rejects,
    Sqlite, Store, Topology, fault,
};

use super::tricks::{Timed, Trick, Tricky};
use crate::Error;
use crate::ledger::{Ending, Log};
use crate::message::{ID_HEADER, Work};
use crate::recorded::Recorded;
use crate::sink::Sink;
use crate::worker::{Broker, Common, Running, Worker, reconcile};

/// How long a handler may run: longer than any message of a cell takes.
const TIMEOUT: Duration = Duration::from_secs(8);

/// Where markers are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Markers {
    /// In a Redis.
    Redis,
    /// In a SQLite file.
    Sqlite,
}

/// What a consumer of a cell is started with.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// What keeps the markers.
    #[arg(long, value_enum)]
    markers: Markers,
    /// Where they are: a URL or a file.
    #[arg(long)]
    store: String,
    /// The first pause before what has failed is tried again, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pause_ms: u64,
    /// The longest, in milliseconds.
    #[arg(long, default_value_t = 300)]
    longest_pause_ms: u64,
    /// How long ids are remembered, in milliseconds.
    #[arg(long, default_value_t = 3_600_000)]
    window_ms: u64,
    /// Who declares RabbitMQ's queues.
    #[arg(long, value_enum, default_value_t = Declares::Consumer)]
    topology: Declares,
    /// Who sets aside on RabbitMQ what is refused.
    #[arg(long, value_enum, default_value_t = SetsAside::Consumer)]
    rejects: SetsAside,
    /// What the network does to it.
    #[arg(long, value_enum, default_value_t = Trick::None)]
    trick: Trick,
}

/// Consumes until SIGTERM, then drains. Ends at once when its standard input ends: who started it
/// is gone.
///
/// # Errors
/// What the consumer says.
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
            let rejects = if arguments.rejects == SetsAside::Consumer {
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

/// Who declares RabbitMQ's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Declares {
    /// The consumer.
    Consumer,
    /// Somebody did: it looks whether they are there, and nothing can wait in queues of its own.
    #[value(name = "check")]
    Somebody,
}

/// Who sets aside on RabbitMQ what is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SetsAside {
    /// The consumer publishes it.
    Consumer,
    /// The queue's own dead-letter exchange.
    ByQueue,
}

async fn consume(source: impl Connect, arguments: &Arguments, worker: Worker) -> Result<(), Error> {
    let common = &arguments.common;
    let (log, sink) = (Arc::clone(&worker.log), worker.sink.clone());
    let store: Arc<dyn Store> = match arguments.markers {
        Markers::Redis => Arc::new(Redis::at(&arguments.store)),
        Markers::Sqlite => Arc::new(Sqlite::file(&arguments.store)),
    };
    let store = Arc::new(Timed::new(store, Arc::clone(&log)));
    let mut builder = Consumer::builder();
    if arguments.markers == Markers::Sqlite {
        // Its file lies in memory, which a power cut would empty. Here processes end, and no
        // machine.
        builder = builder.allow_volatile_store();
    }
    let consumer = builder
        .source(Recorded::new(source, Arc::clone(&log)))
        .store(Recorded::new(
            Tricky::new(store, arguments.trick),
            Arc::clone(&log),
        ))
        .handler(Effects {
            sink,
            log,
            runs: AtomicU64::new(0),
            of_id: Mutex::default(),
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
        .run(|terminated| consumer.run_until(terminated.come()))
        .await
}

/// Has the effect of a message at the sink, in the middle of its time, or does what its id begins
/// with.
struct Effects {
    sink: Sink,
    log: Arc<Log>,
    runs: AtomicU64,
    /// How often each id was run here.
    of_id: Mutex<HashMap<String, u32>>,
}

impl Handler for Effects {
    type Payload = Work;

    async fn handle(&self, work: Work, cx: &Context) -> Result<(), Failure> {
        let (id, attempt) = (cx.id(), cx.attempt());
        let first = {
            let mut of_id = self.of_id.lock().unwrap_or_else(PoisonError::into_inner);
            let runs = of_id.entry(id.to_owned()).or_default();
            *runs += 1;
            *runs == 1
        };
        let mut running = Running::begin(&self.log, cx, self.runs.fetch_add(1, Ordering::Relaxed));
        running.how = Ending::Failed;
        match (id.split_once('-').map_or(id, |(before, _)| before), first) {
            ("fail", _) | ("once", true) => Err("as its id says").retry()?,
            ("refuse", _) => Err("as its id says").reject()?,
            ("panic", _) | ("trip", true) => panic!("as its id says"),
            _ => {}
        }
        running.how = Ending::Dropped;
        let half = Duration::from_millis(work.ms) / 2;
        tokio::time::sleep(half).await;
        fault::point("effect.before");
        let applied = self.sink.apply(id, attempt).await;
        fault::point("effect.after");
        running.how = Ending::Failed;
        applied.in_doubt()?.in_doubt()?;
        if id.starts_with("late-") {
            panic!("after its effect, as its id says");
        }
        running.how = Ending::Dropped;
        tokio::time::sleep(half).await;
        running.how = Ending::Ok;
        Ok(())
    }

    async fn reconcile(&self, _: Work, cx: &Context) -> Result<Reconciled, Failure> {
        let found = reconcile(&self.sink, cx).await?;
        fault::point("reconcile.found");
        Ok(found)
    }
}
