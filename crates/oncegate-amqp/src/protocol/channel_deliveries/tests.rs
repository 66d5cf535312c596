use std::collections::{BTreeMap, BTreeSet};

use oncegate_core::lifecycle::DoubtCause;
use oncegate_core::message::Message;
use oncegate_core::source::Receipt;
use oncegate_testkit::laws::source::accepted;

use super::*;
use crate::client::context::SourceContext;
use crate::{RabbitMq, Topology};

const EPOCH: u64 = 3;
const FRAME_MAX: u32 = 131_072;

fn time() -> CurrentTime {
    CurrentTime {
        now: Instant::now(),
        unix: Duration::from_secs(1_800_000_000),
    }
}

fn after(time: CurrentTime, delay: Duration) -> CurrentTime {
    CurrentTime {
        now: time.now + delay,
        unix: time.unix + delay,
    }
}

fn settings(change: impl Fn(RabbitMq) -> RabbitMq) -> SourceContext {
    change(RabbitMq::queue("orders")).check().expect("settings")
}

fn delivery(epoch: u64, tag: u64) -> Delivery {
    Delivery {
        message: Message::new("a"),
        receipt: Receipt {
            epoch,
            partition: 0,
            position: tag,
        },
        failures: 0,
    }
}

fn settled(epoch: u64, tag: u64, settlement: Settlement) -> Settled {
    Settled {
        delivery: delivery(epoch, tag),
        settlement,
        failure_history: None,
    }
}

fn release(after: Duration) -> Settlement {
    Settlement::Release { after, failures: 1 }
}

/// A channel with deliveries 1, 2, …
fn channel_with(count: u64, now: Instant) -> ChannelDeliveries {
    let mut channel = ChannelDeliveries::new(EPOCH, 64);
    (1..=count).for_each(|tag| channel.delivered(tag, OriginalProperties::default(), now));
    channel
}

fn frames(rejected: &[u64], prefix: Option<u64>, singles: &[u64]) -> Option<AckFrames> {
    Some(AckFrames {
        rejected: rejected.to_vec(),
        prefix,
        singles: singles.to_vec(),
    })
}

/// The name of an action, with the destination of a copy.
fn describe(action: SettleAction) -> String {
    match action {
        SettleAction::Nothing => "nothing".into(),
        SettleAction::Publish(copy) => copy.destination.to_string(),
        SettleAction::IgnoreStale => "stale".into(),
        SettleAction::IgnoreRepeated => "repeated".into(),
    }
}

#[test]
fn each_settlement_has_one_action() {
    let (open, stopped) = (IntakeState::Open, IntakeState::Stopped);
    let refused = || Settlement::Reject(Reason::Refused);
    let in_doubt = || Settlement::Reject(Reason::InDoubt(DoubtCause::Panicked));
    let declared = settings(|source| source);
    let by_queue = settings(|source| source.rejects(Rejects::ByQueue));
    let without_delay_queues = settings(|source| source.topology(Topology::Trust));
    for (settlement, intake, settings, action) in [
        (accepted(), open, &declared, "nothing"),
        (refused(), open, &declared, "orders.dead-letters"),
        (refused(), open, &by_queue, "nothing"),
        (in_doubt(), open, &declared, "orders.in-doubt"),
        (in_doubt(), open, &by_queue, "orders.in-doubt"),
        (release(Duration::ZERO), open, &declared, "nothing"),
        (release(Duration::ZERO), stopped, &declared, "nothing"),
        (release(MAX_IN_MEMORY_DELAY), open, &declared, "nothing"),
        (
            release(MAX_IN_MEMORY_DELAY),
            stopped,
            &declared,
            "orders.delay.5000",
        ),
        (
            release(MAX_IN_MEMORY_DELAY * 6),
            open,
            &declared,
            "orders.delay.30000",
        ),
        (
            release(MAX_IN_MEMORY_DELAY * 6),
            open,
            &without_delay_queues,
            "nothing",
        ),
        (
            release(MAX_IN_MEMORY_DELAY),
            stopped,
            &without_delay_queues,
            "nothing",
        ),
    ] {
        let mut channel = channel_with(1, time().now);
        let text = format!("{settlement:?}, {intake:?}");
        let done = channel.settle(settled(EPOCH, 1, settlement), intake, settings, time());
        assert_eq!(describe(done), action, "{text}");
    }
}

