//! What the consumer processes of runs and of matrix cells share: arguments, start, and records.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use oncegate::{
    Context, Failure, FailureExt, Guarantee, Kafka, RabbitMq, Reconciled, TopicCreation,
};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::Error;
use crate::check::TestedGuarantee;
use crate::counters::ProcessMetrics;
use crate::ledger::{HandlerEnd, Log, Lookup, What};
use crate::sink::Sink;

/// The broker of the messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Broker {
    /// Kafka.
    Kafka,
    /// RabbitMQ.
    Rabbitmq,
}

impl Broker {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::Rabbitmq => "rabbitmq",
        }
    }
}

/// The arguments of every consumer.
#[derive(Debug, Args)]
pub struct CommonArguments {
    /// Its name in the ledger.
    #[arg(long)]
    pub name: String,
    /// The folder of its ledger file.
    #[arg(long)]
    pub folder: PathBuf,
    /// The broker of the messages.
    #[arg(long, value_enum)]
    pub broker: Broker,
    /// Kafka's bootstrap servers, or RabbitMQ's URL.
    #[arg(long)]
    pub url: String,
    /// The topic or queue; also the group and the scope.
    #[arg(long)]
    pub from: String,
    /// The guarantee.
    #[arg(long, value_enum)]
    pub guarantee: TestedGuarantee,
    /// The address of the sink.
    #[arg(long)]
    pub sink: SocketAddr,
    /// The lease, in milliseconds.
    #[arg(long)]
    pub lease_ms: u64,
    /// The drain timeout, in milliseconds.
    #[arg(long)]
    pub drain_ms: u64,
    /// The maximum number of messages in flight.
    #[arg(long)]
    pub in_flight: usize,
}

impl CommonArguments {
    /// The guarantee as a type of oncegate.
    pub fn guarantee(&self) -> Guarantee {
        match self.guarantee {
            TestedGuarantee::AtMostOnce => Guarantee::AtMostOnce,
            TestedGuarantee::EffectivelyOnce => Guarantee::EffectivelyOnce,
            TestedGuarantee::Bare => Guarantee::Bare,
        }
    }

    /// The lease.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }

    /// The drain timeout.
    pub fn drain(&self) -> Duration {
        Duration::from_millis(self.drain_ms)
    }

    /// The topic, with a group of the same name.
    pub fn kafka(&self) -> Kafka {
        let creation = TopicCreation::Create {
            partitions: 1,
            replication: 1,
        };
        Kafka::topic(&self.from)
            .brokers(&self.url)
            .group(&self.from)
            .create_topics(creation)
    }

    /// The queue.
    pub fn rabbit(&self) -> RabbitMq {
        RabbitMq::queue(&self.from).url(&self.url)
    }
}

/// A started consumer process.
pub struct Worker {
    /// Its file of the ledger.
    pub log: Arc<Log>,
    /// Where effects are counted.
    pub sink: Sink,
    terminate: Signal,
    counters: ProcessMetrics,
}

impl Worker {
    /// Installs logging to standard error, the SIGTERM handler, the ledger file and the metrics,
    /// and connects to the sink.
    ///
    /// # Errors
    /// The operating system's, or no connection to the sink.
    pub async fn begin(common: &CommonArguments) -> Result<Self, Error> {
        let filter =
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
        // Before the ledger file is created: its existence tells the harness that SIGTERM is
        // handled.
        let terminate = signal(SignalKind::terminate())?;
        let log = Arc::new(Log::open(
            &common.folder.join(format!("{}.jsonl", common.name)),
            &common.name,
        )?);
        let counters = ProcessMetrics::install(Arc::clone(&log), &common.folder, &common.name)?;
        let sink = Sink::connect(common.sink, &common.name).await?;
        Ok(Self {
            log,
            sink,
            terminate,
            counters,
        })
    }

    /// Runs `consume`, which gets a future that ends at SIGTERM. Writes the final counters, or
    /// records the error.
    ///
    /// # Errors
    /// The error of the consumer.
    pub async fn run<F: Future<Output = Result<(), oncegate::Error>>>(
        self,
        consume: impl FnOnce(Terminated) -> F,
    ) -> Result<(), Error> {
        let Self {
            terminate,
            counters,
            log,
            ..
        } = self;
        let ended = consume(Terminated(terminate)).await;
        match &ended {
            Ok(()) => counters.write_final(),
            Err(error) => log.write(What::Failed {
                error: error.to_string(),
            }),
        }
        Ok(ended?)
    }
}

/// Waits for SIGTERM.
pub struct Terminated(Signal);

impl Terminated {
    /// Returns when SIGTERM arrives.
    pub async fn wait(mut self) {
        self.0.recv().await;
    }
}

/// A run of a handler. Records its end when it is dropped.
pub struct RecordedRun<'a> {
    log: &'a Log,
    id: &'a str,
    run: u64,
    /// How the run ended, if it is dropped now.
    pub how: HandlerEnd,
}

impl<'a> RecordedRun<'a> {
    /// Records the start.
    pub fn begin(log: &'a Log, cx: &'a Context, run: u64) -> Self {
        let (id, attempt) = (cx.id(), cx.attempt());
        log.write(What::Started {
            id: id.to_owned(),
            attempt,
            run,
        });
        Self {
            log,
            id,
            run,
            how: HandlerEnd::Dropped,
        }
    }
}

impl Drop for RecordedRun<'_> {
    fn drop(&mut self) {
        let how = if std::thread::panicking() {
            HandlerEnd::Panicked
        } else {
            self.how
        };
        self.log.write(What::Ended {
            id: self.id.to_owned(),
            run: self.run,
            how,
        });
    }
}

/// Asks the sink whether an effect has happened, and voids its attempt if not.
///
/// # Errors
/// The sink did not reply.
pub async fn reconcile(sink: &Sink, cx: &Context) -> Result<Reconciled, Failure> {
    Ok(
        match sink.find_or_void(cx.id(), cx.attempt()).await.retry()? {
            Lookup::Happened => Reconciled::Happened,
            Lookup::Voided => Reconciled::DidNotHappen,
        },
    )
}
