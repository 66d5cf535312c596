//! Concurrent clients of a store whose server is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::{Store, StoreError};

use super::store::concurrent_operations_are_linearizable;

/// How long an operation is repeated at most, and how long a kill waits for one.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Retries most operations that the server did not apply, so that a history continues after a restart.
/// The others test that they had no effect.
struct AfterRestart {
    store: Arc<dyn Store>,
    in_flight: AtomicU32,
    lost_replies: AtomicU32,
}

#[async_trait]
impl Store for AfterRestart {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            self.in_flight.fetch_add(1, Ordering::Relaxed);
            let answers = self.store.apply(operations).await;
            self.in_flight.fetch_sub(1, Ordering::Relaxed);
            let unapplied = |it: &Result<_, _>| matches!(it, Err(StoreError::NotApplied(_)));
            let retried = answers.iter().all(unapplied) && fastrand::u8(..4) > 0;
            if retried && Instant::now() < deadline {
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

/// Runs the law [`concurrent_operations_are_linearizable`] while the server is killed ten times, each
/// time while it has operations. `kill` kills it, starts it again with its data, and blocks until it
/// answers. Panics if the law is violated, or no kill lost a reply.
pub async fn linearizable_while_killed(
    store: Arc<dyn Store>,
    mut kill: impl FnMut() + Send + 'static,
) {
    const KILLS: u32 = 10;
    let store = Arc::new(AfterRestart {
        store,
        in_flight: AtomicU32::new(0),
        lost_replies: AtomicU32::new(0),
    });
    let killed = store.clone();
    let killing = tokio::task::spawn_blocking(move || {
        for _ in 0..KILLS {
            std::thread::sleep(Duration::from_millis(fastrand::u64(20..300)));
            // Bounded, because a history that failed sends nothing more.
            let deadline = Instant::now() + TIMEOUT;
            while killed.in_flight.load(Ordering::Relaxed) == 0 && Instant::now() < deadline {
                std::thread::yield_now();
            }
            kill();
        }
        kill // not dropped before the end of the histories: it may own the server
    });
    let mut runs = 0;
    while !killing.is_finished() || runs == 0 {
        concurrent_operations_are_linearizable(store.clone()).await;
        runs += 1;
    }
    drop(killing.await.expect("killed and started again"));
    let lost = store.lost_replies.load(Ordering::Relaxed);
    println!("{runs} runs, {lost} replies lost");
    assert!(lost > 0, "no kill met an operation");
}
