use std::cell::{Cell, RefCell};

use oncegate_core::Headers;

use super::capacity::{MAX_SPAN, MAX_UNCONFIRMED, MAX_UNCONFIRMED_BYTES};
use super::deliveries::{MAX_READY, MAX_READY_BYTES};
use super::unconfirmed::MessageTotals;
use super::*;

pub(crate) fn record(partition: i32, offset: i64) -> ConsumerRecord {
    ConsumerRecord {
        topic: Arc::from("t"),
        partition,
        offset,
        sent_at: None,
        key: None,
        headers: Headers::default(),
        body: offset.to_string().into(),
    }
}

pub(crate) fn identity(topic_id: &str) -> TopicIdentity {
    TopicIdentity {
        topic_id: topic_id.into(),
        cluster_id: None,
    }
}

/// Assigns a partition of topic `t`.
pub(crate) fn assign(state: &mut SourceState, partition: i32, start: StartPosition) -> u64 {
    state.assign("t", partition, start, LogIdentity::default())
}

/// A state with partition 0 of topic `t`.
pub(crate) fn assigned(start: StartPosition) -> SourceState {
    let mut state = SourceState::default();
    assign(&mut state, 0, start);
    state
}

/// A state with partition 0 of topic `t`, of which these offsets were read.
fn read(offsets: impl IntoIterator<Item = i64>) -> SourceState {
    let mut state = assigned(StartPosition::Unknown);
    add_records(&mut state, 0, offsets);
    state
}

fn read_and_shared(offsets: impl IntoIterator<Item = i64>) -> SharedState {
    let shared = SharedState::<StdLock>::default();
    *shared.lock() = read(offsets);
    shared
}

fn add_records(state: &mut SourceState, partition: i32, offsets: impl IntoIterator<Item = i64>) {
    state.add_records(
        offsets
            .into_iter()
            .map(|it| record(partition, it))
            .collect(),
    );
}

pub(crate) fn hand_out(state: &mut SourceState) -> (Vec<u64>, Vec<Delivery>) {
    let (mut incoming, mut revoked, mut deliveries) = (Vec::new(), Vec::new(), Vec::new());
    let all = Limit::new(usize::MAX, usize::MAX);
    state.hand_out(all, usize::MAX, &mut incoming, &mut Vec::new());
    for it in incoming {
        match it {
            Incoming::Revoked(epoch) => revoked.push(epoch),
            Incoming::Delivery(delivery) => deliveries.push(delivery),
        }
    }
    (revoked, deliveries)
}

fn positions(deliveries: &[Delivery]) -> Vec<i64> {
    let positions = deliveries.iter().map(|it| it.receipt.position as i64);
    positions.collect()
}

pub(crate) fn committed(state: &mut SourceState) -> Vec<(i64, OffsetCommitMode)> {
    let commits = state.commits().into_iter();
    commits.map(|it| (it.offset, it.mode)).collect()
}

pub(crate) fn partition_zero() -> [(String, i32); 1] {
    [("t".to_owned(), 0)]
}

/// Revokes partition 0.
fn revoke(state: &mut SourceState) -> u64 {
    let epoch = state.epoch_of("t", 0).expect("it is assigned");
    state.apply("t", 0, PartitionEvent::Revoked);
    epoch
}

/// Performs all pending seeks, successfully.
fn seek(shared: &SharedState) {
    let seeks = shared.lock().pending_seeks();
    for (topic, partition, _) in seeks {
        shared
            .lock()
            .apply(&topic, partition, PartitionEvent::Sought);
    }
}

#[test]
fn a_revoked_partition_hands_out_nothing_more_and_still_counts_settlements() {
    let mut state = read(0..3);
    let (_, mut first) = hand_out(&mut state);
    add_records(&mut state, 0, [3]);
    let epoch = revoke(&mut state);
    add_records(&mut state, 0, [4]);
    assert_eq!(state.handed_out(&[epoch]), 3);
    let (revoked, deliveries) = hand_out(&mut state);
    assert_eq!((revoked, deliveries.len()), (vec![epoch], 0));

    assert!(state.accept(&first[0].receipt));
    assert!(state.release(first.remove(1)));
    assert!(state.accept(&first[1].receipt));
    assert_eq!(state.handed_out(&[epoch]), 0);
    assert_eq!(
        state.commits(),
        [OffsetCommit {
            topic: Arc::from("t"),
            partition: 0,
            offset: 1,
            mode: OffsetCommitMode::Immediate,
            identity: None
        }]
    );
    state.remove_assignments(&[epoch]);
    assert!(!state.accept(&first[1].receipt));
    assert_eq!(state.commits(), []);
}

