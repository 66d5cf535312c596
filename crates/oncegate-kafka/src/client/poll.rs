//! The polling thread: the only thread that polls librdkafka's consumer, so that no handler delays
//! a rebalance.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use oncegate_core::SourceError;
use oncegate_core::internal::Backoff;
use rdkafka::consumer::Consumer;
use rdkafka::error::KafkaError;

use super::assignment_wait::AssignmentWait;
use super::batch::{self, MessageQueue};
use super::callbacks::{CallbackContext, GroupConsumer};
use super::rebalance::revocation_kind;
use super::records::permanent_error;
use super::{cluster_id, commits, start_position};
use crate::settings::{Kafka, OutOfRange};
use crate::shared::{RevocationKind, SharedState, SourcePhase};

/// Maximum number of rebalances and errors that one turn of the polling loop serves before it reads
/// messages.
const EVENTS_PER_TURN: usize = 16;
/// How long one turn of the polling loop waits for a message. A rebalance is served between turns.
const TURN: Duration = Duration::from_millis(50);
/// How long the polling thread waits for a replaced client to close, if the client reaches its
/// group coordinator. A client that does not can neither commit nor leave, so the thread does not
/// wait.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);
/// The first and the longest pause before a replacement client starts. The pause doubles while each
/// client runs for at most [`STABLE_AFTER`].
const REPLACEMENT_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// After a client that ran for longer than this, the pause is the first one again.
const STABLE_AFTER: Duration = Duration::from_secs(600);
/// How long to wait for a metadata response.
const METADATA_TIMEOUT: Duration = Duration::from_secs(1);
/// How often the loop checks positions, fatal errors and how long it has waited for an assignment.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Subscribes to the topics, which joins the group.
///
/// # Errors
/// If librdkafka rejects the names of the topics.
pub(crate) fn subscribe(consumer: &GroupConsumer, kafka: &Kafka) -> Result<(), SourceError> {
    let names: Vec<&str> = kafka.topics.iter().map(String::as_str).collect();
    consumer.subscribe(&names).map_err(|error| {
        SourceError::misconfigured("topic", error.to_string(), "name topics that exist")
    })
}

/// Serves the group until the source closes, then leaves it. Replaces a client that stalls or has a
/// fatal error. Runs on its own thread.
pub(crate) fn run(kafka: Kafka, mut consumer: Arc<GroupConsumer>) {
    let CallbackContext {
        shared,
        connection_errors,
        topics,
        ..
    } = &**consumer.context();
    let (shared, connection_errors, topics) =
        (shared.clone(), connection_errors.clone(), topics.clone());
    let _end_guard = EndGuard(shared.clone());
    let mut backoff = Backoff::between(REPLACEMENT_PAUSES.0, REPLACEMENT_PAUSES.1);
    let mut assignment = AssignmentWait::new(&kafka);
    loop {
        let started = Instant::now();
        match serve_client(consumer, &shared, &mut assignment) {
            ClientExit::SourceClosed => return,
            // New clients reach the group coordinator, so the replacement is likely to reach it.
            ClientExit::ReplacedWithoutCoordinator => backoff.reset(),
            // Clients that fail repeatedly are replaced at growing intervals.
            ClientExit::Replaced if started.elapsed() <= STABLE_AFTER => {}
            ClientExit::Replaced => backoff.reset(),
        }
        let pause = backoff.advance();
        consumer = loop {
            let until = Instant::now() + pause;
            while Instant::now() < until {
                if shared.lock().phase() >= SourcePhase::Closing {
                    return;
                }
                shared.wait(TURN);
            }
            let context = CallbackContext::new(shared.clone(), &kafka, connection_errors.clone())
                .with_topic_ids(topics.clone());
            let created = context.consumer(&kafka);
            match created.and_then(|consumer| subscribe(&consumer, &kafka).map(|()| consumer)) {
                Ok(consumer) => break Arc::new(consumer),
                Err(error) => {
                    tracing::error!(%error, group = kafka.group, "cannot create the replacement kafka client, retrying; nothing is read until it is created; check the limits of the process for memory, threads and open files")
                }
            }
        };
    }
}

