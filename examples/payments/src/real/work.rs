//! `payments work`: one worker.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use oncegate::{Consumer, IdSource, Open, Redis, Sqlite, Store, shutdown_signal};
use tokio::time::Instant;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use super::admin::{self, Watched};
use super::rundir::RunDir;
use super::wire::Queue;
use super::{Error, Servers};
use crate::charge::Charge;
use crate::cli::{ATTEMPTS, Broker, Promise, StoreKind};
use crate::payment::ID_HEADER;
use crate::provider::Provider;

/// How often the counts are written down.
const NOTING: Duration = Duration::from_millis(200);
/// How often they are said, while they change.
const SAYING: Duration = Duration::from_secs(5);

/// A worker's settings.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where payments come from.
    #[arg(long, value_enum)]
    broker: Broker,
    #[command(flatten)]
    servers: Servers,
    #[command(flatten)]
    queue: Queue,
    /// What remembers ids, for all workers: a Redis, or the file `payments.db` in the run
    /// directory.
    #[arg(long, value_enum, default_value_t = StoreKind::Redis)]
    store: StoreKind,
    /// Where the payment provider is.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    provider: String,
    /// Where the counts are kept.
    #[arg(long, default_value = "payments-run")]
    run_dir: PathBuf,
    /// What the counts of this worker are kept under: a name of its own. By default the host's, or
    /// `worker`, and with a number behind it if a worker that runs has that. One that is started
    /// again goes on counting where the last one of its name stopped.
    #[arg(long)]
    worker: Option<String>,
    /// How long a claim holds without renewal, in milliseconds.
    #[arg(long, default_value_t = 2000)]
    lease: u64,
    /// How many payments are charged at once.
    #[arg(long, default_value_t = 256)]
    in_flight: usize,
    /// How many attempts a payment gets, and how many kills may hit it; a fault of the provider
    /// costs an attempt.
    #[arg(long, default_value_t = ATTEMPTS)]
    attempts: u32,
    /// Where to answer /live, /ready, /status and /metrics; with port 0 the system chooses, and it
    /// is said which.
    #[arg(long)]
    admin: Option<SocketAddr>,
    #[command(flatten)]
    promise: Promise,
}

/// Works until SIGTERM or Ctrl-C, then drains.
pub(super) async fn run(arguments: &Arguments) -> Result<(), Error> {
    let errors = oncegate_admin::LastErrors::new();
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let said = lines
        .and_then(errors.clone())
        .with_filter(EnvFilter::new("warn,oncegate=info,lapin=off"));
    let said = tracing_subscriber::registry().with(said);
    #[cfg(feature = "otlp")]
    let traces = super::traces::Traces::beside("payments-worker")?;
    #[cfg(feature = "otlp")]
    let said = said.with(traces.exporter().map(oncegate_config::Traces::layer));
    said.init();
    let watched = Watched::default();
    let (outcomes, _serving) = admin::open(arguments.admin, &watched, errors)?;
    let run_dir = RunDir::at(&arguments.run_dir)?;
    let taken = match &arguments.worker {
        Some(name) => run_dir.take_name(name)?,
        None => run_dir.take_free_name(&std::env::var("HOSTNAME").unwrap_or_default())?,
    };
    let worker = taken.name();
    // A worker that was killed and started again under its name goes on counting where the last one
    // stopped.
    let before = run_dir.counts_of(worker);
    let counts = || {
        let mut counts = outcomes.counts();
        counts.add(&before);
        counts
    };
    let noting = async {
        let (mut said, mut next) = (before.clone(), Instant::now() + SAYING);
        loop {
            tokio::time::sleep(NOTING).await;
            let counts = counts();
            if let Err(error) = run_dir.note_counts(worker, &counts) {
                eprintln!("payments: the counts are not written down: {error}");
            }
            if Instant::now() >= next {
                if counts != said {
                    eprintln!("payments: {counts}");
                }
                (said, next) = (counts, Instant::now() + SAYING);
            }
        }
    };
    tokio::select! {
        worked = consume(arguments, watched) => worked?,
        () = noting => {}
    }
    run_dir.note_counts(worker, &counts())
}

async fn consume(arguments: &Arguments, watched: Watched) -> Result<(), Error> {
    match arguments.broker {
        Broker::Memory => Err("--broker: a worker of its own needs kafka or rabbitmq".into()),
        #[cfg(feature = "kafka")]
        Broker::Kafka => {
            use oncegate::{Kafka, TopicCreation};
            let brokers = arguments.servers.kafka()?;
            super::kafka::create(&brokers, &arguments.queue.name).await?;
            let source = Kafka::topic(&arguments.queue.name)
                .brokers(brokers)
                .group(&arguments.queue.group)
                .create_topics(TopicCreation::Create {
                    partitions: 1,
                    replication: 1,
                })
                .property("session.timeout.ms", "6000")
                .property("heartbeat.interval.ms", "1000")
                .status(watched.kafka.clone());
            consume_from(source, arguments, watched).await
        }
        #[cfg(feature = "rabbitmq")]
        Broker::Rabbitmq => {
            let source =
                oncegate::RabbitMq::queue(&arguments.queue.name).url(arguments.servers.rabbitmq()?);
            consume_from(source.status(watched.rabbitmq.clone()), arguments, watched).await
        }
        #[allow(unreachable_patterns)]
        broker => Err(super::wire::not_in_this_build(broker)),
    }
}

async fn consume_from(
    source: impl Open,
    arguments: &Arguments,
    watched: Watched,
) -> Result<(), Error> {
    match arguments.store {
        StoreKind::Memory => Err(
            "--store: workers in processes of their own share no memory; take redis or sqlite"
                .into(),
        ),
        StoreKind::Redis => {
            consume_through(
                source,
                Redis::at(arguments.servers.redis()?),
                arguments,
                watched,
            )
            .await
        }
        StoreKind::Sqlite => {
            consume_through(
                source,
                Sqlite::file(RunDir::at(&arguments.run_dir)?.store()),
                arguments,
                watched,
            )
            .await
        }
    }
}

async fn consume_through(
    source: impl Open,
    store: impl Store + 'static,
    arguments: &Arguments,
    watched: Watched,
) -> Result<(), Error> {
    let lease = Duration::from_millis(arguments.lease);
    Consumer::builder()
        .source(source)
        .store(store)
        .guarantee(arguments.promise.guarantee.guarantee())
        .id(IdSource::header(ID_HEADER))
        .scope(&arguments.queue.name)
        .lease(lease)
        .backoff(Duration::from_millis(50), lease / 4)
        .max_attempts(arguments.attempts)
        .max_crashes(arguments.attempts.max(2))
        .max_in_flight(arguments.in_flight)
        .readiness(watched.readiness)
        .status(watched.status)
        .handler(Charge {
            provider: Provider::Http(crate::http::Client::at(&arguments.provider)?),
        })
        .run_until(shutdown_signal())
        .await?;
    Ok(())
}
