//! One consuming channel: which deliveries are unsettled, delayed or copied, and what is to be
//! acknowledged.

use std::time::Duration;

use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Delivery, FailureHistory, Settled};
use tokio::time::Instant;

use crate::protocol::CurrentTime;
use crate::protocol::ack_ledger::AckLedger;
use crate::protocol::delay_buffer::DelayBuffer;
use crate::protocol::incoming::OriginalProperties;
use crate::protocol::message_copy::{MessageCopy, PublishCancellation};
use crate::protocol::queue_settings::QueueSettings;
use crate::settings::Rejects;

/// How long settled deliveries behind an unsettled one (the gap) wait to be acknowledged together with
/// it. Then they are acknowledged one by one.
const GAP_TIMEOUT: Duration = Duration::from_millis(100);
/// The longest delay that a released delivery waits in memory, if there are delay queues.
const MAX_IN_MEMORY_DELAY: Duration = Duration::from_secs(5);
/// The shortest delay of a release. Without it, immediate releases would redeliver in a busy loop.
const MIN_RELEASE_DELAY: Duration = Duration::from_millis(20);
/// While a delayed delivery is unacknowledged, later ones cannot be acknowledged together (`multiple`).
/// After this many single acknowledgements it moves to a delay queue. Its copy costs the broker about
/// as much as a hundred single acknowledgements.
const MAX_SINGLE_ACKS: usize = 256;

/// Whether deliveries of the broker are passed to the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IntakeState {
    Open,
    Stopped,
}

/// When settled deliveries behind an unsettled one are acknowledged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlushMode {
    /// Together with the unsettled one, if that is settled soon; otherwise one by one.
    Batched,
    /// At once, one by one.
    Immediate,
}

/// What follows from a settlement.
#[derive(Debug)]
pub(crate) enum SettleAction {
    Nothing,
    /// Publish the copy; its confirm settles the delivery.
    Publish(Box<MessageCopy>),
    /// Drop the settlement: its channel is closed, and the broker redelivers the message. An
    /// acknowledgement with the tag of another channel would close this one.
    IgnoreStale,
    /// Ignore the settlement: the delivery is settled already. The broker would close the channel for a
    /// second acknowledgement.
    IgnoreRepeated,
}

/// The acknowledgements to send, in the order of the fields.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct AckFrames {
    /// For `basic.reject` without requeue. First, because the prefix may cover these tags.
    pub(crate) rejected: Vec<u64>,
    /// For `basic.ack` with `multiple`.
    pub(crate) prefix: Option<u64>,
    /// For `basic.ack` without `multiple`.
    pub(crate) singles: Vec<u64>,
}

impl AckFrames {
    pub(crate) fn count(&self) -> usize {
        self.rejected.len() + usize::from(self.prefix.is_some()) + self.singles.len()
    }
}

/// The parts of an unsettled delivery that a copy needs, and when the delivery arrived.
#[derive(Debug)]
struct UnsettledDelivery {
    original: OriginalProperties,
    since: Instant,
}

/// The deliveries of one channel, from their arrival until they are acknowledged.
pub(crate) struct ChannelDeliveries {
    /// The number of the channel: 1 for the first one of a source. Delivery tags of another channel
    /// mean other deliveries.
    pub(crate) epoch: u64,
    pub(crate) prefetch: usize,
    acks: AckLedger<UnsettledDelivery>,
    delayed: DelayBuffer,
    /// How many copies wait for their confirms, without a delivery that moves to a delay queue.
    publishing: usize,
    /// Tags to reject to the queue's own dead-letter exchange.
    rejecting: Vec<u64>,
    /// Since when there are settled deliveries behind an unsettled one.
    gap_since: Option<Instant>,
}

impl ChannelDeliveries {
    pub(crate) fn new(epoch: u64, prefetch: u16) -> Self {
        Self {
            epoch,
            prefetch: usize::from(prefetch),
            acks: AckLedger::new(),
            delayed: DelayBuffer::default(),
            publishing: 0,
            rejecting: Vec::new(),
            gap_since: None,
        }
    }

    /// Adds a delivery of the broker.
    pub(crate) fn delivered(&mut self, tag: u64, original: OriginalProperties, now: Instant) {
        let since = now;
        self.acks
            .delivered(tag, UnsettledDelivery { original, since });
    }

