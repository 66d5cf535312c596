//! What the consumer processes of runs and of cells share: how they begin, what they are told, and
//! what they write down.

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
use crate::check::Promise;
use crate::counters::Counters;
use crate::ledger::{Ending, Found, Log, What};
use crate::sink::Sink;

/// Where messages come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
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

/// What every consumer is started with.
#[derive(Debug, Args)]
pub struct Common {
    /// Its name in the ledger.
    #[arg(long)]
    pub name: String,
    /// Where its file of the ledger lies.
    #[arg(long)]
    pub folder: PathBuf,
    /// Where messages come from.
    #[arg(long, value_enum)]
    pub broker: Broker,
    /// Kafka's bootstrap servers, or RabbitMQ's URL.
    #[arg(long)]
    pub url: String,
    /// The topic or the queue; the group and the scope, too.
    #[arg(long)]
    pub from: String,
    /// What is promised.
    #[arg(long, value_enum)]
    pub guarantee: Promise,
    /// Where effects are counted.
    #[arg(long)]
    pub sink: SocketAddr,
    /// How long a claim holds, in milliseconds.
    #[arg(long)]
    pub lease_ms: u64,
    /// How long a drain may take, in milliseconds.
    #[arg(long)]
    pub drain_ms: u64,
    /// How many messages are handled at once.
    #[arg(long)]
    pub in_flight: usize,
}

impl Common {
    /// What is promised, as oncegate calls it.
    pub fn guarantee(&self) -> Guarantee {
        match self.guarantee {
            Promise::AtMostOnce => Guarantee::AtMostOnce,
            Promise::EffectivelyOnce => Guarantee::EffectivelyOnce,
            Promise::Bare => Guarantee::Bare,
        }
    }

    /// How long a claim holds.
    pub fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }

    /// How long a drain may take.
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

/// A consumer process that has begun.
pub struct Worker {
    /// Its file of the ledger.
    pub log: Arc<Log>,
    /// Where effects are counted.
    pub sink: Sink,
    terminate: Signal,
    counters: Counters,
}

impl Worker {
    /// Opens what every consumer needs; its own log goes to standard error.
    ///
    /// # Errors
    /// What the system or the sink said.
    pub async fn begin(told: &Common) -> Result<Self, Error> {
        let filter =
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .init();
        // Before its file of the ledger is there: whoever sees that knows that it can be told to
        // drain.
        let terminate = signal(SignalKind::terminate())?;
        let log = Arc::new(Log::open(
            &told.folder.join(format!("{}.jsonl", told.name)),
            &told.name,
        )?);
        let counters = Counters::install(Arc::clone(&log), &told.folder, &told.name)?;
        let sink = Sink::connect(told.sink, &told.name).await?;
        Ok(Self {
            log,
            sink,
            terminate,
            counters,
        })
    }

    /// Runs what this makes of the future that ends with SIGTERM, and writes down what was counted,
    /// if it ends well.
    ///
    /// # Errors
    /// Those of what runs.
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
            Ok(()) => counters.write_the_last(),
            Err(error) => log.write(What::Failed {
                error: error.to_string(),
            }),
        }
        Ok(ended?)
    }
}

/// Tells of SIGTERM.
pub struct Terminated(Signal);

impl Terminated {
    /// Returns when the process was told to end.
    pub async fn come(mut self) {
        self.0.recv().await;
    }
}

/// A run of a handler: whatever becomes of it, its end is written down.
pub struct Running<'a> {
    log: &'a Log,
    id: &'a str,
    run: u64,
    /// How it would end now.
    pub how: Ending,
}

impl<'a> Running<'a> {
    /// Writes down that it has begun.
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
            how: Ending::Dropped,
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let how = if std::thread::panicking() {
            Ending::Panicked
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
/// That the sink does not say.
pub async fn reconcile(sink: &Sink, cx: &Context) -> Result<Reconciled, Failure> {
    Ok(
        match sink.find_or_void(cx.id(), cx.attempt()).await.retry()? {
            Found::Happened => Reconciled::Happened,
            Found::Voided => Reconciled::DidNotHappen,
        },
    )
}
