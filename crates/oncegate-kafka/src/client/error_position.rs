//! Corrects a position that librdkafka has advanced too far.
//!
//! # Workaround
//! - *Symptom:* in `rd_kafka_consume_batch_queue` an error of a partition advances the position as
//!   a message does: after a rebalance, one message is skipped. The position also does not decrease
//!   when a log was truncated. *Version:* librdkafka 2.12.1.
//! - *Workaround:* [`seek_after_last_read`](CallbackContext::seek_after_last_read) corrects the
//!   position.
//! - *Upstream:* `docs/upstream/librdkafka-batch-error-position.md`.
//! - *Test:* `a_rebalance_after_a_fetch_that_failed_skips_nothing` in `tests/kafka`.
//! - *May be removed* when an error does not change the position.

use super::batch::MessageQueue;
use super::callbacks::CallbackContext;
use crate::partition::{PartitionAction, PartitionEvent};

impl CallbackContext {
    /// Seeks to the offset after the last message that was read, or to `position` if no message was
    /// read.
    pub(super) fn seek_after_last_read(
        &self,
        topic: &str,
        partition: i32,
        position: Option<i64>,
        queue: &MessageQueue<Self>,
    ) {
        let event = PartitionEvent::PositionWrong { fallback: position };
        let action = self.shared.lock().apply(topic, partition, event);
        if let PartitionAction::Seek(offset) = action
            && let Err(error) = self.seek(queue.consumer(), topic, partition, offset)
        {
            tracing::warn!(%error, topic, partition, offset, "cannot seek to the next unread message; a rebalance may skip messages; restart the consumer to read from the committed offset");
        }
    }
}
