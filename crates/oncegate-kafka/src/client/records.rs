//! Reads records and errors of partitions, and keeps librdkafka's position correct.

use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::internal::fault;
use rdkafka::consumer::Consumer;
use rdkafka::error::{KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::Offset;

use super::batch::{MessageQueue, PartitionError, RecordBatch};
use super::callbacks::{CallbackContext, GroupConsumer};
use super::{error, missing_topics, start_position};
use crate::partition::PartitionEvent;

/// Timeout of one seek.
const SEEK_TIMEOUT: Duration = Duration::from_secs(1);

impl CallbackContext {
    /// Reads and processes one batch. Waits at most for `wait` if there is no message, or no room
    /// for one. Does not serve librdkafka's main queue, so it may be called inside a rebalance.
    pub(super) fn read_batch(&self, wait: Duration) {
        let Some(queue) = self.queue() else {
            return self.shared.wait(wait);
        };
        let mut state = self.shared.lock();
        state.client.set_queue_length(queue.length());
        let (room, full_partitions) = (state.room(), state.full_partitions());
        drop(state);
        queue.forward_all_except(full_partitions);
        if room == 0 {
            return self.shared.wait(wait);
        }
        let batch = queue.read(room, wait);
        let count = batch.records.len() + batch.errors.len();
        self.process_batch(batch, &queue);
        self.shared.lock().client.count_read(count as u64);
    }

    /// Handles the errors of a batch, adds its records, and seeks where librdkafka's position is
    /// wrong.
    pub(super) fn process_batch(&self, batch: RecordBatch, queue: &MessageQueue<Self>) {
        for error in &batch.errors {
            match unreadable(error) {
                Some(source_error) => {
                    // The partition is halted before the records are added: the batch may contain
                    // records from behind the unreadable part.
                    self.halt(&error.topic, error.partition, source_error);
                }
                // The polling thread handles the changed topic id later in this turn of its loop.
                None if error.code == RDKafkaErrorCode::AutoOffsetReset
                    && self.topics.is_change_pending(&error.topic) => {}
                None if error.code == RDKafkaErrorCode::AutoOffsetReset => {
                    let position = self
                        .shared
                        .lock()
                        .position_of(&error.topic, error.partition);
                    self.shared
                        .fail(start_position::out_of_range(queue, error, position));
                }
                None => {
                    self.handle_error(error.code, &format!("{}/{}", error.topic, error.partition))
                }
            }
        }
        let restarted = self.shared.add_records(batch.records);
        self.count_expired(queue);
        // This runs after the records were added: some of them are before the error, and the seek
        // is to the offset after the last one.
        let errors_with_offset = batch.errors.iter().filter(|error| error.offset >= 0);
        let error_positions =
            errors_with_offset.map(|error| (&*error.topic, error.partition, Some(error.offset)));
        for (topic, partition, position) in error_positions.chain(
            restarted
                .iter()
                .map(|(topic, partition)| (&**topic, *partition, None)),
        ) {
            self.seek_after_last_read(topic, partition, position, queue);
        }
    }

    /// Ends the source with an error. No more records of the partition are added.
    pub(super) fn halt(&self, topic: &str, partition: i32, error: SourceError) {
        let mut state = self.shared.lock();
        state.apply(topic, partition, PartitionEvent::Halted);
        drop(state);
        self.shared.fail(error);
    }

    /// Counts and logs the messages that expired before they were read.
    fn count_expired(&self, queue: &MessageQueue<Self>) {
        let log_start_of = |topic: &str, partition| queue.log_start_offset(topic, partition);
        self.shared.lock().count_expired(log_start_of);
    }

    /// Seeks librdkafka to an offset. Nothing changes if librdkafka rejects the seek.
    pub(super) fn seek(
        &self,
        consumer: &GroupConsumer,
        topic: &str,
        partition: i32,
        offset: i64,
    ) -> KafkaResult<()> {
        fault::point("kafka.seek.before");
        let result = consumer.seek(topic, partition, Offset::Offset(offset), SEEK_TIMEOUT);
        fault::point("kafka.seek.after");
        if result.is_ok() {
            let mut state = self.shared.lock();
            state.apply(topic, partition, PartitionEvent::Sought);
        }
        result
    }

    /// Advances each partition to librdkafka's position. That position also advances past
    /// transaction markers, which librdkafka does not return as messages.
    pub(super) fn advance_past_transaction_markers(&self, consumer: &GroupConsumer) {
        let (Ok(positions), Some(queue)) = (consumer.position(), self.queue()) else {
            return;
        };
        let mut state = self.shared.lock();
        for it in positions.elements() {
            let position = match it.offset() {
                Offset::Offset(offset) => Some(offset),
                _ => None,
            };
            let event = PartitionEvent::PositionReported(position);
            state.apply(it.topic(), it.partition(), event);
        }
        drop(state);
        self.count_expired(&queue);
    }

    /// Ends the source if the error is permanent. Logs any other error; librdkafka retries.
    pub(super) fn handle_error(&self, code: RDKafkaErrorCode, subject: &str) {
        match permanent_error(code, subject) {
            Some(error) => self.shared.fail(error),
            // The error callback of the client has already logged that it cannot reach a broker.
            None if error::is_connection(code) => {
                tracing::debug!(%code, subject, "cannot reach a broker")
            }
            // The watching thread looks the topics up, and logs a missing one with the remedy.
            None if missing_topics::is_missing(code) => {
                self.shared.lock().client.suspect_missing_topic(true);
                tracing::debug!(%code, subject, "a topic may be missing")
            }
            None => {
                tracing::warn!(%code, subject, group = self.group, "kafka error, librdkafka retries; if it persists, check the brokers' logs")
            }
        }
    }
}

/// The error of the source for a permanent error code; `None` if a retry may succeed.
pub(super) fn permanent_error(code: RDKafkaErrorCode, subject: &str) -> Option<SourceError> {
    use RDKafkaErrorCode as E;
    Some(match code {
        E::TopicAuthorizationFailed => SourceError::misconfigured(
            "topic",
            format!("not allowed to read {subject}"),
            "grant Read and Describe on the topic",
        ),
        E::GroupAuthorizationFailed => SourceError::misconfigured(
            "group",
            "not allowed to use the group",
            "grant Read on the group",
        ),
        // Permanent, because a replacement client and the other member would fence each other
        // repeatedly and without end.
        E::FencedInstanceId | E::Fenced => SourceError::misconfigured(
            "group.instance.id",
            "another member of the group uses the same instance id",
            "give each member an instance id of its own",
        ),
        E::InvalidGroupId => SourceError::misconfigured(
            "group",
            "the broker rejects this group id",
            "choose another group id",
        ),
        E::UnsupportedAssignor => SourceError::misconfigured(
            "group.remote.assignor",
            "the broker has no assignor of this name",
            "remove the property, or name one of the broker's group.consumer.assignors",
        ),
        E::UnsupportedVersion | E::UnsupportedFeature => SourceError::misconfigured(
            "group_protocol",
            "the brokers do not support this group protocol",
            "use GroupProtocol::Classic, or Kafka 4.0 or later with `consumer` in group.coordinator.rebalance.protocols and the feature group.version (kafka-features.sh describe)",
        ),
        _ => return None,
    })
}

/// The error that ends the source if no client with these settings can read a part of a log; `None`
/// for any other error.
fn unreadable(error: &PartitionError) -> Option<SourceError> {
    use RDKafkaErrorCode as E;
    let PartitionError {
        topic,
        partition,
        offset,
        code,
    } = error;
    let remedy = match code {
        E::BadMessage | E::BadCompression | E::InvalidMessage => {
            "restore that part of the log from a replica"
        }
        E::NotImplemented | E::UnsupportedCompressionType => {
            "let its producer use another format or compression"
        }
        E::MessageSizeTooLarge => "raise receive.message.max.bytes",
        _ => return None,
    };
    Some(SourceError::misconfigured(
        "topic",
        format!("{topic}/{partition} cannot be read at offset {offset}: {code}"),
        format!("{remedy}, or move the group past it: kafka-consumer-groups.sh --reset-offsets"),
    ))
}
