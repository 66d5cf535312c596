//! Fetches committed offsets, and determines the start position of each assigned partition.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use oncegate_core::SourceError;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaResult;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};

use super::batch::{MessageQueue, PartitionError};
use super::log::log_error;
use super::time_budget::{TimeBudget, is_transient};
use super::topic_ids::TopicIds;
use super::{cluster_id, commit_metadata};
use crate::partition::{CommittedOffset, StartPosition, TopicIdentity};
use crate::settings::StartAt;

pub(crate) type PartitionStart = (String, i32, StartPosition);

/// Returns the start position of each of these partitions: `Unknown` if its committed offset is not
/// received within the time budget, or is refused. `forward_log` passes librdkafka's log lines,
/// which contain the topic ids, to `topics`.
pub(crate) fn start_positions<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &TopicPartitionList,
    topics: &TopicIds,
    budget: &mut TimeBudget<'_>,
    forward_log: impl Fn(),
) -> Vec<PartitionStart> {
    let committed = budget.retry("committed offsets", |budget| {
        committed(consumer, partitions.clone(), budget)
    });
    // Another member may have committed a newer topic id than this client has received. So the
    // topics whose committed id differs from the received one are requested again. So is a topic whose
    // id has changed: the cluster id, which comes with the reply, is then not older than that id.
    forward_log();
    let to_verify = committed
        .iter()
        .flat_map(|committed| topics_to_verify(committed, topics))
        .chain(topics.changed());
    for topic in to_verify.collect::<BTreeSet<String>>() {
        budget.retry("topic metadata", |budget| {
            consumer.fetch_metadata(Some(&topic), budget)
        });
        forward_log();
    }
    // The cluster id is read after the topic ids, so that it is not older than the topic ids. A
    // member of a group has received metadata, so the cluster id is available without waiting.
    topics.compare(cluster_id::fetch(consumer, Duration::ZERO));
    let committed_of = |it: &TopicPartitionListElem<'_>| {
        committed
            .as_ref()?
            .get(&(it.topic().to_owned(), it.partition()))
    };
    let start = |it: &TopicPartitionListElem<'_>| match committed_of(it) {
        None => StartPosition::Unknown,
        // Kafka deletes the committed offsets of a topic with the topic.
        Some(None) if topics.was_recreated(it.topic()) => StartPosition::Recreated,
        Some(None) => StartPosition::NoOffset,
        Some(Some(committed)) => start_position(
            it.topic(),
            it.partition(),
            committed,
            topics.identity(it.topic()).as_ref(),
        ),
    };
    let mut starts: Vec<PartitionStart> = partitions
        .elements()
        .iter()
        .map(|it| (it.topic().to_owned(), it.partition(), start(it)))
        .collect();
    resolve_without_offset(
        &mut starts,
        budget,
        |topic, budget| {
            let metadata = consumer.fetch_metadata(Some(topic), budget).ok()?;
            Some(
                metadata
                    .topics()
                    .iter()
                    .flat_map(|topic| topic.partitions())
                    .map(|it| it.id())
                    .collect(),
            )
        },
        |partitions, budget| {
            let mut list = TopicPartitionList::new();
            for (topic, partition) in partitions {
                list.add_partition(topic, *partition);
            }
            self::committed(consumer, list, budget).ok()
        },
        |topic| topics.identity(topic),
    );
    starts
}

