use std::cell::{Cell, RefCell};

use oncegate_core::Headers;

use super::committing::COMMIT_AGAIN;
use super::*;
use crate::topic_identity::TopicIdentity;

pub(super) fn record(partition: i32, offset: i64) -> Record {
    let body = offset.to_string().into();
    Record {
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

fn state(partition: i32, offsets: impl IntoIterator<Item = i64>) -> State {
    let mut state = State::default();
    state.begin(Arc::from("t"), partition, Begins::Unknown, Log::default());
    state.take_in(
        offsets
            .into_iter()
            .map(|offset| record(partition, offset))
            .collect(),
    );
    state
}

pub(super) fn hand_out(state: &mut State) -> (Vec<u64>, Vec<Delivery>) {
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

pub(super) fn committed(state: &mut State) -> Vec<(i64, Way)> {
    state
        .commits()
        .into_iter()
        .map(|it| (it.offset, it.way))
        .collect()
}

pub(super) fn leaving() -> [(String, i32); 1] {
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
    assert_eq!(
        state.release(first.remove(1), Duration::ZERO),
        Fate::Counted
    );
    assert_eq!(state.accept(&first[1].receipt), Fate::Counted);
    assert_eq!((state.out(&epochs), state.next_due()), (0, None));
    assert_eq!(
        state.commits(),
        [Commit {
            topic: Arc::from("t"),
            partition: 0,
            offset: 1,
            way: Way::Sent,
            identity: None
        }]
    );
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
    state.begin(Arc::from("t"), 0, Begins::Unknown, Log::default());
    state.take_in(vec![record(0, 5), record(0, 6)]);
    assert_eq!(state.accept(&before[0].receipt), Fate::Stale);
    assert_eq!(committed(&mut state), [(5, Way::Sent)]);
    let (_, after) = hand_out(&mut state);
    assert_eq!(state.accept(&after[0].receipt), Fate::Counted);
    assert_eq!(state.commits()[0].offset, 6);
}

#[test]
fn a_partition_that_is_reset_begins_anew() {
    let mut state = state(0, 5..8);
    let (_, before) = hand_out(&mut state);
    assert_eq!(committed(&mut state), [(5, Way::Sent)]);
    state.take_in(vec![record(0, 2), record(0, 3)]);
    // What was committed is above all that there is: the lower offset is sent at once, or it never
    // would be.
    assert_eq!(committed(&mut state), [(2, Way::Sent)]);
    let (revoked, after) = hand_out(&mut state);
    assert_eq!(revoked, [before[0].receipt.epoch]);
    assert_eq!(
        after
            .iter()
            .map(|it| it.receipt.position)
            .collect::<Vec<_>>(),
        [2, 3]
    );
    assert_eq!(state.accept(&before[0].receipt), Fate::Stale);
    assert_eq!(state.accept(&after[0].receipt), Fate::Counted);
    assert_eq!(committed(&mut state), [(3, Way::Stored)]);
}

#[test]
fn what_is_not_settled_below_where_a_log_lost_its_end_is_read_again() {
    let shared = Shared::<Threads>::default();
    *shared.lock() = state(0, 0..10);
    let (_, mut before) = hand_out(&mut shared.lock());
    [0, 1, 3]
        .iter()
        .for_each(|index| assert_eq!(shared.lock().accept(&before[*index].receipt), Fate::Counted));
    // 2 rests for an hour, and of 4 to 9 nobody has heard.
    shared
        .lock()
        .release(before.remove(2), Duration::from_secs(3600));
    assert_eq!(committed(&mut shared.lock()), [(2, Way::Sent)]);

    let found = shared.take_in(vec![record(0, 7), record(0, 8)]);
    assert_eq!(found, Findings::default());
    let (revoked, after) = hand_out(&mut shared.lock());
    assert_eq!(
        (revoked, after.len()),
        (vec![before[0].receipt.epoch], 0),
        "what came is not taken in: with it, 2 to 6 would be passed"
    );
    assert_eq!(committed(&mut shared.lock()), [(2, Way::Sent)]);

    let mut asked = Vec::new();
    shared.go_back(|topic, partition, offset| {
        asked.push((topic.to_owned(), partition, offset));
        Ok::<_, String>(())
    });
    assert_eq!(asked, [("t".to_owned(), 0, 2)]);
    shared.take_in((2..9).map(|offset| record(0, offset)).collect());
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
        .for_each(|it| assert_eq!(shared.lock().accept(&it.receipt), Fate::Counted));
    assert_eq!(committed(&mut shared.lock()), [], "2 is not settled");
    shared.lock().accept(&again[0].receipt);
    assert_eq!(committed(&mut shared.lock()), [(9, Way::Stored)]);
}

#[test]
fn where_a_log_lost_its_end_positions_are_given_again_up_to_where_it_was_read() {
    let may_repeat = |state: &State| {
        (0..15)
            .filter(|it| state.assigned.values().any(|at| at.log.ids.may_repeat(*it)))
            .collect::<Vec<i64>>()
    };
    let mut running = state(0, 5..10);
    assert_eq!(may_repeat(&running), [0; 0]);
    hand_out(&mut running)
        .1
        .iter()
        .for_each(|it| assert_eq!(running.accept(&it.receipt), Fate::Counted));
    running.take_in(vec![record(0, 7)]);
    assert_eq!(may_repeat(&running), [7, 8, 9]);
    // And once more.
    running.take_in(vec![record(0, 6)]);
    assert_eq!(may_repeat(&running), [6, 7, 8, 9]);

    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::At(5), Log::default());
    state.take_in(vec![record(0, 3)]);
    assert_eq!(may_repeat(&state), [3, 4]);
}

#[test]
fn how_far_a_partition_stands_is_known_once_it_has_begun() {
    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::Nowhere, Log::default());
    state.begin(Arc::from("t"), 1, Begins::At(5), Log::default());
    assert_eq!(
        [0, 1, 2].map(|it| state.stands("t", it)),
        [None, Some(5), None]
    );
    state.take_in(vec![record(0, 3), record(1, 6)]);
    assert_eq!([0, 1].map(|it| state.stands("t", it)), [Some(4), Some(7)]);
}

#[test]
fn each_assignment_sends_where_it_begins_and_sends_again_what_failed() {
    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::Unknown, Log::default());
    assert_eq!(committed(&mut state), []);
    state.take_in(vec![record(0, 7), record(0, 8)]);
    assert_eq!(committed(&mut state), [(7, Way::Sent)]);
    assert_eq!(committed(&mut state), []);
    state.commit_again("t", 0);
    state.commit_again("t", 1);
    assert_eq!(committed(&mut state), [], "not at once");
    let soon = Instant::now() + COMMIT_AGAIN;
    let assigned = state.assigned.values_mut().next().expect("one partition");
    assert_eq!(
        assigned.commit(soon).map(|it| (it.offset, it.way)),
        Some((7, Way::Sent))
    );
    assert_eq!(assigned.commit(soon), None);
}

