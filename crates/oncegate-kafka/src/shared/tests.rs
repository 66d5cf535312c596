use std::cell::{Cell, RefCell};

use oncegate_core::Headers;

use super::commits::COMMIT_RETRY_PAUSE;
use super::*;
use crate::topic_identity::TopicIdentity;

pub(super) fn record(partition: i32, offset: i64) -> ConsumerRecord {
    let body = offset.to_string().into();
    ConsumerRecord {
        topic: Arc::from("t"),
        partition,
        offset,
        sent_at: None,
        key: None,
        headers: Headers::default(),
        body,
    }
}

pub(super) fn identity(topic_id: &str) -> TopicIdentity {
    TopicIdentity {
        topic_id: topic_id.into(),
        cluster_id: None,
    }
}

fn state(partition: i32, offsets: impl IntoIterator<Item = i64>) -> SourceState {
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        partition,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    state.add_records(
        offsets
            .into_iter()
            .map(|offset| record(partition, offset))
            .collect(),
    );
    state
}

pub(super) fn hand_out(state: &mut SourceState) -> (Vec<u64>, Vec<Delivery>) {
    let (mut incoming, mut revoked, mut deliveries) = (Vec::new(), Vec::new(), Vec::new());
    state.hand_out(
        Limit {
            count: usize::MAX,
            bytes: usize::MAX,
        },
        usize::MAX,
        &mut incoming,
        &mut Vec::new(),
    );
    for it in incoming {
        match it {
            Incoming::Revoked(epoch) => revoked.push(epoch),
            Incoming::Delivery(delivery) => deliveries.push(delivery),
        }
    }
    (revoked, deliveries)
}

pub(super) fn committed(state: &mut SourceState) -> Vec<(i64, SendMode)> {
    state
        .commits()
        .into_iter()
        .map(|it| (it.offset, it.mode))
        .collect()
}

pub(super) fn partition_zero() -> [(String, i32); 1] {
    [("t".to_owned(), 0)]
}

#[test]
fn a_revoked_partition_hands_out_nothing_more_and_still_counts_settlements() {
    let mut state = state(0, 0..3);
    let (_, mut first) = hand_out(&mut state);
    state.add_records(vec![record(0, 3)]);
    let epochs = state.revoke(&partition_zero());
    state.add_records(vec![record(0, 4)]);
    assert_eq!(state.handed_out(&epochs), 3);
    let (revoked, deliveries) = hand_out(&mut state);
    assert_eq!((revoked, deliveries.len()), (epochs.clone(), 0));

    assert_eq!(state.accept(&first[0].receipt), SettlementEffect::Applied);
    assert_eq!(
        state.release(first.remove(1), Duration::ZERO),
        SettlementEffect::Applied
    );
    assert_eq!(state.accept(&first[1].receipt), SettlementEffect::Applied);
    assert_eq!((state.handed_out(&epochs), state.next_due()), (0, None));
    assert_eq!(
        state.commits(),
        [OffsetCommit {
            topic: Arc::from("t"),
            partition: 0,
            offset: 1,
            mode: SendMode::Immediate,
            identity: None
        }]
    );
    state.forget(&epochs);
    assert_eq!(state.accept(&first[1].receipt), SettlementEffect::Stale);
    assert_eq!(state.commits(), []);
}

#[test]
fn a_partition_that_is_assigned_again_has_another_assignment_epoch() {
    let mut state = state(0, 5..7);
    let (_, before) = hand_out(&mut state);
    let epochs = state.revoke(&partition_zero());
    state.forget(&epochs);
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    state.add_records(vec![record(0, 5), record(0, 6)]);
    assert_eq!(state.accept(&before[0].receipt), SettlementEffect::Stale);
    assert_eq!(committed(&mut state), [(5, SendMode::Immediate)]);
    let (_, after) = hand_out(&mut state);
    assert_eq!(state.accept(&after[0].receipt), SettlementEffect::Applied);
    assert_eq!(state.commits()[0].offset, 6);
}