#[test]
fn a_partition_that_is_assigned_again_has_another_assignment_epoch() {
    let mut state = read(5..7);
    let (_, before) = hand_out(&mut state);
    let epoch = revoke(&mut state);
    state.remove_assignments(&[epoch]);
    assign(&mut state, 0, StartPosition::Unknown);
    add_records(&mut state, 0, [5, 6]);
    assert!(!state.accept(&before[0].receipt));
    assert_eq!(committed(&mut state), [(5, OffsetCommitMode::Immediate)]);
    let (_, after) = hand_out(&mut state);
    assert!(state.accept(&after[0].receipt));
    assert_eq!(state.commits()[0].offset, 6);
}

/// librdkafka lists a partition twice if it failed to unassign it.
#[test]
fn an_assignment_ends_an_earlier_one_of_the_same_partition() {
    let mut state = read(5..7);
    let (_, before) = hand_out(&mut state);
    assign(&mut state, 0, StartPosition::Committed(5));
    assert_eq!(state.partitions(), partition_zero());
    assert_eq!(hand_out(&mut state).0, [before[0].receipt.epoch]);
    assert!(!state.accept(&before[0].receipt));
    assert_eq!(committed(&mut state), []);
}

#[test]
fn a_lower_offset_starts_another_assignment() {
    let mut state = read(5..8);
    let (_, before) = hand_out(&mut state);
    assert_eq!(committed(&mut state), [(5, OffsetCommitMode::Immediate)]);
    add_records(&mut state, 0, [2, 3]);
    // librdkafka commits no stored offset below the committed one, so the lower offset is committed
    // at once.
    assert_eq!(committed(&mut state), [(2, OffsetCommitMode::Immediate)]);
    let (revoked, after) = hand_out(&mut state);
    assert_eq!(revoked, [before[0].receipt.epoch]);
    assert_eq!(positions(&after), [2, 3]);
    assert!(!state.accept(&before[0].receipt));
    assert!(state.accept(&after[0].receipt));
    assert_eq!(committed(&mut state), [(3, OffsetCommitMode::Stored)]);
}

#[test]
fn unsettled_messages_below_a_truncation_are_read_again() {
    let shared = read_and_shared(0..10);
    let (_, mut before) = hand_out(&mut shared.lock());
    for index in [0, 1, 3] {
        assert!(shared.lock().accept(&before[index].receipt));
    }
    // 2 and 4 to 9 are not settled; 2 is released.
    shared.lock().release(before.remove(2));
    assert_eq!(
        committed(&mut shared.lock()),
        [(2, OffsetCommitMode::Immediate)]
    );

    assert_eq!(shared.add_records(vec![record(0, 7), record(0, 8)]), []);
    let (revoked, after) = hand_out(&mut shared.lock());
    assert_eq!(
        (revoked, after.len()),
        (vec![before[0].receipt.epoch], 0),
        "the records are dropped; if they were added, 2 to 6 would count as settled"
    );
    assert_eq!(
        committed(&mut shared.lock()),
        [(2, OffsetCommitMode::Immediate)]
    );

    assert_eq!(shared.lock().pending_seeks(), [(Arc::from("t"), 0, 2)]);
    seek(&shared);
    add_records(&mut shared.lock(), 0, 2..9);
    let (_, again) = hand_out(&mut shared.lock());
    assert_eq!(positions(&again), (2..9).collect::<Vec<_>>());
    for delivery in &again[1..] {
        assert!(shared.lock().accept(&delivery.receipt));
    }
    assert_eq!(committed(&mut shared.lock()), [], "2 is not settled");
    shared.lock().accept(&again[0].receipt);
    assert_eq!(
        committed(&mut shared.lock()),
        [(9, OffsetCommitMode::Stored)]
    );
}

#[test]
fn the_partitions_that_restart_at_a_lower_offset_are_returned() {
    let mut state = assigned(StartPosition::Committed(5));
    let restarted = state.add_records(vec![record(0, 5), record(0, 2), record(0, 3)]);
    assert_eq!(restarted, [(Arc::from("t"), 0)]);
    assert_eq!(state.position_of("t", 0), Some(4));
}

#[test]
fn no_records_are_added_after_a_partition_was_halted() {
    let mut state = read(5..7);
    assign(&mut state, 1, StartPosition::Unknown);
    state.apply("t", 0, PartitionEvent::Halted);
    state.add_records(vec![record(0, 9), record(1, 3)]);
    let (revoked, deliveries) = hand_out(&mut state);
    assert_eq!((revoked, positions(&deliveries)), (vec![], vec![5, 6, 3]));
    for it in deliveries {
        state.accept(&it.receipt);
    }
    assert_eq!(
        committed(&mut state),
        [
            (7, OffsetCommitMode::Immediate),
            (4, OffsetCommitMode::Immediate)
        ]
    );
}