/// Fetches the log start offset of each partition that is read from its beginning because it has no
/// committed offset: `NoOffset` with [`StartAt::Earliest`], and `AddedPartition`. Empty if no broker
/// answers within the time budget.
///
/// The assignment commits these offsets. Otherwise only partitions with messages would get a
/// committed offset, and the next assignment would treat empty partitions as added ones.
pub(crate) fn log_starts<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    starts: &[PartitionStart],
    policy: StartAt,
    budget: &mut TimeBudget<'_>,
) -> HashMap<(String, i32), i64> {
    let is_read_from_beginning = |start| match start {
        StartPosition::NoOffset => policy == StartAt::Earliest,
        start => start == StartPosition::AddedPartition,
    };
    let mut list = TopicPartitionList::new();
    for (topic, partition, start) in starts {
        if is_read_from_beginning(*start) {
            // The value of `Beginning`, -2, is the timestamp that requests the log start offset.
            log_error(
                "cannot request the log start offset of a partition",
                list.add_partition_offset(topic, *partition, Offset::Beginning),
            );
        }
    }
    if list.count() == 0 {
        return HashMap::new();
    }
    let answer = budget.request(|budget| consumer.offsets_for_times(list, budget));
    let answer = match answer {
        Some(Ok(answer)) => answer,
        Some(Err(error)) => {
            tracing::debug!(%error, "no response with log start offsets");
            return HashMap::new();
        }
        None => return HashMap::new(),
    };
    answer
        .elements()
        .iter()
        .filter_map(|it| match (it.error(), it.offset()) {
            (Ok(()), Offset::Offset(offset)) => {
                Some(((it.topic().to_owned(), it.partition()), offset))
            }
            _ => None,
        })
        .collect()
}

/// The start position of a partition with a committed offset. Logs a warning if the offset is used
/// although the topic's id has changed.
fn start_position(
    topic: &str,
    partition: i32,
    committed: &CommittedOffset,
    current: Option<&TopicIdentity>,
) -> StartPosition {
    let offset = committed.offset;
    let cluster_of = |it: Option<&TopicIdentity>| it.and_then(|it| it.cluster_id.clone());
    let (cluster, committed_cluster) =
        (cluster_of(current), cluster_of(committed.identity.as_ref()));
    let start = StartPosition::from_committed(committed, current);
    match start {
        StartPosition::Mirrored(_) => tracing::warn!(
            topic,
            partition,
            offset,
            cluster = cluster.as_deref(),
            committed_cluster = committed_cluster.as_deref(),
            "replica topic: the offset was committed on another cluster, for a topic with another id; reading continues at this \
             offset; check that the mirror translates offsets (MirrorMaker 2: \
             sync.group.offsets.enabled=true), and with IdSource::position(), give the consumer another .scope(…)"
        ),
        StartPosition::Ambiguous(_) => tracing::warn!(
            topic,
            partition,
            offset,
            cluster = cluster.as_deref(),
            committed_cluster = committed_cluster.as_deref(),
            "topic id differs and a cluster id is unknown: the topic is a replica or was deleted and created again; reading continues at the \
             committed offset; if the topic was created again, reset the group's offsets: kafka-consumer-groups.sh --reset-offsets"
        ),
        _ => {}
    }
    start
}

/// The topics with a committed offset whose metadata has another topic id than this client has
/// received. Either id may be the newer one.
fn topics_to_verify(committed: &CommittedOffsets, topics: &TopicIds) -> BTreeSet<String> {
    let differs = |topic: &str, it: &Option<CommittedOffset>| {
        let committed = it.as_ref().and_then(|it| it.identity.as_ref());
        committed.is_some_and(|committed| {
            topics
                .identity(topic)
                .is_none_or(|current| current.topic_id != committed.topic_id)
        })
    };
    committed
        .iter()
        .filter(|((topic, _), it)| differs(topic, it))
        .map(|((topic, _), _)| topic.clone())
        .collect()
}