#[test]
fn a_lower_offset_starts_another_assignment() {
    let mut state = state(0, 5..8);
    let (_, before) = hand_out(&mut state);
    assert_eq!(committed(&mut state), [(5, SendMode::Immediate)]);
    state.add_records(vec![record(0, 2), record(0, 3)]);
    // The committed offset is above every new one: the lower offset must be committed at once, or
    // it never would be.
    assert_eq!(committed(&mut state), [(2, SendMode::Immediate)]);
    let (revoked, after) = hand_out(&mut state);
    assert_eq!(revoked, [before[0].receipt.epoch]);
    assert_eq!(
        after
            .iter()
            .map(|it| it.receipt.position)
            .collect::<Vec<_>>(),
        [2, 3]
    );
    assert_eq!(state.accept(&before[0].receipt), SettlementEffect::Stale);
    assert_eq!(state.accept(&after[0].receipt), SettlementEffect::Applied);
    assert_eq!(committed(&mut state), [(3, SendMode::Stored)]);
}

#[test]
fn unsettled_messages_below_a_truncation_are_read_again() {
    let shared = SharedState::<StdLock>::default();
    *shared.lock() = state(0, 0..10);
    let (_, mut before) = hand_out(&mut shared.lock());
    [0, 1, 3].iter().for_each(|index| {
        assert_eq!(
            shared.lock().accept(&before[*index].receipt),
            SettlementEffect::Applied
        )
    });
    // 2 is released for an hour, and 4 to 9 are not settled.
    shared
        .lock()
        .release(before.remove(2), Duration::from_secs(3600));
    assert_eq!(committed(&mut shared.lock()), [(2, SendMode::Immediate)]);

    let intake = shared.add_records(vec![record(0, 7), record(0, 8)]);
    assert_eq!(intake, IntakeResult::default());
    let (revoked, after) = hand_out(&mut shared.lock());
    assert_eq!(
        (revoked, after.len()),
        (vec![before[0].receipt.epoch], 0),
        "the records are dropped; if they were added, 2 to 6 would count as settled"
    );
    assert_eq!(committed(&mut shared.lock()), [(2, SendMode::Immediate)]);

    let mut seeks = Vec::new();
    shared.seek_all(|topic, partition, offset| {
        seeks.push((topic.to_owned(), partition, offset));
        Ok::<_, String>(())
    });
    assert_eq!(seeks, [("t".to_owned(), 0, 2)]);
    shared.add_records((2..9).map(|offset| record(0, offset)).collect());
    let (_, again) = hand_out(&mut shared.lock());
    assert_eq!(
        again
            .iter()
            .map(|it| it.receipt.position)
            .collect::<Vec<_>>(),
        (2..9).collect::<Vec<_>>()
    );
    again
        .iter()
        .skip(1)
        .for_each(|it| assert_eq!(shared.lock().accept(&it.receipt), SettlementEffect::Applied));
    assert_eq!(committed(&mut shared.lock()), [], "2 is not settled");
    shared.lock().accept(&again[0].receipt);
    assert_eq!(committed(&mut shared.lock()), [(9, SendMode::Stored)]);
}

#[test]
fn positions_may_repeat_between_a_truncation_and_the_last_read_offset() {
    let may_repeat = |state: &SourceState| {
        (0..15)
            .filter(|it| state.assigned.values().any(|at| at.log.ids.may_repeat(*it)))
            .collect::<Vec<i64>>()
    };
    let mut running = state(0, 5..10);
    assert_eq!(may_repeat(&running), [0; 0]);
    hand_out(&mut running)
        .1
        .iter()
        .for_each(|it| assert_eq!(running.accept(&it.receipt), SettlementEffect::Applied));
    running.add_records(vec![record(0, 7)]);
    assert_eq!(may_repeat(&running), [7, 8, 9]);
    // A second truncation.
    running.add_records(vec![record(0, 6)]);
    assert_eq!(may_repeat(&running), [6, 7, 8, 9]);

    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::Committed(5),
        LogIdentity::default(),
    );
    state.add_records(vec![record(0, 3)]);
    assert_eq!(may_repeat(&state), [3, 4]);
}

#[test]
fn the_position_of_a_partition_is_known_once_it_has_started() {
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::NoOffset,
        LogIdentity::default(),
    );
    state.start_assignment(
        Arc::from("t"),
        1,
        StartPosition::Committed(5),
        LogIdentity::default(),
    );
    assert_eq!(
        [0, 1, 2].map(|it| state.position_of("t", it)),
        [None, Some(5), None]
    );
    state.add_records(vec![record(0, 3), record(1, 6)]);
    assert_eq!(
        [0, 1].map(|it| state.position_of("t", it)),
        [Some(4), Some(7)]
    );
}

