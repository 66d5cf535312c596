//! The polling thread and those that settle, in many orders: shuttle chooses at each lock who goes
//! on.

use oncegate_core::Settled;
use oncegate_testkit::laws::source::accepted;
use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
use shuttle::thread;

use super::tests::{committed, hand_out, leaving, record};
use super::*;

/// How many orders are tried of each scenario.
const ORDERS: usize = 2_000;
/// How many messages there are.
const MESSAGES: i64 = 4;

/// The lock and the condition of shuttle, under which no wait is ever over by itself: a wake-up
/// that is lost is a deadlock, which it finds.
#[derive(Default)]
struct Shuttled {
    state: Mutex<State>,
    changed: Condvar,
}

impl Monitor for Shuttled {
    type Guard<'a> = MutexGuard<'a, State>;

    fn lock(&self) -> Self::Guard<'_> {
        self.state.lock().expect("no panic inside")
    }

    fn wait<'a>(&'a self, guard: Self::Guard<'a>, _: Duration) -> Self::Guard<'a> {
        self.changed.wait(guard).expect("no panic inside")
    }

    fn notify(&self) {
        self.changed.notify_one();
    }
}

/// A partition of which all was handed out.
fn begun() -> (Arc<Shared<Shuttled>>, Vec<Delivery>) {
    let shared = Arc::new(Shared::<Shuttled>::default());
    shared.assign("t", 0, Begins::At(0), Log::default());
    shared.take_in((0..MESSAGES).map(|offset| record(0, offset)).collect());
    let (_, deliveries) = hand_out(&mut shared.lock());
    (shared, deliveries)
}

/// Two threads that settle these one by one, the last ones first.
fn settle_beside(
    shared: &Arc<Shared<Shuttled>>,
    mut deliveries: Vec<Delivery>,
) -> Vec<thread::JoinHandle<()>> {
    let others = deliveries.split_off(deliveries.len() / 2);
    let settle = |mut deliveries: Vec<Delivery>| {
        let shared = shared.clone();
        thread::spawn(move || {
            while let Some(delivery) = deliveries.pop() {
                let rejected = shared.settle(&mut vec![Settled {
                    delivery,
                    settlement: accepted(),
                    story: None,
                }]);
                assert!(rejected.is_empty());
            }
        })
    };
    vec![settle(deliveries), settle(others)]
}

/// Takes what there is to commit, which is never lower than before.
fn commit(shared: &Shared<Shuttled>, stands: &mut i64) {
    for (offset, _) in committed(&mut shared.lock()) {
        assert!(offset >= *stands, "{offset} after {stands}");
        *stands = offset;
    }
}

#[test]
fn a_drain_wakes_with_the_last_settlement_and_commits_all_in_every_order() {
    shuttle::check_random(
        || {
            let (shared, deliveries) = begun();
            let settling = settle_beside(&shared, deliveries);
            let mut stands = 0;
            commit(&shared, &mut stands);
            // As the source does, while nothing more may be read.
            let drain = |epochs: &[u64]| {
                while shared.lock().out(epochs) > 0 {
                    shared.wait(Duration::MAX);
                }
            };
            let unsettled = shared.give_up(&leaving(), Leave::GivenBack, drain, || {
                commit(&shared, &mut stands)
            });
            assert_eq!((unsettled, stands), (0, MESSAGES));
            settling
                .into_iter()
                .for_each(|thread| thread.join().expect("no panic"));
        },
        ORDERS,
    );
}

#[test]
fn what_is_settled_of_a_lost_assignment_moves_nothing_of_the_next_in_any_order() {
    shuttle::check_random(
        || {
            let (shared, deliveries) = begun();
            let settling = settle_beside(&shared, deliveries);
            let mut stands = 0;
            commit(&shared, &mut stands);
            let not_lost = || unreachable!("nothing is waited for or committed");
            shared.give_up(&leaving(), Leave::Lost, |_| not_lost(), not_lost);
            // It comes back where it was committed, and so do its messages.
            shared.assign("t", 0, Begins::At(stands), Log::default());
            shared.take_in((stands..MESSAGES).map(|offset| record(0, offset)).collect());
            let (_, again) = hand_out(&mut shared.lock());
            let before = stands;
            commit(&shared, &mut stands);
            settling
                .into_iter()
                .for_each(|thread| thread.join().expect("no panic"));
            commit(&shared, &mut stands);
            assert_eq!((stands, again.len() as i64), (before, MESSAGES - before));
            for delivery in &again {
                assert_eq!(shared.lock().accept(&delivery.receipt), Fate::Counted);
            }
            commit(&shared, &mut stands);
            assert!(again.is_empty() || stands == MESSAGES);
        },
        ORDERS,
    );
}

#[test]
fn what_is_settled_while_it_is_committed_is_committed_in_order_and_in_the_end_whole() {
    shuttle::check_random(
        || {
            let (shared, deliveries) = begun();
            let settling = settle_beside(&shared, deliveries);
            let mut stands = 0;
            while stands < MESSAGES {
                commit(&shared, &mut stands);
                if stands < MESSAGES {
                    shared.wait(Duration::MAX);
                }
            }
            settling
                .into_iter()
                .for_each(|thread| thread.join().expect("no panic"));
        },
        ORDERS,
    );
}
