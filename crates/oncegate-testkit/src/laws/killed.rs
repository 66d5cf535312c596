//! Concurrent clients of a store whose server is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::{Store, StoreError};

use super::store::concurrent_operations_are_linearizable;

/// The time limit for repeating an operation, and for waiting until an operation is in progress.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Repeats most batches that fail with [`StoreError::NotApplied`], so that a history continues
/// after a restart. It returns one failure in four to the client; the history then checks that such
/// an operation had no effect.
struct RetryingStore {
    store: Arc<dyn Store>,
    in_flight: AtomicU32,
    lost_replies: AtomicU32,
}

#[async_trait]
impl Store for RetryingStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.in_flight.fetch_add(1, Ordering::Relaxed);
            let answers = self.store.apply(operations).await;
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            let unapplied = |it: &Result<_, _>| matches!(it, Err(StoreError::NotApplied(_)));
            let is_repeated = answers.iter().all(unapplied) && fastrand::u8(..4) > 0;
            if is_repeated && Instant::now() < deadline {
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
            let unknown = |it: &&Result<_, _>| matches!(it, Err(StoreError::Unknown(_)));
            let lost = answers.iter().filter(unknown).count();
            self.lost_replies.fetch_add(lost as u32, Ordering::Relaxed);
            return answers;
        }
    }
}

/// Runs the law [`concurrent_operations_are_linearizable`] while the server is killed ten times,
/// each time while an operation is in progress. `kill` kills the server, starts it again with its
/// data, and blocks until it answers. Panics if the law is violated, or if no kill caused the loss
/// of a reply.
pub async fn linearizable_while_killed(
    store: Arc<dyn Store>,
    mut kill: impl FnMut() + Send + 'static,
) {
    const KILLS: u32 = 10;
    let store = Arc::new(RetryingStore {
        store,
        in_flight: AtomicU32::new(0),
        lost_replies: AtomicU32::new(0),
    });
    let killed = store.clone();
    let killing = tokio::task::spawn_blocking(move || {
        for _ in 0..KILLS {
            std::thread::sleep(Duration::from_millis(fastrand::u64(20..300)));
            // The wait is bounded, because a history that has failed sends no more operations.
            let deadline = Instant::now() + TIMEOUT;
            while killed.in_flight.load(Ordering::Relaxed) == 0 && Instant::now() < deadline {
                std::thread::yield_now();
            }
            kill();
        }
        kill // returned, not dropped: it may own the server, which the histories still use
    });
    let mut runs = 0;
    while !killing.is_finished() || runs == 0 {
        concurrent_operations_are_linearizable(store.clone()).await;
        runs += 1;
    }
    drop(killing.await.expect("the killing task does not panic"));
    let lost = store.lost_replies.load(Ordering::Relaxed);
    println!("{runs} runs of the law, {lost} replies lost");
    assert!(lost > 0, "no kill caused the loss of a reply");
}
