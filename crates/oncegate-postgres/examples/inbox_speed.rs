//! Books messages of a queue in memory with an inbox, one by one and in batches, and with a loop that
//! has the same two statements in each transaction, in turn, on as many connections. Prints messages
//! per second. Creates the tables in the database of the URL, and leaves the rows.
//!
//! `ONCEGATE_POSTGRES=postgres://… cargo run --release -p oncegate-postgres --example inbox_speed -- [MESSAGES] [CONNECTIONS] [ROUNDS]`

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use oncegate_core::marker::Token;
use oncegate_core::store::BoxError;
use oncegate_core::{
    BatchItem, BatchTransactionalHandler, Consumer, Context, Failure, FailureExt, IdSource,
    MemoryBroker, Message, TransactionalHandler,
};
use oncegate_postgres::{PostgresInbox, PostgresTransaction};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor, PgPool};

struct SpeedHandler;

impl TransactionalHandler<PostgresInbox> for SpeedHandler {
    type Payload = i64;

    async fn handle(
        &self,
        cents: i64,
        transaction: &mut PostgresTransaction,
        cx: &Context,
    ) -> Result<(), Failure> {
        sqlx::query("INSERT INTO speed_ledger (id, cents) VALUES ($1, $2)")
            .bind(cx.id())
            .bind(cents)
            .execute(transaction.connection())
            .await
            .retry()?;
        Ok(())
    }
}

struct BatchSpeedHandler;

impl BatchTransactionalHandler<PostgresInbox> for BatchSpeedHandler {
    type Payload = i64;

    async fn handle(
        &self,
        batch: &[BatchItem<i64>],
        transaction: &mut PostgresTransaction,
    ) -> Result<(), Failure> {
        let ids: Vec<&str> = batch.iter().map(|item| item.context.id()).collect();
        let cents: Vec<i64> = batch.iter().map(|item| item.payload).collect();
        let insert =
            "INSERT INTO speed_ledger (id, cents) SELECT * FROM unnest($1::text[], $2::int8[])";
        sqlx::query(insert)
            .bind(&ids)
            .bind(&cents)
            .execute(transaction.connection())
            .await
            .retry()?;
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| match arguments.next() {
        Some(text) => text.parse(),
        None => Ok(default),
    };
    let (messages, connections, rounds) = (number(10_000)?, number(16)?, number(5)?);
    let url = std::env::var("ONCEGATE_POSTGRES").map_err(|_| "set ONCEGATE_POSTGRES")?;
    let pool = PgPoolOptions::new().max_connections(u32::try_from(connections)?);
    let pool = pool.connect(&url).await?;
    pool.execute("CREATE TABLE IF NOT EXISTS speed_ledger (id text, cents int8); CREATE TABLE IF NOT EXISTS speed_processed (id text PRIMARY KEY)").await?;
    let (mut one_by_one, mut in_batches) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let by_hand = by_hand(&pool, messages, connections).await?;
        let inbox = with_inbox(&pool, messages, false).await?;
        let batches = with_inbox(&pool, 10 * messages, true).await?;
        one_by_one.push(inbox / by_hand);
        in_batches.push(batches / by_hand);
        println!("by hand {by_hand:.0}/s, inbox {inbox:.0}/s, in batches {batches:.0}/s");
    }
    for (name, mut ratios) in [("inbox", one_by_one), ("in batches", in_batches)] {
        ratios.sort_by(f64::total_cmp);
        println!("{name} / by hand: median {:.2}", ratios[rounds / 2]);
    }
    Ok(())
}

fn new_id() -> String {
    format!("{:032x}", Token::random().0)
}

async fn with_inbox(pool: &PgPool, messages: usize, in_batches: bool) -> Result<f64, BoxError> {
    let broker = MemoryBroker::new("speed");
    for _ in 0..messages {
        broker.publish(Message::new("1").with_message_id(new_id()));
    }
    let consumer = Consumer::builder()
        .source(broker.source())
        .inbox(PostgresInbox::new(pool.clone()).create_tables())
        .id(IdSource::message_id());
    let consumer = match in_batches {
        true => consumer
            .batch_transactional_handler(BatchSpeedHandler)
            .build()?,
        false => consumer.transactional_handler(SpeedHandler).build()?,
    };
    let began = Instant::now();
    consumer.run_until(broker.all_settled()).await?;
    Ok(messages as f64 / began.elapsed().as_secs_f64())
}

async fn by_hand(pool: &PgPool, messages: usize, connections: usize) -> Result<f64, BoxError> {
    let left = Arc::new(AtomicUsize::new(messages));
    let began = Instant::now();
    let tasks = (0..connections).map(|_| {
        let (pool, left) = (pool.clone(), left.clone());
        tokio::spawn(async move {
            let take = |left: usize| left.checked_sub(1);
            while left
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
                .is_ok()
            {
                let (id, mut transaction) = (new_id(), pool.begin().await?);
                let record = sqlx::query(
                    "INSERT INTO speed_processed (id) VALUES ($1) ON CONFLICT DO NOTHING",
                );
                let recorded = record.bind(&id).execute(&mut *transaction).await?;
                if recorded.rows_affected() == 1 {
                    let book = sqlx::query("INSERT INTO speed_ledger (id, cents) VALUES ($1, $2)");
                    book.bind(&id)
                        .bind(1_i64)
                        .execute(&mut *transaction)
                        .await?;
                }
                transaction.commit().await?;
            }
            Ok::<_, sqlx::Error>(())
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await??;
    }
    Ok(messages as f64 / began.elapsed().as_secs_f64())
}
