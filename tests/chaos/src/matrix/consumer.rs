//! The consumer process of a cell: as small as can be, with what a step or a wrong version needs to show itself.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, ValueEnum};
use oncegate::{
    Consumer, Context, Failure, Guarantee, Handler, IdSource, Kafka, Knows, Open, RabbitMq, Reconciled, Redis, Sqlite, Store,
    TopicCreation, async_trait, fault,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::tricks::{Timed, Trick, Tricky};
use crate::Error;
use crate::check::Promise;
use crate::consume::Broker;
use crate::ledger::{Ending, Found, Log, What};
use crate::message::{ID_HEADER, Work};
use crate::recorded::Recorded;
use crate::sink::Sink;

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
    /// Its name in the ledger.
    #[arg(long)]
    name: String,
    /// Where its file of the ledger lies.
    #[arg(long)]
    folder: PathBuf,
    /// Where messages come from.
    #[arg(long, value_enum)]
    broker: Broker,
    /// Kafka's bootstrap servers, or RabbitMQ's URL.
    #[arg(long)]
    url: String,
    /// The topic or the queue; the group and the scope, too.
    #[arg(long)]
    from: String,
    /// What keeps the markers.
    #[arg(long, value_enum)]
    markers: Markers,
    /// Where they are: a URL or a file.
    #[arg(long)]
    store: String,
    /// What is promised.
    #[arg(long, value_enum)]
    guarantee: Promise,
    /// Where effects are counted.
    #[arg(long)]
    sink: SocketAddr,
    /// How long a claim holds, in milliseconds.
    #[arg(long)]
    lease_ms: u64,
    /// How long a drain may take, in milliseconds.
    #[arg(long)]
    drain_ms: u64,
    /// How many messages are handled at once.
    #[arg(long)]
    in_flight: usize,
    /// The first pause before what has failed is tried again, in milliseconds.
    #[arg(long, default_value_t = 50)]
    pause_ms: u64,
    /// The longest, in milliseconds.
    #[arg(long, default_value_t = 300)]
    longest_pause_ms: u64,
    /// How long ids are remembered, in milliseconds.
    #[arg(long, default_value_t = 3_600_000)]
    window_ms: u64,
    /// What the network does to it.
    #[arg(long, value_enum, default_value_t = Trick::None)]
    trick: Trick,
}

/// Consumes until SIGTERM, then drains. Ends at once when its standard input ends: who started it is gone.
///
/// # Errors
/// What the consumer says.
pub async fn run(arguments: Arguments) -> Result<(), Error> {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    // Before its file of the ledger is there: whoever sees that knows that it can be told to drain.
    let terminate = signal(SignalKind::terminate())?;
    let log = Arc::new(Log::open(&arguments.folder.join(format!("{}.jsonl", arguments.name)), &arguments.name)?);
    let sink = Sink::connect(arguments.sink, &arguments.name).await?;
    match arguments.broker {
        Broker::Kafka => {
            let source = Kafka::topic(&arguments.from)
                .brokers(&arguments.url)
                .group(&arguments.from)
                .create_topics(TopicCreation::Create { partitions: 1, replication: 1 })
                .property("session.timeout.ms", "1000")
                .property("heartbeat.interval.ms", "200")
                .property("auto.commit.interval.ms", "200");
            consume(source, &arguments, sink, log, terminate).await
        }
        Broker::Rabbitmq => {
            let source = RabbitMq::queue(&arguments.from).url(&arguments.url);
            consume(source, &arguments, sink, log, terminate).await
        }
    }
}

async fn consume(source: impl Open, arguments: &Arguments, sink: Sink, log: Arc<Log>, mut terminate: Signal) -> Result<(), Error> {
    let guarantee = match arguments.guarantee {
        Promise::AtMostOnce => Guarantee::AtMostOnce,
        Promise::EffectivelyOnce => Guarantee::EffectivelyOnce,
        Promise::Bare => Guarantee::Bare,
    };
    let store: Arc<dyn Store> = match arguments.markers {
        Markers::Redis => Arc::new(Redis::at(&arguments.store)),
        Markers::Sqlite => Arc::new(Sqlite::file(&arguments.store)),
    };
    let store = Arc::new(Timed::new(store, Arc::clone(&log)));
    let mut builder = Consumer::builder();
    if arguments.markers == Markers::Sqlite {
        // Its file lies in memory, which a power cut would empty. Here processes end, and no machine.
        builder = builder.accept_forgetful_store();
    }
    builder
        .source(Recorded::new(source, Arc::clone(&log)))
        .store(Recorded::new(Tricky::new(store, arguments.trick), Arc::clone(&log)))
        .handler(Effects { sink, log, runs: AtomicU64::new(0), of_id: Mutex::default() })
        .guarantee(guarantee)
        .id(IdSource::header(ID_HEADER))
        .scope(&arguments.from)
        .lease(Duration::from_millis(arguments.lease_ms))
        .window(Duration::from_millis(arguments.window_ms))
        .backoff(Duration::from_millis(arguments.pause_ms), Duration::from_millis(arguments.longest_pause_ms))
        .attempts(3)
        .retries(0)
        .reconciles(3)
        .handler_timeout(TIMEOUT)
        .in_flight(arguments.in_flight)
        .drain(Duration::from_millis(arguments.drain_ms))
        .run_until(async move {
            terminate.recv().await;
        })
        .await?;
    Ok(())
}

/// Has the effect of a message at the sink, in the middle of its time, or does what its id begins with.
struct Effects {
    sink: Sink,
    log: Arc<Log>,
    runs: AtomicU64,
    /// How often each id was run here.
    of_id: Mutex<HashMap<String, u32>>,
}

/// A run of a handler: whatever becomes of it, its end is written down.
struct Running<'a> {
    log: &'a Log,
    id: &'a str,
    run: u64,
    how: Ending,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let how = if std::thread::panicking() { Ending::Panicked } else { self.how };
        self.log.write(What::Ended { id: self.id.to_owned(), run: self.run, how });
    }
}

#[async_trait]
impl Handler for Effects {
    type Payload = Work;

    async fn handle(&self, work: Work, cx: &Context) -> Result<(), Failure> {
        let (id, attempt, run) = (cx.id(), cx.attempt(), self.runs.fetch_add(1, Ordering::Relaxed));
        let first = {
            let mut of_id = self.of_id.lock().unwrap_or_else(PoisonError::into_inner);
            let runs = of_id.entry(id.to_owned()).or_default();
            *runs += 1;
            *runs == 1
        };
        self.log.write(What::Started { id: id.to_owned(), attempt, run });
        let mut running = Running { log: &self.log, id, run, how: Ending::Failed };
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
        let found = self.sink.find_or_void(cx.id(), cx.attempt()).await.retry()?;
        fault::point("reconcile.found");
        Ok(match found {
            Found::Happened => Reconciled::Happened,
            Found::Voided => Reconciled::DidNotHappen,
        })
    }
}