/// Why a client has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClientExit {
    /// The source closes.
    SourceClosed,
    /// Another client replaces it.
    Replaced,
    /// Another client replaces it because it does not reach its group coordinator.
    ReplacedWithoutCoordinator,
}

/// Serves one client until the source closes or the client is replaced. If the source closes, the
/// consumer has left the group when this returns.
fn serve_client(
    consumer: Arc<GroupConsumer>,
    shared: &SharedState,
    assignment: &mut AssignmentWait,
) -> ClientExit {
    let Some(queue) = MessageQueue::new(&consumer) else {
        shared.fail(SourceError::Unavailable(
            "librdkafka could not allocate a queue; check the memory limit of the process".into(),
        ));
        return ClientExit::SourceClosed;
    };
    consumer.context().set_queue(Some(Arc::new(queue)));
    let mut last_check = Instant::now();
    while shared.lock().phase() < SourcePhase::Closing {
        serve(&consumer);
        compare_topics(&consumer);
        restart_recreated_topics(&consumer, shared);
        leave_former_cluster(&consumer, shared);
        if last_check.elapsed() >= CHECK_INTERVAL {
            check_fatal_error(&consumer, shared);
            consumer
                .context()
                .advance_past_transaction_markers(&consumer);
            assignment.check(&shared.lock());
            last_check = Instant::now();
        }
        commits::store(&consumer, shared);
        if shared.lock().client.needs_replacement() {
            return replace_client(consumer, shared);
        }
        consumer.context().read_batch(TURN);
    }
    commits::store(&consumer, shared);
    // The queue holds the consumer, so the queue is dropped first. Dropping the consumer then
    // revokes its partitions, commits and leaves the group.
    consumer.context().set_queue(None);
    drop(consumer);
    ClientExit::SourceClosed
}

/// Waits for unsettled deliveries up to the drain timeout, commits, and closes the client. Messages
/// that are still unsettled are redelivered. A client that does not close in time continues to close
/// on another thread.
fn replace_client(consumer: Arc<GroupConsumer>, shared: &SharedState) -> ClientExit {
    let mut state = shared.lock();
    let (exit, close_timeout) = if state.client.may_have_lost_metadata() {
        (ClientExit::ReplacedWithoutCoordinator, Duration::ZERO)
    } else {
        (ClientExit::Replaced, CLOSE_TIMEOUT)
    };
    let reason = state.client.take_replacement().unwrap_or_default();
    drop(state);
    tracing::error!(
        group = consumer.context().group,
        reason,
        "client replaced: another kafka client joins the group, for the given reason; unsettled messages are redelivered; if this repeats, check the brokers' logs, and raise .stalled_after(…) if brokers are only slow"
    );
    metrics::counter!(crate::metric::CLIENTS_REPLACED).increment(1);
    let context = consumer.context();
    let partitions = shared.lock().partitions();
    shared.end_assignments(
        &partitions,
        revocation_kind(&consumer),
        |epochs| context.drain(epochs),
        || commits::store(&consumer, shared),
    );
    context.is_replaced.store(true, Ordering::Relaxed);
    context.set_queue(None);
    let (closed_sender, closed_receiver) = mpsc::channel();
    let close_client = move || {
        drop(consumer);
        // The receiver is dropped after the timeout.
        let _ = closed_sender.send(());
    };
    match std::thread::Builder::new()
        .name("oncegate-kafka-drop".into())
        .spawn(close_client)
    {
        Ok(_) => drop(closed_receiver.recv_timeout(close_timeout)),
        Err(error) => {
            tracing::error!(%error, "cannot spawn a thread; the replaced kafka client was closed on the polling thread; check the thread limit of the process")
        }
    }
    exit
}

/// Handles a fatal error, after which a librdkafka client stays unusable: requests another client,
/// or ends the source if another client would fail in the same way.
fn check_fatal_error(consumer: &GroupConsumer, shared: &SharedState) {
    let Some((code, text)) = consumer.client().fatal_error() else {
        return;
    };
    match permanent_error(code, "the group's topics") {
        Some(error) => shared.fail(error),
        None => shared
            .lock()
            .client
            .request_replacement(format!("fatal error: {text}")),
    }
}