    /// Applies a settlement.
    pub(crate) fn settle(
        &mut self,
        settled: Settled,
        intake: IntakeState,
        settings: &QueueSettings,
        time: CurrentTime,
    ) -> SettleAction {
        let mut delivery = settled.delivery;
        let tag = delivery.receipt.position;
        if delivery.receipt.epoch != self.epoch {
            return SettleAction::IgnoreStale;
        }
        match settled.settlement {
            Settlement::Accept(_) if self.acks.settle(tag).is_some() => SettleAction::Nothing,
            Settlement::Accept(_) => SettleAction::IgnoreRepeated,
            Settlement::Reject(reason) => {
                let history = settled.failure_history.as_deref();
                self.reject(&delivery, &reason, history, settings, time)
            }
            // Released while the source stops: closing the channel requeues the delivery.
            Settlement::Release { after, .. }
                if after.is_zero() && intake == IntakeState::Stopped =>
            {
                SettleAction::Nothing
            }
            Settlement::Release { after, failures } => {
                delivery.failures = failures;
                self.delay(delivery, after, intake, settings, time)
            }
        }
    }

    /// Sends a delivery to the dead letters or the in-doubt queue.
    pub(crate) fn reject(
        &mut self,
        delivery: &Delivery,
        reason: &Reason,
        failure_history: Option<&FailureHistory>,
        settings: &QueueSettings,
        time: CurrentTime,
    ) -> SettleAction {
        let tag = delivery.receipt.position;
        if settings.rejects == Rejects::ByQueue && !reason.is_in_doubt() {
            if self.acks.reject(tag).is_none() {
                return SettleAction::IgnoreRepeated;
            }
            self.rejecting.push(tag);
            return SettleAction::Nothing;
        }
        let Some(unsettled) = self.acks.context(tag) else {
            return SettleAction::IgnoreRepeated;
        };
        self.publishing += 1;
        SettleAction::Publish(Box::new(MessageCopy::rejected(
            delivery,
            reason,
            failure_history,
            &unsettled.original,
            settings,
            time.unix,
        )))
    }

    /// Delays a delivery in memory, for at most half of the consumer timeout; or in a delay queue, if
    /// there are delay queues and the delay is long, half of the prefetch is already delayed in memory,
    /// or the source stops.
    pub(crate) fn delay(
        &mut self,
        delivery: Delivery,
        after: Duration,
        intake: IntakeState,
        settings: &QueueSettings,
        time: CurrentTime,
    ) -> SettleAction {
        let Some(unsettled) = self.acks.context(delivery.receipt.position) else {
            return SettleAction::IgnoreRepeated;
        };
        let fills_prefetch = self.delayed.len() >= self.prefetch / 2;
        if settings.uses_delay_queues()
            && (after > MAX_IN_MEMORY_DELAY || fills_prefetch || intake == IntakeState::Stopped)
        {
            self.publishing += 1;
            let original = &unsettled.original;
            let copy = MessageCopy::delayed(&delivery, after, original, settings, time.unix);
            return SettleAction::Publish(Box::new(copy));
        }
        // The broker closes a channel if a delivery exceeds the consumer timeout.
        let after = after
            .min(settings.consumer_timeout / 2)
            .max(MIN_RELEASE_DELAY);
        self.delayed.insert(time.now + after, delivery);
        SettleAction::Nothing
    }

    /// The copy with which a delayed delivery moves from memory to a delay queue, because
    /// [`MAX_SINGLE_ACKS`] later ones were acknowledged one by one because of it: a single
    /// acknowledgement costs the broker several times as much as one of many together. The original
    /// waits in memory until the copy is confirmed.
    pub(crate) fn move_blocking_delivery(
        &mut self,
        settings: &QueueSettings,
        frame_max: u32,
        time: CurrentTime,
    ) -> Option<MessageCopy> {
        let (tag, acked_singly) = self.acks.blocking_tag()?;
        if acked_singly < MAX_SINGLE_ACKS || !settings.uses_delay_queues() {
            return None;
        }
        let (due, delivery) = self.delayed.movable(tag, time.now)?;
        let original = &self.acks.context(tag)?.original;
        let remaining = due.saturating_duration_since(time.now);
        let copy = MessageCopy::delayed(delivery, remaining, original, settings, time.unix);
        if !copy.is_lossless(original, frame_max) {
            self.delayed.mark_unmovable(tag);
            return None;
        }
        let cancellation = Some(self.delayed.start_move(tag, due, time.now));
        Some(MessageCopy {
            cancellation,
            ..copy
        })
    }

