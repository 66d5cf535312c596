//! Where the group stands in a log, and what to say where the log does not have that any more.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use oncegate_core::SourceError;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};

use crate::batch::{Fault, Queue};
use crate::made_anew::Topics;
use crate::outage::Outage;
use crate::shared::Begins;
use crate::topic_identity::{TopicIdentity, TopicMatch};

/// How long a question to the broker may hold up a rebalance.
const PATIENCE: Duration = Duration::from_secs(3);
/// The pause before a question that failed is asked again.
const AGAIN: Duration = Duration::from_millis(200);

/// A partition, and where it is to be read on.
pub(crate) type Standing = (String, i32, Begins);

/// Where the group stands in each of these partitions. What was not told while there was patience
/// is not known. `hear` listens to what librdkafka has logged.
pub(crate) fn ask<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: &TopicPartitionList,
    topics: &Topics,
    mut patience: Patience<'_>,
    hear: impl Fn(),
) -> Vec<Standing> {
    let committed = patience.insist("where the group stands", |patience| {
        committed(consumer, partitions.clone(), patience)
    });
    // What this client has heard may be older than what another member has committed.
    hear();
    let differing = committed
        .iter()
        .flat_map(|told| in_question(told, topics))
        .chain(topics.changed());
    for topic in differing.collect::<BTreeSet<String>>() {
        patience.insist("which log a topic is now", |patience| {
            consumer.fetch_metadata(Some(&topic), patience)
        });
        hear();
    }
    // After the response, so that it is not older than the topic ids. A member of a group has
    // metadata already, so nothing is waited for. rdkafka 0.39 never frees the string that
    // librdkafka returns, so it is read once per rebalance and not more often.
    topics.compare(consumer.client().fetch_cluster_id(Duration::ZERO));
    let told = |it: &TopicPartitionListElem<'_>| {
        committed
            .as_ref()?
            .get(&(it.topic().to_owned(), it.partition()))
    };
    let begins = |it: &TopicPartitionListElem<'_>| match told(it) {
        None => Begins::Unknown,
        // Its offset went with the topic before it.
        Some(None) if topics.was_recreated(it.topic()) => Begins::Anew,
        Some(None) => Begins::Nowhere,
        Some(Some(committed)) => begins_at(
            it.topic(),
            it.partition(),
            committed,
            topics.identity(it.topic()).as_ref(),
        ),
    };
    let mut standings: Vec<Standing> = partitions
        .elements()
        .iter()
        .map(|it| (it.topic().to_owned(), it.partition(), begins(it)))
        .collect();
    tell_added(
        &mut standings,
        &mut patience,
        |topic, patience| {
            let metadata = consumer.fetch_metadata(Some(topic), patience).ok()?;
            Some(
                metadata
                    .topics()
                    .iter()
                    .flat_map(|topic| topic.partitions())
                    .map(|it| it.id())
                    .collect(),
            )
        },
        |others, patience| {
            let mut list = TopicPartitionList::new();
            for (topic, partition) in others {
                list.add_partition(topic, *partition);
            }
            Some(committed_topics(
                &self::committed(consumer, list, patience).ok()?,
            ))
        },
    );
    standings
}

/// Where a partition with a committed offset begins, by the topic that the offset was committed
/// for. Warns where the offset is used although the topic has another id now.
fn begins_at(
    topic: &str,
    partition: i32,
    committed: &Committed,
    current: Option<&TopicIdentity>,
) -> Begins {
    let offset = committed.offset;
    // Metadata that names no topic comes from a person or another program, whose offset is used as
    // it is.
    let (Some(committed), Some(current)) = (&committed.identity, current) else {
        return Begins::At(offset);
    };
    let (cluster, committed_cluster) = (
        current.cluster_id.as_deref(),
        committed.cluster_id.as_deref(),
    );
    match committed.compare(current) {
        TopicMatch::Same => Begins::At(offset),
        TopicMatch::Recreated => Begins::Anew,
        TopicMatch::Replica => {
            tracing::warn!(
                topic,
                partition,
                offset,
                cluster,
                committed_cluster,
                "replica topic: the offset was committed on another cluster, for a topic with another id; reading continues at this \
                 offset, as the mirror has translated it; check that the mirror translates offsets (MirrorMaker 2: \
                 sync.group.offsets.enabled=true), and if ids come from positions, give the consumer another .scope(…)"
            );
            Begins::Replica(offset)
        }
        TopicMatch::Ambiguous => {
            tracing::warn!(
                topic,
                partition,
                offset,
                cluster,
                committed_cluster,
                "topic id differs and a cluster id is unknown: the topic is a replica or was deleted and created again; the committed \
                 offset is kept; if the topic was created again, reset the group's offsets: kafka-consumer-groups.sh --reset-offsets"
            );
            Begins::Ambiguous(offset)
        }
    }
}