/// Determines the start of the partitions without a committed offset, from the committed offsets of
/// all partitions of their topics, which are requested here. If this response has an offset for
/// such a partition itself, the partition starts at this offset.
fn resolve_without_offset(
    starts: &mut [PartitionStart],
    budget: &mut TimeBudget<'_>,
    mut partitions_of: impl FnMut(&str, Duration) -> Option<Vec<i32>>,
    committed_of: impl FnOnce(&[(String, i32)], Duration) -> Option<CommittedOffsets>,
    identity_of: impl Fn(&str) -> Option<TopicIdentity>,
) {
    let topics: BTreeSet<String> = starts
        .iter()
        .filter(|it| it.2 == StartPosition::NoOffset)
        .map(|it| it.0.clone())
        .collect();
    let mut all_partitions = Vec::new();
    for topic in topics {
        let partitions = budget
            .request(|budget| partitions_of(&topic, budget))
            .flatten()
            .unwrap_or_default();
        all_partitions.extend(
            partitions
                .into_iter()
                .map(|partition| (topic.clone(), partition)),
        );
    }
    if all_partitions.is_empty() {
        return;
    }
    let committed = budget
        .request(|budget| committed_of(&all_partitions, budget))
        .flatten()
        .unwrap_or_default();
    for (topic, partition, start) in starts
        .iter_mut()
        .filter(|it| it.2 == StartPosition::NoOffset)
    {
        let current = identity_of(topic);
        if let Some(Some(own_offset)) = committed.get(&(topic.clone(), *partition)) {
            *start = start_position(topic, *partition, own_offset, current.as_ref());
            continue;
        }
        let of_topic: Vec<&CommittedOffset> = committed
            .iter()
            .filter(|((it, _), _)| it == topic)
            .filter_map(|(_, it)| it.as_ref())
            .collect();
        *start = StartPosition::without_offset(&of_topic, current.as_ref());
    }
}

/// The coordinator's answer for each partition: its committed offset, or `None` if it has none. The
/// offset of a partition without an entry is unknown.
type CommittedOffsets = HashMap<(String, i32), Option<CommittedOffset>>;

/// Fetches the committed offsets of these partitions.
///
/// # Errors
/// If the coordinator does not answer, or returns a transient error for a partition.
fn committed<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: TopicPartitionList,
    budget: Duration,
) -> KafkaResult<CommittedOffsets> {
    let answer = consumer.committed_offsets(partitions, budget)?;
    let mut committed = CommittedOffsets::new();
    for it in answer.elements() {
        match it.error() {
            Ok(()) => drop(committed.insert(
                (it.topic().to_owned(), it.partition()),
                parse_committed(&it),
            )),
            Err(error) if error.rdkafka_error_code().is_some_and(is_transient) => {
                return Err(error);
            }
            // The partition gets no entry, because the element looks like that of a partition
            // without a committed offset. librdkafka fetches the offset itself before it reads.
            Err(error) => {
                tracing::warn!(%error, topic = it.topic(), partition = it.partition(), "cannot fetch the committed offset of the partition; librdkafka fetches it before it reads; check the group coordinator, and the rights Read on the group and Describe on the topic");
            }
        }
    }
    Ok(committed)
}

fn parse_committed(it: &TopicPartitionListElem<'_>) -> Option<CommittedOffset> {
    let Offset::Offset(offset) = it.offset() else {
        return None;
    };
    Some(CommittedOffset {
        offset,
        identity: TopicIdentity::parse(&commit_metadata::read(it)),
    })
}

/// The error that ends the source if the offset of a partition is not in the log and the policy is
/// `OutOfRange::Error`. If `error` has no offset, the log was truncated while it was read, or the
/// group has no committed offset. `position` distinguishes the two: it is this member's position in
/// the partition, or `None` if the member has read no message and knows no offset to start at.
pub(crate) fn out_of_range<C: ConsumerContext>(
    queue: &MessageQueue<C>,
    error: &PartitionError,
    position: Option<i64>,
) -> SourceError {
    let PartitionError {
        topic,
        partition,
        offset,
        ..
    } = error;
    let Some(offset) = Some(*offset).filter(|offset| *offset >= 0).or(position) else {
        return SourceError::misconfigured(
            "start",
            format!("the group has no committed offset for {topic}/{partition}"),
            "set the group's offsets, or use StartAt::Earliest",
        );
    };
    let log_start = queue
        .log_start_offset(topic, *partition)
        .map_or_else(String::new, |offset| {
            format!(", which starts at offset {offset}")
        });
    SourceError::misconfigured(
        "out_of_range",
        format!("the group's offset {offset} of {topic}/{partition} is not in the log{log_start}"),
        "find out which messages are lost, then reset the group's offsets: kafka-consumer-groups.sh --reset-offsets; or use OutOfRange::Earliest with StartAt::Earliest",
    )
}

