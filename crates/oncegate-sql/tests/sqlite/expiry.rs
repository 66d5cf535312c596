//! What has expired counts as absent at once, and is cleared out a little at a time.

use std::time::{Duration, Instant};

use oncegate_core::Store;
use oncegate_core::marker::{Marker, Operation, Terms};
use rusqlite::Connection;

use crate::support::{Directory, GRANTED, SECOND, ask, claim, complete, key, verdicts};

/// More than are looked at in one idle second.
const MANY: usize = 1300;
const IDLE_ROWS: usize = 500;

/// How many of those rows are still there; the others all have to be.
fn left(raw: &Connection) -> usize {
    let counts = "SELECT count(*) FILTER (WHERE key LIKE 'old-%'), count(*) FILTER (WHERE key LIKE 'live-%') FROM markers";
    let (old, live): (u32, u32) = raw
        .query_row(counts, [], |row| Ok((row.get(0)?, row.get(1)?)))
        .expect("numbers");
    assert_eq!(live as usize, MANY, "what lives was cleared out");
    old as usize
}

/// Completes so many ids whose windows are over when this returns, and none is cleared out. Before
/// them stand as many that live.
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
    raw.execute("UPDATE markers SET expires = 1 WHERE key > 'old'", [])
        .expect("written");
    raw
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_clears_out_no_more_rows_than_it_has_operations() {
    let directory = Directory::new();
    let store = directory.store();
    let begun = Instant::now();
    let raw = expired(&directory, &store).await;
    let mut before = left(&raw);
    let mut round = 0;
    while before > 200 {
        round += 1;
        // Behind all others: the hand that goes round meets the old ones before.
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
async fn an_idle_store_clears_out_some_rows_a_second() {
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
async fn what_has_expired_is_absent_before_it_is_cleared_out() {
    let directory = Directory::new();
    let store = directory.store();
    expired(&directory, &store).await;
    assert_eq!(
        store.look(&key("old-001299")).await.expect("a marker"),
        Marker::Absent
    );
    assert_eq!(
        ask(&store, claim("old-001299", 2))
            .await
            .expect("a verdict"),
        GRANTED
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_longest_window_is_a_window() {
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
        store.look(&key("a")).await.expect("a marker"),
        Marker::Done(None)
    );
}
