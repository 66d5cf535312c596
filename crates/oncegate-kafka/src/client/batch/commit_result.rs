//! Commits offsets so that the result is reported.
//!
//! # Workaround
//! - *Symptom:* `ConsumerContext::commit_callback` is never called for a commit with
//!   `CommitMode::Async`, only for automatic ones, so a refused commit is not repeated. *Version:*
//!   rdkafka 0.39.0.
//! - *Workaround:* the request has the consumer's main queue, from which rdkafka polls the result as an
//!   event.
//! - *Upstream:* `docs/upstream/rust-rdkafka-async-commit-result.md`.
//! - *Test:* `a_lower_commit_that_fails_is_reported_and_repeated` in `client/poll`.
//! - *May be removed* when rdkafka reports the results of asynchronous commits.

use std::ptr;

use rdkafka::bindings as native;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::TopicPartitionList;
use rdkafka::types::RDKafkaRespErr;

/// Sends a commit request, whose result arrives at `ConsumerContext::commit_callback`.
pub(in crate::client) fn commit<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    offsets: &TopicPartitionList,
) -> KafkaResult<()> {
    let client = consumer.client().native_ptr();
    // SAFETY: the client lives.
    let queue = unsafe { native::rd_kafka_queue_get_consumer(client) };
    if queue.is_null() {
        // The client is in no group.
        return Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::UnknownGroup));
    }
    // SAFETY: client, list and queue live; librdkafka copies the list, and refers to the queue itself.
    // Without a queue it would wait for the result.
    let code = unsafe {
        native::rd_kafka_commit_queue(client, offsets.ptr(), queue, None, ptr::null_mut())
    };
    // SAFETY: the reference of this function, which is not used again.
    unsafe { native::rd_kafka_queue_destroy(queue) };
    match code {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
        code => Err(KafkaError::ConsumerCommit(code.into())),
    }
}
