//! Where the group stands in a log, and what to say where the log does not have that any more.

use std::collections::HashMap;
use std::time::Duration;

use oncegate_core::SourceError;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaResult;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::batch::{Fault, Queue};
use crate::shared::Begins;

/// How long a question to the broker may hold up a rebalance.
const PATIENCE: Duration = Duration::from_secs(3);

/// Where the group stands in each of these partitions.
pub(crate) fn ask<C: ConsumerContext>(consumer: &BaseConsumer<C>, partitions: &TopicPartitionList) -> Vec<(String, i32, Begins)> {
    let standing = committed(consumer, partitions.clone());
    if let Err(error) = &standing {
        tracing::warn!(%error, "the broker does not say where the group stands");
    }
    let standing = standing.ok();
    let begins = |topic: &str, partition| match &standing {
        None => Begins::Unknown,
        Some(standing) => standing.get(&(topic.to_owned(), partition)).map_or(Begins::Nowhere, |offset| Begins::At(*offset)),
    };
    let elements = partitions.elements();
    elements.iter().map(|it| (it.topic().to_owned(), it.partition(), begins(it.topic(), it.partition()))).collect()
}

/// Whether the group has an offset for another partition of the topic: then this one was added, and nothing of it was
/// ever read.
pub(crate) fn is_added<C: ConsumerContext>(consumer: &BaseConsumer<C>, topic: &str, partition: i32) -> bool {
    let Ok(metadata) = consumer.fetch_metadata(Some(topic), PATIENCE) else { return false };
    let mut others = TopicPartitionList::new();
    for other in metadata.topics().iter().flat_map(|topic| topic.partitions()).map(|it| it.id()).filter(|id| *id != partition) {
        others.add_partition(topic, other);
    }
    others.count() > 0 && committed(consumer, others).is_ok_and(|standing| !standing.is_empty())
}

fn committed<C: ConsumerContext>(consumer: &BaseConsumer<C>, partitions: TopicPartitionList) -> KafkaResult<HashMap<(String, i32), i64>> {
    let answer = consumer.committed_offsets(partitions, PATIENCE)?;
    let elements = answer.elements();
    Ok(elements
        .iter()
        .filter_map(|it| match it.offset() {
            Offset::Offset(offset) => Some(((it.topic().to_owned(), it.partition()), offset)),
            _ => None,
        })
        .collect())
}

/// The error of a group that is to begin nowhere by itself.
pub(crate) fn lost<C: ConsumerContext>(queue: &Queue<C>, fault: &Fault) -> SourceError {
    let Fault { topic, partition, offset, .. } = fault;
    if *offset < 0 {
        return SourceError::misconfigured(
            "start",
            format!("the group has no offset for {topic}/{partition}"),
            "set the group's offsets, or use StartAt::Earliest",
        );
    }
    let first = queue.first_offset(topic, *partition).map_or_else(String::new, |first| format!(", which begins at offset {first}"));
    SourceError::misconfigured(
        "out_of_range",
        format!("the group stands at offset {offset} of {topic}/{partition}, and that is not in the log{first}"),
        "find out what was lost, then set the group's offsets: kafka-consumer-groups.sh --reset-offsets; or use OutOfRange::Earliest",
    )
}

/// The error of a group whose topic is not the one that it read before.
pub(crate) fn made_anew(topic: &str) -> SourceError {
    SourceError::misconfigured(
        "out_of_range",
        format!("the topic `{topic}` was deleted and made anew: the group's offsets are those of another log"),
        "start again: it is read from its beginning then; or use OutOfRange::Earliest",
    )
}

/// The id of no topic, as librdkafka writes it.
const NO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

/// The topic that a line of librdkafka's log says has another id than before: it was deleted and made anew. librdkafka
/// reads on where it stood, and says it nowhere else.
pub(crate) fn with_another_id(line: &str) -> Option<&str> {
    let (before, ids) = line.split_once(" changed id from ")?;
    let (_, topic) = before.rsplit_once("Topic ")?;
    (!ids.starts_with(NO_ID)).then_some(topic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_with_another_id_is_told_from_one_that_is_seen_first() {
        let line = |from| format!("[thrd:main]: Topic a.Topic changed id from {from} to q5BZ55PYTTyxda8B1C5Amg");
        assert_eq!(with_another_id(&line("F2xUbUAeQcSPGv0PhIKTZg")), Some("a.Topic"));
        assert_eq!(with_another_id(&line(NO_ID)), None);
        assert_eq!(with_another_id("[thrd:main]: Topic a [0] Leader 1 Epoch 0"), None);
    }
}
