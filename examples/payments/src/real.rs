//! The parts of the demo on real servers, each a process of its own.

use std::future::Future;
use std::pin::pin;
use std::time::Duration;

use oncegate::shutdown_signal;
use oncegate_admin::Metrics;
use oncegate_config::{Config, Traces};
use tokio::time::{interval, timeout};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::BrokerKind::{self, Kafka, Memory, Rabbitmq};
use crate::charge::Charge;
use crate::provider::Provider;
use crate::report::{Rejected, Report};
use crate::servers::{Queue, Topic};
use crate::traffic::{Broker, messages};
use crate::{Cli, Command, Result};

pub(crate) async fn run(command: Command, cli: &Cli) -> Result<Option<Report>> {
    std::fs::create_dir_all(&cli.run_dir)?;
    let config = Config::load()?;
    match command {
        Command::Produce => produce(cli, &config).await.map(|()| None),
        Command::Work => work(cli, config).await.map(|()| None),
        Command::Report => report(cli, &config).await.map(Some),
    }
}

pub(crate) async fn open(broker: BrokerKind, config: &Config) -> Result<Broker> {
    match broker {
        Memory => Err("--broker: kafka or rabbitmq is needed here".into()),
        Kafka => Ok(Broker::Kafka(Box::new(Topic::open(config).await?))),
        Rabbitmq => Ok(Broker::RabbitMq(Box::new(Queue::open(config).await?))),
    }
}

/// Sends payments, in ten batches a second.
async fn produce(cli: &Cli, config: &Config) -> Result<()> {
    let traces = Traces::from_environment("payments-producer")?;
    let layer = traces.as_ref().map(Traces::layer);
    tracing_subscriber::registry().with(layer).init();
    let broker = open(cli.broker, config).await?;
    let messages = messages(cli.payments, &cli.prefix, cli.seed);
    eprintln!("payments: sending {} messages", messages.len());
    let batch = cli.rate.div_ceil(10);
    let mut ticks = interval(Duration::from_secs(1) * batch / cli.rate);
    for batch in messages.chunks(batch as usize) {
        ticks.tick().await;
        broker.send(batch).await?;
    }
    Ok(())
}

/// Charges payments until `shutdown`.
pub(crate) async fn consume(config: Config, charge: Charge, shutdown: impl Future) -> Result<()> {
    #[cfg(feature = "postgres")]
    if charge.provider.inbox.is_some() {
        let inbox = oncegate_postgres::PostgresInbox::new(crate::inbox::ledger(&config).await?);
        let running = config.run_with_inbox(inbox.create_tables(), charge, shutdown);
        return Ok(running.await?);
    }
    Ok(config.run_until(charge, shutdown).await?)
}

/// Charges payments until SIGTERM, and saves the metrics five times a second.
async fn work(cli: &Cli, config: Config) -> Result<()> {
    if config.has("kafka.topic") && config.text("gate.broker") != Some("rabbitmq") {
        open(Kafka, &config).await?; // creates the topic
    }
    let metrics = Metrics::install()?;
    let name = fastrand::u64(..).to_string();
    let ledger = Provider::open(cli, &cli.run_dir)?;
    let provider = ledger.clone();
    let mut worker = pin!(consume(config, Charge { provider }, shutdown_signal()));
    loop {
        let ended = timeout(Duration::from_millis(200), &mut worker).await;
        let save = "INSERT OR REPLACE INTO workers VALUES (?, ?)";
        ledger.ledger().execute(save, [&name, &metrics.text()])?;
        if let Ok(ended) = ended {
            return ended;
        }
    }
}

/// Counts what the producers have sent, each with the name of its broker as the prefix.
async fn report(cli: &Cli, config: &Config) -> Result<Report> {
    let (mut all, mut sent) = (Rejected::default(), Vec::new());
    for (broker, key) in [(Kafka, "kafka.topic"), (Rabbitmq, "rabbitmq.queue")] {
        if config.has(key) {
            let rejected = open(broker, config).await?.rejected().await?;
            all.in_doubt.extend(rejected.in_doubt);
            all.dead_letters.extend(rejected.dead_letters);
            let prefix = key.split('.').next().unwrap_or_default();
            sent.extend(messages(cli.payments, prefix, cli.seed));
        }
    }
    let provider = Provider::open(cli, &cli.run_dir)?;
    let charges = provider.charges(config).await?;
    let saved = "SELECT coalesce(group_concat(metrics, '\n'), '') FROM workers";
    let metrics: String = provider.ledger().query_row(saved, [], |row| row.get(0))?;
    Ok(Report::of(&charges, &metrics, &sent, &all))
}
