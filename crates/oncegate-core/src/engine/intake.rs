//! Keeps the deliveries that are in flight or queued, and decides how many more may be received.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::entry::{InFlightEntry, Occupancy, Phase};
use crate::context::SharedDelivery;
use crate::ordering::{KeyState, OrderingKey, OrderingQueues, WasQueued};
use crate::settings::Settings;
use crate::slots::{Slot, Slots};
use crate::source::{Delivery, Limit, QueueLevel, RetryDelays, SourceProperties};

/// The slab of all deliveries that were received and not settled, and the limits for them.
///
/// Each delivery counts in exactly one [`Phase`]: all changes of its stage or its occupancy go
/// through [`insert`](Self::insert), [`update`](Self::update) and [`remove`](Self::remove). The
/// first delivery of an ordering key holds it until its removal; the others are queued.
pub(super) struct Intake {
    entries: Slots<InFlightEntry>,
    counts: PhaseCounts,
    ordering: OrderingQueues,
    /// Queued deliveries that may proceed as soon as there is capacity.
    resumable: VecDeque<Slot>,
    /// Shared records of settled deliveries, whose memory is used again.
    spare: Vec<Arc<SharedDelivery>>,
    limits: Limits,
    retry_delays: RetryDelays,
}

/// The settings that limit how many deliveries are in flight or queued.
#[derive(Clone, Copy)]
struct Limits {
    max_in_flight: usize,
    max_in_flight_bytes: usize,
    max_queued: usize,
    max_queued_bytes: usize,
}

/// The maximum number of spare records.
const MAX_SPARE: usize = 1024;

/// The number and the bytes of the deliveries in each phase.
#[derive(Debug, Default, PartialEq, Eq)]
struct PhaseCounts {
    count: [usize; Phase::COUNT],
    bytes: [usize; Phase::COUNT],
}

impl PhaseCounts {
    /// Moves a delivery of this size between phases. `from` is `None` when it is added, `to` when
    /// it is removed.
    #[inline]
    fn transition(&mut self, from: Option<Phase>, to: Option<Phase>, bytes: usize) {
        if let Some(from) = from {
            self.count[from as usize] -= 1;
            self.bytes[from as usize] -= bytes;
        }
        if let Some(to) = to {
            self.count[to as usize] += 1;
            self.bytes[to as usize] += bytes;
        }
    }
}

impl Intake {
    pub(super) fn new(settings: &Settings, properties: SourceProperties) -> Self {
        let order = settings.order.unwrap_or(properties.default_order);
        Self {
            entries: Slots::new(settings.max_in_flight),
            counts: PhaseCounts::default(),
            ordering: OrderingQueues::new(order),
            resumable: VecDeque::new(),
            spare: Vec::new(),
            limits: Limits {
                max_in_flight: settings.max_in_flight,
                max_in_flight_bytes: settings.max_in_flight_bytes,
                max_queued: settings.max_queued,
                max_queued_bytes: settings.max_queued_bytes,
            },
            retry_delays: properties.retry_delays,
        }
    }

    pub(super) fn ordering_key(&self, delivery: &Delivery) -> Option<OrderingKey> {
        self.ordering.of(delivery)
    }

    /// A shared record with this content, in the memory of a settled delivery if there is one.
    #[inline(always)]
    pub(super) fn share(&mut self, content: SharedDelivery) -> Arc<SharedDelivery> {
        let Some(mut spare) = self.spare.pop() else {
            return Arc::new(content);
        };
        match Arc::get_mut(&mut spare) {
            Some(own) => *own = content,
            None => spare = Arc::new(content),
        }
        spare
    }

    /// Keeps the record of a settled delivery for another one, unless a handler still has it.
    #[inline]
    pub(super) fn recycle(&mut self, shared: Arc<SharedDelivery>) {
        if shared.message.is_none() && self.spare.len() < MAX_SPARE {
            self.spare.push(shared);
        }
    }

