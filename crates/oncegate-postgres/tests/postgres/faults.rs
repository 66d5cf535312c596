//! Kills, lost and late replies, locks and deadlocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::marker::{Guarantee, Marker, Operation, OperationKind, Verdict};
use oncegate_core::{Store, StoreError};
use oncegate_postgres::Postgres;
use oncegate_testkit::laws;
use oncegate_testkit::proxy::RequestFault;
use oncegate_testkit::servers::PostgresServer;
use sqlx::Executor;

use crate::support::{
    DONE, GRANTED, SECOND, behind_proxy, key, new_schema, new_schema_at, operation, raw, store_at,
    terms, verdicts,
};

fn claim(id: &str, token: u128) -> Operation {
    operation(
        id,
        OperationKind::Claim,
        token,
        0,
        terms(Guarantee::AtMostOnce),
    )
}

fn complete(id: &str, token: u128) -> Operation {
    operation(
        id,
        OperationKind::Complete,
        token,
        1,
        terms(Guarantee::AtMostOnce),
    )
}

async fn one(store: &dyn Store, operation: Operation) -> Result<Verdict, StoreError> {
    store.apply(&[operation]).await.remove(0)
}

/// Repeats an operation until it is answered.
async fn until_answered(store: &dyn Store, operation: Operation) -> Verdict {
    let deadline = Instant::now() + 60 * SECOND;
    loop {
        match one(store, operation.clone()).await {
            Ok(verdict) => return verdict,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(SECOND / 20).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn histories_are_linearizable_while_the_server_is_killed() {
    let mut server = PostgresServer::start(&[]).expect("PostgreSQL");
    let store = Arc::new(store_at(&new_schema_at(&server.url()).await).await);
    laws::linearizable_while_killed(store, move || {
        server.kill();
        // Sessions that outlive the server by a moment still have its shared memory.
        let restarted = (0..5).any(|_| server.start_again().is_ok());
        assert!(restarted, "it starts again");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_reply_is_an_unknown_outcome_and_repeats_give_the_same_verdict() {
    let (_server, proxy, url) = behind_proxy().await;
    let store = store_at(&url).await;
    assert_eq!(verdicts(&store, &[claim("warm", 1)]).await, [GRANTED]);
    for (id, fault) in [("a", RequestFault::LoseReply), ("b", RequestFault::Reset)] {
        for operation in [claim(id, 1), complete(id, 1)] {
            let mut faults = 1;
            // The statement is prepared: it is one request.
            proxy.inject_faults(move |request| {
                let is_first = request.first() == Some(&b'B') && faults > 0;
                faults -= i32::from(is_first);
                if is_first { fault } else { RequestFault::Pass }
            });
            let lost = one(&store, operation.clone()).await;
            assert!(
                matches!(lost, Err(StoreError::Unknown(_))),
                "{id}: {lost:?}"
            );
            let expected = if operation.kind == OperationKind::Claim {
                GRANTED
            } else {
                DONE
            };
            assert_eq!(until_answered(&store, operation).await, expected, "{id}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_answer_is_given_up_after_the_timeout() {
    let (_server, proxy, url) = behind_proxy().await;
    let store = store_at(&url).await.timeout(SECOND / 2);
    assert_eq!(until_answered(&store, claim("a", 1)).await, GRANTED);
    let delay = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let delayed = delay.clone();
    proxy.inject_faults(
        move |_| match delayed.load(std::sync::atomic::Ordering::Relaxed) {
            true => RequestFault::Delay(Duration::from_secs(3)),
            false => RequestFault::Pass,
        },
    );
    let began = Instant::now();
    let batch = [complete("a", 1), claim("b", 1), complete("b", 1)];
    let answers = store.apply(&batch).await;
    assert!(began.elapsed() < 2 * SECOND, "{:?}", began.elapsed());
    let [
        Err(StoreError::Unknown(_)),
        Err(StoreError::Unknown(_)),
        Err(StoreError::NotApplied(_)),
    ] = &answers[..]
    else {
        panic!("the second on the same key was not sent: {answers:?}");
    };
    delay.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(until_answered(&store, complete("a", 1)).await, DONE);
    assert_eq!(until_answered(&store, claim("b", 1)).await, GRANTED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_server_applies_nothing_and_is_found_again() {
    let mut server = PostgresServer::start(&[]).expect("PostgreSQL");
    let store = store_at(&new_schema_at(&server.url()).await).await;
    assert_eq!(until_answered(&store, claim("a", 1)).await, GRANTED);
    server.stop();
    // The first may use a connection that the server has closed.
    let _ = one(&store, claim("b", 1)).await;
    let refused = one(&store, claim("b", 1)).await;
    assert!(
        matches!(refused, Err(StoreError::NotApplied(_))),
        "{refused:?}"
    );
    server.start_again().expect("it starts again");
    assert_eq!(until_answered(&store, complete("a", 1)).await, DONE);
}

/// Another program locks rows in the opposite order: one of both is rolled back, and nothing of it
/// is applied.
#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_applies_nothing() {
    let url = new_schema().await;
    let store = store_at(&url).await;
    assert_eq!(
        verdicts(&store, &[claim("a", 1), claim("b", 1)]).await,
        [GRANTED; 2]
    );
    let mut other = raw(&url).await;
    let lock = async |connection: &mut sqlx::PgConnection, key: &str| {
        let select = "SELECT 1 FROM oncegate_markers WHERE key = $1 FOR UPDATE";
        let query = sqlx::query(select).bind(key.to_owned());
        query.execute(connection).await.map(drop)
    };
    other
        .execute("SET deadlock_timeout = '60s'; BEGIN")
        .await
        .expect("begun");
    lock(&mut other, "b").await.expect("locked");
    let completing = store.clone();
    let batch = [complete("a", 1), complete("b", 1)];
    let again = batch.clone();
    let completed = tokio::spawn(async move { completing.apply(&batch).await });
    tokio::time::sleep(SECOND / 2).await;
    lock(&mut other, "a")
        .await
        .expect("locked after the deadlock is resolved");
    let answers = completed.await.expect("no panic");
    let [
        Err(StoreError::NotApplied(why)),
        Err(StoreError::NotApplied(_)),
    ] = &answers[..]
    else {
        panic!("{answers:?}");
    };
    assert!(why.to_string().contains("deadlock"), "{why}");
    other.execute("ROLLBACK").await.expect("rolled back");
    for id in ["a", "b"] {
        let marker = store.read_marker(&key(id)).await.expect("a marker");
        assert!(matches!(marker, Marker::InProgress(_)), "{id}: {marker:?}");
    }
    assert_eq!(verdicts(&store, &again).await, [DONE; 2]);
}

/// Statements that wait for a lock end when the store has given them up.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_table_does_not_collect_sessions() {
    let server = PostgresServer::start(&[]).expect("PostgreSQL");
    let url = new_schema_at(&server.url()).await;
    let store = store_at(&url).await.timeout(SECOND / 5);
    let mut other = raw(&url).await;
    let lock = "BEGIN; LOCK TABLE oncegate_markers IN ACCESS EXCLUSIVE MODE";
    other.execute(lock).await.expect("locked");
    for token in 1..10 {
        let waiting = one(&store, claim("a", token)).await;
        let given_up = matches!(
            waiting,
            Err(StoreError::Unknown(_) | StoreError::NotApplied(_))
        );
        assert!(given_up, "{waiting:?}");
    }
    tokio::time::sleep(2 * SECOND).await;
    let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'oncegate' AND state = 'active'";
    let waiting: i64 = sqlx::query_scalar(count)
        .fetch_one(&mut other)
        .await
        .expect("counted");
    assert_eq!(waiting, 0, "sessions still wait for the lock");
    other.execute("ROLLBACK").await.expect("unlocked");
    assert_eq!(until_answered(&store, claim("b", 1)).await, GRANTED);
}

/// Two processes that write the same rows, in opposite orders, wait for each other and do not deadlock.
#[tokio::test(flavor = "multi_thread")]
async fn batches_in_opposite_orders_do_not_deadlock() {
    let url = new_schema().await;
    let stores = [store_at(&url).await, store_at(&url).await];
    let claims: Vec<_> = (1..=256).map(|it| claim(&format!("k{it}"), it)).collect();
    assert_eq!(verdicts(&stores[0], &claims).await, [GRANTED; 256]);
    let renew = |claim: &Operation| Operation {
        kind: OperationKind::Renew,
        attempt: 1,
        ..claim.clone()
    };
    let forwards: Vec<_> = claims.iter().map(renew).collect();
    let backwards: Vec<_> = forwards.iter().rev().cloned().collect();
    let of = |store: &Postgres, batch: Vec<Operation>| {
        let store = store.clone();
        tokio::spawn(async move {
            for _ in 0..100 {
                for answer in store.apply(&batch).await {
                    assert_eq!(answer.expect("no deadlock"), Verdict::Applied);
                }
            }
        })
    };
    let (one, other) = (of(&stores[0], forwards), of(&stores[1], backwards));
    one.await.expect("no deadlock");
    other.await.expect("no deadlock");
}