#[test]
fn a_higher_commit_that_is_carried_out_after_the_log_was_cut_is_taken_back_at_once() {
    let mut state = state(0, 5..60);
    let (_, deliveries) = hand_out(&mut state);
    deliveries
        .iter()
        .for_each(|it| assert_eq!(state.accept(&it.receipt), Fate::Counted));
    assert_eq!(committed(&mut state), [(60, Way::Sent)]);
    state.take_in(vec![record(0, 0), record(0, 1)]);
    assert_eq!(committed(&mut state), [(0, Way::Sent)]);
    state.confirmed("t", 0, 0);
    assert_eq!(committed(&mut state), []);
    // It was tried again, and overtaken. What is stored below it would never be sent.
    state.confirmed("t", 0, 60);
    state.confirmed("t", 1, 60);
    assert_eq!(committed(&mut state), [(0, Way::Sent)]);
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(state.accept(&deliveries[0].receipt), Fate::Counted);
    assert_eq!(committed(&mut state), [(1, Way::Stored)]);
    state.confirmed("t", 0, 0);
    assert_eq!(committed(&mut state), [], "the next one is on its way");
}

#[test]
fn nothing_past_what_cannot_be_read_is_taken_in() {
    let mut state = state(0, 5..7);
    state.begin(Arc::from("t"), 1, Begins::Unknown, Log::default());
    state.bar("t", 0);
    state.take_in(vec![record(0, 9), record(1, 3)]);
    let (revoked, deliveries) = hand_out(&mut state);
    let positions: Vec<u64> = deliveries.iter().map(|it| it.receipt.position).collect();
    assert_eq!((revoked, positions), (vec![], vec![5, 6, 3]));
    for it in deliveries {
        state.accept(&it.receipt);
    }
    let mut committed = committed(&mut state);
    committed.sort_by_key(|(offset, _)| *offset);
    assert_eq!(committed, [(4, Way::Sent), (7, Way::Sent)]);
}