/// The topics for which an offset of another log than the one that was heard of is committed:
/// either of the two may be the later one.
fn in_question(told: &Told, topics: &Topics) -> BTreeSet<String> {
    let differs = |topic: &str, it: &Option<Committed>| {
        let committed = it.as_ref().and_then(|it| it.identity.as_ref());
        committed.is_some_and(|committed| {
            topics
                .identity(topic)
                .is_none_or(|current| current.topic_id != committed.topic_id)
        })
    };
    told.iter()
        .filter(|((topic, _), it)| differs(topic, it))
        .map(|((topic, _), _)| topic.clone())
        .collect()
}

/// Where the group has an offset for another partition of a topic, those without one were added:
/// nothing of them was ever read.
fn tell_added(
    standings: &mut [Standing],
    patience: &mut Patience<'_>,
    mut partitions_of: impl FnMut(&str, Duration) -> Option<Vec<i32>>,
    topics_read: impl FnOnce(&[(String, i32)], Duration) -> Option<BTreeSet<String>>,
) {
    let without: BTreeSet<String> = standings
        .iter()
        .filter(|it| it.2 == Begins::Nowhere)
        .map(|it| it.0.clone())
        .collect();
    let mut others = Vec::new();
    for topic in without {
        let all = patience
            .spend(|patience| partitions_of(&topic, patience))
            .flatten()
            .unwrap_or_default();
        others.extend(all.into_iter().map(|partition| (topic.clone(), partition)));
    }
    if others.is_empty() {
        return;
    }
    let read = patience
        .spend(|patience| topics_read(&others, patience))
        .flatten()
        .unwrap_or_default();
    for (topic, _, begins) in standings.iter_mut().filter(|it| it.2 == Begins::Nowhere) {
        if read.contains(topic) {
            *begins = Begins::Added;
        }
    }
}

/// What is left of the time that the questions of one rebalance may take together.
pub(crate) struct Patience<'a> {
    left: Duration,
    /// Whether the source is about to leave, and reads nothing more of what it is assigned.
    is_leaving: &'a dyn Fn() -> bool,
}

impl<'a> Patience<'a> {
    /// So much of it, for as long as the source is not leaving.
    pub(crate) fn new(left: Duration, is_leaving: &'a dyn Fn() -> bool) -> Self {
        Self { left, is_leaving }
    }

    /// Asks for as long as one question may take; `None` once the time is over.
    fn spend<T>(&mut self, ask: impl FnOnce(Duration) -> T) -> Option<T> {
        if self.left.is_zero() || (self.is_leaving)() {
            return None;
        }
        let begun = Instant::now();
        let answer = ask(self.left.min(PATIENCE));
        self.left = self.left.saturating_sub(begun.elapsed());
        Some(answer)
    }

    /// Asks until there is an answer, or an error that does not pass, or the time is over.
    fn insist<T>(
        &mut self,
        what: &str,
        mut ask: impl FnMut(Duration) -> KafkaResult<T>,
    ) -> Option<T> {
        let mut is_told = false;
        loop {
            let answer = self.spend(|patience| {
                let begun = Instant::now();
                let answer = ask(patience);
                if answer.is_err() {
                    std::thread::sleep(AGAIN.min(patience.saturating_sub(begun.elapsed())));
                }
                answer
            });
            let error = match answer {
                Some(Ok(answer)) => return Some(answer),
                Some(Err(error)) => error,
                None => return None,
            };
            if !std::mem::replace(&mut is_told, true) {
                tracing::warn!(%error, "the broker does not say {what}");
            }
            if !error.rdkafka_error_code().is_some_and(passes) {
                return None;
            }
        }
    }
}

/// Whether a question may be answered soon that was answered like this.
fn passes(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    let coordinator = [
        E::WaitingForCoordinator,
        E::CoordinatorLoadInProgress,
        E::CoordinatorNotAvailable,
        E::NotCoordinator,
    ];
    Outage::is(code) || coordinator.contains(&code)
}

/// What the group has committed for a partition.
struct Committed {
    offset: i64,
    /// The topic that it was committed for, where the metadata names it.
    identity: Option<TopicIdentity>,
}

