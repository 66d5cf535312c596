//! The polling thread: it alone speaks to the consumer group, and no handler can stop it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use oncegate_core::{SourceError, fault};
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::topic_partition_list::Offset;

use crate::assignment_wait::AssignmentWait;
use crate::batch::{self, Queue};
use crate::commits;
use crate::context::{Context, SEEK, for_a_person, how_they_leave};
use crate::kafka::{Kafka, OutOfRange};
use crate::refusal;
use crate::shared::{Leave, Phase, Shared};
use crate::standing;

/// How many events of the group are served in one turn.
const EVENTS: usize = 16;
/// How long one turn waits for a message. Rebalances wait as long.
const TURN: Duration = Duration::from_millis(50);
/// How long a client that is replaced may take to close before it is left behind, unless it is
/// without its group anyway.
const CLOSE: Duration = Duration::from_secs(10);
/// The pause before another client begins, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// How long a response with metadata is waited for.
const METADATA: Duration = Duration::from_secs(1);
/// How often it is looked whether markers of transactions are to be passed.
const LOOK: Duration = Duration::from_millis(500);

/// Joins the group.
///
/// # Errors
/// When librdkafka does not take the topics' names.
pub(crate) fn subscribe(
    consumer: &BaseConsumer<Context>,
    kafka: &Kafka,
) -> Result<(), SourceError> {
    let names: Vec<&str> = kafka.topics.iter().map(String::as_str).collect();
    consumer.subscribe(&names).map_err(|error| {
        SourceError::misconfigured("topic", error.to_string(), "name topics that exist")
    })
}

/// Serves the group until the source closes, then leaves it. A client that stalls or fails for good
/// is replaced by another one. Runs on a thread of its own.
pub(crate) fn run(kafka: Kafka, mut consumer: Arc<BaseConsumer<Context>>) {
    let Context {
        shared,
        outage,
        topics,
        ..
    } = &**consumer.context();
    let (shared, outage, topics) = (shared.clone(), outage.clone(), topics.clone());
    let _ended = Ended(shared.clone());
    let (mut pause, mut assignment) = (PAUSES.0, AssignmentWait::new(&kafka));
    loop {
        let begun = Instant::now();
        pause = match stay(consumer, &shared, &mut assignment) {
            Left::ForGood => return,
            // Others get to the group.
            Left::Alone => PAUSES.0,
            // One that fails again and again is not replaced in haste.
            Left::ForAnother if begun.elapsed() <= PAUSES.1 * 10 => (pause * 2).min(PAUSES.1),
            Left::ForAnother => PAUSES.0,
        };
        consumer = loop {
            let until = Instant::now() + pause;
            while Instant::now() < until {
                if shared.lock().phase() >= Phase::Closing {
                    return;
                }
                shared.wait(TURN);
            }
            let context =
                Context::new(shared.clone(), &kafka, outage.clone()).knowing(topics.clone());
            let created = kafka
                .consumer_config()
                .create_with_context(context)
                .map_err(refusal::of_setting);
            match created.and_then(|consumer| subscribe(&consumer, &kafka).map(|()| consumer)) {
                Ok(consumer) => break Arc::new(consumer),
                Err(error) => {
                    tracing::error!(%error, "there is no other Kafka client; trying again")
                }
            }
        };
    }
}

/// Why a client has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Left {
    /// The source closes.
    ForGood,
    /// Another one is to take its place.
    ForAnother,
    /// The same, because it is without its group.
    Alone,
}