    /// Settles the original of a confirmed copy. If the copy was cancelled, the original was redelivered
    /// from memory, and its own settlement acknowledges it.
    pub(crate) fn confirmed(
        &mut self,
        epoch: u64,
        tag: u64,
        cancellation: Option<&PublishCancellation>,
    ) {
        if epoch != self.epoch || cancellation.is_some_and(PublishCancellation::is_cancelled) {
            return;
        }
        if !self.delayed.finish_move(tag) {
            self.publishing = self.publishing.saturating_sub(1);
        }
        self.acks.settle(tag);
    }

    /// Removes the delayed deliveries that are due.
    pub(crate) fn take_due(&mut self, now: Instant) -> Vec<Delivery> {
        self.delayed.take_due(now)
    }

    /// Removes the delayed deliveries of a source that stops, with the times when they are due. The copy
    /// of one whose move is pending replaces it.
    pub(crate) fn take_delayed(&mut self) -> Vec<(Instant, Delivery)> {
        let (delayed, has_pending_move) = self.delayed.take_all();
        self.publishing += usize::from(has_pending_move);
        delayed
            .into_iter()
            .map(|((due, _), delivery)| (due, delivery))
            .collect()
    }

    /// Cancels a pending move to a delay queue, because the channel is lost.
    pub(crate) fn cancel_move(&mut self) {
        self.delayed.cancel_move();
    }

    /// The acknowledgements that are due. The settled prefix is due at once; settled deliveries behind
    /// an unsettled one are due with [`FlushMode::Immediate`], after [`GAP_TIMEOUT`], or if they exceed
    /// a quarter of the prefetch.
    pub(crate) fn flush(&mut self, mode: FlushMode, now: Instant) -> Option<AckFrames> {
        if self.acks.settled() == 0 && self.rejecting.is_empty() {
            return None;
        }
        let prefix = self.acks.take_prefix();
        if prefix.is_some() {
            self.gap_since = None;
        }
        let behind_gap = self.acks.settled();
        let is_overdue = mode == FlushMode::Immediate
            || behind_gap > self.prefetch / 4
            || self
                .gap_since
                .is_some_and(|since| now.saturating_duration_since(since) >= GAP_TIMEOUT);
        let singles = if behind_gap > 0 && is_overdue {
            self.acks.take_singles()
        } else {
            Vec::new()
        };
        self.gap_since = (self.acks.settled() > 0).then(|| self.gap_since.unwrap_or(now));
        let frames = AckFrames {
            rejected: std::mem::take(&mut self.rejecting),
            prefix,
            singles,
        };
        (frames.count() > 0).then_some(frames)
    }

    /// The tags to reject with requeue when the channel is closed, in their order: released deliveries,
    /// which failed. Since RabbitMQ 4.3 these count towards the delivery limit, and `basic.nack`, which
    /// requeues all others, does not.
    pub(crate) fn take_failed_tags(&mut self) -> Vec<u64> {
        let delayed = self.delayed.take_all().0.into_keys();
        delayed
            .filter_map(|(_, tag)| self.acks.reject(tag).map(|_| tag))
            .collect()
    }

    /// How many deliveries are unacknowledged.
    pub(crate) fn unacked(&self) -> usize {
        self.acks.unacked()
    }

    /// Whether the prefetch has room.
    pub(crate) fn has_room(&self) -> bool {
        self.acks.unacked() < self.prefetch
    }

    /// Whether all copies are confirmed, and there is nothing to acknowledge.
    pub(crate) fn is_flushed(&self) -> bool {
        self.publishing == 0 && self.rejecting.is_empty() && self.acks.settled() == 0
    }

    /// Since when a delivery has been unsettled, of all the longest.
    pub(crate) fn unsettled_since(&self) -> Option<Instant> {
        self.acks
            .oldest_unsettled()
            .map(|unsettled| unsettled.since)
    }

    /// When the next delayed delivery is due.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.delayed.next_due()
    }

    /// When settled deliveries behind an unsettled one are due to be acknowledged.
    pub(crate) fn gap_due(&self) -> Option<Instant> {
        self.gap_since.map(|since| since + GAP_TIMEOUT)
    }
}

#[cfg(test)]
mod tests;