/// What the group has committed for each partition of which the broker says it; `None` where it has
/// committed nothing. A partition that is missing here may have any offset.
type Told = HashMap<(String, i32), Option<Committed>>;

/// # Errors
/// When the broker does not answer, or says of a partition that it will know soon.
fn committed<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    partitions: TopicPartitionList,
    patience: Duration,
) -> KafkaResult<Told> {
    let answer = consumer.committed_offsets(partitions, patience)?;
    let mut told = Told::new();
    for it in answer.elements() {
        match it.error() {
            Ok(()) => drop(told.insert((it.topic().to_owned(), it.partition()), said_of(&it))),
            Err(error) if error.rdkafka_error_code().is_some_and(passes) => return Err(error),
            // It looks like a partition without an offset. librdkafka asks by itself, and begins
            // nowhere before it knows.
            Err(error) => {
                tracing::warn!(%error, topic = it.topic(), partition = it.partition(), "the broker does not say where the group stands");
            }
        }
    }
    Ok(told)
}

fn said_of(it: &TopicPartitionListElem<'_>) -> Option<Committed> {
    let Offset::Offset(offset) = it.offset() else {
        return None;
    };
    // Whoever may commit for the group may have written anything; what is not UTF-8 is a panic
    // there.
    let metadata = catch_unwind(AssertUnwindSafe(|| it.metadata().to_owned())).unwrap_or_default();
    Some(Committed {
        offset,
        identity: TopicIdentity::parse(&metadata),
    })
}

fn committed_topics(told: &Told) -> BTreeSet<String> {
    told.iter()
        .filter(|(_, it)| it.is_some())
        .map(|((topic, _), _)| topic.clone())
        .collect()
}

/// The error of a group that is to begin nowhere by itself. Of a log that was cut under a running
/// member librdkafka does not say where that stood, as it does not where there is no offset: the
/// member knows.
pub(crate) fn lost<C: ConsumerContext>(
    queue: &Queue<C>,
    fault: &Fault,
    stood: Option<i64>,
) -> SourceError {
    let Fault {
        topic,
        partition,
        offset,
        ..
    } = fault;
    let Some(offset) = Some(*offset).filter(|offset| *offset >= 0).or(stood) else {
        return SourceError::misconfigured(
            "start",
            format!("the group has no offset for {topic}/{partition}"),
            "set the group's offsets, or use StartAt::Earliest",
        );
    };
    let first = queue
        .first_offset(topic, *partition)
        .map_or_else(String::new, |first| {
            format!(", which begins at offset {first}")
        });
    SourceError::misconfigured(
        "out_of_range",
        format!(
            "the group stands at offset {offset} of {topic}/{partition}, and that is not in the log{first}"
        ),
        "find out what was lost, then set the group's offsets: kafka-consumer-groups.sh --reset-offsets; or use OutOfRange::Earliest",
    )
}

/// The error of a group whose topic is not the one that it read before.
pub(crate) fn made_anew(topic: &str) -> SourceError {
    SourceError::misconfigured(
        "out_of_range",
        format!(
            "the topic `{topic}` was deleted and made anew: the group's offsets are those of another log"
        ),
        "start again: it is read from its beginning then, with another .scope(…) if ids come from positions; or use OutOfRange::Earliest",
    )
}

