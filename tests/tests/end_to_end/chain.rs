//! Two services with inbox and outbox: all processes are killed again and again, and each message
//! has its effect once in both.
//!
//! `ONCEGATE_CHAIN_ROUNDS=50 cargo xtask test --test end_to_end killed_services` kills each process
//! 25 times instead of 5.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Executor, PgPool};

use crate::broker::{Broker, Sent};
use crate::on_both_brokers;
use crate::world::World;

on_both_brokers!(killed_services_pass_each_message_on_once);

/// The messages to the first service in each round. Each causes two to the second one.
const BATCH: i64 = 150;

/// The number of rounds, in each of which one process of each service is killed.
fn rounds() -> i64 {
    match std::env::var("ONCEGATE_CHAIN_ROUNDS") {
        Ok(rounds) => rounds.parse().expect("ONCEGATE_CHAIN_ROUNDS is a number"),
        Err(_) => 10,
    }
}

/// A new schema for a service: its URL, and a pool.
async fn schema(name: &str) -> (String, PgPool) {
    let url = oncegate_testkit::postgres_url().unwrap_or_else(|missing| panic!("{missing}"));
    let pool = PgPool::connect(&url).await.expect("PostgreSQL");
    let create =
        format!("CREATE SCHEMA \"{name}\"; CREATE TABLE \"{name}\".effects (id text NOT NULL)");
    pool.execute(AssertSqlSafe(create)).await.expect("a schema");
    let url = format!("{url}?options[search_path]={name}");
    let pool = PgPool::connect(&url).await.expect("PostgreSQL");
    (url, pool)
}

/// The number of effects, and of ids that have effects.
async fn effects(pool: &PgPool) -> (i64, i64) {
    sqlx::query_as("SELECT count(*), count(DISTINCT id) FROM effects")
        .fetch_one(pool)
        .await
        .expect("counts")
}

async fn killed_services_pass_each_message_on_once(broker: Broker) {
    let (first, second) = (World::new(broker).await, World::new(broker).await);
    let (first_url, first_pool) = schema(&first.name).await;
    let (second_url, second_pool) = schema(&second.name).await;
    let start_first = || first.start_service(&first_url, Some(&second.name));
    let start_second = || second.start_service(&second_url, None);
    let mut processes = [start_first(), start_first(), start_second(), start_second()].map(Some);
    for round in 0..rounds() {
        let ids = round * BATCH..(round + 1) * BATCH;
        first
            .publish(ids.map(|id| Sent::new(format!("id-{id}"), "work")))
            .await;
        // Late enough that the processes have started and handle messages.
        let pause = Duration::from_millis(1_000 + 137 * (round.unsigned_abs() % 10));
        tokio::time::sleep(pause).await;
        for (index, process) in processes.iter_mut().enumerate() {
            if index % 2 == usize::from(round % 2 == 0) {
                process.take().expect("it runs").kill();
                *process = Some(if index < 2 {
                    start_first()
                } else {
                    start_second()
                });
            }
        }
    }
    let messages = rounds() * BATCH;
    let all = 2 * messages;
    second
        .until(
            "each message has its effect in the second service",
            async || effects(&second_pool).await.1 >= all,
        )
        .await;
    second
        .until("the outbox is empty", async || {
            let count = sqlx::query_scalar("SELECT count(*) FROM oncegate_outbox");
            let count: i64 = count.fetch_one(&first_pool).await.expect("a count");
            count == 0 && second.broker.left(&second.name).await == 0
        })
        .await;
    assert_eq!(effects(&first_pool).await, (messages, messages));
    assert_eq!(effects(&second_pool).await, (all, all));
    assert_eq!(second.dead_letters().await, []);
    let [a, b, c, d] = processes.map(|process| process.expect("it runs"));
    first.end([a, b]).await;
    second.end([c, d]).await;
}
