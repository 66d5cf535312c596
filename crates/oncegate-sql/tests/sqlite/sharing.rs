//! Several handles on one file, like several processes.

use futures_util::future::join_all;
use oncegate_core::marker::{Token, Verdict};
use oncegate_core::{Store, StoreError};
use oncegate_sql::Synchronous;
use rusqlite::TransactionBehavior;

use crate::support::{
    DONE, Directory, GRANTED, SECOND, apply_one, at, claim, complete, key, line, verdicts,
};

#[tokio::test(flavor = "multi_thread")]
async fn of_a_hundred_claims_over_five_handles_one_is_granted() {
    let directory = Directory::new();
    // All of them find no file and create it concurrently.
    let stores: Vec<_> = (0..5).map(|_| directory.store()).collect();
    for round in 0..10 {
        let id = format!("pay-{round}");
        let claims = (0..100_u128).map(|n| {
            let (store, claim) = (stores[n as usize % stores.len()].clone(), claim(&id, n));
            tokio::spawn(async move { apply_one(&store, claim).await.expect("a verdict") })
        });
        let verdicts: Vec<_> = join_all(claims)
            .await
            .into_iter()
            .map(|verdict| verdict.expect("no panic"))
            .collect();
        assert_eq!(
            verdicts
                .iter()
                .filter(|verdict| **verdict == GRANTED)
                .count(),
            1,
            "{verdicts:?}"
        );
        assert_eq!(
            verdicts
                .iter()
                .filter(|verdict| matches!(verdict, Verdict::Busy { .. }))
                .count(),
            99,
            "{verdicts:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn concurrent_handles_create_one_file() {
    for _ in 0..150 {
        let directory = Directory::new();
        let makers = (0..8).map(|_| {
            let store = directory.store().synchronous(Synchronous::Normal);
            tokio::spawn(async move { store.persistence().await })
        });
        for made in join_all(makers).await {
            made.expect("no panic").expect("one of them creates it");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_writers_lose_nothing() {
    let directory = Directory::new();
    let writers = (0..4).map(|writer| {
        let store = directory.store().synchronous(Synchronous::Normal);
        tokio::spawn(async move {
            for round in 0..20 {
                let ids: Vec<String> = (0..50).map(|n| format!("{writer}-{round}-{n}")).collect();
                let claims: Vec<_> = ids.iter().map(|id| claim(id, 1)).collect();
                assert!(
                    verdicts(&store, &claims)
                        .await
                        .iter()
                        .all(|verdict| *verdict == GRANTED)
                );
                let completions: Vec<_> = ids.iter().map(|id| complete(id, 1)).collect();
                assert!(
                    verdicts(&store, &completions)
                        .await
                        .iter()
                        .all(|verdict| *verdict == DONE)
                );
            }
        })
    });
    for written in join_all(writers).await {
        written.expect("no panic");
    }
    let done: u32 = directory
        .raw()
        .query_row(
            "SELECT count(*) FROM oncegate_markers WHERE state = 0",
            [],
            |row| row.get(0),
        )
        .expect("a number");
    assert_eq!(done, 4 * 20 * 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_file_is_not_applied_after_the_timeout() {
    let directory = Directory::new();
    let store = at(directory.file()).timeout(SECOND);
    apply_one(&store, claim("a", 1)).await.expect("granted");
    let mut raw = directory.raw();

    let locked = raw
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .expect("the lock");
    let refused = apply_one(&store, claim("b", 1))
        .await
        .expect_err("it is locked");
    assert!(
        matches!(refused, StoreError::NotApplied(_)) && line(&refused).contains("kept"),
        "{refused}"
    );
    locked.rollback().expect("let go");
    assert_eq!(
        store.read_marker(&key("b")).await.expect("a marker"),
        oncegate_core::marker::Marker::Absent
    );
    assert_eq!(
        apply_one(&store, claim("b", 1)).await.expect("it is free"),
        GRANTED
    );
}

#[test]
fn a_store_outlives_the_runtime_that_first_used_it() {
    let directory = Directory::new();
    let store = directory.store();
    for round in 0..2 {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        let token = Token::random().0;
        assert_eq!(
            runtime
                .block_on(apply_one(&store, claim(&format!("{round}"), token)))
                .expect("a verdict"),
            GRANTED
        );
    }
    assert!(store.for_renewals().is_none());
}