#[test]
fn with_a_limit_of_zero_only_revocations_are_handed_out() {
    let mut state = read(0..2);
    assign(&mut state, 1, StartPosition::Unknown);
    add_records(&mut state, 1, [0]);
    let nothing = Limit::NOTHING;
    let mut incoming = Vec::new();
    state.hand_out(nothing, usize::MAX, &mut incoming, &mut Vec::new());
    assert!(incoming.is_empty());
    let epoch = revoke(&mut state);
    state.hand_out(nothing, usize::MAX, &mut incoming, &mut Vec::new());
    assert!(matches!(incoming[..], [Incoming::Revoked(revoked)] if revoked == epoch));
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(deliveries.len(), 1);
}

#[test]
fn nothing_is_read_while_too_much_is_ready() {
    let mut full = read(0..MAX_READY as i64);
    assert_eq!(full.room(), 0);
    let (_, deliveries) = hand_out(&mut full);
    assert_eq!(full.room(), MAX_READY);
    for delivery in deliveries {
        full.release(delivery);
    }
    assert_eq!(full.room(), 0, "releases are ready, too");
    hand_out(&mut full);
    assert!(full.room() > 0);
    full.phase = SourcePhase::Stopped;
    assert_eq!(full.room(), 0);

    let mut large = record(0, 0);
    large.body = vec![b'x'; MAX_READY_BYTES].into();
    let mut full = assigned(StartPosition::Unknown);
    full.add_records(vec![large]);
    assert_eq!(full.room(), 0);
    hand_out(&mut full);
    assert!(full.room() > 0);
}

/// Sets the number and size of the unconfirmed dead letters, all of partition 0.
fn set_unconfirmed(state: &mut SourceState, count: usize, bytes: usize) {
    let unconfirmed = &mut state.deliveries.unconfirmed;
    unconfirmed.set("t", 0, MessageTotals { count, bytes });
}

/// The full partitions, if only partition 0 is full.
fn full_partition() -> Vec<(Arc<str>, i32)> {
    vec![(Arc::from("t"), 0)]
}

#[test]
fn a_partition_that_is_full_of_dead_letters_is_not_read_but_others_are() {
    for (count, bytes) in [(MAX_UNCONFIRMED, 0), (1, MAX_UNCONFIRMED_BYTES)] {
        let mut state = read(0..1);
        set_unconfirmed(&mut state, count, bytes);
        assert_eq!(
            (state.room(), state.full_partitions()),
            (0, full_partition()),
            "no other partition is assigned"
        );
        assign(&mut state, 1, StartPosition::Unknown);
        assert_eq!(
            (state.room(), state.full_partitions()),
            (MAX_READY - 1, full_partition())
        );
        let read: Vec<i32> = state.read_positions().iter().map(|it| it.2).collect();
        assert_eq!(read, [1], "a full partition is not checked for stalls");
        set_unconfirmed(&mut state, count - 1, bytes.saturating_sub(1));
        assert_eq!(state.full_partitions(), []);
    }
}

#[test]
fn a_partition_with_less_than_its_share_is_read_even_if_others_have_many_dead_letters() {
    let mut state = read(0..1);
    set_unconfirmed(&mut state, MAX_UNCONFIRMED, 0);
    assign(&mut state, 1, StartPosition::Unknown);
    add_records(&mut state, 1, 0..MAX_UNCONFIRMED as i64 / 2);
    let (_, deliveries) = hand_out(&mut state);
    let of_partition_1 = deliveries
        .into_iter()
        .filter(|it| it.receipt.partition == 1);
    for delivery in of_partition_1 {
        assert_eq!(state.full_partitions(), full_partition());
        state.reject(&delivery);
    }
    assert_eq!(
        (state.room(), state.full_partitions().len()),
        (0, 2),
        "both partitions have their share"
    );
}