#[test]
fn each_assignment_commits_its_start_and_repeats_failed_commits() {
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    assert_eq!(committed(&mut state), []);
    state.add_records(vec![record(0, 7), record(0, 8)]);
    assert_eq!(committed(&mut state), [(7, SendMode::Immediate)]);
    assert_eq!(committed(&mut state), []);
    state.commit_again("t", 0);
    state.commit_again("t", 1);
    assert_eq!(committed(&mut state), [], "not at once");
    let soon = Instant::now() + COMMIT_RETRY_PAUSE;
    let assigned = state.assigned.values_mut().next().expect("one partition");
    assert_eq!(
        assigned.commit(soon).map(|it| (it.offset, it.mode)),
        Some((7, SendMode::Immediate))
    );
    assert_eq!(assigned.commit(soon), None);
}

#[test]
fn a_higher_commit_that_arrives_after_a_truncation_is_overwritten_at_once() {
    let mut state = state(0, 5..60);
    let (_, deliveries) = hand_out(&mut state);
    deliveries
        .iter()
        .for_each(|it| assert_eq!(state.accept(&it.receipt), SettlementEffect::Applied));
    assert_eq!(committed(&mut state), [(60, SendMode::Immediate)]);
    state.add_records(vec![record(0, 0), record(0, 1)]);
    assert_eq!(committed(&mut state), [(0, SendMode::Immediate)]);
    state.commit_confirmed("t", 0, 0);
    assert_eq!(committed(&mut state), []);
    // A retried commit has overtaken the lower one. A stored offset below it would never be
    // committed.
    state.commit_confirmed("t", 0, 60);
    state.commit_confirmed("t", 1, 60);
    assert_eq!(committed(&mut state), [(0, SendMode::Immediate)]);
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(
        state.accept(&deliveries[0].receipt),
        SettlementEffect::Applied
    );
    assert_eq!(committed(&mut state), [(1, SendMode::Stored)]);
    state.commit_confirmed("t", 0, 0);
    assert_eq!(
        committed(&mut state),
        [],
        "the commit of offset 1 is not confirmed yet"
    );
}

