//! Corrects a position that librdkafka has advanced too far.
//!
//! # Workaround
//! - *Symptom:* in `rd_kafka_consume_batch_queue` an error of a partition advances the position like a
//!   message: after a rebalance, reading resumes one message too far. Nor does the position decrease when
//!   a log was truncated. *Version:* librdkafka 2.12.1.
//! - *Upstream:* `docs/upstream/librdkafka-batch-error-position.md`.
//! - *Test:* `a_rebalance_after_a_fetch_that_failed_skips_nothing` in `tests/kafka`.
//! - *May be removed* when the position does not change.

use super::batch::MessageQueue;
use super::callbacks::CallbackContext;
use crate::partition::{PartitionAction, PartitionEvent};

impl CallbackContext {
    /// Seeks to the offset after the last message that was read, or to `position` if none was.
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
