//! The inbox while its server is frozen, cut off, or replaced by a replica.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use oncegate_core::MemoryBroker;
use oncegate_testkit::proxy::Proxy;
use oncegate_testkit::servers::PostgresServer;
use sqlx::{Executor, PgPool};

use crate::inbox::{InsertsRows, Then, booked, broker, consume, pool_at, records};
use crate::support::{SECOND, behind_proxy, raw};

const MESSAGES: usize = 2_000;

/// Consumes these messages while `faults` runs, which must end first.
async fn consume_during(
    pool: &PgPool,
    ids: impl Iterator<Item = usize>,
    faults: impl AsyncFnOnce(&MemoryBroker),
) {
    let broker = broker(ids);
    let book = InsertsRows {
        runs: Arc::new(AtomicUsize::new(1)),
        pause: SECOND / 50,
        ..InsertsRows::new(Then::Succeed)
    };
    let faults = async {
        faults(&broker).await;
        assert!(broker.unsettled() > 0, "all is settled before the faults");
    };
    tokio::join!(consume(&broker, pool, book), faults);
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
}

/// Each message twice.
fn twice() -> impl Iterator<Item = usize> {
    (0..MESSAGES).chain(0..MESSAGES)
}

/// Waits until so many more messages are settled.
async fn until_settled(broker: &MemoryBroker, more: usize) {
    let wanted = broker.unsettled().saturating_sub(more);
    let settled = async {
        while broker.unsettled() > wanted {
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    let settled = tokio::time::timeout(60 * SECOND, settled).await;
    settled.expect("messages are settled");
}

async fn assert_all_booked_once(pool: &PgPool) {
    let all = MESSAGES as i64;
    assert_eq!((booked(pool).await, records(pool).await), ((all, all), all));
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_booked_twice_while_the_server_is_frozen() {
    let (mut server, _proxy, url) = behind_proxy().await;
    let pool = pool_at(&url).await;
    consume_during(&pool, twice(), async |broker| {
        for seconds in [1, 3, 7] {
            until_settled(broker, 100).await;
            server.freeze();
            tokio::time::sleep(Duration::from_secs(1)).await;
            let unsettled = broker.unsettled();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            assert_eq!(broker.unsettled(), unsettled, "the server is not frozen");
            server.thaw();
        }
    })
    .await;
    assert_all_booked_once(&pool).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_booked_twice_while_the_server_is_cut_off() {
    let (_server, proxy, url) = behind_proxy().await;
    let pool = pool_at(&url).await;
    consume_during(&pool, twice(), async |broker| {
        for seconds in [1, 3, 7] {
            until_settled(broker, 100).await;
            proxy.black_hole();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            proxy.reset();
            proxy.pass();
        }
    })
    .await;
    assert_all_booked_once(&pool).await;
}

/// A primary behind a proxy, the proxy, its replica, and a pool with the tables of the inbox.
async fn with_replica() -> (PostgresServer, Proxy, PostgresServer, PgPool) {
    let (primary, proxy, url) = behind_proxy().await;
    let pool = pool_at(&url).await;
    let replica = primary.start_replica(&[]).expect("a replica");
    (primary, proxy, replica, pool)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failover_to_a_synchronous_replica_loses_nothing() {
    let (mut primary, proxy, replica, pool) = with_replica().await;
    let mut admin = raw(&primary.url()).await;
    for set in [
        "ALTER SYSTEM SET synchronous_standby_names = '*'",
        "SELECT pg_reload_conf()",
    ] {
        admin.execute(set).await.expect("set");
    }
    consume_during(&pool, twice(), async |broker| {
        until_settled(broker, 500).await;
        primary.kill();
        replica.promote().expect("promoted");
        proxy.fail_over_to(replica.port());
    })
    .await;
    assert_all_booked_once(&pool).await;
}

/// What the replica has not received is lost, each transaction as a whole: its messages were
/// acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn a_failover_to_an_asynchronous_replica_loses_the_last_transactions_as_a_whole() {
    let (mut primary, proxy, mut replica, pool) = with_replica().await;
    // Copies would book the lost messages again.
    consume_during(&pool, 0..MESSAGES, async |broker| {
        until_settled(broker, 300).await;
        replica.stop();
        until_settled(broker, 300).await;
        primary.kill();
        replica.start_again().expect("it starts again");
        replica.promote().expect("promoted");
        proxy.fail_over_to(replica.port());
    })
    .await;
    let (rows, ids) = booked(&pool).await;
    assert_eq!((rows, rows), (ids, records(&pool).await));
    let missing = MESSAGES as i64 - rows;
    assert!(missing > 100, "only {missing} are missing");
    println!("{missing} of {MESSAGES} messages were acknowledged and are lost");
}
