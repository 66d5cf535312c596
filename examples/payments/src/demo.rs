//! The whole demo: sends payments, kills workers meanwhile, waits for all settlements, and counts.

use std::future::pending;
use std::path::Path;
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use oncegate::{Consumer, MemoryBroker, SqliteInbox, Store};
use oncegate_config::Config;
use rustix::fs::{FlockOperation, flock};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::charge::Charge;
use crate::provider::Provider;
use crate::report::{Report, deliveries};
use crate::traffic::{Broker, DemoMessage, messages};
use crate::{BrokerKind, Cli, Result, WITH_INBOX};

const WORKERS: usize = 4;
/// How many workers are killed while payments are sent.
const KILLS: usize = 5;
/// A run ends after this time without a settled delivery. Kafka assigns partitions in less.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// On servers, a run with a correct report ends after this time, which is longer than a lease.
const IDLE_TIME: Duration = Duration::from_secs(3);

pub(crate) async fn run(cli: &Cli) -> Result<Report> {
    let is_embedded = cli.broker == BrokerKind::Memory;
    let store = cli.store.as_deref();
    let store = store.unwrap_or(if is_embedded { "sqlite" } else { "redis" });
    if cli.guarantee == WITH_INBOX && store != ["postgres", "sqlite"][usize::from(is_embedded)] {
        return Err("--guarantee with an inbox: add --broker and --store postgres, or none".into());
    }
    // A run without servers has the same name each time, so that a killed one is resumed.
    let name = match is_embedded && store == "sqlite" {
        true => format!("{}-seed-{}-{}", cli.guarantee, cli.seed, cli.payments),
        false => format!("payments-{:016x}", fastrand::u64(..)),
    };
    let run_dir = std::path::absolute(cli.run_dir.join(&name))?;
    let shown = run_dir.display();
    std::fs::create_dir_all(&run_dir).map_err(|error| format!("--run-dir {shown}: {error}"))?;
    let lock = std::fs::File::create(run_dir.join("lock"))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .map_err(|error| format!("{shown} is in use by another run: {error}"))?;
    let config = configure(cli, &name, &run_dir, store)?;
    let report = run_configured(cli, config, &run_dir).await;
    let report = report.map_err(|error| format!("{error}; the files of the run are in {shown}"))?;
    if cli.keep || !report.is_correct && cli.guarantee != "bare" {
        eprintln!("payments: ledger and store are kept in {shown}; to show one payment:");
        let tool = "cargo run -q -p oncegate-cli --";
        eprintln!("{tool} --config {shown}/oncegate.toml explain pay-000001");
    } else {
        // The rename removes store and ledger together: the next run must not find only one.
        let removed = run_dir.with_extension("removed");
        std::fs::rename(&run_dir, &removed)?;
        std::fs::remove_dir_all(removed)?;
        let _ = std::fs::remove_dir(&cli.run_dir); // fails if other runs use it
    }
    Ok(report)
}

/// Writes `oncegate.toml` for the workers and for the program `oncegate`, and reads it.
fn configure(cli: &Cli, name: &str, run_dir: &Path, store: &str) -> Result<Config> {
    let store = match store {
        "sqlite" => format!("sqlite:{}", run_dir.join("payments.db").display()),
        "postgres" => address("ONCEGATE_POSTGRES")? + "?options[search_path]=NAME",
        _ => address("ONCEGATE_REDIS")?,
    };
    let (broker, variable) = match cli.broker {
        BrokerKind::Memory => ("", ""),
        BrokerKind::Kafka => (include_str!("../kafka.toml"), "ONCEGATE_KAFKA"),
        BrokerKind::Rabbitmq => (include_str!("../rabbitmq.toml"), "ONCEGATE_RABBITMQ"),
    };
    let mut text = include_str!("../run.toml").replace("STORE", &store);
    if !broker.is_empty() {
        text += &broker.replace("SERVER", &address(variable)?);
    }
    let guarantee = cli.guarantee.replace(WITH_INBOX, "effectively-once");
    let text = text.replace("GUARANTEE", &guarantee).replace("NAME", name);
    let file = run_dir.join("oncegate.toml");
    std::fs::write(&file, text)?;
    Ok(Config::read(Some(&file), [])?)
}

