//! Where the group stands in a log, and what to say where the log does not have that any more.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::SourceError;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaResult;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};

use crate::batch::{Fault, Queue};
use crate::made_anew::{self, Topics};
use crate::shared::Begins;

/// How long a question to the broker may hold up a rebalance.
const PATIENCE: Duration = Duration::from_secs(3);

/// A partition, and where it is to be read on.
pub(crate) type Standing = (String, i32, Begins);

/// Where the group stands in each of these partitions. All questions together take no longer
/// than `bound`; what they have not told by then is not known.
pub(crate) fn ask<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &TopicPartitionList,
    topics: &Topics,
    bound: Duration,
) -> Vec<Standing> {
    let mut patience = Patience(bound);
    let committed = patience.spend(|patience| committed(consumer, partitions.clone(), patience));
    let committed = match committed {
        Some(Ok(committed)) => Some(committed),
        Some(Err(error)) => {
            tracing::warn!(%error, "the broker does not say where the group stands");
            None
        }
        None => None,
    };
    let begins = |it: &TopicPartitionListElem<'_>| match &committed {
        None => Begins::Unknown,
        Some(committed) => match committed.get(&(it.topic().to_owned(), it.partition())) {
            // Its offset went with the topic before it.
            None if topics.has_changed(it.topic()) => Begins::Anew,
            None => Begins::Nowhere,
            Some(Committed { id: Some(of), .. }) if topics.id(it.topic()).is_some_and(|now| now != *of) => Begins::Anew,
            Some(Committed { offset, .. }) => Begins::At(*offset),
        },
    };
    let mut standings: Vec<Standing> = partitions.elements().iter().map(|it| (it.topic().to_owned(), it.partition(), begins(it))).collect();
    tell_added(
        &mut standings,
        &mut patience,
        |topic, patience| {
            let metadata = consumer.fetch_metadata(Some(topic), patience).ok()?;
            Some(metadata.topics().iter().flat_map(|topic| topic.partitions()).map(|it| it.id()).collect())
        },
        |others, patience| {
            let mut list = TopicPartitionList::new();
            for (topic, partition) in others {
                list.add_partition(topic, *partition);
            }
            Some(committed_topics(&self::committed(consumer, list, patience).ok()?))
        },
    );
    standings
}

/// Where the group has an offset for another partition of a topic, those without one were added: nothing of them was ever read.
fn tell_added(
    standings: &mut [Standing],
    patience: &mut Patience,
    mut partitions_of: impl FnMut(&str, Duration) -> Option<Vec<i32>>,
    topics_read: impl FnOnce(&[(String, i32)], Duration) -> Option<BTreeSet<String>>,
) {
    let without: BTreeSet<String> = standings.iter().filter(|it| it.2 == Begins::Nowhere).map(|it| it.0.clone()).collect();
    let mut others = Vec::new();
    for topic in without {
        let all = patience.spend(|patience| partitions_of(&topic, patience)).flatten().unwrap_or_default();
        others.extend(all.into_iter().map(|partition| (topic.clone(), partition)));
    }
    if others.is_empty() {
        return;
    }
    let read = patience.spend(|patience| topics_read(&others, patience)).flatten().unwrap_or_default();
    for (topic, _, begins) in standings.iter_mut().filter(|it| it.2 == Begins::Nowhere) {
        if read.contains(topic) {
            *begins = Begins::Added;
        }
    }
}

/// What is left of the time that the questions of one rebalance may take together.
struct Patience(Duration);

impl Patience {
    /// Asks for as long as one question may take; `None` once the time is over.
    fn spend<T>(&mut self, ask: impl FnOnce(Duration) -> T) -> Option<T> {
        if self.0.is_zero() {
            return None;
        }
        let begun = Instant::now();
        let answer = ask(self.0.min(PATIENCE));
        self.0 = self.0.saturating_sub(begun.elapsed());
        Some(answer)
    }
}

/// What the group has committed for a partition.
struct Committed {
    offset: i64,
    /// Of the topic that it was committed for, where it says so.
    id: Option<Arc<str>>,
}

fn committed<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: TopicPartitionList,
    patience: Duration,
) -> KafkaResult<HashMap<(String, i32), Committed>> {
    let answer = consumer.committed_offsets(partitions, patience)?;
    let elements = answer.elements();
    Ok(elements
        .iter()
        .filter_map(|it| match it.offset() {
            Offset::Offset(offset) => {
                // Whoever may commit for the group may have written anything; what is not UTF-8 is a panic there.
                let metadata = catch_unwind(AssertUnwindSafe(|| it.metadata().to_owned())).unwrap_or_default();
                let id = made_anew::id_in(&metadata).map(Arc::from);
                Some(((it.topic().to_owned(), it.partition()), Committed { offset, id }))
            }
            _ => None,
        })
        .collect())
}

fn committed_topics(committed: &HashMap<(String, i32), Committed>) -> BTreeSet<String> {
    committed.keys().map(|(topic, _)| topic.clone()).collect()
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
        "start again: it is read from its beginning then, with another .scope(…) if ids come from positions; or use OutOfRange::Earliest",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere(topics: usize) -> Vec<Standing> {
        (0..topics).map(|topic| (format!("t{topic}"), 1, Begins::Nowhere)).collect()
    }

    #[test]
    fn what_has_no_offset_while_its_topic_is_read_was_added() {
        let mut standings = nowhere(2);
        standings.push(("t0".to_owned(), 2, Begins::Anew));
        let read = |others: &[(String, i32)], _| {
            assert_eq!(others.len(), 4);
            Some(BTreeSet::from(["t1".to_owned()]))
        };
        tell_added(&mut standings, &mut Patience(PATIENCE), |_, _| Some(vec![0, 1]), read);
        assert_eq!(standings.iter().map(|it| it.2).collect::<Vec<_>>(), [Begins::Nowhere, Begins::Added, Begins::Anew]);
    }

    #[test]
    fn a_broker_that_does_not_answer_costs_the_time_of_all_questions_once() {
        let (mut standings, mut asked) = (nowhere(50), 0);
        let in_vain = |_: &str, patience: Duration| {
            asked += 1;
            std::thread::sleep(patience);
            None
        };
        tell_added(&mut standings, &mut Patience(Duration::from_millis(20)), in_vain, |_, _| unreachable!("nothing is known"));
        assert_eq!(asked, 1);
        let mut patience = Patience(PATIENCE * 2);
        assert_eq!(patience.spend(|patience| patience), Some(PATIENCE), "one question does not take it all");
    }
}
