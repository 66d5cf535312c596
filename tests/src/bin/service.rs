//! A service with inbox and outbox for the tests: it records each message in the table `effects`
//! of its schema and, if it has a next service, sends two messages to it. Its relay runs in the
//! same process. SIGTERM drains it.
#![forbid(unsafe_code)]

use clap::{Parser, ValueEnum};
use oncegate::outbox::Publisher;
use oncegate::source::Connect;
use oncegate::{
    Consumer, Context, Error, Failure, FailureExt, IdSource, Kafka, Outgoing, RabbitMq, Raw,
    RawBytes, Relay, TopicCreation, TransactionalHandler, shutdown_signal,
};
use oncegate_postgres::{PostgresInbox, PostgresOutbox, PostgresTransaction};
use sqlx::PgPool;

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    broker: Broker,
    /// Kafka's bootstrap servers, or RabbitMQ's URL.
    #[arg(long)]
    url: String,
    /// The topic or the queue to consume.
    #[arg(long)]
    from: String,
    /// The topic or the queue of the next service. Without it, this is the last service.
    #[arg(long)]
    to: Option<String>,
    /// The URL of the database, with the schema of this service.
    #[arg(long)]
    database: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum Broker {
    Kafka,
    Rabbitmq,
}

/// Records the message, and sends two to the next service.
struct Forwards {
    to: Option<String>,
}

impl TransactionalHandler<PostgresInbox> for Forwards {
    type Payload = Raw;

    async fn handle(
        &self,
        body: Raw,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let insert = sqlx::query("INSERT INTO effects (id) VALUES ($1)").bind(cx.id());
        insert.execute(transaction.connection()).await.retry()?;
        for to in self.to.iter().flat_map(|to| [to, to]) {
            transaction.send(Outgoing::to(to).key(cx.id()).body(body.0.clone()))?;
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let arguments = Arguments::parse();
    let pool = PgPool::connect(&arguments.database).await?;
    let is_first = arguments.to.is_some();
    let (from, url) = (arguments.from, arguments.url);
    match arguments.broker {
        Broker::Kafka => {
            let creation = TopicCreation::Create {
                partitions: 1,
                replication: 1,
            };
            let source = Kafka::topic(&from)
                .brokers(url)
                .group(from)
                // Shorter than the time between two kills.
                .property("session.timeout.ms", "1000")
                .property("heartbeat.interval.ms", "200")
                .create_topics(creation);
            let id = if is_first { "id" } else { "message-id" };
            let publisher = source.publisher();
            run(source, publisher, IdSource::header(id), pool, arguments.to).await?;
        }
        Broker::Rabbitmq => {
            let source = RabbitMq::queue(from).url(url);
            let id = if is_first {
                IdSource::header("id")
            } else {
                IdSource::message_id()
            };
            let publisher = source.publisher();
            run(source, publisher, id, pool, arguments.to).await?;
        }
    }
    Ok(())
}

async fn run(
    source: impl Connect,
    publisher: impl Publisher,
    id: IdSource,
    pool: PgPool,
    to: Option<String>,
) -> Result<(), Error> {
    let relay = Relay::from(PostgresOutbox::new(&pool).create_tables()).to(publisher);
    let consumer = Consumer::builder()
        .source(source)
        .inbox(PostgresInbox::new(pool).create_tables())
        .transactional_handler(Forwards { to })
        .decode(RawBytes)
        .scope("service")
        .id(id)
        .run_until(shutdown_signal());
    tokio::try_join!(relay.run_until(shutdown_signal()), consumer)?;
    Ok(())
}
