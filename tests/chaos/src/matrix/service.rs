//! The process of a matrix cell with an inbox: a service that records messages in PostgreSQL and
//! sends two more for each, its relay, and the service that receives them.

use std::collections::HashSet;

use clap::Args;
use oncegate::internal::{Lock, fault};
use oncegate::outbox::Publisher;
use oncegate::source::Connect;
use oncegate::{
    BatchItem, BatchTransactionalHandler, Consumer, Context, Failure, FailureExt, IdSource, Kafka,
    Outgoing, RabbitMq, Relay, TopicCreation, TransactionalHandler, shutdown_signal,
};
use oncegate_postgres::{PostgresInbox, PostgresOutbox, PostgresTransaction};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use super::consumer::TestedStore;
use crate::Error;
use crate::message::{ID_HEADER, Work};
use crate::worker::Broker;

/// Connections of the pool of each consumer; also its messages in flight without batches.
const CONNECTIONS: u32 = 4;
/// The size in bytes of a header that does not fit into a frame of [`RABBITMQ_FRAME`].
const LARGE_HEADER: usize = 20_000;
/// Lowers the maximum size of a frame, so that RabbitMQ cannot take a message with that header.
const RABBITMQ_FRAME: &str = "?frame_max=8192";

/// The arguments of the process.
#[derive(Debug, Args)]
pub struct Arguments {
    #[arg(long, value_enum)]
    broker: Broker,
    /// Kafka's bootstrap servers, or RabbitMQ's URL.
    #[arg(long)]
    url: String,
    /// The topic or queue of the first service.
    #[arg(long)]
    from: String,
    /// The topic or queue of the second service.
    #[arg(long)]
    to: String,
    /// The URL of the database, with the schema of the cell.
    #[arg(long)]
    database: String,
    /// The kind of transactions.
    #[arg(long, value_enum)]
    markers: TestedStore,
}

/// Runs both services and the relay until SIGTERM.
///
/// # Errors
/// The error of a consumer or of the relay.
pub async fn run(arguments: Arguments) -> Result<(), Error> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let service = TwoServices {
        arguments: &arguments,
        pool: PgPoolOptions::new()
            .max_connections(2 * CONNECTIONS)
            .connect(&arguments.database)
            .await?,
    };
    let (from, to) = (&arguments.from, &arguments.to);
    match arguments.broker {
        Broker::Kafka => {
            let creation = TopicCreation::Create {
                partitions: 1,
                replication: 1,
            };
            let topic = |name: &str| {
                Kafka::topic(name)
                    .brokers(&arguments.url)
                    .group(name)
                    .create_topics(creation)
                    .property("session.timeout.ms", "1000")
                    .property("heartbeat.interval.ms", "200")
                    .property("auto.commit.interval.ms", "200")
            };
            let publisher = topic(from).publisher();
            let id = IdSource::header("message-id");
            service.run(topic(from), publisher, topic(to), id).await
        }
        Broker::Rabbitmq => {
            let queue =
                |name: &str| RabbitMq::queue(name).url(arguments.url.clone() + RABBITMQ_FRAME);
            let (publisher, id) = (queue(from).publisher(), IdSource::message_id());
            service.run(queue(from), publisher, queue(to), id).await
        }
    }
}

struct TwoServices<'a> {
    arguments: &'a Arguments,
    pool: PgPool,
}

impl TwoServices<'_> {
    async fn run(
        self,
        first: impl Connect,
        publisher: impl Publisher,
        second: impl Connect,
        id: IdSource,
    ) -> Result<(), Error> {
        let relay = Relay::from(PostgresOutbox::new(&self.pool)).to(publisher);
        let sends_to = Some(self.arguments.to.clone());
        let first = self.consume(first, IdSource::header(ID_HEADER), "received", sends_to);
        let second = self.consume(second, id, "forwarded", None);
        tokio::try_join!(relay.run_until(shutdown_signal()), first, second)?;
        Ok(())
    }

    async fn consume(
        &self,
        source: impl Connect,
        id: IdSource,
        table: &'static str,
        to: Option<String>,
    ) -> Result<(), oncegate::Error> {
        let handler = RowHandler {
            table,
            to,
            failed: Lock::default(),
        };
        let builder = Consumer::builder()
            .source(source)
            .inbox(PostgresInbox::new(self.pool.clone()));
        if self.arguments.markers == TestedStore::PostgresBatches {
            let consumer = builder.batch_transactional_handler(handler);
            let consumer = consumer.scope(table).id(id).max_attempts(50);
            consumer.run_until(shutdown_signal()).await
        } else {
            let consumer = builder.transactional_handler(handler).scope(table);
            let consumer = consumer.id(id).max_attempts(50);
            let consumer = consumer.max_in_flight(CONNECTIONS as usize);
            consumer.run_until(shutdown_signal()).await
        }
    }
}

/// Inserts a row for each message, and sends two messages if there is a next service. A message
/// `once-…` fails after that in its first run of this process. With `refuse-…`, it also sends a
/// message that the broker cannot take.
struct RowHandler {
    table: &'static str,
    to: Option<String>,
    failed: Lock<HashSet<String>>,
}

impl RowHandler {
    async fn write(&self, id: &str, transaction: &mut PostgresTransaction) -> Result<(), Failure> {
        let insert = format!("INSERT INTO {} VALUES ($1)", self.table);
        let insert = sqlx::query(sqlx::AssertSqlSafe(insert)).bind(id);
        insert.execute(transaction.connection()).await.retry()?;
        let Some(to) = &self.to else {
            return Ok(());
        };
        for _ in 0..2 {
            transaction.send(Outgoing::to(to).key(id).json(&Work { ms: 0 }))?;
        }
        if id.starts_with("refuse-") {
            // Kafka has no exchanges.
            let refused = Outgoing::to(to).exchange(id);
            transaction.send(refused.header("large", "h".repeat(LARGE_HEADER)))?;
        }
        Ok(())
    }

    /// Fails if this is the first run of one of these messages that are to fail once.
    fn fail_once<'a>(&self, ids: impl Iterator<Item = &'a str>) -> Result<(), Failure> {
        let mut failed = self.failed.lock();
        let first = ids
            .filter(|id| id.starts_with("once-"))
            .filter(|id| failed.insert((*id).to_owned()));
        match first.count() {
            0 => Ok(()),
            _ => Err("as its id says").retry(),
        }
    }
}

impl TransactionalHandler<PostgresInbox> for RowHandler {
    type Payload = Work;

    async fn handle(
        &self,
        _: Work,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        fault::point("effect.before");
        self.write(cx.id(), transaction).await?;
        fault::point("effect.after");
        self.fail_once([cx.id()].into_iter())
    }
}

impl BatchTransactionalHandler<PostgresInbox> for RowHandler {
    type Payload = Work;

    async fn handle(
        &self,
        batch: &[BatchItem<Work>],
        transaction: &mut PostgresTransaction,
    ) -> Result<(), Failure> {
        // Meanwhile the messages of the next batch arrive.
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        fault::point("effect.before");
        for item in batch {
            self.write(item.context.id(), transaction).await?;
        }
        fault::point("effect.after");
        if batch.len() == 1 {
            return Ok(());
        }
        self.fail_once(batch.iter().map(|item| item.context.id()))
    }
}