/// Reads the cluster id, and compares each changed topic id with the one before it. The polling
/// loop calls this before it reads messages.
fn compare_topics(consumer: &GroupConsumer) {
    let topics = &consumer.context().topics;
    let changed = topics.changed();
    if changed.is_none() && topics.knows_cluster() {
        return;
    }
    // librdkafka logs a new topic id before it stores the cluster id of the same metadata response.
    // It handles responses in order, so that it has stored this cluster id once it has handled the
    // response to the next request.
    if let Some(topic) = changed
        && let Err(error) = consumer.fetch_metadata(Some(&topic), METADATA_TIMEOUT)
    {
        tracing::debug!(%error, topic, "no metadata response for the topic");
    }
    topics.compare(cluster_id::fetch(consumer, Duration::ZERO));
}

/// Ends all assignments, without a commit, if the brokers of a topic are, or may be, those of
/// another cluster than before: the positions of the assignments are offsets of the former cluster.
/// Requests a replacement client, which starts at the offsets that are committed on the current
/// cluster.
fn leave_former_cluster(consumer: &GroupConsumer, shared: &SharedState) {
    let topics = &consumer.context().topics;
    for topic in topics.take_cluster_changed() {
        let mut state = shared.lock();
        if !state.is_outdated(&topic, topics.identity(&topic).as_ref()) {
            continue;
        }
        let partitions = state.partitions();
        state.client.request_replacement(format!(
            "the topic `{topic}` has another id than before, and is or may be on another cluster"
        ));
        drop(state);
        shared.end_assignments(&partitions, RevocationKind::Lost, |_| (), || ());
    }
}

/// Seeks to the beginning of recreated topics, and to the lowest unsettled offset of truncated
/// logs. librdkafka keeps its position when a topic is recreated; if the new log is longer, it
/// would skip the messages below that position.
fn restart_recreated_topics(consumer: &GroupConsumer, shared: &SharedState) {
    let context = consumer.context();
    for topic in context.topics.take_recreated() {
        // The assignments restart also with `OutOfRange::Error`: otherwise an offset of the deleted
        // topic would be committed for the new one, and a restarted consumer would start there.
        let partitions = shared.restart_topic(&topic, context.topics.identity(&topic));
        metrics::counter!(crate::metric::TOPICS_RECREATED).increment(partitions as u64);
        match context.out_of_range {
            // No assignment was made before the change: another member reads the topic, it is only
            // a destination of dead letters, or an assignment that is made later reports the change.
            _ if partitions == 0 => {}
            OutOfRange::Error => shared.fail(start_position::recreated(&topic)),
            OutOfRange::Earliest => {
                tracing::error!(
                    topic,
                    "topic recreated: it was deleted and created again; reading from its beginning; with IdSource::position(), give the consumer another .scope(…)"
                );
            }
        }
    }
    let seeks = shared.lock().pending_seeks();
    for (topic, partition, offset) in seeks {
        if let Err(error) = context.seek(consumer, &topic, partition, offset) {
            tracing::warn!(%error, topic = &*topic, partition, offset, "seek failed, retrying; nothing is read from the partition before it succeeds; check that the partition has a leader");
        }
    }
}

/// Serves rebalances and errors, and forwards librdkafka's log.
fn serve(consumer: &GroupConsumer) {
    let context = consumer.context();
    context.forward_log();
    for _ in 0..EVENTS_PER_TURN {
        // `None` means that the queue is empty, or that a callback served the event.
        let Some(event) = consumer.poll(Duration::ZERO) else {
            continue;
        };
        match event {
            // A message is not expected here, because the queues of partitions are forwarded to the
            // message queue before the assignment. It is processed nevertheless, so that none is
            // lost.
            Ok(message) => {
                if let Some(queue) = context.queue() {
                    context.process_batch(batch::copy(&message), &queue);
                }
            }
            Err(KafkaError::MessageConsumptionFatal(code)) => {
                context.handle_error(code, "the client");
                check_fatal_error(consumer, &context.shared);
            }
            Err(KafkaError::MessageConsumption(code)) => context.handle_error(code, "the group"),
            Err(error) => {
                tracing::warn!(%error, group = context.group, "kafka client error; librdkafka retries; if it persists, check the brokers' logs")
            }
        }
    }
}

