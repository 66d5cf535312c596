//! One consuming channel: which deliveries are unsettled or copied, and what is to be acknowledged.

use std::time::Duration;

use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Delivery, FailureHistory, Settled};
use tokio::time::Instant;

use crate::protocol::CurrentTime;
use crate::protocol::ack_ledger::AckLedger;
use crate::protocol::incoming::OriginalProperties;
use crate::protocol::message_copy::MessageCopy;
use crate::protocol::queue_settings::QueueSettings;
use crate::settings::Rejects;

/// How long settled deliveries behind an unsettled one (the gap) wait to be acknowledged together with
/// it. Then they are acknowledged one by one.
const GAP_TIMEOUT: Duration = Duration::from_millis(100);

/// Whether the driver passes deliveries of the broker to the source.
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
    /// Pass the delivery to the consumer again.
    Redeliver(Box<Delivery>),
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

/// The parts of an unsettled delivery that a copy needs, and when it arrived.
#[derive(Debug)]
struct UnsettledDelivery {
    original: OriginalProperties,
    /// How many attempts had failed when it arrived.
    failures: u32,
    /// When it arrived.
    since: Instant,
}

/// The deliveries of one channel, from their arrival until they are acknowledged.
pub(crate) struct ChannelDeliveries {
    /// The number of the channel: 1 for the first one of a source. The same delivery tag means
    /// another delivery on another channel.
    pub(crate) epoch: u64,
    pub(crate) prefetch: usize,
    acks: AckLedger<UnsettledDelivery>,
    /// How many copies wait for their confirms.
    publishing: usize,
    /// Tags of deliveries that failed, and were released while the source stopped.
    failed: Vec<u64>,
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
            publishing: 0,
            failed: Vec::new(),
            rejecting: Vec::new(),
            gap_since: None,
        }
    }

    /// Adds a delivery of the broker.
    pub(crate) fn delivered(
        &mut self,
        tag: u64,
        original: OriginalProperties,
        failures: u32,
        since: Instant,
    ) {
        let unsettled = UnsettledDelivery {
            original,
            failures,
            since,
        };
        self.acks.delivered(tag, unsettled);
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
            Settlement::Release { after, failures } => {
                delivery.failures = failures;
                self.release(delivery, after, intake, settings, time)
            }
        }
    }

    /// Publishes a released delivery to a delay queue, or, without delay queues, passes it to the
    /// consumer again. While the source stops, leaves it unsettled, and closing the channel
    /// requeues it; but a delivery that failed then uses a delay queue, if there is one, because
    /// the copy keeps the count of its failures.
    fn release(
        &mut self,
        delivery: Delivery,
        after: Duration,
        intake: IntakeState,
        settings: &QueueSettings,
        time: CurrentTime,
    ) -> SettleAction {
        let tag = delivery.receipt.position;
        let Some(unsettled) = self.acks.context(tag) else {
            return SettleAction::IgnoreRepeated;
        };
        let has_failed = delivery.failures > unsettled.failures;
        match intake {
            IntakeState::Stopped if !has_failed => SettleAction::Nothing,
            _ if settings.uses_delay_queues() => self.delay(&delivery, after, settings, time),
            IntakeState::Open => SettleAction::Redeliver(Box::new(delivery)),
            IntakeState::Stopped => {
                self.failed.push(tag);
                SettleAction::Nothing
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

    /// Publishes a delivery to a delay queue.
    pub(crate) fn delay(
        &mut self,
        delivery: &Delivery,
        after: Duration,
        settings: &QueueSettings,
        time: CurrentTime,
    ) -> SettleAction {
        let Some(unsettled) = self.acks.context(delivery.receipt.position) else {
            return SettleAction::IgnoreRepeated;
        };
        self.publishing += 1;
        let original = &unsettled.original;
        let copy = MessageCopy::delayed(delivery, after, original, settings, time.unix);
        SettleAction::Publish(Box::new(copy))
    }

    /// Settles the original of a confirmed copy; does nothing if another channel delivered it.
    pub(crate) fn confirmed(&mut self, epoch: u64, tag: u64) {
        if epoch == self.epoch {
            self.publishing = self.publishing.saturating_sub(1);
            self.acks.settle(tag);
        }
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

    /// The tags to reject with requeue when the channel is closed: released deliveries that failed. Since
    /// RabbitMQ 4.3 these count towards the delivery limit, and `basic.nack`, which requeues all others,
    /// does not.
    pub(crate) fn take_failed_tags(&mut self) -> Vec<u64> {
        let mut failed = std::mem::take(&mut self.failed);
        failed.retain(|tag| self.acks.reject(*tag).is_some());
        failed
    }

    /// How many deliveries are unacknowledged.
    pub(crate) fn unacked(&self) -> usize {
        self.acks.unacked()
    }

    /// Whether fewer deliveries than the prefetch are unacknowledged.
    pub(crate) fn has_room(&self) -> bool {
        self.acks.unacked() < self.prefetch
    }

    /// Whether all copies are confirmed, and there is nothing to acknowledge.
    pub(crate) fn is_flushed(&self) -> bool {
        self.publishing == 0 && self.rejecting.is_empty() && self.acks.settled() == 0
    }

    /// When the delivery arrived that has been unsettled for longest; `None` if all are settled.
    pub(crate) fn unsettled_since(&self) -> Option<Instant> {
        self.acks
            .oldest_unsettled()
            .map(|unsettled| unsettled.since)
    }

    /// When settled deliveries behind an unsettled one are due to be acknowledged.
    pub(crate) fn gap_due(&self) -> Option<Instant> {
        self.gap_since.map(|since| since + GAP_TIMEOUT)
    }
}

#[cfg(test)]
mod tests;