/// The error of a group whose committed offset may be that of a deleted topic, or a translated one.
pub(crate) fn ambiguous(topic: &str, partition: i32, offset: i64) -> SourceError {
    SourceError::misconfigured(
        "out_of_range",
        format!(
            "the group's offset {offset} of {topic}/{partition} was committed for a topic with another id, and without a cluster id \
             nothing says whether `{topic}` is a replica of it or was deleted and created again"
        ),
        "set the group's offsets: kafka-consumer-groups.sh --reset-offsets; or use OutOfRange::Earliest, which keeps the offset",
    )
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rdkafka::consumer::CommitMode;
    use rdkafka::error::KafkaError;
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::DefaultProducerContext;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::context::Context;

    fn patience(left: Duration) -> Patience<'static> {
        Patience::new(left, &|| false)
    }

    fn nowhere(topics: usize) -> Vec<Standing> {
        (0..topics)
            .map(|topic| (format!("t{topic}"), 1, Begins::Nowhere))
            .collect()
    }

    #[test]
    fn what_has_no_offset_while_its_topic_is_read_was_added() {
        let mut standings = nowhere(2);
        standings.push(("t0".to_owned(), 2, Begins::Anew));
        let read = |others: &[(String, i32)], _| {
            assert_eq!(others.len(), 4);
            Some(BTreeSet::from(["t1".to_owned()]))
        };
        tell_added(
            &mut standings,
            &mut patience(PATIENCE),
            |_, _| Some(vec![0, 1]),
            read,
        );
        assert_eq!(
            standings.iter().map(|it| it.2).collect::<Vec<_>>(),
            [Begins::Nowhere, Begins::Added, Begins::Anew]
        );
    }

    #[test]
    fn a_broker_that_does_not_answer_costs_the_time_of_all_questions_once() {
        let (mut standings, mut asked) = (nowhere(50), 0);
        let in_vain = |_: &str, patience: Duration| {
            asked += 1;
            std::thread::sleep(patience);
            None
        };
        tell_added(
            &mut standings,
            &mut patience(Duration::from_millis(20)),
            in_vain,
            |_, _| unreachable!("nothing is known"),
        );
        assert_eq!(asked, 1);
        let mut twice = patience(PATIENCE * 2);
        assert_eq!(
            twice.spend(|patience| patience),
            Some(PATIENCE),
            "one question does not take it all"
        );
    }

    #[test]
    fn a_question_is_asked_again_for_as_long_as_it_may_be_answered() {
        let failed = |code| Err(KafkaError::OffsetFetch(code));
        let mut answers = [
            failed(RDKafkaErrorCode::OperationTimedOut),
            failed(RDKafkaErrorCode::NotCoordinator),
            Ok(7),
        ]
        .into_iter();
        assert_eq!(
            patience(PATIENCE * 20)
                .insist("what", |_| answers.next().expect("no more than needed")),
            Some(7)
        );
        let mut answers = [failed(RDKafkaErrorCode::GroupAuthorizationFailed)].into_iter();
        assert_eq!(
            patience(PATIENCE).insist("what", |_| answers.next().expect("once")),
            None::<i32>
        );
        let in_vain = |patience| {
            std::thread::sleep(patience);
            failed(RDKafkaErrorCode::OperationTimedOut)
        };
        assert_eq!(
            patience(Duration::from_millis(20)).insist("what", in_vain),
            None::<i32>
        );
    }

    #[test]
    fn who_leaves_asks_nothing_more() {
        let mut patience = Patience::new(PATIENCE, &|| true);
        assert_eq!(
            patience.spend(|_| unreachable!("nobody reads what it would be about")),
            None::<()>
        );
    }

    /// A client of librdkafka's own small broker, with all that it logs in a queue of its own.
    fn client(brokers: &str) -> (Arc<BaseConsumer<Context>>, Queue<Context>) {
        let kafka = crate::Kafka::topic("t").brokers(brokers).group("g");
        let context = Context::new(Arc::default(), &kafka, Arc::new(Outage::of(brokers)));
        let consumer: BaseConsumer<Context> = kafka
            .consumer_config()
            .create_with_context(context)
            .expect("a client");
        let consumer = Arc::new(consumer);
        let queue = Queue::new(&consumer).expect("memory");
        (consumer, queue)
    }

    const OTHER: &str = "q5BZ55PYTTyxda8B1C5Amg";

    fn partition() -> TopicPartitionList {
        let mut partitions = TopicPartitionList::new();
        partitions.add_partition("t", 0);
        partitions
    }

    fn commit(consumer: &BaseConsumer<Context>, offset: i64, identity: &TopicIdentity) {
        let mut list = partition();
        list.set_partition_offset("t", 0, Offset::Offset(offset))
            .expect("an offset");
        list.find_partition("t", 0)
            .expect("it was added")
            .set_metadata(identity.to_string());
        consumer.commit(&list, CommitMode::Sync).expect("committed");
    }

    /// The identity of the topic, as the broker reports it.
    fn identity(consumer: &BaseConsumer<Context>, queue: &Queue<Context>) -> TopicIdentity {
        consumer
            .fetch_metadata(Some("t"), PATIENCE * 20)
            .expect("an answer");
        queue.hear();
        let topics = &consumer.context().topics;
        topics.compare(consumer.client().fetch_cluster_id(PATIENCE));
        let identity = topics.identity("t").expect("the response has it");
        assert!(identity.cluster_id.is_some());
        identity
    }

    /// Where a client stands that has heard of this topic last, or of none.
    fn standing_of(brokers: &str, heard: Option<&str>) -> Begins {
        let (consumer, queue) = client(brokers);
        let topics = &consumer.context().topics;
        heard.iter().for_each(|id| {
            topics.hear(&format!(
                "Topic t changed id from AAAAAAAAAAAAAAAAAAAAAA to {id}"
            ))
        });
        ask(
            &*consumer,
            &partition(),
            topics,
            patience(PATIENCE * 20),
            || queue.hear(),
        )[0]
        .2
    }

    #[test]
    fn what_is_not_in_the_log_is_out_of_range_wherever_it_is_known_where_the_group_stands() {
        let (_consumer, queue) = client("127.0.0.1:1");
        let named = |offset, stood| {
            let code = RDKafkaErrorCode::AutoOffsetReset;
            match lost(
                &queue,
                &Fault {
                    topic: Arc::from("t"),
                    partition: 3,
                    offset,
                    code,
                },
                stood,
            ) {
                SourceError::Misconfigured {
                    setting, problem, ..
                } => (setting, problem),
                other => panic!("{other:?}"),
            }
        };
        let (setting, problem) = named(9, Some(7));
        assert!(
            setting == "out_of_range" && problem.contains("at offset 9 of t/3"),
            "{setting}: {problem}"
        );
        // A log that lost its end under a running member.
        let (setting, problem) = named(-1001, Some(7));
        assert!(
            setting == "out_of_range" && problem.contains("at offset 7 of t/3"),
            "{setting}: {problem}"
        );
        assert_eq!(named(-1001, None).0, "start");
    }

    /// An answer without an error of its own, as brokers gave it before Kafka 0.11: each partition
    /// bears the error.
    fn says_it_of_each_partition(
        cluster: &MockCluster<'_, DefaultProducerContext>,
        error: RDKafkaRespErr,
    ) {
        cluster
            .apiversion(RDKafkaApiKey::OffsetFetch, Some(0), Some(1))
            .expect("an older broker");
        cluster.request_errors(RDKafkaApiKey::OffsetFetch, &[error]);
    }

    #[test]
    fn a_partition_of_which_the_broker_does_not_say_it_is_no_partition_without_an_offset() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let (consumer, queue) = client(&brokers);
        commit(&consumer, 7, &identity(&consumer, &queue));
        says_it_of_each_partition(
            &cluster,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS,
        );
        assert_eq!(
            standing_of(&brokers, None),
            Begins::At(7),
            "it is asked again"
        );
        says_it_of_each_partition(
            &cluster,
            RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
        );
        assert_eq!(standing_of(&brokers, None), Begins::Unknown);
        assert_eq!(standing_of(&brokers, None), Begins::At(7));
    }

    /// A rebalance waits behind whatever stands in the main queue before it, and of a topic with
    /// many partitions, one of which has no leader, there are more lines than are served.
    #[test]
    fn what_librdkafka_logs_stands_in_no_rebalances_way() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 300, 1).expect("a topic");
        let (consumer, queue) = client(&cluster.bootstrap_servers());
        consumer
            .fetch_metadata(Some("t"), PATIENCE * 20)
            .expect("an answer");
        let topics = &consumer.context().topics;
        (0..100).for_each(|_| drop(consumer.poll(Duration::from_millis(1))));
        assert_eq!(topics.identity("t"), None, "it came through the main queue");
        queue.hear();
        assert!(topics.identity("t").is_some(), "nobody hears it");
    }

    #[test]
    fn an_offset_of_a_log_that_was_not_heard_of_yet_is_believed_once_the_broker_says_that_it_is_this_one()
     {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let (consumer, queue) = client(&brokers);
        let current = identity(&consumer, &queue);
        let id = &*current.topic_id;
        commit(&consumer, 7, &current);
        assert_eq!(standing_of(&brokers, Some(id)), Begins::At(7));
        assert_eq!(
            standing_of(&brokers, Some(OTHER)),
            Begins::At(7),
            "what it had heard is old"
        );
        assert_eq!(standing_of(&brokers, None), Begins::At(7));
        let committed = |cluster_id| TopicIdentity {
            topic_id: OTHER.into(),
            cluster_id,
        };
        for (cluster_id, begins) in [
            (current.cluster_id.clone(), Begins::Anew),
            (Some("b25jZWdhdGUta2Fma2EtMg".into()), Begins::Replica(8)),
            (None, Begins::Ambiguous(8)),
        ] {
            commit(&consumer, 8, &committed(cluster_id));
            assert_eq!(
                [standing_of(&brokers, Some(id)), standing_of(&brokers, None)],
                [begins; 2]
            );
        }
    }
}