    /// Adds a delivery. It is queued if another one holds its ordering key.
    #[inline(always)]
    pub(super) fn insert(&mut self, entry: InFlightEntry) -> (Slot, KeyState) {
        let (ordering_key, phase, bytes) = (entry.ordering_key, entry.counted, entry.bytes);
        let slot = self.entries.insert(entry);
        self.counts.transition(None, Some(phase), bytes);
        let key_state =
            ordering_key.map_or(KeyState::Acquired, |key| self.ordering.acquire(key, slot));
        if key_state == KeyState::Queued {
            self.enqueue(slot);
        }
        (slot, key_state)
    }

    /// Changes a delivery, and counts it in its phase after the change. `None` if it was settled.
    #[inline(always)]
    pub(super) fn update<T>(
        &mut self,
        slot: Slot,
        change: impl FnOnce(&mut InFlightEntry) -> T,
    ) -> Option<T> {
        let entry = self.entries.at_mut(slot)?;
        let result = change(entry);
        let to = entry.phase();
        let from = std::mem::replace(&mut entry.counted, to);
        if from != to {
            self.counts.transition(Some(from), Some(to), entry.bytes);
        }
        Some(result)
    }

    /// Counts a delivery as queued, not in flight, until its next event.
    pub(super) fn enqueue(&mut self, slot: Slot) {
        self.update(slot, |entry| entry.occupancy = Occupancy::Queued);
    }

    /// Removes a delivery, after a call of `before_removal` with it. The next one of its ordering
    /// key may proceed.
    #[inline(always)]
    pub(super) fn remove<T>(
        &mut self,
        slot: Slot,
        before_removal: impl FnOnce(&mut InFlightEntry) -> T,
    ) -> Option<T> {
        let entry = self.entries.at_mut(slot)?;
        let ordering_key = entry.ordering_key;
        self.counts
            .transition(Some(entry.counted), None, entry.bytes);
        let result = before_removal(entry);
        self.entries.discard(slot);
        if let Some(key) = ordering_key
            && self.ordering.remove_queued(key, slot) == WasQueued::No
        {
            self.resumable.extend(self.ordering.pass_on(key));
        }
        Some(result)
    }

    #[inline]
    pub(super) fn at(&self, slot: Slot) -> Option<&InFlightEntry> {
        self.entries.at(slot)
    }

    /// A delivery, for changes that do not affect its phase.
    #[inline]
    pub(super) fn at_mut(&mut self, slot: Slot) -> Option<&mut InFlightEntry> {
        self.entries.at_mut(slot)
    }

    /// The delivery at a slab index.
    pub(super) fn slot(&self, index: usize) -> Option<Slot> {
        self.entries.slot(index)
    }

    /// All deliveries, queued ones included.
    pub(super) fn slots(&self) -> Vec<Slot> {
        self.entries.slots().collect()
    }

    /// The number of all deliveries, queued ones included.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The number of deliveries in a phase.
    #[inline]
    pub(super) fn count(&self, phase: Phase) -> usize {
        self.counts.count[phase as usize]
    }

    /// The number of deliveries that are not queued.
    pub(super) fn in_flight(&self) -> usize {
        self.len() - self.count(Phase::Queued)
    }

    /// The number and the bytes of queued deliveries, if one of them is at its limit: then the
    /// consumer receives nothing. `None` below the limits.
    pub(super) fn full_queue(&self) -> Option<(usize, usize)> {
        let queued = self.count(Phase::Queued);
        let bytes = self.counts.bytes[Phase::Queued as usize];
        let is_full = queued >= self.limits.max_queued || bytes >= self.limits.max_queued_bytes;
        is_full.then_some((queued, bytes))
    }

