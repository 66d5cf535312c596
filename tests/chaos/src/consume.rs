//! One consumer process: what it reads, where its markers are and what it promises stand in its arguments.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use oncegate::{
    Consumer, Context, Failure, Guarantee, Handler, IdSource, Kafka, KafkaLogin, Knows, Open, RabbitMq, Reconciled, Redis, TopicCreation,
    async_trait,
};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::Error;
use crate::check::Promise;
use crate::ledger::{Ending, Found, Log, What};
use crate::message::{Fate, ID_HEADER, Work};
use crate::recorded::Recorded;
use crate::sink::Sink;

/// How long a handler may run: longer than the longest of the messages takes.
const TIMEOUT: Duration = Duration::from_secs(4);
/// How long a process that only sleeps may oversleep until that is worth a record.
const STALL: Duration = Duration::from_millis(300);

/// Where messages come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Broker {
    /// Kafka.
    Kafka,
    /// RabbitMQ.
    Rabbitmq,
}

impl Broker {
    /// As it stands on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::Rabbitmq => "rabbitmq",
        }
    }
}

/// What a consumer is started with.
#[derive(Args)]
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
    /// With what to log in to Kafka: a name, a password, and the file with the authority's certificate.
    #[arg(long, num_args = 3)]
    login: Option<Vec<String>>,
    /// The topic or the queue; the group and the scope, too.
    #[arg(long)]
    from: String,
    /// Where the markers are.
    #[arg(long)]
    redis: String,
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
    note_stalls(Arc::clone(&log));
    let sink = Sink::connect(arguments.sink, &arguments.name).await?;
    match arguments.broker {
        Broker::Kafka => {
            let mut source = Kafka::topic(&arguments.from)
                .brokers(&arguments.url)
                .group(&arguments.from)
                .create_topics(TopicCreation::Create { partitions: 1, replication: 1 })
                .property("session.timeout.ms", "6000")
                .property("heartbeat.interval.ms", "1000");
            if let Some([name, password, authority]) = arguments.login.as_deref() {
                source = source.ca_certificate(authority).login(KafkaLogin::scram_sha_512(name, password));
            }
            consume(source, &arguments, sink, log, terminate).await
        }
        Broker::Rabbitmq => {
            let source = RabbitMq::queue(&arguments.from).url(&arguments.url);
            consume(source, &arguments, sink, log, terminate).await
        }
    }
}

async fn consume(
    source: impl Open + fmt::Debug,
    arguments: &Arguments,
    sink: Sink,
    log: Arc<Log>,
    mut terminate: Signal,
) -> Result<(), Error> {
    let guarantee = match arguments.guarantee {
        Promise::AtMostOnce => Guarantee::AtMostOnce,
        Promise::EffectivelyOnce => Guarantee::EffectivelyOnce,
        Promise::Bare => Guarantee::Bare,
    };
    let store = Redis::at(&arguments.redis);
    // Into the log, where no secret may stand.
    eprintln!("source: {source:?}\nstore: {store:?}");
    Consumer::builder()
        .source(Recorded::new(source, Arc::clone(&log)))
        .store(Recorded::new(store, Arc::clone(&log)))
        .handler(Effects { sink, log, runs: AtomicU64::new(0) })
        .guarantee(guarantee)
        .id(IdSource::header(ID_HEADER))
        .scope(&arguments.from)
        .lease(Duration::from_millis(arguments.lease_ms))
        .backoff(Duration::from_millis(50), Duration::from_millis(400))
        .retries(1)
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

/// Has the effect of a message at the sink, in the middle of its time.
struct Effects {
    sink: Sink,
    log: Arc<Log>,
    runs: AtomicU64,
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
        self.log.write(What::Started { id: id.to_owned(), attempt, run });
        let mut running = Running { log: &self.log, id, run, how: Ending::Dropped };
        let half = Duration::from_millis(work.ms) / 2;
        tokio::time::sleep(half).await;
        running.how = Ending::Failed;
        match Fate::of(id) {
            Fate::Fail => Err("as its id says").retry()?,
            Fate::Panic => panic!("as its id says"),
            Fate::Hang => {
                running.how = Ending::Dropped;
                std::future::pending().await
            }
            Fate::Abort => {
                self.log.write(What::Aborting { id: id.to_owned() });
                std::process::abort()
            }
            Fate::Work => {}
        }
        running.how = Ending::Dropped;
        let applied = self.sink.apply(id, attempt).await;
        running.how = Ending::Failed;
        applied.in_doubt()?.in_doubt()?;
        running.how = Ending::Dropped;
        tokio::time::sleep(half).await;
        running.how = Ending::Ok;
        Ok(())
    }

    async fn reconcile(&self, _: Work, cx: &Context) -> Result<Reconciled, Failure> {
        Ok(match self.sink.find_or_void(cx.id(), cx.attempt()).await.retry()? {
            Found::Happened => Reconciled::Happened,
            Found::Voided => Reconciled::DidNotHappen,
        })
    }
}

/// Writes down when this process did not run, as on a machine that is too busy.
fn note_stalls(log: Arc<Log>) {
    std::thread::spawn(move || {
        let every = Duration::from_millis(50);
        let mut last = Instant::now();
        loop {
            std::thread::sleep(every);
            let late = last.elapsed().saturating_sub(every);
            if late > STALL {
                log.write(What::Stalled { ms: u64::try_from(late.as_millis()).unwrap_or(u64::MAX) });
            }
            last = Instant::now();
        }
    });
}
