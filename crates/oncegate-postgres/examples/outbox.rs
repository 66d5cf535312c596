//! A transactional inbox and outbox: books transfers, and publishes each booking exactly once.

use oncegate::prelude::*;
use oncegate_postgres::{PostgresInbox, PostgresOutbox, PostgresTransaction};

#[derive(serde::Deserialize, serde::Serialize)]
struct Transfer {
    account: String,
    cents: i64,
}

async fn book(
    transfer: Transfer,
    transaction: &mut PostgresTransaction,
    _: &Context,
) -> Result<(), Failure> {
    sqlx::query("UPDATE accounts SET cents = cents + $2 WHERE account = $1")
        .bind(&transfer.account)
        .bind(transfer.cents)
        .execute(transaction.connection())
        .await
        .retry()?;
    let booked = Outgoing::to("ledger.booked").key(&transfer.account);
    transaction.send(booked.json(&transfer))?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let pool = sqlx::PgPool::connect("postgres://ledger:secret@localhost/ledger").await?;
    let transfers = RabbitMq::queue("transfers").url("amqp://guest:guest@localhost:5672/%2f");
    let relay = Relay::from(PostgresOutbox::new(&pool).create_tables()).to(transfers.publisher());
    let consumer = Consumer::builder()
        .source(transfers)
        .inbox(PostgresInbox::new(pool).create_tables())
        .transactional_handler(transactional_fn(book))
        .scope("ledger")
        .id(IdSource::message_id());
    let relay = relay.run_until(shutdown_signal());
    tokio::try_join!(relay, consumer.run_until(shutdown_signal()))?;
    Ok(())
}
