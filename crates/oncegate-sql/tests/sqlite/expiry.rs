//! Expired markers are absent at once, and are deleted gradually.

use std::time::{Duration, Instant};

use oncegate_core::Store;
use oncegate_core::marker::{Marker, Operation, Terms};
use rusqlite::Connection;

use crate::support::{Directory, GRANTED, SECOND, apply_one, claim, complete, key, verdicts};

/// More rows than an idle thread scans in a second.
const MANY: usize = 1300;
const IDLE_ROWS: usize = 500;

/// The number of expired rows that are left; no live row may be deleted.
fn left(raw: &Connection) -> usize {
    let counts = "SELECT count(*) FILTER (WHERE key LIKE 'old-%'), count(*) FILTER (WHERE key LIKE 'live-%') FROM oncegate_markers";
    let (old, live): (u32, u32) = raw
        .query_row(counts, [], |row| Ok((row.get(0)?, row.get(1)?)))
        .expect("numbers");
    assert_eq!(live as usize, MANY, "live rows were deleted");
    old as usize
}

/// Writes this many expired rows, and as many live rows with smaller keys.
async fn expired(directory: &Directory, store: &dyn Store) -> Connection {
    let live: Vec<Operation> = (0..MANY)
        .map(|n| claim(&format!("live-{n:06}"), 1))
        .collect();
    verdicts(store, &live).await;
    let ids: Vec<String> = (0..MANY).map(|n| format!("old-{n:06}")).collect();
    let both = |id: &String| [claim(id, 1), complete(id, 1)];
    let operations: Vec<Operation> = ids.iter().flat_map(both).collect();
    verdicts(store, &operations).await;
    let raw = directory.raw();
    raw.execute(
        "UPDATE oncegate_merged_markers SET expires = 1 WHERE key > 'old'",
        [],
    )
    .expect("written");
    raw
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_deletes_at_most_one_row_per_operation() {
    let directory = Directory::new();
    let store = directory.store();
    let begun = Instant::now();
    let raw = expired(&directory, &store).await;
    let mut before = left(&raw);
    let mut round = 0;
    while before > 200 {
        round += 1;
        // Larger keys than all others: the sweep reaches the expired rows first.
        let claims: Vec<_> = (0..100)
            .map(|n| claim(&format!("zzz-{round}-{n}"), 1))
            .collect();
        assert!(
            verdicts(&store, &claims)
                .await
                .iter()
                .all(|verdict| *verdict == GRANTED)
        );
        let now = left(&raw);
        let idle = IDLE_ROWS * (begun.elapsed().as_secs() as usize + 1);
        assert!(
            before.saturating_sub(now) <= 100 + idle,
            "{before} rows, then {now}"
        );
        before = now;
        assert!(round < 90, "{before} rows are left after {round} rounds");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_store_deletes_expired_rows_gradually() {
    let directory = Directory::new();
    let store = directory.store();
    let begun = Instant::now();
    let raw = expired(&directory, &store).await;
    loop {
        let left = left(&raw);
        let seconds = begun.elapsed().as_secs() as usize + 1;
        assert!(
            MANY - left <= IDLE_ROWS * seconds,
            "{left} rows are left after {seconds} s"
        );
        if left == 0 {
            break;
        }
        assert!(begun.elapsed() < 60 * SECOND, "{left} rows are left");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_row_is_absent_before_it_is_deleted() {
    let directory = Directory::new();
    let store = directory.store();
    expired(&directory, &store).await;
    assert_eq!(
        store
            .read_marker(&key("old-001299"))
            .await
            .expect("a marker"),
        Marker::Absent
    );
    assert_eq!(
        apply_one(&store, claim("old-001299", 2))
            .await
            .expect("a verdict"),
        GRANTED
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_window_is_accepted() {
    let directory = Directory::new();
    let store = directory.store();
    let [mut claimed, mut completed] = [claim("a", 1), complete("a", 1)];
    for operation in [&mut claimed, &mut completed] {
        operation.terms = Terms {
            lease: Duration::MAX,
            window: Duration::MAX,
            ..operation.terms
        };
    }
    verdicts(&store, &[claimed, completed]).await;
    assert_eq!(
        store.read_marker(&key("a")).await.expect("a marker"),
        Marker::Done(None)
    );
}
