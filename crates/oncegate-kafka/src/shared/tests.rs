use oncegate_core::Headers;

use super::*;

fn record(partition: i32, offset: i64) -> Record {
    let body = offset.to_string().into();
    Record { topic: Arc::from("t"), partition, offset, sent_at: None, key: None, headers: Headers::default(), body }
}

fn state(partition: i32, offsets: impl IntoIterator<Item = i64>) -> State {
    let mut state = State::default();
    state.begin(Arc::from("t"), partition);
    state.take_in(offsets.into_iter().map(|offset| record(partition, offset)).collect());
    state
}

fn hand_out(state: &mut State) -> (Vec<u64>, Vec<Delivery>) {
    let (mut incoming, mut revoked, mut deliveries) = (Vec::new(), Vec::new(), Vec::new());
    state.hand_out(Limit { count: usize::MAX, bytes: usize::MAX }, usize::MAX, &mut incoming, &mut Vec::new());
    for it in incoming {
        match it {
            Incoming::Revoked(epoch) => revoked.push(epoch),
            Incoming::Delivery(delivery) => deliveries.push(delivery),
        }
    }
    (revoked, deliveries)
}

fn leaving() -> [(String, i32); 1] {
    [("t".to_owned(), 0)]
}

#[test]
fn a_revoked_partition_hands_out_nothing_more_and_still_counts_what_is_settled() {
    let mut state = state(0, 0..3);
    let (_, mut first) = hand_out(&mut state);
    state.take_in(vec![record(0, 3)]);
    let epochs = state.revoke(&leaving());
    state.take_in(vec![record(0, 4)]);
    assert_eq!(state.out(&epochs), 3);
    let (revoked, deliveries) = hand_out(&mut state);
    assert_eq!((revoked, deliveries.len()), (epochs.clone(), 0));

    assert_eq!(state.accept(&first[0].receipt), Fate::Counted);
    assert_eq!(state.release(first.remove(1), Duration::ZERO), Fate::Counted);
    assert_eq!(state.accept(&first[1].receipt), Fate::Counted);
    assert_eq!((state.out(&epochs), state.next_due()), (0, None));
    assert_eq!(state.commits(), [Commit { topic: Arc::from("t"), partition: 0, offset: 1 }]);
    state.forget(&epochs);
    assert_eq!(state.accept(&first[1].receipt), Fate::Stale);
    assert_eq!(state.commits(), []);
}

#[test]
fn a_partition_that_comes_back_is_another_one() {
    let mut state = state(0, 5..7);
    let (_, before) = hand_out(&mut state);
    let epochs = state.revoke(&leaving());
    state.forget(&epochs);
    state.begin(Arc::from("t"), 0);
    state.take_in(vec![record(0, 5), record(0, 6)]);
    assert_eq!(state.accept(&before[0].receipt), Fate::Stale);
    assert_eq!(state.commits(), []);
    let (_, after) = hand_out(&mut state);
    assert_eq!(state.accept(&after[0].receipt), Fate::Counted);
    assert_eq!(state.commits()[0].offset, 6);
}

#[test]
fn a_partition_that_is_reset_begins_anew() {
    let mut state = state(0, 5..8);
    let (_, before) = hand_out(&mut state);
    state.take_in(vec![record(0, 2), record(0, 3)]);
    let (revoked, after) = hand_out(&mut state);
    assert_eq!(revoked, [before[0].receipt.epoch]);
    assert_eq!(after.iter().map(|it| it.receipt.position).collect::<Vec<_>>(), [2, 3]);
    assert_eq!(state.accept(&before[0].receipt), Fate::Stale);
    assert_eq!(state.accept(&after[0].receipt), Fate::Counted);
    assert_eq!(state.commits()[0].offset, 3);
}

#[test]
fn nothing_is_read_while_too_much_waits() {
    let mut full = state(0, 0..READY as i64);
    assert_eq!(full.room(), 0);
    let (_, deliveries) = hand_out(&mut full);
    assert_eq!(full.room(), READY);
    for delivery in deliveries {
        full.release(delivery, Duration::from_secs(60));
    }
    assert!(full.room() > 0);
    full.publishing = HELD - READY;
    assert_eq!(full.room(), 0);
    full.publishing = 0;
    full.phase = Phase::Stopped;
    assert_eq!(full.room(), 0);
}

#[test]
fn a_release_is_handed_over_when_its_delay_is_over_and_not_before() {
    let mut state = state(0, 0..2);
    let (_, mut deliveries) = hand_out(&mut state);
    state.release(deliveries.remove(0), Duration::from_secs(60));
    state.release(deliveries.remove(0), Duration::ZERO);
    let (_, again) = hand_out(&mut state);
    assert_eq!((again.len(), again[0].receipt.position, again[0].failures), (1, 1, 0));
    assert!(state.next_due().is_some_and(|due| due > Instant::now()));
    assert_eq!(state.out(&[1]), 1);
}