#[test]
fn no_records_are_added_after_a_partition_was_halted() {
    let mut state = state(0, 5..7);
    state.start_assignment(
        Arc::from("t"),
        1,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    state.halt("t", 0);
    state.add_records(vec![record(0, 9), record(1, 3)]);
    let (revoked, deliveries) = hand_out(&mut state);
    let positions: Vec<u64> = deliveries.iter().map(|it| it.receipt.position).collect();
    assert_eq!((revoked, positions), (vec![], vec![5, 6, 3]));
    for it in deliveries {
        state.accept(&it.receipt);
    }
    let mut committed = committed(&mut state);
    committed.sort_by_key(|(offset, _)| *offset);
    assert_eq!(
        committed,
        [(4, SendMode::Immediate), (7, SendMode::Immediate)]
    );
}

#[test]
fn with_a_limit_of_zero_only_revocations_are_handed_out() {
    let mut state = state(0, 0..2);
    state.start_assignment(
        Arc::from("t"),
        1,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    state.add_records(vec![record(1, 0)]);
    let nothing = Limit { count: 0, bytes: 0 };
    let mut incoming = Vec::new();
    state.hand_out(nothing, usize::MAX, &mut incoming, &mut Vec::new());
    assert!(incoming.is_empty());
    let epochs = state.revoke(&partition_zero());
    state.hand_out(nothing, usize::MAX, &mut incoming, &mut Vec::new());
    assert!(matches!(incoming[..], [Incoming::Revoked(epoch)] if [epoch] == epochs[..]));
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(deliveries.len(), 1);
}

#[test]
fn reports_from_before_a_suspicion_do_not_replace_the_client() {
    let (mut state, started) = (SourceState::default(), Instant::now());
    let at = |seconds| started + Duration::from_secs(seconds);
    state.record_group_state(false, at(0));
    state.suspect_lost_metadata(at(1), at(1));
    state.record_group_state(false, at(3));
    assert!(
        !state.needs_replacement(),
        "the suspicion refers to an earlier time without the coordinator"
    );
    state.suspect_lost_metadata(started, at(3));
    // This report may have been sent before the suspicion.
    state.record_group_state(false, at(4));
    // So may the next report, which is late.
    state.record_group_state(false, at(9));
    state.record_group_state(false, at(9));
    assert!(!state.needs_replacement());
    state.record_group_state(true, at(9));
    state.record_group_state(false, at(10));
    assert_eq!(
        (state.needs_replacement(), state.without_group_since()),
        (false, Some(at(10)))
    );
    state.suspect_lost_metadata(at(10), at(11));
    state.record_group_state(false, at(13));
    assert!(state.needs_replacement());
    // The next client starts without a suspicion.
    state.take_replacement().expect("it is replaced");
    state.record_group_state(false, at(50));
    assert_eq!(
        (state.needs_replacement(), state.without_group_since()),
        (false, Some(at(50)))
    );
}

#[test]
fn nothing_is_read_while_too_much_is_ready_or_held() {
    let mut full = state(0, 0..MAX_READY as i64);
    assert_eq!(full.room(), 0);
    let (_, deliveries) = hand_out(&mut full);
    assert_eq!(full.room(), MAX_READY);
    for delivery in deliveries {
        full.release(delivery, Duration::from_secs(60));
    }
    assert!(full.room() > 0);
    full.ready_bytes = MAX_READY_BYTES;
    assert_eq!(full.room(), 0);
    full.ready_bytes = 0;
    assert!(full.room() > 0);
    full.phase = SourcePhase::Stopped;
    assert_eq!(full.room(), 0);
}

/// Makes this many messages of partition 0 count as unconfirmed dead letters.
fn publishing(state: &mut SourceState, count: usize, bytes: usize) {
    state.publishing = count;
    state.held.set("t", 0, Backlog { count, bytes });
}

#[test]
fn a_partition_that_is_full_of_dead_letters_is_not_read_but_others_are() {
    for (count, bytes) in [(MAX_HELD, 0), (1, MAX_HELD_BYTES)] {
        let mut state = state(0, 0..1);
        publishing(&mut state, count, bytes);
        assert_eq!(
            (state.room(), state.full_partitions()),
            (0, vec![(Arc::from("t"), 0)]),
            "no other partition is assigned"
        );
        state.start_assignment(
            Arc::from("t"),
            1,
            StartPosition::Unknown,
            LogIdentity::default(),
        );
        assert_eq!(
            (state.room(), state.full_partitions()),
            (MAX_READY - 1, vec![(Arc::from("t"), 0)])
        );
        assert_eq!(
            state
                .read_positions()
                .iter()
                .map(|it| it.2)
                .collect::<Vec<_>>(),
            [1],
            "a full partition is not checked for stalls"
        );
        publishing(&mut state, count - 1, bytes.saturating_sub(1));
        assert_eq!(state.full_partitions(), []);
    }
}

#[test]
fn a_partition_with_less_than_its_share_is_read_even_if_others_hold_much() {
    let mut state = state(0, 0..1);
    publishing(&mut state, MAX_HELD, 0);
    state.start_assignment(
        Arc::from("t"),
        1,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    state.add_records(
        (0..MAX_HELD as i64 / 2)
            .map(|offset| record(1, offset))
            .collect(),
    );
    let (_, deliveries) = hand_out(&mut state);
    for delivery in deliveries
        .into_iter()
        .filter(|it| it.receipt.partition == 1)
    {
        assert_eq!(state.full_partitions(), [(Arc::from("t"), 0)]);
        state.release(delivery, Duration::from_secs(60));
    }
    assert_eq!(
        (state.room(), state.full_partitions().len()),
        (0, 2),
        "both partitions have their share"
    );
}

#[test]
fn a_partition_is_not_read_while_one_delivery_blocks_the_maximum_span() {
    let mut state = state(0, 0..1);
    let (_, mut first) = hand_out(&mut state);
    state.start_assignment(
        Arc::from("t"),
        1,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    let settle_behind = |state: &mut SourceState, offsets: std::ops::Range<i64>| {
        let assigned = state
            .assigned
            .values_mut()
            .find(|it| it.partition == 0)
            .expect("partition 0 is assigned");
        for offset in offsets {
            assert_eq!(assigned.watermark.deliver(offset), OffsetOrder::Ascending);
            assigned.watermark.settle(offset);
        }
    };
    let receipt = Receipt { ..first[0].receipt };
    state.release(first.remove(0), Duration::from_secs(60));
    settle_behind(&mut state, 1..MAX_SPAN as i64 - 1);
    assert_eq!(state.full_partitions(), []);
    settle_behind(&mut state, MAX_SPAN as i64 - 1..MAX_SPAN as i64);
    assert_eq!(
        (MAX_SPAN, state.full_partitions()),
        (1_048_576, vec![(Arc::from("t"), 0)])
    );
    assert!(state.room() > 0, "partition 1 is read");
    state.accept(&receipt);
    assert_eq!(state.full_partitions(), []);
    assert_eq!(
        committed(&mut state)
            .iter()
            .map(|it| it.0)
            .collect::<Vec<_>>(),
        [MAX_SPAN as i64]
    );
}

#[test]
fn releases_count_by_size_until_they_are_handed_out_or_revoked() {
    let mut large = record(0, 0);
    large.body = vec![b'x'; MAX_HELD_BYTES / 2].into();
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::Unknown,
        LogIdentity::default(),
    );
    state.add_records(vec![large, record(0, 1)]);
    let (_, deliveries) = hand_out(&mut state);
    for delivery in deliveries {
        state.release(delivery, Duration::ZERO);
    }
    assert_eq!(state.held.total().bytes, MAX_HELD_BYTES / 2 + 1);
    assert!(state.room() > 0);
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(
        (deliveries.len(), state.held.total()),
        (2, Backlog::default())
    );
    for delivery in deliveries {
        state.release(delivery, Duration::from_secs(60));
    }
    state.revoke(&partition_zero());
    assert_eq!(state.held.total(), Backlog::default());
}

#[test]
fn unconfirmed_dead_letters_count_by_size() {
    let mut state = state(0, 0..2);
    let (_, deliveries) = hand_out(&mut state);
    for delivery in &deliveries {
        assert_eq!(state.reject(delivery), SettlementEffect::Applied);
    }
    let held = |count, bytes| (count, Backlog { count, bytes });
    assert_eq!((state.publishing, state.held.total()), held(2, 2));
    assert_eq!(state.published(&deliveries[1]), SettlementEffect::Applied);
    assert_eq!((state.publishing, state.held.total()), held(1, 1));
    state.add_records(vec![record(0, 2)]);
    state.hand_out(
        Limit { count: 1, bytes: 1 },
        0,
        &mut Vec::new(),
        &mut Vec::new(),
    );
    assert_eq!(
        (state.publishing, state.held.total()),
        held(2, 2),
        "a body above the limit counts as a dead letter"
    );
    assert_eq!(state.held.of(&Arc::from("t"), 0), held(2, 2).1);
}

/// Otherwise each rebalance would let the partition be read up to the limit again while its dead
/// letters cannot be published.
#[test]
fn a_partition_that_is_assigned_again_still_holds_its_unconfirmed_dead_letters() {
    let mut state = state(0, 0..1);
    state.add_records((1..MAX_HELD as i64).map(|it| record(0, it)).collect());
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(deliveries.len(), MAX_HELD);
    for delivery in &deliveries {
        assert_eq!(state.full_partitions(), []);
        assert_eq!(state.reject(delivery), SettlementEffect::Applied);
    }
    let full = [(Arc::from("t"), 0)];
    assert_eq!(state.full_partitions(), full);
    let epochs = state.revoke(&partition_zero());
    state.forget(&epochs);
    assert_eq!(state.held.total().count, MAX_HELD);
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::Committed(0),
        LogIdentity::default(),
    );
    assert_eq!((state.room(), state.full_partitions()), (0, full.to_vec()));
    // The dead letter of an assignment that has ended.
    assert_eq!(state.published(&deliveries[0]), SettlementEffect::Stale);
    assert_eq!(state.full_partitions(), []);
    deliveries[1..].iter().for_each(|it| {
        state.published(it);
    });
    assert_eq!(
        (state.publishing, state.held.total()),
        (0, Backlog::default())
    );
}

#[test]
fn a_release_is_handed_out_after_its_delay() {
    let mut state = state(0, 0..2);
    let (_, mut deliveries) = hand_out(&mut state);
    state.release(deliveries.remove(0), Duration::from_secs(60));
    state.release(deliveries.remove(0), Duration::ZERO);
    let (_, again) = hand_out(&mut state);
    assert_eq!(
        (again.len(), again[0].receipt.position, again[0].failures),
        (1, 1, 0)
    );
    assert!(state.next_due().is_some_and(|due| due > Instant::now()));
    assert_eq!(state.handed_out(&[1]), 1);
}

#[test]
fn a_gap_before_a_message_is_reported() {
    let gap = |from, to| OffsetGap {
        topic: Arc::from("t"),
        partition: 0,
        from,
        to,
    };
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::Committed(5),
        LogIdentity::default(),
    );
    let intake = state.add_records(vec![record(0, 8), record(0, 9), record(0, 11)]);
    assert_eq!(
        intake,
        IntakeResult {
            gaps: vec![gap(5, 8), gap(10, 11)],
            restarted: vec![]
        }
    );
    let intake = state.add_records(vec![record(0, 12), record(0, 2)]);
    assert_eq!(
        intake,
        IntakeResult {
            gaps: vec![],
            restarted: vec![(Arc::from("t"), 0)]
        }
    );
}

#[test]
fn expired_offsets_are_counted_however_late_the_log_start_is_known() {
    let gap = OffsetGap {
        topic: Arc::from("t"),
        partition: 0,
        from: 5,
        to: 12,
    };
    // The log start offset is below the gap, at its start, inside it, at its end, or above it.
    assert_eq!(
        [0, 5, 6, 9, 12, 13, 900].map(|first| gap.expired(first)),
        [0, 0, 1, 4, 7, 7, 7]
    );
}

#[test]
fn commits_advance_past_transaction_markers_if_librdkafkas_position_is_trusted() {
    let mut state = state(0, 5..8);
    state.advance_to("t", 1, Some(15));
    state.advance_to("t", 0, Some(10));
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(committed(&mut state), [(5, SendMode::Immediate)]);
    deliveries
        .iter()
        .for_each(|it| assert_eq!(state.accept(&it.receipt), SettlementEffect::Applied));
    assert_eq!(committed(&mut state), [(10, SendMode::Stored)]);
    assert_eq!(state.distrust_position("t", 0, Some(15)), Some(10));
    state.advance_to("t", 0, Some(20));
    assert_eq!(
        committed(&mut state),
        [],
        "librdkafka counted an error as a message"
    );
    state.seek_succeeded("t", 0);
    state.advance_to("t", 0, Some(20));
    assert_eq!(
        committed(&mut state),
        [],
        "librdkafka may not have handled the seek yet"
    );
    state.advance_to("t", 0, None);
    state.advance_to("t", 0, Some(13));
    assert_eq!(committed(&mut state), [(13, SendMode::Stored)]);

    let mut halted = self::state(0, 5..6);
    halted.halt("t", 0);
    halted.advance_to("t", 0, Some(20));
    assert_eq!(committed(&mut halted), [(5, SendMode::Immediate)]);
}

#[test]
fn a_log_of_markers_only_is_committed_once_the_position_is_trusted() {
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::Committed(5),
        LogIdentity::default(),
    );
    assert_eq!(state.advance_to("t", 0, Some(100)), None);
    assert_eq!(
        committed(&mut state),
        [],
        "the position may be left from an earlier assignment"
    );
    assert_eq!(state.advance_to("t", 0, None), None);
    assert_eq!(state.advance_to("t", 0, Some(3)), None);
    assert_eq!(
        committed(&mut state),
        [],
        "a position below the committed offset is ignored"
    );
    assert_eq!(
        state.advance_to("t", 0, Some(9)),
        Some(OffsetGap {
            topic: Arc::from("t"),
            partition: 0,
            from: 5,
            to: 9
        })
    );
    assert_eq!(committed(&mut state), [(9, SendMode::Immediate)]);
    assert_eq!(
        state.add_records(vec![record(0, 9)]),
        IntakeResult::default()
    );

    // Without a committed offset it starts at the position.
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::NoOffset,
        LogIdentity::default(),
    );
    state.advance_to("t", 0, None);
    assert_eq!(state.advance_to("t", 0, Some(9)), None);
    assert_eq!(committed(&mut state), [(9, SendMode::Immediate)]);
}

