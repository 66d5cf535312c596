//! What the user may do with what is consumed, as far as a question that changes nothing shows it.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

/// How long an answer is waited for: a client that has just been made connects first.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long one turn of it takes.
const TURN: Duration = Duration::from_millis(200);

/// What a broker says.
pub(super) enum Says {
    Yes,
    /// With this answer.
    No(RDKafkaErrorCode),
    /// Nothing, or something else that may pass.
    Nothing(String),
}

/// Whether the topic may be read: it is asked for what stands behind its last message. That needs
/// the same right as reading, joins no group, moves no offset, and brings nothing unless a message
/// comes meanwhile.
pub(super) fn read(consumer: &BaseConsumer, topic: &str, partition: i32) -> Says {
    let mut end = TopicPartitionList::new();
    let asked = end
        .add_partition_offset(topic, partition, Offset::End)
        .and_then(|()| consumer.assign(&end));
    if let Err(error) = asked {
        return Says::Nothing(error.to_string());
    }
    let says = until_told(
        RDKafkaErrorCode::TopicAuthorizationFailed,
        || match consumer.poll(TURN) {
            Some(Ok(_) | Err(KafkaError::PartitionEOF(_))) => Some(Ok(())),
            Some(Err(error)) => Some(Err(error)),
            None => None,
        },
    );
    // Whoever asks next begins without it. It fails only where the client itself has, and then the
    // next question says so.
    let _ = consumer.assign(&TopicPartitionList::new());
    says
}

/// Whether the group of this consumer may be seen, by asking how far it has read. Who may read by a
/// group may also see it; the reverse does not hold, and only joining the group would tell.
pub(super) fn see_group(consumer: &BaseConsumer, topic: &str, partition: i32) -> Says {
    let mut list = TopicPartitionList::new();
    list.add_partition(topic, partition);
    let forbidden = RDKafkaErrorCode::GroupAuthorizationFailed;
    until_told(forbidden, || {
        match consumer.committed_offsets(list.clone(), TURN * 5) {
            Ok(told) => Some(told.elements().iter().try_for_each(|it| it.error())),
            Err(error) if error.rdkafka_error_code() == Some(forbidden) => Some(Err(error)),
            // Where nobody says who keeps the group's offsets, the reason stands in the queue of
            // the consumer.
            Err(error) => Some(Err(consumer
                .poll(TURN)
                .and_then(Result::err)
                .unwrap_or(error))),
        }
    })
}

/// Asks until the answer is yes, or no with this code. The reader has a group for the name alone,
/// which may be forbidden, too.
fn until_told(
    forbidden: RDKafkaErrorCode,
    mut ask: impl FnMut() -> Option<Result<(), KafkaError>>,
) -> Says {
    let (begun, mut said) = (Instant::now(), "no answer".to_owned());
    while begun.elapsed() < PATIENCE {
        match ask() {
            Some(Ok(())) => return Says::Yes,
            Some(Err(error)) if error.rdkafka_error_code() == Some(forbidden) => {
                return Says::No(forbidden);
            }
            // The client connects again by itself.
            Some(Err(error)) => said = error.to_string(),
            None => {}
        }
    }
    Says::Nothing(said)
}
