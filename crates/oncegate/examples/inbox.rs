//! Books a transfer that is sent twice: its row in an SQLite database is committed once, together with
//! the record of its message.

use oncegate::prelude::*;
use oncegate::{MemoryBroker, SqliteInbox, SqliteTransaction};

#[derive(serde::Deserialize)]
struct BankTransfer {
    account: String,
    cents: i64,
}

async fn book(
    transfer: BankTransfer,
    transaction: &mut SqliteTransaction,
    _: &Context,
) -> Result<(), Failure> {
    let BankTransfer { account, cents } = transfer;
    let table = "CREATE TABLE IF NOT EXISTS bookings (account TEXT, cents INTEGER)";
    transaction
        .call(|sqlite| sqlite.execute_batch(table))
        .await
        .retry()?;
    let book = "INSERT INTO bookings (account, cents) VALUES (?1, ?2)";
    transaction
        .call(move |sqlite| sqlite.execute(book, (account, cents)))
        .await
        .retry()?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let broker = MemoryBroker::new("transfers");
    for _ in 0..2 {
        let transfer = Message::new(r#"{"account": "savings", "cents": 500}"#);
        broker.publish(transfer.with_message_id("transfer-1"));
    }
    Consumer::builder()
        .source(broker.source())
        .inbox(SqliteInbox::file("ledger.db"))
        .transactional_handler(transactional_fn(book))
        .id(IdSource::message_id())
        .run_until(broker.all_settled())
        .await?;
    Ok(())
}
