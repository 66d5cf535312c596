//! The whole demo: sends payments, kills workers meanwhile, waits until nothing changes, and
//! counts.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use oncegate::{Consumer, MemoryBroker, Store, shutdown_signal};
use oncegate_config::{AnyStore, Config};
use rustix::fs::{FlockOperation, flock};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, interval, sleep};

use crate::Error;
use crate::charge::Charge;
use crate::provider::Provider;
use crate::report::Report;
use crate::traffic::{Broker, Outgoing, messages};
use crate::{BrokerKind, Cli, Promise, StoreKind, word};

const WORKERS: usize = 4;
/// How many workers are killed while payments are sent.
const KILLS: usize = 5;
/// How long nothing may change before a run is over in any case: longer than Kafka needs to assign
/// partitions.
const STUCK: Duration = Duration::from_secs(60);
/// How long nothing may change before a run is over if all is accounted for: longer than a lease.
const QUIET: Duration = Duration::from_secs(3);

pub(crate) async fn run(cli: &Cli) -> Result<Report, Error> {
    let is_embedded = cli.broker == BrokerKind::Memory;
    let is_sqlite = cli.store.map_or(is_embedded, |it| it == StoreKind::Sqlite);
    // A run with nothing but files has the same name each time, to resume one that was killed.
    let name = match is_embedded && is_sqlite {
        true => format!("{}-seed-{}-{}", word(cli.guarantee), cli.seed, cli.payments),
        false => format!("payments-{:016x}", fastrand::u64(..)),
    };
    let above = match is_sqlite {
        true => cli.run_dir.clone(),
        false => std::env::temp_dir(),
    };
    let run_dir = std::path::absolute(above.join(&name))?;
    let shown = run_dir.display();
    std::fs::create_dir_all(&run_dir).map_err(|error| format!("--run-dir {shown}: {error}"))?;
    let lock = std::fs::File::create(run_dir.join("lock"))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .map_err(|error| format!("{shown} is in use by another run: {error}"))?;
    let report = tokio::select! {
        report = run_in(cli, &name, &run_dir, is_sqlite) => report,
        () = shutdown_signal() => Err("stopped by a signal".into()),
    };
    let report = report.map_err(|error| format!("{error}; the files of the run are in {shown}"))?;
    if cli.keep || !report.is_right() && cli.guarantee != Promise::Bare {
        eprintln!("payments: ledger and store are kept in {shown}; to show one payment:");
        let tool = "cargo run -q -p oncegate-cli --";
        eprintln!("{tool} --config {shown}/oncegate.toml explain pay-000001");
    } else {
        // At once: the next run must not find the store without its ledger.
        let removed = run_dir.with_extension("removed");
        std::fs::rename(&run_dir, &removed)?;
        std::fs::remove_dir_all(removed)?;
        let _ = std::fs::remove_dir(above); // fails if other runs use it
    }
    Ok(report)
}

/// Writes `oncegate.toml`, for the workers and for the operator's tool, and reads it.
fn configure(cli: &Cli, name: &str, run_dir: &Path, is_sqlite: bool) -> Result<Config, Error> {
    let store = match is_sqlite {
        true => format!("sqlite:{}", run_dir.join("payments.db").display()),
        false => address("ONCEGATE_REDIS")?,
    };
    let (broker, server) = match cli.broker {
        BrokerKind::Memory => ("", String::new()),
        BrokerKind::Kafka => (include_str!("../kafka.toml"), address("ONCEGATE_KAFKA")?),
        BrokerKind::Rabbitmq => (
            include_str!("../rabbitmq.toml"),
            address("ONCEGATE_RABBITMQ")?,
        ),
    };
    let text = include_str!("../run.toml").to_owned() + broker;
    let text = text
        .replace("GUARANTEE", &word(cli.guarantee))
        .replace("NAME", name);
    let text = text.replace("STORE", &store).replace("SERVER", &server);
    let file = run_dir.join("oncegate.toml");
    std::fs::write(&file, text)?;
    Ok(Config::read(Some(&file), [])?)
}

/// The address of a server, from the environment or as `cargo xtask services up` has written it.
fn address(variable: &str) -> Result<String, Error> {
    let written = std::fs::read_to_string("target/services.env").unwrap_or_default();
    let mut lines = written.lines().filter_map(|line| line.split_once('='));
    let written = lines.find(|(name, _)| *name == variable);
    let written = written.map(|(_, value)| value.to_owned());
    std::env::var(variable).ok().or(written).ok_or_else(|| {
        format!("{variable} is not set; set it, or run `cargo xtask services up`").into()
    })
}

