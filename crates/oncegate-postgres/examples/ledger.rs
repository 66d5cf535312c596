//! Books transfers from a RabbitMQ queue, exactly once in PostgreSQL.

use oncegate::{
    Consumer, Context, Failure, FailureExt, IdSource, RabbitMq, TransactionalHandler,
    shutdown_signal,
};
use oncegate_postgres::{PostgresInbox, PostgresTransaction};
use sqlx::postgres::PgPoolOptions;

#[derive(serde::Deserialize)]
struct Transfer {
    account: String,
    cents: i64,
}
struct Book;

impl TransactionalHandler<PostgresInbox> for Book {
    type Payload = Transfer;
    async fn handle(
        &self,
        transfer: Transfer,
        transaction: &mut PostgresTransaction,
        _: &Context,
    ) -> Result<(), Failure> {
        sqlx::query("UPDATE accounts SET cents = cents + $2 WHERE account = $1")
            .bind(transfer.account)
            .bind(transfer.cents)
            .execute(transaction.connection())
            .await
            .retry()?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let pool = PgPoolOptions::new().max_connections(16);
    let pool = pool.connect("postgres://ledger:secret@localhost/ledger");
    Consumer::builder()
        .source(RabbitMq::queue("transfers").url("amqp://guest:guest@localhost:5672/%2f"))
        .inbox(PostgresInbox::new(pool.await?).create_tables())
        .transactional_handler(Book)
        .scope("ledger")
        .id(IdSource::message_id())
        .run_until(shutdown_signal())
        .await?;
    Ok(())
}
