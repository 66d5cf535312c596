//! The polling thread and settling threads in many schedules: shuttle picks the next thread at each
//! lock.

use oncegate_core::Settled;
use oncegate_testkit::laws::source::accepted;
use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
use shuttle::thread;

use super::tests::{assign, committed, hand_out, partition_zero, record};
use super::*;

/// Number of schedules per test.
const SCHEDULES: usize = 2_000;
/// Number of messages in the partition.
const MESSAGES: i64 = 4;

/// The lock and condition variable of shuttle, whose waits never time out, so a lost wake-up is a
/// deadlock that shuttle detects.
#[derive(Default)]
struct ShuttleLock {
    state: Mutex<SourceState>,
    changed: Condvar,
}

impl StateLock for ShuttleLock {
    type Guard<'a> = MutexGuard<'a, SourceState>;

    fn lock(&self) -> Self::Guard<'_> {
        self.state
            .lock()
            .expect("no thread panics while it holds the lock")
    }

    fn wait<'a>(&'a self, guard: Self::Guard<'a>, _: Duration) -> Self::Guard<'a> {
        self.changed
            .wait(guard)
            .expect("no thread panics while it holds the lock")
    }

    fn notify(&self) {
        self.changed.notify_one();
    }
}

/// A partition whose messages are all handed out.
fn started() -> (Arc<SharedState<ShuttleLock>>, Vec<Delivery>) {
    let shared = Arc::new(SharedState::<ShuttleLock>::default());
    assign(&mut shared.lock(), 0, StartPosition::Committed(0));
    shared.add_records((0..MESSAGES).map(|offset| record(0, offset)).collect());
    let (_, deliveries) = hand_out(&mut shared.lock());
    (shared, deliveries)
}

/// Starts two threads that settle these deliveries one by one, in descending order.
fn settle_beside(
    shared: &Arc<SharedState<ShuttleLock>>,
    mut deliveries: Vec<Delivery>,
) -> Vec<thread::JoinHandle<()>> {
    let others = deliveries.split_off(deliveries.len() / 2);
    let settle = |mut deliveries: Vec<Delivery>| {
        let shared = shared.clone();
        thread::spawn(move || {
            while let Some(delivery) = deliveries.pop() {
                let rejected = shared.settle(&mut vec![Settled::new(delivery, accepted())]);
                assert!(rejected.is_empty());
            }
        })
    };
    vec![settle(deliveries), settle(others)]
}

/// Commits, and checks that the committed offset does not decrease.
fn commit(shared: &SharedState<ShuttleLock>, committed_offset: &mut i64) {
    for (offset, _) in committed(&mut shared.lock()) {
        assert!(
            offset >= *committed_offset,
            "{offset} after {committed_offset}"
        );
        *committed_offset = offset;
    }
}

#[test]
fn a_drain_ends_with_the_last_settlement_and_commits_all_in_every_schedule() {
    shuttle::check_random(
        || {
            let (shared, deliveries) = started();
            let settling = settle_beside(&shared, deliveries);
            let mut committed_offset = 0;
            commit(&shared, &mut committed_offset);
            // As the polling thread does while there is no room to read.
            let drain = |epochs: &[u64]| {
                while shared.lock().handed_out(epochs) > 0 {
                    shared.wait(Duration::MAX);
                }
            };
            let unsettled =
                shared.end_assignments(&partition_zero(), RevocationKind::Revoked, drain, || {
                    commit(&shared, &mut committed_offset)
                });
            assert_eq!((unsettled, committed_offset), (0, MESSAGES));
            settling
                .into_iter()
                .for_each(|thread| thread.join().expect("the settling thread does not panic"));
        },
        SCHEDULES,
    );
}

#[test]
fn settlements_of_a_lost_assignment_do_not_affect_the_next_one_in_any_schedule() {
    shuttle::check_random(
        || {
            let (shared, deliveries) = started();
            let settling = settle_beside(&shared, deliveries);
            let mut committed_offset = 0;
            commit(&shared, &mut committed_offset);
            let never_called =
                || unreachable!("a lost assignment is neither drained nor committed");
            shared.end_assignments(
                &partition_zero(),
                RevocationKind::Lost,
                |_| never_called(),
                never_called,
            );
            // The partition is assigned again at the committed offset: its messages are
            // redelivered.
            let start = StartPosition::Committed(committed_offset);
            assign(&mut shared.lock(), 0, start);
            shared.add_records(
                (committed_offset..MESSAGES)
                    .map(|offset| record(0, offset))
                    .collect(),
            );
            let (_, again) = hand_out(&mut shared.lock());
            let before = committed_offset;
            commit(&shared, &mut committed_offset);
            settling
                .into_iter()
                .for_each(|thread| thread.join().expect("the settling thread does not panic"));
            commit(&shared, &mut committed_offset);
            assert_eq!(
                (committed_offset, again.len() as i64),
                (before, MESSAGES - before)
            );
            for delivery in &again {
                assert!(shared.lock().accept(&delivery.receipt));
            }
            commit(&shared, &mut committed_offset);
            assert!(again.is_empty() || committed_offset == MESSAGES);
        },
        SCHEDULES,
    );
}

#[test]
fn settlements_during_commits_are_committed_in_order_and_completely() {
    shuttle::check_random(
        || {
            let (shared, deliveries) = started();
            let settling = settle_beside(&shared, deliveries);
            let mut committed_offset = 0;
            while committed_offset < MESSAGES {
                commit(&shared, &mut committed_offset);
                if committed_offset < MESSAGES {
                    shared.wait(Duration::MAX);
                }
            }
            settling
                .into_iter()
                .for_each(|thread| thread.join().expect("the settling thread does not panic"));
        },
        SCHEDULES,
    );
}