async fn run_in(cli: &Cli, name: &str, run_dir: &Path, is_sqlite: bool) -> Result<Report, Error> {
    let config = configure(cli, name, run_dir, is_sqlite)?;
    let store = config.store()?;
    store.preflight(config.guarantee()).await?;
    let mut demo = Demo {
        messages: &messages(cli.payments, "pay", cli.seed),
        broker: match cli.broker {
            BrokerKind::Memory => Broker::Memory(MemoryBroker::new("payments")),
            #[cfg(feature = "real")]
            kind => crate::real::open(kind, &config).await?,
            #[cfg(not(feature = "real"))]
            _ => return Err("--broker: not in this build; add --features kafka,rabbitmq".into()),
        },
        config,
        store,
        provider: Provider::open(cli, run_dir)?,
        metrics: PrometheusBuilder::new().install_recorder()?,
        workers: Vec::new(),
        shutdown: Arc::default(),
        killed: 0,
    };
    for _ in 0..WORKERS {
        demo.start_worker()?;
    }
    demo.send().await?;
    demo.settle().await?;
    demo.shutdown.notify_waiters();
    for worker in std::mem::take(&mut demo.workers) {
        worker.await??;
    }
    demo.report().await
}

struct Demo<'a> {
    messages: &'a [Outgoing],
    broker: Broker,
    config: Config,
    store: AnyStore,
    provider: Provider,
    metrics: PrometheusHandle,
    workers: Vec<JoinHandle<Result<(), oncegate::Error>>>,
    shutdown: Arc<Notify>,
    killed: usize,
}

impl Demo<'_> {
    fn start_worker(&mut self) -> Result<(), Error> {
        let (config, provider) = (&self.config, self.provider.clone());
        let consumer = config
            .consumer(Consumer::builder())?
            .allow_volatile_store() // the demo kills no machine
            .store(self.store.clone())
            .handler(Charge { provider });
        let shutdown = Arc::clone(&self.shutdown).notified_owned();
        let worker = match &self.broker {
            Broker::Memory(it) => tokio::spawn(consumer.source(it.source()).run_until(shutdown)),
            #[cfg(feature = "real")]
            Broker::Kafka(_) => tokio::spawn(consumer.source(config.kafka()?).run_until(shutdown)),
            #[cfg(feature = "real")]
            Broker::RabbitMq(_) => {
                tokio::spawn(consumer.source(config.rabbitmq()?).run_until(shutdown))
            }
        };
        self.workers.push(worker);
        Ok(())
    }

    /// Sends all messages within about five seconds, and kills workers at regular intervals, each
    /// while payments are charged: its task is dropped, as if its process had ended.
    async fn send(&mut self) -> Result<(), Error> {
        let batches = self.messages.chunks((self.messages.len() / 250).max(1));
        let (all, mut before) = (batches.len(), 0);
        let mut ticks = interval(Duration::from_millis(20));
        for (sent, batch) in (1..).zip(batches) {
            ticks.tick().await;
            let is_due = self.killed < KILLS && sent * (KILLS + 1) >= (self.killed + 1) * all;
            let begun = Instant::now();
            while is_due && sent > 1 && self.progress()? == before && begun.elapsed() < STUCK {
                sleep(Duration::from_millis(10)).await;
            }
            self.broker.send(batch).await?;
            if is_due {
                sleep(Duration::from_millis(5)).await;
                self.start_worker()?;
                let killed = self.workers.remove(0);
                killed.abort();
                let _ = killed.await; // an error, since it was aborted
                (self.killed, before) = (self.killed + 1, self.progress()?);
            }
        }
        Ok(())
    }

    /// Waits until nothing changes any more.
    async fn settle(&mut self) -> Result<(), Error> {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            sleep(Duration::from_millis(100)).await;
            if let Some(ended) = self.workers.iter_mut().find(|it| it.is_finished()) {
                ended.await??;
            }
            let now = self.progress()?;
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            let is_over = match &self.broker {
                Broker::Memory(broker) => broker.unsettled() == 0 && since.elapsed() > QUIET / 6,
                #[cfg(feature = "real")]
                _ => seen > 0 && since.elapsed() > QUIET && self.report().await?.is_right(),
            };
            if is_over || since.elapsed() > STUCK {
                return Ok(());
            }
        }
    }

    /// A number that changes while messages are handled.
    fn progress(&self) -> Result<i64, Error> {
        let mut ledger = self.provider.ledger();
        ledger.note_counts("tasks", &self.metrics.render())?;
        Ok(ledger.counts()?.values().sum())
    }

    async fn report(&self) -> Result<Report, Error> {
        self.progress()?;
        let rejected = self.broker.rejected().await?;
        let ledger = self.provider.ledger();
        let (charges, counts) = (ledger.charges()?, ledger.counts()?);
        let mut report = Report::of(&charges, &counts, self.messages, &rejected);
        let killed = (
            "workers killed",
            self.killed as i64,
            "while payments were sent",
        );
        report.rows.push(killed);
        Ok(report)
    }
}