/// The consumer is dropped when this returns, and has left the group if the source closes.
fn stay(
    consumer: Arc<BaseConsumer<Context>>,
    shared: &Shared,
    assignment: &mut AssignmentWait,
) -> Left {
    let Some(queue) = Queue::new(&consumer) else {
        shared.fail(SourceError::Unavailable(
            "librdkafka has no memory for a queue".into(),
        ));
        return Left::ForGood;
    };
    consumer.context().set_queue(Some(Arc::new(queue)));
    let mut looked = Instant::now();
    while shared.lock().phase() < Phase::Closing {
        serve(&consumer);
        compare_topics(&consumer);
        begin_anew(&consumer, shared);
        leave_cluster(&consumer, shared);
        if looked.elapsed() >= LOOK {
            look_for_a_fatal_error(&consumer, shared);
            consumer.context().pass_markers(&consumer);
            assignment.look(&shared.lock());
            looked = Instant::now();
        }
        commits::store(&consumer, shared);
        if shared.lock().wants_another() {
            return make_way(consumer, shared);
        }
        consumer.context().pump(TURN);
    }
    commits::store(&consumer, shared);
    // The queue holds the consumer: first the queue, then the consumer, which gives its partitions
    // back, commits and leaves when it is dropped. Not to be unsubscribed before: closing at once
    // after that never leaves.
    consumer.context().set_queue(None);
    drop(consumer);
    Left::ForGood
}

/// Lets what was handed out be settled, for a while, and leaves with that; whoever has the
/// partitions next delivers the rest again. A client that does not even close is left behind on a
/// thread of its own.
fn make_way(consumer: Arc<BaseConsumer<Context>>, shared: &Shared) -> Left {
    let mut state = shared.lock();
    // One that is alone could neither commit nor leave.
    let (left, close) = if state.is_suspected() {
        (Left::Alone, Duration::ZERO)
    } else {
        (Left::ForAnother, CLOSE)
    };
    let why = state.replacing().unwrap_or_default();
    drop(state);
    tracing::error!(
        why,
        "client replaced: the Kafka client does not do its work any more, and another one takes its place"
    );
    metrics::counter!(crate::metric::CLIENTS_REPLACED).increment(1);
    let context = consumer.context();
    let partitions = shared.lock().partitions();
    shared.give_up(
        &partitions,
        how_they_leave(&consumer),
        |epochs| context.drain(epochs),
        || commits::store(&consumer, shared),
    );
    context.is_replaced.store(true, Ordering::Relaxed);
    context.set_queue(None);
    let (closed, is_closed) = mpsc::channel();
    let closing = move || {
        drop(consumer);
        // Nobody may wait for it any more.
        let _ = closed.send(());
    };
    match std::thread::Builder::new()
        .name("oncegate-kafka-drop".into())
        .spawn(closing)
    {
        Ok(_) => drop(is_closed.recv_timeout(close)),
        Err(error) => tracing::error!(%error, "the old Kafka client was closed here"),
    }
    left
}

/// A client that failed for good does nothing any more. Another one takes its place, unless that
/// would fail the same way.
fn look_for_a_fatal_error(consumer: &BaseConsumer<Context>, shared: &Shared) {
    let Some((code, text)) = consumer.client().fatal_error() else {
        return;
    };
    match for_a_person(code, "the group's topics") {
        Some(fault) => shared.fail(fault),
        None => shared
            .lock()
            .ask_for_another(format!("it failed for good: {text}")),
    }
}

/// Reads the cluster id, and compares the topics whose id has changed. Takes in no message
/// meanwhile.
fn compare_topics(consumer: &BaseConsumer<Context>) {
    let topics = &consumer.context().topics;
    let changed = topics.changed();
    if changed.is_none() && topics.knows_cluster() {
        return;
    }
    // librdkafka handles responses one by one. Once this one has arrived, the cluster id of the
    // response with the new topic id is stored; without a response, it is stored long before the
    // time is over.
    if let Some(topic) = changed
        && let Err(error) = consumer.fetch_metadata(Some(&topic), METADATA)
    {
        tracing::debug!(%error, topic, "no metadata");
    }
    topics.compare(consumer.client().fetch_cluster_id(Duration::ZERO));
}

/// Ends all assignments, without a commit, once a topic is on another cluster or may be: their
/// positions are offsets of the topic on the cluster before. Another client joins the group, and
/// begins at the offsets that are committed on this cluster.
fn leave_cluster(consumer: &BaseConsumer<Context>, shared: &Shared) {
    let topics = &consumer.context().topics;
    for topic in topics.take_on_another_cluster() {
        let mut state = shared.lock();
        if state
            .outdated_assignments(&topic, topics.identity(&topic).as_ref())
            .is_empty()
        {
            continue;
        }
        let partitions = state.partitions();
        state.ask_for_another(format!(
            "the topic `{topic}` has another id, on another cluster or an unknown one"
        ));
        drop(state);
        shared.give_up(&partitions, Leave::Lost, |_| (), || ());
    }
}