#[test]
fn a_limit_of_nothing_hands_out_revocations_alone() {
    let mut state = state(0, 0..2);
    state.begin(Arc::from("t"), 1, Begins::Unknown, Log::default());
    state.take_in(vec![record(1, 0)]);
    let nothing = Limit { count: 0, bytes: 0 };
    let mut incoming = Vec::new();
    state.hand_out(nothing, usize::MAX, &mut incoming, &mut Vec::new());
    assert!(incoming.is_empty());
    let epochs = state.revoke(&leaving());
    state.hand_out(nothing, usize::MAX, &mut incoming, &mut Vec::new());
    assert!(matches!(incoming[..], [Incoming::Revoked(epoch)] if [epoch] == epochs[..]));
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(deliveries.len(), 1);
}

#[test]
fn what_a_client_said_before_it_was_suspected_is_not_held_against_it() {
    let (mut state, begun) = (State::default(), Instant::now());
    let at = |seconds| begun + Duration::from_secs(seconds);
    state.hears_of_the_group(false, at(0));
    state.suspect(at(1), at(1));
    state.hears_of_the_group(false, at(3));
    assert!(
        !state.wants_another(),
        "that was of another time without its group"
    );
    state.suspect(begun, at(3));
    // This may have been said before.
    state.hears_of_the_group(false, at(4));
    // And this, too, after nothing was heard for so long.
    state.hears_of_the_group(false, at(9));
    state.hears_of_the_group(false, at(9));
    assert!(!state.wants_another());
    state.hears_of_the_group(true, at(9));
    state.hears_of_the_group(false, at(10));
    assert_eq!(
        (state.wants_another(), state.alone()),
        (false, Some(at(10)))
    );
    state.suspect(at(10), at(11));
    state.hears_of_the_group(false, at(13));
    assert!(state.wants_another());
    // Nothing of this is held against the one that takes its place.
    state.replacing().expect("it is replaced");
    state.hears_of_the_group(false, at(50));
    assert_eq!(
        (state.wants_another(), state.alone()),
        (false, Some(at(50)))
    );
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
    full.ready_bytes = READY_BYTES;
    assert_eq!(full.room(), 0);
    full.ready_bytes = 0;
    assert!(full.room() > 0);
    full.phase = Phase::Stopped;
    assert_eq!(full.room(), 0);
}

/// So many of partition 0 are on their way to the dead letters.
fn publishing(state: &mut State, count: usize, bytes: usize) {
    (state.publishing, state.publishing_bytes) = (count, bytes);
    let assigned = state
        .assigned
        .values_mut()
        .find(|it| it.partition == 0)
        .expect("it is ours");
    assigned.backlog = Backlog { count, bytes };
}

#[test]
fn a_partition_that_is_full_of_dead_letters_is_not_read_and_others_are() {
    for (count, bytes) in [(HELD, 0), (1, HELD_BYTES)] {
        let mut state = state(0, 0..1);
        publishing(&mut state, count, bytes);
        assert_eq!(
            (state.room(), state.full()),
            (0, vec![(Arc::from("t"), 0)]),
            "there is nothing else to be read"
        );
        state.begin(Arc::from("t"), 1, Begins::Unknown, Log::default());
        assert_eq!(
            (state.room(), state.full()),
            (READY - 1, vec![(Arc::from("t"), 0)])
        );
        assert_eq!(
            state.read_to().iter().map(|it| it.2).collect::<Vec<_>>(),
            [1],
            "that it stands still is no stall"
        );
        publishing(&mut state, count - 1, bytes.saturating_sub(1));
        assert_eq!(state.full(), []);
    }
}