/// The address of a server, from the environment or as `cargo xtask services up` has written it.
fn address(variable: &str) -> Result<String> {
    let file = std::fs::read_to_string("target/services.env").unwrap_or_default();
    let mut lines = file.lines();
    let written = lines.find_map(|line| line.strip_prefix(variable)?.strip_prefix('='));
    let address = std::env::var(variable).ok().or(written.map(str::to_owned));
    address.ok_or_else(|| {
        format!("{variable} is not set; set it, or run `cargo xtask services up`").into()
    })
}

async fn run_configured(cli: &Cli, config: Config, run_dir: &Path) -> Result<Report> {
    #[cfg(feature = "postgres")]
    if let Ok(postgres) = config.postgres(None) {
        crate::inbox::ledger(&config).await?;
        postgres.migrate().await?;
    }
    config.store()?.preflight(config.guarantee()).await?;
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
        provider: Provider::open(cli, run_dir)?,
        metrics: PrometheusBuilder::new().install_recorder()?,
        workers: Vec::new(),
        killed: 0,
    };
    for _ in 0..WORKERS {
        demo.start_worker()?;
    }
    demo.run().await?;
    demo.report().await
}

struct Demo<'a> {
    messages: &'a [DemoMessage],
    broker: Broker,
    config: Config,
    provider: Provider,
    metrics: PrometheusHandle,
    workers: Vec<JoinHandle<Result<()>>>,
    killed: usize,
}

impl Demo<'_> {
    fn start_worker(&mut self) -> Result<()> {
        let (config, provider) = (self.config.clone(), self.provider.clone());
        let (charge, shutdown) = (Charge { provider }, pending::<()>());
        self.workers.push(match &self.broker {
            Broker::Memory(broker) => {
                let builder = config.consumer(Consumer::builder())?;
                let consumer = builder.source(broker.source());
                if let Some(file) = &charge.provider.inbox {
                    let consumer = consumer.inbox(SqliteInbox::file(file));
                    let consumer = consumer.transactional_handler(charge);
                    tokio::spawn(async { Ok(consumer.run_until(shutdown).await?) })
                } else {
                    let consumer = consumer.store(config.store()?).handler(charge);
                    tokio::spawn(async { Ok(consumer.run_until(shutdown).await?) })
                }
            }
            #[cfg(feature = "real")]
            _ => tokio::spawn(crate::real::consume(config, charge, shutdown)),
        });
        Ok(())
    }

    /// Sends all messages in about five seconds, kills workers at regular intervals meanwhile, and
    /// returns when no more deliveries are settled.
    async fn run(&mut self) -> Result<()> {
        let mut batches = self.messages.chunks((self.messages.len() / 250).max(1));
        let batches_per_kill = batches.len() / (KILLS + 1);
        let (mut progress, mut since, mut progress_at_kill) = (0, Instant::now(), 0);
        loop {
            sleep(Duration::from_millis(20)).await;
            if let Some(ended) = self.workers.iter_mut().find(|it| it.is_finished()) {
                ended.await??;
            }
            let now = deliveries(&self.metrics.render(), "");
            if now != progress || batches.len() > 0 {
                (progress, since) = (now, Instant::now());
            }
            let kills_left = KILLS - self.killed;
            let is_due = kills_left > 0 && batches.len() <= kills_left * batches_per_kill;
            if is_due && progress != progress_at_kill {
                self.start_worker()?;
                let killed = self.workers.remove(0);
                killed.abort(); // drops the task, like a killed process
                let _ = killed.await; // an error, since it was aborted
                (self.killed, progress_at_kill) = (self.killed + 1, progress);
            }
            if let Some(batch) = batches.next() {
                self.broker.send(batch).await?;
            }
            let is_over = match &self.broker {
                Broker::Memory(broker) => {
                    broker.unsettled() == 0 && since.elapsed() > IDLE_TIME / 6
                }
                #[cfg(feature = "real")]
                _ => progress > 0 && since.elapsed() > IDLE_TIME && self.report().await?.is_correct,
            };
            if batches.len() == 0 && (is_over || since.elapsed() > STALL_TIMEOUT) {
                return Ok(());
            }
        }
    }

    async fn report(&self) -> Result<Report> {
        let rejected = self.broker.rejected().await?;
        let charges = self.provider.charges(&self.config).await?;
        let metrics = self.metrics.render();
        let mut report = Report::of(&charges, &metrics, self.messages, &rejected);
        let row = |killed| ("workers killed", killed, "while payments were sent");
        report.rows.push(row(self.killed as i64));
        Ok(report)
    }
}