/// Enters [`SourcePhase::Ended`] when the polling thread ends, also after a panic: `close` waits
/// for that phase.
struct EndGuard(Arc<SharedState>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.enter(SourcePhase::Ended);
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::{Incoming, Limit};
    use rdkafka::consumer::{BaseConsumer, CommitMode};
    use rdkafka::mocking::MockCluster;
    use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
    use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;

    /// The time limit of each test step, for slow machines.
    const BOUND: Duration = Duration::from_secs(60);

    fn client(kafka: &Kafka) -> (Arc<SharedState>, Arc<GroupConsumer>) {
        let context = CallbackContext::with_new_state(kafka);
        let shared = context.shared.clone();
        let consumer = Arc::new(context.consumer(kafka).expect("a client"));
        let queue = MessageQueue::new(&consumer).expect("memory");
        consumer.context().set_queue(Some(Arc::new(queue)));
        subscribe(&consumer, kafka).expect("a topic");
        (shared, consumer)
    }

    #[test]
    fn a_client_that_does_not_reach_its_group_while_others_do_is_replaced_unless_it_reconnects() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let kafka = Kafka::topic("t").brokers(&brokers).group("g");
        let (shared, consumer) = client(&kafka);
        let end = Instant::now() + BOUND;
        let until = |condition: &dyn Fn() -> bool| {
            while !condition() {
                assert!(Instant::now() < end, "the condition was not met in time");
                serve(&consumer);
                consumer.context().read_batch(TURN);
            }
        };
        let without_coordinator_since = || shared.lock().client.without_coordinator_since();
        until(&|| !shared.lock().partitions().is_empty() && without_coordinator_since().is_none());
        cluster.broker_down(1).expect("the broker stops");
        until(&|| without_coordinator_since().is_some());
        let before = without_coordinator_since().expect("the client reports no coordinator");
        cluster.broker_up(1).expect("the broker starts");
        until(&|| without_coordinator_since().is_none());
        shared
            .lock()
            .client
            .suspect_lost_metadata(before, Instant::now());
        assert!(
            !shared.lock().client.may_have_lost_metadata(),
            "the client is connected again"
        );
        cluster.broker_down(1).expect("the broker stops");
        until(&|| without_coordinator_since().is_some());
        let again = without_coordinator_since().expect("the client reports no coordinator");
        shared
            .lock()
            .client
            .suspect_lost_metadata(again, Instant::now());
        until(&|| shared.lock().client.needs_replacement());
    }

    /// librdkafka does not repeat a commit that the coordinator refused, and stored offsets below the
    /// committed one are never committed.
    #[test]
    fn a_lower_commit_that_fails_is_reported_and_repeated() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let mut config = rdkafka::ClientConfig::new();
        config
            .set("bootstrap.servers", &brokers)
            .set("group.id", "g");
        let producer: BaseProducer = config.create().expect("a producer");
        producer
            .send(BaseRecord::<(), str>::to("t").payload("x"))
            .expect("room");
        producer.flush(BOUND).expect("sent");
        let offset_at = |offset| {
            let mut list = TopicPartitionList::new();
            list.add_partition_offset("t", 0, Offset::Offset(offset))
                .expect("an offset");
            list
        };
        let before: BaseConsumer = config.create().expect("a consumer");
        let committed = before.commit(&offset_at(50), CommitMode::Sync);
        committed.expect("committed");

        let kafka = Kafka::topic("t").brokers(&brokers).group("g");
        let (shared, consumer) = client(&kafka);
        let refused = RDKafkaRespErr::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED;
        cluster.request_errors(RDKafkaApiKey::OffsetCommit, &[refused]);
        let mut end = Instant::now() + BOUND;
        let is_read = || {
            let positions = shared.lock().read_positions();
            positions.iter().any(|(.., position)| *position == Some(1))
        };
        while !is_read() {
            assert!(Instant::now() < end, "the message was not read in time");
            serve(&consumer);
            consumer.context().read_batch(TURN);
        }
        // Less than the time after which a commit without a result is repeated.
        end = Instant::now() + Duration::from_secs(25);
        while consumer.committed_offsets(offset_at(0), BOUND) != Ok(offset_at(0)) {
            assert!(Instant::now() < end, "nothing lower was committed in time");
            serve(&consumer);
            consumer.context().read_batch(TURN);
            commits::store(&consumer, &shared);
        }
    }

    /// A client whose topic was recreated on the same cluster is not replaced.
    #[test]
    fn a_client_whose_topic_is_on_another_cluster_commits_nothing_and_is_replaced() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        for (is_other_cluster, group) in [(true, "g1"), (false, "g2")] {
            let (shared, consumer) = client(&Kafka::topic("t").brokers(&brokers).group(group));
            // As `topics` does before the group is joined: librdkafka logs the id of each requested
            // topic.
            consumer.fetch_metadata(Some("t"), BOUND).expect("metadata");
            let topics = &consumer.context().topics;
            let end = Instant::now() + BOUND;
            while shared.lock().partitions().is_empty() {
                assert!(Instant::now() < end, "no partition was assigned in time");
                serve(&consumer);
                consumer.context().read_batch(TURN);
            }
            let before = topics
                .identity("t")
                .expect("librdkafka has logged the topic id")
                .topic_id;
            if is_other_cluster {
                topics.compare(Some("b25jZWdhdGUta2Fma2EtMg".to_owned()));
            }
            topics.on_log_line(&format!(
                "Topic t changed id from {before} to q5BZ55PYTTyxda8B1C5Amg"
            ));
            compare_topics(&consumer);
            leave_former_cluster(&consumer, &shared);
            let mut state = shared.lock();
            assert_eq!(
                (
                    state.partitions().is_empty(),
                    state.client.needs_replacement()
                ),
                (is_other_cluster, is_other_cluster)
            );
            // The partition has no committed offset yet, so its start offset is to be committed.
            let commits: Vec<i64> = state.commits().iter().map(|it| it.offset).collect();
            assert_eq!(
                (topics.take_recreated().is_empty(), commits),
                (
                    is_other_cluster,
                    if is_other_cluster { vec![] } else { vec![0] }
                )
            );
        }
    }

    /// Settlements of lost partitions must not affect the next owner's offsets, so nothing is
    /// drained.
    #[test]
    fn replacing_a_client_does_not_drain_lost_partitions() {
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
        // Longer than CLOSE_TIMEOUT, so that a drain would exceed the bound below.
        let kafka = Kafka::topic("t")
            .brokers(&brokers)
            .group("g")
            .drain_on_revoke(BOUND);
        let kafka = kafka
            .property("session.timeout.ms", "3000")
            .property("heartbeat.interval.ms", "200");
        let (shared, consumer) = client(&kafka);
        let end = Instant::now() + BOUND;
        let mut incoming = Vec::new();
        while !matches!(incoming[..], [Incoming::Delivery(_)]) {
            assert!(Instant::now() < end, "{incoming:?}");
            serve(&consumer);
            consumer.context().read_batch(TURN);
            shared
                .lock()
                .hand_out(Limit::new(1, 1), usize::MAX, &mut incoming, &mut Vec::new());
        }
        cluster.request_errors(
            RDKafkaApiKey::Heartbeat,
            &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_MEMBER_ID],
        );
        // The event of the rebalance stays in the main queue, which this loop does not poll.
        while !consumer.assignment_lost() {
            assert!(Instant::now() < end, "the assignment was not lost in time");
            std::thread::sleep(Duration::from_millis(10));
        }
        let started = Instant::now();
        replace_client(consumer, &shared);
        assert!(started.elapsed() < BOUND, "after {:?}", started.elapsed());
        assert!(shared.lock().partitions().is_empty());
    }
}
