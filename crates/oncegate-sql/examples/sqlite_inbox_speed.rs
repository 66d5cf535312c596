//! Books messages of a queue in memory with an inbox, and with a loop that has the same two
//! statements in each transaction, in turn, each in a new file. Prints messages per second.
//!
//! `cargo run --release -p oncegate-sql --example sqlite_inbox_speed -- [DIRECTORY [MESSAGES [IN_FLIGHT [ROUNDS]]]]`
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::Instant;

use oncegate_core::marker::Token;
use oncegate_core::store::BoxError;
use oncegate_core::{
    Consumer, Context, Failure, FailureExt, IdSource, MemoryBroker, Message, TransactionalHandler,
};
use oncegate_sql::{SqliteInbox, SqliteTransaction};
use rusqlite::{Connection, TransactionBehavior};

const LEDGER: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
    CREATE TABLE ledger (id TEXT, cents INTEGER); CREATE TABLE processed (id TEXT PRIMARY KEY)";

const INSERT: &str = "INSERT INTO ledger (id, cents) VALUES (?1, ?2)";

struct SqliteSpeedHandler;

impl TransactionalHandler<SqliteInbox> for SqliteSpeedHandler {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut SqliteTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        let id = cx.id().to_owned();
        let insert =
            transaction.call(move |sqlite| sqlite.prepare_cached(INSERT)?.execute((id, cents)));
        insert.await.map(drop).retry()
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| ".".to_owned());
    let mut number = |default: usize| match arguments.next() {
        Some(text) => text.parse(),
        None => Ok(default),
    };
    let (messages, in_flight, rounds) = (number(5_000)?, number(4)?, number(5)?);
    let mut ratios = Vec::new();
    for _ in 0..rounds {
        let directories = [(); 2].map(|()| tempfile::tempdir_in(&directory));
        let [one, other] = directories.map(|it| it.expect("a directory"));
        let by_hand = by_hand(&one.path().join("ledger.db"), messages)?;
        let inbox = with_inbox(&other.path().join("ledger.db"), messages, in_flight).await?;
        ratios.push(inbox / by_hand);
        println!(
            "by hand {by_hand:.0}/s, inbox {inbox:.0}/s, ratio {:.2}",
            inbox / by_hand
        );
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.2}", ratios[rounds / 2]);
    Ok(())
}

fn new_id() -> String {
    format!("{:032x}", Token::random().0)
}

async fn with_inbox(file: &Path, messages: usize, in_flight: usize) -> Result<f64, BoxError> {
    Connection::open(file)?.execute_batch(LEDGER)?;
    let broker = MemoryBroker::new("speed");
    for _ in 0..messages {
        broker.publish(Message::new("1").with_message_id(new_id()));
    }
    let consumer = Consumer::builder()
        .source(broker.source())
        .inbox(SqliteInbox::file(file))
        .transactional_handler(SqliteSpeedHandler)
        .id(IdSource::message_id())
        .max_in_flight(in_flight)
        .build()?;
    let began = Instant::now();
    consumer.run_until(broker.all_settled()).await?;
    Ok(messages as f64 / began.elapsed().as_secs_f64())
}

fn by_hand(file: &Path, messages: usize) -> Result<f64, BoxError> {
    let mut connection = Connection::open(file)?;
    connection.execute_batch(LEDGER)?;
    let began = Instant::now();
    for _ in 0..messages {
        let id = new_id();
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let record = "INSERT INTO processed (id) VALUES (?1) ON CONFLICT DO NOTHING";
        if transaction.prepare_cached(record)?.execute([&id])? == 1 {
            transaction.prepare_cached(INSERT)?.execute((&id, 1))?;
        }
        transaction.commit()?;
    }
    Ok(messages as f64 / began.elapsed().as_secs_f64())
}