    pub(super) fn queue_level(&self) -> QueueLevel {
        let queued = self.count(Phase::Queued);
        let bytes = self.counts.bytes[Phase::Queued as usize];
        let Limits {
            max_queued,
            max_queued_bytes,
            ..
        } = self.limits;
        let is_high = queued >= max_queued / 2 || bytes >= max_queued_bytes / 2;
        match is_high && queued > 0 {
            true => QueueLevel::High,
            false => QueueLevel::Low,
        }
    }

    /// How long a delivery that is tried again after `after` waits in the consumer; `None` if its
    /// source executes the delay.
    pub(super) fn delay_in_consumer(&self, slot: Slot, after: Duration) -> Option<Duration> {
        match self.retry_delays {
            RetryDelays::InConsumer { longest } => Some(after.min(longest)),
            RetryDelays::InSource { above, max_kept } => {
                let is_ordered = self.at(slot)?.ordering_key.is_some();
                let has_room = self.count(Phase::Queued) < max_kept && self.full_queue().is_none();
                (is_ordered || (after <= above && has_room)).then_some(after)
            }
        }
    }

    /// How much may be received now. With [`Limit::NOTHING`] the source still reports revocations.
    pub(super) fn receive_limit(&self) -> Limit {
        match self.full_queue() {
            Some(_) => Limit::NOTHING,
            None => self.free_capacity(),
        }
    }

    /// How much more may be in flight, received or from the queue. Up to `max_in_flight` deliveries
    /// whose completion is not recorded yet do not count; their bytes do.
    fn free_capacity(&self) -> Limit {
        let completing = self.count(Phase::Completing);
        let occupied = self.in_flight() - completing.min(self.limits.max_in_flight);
        let occupied_bytes =
            self.counts.bytes.iter().sum::<usize>() - self.counts.bytes[Phase::Queued as usize];
        let count = self.limits.max_in_flight.saturating_sub(occupied);
        let bytes = self
            .limits
            .max_in_flight_bytes
            .saturating_sub(occupied_bytes);
        if count > 0 && bytes > 0 {
            Limit { count, bytes }
        } else {
            Limit::NOTHING
        }
    }

    /// Lets a queued delivery proceed, because its backoff is over.
    pub(super) fn resume(&mut self, slot: Slot) {
        self.resumable.push_back(slot);
    }

    /// Whether a queued delivery may proceed now.
    pub(super) fn may_resume(&self) -> bool {
        !self.resumable.is_empty() && self.free_capacity() != Limit::NOTHING
    }

    /// The next queued delivery that proceeds.
    pub(super) fn next_resumable(&mut self) -> Option<Slot> {
        self.may_resume().then(|| self.resumable.pop_front())?
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::boot_time::BootTime;
    use crate::engine::entry::ClaimState;
    use crate::in_flight::InFlight;
    use crate::lifecycle::{Event, Freshness, History};
    use crate::marker::{Attempts, Guarantee, Terms, Token, Verdict};
    use crate::message::Message;
    use crate::source::{Order, Receipt};

    fn intake() -> Intake {
        let settings = Settings {
            max_in_flight: 2,
            max_in_flight_bytes: 100,
            max_queued: 2,
            max_queued_bytes: 100,
            ..Settings::default()
        };
        let properties = SourceProperties {
            default_order: Order::ByKey,
            ..SourceProperties::default()
        };
        Intake::new(&settings, properties)
    }

    fn delivery(intake: &mut Intake, key: &'static str, bytes: usize) -> InFlightEntry {
        let delivery = Delivery {
            message: Message::new(vec![0; bytes]).with_key(key),
            receipt: Receipt {
                epoch: 1,
                partition: 0,
                position: 0,
            },
            failures: 0,
        };
        let ordering_key = intake.ordering_key(&delivery);
        let shared = intake.share(SharedDelivery {
            id: None,
            message: Some(delivery.message),
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: Duration::from_secs(1),
                window: Duration::from_secs(1),
                fingerprint: None,
            },
            failures: 0,
            attempt: 0,
            lease: None,
        });
        let history = History {
            failures: 0,
            freshness: Freshness::Fresh,
        };
        InFlightEntry {
            in_flight: InFlight::new(shared, delivery.receipt, history),
            arrival: Event::Arrived,
            occupancy: Occupancy::InFlight,
            counted: Phase::OtherInFlight,
            claim: Cell::new(ClaimState::Absent),
            has_lease: false,
            ordering_key,
            store_span: None,
            task: None,
            began: None,
            arrived: BootTime::now(),
            generation: 0,
            bytes,
        }
    }