/// Goes back to the beginning of topics that were deleted and made anew. librdkafka reads on where
/// it stood, and where the new log is longer than that, nobody would ever read what lies before.
/// And to what was not settled of a log that lost its end.
fn begin_anew(consumer: &BaseConsumer<Context>, shared: &Shared) {
    let context = consumer.context();
    for topic in context.topics.take_made_anew() {
        // With either policy, since an offset of the old log would be committed for the new one,
        // and begun at after a restart.
        let partitions = shared.begin_anew(&topic, context.topics.identity(&topic));
        metrics::counter!(crate::metric::TOPICS_MADE_ANEW).increment(partitions as u64);
        match context.out_of_range {
            // Where it was lost meanwhile, it is told when it is assigned again.
            OutOfRange::Error if partitions == 0 => {}
            OutOfRange::Error => shared.fail(standing::made_anew(&topic)),
            OutOfRange::Earliest => {
                tracing::error!(
                    topic,
                    "topic made anew: it was deleted and created again; reading it from its beginning"
                );
            }
        }
    }
    shared.go_back(|topic, partition, offset| {
        fault::point("kafka.seek.before");
        let sought = consumer.seek(topic, partition, Offset::Offset(offset), SEEK);
        fault::point("kafka.seek.after");
        sought
    });
}

/// Serves rebalances and errors, and listens to what librdkafka has logged.
fn serve(consumer: &BaseConsumer<Context>) {
    let context = consumer.context();
    context.hear();
    for _ in 0..EVENTS {
        // Nothing may mean that there is none left, or that one was served by a callback.
        let Some(event) = consumer.poll(Duration::ZERO) else {
            continue;
        };
        match event {
            // Not to be seen, since partitions are forwarded before they are assigned; not to be
            // lost either.
            Ok(message) => {
                if let Some(queue) = context.queue() {
                    context.take_in(batch::copy(&message), &queue);
                }
            }
            Err(KafkaError::MessageConsumptionFatal(code)) => {
                context.judge(code, "the client");
                look_for_a_fatal_error(consumer, &context.shared);
            }
            Err(KafkaError::MessageConsumption(code)) => context.judge(code, "the group"),
            Err(error) => tracing::warn!(%error, "Kafka"),
        }
    }
}