#[test]
fn a_partition_with_less_than_its_share_is_read_however_much_others_hold() {
    let mut state = state(0, 0..1);
    publishing(&mut state, HELD, 0);
    state.begin(Arc::from("t"), 1, Begins::Unknown, Log::default());
    state.take_in(
        (0..HELD as i64 / 2)
            .map(|offset| record(1, offset))
            .collect(),
    );
    let (_, deliveries) = hand_out(&mut state);
    for delivery in deliveries
        .into_iter()
        .filter(|it| it.receipt.partition == 1)
    {
        assert_eq!(state.full(), [(Arc::from("t"), 0)]);
        state.release(delivery, Duration::from_secs(60));
    }
    assert_eq!(
        (state.room(), state.full().len()),
        (0, 2),
        "it has its share"
    );
}

#[test]
fn a_partition_is_not_read_while_one_delivery_holds_up_as_many_as_a_crash_may_bring_back() {
    let mut state = state(0, 0..1);
    let (_, mut first) = hand_out(&mut state);
    state.begin(Arc::from("t"), 1, Begins::Unknown, Log::default());
    let held_up = |state: &mut State, offsets: std::ops::Range<i64>| {
        let assigned = state
            .assigned
            .values_mut()
            .find(|it| it.partition == 0)
            .expect("it is ours");
        for offset in offsets {
            assert_eq!(assigned.watermark.deliver(offset), Sequence::Ascending);
            assigned.watermark.settle(offset);
        }
    };
    let receipt = Receipt { ..first[0].receipt };
    state.release(first.remove(0), Duration::from_secs(60));
    held_up(&mut state, 1..SPAN as i64 - 1);
    assert_eq!(state.full(), []);
    held_up(&mut state, SPAN as i64 - 1..SPAN as i64);
    assert_eq!((SPAN, state.full()), (1_048_576, vec![(Arc::from("t"), 0)]));
    assert!(state.room() > 0, "the other one is read");
    state.accept(&receipt);
    assert_eq!(state.full(), []);
    assert_eq!(
        committed(&mut state)
            .iter()
            .map(|it| it.0)
            .collect::<Vec<_>>(),
        [SPAN as i64]
    );
}

#[test]
fn what_was_released_counts_by_its_size_until_it_is_handed_over_again_or_leaves() {
    let mut large = record(0, 0);
    large.body = vec![b'x'; HELD_BYTES / 2].into();
    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::Unknown, Log::default());
    state.take_in(vec![large, record(0, 1)]);
    let (_, deliveries) = hand_out(&mut state);
    for delivery in deliveries {
        state.release(delivery, Duration::ZERO);
    }
    assert_eq!(state.held_bytes, HELD_BYTES / 2 + 1);
    assert!(state.room() > 0);
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!((deliveries.len(), state.held_bytes), (2, 0));
    for delivery in deliveries {
        state.release(delivery, Duration::from_secs(60));
    }
    state.revoke(&leaving());
    assert_eq!(state.held_bytes, 0);
}

#[test]
fn what_is_on_its_way_to_the_dead_letters_counts_by_its_size_until_it_stands() {
    let mut state = state(0, 0..2);
    let (_, deliveries) = hand_out(&mut state);
    for delivery in &deliveries {
        assert_eq!(state.reject(delivery), Fate::Counted);
    }
    assert_eq!((state.publishing, state.publishing_bytes), (2, 2));
    assert_eq!(state.published(&deliveries[1]), Fate::Counted);
    assert_eq!((state.publishing, state.publishing_bytes), (1, 1));
    state.take_in(vec![record(0, 2)]);
    state.hand_out(
        Limit { count: 1, bytes: 1 },
        0,
        &mut Vec::new(),
        &mut Vec::new(),
    );
    assert_eq!(
        (state.publishing, state.publishing_bytes),
        (2, 2),
        "too large to be handed out"
    );
    let backlogs: Vec<_> = state.assigned.values().map(|it| it.backlog).collect();
    assert_eq!(backlogs, [Backlog { count: 2, bytes: 2 }]);
}