#[test]
fn a_partition_is_not_read_while_one_delivery_blocks_the_maximum_span() {
    let mut state = read(0..1);
    let (_, first) = hand_out(&mut state);
    assign(&mut state, 1, StartPosition::Unknown);
    let settle_behind = |state: &mut SourceState, offsets: std::ops::Range<i64>| {
        let next_epoch = state.last_epoch + 1;
        for offset in offsets {
            state.apply("t", 0, PartitionEvent::Fetched { offset, next_epoch });
            state.apply("t", 0, PartitionEvent::Settled(offset));
        }
    };
    settle_behind(&mut state, 1..MAX_SPAN as i64 - 1);
    assert_eq!(state.full_partitions(), []);
    settle_behind(&mut state, MAX_SPAN as i64 - 1..MAX_SPAN as i64);
    assert_eq!(
        (MAX_SPAN, state.full_partitions()),
        (1_048_576, full_partition())
    );
    assert!(state.room() > 0, "partition 1 is read");
    state.accept(&first[0].receipt);
    assert_eq!(state.full_partitions(), []);
    let commits = committed(&mut state);
    assert_eq!(commits, [(MAX_SPAN as i64, OffsetCommitMode::Immediate)]);
}

/// While the consumer's queue fills, mostly with deliveries of one partition, only the others are
/// read and handed out.
#[test]
fn while_the_queue_fills_a_partition_with_more_than_its_share_waits() {
    let mut state = read(0..10);
    hand_out(&mut state);
    state.queue_level = QueueLevel::High;
    assert_eq!(state.full_partitions(), [], "there is no other partition");
    assign(&mut state, 1, StartPosition::Unknown);
    assert_eq!(state.full_partitions(), full_partition());
    add_records(&mut state, 0, 10..MAX_READY as i64 + 10);
    assert_eq!(state.room(), 0);
    assert_eq!(hand_out(&mut state).1.len(), 0);
    assert_eq!(state.room(), MAX_READY, "what is held back does not count");
    let partition = state.status().remove(0);
    assert_eq!(partition.handed_out, 10);

    add_records(&mut state, 1, 0..20);
    let of_partition_1 = hand_out(&mut state).1;
    assert_eq!(positions(&of_partition_1), Vec::from_iter(0..20));
    add_records(&mut state, 1, 20..22);
    let partition_1 = vec![(Arc::from("t"), 1)];
    assert_eq!(state.full_partitions(), partition_1);
    let of_partition_0 = hand_out(&mut state).1;
    assert_eq!(
        positions(&of_partition_0),
        Vec::from_iter(10..MAX_READY as i64 + 10),
        "in order"
    );
    state.queue_level = QueueLevel::Low;
    assert_eq!(state.full_partitions(), []);
    assert_eq!(positions(&hand_out(&mut state).1), [20, 21]);
}

#[test]
fn deliveries_that_are_held_back_are_dropped_with_their_assignment() {
    let mut state = read(0..10);
    assign(&mut state, 1, StartPosition::Unknown);
    hand_out(&mut state);
    state.queue_level = QueueLevel::High;
    add_records(&mut state, 0, 10..20);
    assert_eq!(hand_out(&mut state).1.len(), 0);
    revoke(&mut state);
    state.queue_level = QueueLevel::Low;
    assert_eq!(hand_out(&mut state).1.len(), 0);
}

fn unconfirmed(state: &SourceState) -> MessageTotals {
    state.deliveries.unconfirmed.total()
}

#[test]
fn unconfirmed_dead_letters_count_by_size() {
    let mut state = read(0..2);
    let (_, deliveries) = hand_out(&mut state);
    for delivery in &deliveries {
        assert!(state.reject(delivery));
    }
    let expected = |count, bytes| (count, MessageTotals { count, bytes });
    assert_eq!(
        (state.unconfirmed_count(), unconfirmed(&state)),
        expected(2, 2)
    );
    assert!(state.dead_letter_confirmed(&deliveries[1]));
    assert_eq!(
        (state.unconfirmed_count(), unconfirmed(&state)),
        expected(1, 1)
    );
    add_records(&mut state, 0, [2]);
    let one = Limit::new(1, 1);
    state.hand_out(one, 0, &mut Vec::new(), &mut Vec::new());
    assert_eq!(
        (state.unconfirmed_count(), unconfirmed(&state)),
        expected(2, 2),
        "a body above the limit counts as a dead letter"
    );
    let of_partition = state.deliveries.unconfirmed.of(&Arc::from("t"), 0);
    assert_eq!(of_partition, unconfirmed(&state));
}