/// Says that the thread is over, also when it panicked, so that nobody waits for it.
struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.enter(Phase::Ended);
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::{Incoming, Limit};
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;
    use crate::outage::Outage;

    /// No step takes longer than this, however busy the machine.
    const BOUND: Duration = Duration::from_secs(60);

    fn client(kafka: &Kafka, brokers: &str) -> (Arc<Shared>, Arc<BaseConsumer<Context>>) {
        let (shared, outage) = (Arc::<Shared>::default(), Arc::new(Outage::of(brokers)));
        let context = Context::new(shared.clone(), kafka, outage);
        let consumer: Arc<BaseConsumer<Context>> = Arc::new(
            kafka
                .consumer_config()
                .create_with_context(context)
                .expect("a client"),
        );
        consumer
            .context()
            .set_queue(Some(Arc::new(Queue::new(&consumer).expect("memory"))));
        subscribe(&consumer, kafka).expect("a topic");
        (shared, consumer)
    }

    #[test]
    fn a_client_that_is_without_its_group_while_others_are_not_is_replaced_unless_it_comes_back() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let kafka = Kafka::topic("t").brokers(&brokers).group("g");
        let (shared, consumer) = client(&kafka, &brokers);
        let end = Instant::now() + BOUND;
        let until = |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                assert!(Instant::now() < end, "it did not come to that");
                serve(&consumer);
                consumer.context().pump(TURN);
            }
        };
        let alone = || shared.lock().alone();
        until(&|| !shared.lock().partitions().is_empty() && alone().is_none());
        cluster.broker_down(1).expect("down");
        until(&|| alone().is_some());
        let before = alone().expect("it is without its group");
        cluster.broker_up(1).expect("up");
        until(&|| alone().is_none());
        shared.lock().suspect(before, Instant::now());
        assert!(!shared.lock().is_suspected(), "it has come back");
        cluster.broker_down(1).expect("down");
        until(&|| alone().is_some());
        let again = alone().expect("it is without its group");
        shared.lock().suspect(again, Instant::now());
        until(&|| shared.lock().wants_another());
    }

    /// And one whose topic was recreated on the same cluster is not.
    #[test]
    fn a_client_whose_topic_is_on_another_cluster_commits_nothing_and_is_replaced() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        for (is_other_cluster, group) in [(true, "g1"), (false, "g2")] {
            let (shared, consumer) =
                client(&Kafka::topic("t").brokers(&brokers).group(group), &brokers);
            // As `topics` does before the group is joined: librdkafka logs the id of a topic that
            // somebody asks for.
            consumer.fetch_metadata(Some("t"), BOUND).expect("metadata");
            let topics = &consumer.context().topics;
            let end = Instant::now() + BOUND;
            while shared.lock().partitions().is_empty() {
                assert!(Instant::now() < end, "nothing is assigned");
                serve(&consumer);
                consumer.context().pump(TURN);
            }
            let before = topics.identity("t").expect("it was logged").topic_id;
            if is_other_cluster {
                topics.compare(Some("b25jZWdhdGUta2Fma2EtMg".to_owned()));
            }
            topics.hear(&format!(
                "Topic t changed id from {before} to q5BZ55PYTTyxda8B1C5Amg"
            ));
            compare_topics(&consumer);
            leave_cluster(&consumer, &shared);
            let mut state = shared.lock();
            assert_eq!(
                (state.partitions().is_empty(), state.wants_another()),
                (is_other_cluster, is_other_cluster)
            );
            assert_eq!(
                (topics.take_made_anew().is_empty(), state.commits()),
                (is_other_cluster, vec![])
            );
        }
    }

    /// What is settled of it moves nothing of whoever has it now, and nobody waits for it.
    #[test]
    fn a_client_that_makes_way_waits_for_nothing_of_what_was_lost() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let producer: BaseProducer = rdkafka::ClientConfig::new()
            .set("bootstrap.servers", &brokers)
            .create()
            .expect("a producer");
        producer
            .send(BaseRecord::<(), str>::to("t").payload("x"))
            .expect("room");
        producer.flush(BOUND).expect("sent");
        // Far longer than a client may take to close.
        let kafka = Kafka::topic("t")
            .brokers(&brokers)
            .group("g")
            .drain_on_revoke(BOUND);
        let kafka = kafka
            .property("session.timeout.ms", "3000")
            .property("heartbeat.interval.ms", "200");
        let (shared, consumer) = client(&kafka, &brokers);
        let end = Instant::now() + BOUND;
        let mut incoming = Vec::new();
        while !matches!(incoming[..], [Incoming::Delivery(_)]) {
            assert!(Instant::now() < end, "{incoming:?}");
            serve(&consumer);
            consumer.context().pump(TURN);
            shared.lock().hand_out(
                Limit { count: 1, bytes: 1 },
                usize::MAX,
                &mut incoming,
                &mut Vec::new(),
            );
        }
        cluster.request_errors(
            RDKafkaApiKey::Heartbeat,
            &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID],
        );
        // Its rebalance stands in the queue, where nobody looks meanwhile.
        while !consumer.assignment_lost() {
            assert!(Instant::now() < end, "it is not lost");
            std::thread::sleep(Duration::from_millis(10));
        }
        let begun = Instant::now();
        make_way(consumer, &shared);
        assert!(begun.elapsed() < BOUND, "after {:?}", begun.elapsed());
        assert!(shared.lock().partitions().is_empty());
    }
}
