//! Applies the consumer's settlements.

use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::{Delivery, FailureHistory, Receipt, Settled};

use super::{SharedState, SourceState, StateLock};

/// A delivery that is to be published to a dead-letter topic.
pub(crate) struct RejectedDelivery {
    pub(crate) delivery: Delivery,
    pub(crate) reason: Reason,
    pub(crate) failure_history: Option<Box<FailureHistory>>,
}

/// `Proof::as_str` of an accepted delivery that the consumer skipped as a duplicate.
const DUPLICATE: &str = "duplicate";

impl<M: StateLock> SharedState<M> {
    /// Applies settlements, and wakes the polling thread. Returns the rejected deliveries, whose
    /// dead letters are to be published.
    pub(crate) fn settle(&self, settled: &mut Vec<Settled>) -> Vec<RejectedDelivery> {
        let mut rejected = Vec::new();
        let mut state = self.lock();
        for Settled {
            delivery,
            settlement,
            failure_history,
            ..
        } in settled.drain(..)
        {
            let is_assigned = match settlement {
                Settlement::Accept(proof) => {
                    if proof.as_str() == DUPLICATE {
                        state.check_repeated_id(&delivery);
                    }
                    state.accept(&delivery.receipt)
                }
                Settlement::Release { failures, .. } => {
                    state.release(delivery.with_failures(failures))
                }
                Settlement::Reject(reason) => {
                    let is_assigned = state.reject(&delivery);
                    rejected.extend(is_assigned.then_some(RejectedDelivery {
                        delivery,
                        reason,
                        failure_history,
                    }));
                    is_assigned
                }
            };
            count_if_stale(is_assigned);
        }
        drop(state);
        self.wake_poller();
        rejected
    }
}

/// Counts a settlement whose assignment has ended.
pub(crate) fn count_if_stale(is_assigned: bool) {
    if !is_assigned {
        metrics::counter!(crate::metric::STALE_SETTLEMENTS).increment(1);
    }
}

impl SourceState {
    /// Counts and logs a duplicate whose id may be that of another message. The ids of
    /// `IdSource::position()` repeat in a recreated or mirrored topic and after a truncation, so
    /// the consumer skips new messages as duplicates. Only the source knows that offsets repeat.
    fn check_repeated_id(&mut self, delivery: &Delivery) {
        let Receipt {
            epoch,
            partition,
            position,
            ..
        } = delivery.receipt;
        let assigned = self.assigned.get_mut(&epoch);
        // Lossless: `position` was converted from an `i64` offset.
        let may_repeat = |ids: crate::partition::PositionIds| ids.may_repeat(position as i64);
        let Some(assigned) = assigned.filter(|it| may_repeat(it.partition.log().position_ids))
        else {
            return;
        };
        metrics::counter!(crate::metric::IDS_REPEATED).increment(1);
        if !std::mem::replace(&mut assigned.is_repetition_logged, true) {
            tracing::error!(
                topic = &*assigned.topic,
                partition,
                offset = position,
                "ids repeated: the topic was recreated, is a replica, or its log was truncated, and a message was skipped because its id was handled before; \
                 with IdSource::position(), it is another message than the handled one: give the consumer another .scope(…) and reset the \
                 group's offsets; if producers set the ids, the message was sent again, or was redelivered after a rebalance"
            );
        }
    }
}