#[test]
fn a_partition_that_was_never_read_seeks_to_the_given_position() {
    let mut state = SourceState::default();
    state.start_assignment(
        Arc::from("t"),
        0,
        StartPosition::NoOffset,
        LogIdentity::default(),
    );
    assert_eq!(state.distrust_position("t", 0, Some(7)), Some(7));
}

#[test]
fn a_recreated_topic_is_not_read_before_a_seek_succeeds() {
    let shared = SharedState::<StdLock>::default();
    *shared.lock() = state(0, 5..8);
    let (_, before) = hand_out(&mut shared.lock());
    shared.restart_topic("t", Some(identity("another")));
    let (revoked, _) = hand_out(&mut shared.lock());
    assert_eq!(revoked, [before[0].receipt.epoch]);
    assert_eq!(
        shared.lock().accept(&before[0].receipt),
        SettlementEffect::Stale
    );
    // The next owner of the partition starts there, and not at an offset of the deleted topic.
    assert_eq!(committed(&mut shared.lock()), [(0, SendMode::Immediate)]);
    for _ in 0..3 {
        let mut seeks = Vec::new();
        shared.seek_all(|topic, partition, offset| {
            seeks.push((topic.to_owned(), partition, offset));
            Err("no leader")
        });
        assert_eq!(seeks, [("t".to_owned(), 0, 0)]);
        // Records of the new topic, above the last offset of the deleted one.
        shared.add_records(vec![record(0, 8), record(0, 9)]);
        assert_eq!(hand_out(&mut shared.lock()).1.len(), 0);
        assert_eq!(committed(&mut shared.lock()), []);
    }
    shared.seek_all(|_, _, _| Ok::<_, String>(()));
    shared.seek_all(|_, _, _| -> Result<(), String> { unreachable!("no seek is pending") });
    shared.add_records(vec![record(0, 0), record(0, 1)]);
    let (_, after) = hand_out(&mut shared.lock());
    assert_eq!(
        after
            .iter()
            .map(|it| it.receipt.position)
            .collect::<Vec<_>>(),
        [0, 1]
    );
    assert_eq!(
        shared.lock().accept(&after[0].receipt),
        SettlementEffect::Applied
    );
    assert_eq!(committed(&mut shared.lock()), [(1, SendMode::Stored)]);
}