/// If they did not count, the partition would be read up to the limit again after each rebalance,
/// while its dead letters cannot be published.
#[test]
fn a_partition_that_is_assigned_again_still_has_its_unconfirmed_dead_letters() {
    let mut state = read(0..1);
    add_records(&mut state, 0, 1..MAX_UNCONFIRMED as i64);
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(deliveries.len(), MAX_UNCONFIRMED);
    for delivery in &deliveries {
        assert_eq!(state.full_partitions(), []);
        assert!(state.reject(delivery));
    }
    assert_eq!(state.full_partitions(), full_partition());
    let epoch = revoke(&mut state);
    state.remove_assignments(&[epoch]);
    assert_eq!(unconfirmed(&state).count, MAX_UNCONFIRMED);
    assign(&mut state, 0, StartPosition::Committed(0));
    assert_eq!(
        (state.room(), state.full_partitions()),
        (0, full_partition())
    );
    // The dead letter of an assignment that has ended.
    assert!(!state.dead_letter_confirmed(&deliveries[0]));
    assert_eq!(state.full_partitions(), []);
    for delivery in &deliveries[1..] {
        state.dead_letter_confirmed(delivery);
    }
    assert_eq!(
        (state.unconfirmed_count(), unconfirmed(&state)),
        (0, MessageTotals::default())
    );
}

#[test]
fn a_release_is_handed_out_again_at_once() {
    let mut state = read(0..2);
    let (_, mut deliveries) = hand_out(&mut state);
    state.release(deliveries.remove(0));
    assert_eq!(state.handed_out(&[1]), 1);
    let (_, again) = hand_out(&mut state);
    assert_eq!((positions(&again), again[0].failures), (vec![0], 0));
}

#[test]
fn a_recreated_topic_is_not_read_before_a_seek_succeeds() {
    let shared = read_and_shared(5..8);
    let (_, before) = hand_out(&mut shared.lock());
    assert_eq!(shared.restart_topic("t", Some(identity("another"))), 1);
    assert_eq!(shared.restart_topic("t", Some(identity("another"))), 0);
    let (revoked, _) = hand_out(&mut shared.lock());
    assert_eq!(revoked, [before[0].receipt.epoch]);
    assert!(!shared.lock().accept(&before[0].receipt));
    // Offset 0 is committed, so that the next owner of the partition does not start at an offset of
    // the deleted topic.
    assert_eq!(
        committed(&mut shared.lock()),
        [(0, OffsetCommitMode::Immediate)]
    );
    for _ in 0..3 {
        assert_eq!(shared.lock().pending_seeks(), [(Arc::from("t"), 0, 0)]);
        // Records of the new topic, above the last offset of the deleted one.
        add_records(&mut shared.lock(), 0, [8, 9]);
        assert_eq!(hand_out(&mut shared.lock()).1.len(), 0);
        assert_eq!(committed(&mut shared.lock()), []);
    }
    seek(&shared);
    assert_eq!(shared.lock().pending_seeks(), []);
    add_records(&mut shared.lock(), 0, [0, 1]);
    let (_, after) = hand_out(&mut shared.lock());
    assert_eq!(positions(&after), [0, 1]);
    assert!(shared.lock().accept(&after[0].receipt));
    assert_eq!(
        committed(&mut shared.lock()),
        [(1, OffsetCommitMode::Stored)]
    );
}

#[test]
fn a_partition_that_is_lost_during_a_seek_is_not_read() {
    let shared = read_and_shared(5..8);
    shared.restart_topic("t", Some(identity("another")));
    let epochs = shared.revoke(&partition_zero());
    shared.lock().remove_assignments(&epochs);
    shared.lock().apply("t", 0, PartitionEvent::Sought);
    add_records(&mut shared.lock(), 0, [0]);
    assert_eq!(hand_out(&mut shared.lock()).1.len(), 0);
    assert_eq!(shared.lock().pending_seeks(), []);
}

#[test]
fn revoked_partitions_are_drained_and_committed_and_lost_ones_are_neither() {
    for kind in [RevocationKind::Revoked, RevocationKind::Lost] {
        let shared = read_and_shared(5..8);
        let (_, deliveries) = hand_out(&mut shared.lock());
        shared.lock().accept(&deliveries[0].receipt);
        let (drained, stored) = (Cell::new(0), RefCell::new(Vec::new()));
        let drain = |epochs: &[u64]| {
            drained.set(epochs.len());
            // The rebalance waits for this delivery.
            shared.lock().accept(&deliveries[1].receipt);
        };
        let store = || stored.borrow_mut().extend(committed(&mut shared.lock()));
        let unsettled = shared.end_assignments(&partition_zero(), kind, drain, store);
        let expected = match kind {
            RevocationKind::Revoked => (1, vec![(7, OffsetCommitMode::Immediate)], 1),
            RevocationKind::Lost => (0, vec![], 2),
        };
        assert_eq!((drained.get(), stored.take(), unsettled), expected);
        assert!(!shared.lock().accept(&deliveries[2].receipt));
        assert_eq!(committed(&mut shared.lock()), []);
    }
}
