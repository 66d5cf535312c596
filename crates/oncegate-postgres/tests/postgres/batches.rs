//! Batches: the rows and the records of many messages are committed in one transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use oncegate_core::lifecycle::Reason;
use oncegate_core::{
    BatchItem, BatchTransactionalHandler, Consumer, Failure, FailureExt, IdSource, MemoryBroker,
    Message,
};
use oncegate_postgres::{Postgres, PostgresInbox, PostgresTransaction};
use oncegate_testkit::proxy::{Proxy, RequestFault, contains};
use oncegate_testkit::servers::PostgresServer;
use sqlx::{Executor, PgPool, query};

use crate::inbox::{booked, broker, pool_at, records};
use crate::support::{SECOND, kill_repeatedly, new_schema, new_schema_at, terminate_sessions};

/// The payload of a message that is always refused.
const POISON: i64 = -1;
/// The payload of a message with a statement that takes longer than any handler may.
const SLOW: i64 = -2;

/// Inserts a row for each message of a batch, by one statement.
#[derive(Clone, Default)]
struct InsertsBatches(Arc<AtomicUsize>);

impl BatchTransactionalHandler<PostgresInbox> for InsertsBatches {
    type Payload = i64;

    async fn handle(
        &self,
        batch: &[BatchItem<i64>],
        transaction: &mut PostgresTransaction,
    ) -> Result<(), Failure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let ids: Vec<&str> = batch.iter().map(|item| item.context.id()).collect();
        let cents: Vec<i64> = batch.iter().map(|item| item.payload).collect();
        query("INSERT INTO ledger (id, cents) SELECT * FROM unnest($1::text[], $2::int8[])")
            .bind(&ids)
            .bind(&cents)
            .execute(transaction.connection())
            .await
            .retry()?;
        if cents.contains(&SLOW) {
            let sleep = query("SELECT pg_sleep(5)");
            sleep.execute(transaction.connection()).await.retry()?;
        }
        match cents.contains(&POISON) {
            true => Err("a closed account").reject(),
            false => Ok(()),
        }
    }
}

/// Consumes until the broker has no message left. An error of a lost connection counts as an
/// attempt of a message that runs alone.
async fn consume(broker: &MemoryBroker, pool: &PgPool, handler: InsertsBatches) {
    let run = Consumer::builder()
        .source(broker.source())
        .inbox(PostgresInbox::new(pool.clone()).create_tables())
        .batch_transactional_handler(handler)
        .id(IdSource::message_id())
        .max_attempts(1_000)
        .backoff(SECOND / 100, SECOND / 10)
        .run_until(broker.all_settled());
    tokio::time::timeout(90 * SECOND, run)
        .await
        .expect("it ends")
        .expect("no error");
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_book_each_message_once() {
    let pool = pool_at(&new_schema().await).await;
    let handler = InsertsBatches::default();
    for _ in 0..2 {
        let broker = broker((0..10_000).map(|it| it % 5_000));
        consume(&broker, &pool, handler.clone()).await;
        assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
        assert_eq!(
            (booked(&pool).await, records(&pool).await),
            ((5_000, 5_000), 5_000)
        );
    }
    let batches = handler.0.load(Ordering::Relaxed);
    assert!(batches < 500, "{batches} transactions");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_message_is_a_dead_letter_and_the_rest_of_its_batch_is_booked() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..200);
    for poison in [300, 301] {
        let message = Message::new(POISON.to_string()).with_message_id(format!("t-{poison}"));
        broker.publish(message);
    }
    consume(&broker, &pool, InsertsBatches::default()).await;
    let dead = broker.dead_letters();
    assert!(dead.iter().all(|it| it.reason == Reason::Refused));
    assert_eq!(dead.len(), 2);
    assert_eq!(
        (booked(&pool).await, records(&pool).await),
        ((200, 200), 200)
    );
}