    /// After any sequence of events each delivery counts in one phase, and after the last removal
    /// no phase has one.
    #[test]
    fn the_counts_follow_the_stages() {
        let policy = Settings::default().policy();
        let granted = Event::Answer(Verdict::Granted(Attempts::new(1)));
        let events = [
            Event::Arrived,
            granted,
            Event::MayRun,
            Event::Returned(crate::lifecycle::Outcome::Done),
            Event::Returned(crate::lifecycle::Outcome::Retry),
            Event::Unavailable,
            Event::Woke,
            Event::Drain,
            Event::IsolationFull,
        ];
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut intake = intake();
            let mut slots = Vec::new();
            for _ in 0..100 {
                match random.u8(..4) {
                    0 => {
                        let entry = delivery(&mut intake, random.choice(["a", "b"]).unwrap(), 7);
                        slots.push(intake.insert(entry).0);
                    }
                    1 if !slots.is_empty() => {
                        intake.remove(slots.swap_remove(random.usize(..slots.len())), |_| ());
                    }
                    _ => {
                        let Some(slot) = random.choice(&slots) else {
                            continue;
                        };
                        let event = *random.choice(&events).expect("an event");
                        intake.update(*slot, |entry| {
                            entry.occupancy = Occupancy::InFlight;
                            entry.in_flight.handle(event, &policy, |_| Token(1));
                        });
                    }
                }
                let mut expected = PhaseCounts::default();
                for slot in &slots {
                    let phase = intake.at(*slot).expect("it is not removed").phase();
                    expected.transition(None, Some(phase), 7);
                }
                assert_eq!(intake.counts, expected, "seed {seed}");
            }
            for slot in slots {
                intake.remove(slot, |_| ());
            }
            assert_eq!(intake.counts, PhaseCounts::default());
        }
    }

    #[test]
    fn deliveries_of_one_key_proceed_one_after_the_other_and_count_as_queued() {
        let mut intake = intake();
        let entries =
            [("a", 40), ("a", 50), ("b", 40)].map(|(key, bytes)| delivery(&mut intake, key, bytes));
        let [(first, _), (second, queued), (other, free)] =
            entries.map(|entry| intake.insert(entry));
        assert_eq!((queued, free), (KeyState::Queued, KeyState::Acquired));
        assert_eq!((intake.in_flight(), intake.count(Phase::Queued)), (2, 1));
        assert_eq!(intake.receive_limit(), Limit::NOTHING, "two are in flight");
        assert_eq!(intake.next_resumable(), None);
        intake.remove(first, |_| ());
        assert_eq!(
            intake.receive_limit(),
            Limit {
                count: 1,
                bytes: 60
            }
        );
        assert_eq!(intake.next_resumable(), Some(second));
        intake.remove(other, |_| ());
        assert_eq!(intake.len(), 1);
    }

    #[test]
    fn a_full_queue_stops_receiving_although_there_is_capacity() {
        let mut intake = intake();
        let entries = ["a", "a", "a"].map(|key| delivery(&mut intake, key, 1));
        let slots = entries.map(|entry| intake.insert(entry).0);
        assert_eq!(intake.full_queue(), Some((2, 2)));
        assert_eq!(intake.receive_limit(), Limit::NOTHING);
        intake.remove(slots[2], |_| ());
        assert_eq!(intake.full_queue(), None);
        assert_eq!(intake.receive_limit().count, 1);
    }
}
