//! Detects permissions with requests that change nothing.

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

/// Checks Read on the topic by fetching past its last record: that needs the same permission, joins
/// no group, commits no offset, and returns nothing unless a record arrives meanwhile.
pub(super) fn read_topic(consumer: &BaseConsumer, topic: &str, partition: i32) -> Permission {
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

/// Checks access to the group by fetching its committed offsets, which needs Describe. Read implies
/// Describe; a user with Describe alone passes, because only joining the group would need Read.
pub(super) fn see_group(consumer: &BaseConsumer, topic: &str, partition: i32) -> Permission {
    let mut list = TopicPartitionList::new();
    list.add_partition(topic, partition);
    let forbidden = RDKafkaErrorCode::GroupAuthorizationFailed;
    poll_until_known(forbidden, || {
        match consumer.committed_offsets(list.clone(), POLL_INTERVAL * 5) {
            Ok(offsets) => Some(offsets.elements().iter().try_for_each(|it| it.error())),
            Err(error) if error.rdkafka_error_code() == Some(forbidden) => Some(Err(error)),
            // Without a group coordinator the reason is in the event queue of the consumer.
            Err(error) => Some(Err(consumer
                .poll(POLL_INTERVAL)
                .and_then(Result::err)
                .unwrap_or(error))),
        }
    })
}

/// Repeats the request until it is granted, or denied with this code. Other codes do not decide:
/// librdkafka requires a group name of the reader, too, and access to that group may be denied.
fn poll_until_known(
    forbidden: RDKafkaErrorCode,
    mut ask: impl FnMut() -> Option<Result<(), KafkaError>>,
) -> Permission {
    let (started, mut reason) = (Instant::now(), "no answer".to_owned());
    while started.elapsed() < REQUEST_TIMEOUT {
        match ask() {
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