#[test]
fn a_partition_that_is_lost_during_a_seek_is_not_read() {
    let shared = SharedState::<StdLock>::default();
    *shared.lock() = state(0, 5..8);
    shared.restart_topic("t", Some(identity("another")));
    shared.seek_all(|_, _, _| {
        let epochs = shared.revoke(&partition_zero());
        shared.lock().forget(&epochs);
        Ok::<_, String>(())
    });
    shared.add_records(vec![record(0, 0)]);
    assert_eq!(hand_out(&mut shared.lock()).1.len(), 0);
    shared.seek_all(|_, _, _| -> Result<(), String> {
        unreachable!("the partition is not assigned")
    });
}

#[test]
fn revoked_partitions_are_drained_and_committed_and_lost_ones_are_neither() {
    for kind in [RevocationKind::Revoked, RevocationKind::Lost] {
        let shared = SharedState::<StdLock>::default();
        *shared.lock() = state(0, 5..8);
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
        match kind {
            RevocationKind::Revoked => assert_eq!(
                (drained.get(), stored.take(), unsettled),
                (1, vec![(7, SendMode::Immediate)], 1)
            ),
            RevocationKind::Lost => {
                assert_eq!((drained.get(), stored.take(), unsettled), (0, vec![], 2))
            }
        }
        assert_eq!(
            shared.lock().accept(&deliveries[2].receipt),
            SettlementEffect::Stale
        );
        assert_eq!(committed(&mut shared.lock()), []);
    }
}