/// The error that ends the source if the topic was recreated and the policy is `OutOfRange::Error`.
pub(crate) fn recreated(topic: &str) -> SourceError {
    SourceError::misconfigured(
        "out_of_range",
        format!(
            "the topic `{topic}` was deleted and created again: the group's offsets belong to the deleted topic"
        ),
        "restart to read it from its beginning, with another .scope(…) if the consumer uses IdSource::position(); or use OutOfRange::Earliest with StartAt::Earliest",
    )
}

/// The error that ends the source if the committed offset belongs either to a deleted topic or to
/// the original of a mirrored topic, and the policy is `OutOfRange::Error`.
pub(crate) fn ambiguous(topic: &str, partition: i32, offset: i64) -> SourceError {
    SourceError::misconfigured(
        "out_of_range",
        format!(
            "the group's offset {offset} of {topic}/{partition} was committed for a topic with another id, and a cluster id is \
             unknown: `{topic}` is a replica of that topic, or was deleted and created again"
        ),
        "reset the group's offsets: kafka-consumer-groups.sh --reset-offsets; or use OutOfRange::Earliest with StartAt::Earliest, which keeps the offset",
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rdkafka::consumer::CommitMode;
    use rdkafka::error::RDKafkaErrorCode;
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::client::callbacks::{CallbackContext, GroupConsumer};
    use crate::client::time_budget::REQUEST_TIMEOUT;

    fn budget(left: Duration) -> TimeBudget<'static> {
        TimeBudget::new(left, &|| false)
    }

    fn without_offset(topics: usize) -> Vec<PartitionStart> {
        (0..topics)
            .map(|topic| (format!("t{topic}"), 1, StartPosition::NoOffset))
            .collect()
    }

    fn topic_identity(topic_id: &str) -> TopicIdentity {
        TopicIdentity {
            topic_id: topic_id.into(),
            cluster_id: Some("b25jZWdhdGUta2Fma2EtMQ".into()),
        }
    }

    /// The start positions that `resolve_without_offset` determines. The topics `t0` and `t1` have
    /// two partitions each, of which the group has committed offset 7 for those in `committed`.
    fn resolved(
        starts: &mut [PartitionStart],
        committed: impl IntoIterator<Item = (&'static str, i32, Option<TopicIdentity>)>,
    ) -> Vec<StartPosition> {
        let committed = committed.into_iter().map(|(topic, partition, identity)| {
            let offset = Some(CommittedOffset {
                offset: 7,
                identity,
            });
            ((topic.to_owned(), partition), offset)
        });
        resolve_without_offset(
            starts,
            &mut budget(REQUEST_TIMEOUT),
            |_, _| Some(vec![0, 1]),
            |all, _| {
                assert_eq!(all.len(), 4);
                Some(committed.collect())
            },
            |_| Some(topic_identity(CURRENT)),
        );
        starts.iter().map(|it| it.2).collect()
    }

    const CURRENT: &str = "F2xUbUAeQcSPGv0PhIKTZg";

    #[test]
    fn a_partition_without_an_offset_of_a_topic_that_is_read_was_added() {
        let mut starts = without_offset(2);
        starts.push(("t0".to_owned(), 2, StartPosition::Recreated));
        assert_eq!(
            resolved(&mut starts, [("t1", 0, None)]),
            [
                StartPosition::NoOffset,
                StartPosition::AddedPartition,
                StartPosition::Recreated
            ]
        );
    }

    #[test]
    fn a_partition_whose_offset_arrives_with_the_second_response_was_not_added() {
        assert_eq!(
            resolved(&mut without_offset(2), [("t1", 0, None), ("t1", 1, None)]),
            [StartPosition::NoOffset, StartPosition::Committed(7)]
        );
    }

    #[test]
    fn a_partition_was_not_added_to_a_topic_if_the_group_has_offsets_of_a_deleted_one_only() {
        let (deleted, current) = (Some(topic_identity(OTHER)), Some(topic_identity(CURRENT)));
        assert_eq!(
            resolved(
                &mut without_offset(2),
                [("t0", 0, deleted.clone()), ("t1", 0, current)]
            ),
            [StartPosition::Recreated, StartPosition::AddedPartition]
        );
        assert_eq!(
            resolved(&mut without_offset(2), [("t0", 1, deleted)]),
            [StartPosition::Recreated, StartPosition::NoOffset]
        );
    }

    #[test]
    fn a_broker_that_does_not_answer_is_asked_only_once() {
        let (mut starts, mut requests) = (without_offset(50), 0);
        let times_out = |_: &str, budget: Duration| {
            requests += 1;
            std::thread::sleep(budget);
            None
        };
        resolve_without_offset(
            &mut starts,
            &mut budget(Duration::from_millis(20)),
            times_out,
            |_, _| unreachable!("no partition is known"),
            |_| None,
        );
        assert_eq!(requests, 1);
        let mut twice = budget(REQUEST_TIMEOUT * 2);
        assert_eq!(
            twice.request(|budget| budget),
            Some(REQUEST_TIMEOUT),
            "one request gets at most REQUEST_TIMEOUT"
        );
    }

    /// A client of librdkafka's mock cluster, with a queue for its log.
    fn client(brokers: &str) -> (Arc<GroupConsumer>, MessageQueue<CallbackContext>) {
        let kafka = crate::Kafka::topic("t").brokers(brokers).group("g");
        let consumer = CallbackContext::with_new_state(&kafka).consumer(&kafka);
        let consumer = Arc::new(consumer.expect("a client"));
        let queue = MessageQueue::new(&consumer).expect("memory");
        (consumer, queue)
    }

    const OTHER: &str = "q5BZ55PYTTyxda8B1C5Amg";

    fn partition() -> TopicPartitionList {
        let mut partitions = TopicPartitionList::new();
        partitions.add_partition("t", 0);
        partitions
    }

    fn commit(consumer: &GroupConsumer, offset: i64, identity: &TopicIdentity) {
        let mut list = partition();
        list.set_partition_offset("t", 0, Offset::Offset(offset))
            .expect("an offset");
        list.find_partition("t", 0)
            .expect("it was added")
            .set_metadata(identity.to_string());
        consumer.commit(&list, CommitMode::Sync).expect("committed");
    }

    /// The identity of the topic, as the broker reports it.
    fn identity(consumer: &GroupConsumer, queue: &MessageQueue<CallbackContext>) -> TopicIdentity {
        consumer
            .fetch_metadata(Some("t"), REQUEST_TIMEOUT * 20)
            .expect("an answer");
        queue.forward_log();
        let topics = &consumer.context().topics;
        topics.compare(cluster_id::fetch(consumer, REQUEST_TIMEOUT));
        let identity = topics.identity("t").expect("the response has it");
        assert!(identity.cluster_id.is_some());
        identity
    }

    /// The start position of partition 0 for a client that has seen this topic id, or no topic id.
    fn start_position_for(brokers: &str, known_id: Option<&str>) -> StartPosition {
        let (consumer, queue) = client(brokers);
        let topics = &consumer.context().topics;
        known_id.iter().for_each(|id| {
            topics.on_log_line(&format!(
                "Topic t changed id from AAAAAAAAAAAAAAAAAAAAAA to {id}"
            ))
        });
        start_positions(
            &*consumer,
            &partition(),
            topics,
            &mut budget(REQUEST_TIMEOUT * 20),
            || queue.forward_log(),
        )[0]
        .2
    }

    #[test]
    fn a_position_that_is_not_in_the_log_is_out_of_range_if_it_is_known() {
        let (_consumer, queue) = client("127.0.0.1:1");
        let error_for = |offset, position| {
            let code = RDKafkaErrorCode::AutoOffsetReset;
            match out_of_range(
                &queue,
                &PartitionError {
                    topic: Arc::from("t"),
                    partition: 3,
                    offset,
                    code,
                },
                position,
            ) {
                SourceError::Misconfigured {
                    setting, problem, ..
                } => (setting, problem),
                other => panic!("{other:?}"),
            }
        };
        let (setting, problem) = error_for(9, Some(7));
        assert!(
            setting == "out_of_range" && problem.contains("offset 9 of t/3 is not in the log"),
            "{setting}: {problem}"
        );
        // A log that was truncated while it was read.
        let (setting, problem) = error_for(-1001, Some(7));
        assert!(
            setting == "out_of_range" && problem.contains("offset 7 of t/3 is not in the log"),
            "{setting}: {problem}"
        );
        assert_eq!(error_for(-1001, None).0, "start");
    }

    /// A response without a top-level error, as brokers before Kafka 0.10.2 send it: each partition
    /// has the error.
    fn fail_each_partition(
        cluster: &MockCluster<'_, DefaultProducerContext>,
        error: RDKafkaRespErr,
    ) {
        cluster
            .apiversion(RDKafkaApiKey::OffsetFetch, Some(0), Some(1))
            .expect("an older broker");
        cluster.request_errors(RDKafkaApiKey::OffsetFetch, &[error]);
    }

    #[test]
    fn a_partition_with_an_error_is_not_a_partition_without_an_offset() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let (consumer, queue) = client(&brokers);
        commit(&consumer, 7, &identity(&consumer, &queue));
        fail_each_partition(
            &cluster,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        );
        assert_eq!(
            start_position_for(&brokers, None),
            StartPosition::Committed(7),
            "it is retried"
        );
        fail_each_partition(
            &cluster,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        );
        assert_eq!(start_position_for(&brokers, None), StartPosition::Unknown);
        assert_eq!(
            start_position_for(&brokers, None),
            StartPosition::Committed(7)
        );
    }

    /// The main queue delivers a rebalance after all earlier events. For a topic with many
    /// partitions, one of them without a leader, librdkafka writes log lines faster than the polling
    /// loop takes events from the queue, so log lines have a queue of their own.
    #[test]
    fn log_lines_do_not_delay_rebalances() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 300, 1).expect("a topic");
        let (consumer, queue) = client(&cluster.bootstrap_servers());
        consumer
            .fetch_metadata(Some("t"), REQUEST_TIMEOUT * 20)
            .expect("an answer");
        let topics = &consumer.context().topics;
        (0..100).for_each(|_| drop(consumer.poll(Duration::from_millis(1))));
        assert_eq!(
            topics.identity("t"),
            None,
            "the main queue has no log lines"
        );
        queue.forward_log();
        assert!(
            topics.identity("t").is_some(),
            "forward_log passes on the log lines"
        );
    }

    #[test]
    fn the_committed_topic_id_is_verified_with_a_metadata_request() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let (consumer, queue) = client(&brokers);
        let current = identity(&consumer, &queue);
        let id = &*current.topic_id;
        commit(&consumer, 7, &current);
        assert_eq!(
            start_position_for(&brokers, Some(id)),
            StartPosition::Committed(7)
        );
        assert_eq!(
            start_position_for(&brokers, Some(OTHER)),
            StartPosition::Committed(7),
            "this client has an outdated topic id"
        );
        assert_eq!(
            start_position_for(&brokers, None),
            StartPosition::Committed(7)
        );
        let committed = |cluster_id| TopicIdentity {
            topic_id: OTHER.into(),
            cluster_id,
        };
        for (cluster_id, start) in [
            (current.cluster_id.clone(), StartPosition::Recreated),
            (
                Some("b25jZWdhdGUta2Fma2EtMg".into()),
                StartPosition::Mirrored(8),
            ),
            (None, StartPosition::Ambiguous(8)),
        ] {
            commit(&consumer, 8, &committed(cluster_id));
            assert_eq!(
                [
                    start_position_for(&brokers, Some(id)),
                    start_position_for(&brokers, None)
                ],
                [start; 2]
            );
        }
    }
}