#[test]
fn a_stale_or_repeated_settlement_changes_nothing() {
    let (settings, time) = (settings(|source| source), time());
    let mut channel = channel_with(2, time.now);
    let mut settle = |epoch, tag, settlement| {
        let settled = settled(epoch, tag, settlement);
        describe(channel.settle(settled, IntakeState::Open, &settings, time))
    };
    assert_eq!(settle(EPOCH - 1, 1, accepted()), "stale");
    assert_eq!(settle(EPOCH, 1, accepted()), "nothing");
    let refused = Settlement::Reject(Reason::Refused);
    for settlement in [accepted(), refused, release(MAX_IN_MEMORY_DELAY)] {
        assert_eq!(settle(EPOCH, 1, settlement), "repeated");
    }
    assert_eq!(settle(EPOCH, 9, accepted()), "repeated");
    channel.confirmed(EPOCH - 1, 2, None);
    assert_eq!(
        channel.flush(FlushMode::Immediate, time.now),
        frames(&[], Some(1), &[])
    );
    assert_eq!((channel.unacked(), channel.is_flushed()), (1, true));
}

#[test]
fn deliveries_behind_an_unsettled_one_are_acknowledged_singly_after_the_gap_timeout() {
    let (settings, time) = (settings(|source| source), time());
    let mut channel = channel_with(4, time.now);
    for tag in [1, 3] {
        channel.settle(
            settled(EPOCH, tag, accepted()),
            IntakeState::Open,
            &settings,
            time,
        );
    }
    assert_eq!(
        channel.flush(FlushMode::Batched, time.now),
        frames(&[], Some(1), &[])
    );
    let due = channel.gap_due().expect("a delivery behind the gap");
    assert_eq!(
        channel.flush(FlushMode::Batched, due - GAP_TIMEOUT / 2),
        None
    );
    assert_eq!(
        channel.flush(FlushMode::Batched, due),
        frames(&[], None, &[3])
    );
    assert_eq!(
        (channel.gap_due(), channel.unsettled_since()),
        (None, Some(time.now))
    );
}

/// A channel with a delayed delivery 1, behind which so many were acknowledged singly that it moves.
fn moving(settings: &SourceContext, time: CurrentTime) -> (ChannelDeliveries, MessageCopy) {
    let mut channel = channel_with(1, time.now);
    let settle = |channel: &mut ChannelDeliveries, tag, settlement| {
        channel.settle(
            settled(EPOCH, tag, settlement),
            IntakeState::Open,
            settings,
            time,
        )
    };
    settle(&mut channel, 1, release(Duration::from_millis(4_900)));
    for tag in 2..2 + MAX_SINGLE_ACKS as u64 {
        assert!(
            channel
                .move_blocking_delivery(settings, FRAME_MAX, time)
                .is_none()
        );
        channel.delivered(tag, OriginalProperties::default(), time.now);
        settle(&mut channel, tag, accepted());
        assert_eq!(
            channel.flush(FlushMode::Immediate, time.now),
            frames(&[], None, &[tag])
        );
    }
    let copy = channel.move_blocking_delivery(settings, FRAME_MAX, time);
    (channel, copy.expect("the delivery moves"))
}

#[test]
fn a_delivery_that_blocks_acknowledgements_moves_and_its_confirm_settles_it() {
    let (settings, time) = (settings(|source| source), time());
    let (mut channel, copy) = moving(&settings, time);
    assert_eq!(
        (copy.destination.as_str(), copy.tag),
        ("orders.delay.5000", 1)
    );
    channel.confirmed(EPOCH, copy.tag, copy.cancellation.as_ref());
    assert_eq!(
        channel.flush(FlushMode::Batched, time.now),
        frames(&[], Some(1), &[])
    );
    assert_eq!((channel.unacked(), channel.next_due()), (0, None));
}

#[test]
fn a_late_confirm_of_a_cancelled_move_settles_nothing() {
    let (settings, time) = (settings(|source| source), time());
    let (mut channel, copy) = moving(&settings, time);
    let due = channel.next_due().expect("it waits in memory, too");
    assert_eq!(channel.take_due(due).len(), 1);
    channel.confirmed(EPOCH, copy.tag, copy.cancellation.as_ref());
    assert_eq!(
        (channel.flush(FlushMode::Immediate, due), channel.unacked()),
        (None, 1)
    );
    assert_eq!(channel.take_failed_tags(), [] as [u64; 0]);
}

#[test]
fn failed_deliveries_are_rejected_when_the_channel_closes() {
    let (settings, time) = (settings(|source| source.topology(Topology::Trust)), time());
    let mut channel = channel_with(3, time.now);
    for (tag, seconds) in [(3, 1), (1, 60)] {
        let released = settled(EPOCH, tag, release(Duration::from_secs(seconds)));
        channel.settle(released, IntakeState::Open, &settings, time);
    }
    assert_eq!(channel.take_failed_tags(), [3, 1]);
    assert_eq!((channel.unacked(), channel.next_due()), (1, None));
}

/// The unacknowledged deliveries at the broker. Like RabbitMQ it refuses an unknown tag.
#[derive(Default)]
struct SettlingBroker {
    unacked: BTreeSet<u64>,
    /// Deliveries whose message may be removed: accepted, or their copy is confirmed.
    removable: BTreeSet<u64>,
    /// Deliveries to be rejected to the queue's dead-letter exchange.
    rejected: BTreeSet<u64>,
}

