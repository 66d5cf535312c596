//! Claims and completes new ids, and prints ids per second, beside a loop of one `INSERT … ON CONFLICT
//! DO NOTHING` an id on one connection. Creates the tables in the database of the URL, and leaves the rows.
//!
//! `ONCEGATE_POSTGRES=postgres://… cargo run --release -p oncegate-postgres --example postgres_speed -- [IDS] [BATCH]`

use std::time::{Duration, Instant};

use oncegate_core::marker::{Guarantee, Operation, OperationKind, Terms, Token};
use oncegate_core::{Key, MessageId, Store};
use oncegate_postgres::Postgres;
use sqlx::{Connection, Executor, PgConnection};

type AnyError = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), AnyError> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default: usize| match arguments.next() {
        Some(text) => text.parse(),
        None => Ok(default),
    };
    let (ids, batch) = (number(200_000)?, number(512)?);
    let url = std::env::var("ONCEGATE_POSTGRES").map_err(|_| "set ONCEGATE_POSTGRES")?;
    let store = Postgres::url(&url)
        .create_tables()
        .timeout(Duration::from_secs(10));
    store.migrate().await?;

    let loop_ids = ids / 20;
    let plain = insert_loop(&url, loop_ids).await?;
    println!("loop of INSERT … ON CONFLICT: {plain:.0} ids/s");
    let began = Instant::now();
    // As the consumer does: two batches at a time, each with the completions of earlier claims and with new claims.
    let run = Token::random().0;
    let halves = (0..2).map(|half| {
        let store = store.clone();
        tokio::spawn(async move { claim_and_complete(&store, run + half, ids / 2, batch).await })
    });
    for half in halves.collect::<Vec<_>>() {
        half.await??;
    }
    let gated = ids as f64 / began.elapsed().as_secs_f64();
    println!(
        "claimed and completed in batches of {batch}: {gated:.0} ids/s, {:.1} x",
        gated / plain
    );
    Ok(())
}

async fn claim_and_complete(
    store: &Postgres,
    run: u128,
    ids: usize,
    batch: usize,
) -> Result<(), AnyError> {
    let terms = Terms {
        guarantee: Guarantee::AtMostOnce,
        lease: Duration::from_secs(30),
        window: Duration::from_secs(86_400),
        fingerprint: None,
    };
    let mut held: Vec<Operation> = Vec::new();
    let mut next = 0;
    while next < ids || !held.is_empty() {
        let mut operations: Vec<Operation> = held
            .drain(..)
            .map(|claim| Operation {
                kind: OperationKind::Complete,
                attempt: 1,
                ..claim
            })
            .collect();
        let completions = operations.len();
        let until = ids.min(next + batch);
        for _ in next..until {
            // Random, as most ids are.
            let token = Token::random();
            let id = MessageId::new(format!("{run:x}-{:032x}", token.0)).ok_or("an id")?;
            let key = Key::new(&id);
            operations.push(Operation {
                key,
                kind: OperationKind::Claim,
                token,
                attempt: 0,
                terms,
            });
        }
        next = until;
        for answer in store.apply(&operations).await {
            answer?;
        }
        held = operations.split_off(completions);
    }
    Ok(())
}

async fn insert_loop(url: &str, ids: usize) -> Result<f64, AnyError> {
    let mut connection = PgConnection::connect(url).await?;
    connection.execute("CREATE TABLE IF NOT EXISTS plain_processed (id text PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())").await?;
    let began = Instant::now();
    for _ in 0..ids {
        sqlx::query("INSERT INTO plain_processed (id) VALUES ($1) ON CONFLICT DO NOTHING")
            .bind(format!("{:032x}", Token::random().0))
            .execute(&mut connection)
            .await?;
    }
    let rate = ids as f64 / began.elapsed().as_secs_f64();
    connection.execute("DROP TABLE plain_processed").await?;
    Ok(rate)
}
