use std::collections::BTreeSet;

use oncegate_core::lifecycle::DoubtCause;
use oncegate_core::message::Message;
use oncegate_core::source::Receipt;
use oncegate_testkit::laws::source::accepted;

use super::*;
use crate::client::context::SourceContext;
use crate::{RabbitMq, Topology};

const EPOCH: u64 = 3;
const DELAY: Duration = Duration::from_secs(30);

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
    Delivery::new(Message::new("a"), Receipt::new(epoch, tag))
}

fn settled(epoch: u64, tag: u64, settlement: Settlement) -> Settled {
    Settled::new(delivery(epoch, tag), settlement)
}

fn release(after: Duration) -> Settlement {
    Settlement::Release { after, failures: 1 }
}

/// A release without a failed attempt.
fn unfailed() -> Settlement {
    Settlement::Release {
        after: Duration::ZERO,
        failures: 0,
    }
}

/// A channel with deliveries 1, 2, …
fn channel_with(count: u64, now: Instant) -> ChannelDeliveries {
    let mut channel = ChannelDeliveries::new(EPOCH, 64);
    (1..=count).for_each(|tag| channel.delivered(tag, OriginalProperties::default(), 0, now));
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
        SettleAction::Redeliver(_) => "redeliver".into(),
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
        (release(DELAY), open, &declared, "orders.delay.30000"),
        (
            release(Duration::ZERO),
            stopped,
            &declared,
            "orders.delay.1000",
        ),
        (unfailed(), stopped, &declared, "nothing"),
        (release(DELAY), open, &without_delay_queues, "redeliver"),
        (
            release(Duration::ZERO),
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
    for settlement in [accepted(), refused, release(DELAY)] {
        assert_eq!(settle(EPOCH, 1, settlement), "repeated");
    }
    assert_eq!(settle(EPOCH, 9, accepted()), "repeated");
    channel.confirmed(EPOCH - 1, 2);
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

#[test]
fn failed_deliveries_are_rejected_when_the_channel_closes() {
    let (settings, time) = (settings(|source| source.topology(Topology::Trust)), time());
    let mut channel = channel_with(3, time.now);
    for (tag, settlement) in [
        (3, release(Duration::ZERO)),
        (2, unfailed()),
        (1, release(Duration::ZERO)),
    ] {
        let released = settled(EPOCH, tag, settlement);
        channel.settle(released, IntakeState::Stopped, &settings, time);
    }
    assert_eq!(channel.take_failed_tags(), [3, 1]);
    assert_eq!(channel.unacked(), 1);
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
    let by_queue = settings(|source| source.rejects(Rejects::ByQueue).topology(Topology::Check));
    let published = settings(|source| source);
    for seed in 0..300 {
        let mut random = fastrand::Rng::with_seed(seed);
        let settings = if seed % 2 == 0 { &by_queue } else { &published };
        let (mut channel, mut broker) =
            (ChannelDeliveries::new(EPOCH, 64), SettlingBroker::default());
        let (mut time, mut next_tag) = (time(), 1);
        let (mut handled, mut copies) = (Vec::new(), BTreeSet::new());
        for step in 0..600 {
            // Towards the end nothing new arrives, and everything is settled.
            let is_ending = step > 500;
            match random.u8(..10) {
                0..3 if channel.has_room() && !is_ending => {
                    channel.delivered(next_tag, OriginalProperties::default(), 0, time.now);
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
                        SettleAction::Publish(_) => drop(copies.insert(tag)),
                        SettleAction::Nothing if accepts => drop(broker.removable.insert(tag)),
                        SettleAction::Nothing if rejects => drop(broker.rejected.insert(tag)),
                        SettleAction::Redeliver(_) => handled.push(tag),
                        ignored => panic!("seed {seed}: {}", describe(ignored)),
                    }
                }
                7 => {
                    if let Some(tag) = copies.pop_first() {
                        broker.removable.insert(tag);
                        channel.confirmed(EPOCH, tag);
                    }
                    channel.confirmed(EPOCH + 1, random.u64(..next_tag));
                }
                8 => time = after(time, Duration::from_millis(random.u64(..700))),
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
        for tag in handled {
            broker.removable.insert(tag);
            channel.settle(
                settled(EPOCH, tag, accepted()),
                IntakeState::Open,
                settings,
                time,
            );
        }
        for tag in copies {
            broker.removable.insert(tag);
            channel.confirmed(EPOCH, tag);
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