/// The rollback of its batch waits for the statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_statement_takes_too_long_is_a_dead_letter_and_the_rest_is_booked() {
    let pool = pool_at(&new_schema().await).await;
    let broker = broker(0..20);
    broker.publish(Message::new(SLOW.to_string()).with_message_id("slow"));
    let run = Consumer::builder()
        .source(broker.source())
        .inbox(PostgresInbox::new(pool.clone()).create_tables())
        .batch_transactional_handler(InsertsBatches::default())
        .id(IdSource::message_id())
        .handler_timeout(2 * SECOND)
        .max_attempts(2)
        .backoff(SECOND / 100, SECOND / 10)
        .run_until(broker.all_settled());
    let ended = tokio::time::timeout(90 * SECOND, run).await;
    ended.expect("it ends").expect("no error");
    assert_eq!(broker.dead_letters().len(), 1);
    assert_eq!((booked(&pool).await, records(&pool).await), ((20, 20), 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_in_batches_of_two_consumers_are_booked_once_while_sessions_are_terminated() {
    const MESSAGES: usize = 20_000;
    // Its own: sessions of other tests must not be terminated.
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let url = new_schema_at(&server.url()).await;
    let (pool, other) = (pool_at(&url).await, pool_at(&url).await);
    let (first, second) = (broker(0..MESSAGES), broker((0..MESSAGES).rev()));
    let done = AtomicUsize::new(0);
    let terminate = terminate_sessions(&url, || done.load(Ordering::Relaxed) == 2);
    let consume = async |broker: &MemoryBroker, pool: &PgPool| {
        consume(broker, pool, InsertsBatches::default()).await;
        done.fetch_add(1, Ordering::Relaxed);
    };
    let (terminated, ..) =
        tokio::join!(terminate, consume(&first, &pool), consume(&second, &other));
    assert!(terminated >= 5, "{terminated}");
    assert!(first.dead_letters().is_empty() && second.dead_letters().is_empty());
    let all = MESSAGES as i64;
    assert_eq!(
        (booked(&pool).await, records(&pool).await),
        ((all, all), all)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_batch_is_lost_or_booked_twice_while_the_server_is_killed() {
    const MESSAGES: usize = 20_000;
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let pool = pool_at(&new_schema_at(&server.url()).await).await;
    let broker = broker((0..MESSAGES).chain(0..MESSAGES));
    let kills = kill_repeatedly(server);
    consume(&broker, &pool, InsertsBatches::default()).await;
    let _server = kills.await.expect("killed");
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
    let all = MESSAGES as i64;
    assert_eq!(
        (booked(&pool).await, records(&pool).await),
        ((all, all), all)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_to_the_commit_of_a_batch_is_found_out() {
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let url = new_schema_at(&server.url()).await;
    let [direct, through] = [server.port(), proxy.port()].map(|port| format!(":{port}/"));
    let pool = pool_at(&url.replace(&direct, &through)).await;
    let lost = Arc::new(AtomicUsize::new(0));
    let counted = lost.clone();
    proxy.inject_faults(move |request| {
        let is_commit = request.first() == Some(&b'Q') && contains(request, "COMMIT");
        match is_commit && counted.fetch_add(1, Ordering::Relaxed) < 10 {
            true => RequestFault::LoseReply,
            false => RequestFault::Pass,
        }
    });
    let broker = broker(0..2_000);
    consume(&broker, &pool, InsertsBatches::default()).await;
    assert!(lost.load(Ordering::Relaxed) >= 10);
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
    assert_eq!(
        (booked(&pool).await, records(&pool).await),
        ((2_000, 2_000), 2_000)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_row_says_decides_whether_its_message_runs_in_a_batch() {
    let url = new_schema().await;
    let pool = pool_at(&url).await;
    Postgres::url(&url).migrate().await.expect("the tables");
    let insert = "INSERT INTO oncegate_markers (key, expires, state, attempt, base, crashes, effect)
        SELECT key, CASE key WHEN 't-0' THEN 1 ELSE 99999999999999 END, state, attempt, base, crashes, effect
        FROM (VALUES ('t-0', 0, NULL, NULL, NULL, NULL), ('t-1', 0, NULL, NULL, NULL, NULL), ('t-2', 1, 1, 0, 0, 0),
            ('t-3', 5, 2, NULL, NULL, NULL)) AS v (key, state, attempt, base, crashes, effect)";
    pool.execute(insert).await.expect("inserted");
    let broker = broker(0..100);
    consume(&broker, &pool, InsertsBatches::default()).await;
    let rejected = broker.dead_letters();
    assert_eq!(rejected.len(), 1);
    assert_eq!(rejected[0].reason, Reason::RejectedBefore);
    // Neither the done one nor the rejected one runs; the expired and the cleared one do.
    assert_eq!(booked(&pool).await, (98, 98));
}