impl SettlingBroker {
    fn apply(&mut self, frames: AckFrames) {
        for tag in frames.rejected {
            assert!(self.unacked.remove(&tag), "406: unknown delivery tag {tag}");
            assert!(self.rejected.remove(&tag), "{tag} was not to be rejected");
        }
        let prefix = frames.prefix.into_iter().flat_map(|last| {
            assert!(
                self.unacked.contains(&last),
                "406: unknown delivery tag {last}"
            );
            self.unacked.range(..=last).copied().collect::<Vec<_>>()
        });
        let acknowledged: Vec<u64> = prefix.collect();
        for tag in acknowledged.into_iter().chain(frames.singles) {
            assert!(self.unacked.remove(&tag), "406: unknown delivery tag {tag}");
            assert!(
                self.removable.contains(&tag),
                "lost message: {tag} was acknowledged and is not settled"
            );
        }
    }
}

#[test]
fn in_any_history_exactly_the_settled_deliveries_are_acknowledged_once() {
    let by_queue = settings(|source| source.rejects(Rejects::ByQueue));
    let published = settings(|source| source);
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let settings = if seed % 2 == 0 { &by_queue } else { &published };
        let (mut channel, mut broker) =
            (ChannelDeliveries::new(EPOCH, 64), SettlingBroker::default());
        let (mut time, mut next_tag) = (time(), 1);
        let (mut handled, mut copies) = (Vec::new(), BTreeMap::new());
        for step in 0..600 {
            // Towards the end nothing new arrives, and everything is settled.
            let is_ending = step > 500;
            match random.u8(..10) {
                0..3 if channel.has_room() && !is_ending => {
                    channel.delivered(next_tag, OriginalProperties::default(), time.now);
                    broker.unacked.insert(next_tag);
                    handled.push(next_tag);
                    next_tag += 1;
                }
                3..7 if !handled.is_empty() => {
                    let tag = handled.swap_remove(random.usize(..handled.len()));
                    let settlement = match random.u8(..6) {
                        0 => Settlement::Reject(Reason::Refused),
                        1 if !is_ending => release(Duration::from_millis(random.u64(..9_000))),
                        _ => accepted(),
                    };
                    let (accepts, rejects) = (
                        matches!(settlement, Settlement::Accept(_)),
                        matches!(settlement, Settlement::Reject(_)),
                    );
                    let settled = settled(EPOCH, tag, settlement);
                    match channel.settle(settled, IntakeState::Open, settings, time) {
                        SettleAction::Publish(copy) => drop(copies.insert(tag, *copy)),
                        SettleAction::Nothing if accepts => drop(broker.removable.insert(tag)),
                        SettleAction::Nothing if rejects => drop(broker.rejected.insert(tag)),
                        SettleAction::Nothing => {}
                        ignored => panic!("seed {seed}: {}", describe(ignored)),
                    }
                }
                7 => {
                    if let Some((tag, copy)) = copies.pop_first() {
                        broker.removable.insert(tag);
                        channel.confirmed(EPOCH, tag, copy.cancellation.as_ref());
                    }
                    channel.confirmed(EPOCH + 1, random.u64(..next_tag), None);
                }
                8 => {
                    time = after(time, Duration::from_millis(random.u64(..700)));
                    let due = channel.take_due(time.now).into_iter();
                    handled.extend(due.map(|delivery| delivery.receipt.position));
                }
                _ => {
                    let mode = if random.bool() {
                        FlushMode::Batched
                    } else {
                        FlushMode::Immediate
                    };
                    channel
                        .flush(mode, time.now)
                        .into_iter()
                        .for_each(|frames| broker.apply(frames));
                }
            }
            assert!(broker.unacked.len() <= 64 && channel.unacked() <= broker.unacked.len());
        }
        time = after(time, Duration::from_secs(60));
        handled.extend(
            channel
                .take_due(time.now)
                .iter()
                .map(|due| due.receipt.position),
        );
        for tag in handled {
            broker.removable.insert(tag);
            channel.settle(
                settled(EPOCH, tag, accepted()),
                IntakeState::Open,
                settings,
                time,
            );
        }
        for (tag, copy) in copies {
            broker.removable.insert(tag);
            channel.confirmed(EPOCH, tag, copy.cancellation.as_ref());
        }
        channel
            .flush(FlushMode::Immediate, time.now)
            .into_iter()
            .for_each(|frames| broker.apply(frames));
        assert!(
            channel.is_flushed() && broker.unacked.is_empty(),
            "seed {seed}: unacknowledged {:?}",
            broker.unacked
        );
    }
}