#[test]
fn a_release_is_handed_over_when_its_delay_is_over_and_not_before() {
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
    assert_eq!(state.out(&[1]), 1);
}

#[test]
fn what_is_missing_before_a_message_is_told() {
    let jump = |from, to| Jump {
        topic: Arc::from("t"),
        partition: 0,
        from,
        to,
    };
    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::At(5), Log::default());
    let found = state.take_in(vec![record(0, 8), record(0, 9), record(0, 11)]);
    assert_eq!(
        found,
        Findings {
            jumps: vec![jump(5, 8), jump(10, 11)],
            restarted: vec![]
        }
    );
    let found = state.take_in(vec![record(0, 12), record(0, 2)]);
    assert_eq!(
        found,
        Findings {
            jumps: vec![],
            restarted: vec![(Arc::from("t"), 0)]
        }
    );
}

#[test]
fn what_may_have_been_removed_before_it_was_read_is_missed_however_late_it_is_looked_at() {
    let jump = Jump {
        topic: Arc::from("t"),
        partition: 0,
        from: 5,
        to: 12,
    };
    // It begins where it did, or nothing is known to be gone; it begins between, at what came, or
    // behind that by now.
    assert_eq!(
        [0, 5, 6, 9, 12, 13, 900].map(|first| jump.missed(first)),
        [0, 0, 1, 4, 7, 7, 7]
    );
}

#[test]
fn markers_are_passed_where_it_is_known_how_far_was_read() {
    let mut state = state(0, 5..8);
    state.reached("t", 1, Some(15));
    state.reached("t", 0, Some(10));
    let (_, deliveries) = hand_out(&mut state);
    assert_eq!(committed(&mut state), [(5, Way::Sent)]);
    deliveries
        .iter()
        .for_each(|it| assert_eq!(state.accept(&it.receipt), Fate::Counted));
    assert_eq!(committed(&mut state), [(10, Way::Stored)]);
    assert_eq!(state.distrust("t", 0, Some(15)), Some(10));
    state.reached("t", 0, Some(20));
    assert_eq!(
        committed(&mut state),
        [],
        "librdkafka counted an error as a message"
    );
    state.told_where("t", 0);
    state.reached("t", 0, Some(20));
    assert_eq!(committed(&mut state), [], "it may not have heard yet");
    state.reached("t", 0, None);
    state.reached("t", 0, Some(13));
    assert_eq!(committed(&mut state), [(13, Way::Stored)]);

    let mut barred = self::state(0, 5..6);
    barred.bar("t", 0);
    barred.reached("t", 0, Some(20));
    assert_eq!(committed(&mut barred), [(5, Way::Sent)]);
}

#[test]
fn a_log_that_ends_in_what_nobody_is_handed_is_passed_once_its_position_is_known_to_be_new() {
    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::At(5), Log::default());
    assert_eq!(state.reached("t", 0, Some(100)), None);
    assert_eq!(
        committed(&mut state),
        [],
        "what librdkafka says may be of an assignment before"
    );
    assert_eq!(state.reached("t", 0, None), None);
    assert_eq!(state.reached("t", 0, Some(3)), None);
    assert_eq!(
        committed(&mut state),
        [],
        "the log was cut, and the group does not go forward"
    );
    assert_eq!(
        state.reached("t", 0, Some(9)),
        Some(Jump {
            topic: Arc::from("t"),
            partition: 0,
            from: 5,
            to: 9
        })
    );
    assert_eq!(committed(&mut state), [(9, Way::Sent)]);
    assert_eq!(state.take_in(vec![record(0, 9)]), Findings::default());

    // Where the group has no offset it begins with what there is.
    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::Nowhere, Log::default());
    state.reached("t", 0, None);
    assert_eq!(state.reached("t", 0, Some(9)), None);
    assert_eq!(committed(&mut state), [(9, Way::Sent)]);
}

