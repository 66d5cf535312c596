//! Detects the permissions of the Kafka user with requests that change nothing.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

/// The time limit for an answer; a new client connects first.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// The time limit of one poll.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Whether the user has a permission.
pub(super) enum Permission {
    Granted,
    /// Denied with this error.
    Denied(RDKafkaErrorCode),
    /// No answer, or another error that may be transient.
    Unknown(String),
}

/// Checks the permission Read on the topic by fetching from the end of a partition: this joins no
/// group, commits no offset, and returns nothing unless a record arrives meanwhile.
pub(super) fn check_topic_read(consumer: &BaseConsumer, topic: &str, partition: i32) -> Permission {
    let mut end = TopicPartitionList::new();
    let assigned = end
        .add_partition_offset(topic, partition, Offset::End)
        .and_then(|()| consumer.assign(&end));
    if let Err(error) = assigned {
        return Permission::Unknown(error.to_string());
    }
    let permission = poll_until_known(
        RDKafkaErrorCode::TopicAuthorizationFailed,
        || match consumer.poll(POLL_INTERVAL) {
            Some(Ok(_) | Err(KafkaError::PartitionEOF(_))) => Some(Ok(())),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        },
    );
    // Ends the fetch. If this fails, the next request reports the error.
    let _ = consumer.assign(&TopicPartitionList::new());
    permission
}

/// Checks the permission Describe on the group by fetching its committed offsets. Read, which a
/// consumer needs, implies Describe. It cannot be checked without joining the group, so a user with
/// Describe alone is not detected.
pub(super) fn check_group_access(
    consumer: &BaseConsumer,
    topic: &str,
    partition: i32,
) -> Permission {
    let mut list = TopicPartitionList::new();
    list.add_partition(topic, partition);
    let forbidden = RDKafkaErrorCode::GroupAuthorizationFailed;
    poll_until_known(forbidden, || {
        match consumer.committed_offsets(list.clone(), POLL_INTERVAL * 5) {
            Ok(offsets) => Some(offsets.elements().iter().try_for_each(|it| it.error())),
            Err(error) if error.rdkafka_error_code() == Some(forbidden) => Some(Err(error)),
            // If librdkafka finds no group coordinator, the reason is an event of the consumer.
            Err(error) => Some(Err(consumer
                .poll(POLL_INTERVAL)
                .and_then(Result::err)
                .unwrap_or(error))),
        }
    })
}

/// Repeats the request until it succeeds, or fails with this code, for at most [`REQUEST_TIMEOUT`].
/// Ignores other codes: librdkafka also requires a `group.id` of the client that reads the topic,
/// and the broker may deny access to that group.
fn poll_until_known(
    forbidden: RDKafkaErrorCode,
    mut request: impl FnMut() -> Option<Result<(), KafkaError>>,
) -> Permission {
    let (started, mut reason) = (Instant::now(), "no answer".to_owned());
    while started.elapsed() < REQUEST_TIMEOUT {
        match request() {
            Some(Ok(())) => return Permission::Granted,
            Some(Err(error)) if error.rdkafka_error_code() == Some(forbidden) => {
                return Permission::Denied(forbidden);
            }
            // librdkafka reconnects by itself.
            Some(Err(error)) => reason = error.to_string(),
            None => {}
        }
    }
    Permission::Unknown(reason)
}