#[test]
fn what_was_never_read_is_read_from_where_it_stood() {
    let mut state = State::default();
    state.begin(Arc::from("t"), 0, Begins::Nowhere, Log::default());
    assert_eq!(state.distrust("t", 0, Some(7)), Some(7));
}

#[test]
fn a_topic_made_anew_is_gone_back_to_until_that_holds_and_nothing_is_read_before() {
    let shared = Shared::<Threads>::default();
    *shared.lock() = state(0, 5..8);
    let (_, before) = hand_out(&mut shared.lock());
    shared.begin_anew("t", Some(identity("another")));
    let (revoked, _) = hand_out(&mut shared.lock());
    assert_eq!(revoked, [before[0].receipt.epoch]);
    assert_eq!(shared.lock().accept(&before[0].receipt), Fate::Stale);
    // Whoever has the partition next begins there, and not where the old log was left.
    assert_eq!(committed(&mut shared.lock()), [(0, Way::Sent)]);
    for _ in 0..3 {
        let mut asked = Vec::new();
        shared.go_back(|topic, partition, offset| {
            asked.push((topic.to_owned(), partition, offset));
            Err("no leader")
        });
        assert_eq!(asked, [("t".to_owned(), 0, 0)]);
        // Of the new log, above what was read of the old one.
        shared.take_in(vec![record(0, 8), record(0, 9)]);
        assert_eq!(hand_out(&mut shared.lock()).1.len(), 0);
        assert_eq!(committed(&mut shared.lock()), []);
    }
    shared.go_back(|_, _, _| Ok::<_, String>(()));
    shared.go_back(|_, _, _| -> Result<(), String> { unreachable!("it is there") });
    shared.take_in(vec![record(0, 0), record(0, 1)]);
    let (_, after) = hand_out(&mut shared.lock());
    assert_eq!(
        after
            .iter()
            .map(|it| it.receipt.position)
            .collect::<Vec<_>>(),
        [0, 1]
    );
    assert_eq!(shared.lock().accept(&after[0].receipt), Fate::Counted);
    assert_eq!(committed(&mut shared.lock()), [(1, Way::Stored)]);
}

#[test]
fn a_partition_that_was_lost_meanwhile_is_not_gone_back_to() {
    let shared = Shared::<Threads>::default();
    *shared.lock() = state(0, 5..8);
    shared.begin_anew("t", Some(identity("another")));
    shared.go_back(|_, _, _| {
        let epochs = shared.revoke(&leaving());
        shared.lock().forget(&epochs);
        Ok::<_, String>(())
    });
    shared.take_in(vec![record(0, 0)]);
    assert_eq!(hand_out(&mut shared.lock()).1.len(), 0);
    shared.go_back(|_, _, _| -> Result<(), String> { unreachable!("it is someone else's") });
}

#[test]
fn what_is_given_back_is_drained_and_committed_and_what_is_lost_is_neither() {
    for how in [Leave::GivenBack, Leave::Lost] {
        let shared = Shared::<Threads>::default();
        *shared.lock() = state(0, 5..8);
        let (_, deliveries) = hand_out(&mut shared.lock());
        shared.lock().accept(&deliveries[0].receipt);
        let (drained, stored) = (Cell::new(0), RefCell::new(Vec::new()));
        let drain = |epochs: &[u64]| {
            drained.set(epochs.len());
            // The rebalance waits for this one.
            shared.lock().accept(&deliveries[1].receipt);
        };
        let store = || stored.borrow_mut().extend(committed(&mut shared.lock()));
        let unsettled = shared.give_up(&leaving(), how, drain, store);
        match how {
            Leave::GivenBack => assert_eq!(
                (drained.get(), stored.take(), unsettled),
                (1, vec![(7, Way::Sent)], 1)
            ),
            Leave::Lost => assert_eq!((drained.get(), stored.take(), unsettled), (0, vec![], 2)),
        }
        assert_eq!(shared.lock().accept(&deliveries[2].receipt), Fate::Stale);
        assert_eq!(committed(&mut shared.lock()), []);
    }
}
