//! What librdkafka calls back into, on the polling thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::{SourceError, fault};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};
use rdkafka::types::RDKafkaRespErr;

use crate::batch::{Adoption, Batch, Fault, Queue};
use crate::commits;
use crate::kafka::{Kafka, OutOfRange, StartAt};
use crate::log::{self, complain};
use crate::made_anew::Topics;
use crate::missing;
use crate::outage::Outage;
use crate::refusal;
use crate::shared::{Begins, Jump, Leave, Phase, Shared};
use crate::standing;
use crate::statistics;

/// How long one look waits for a message while revoked deliveries are waited for.
const DRAIN_TURN: Duration = Duration::from_millis(5);
/// How long librdkafka may take to begin at another offset.
pub(crate) const SEEK: Duration = Duration::from_secs(1);
/// Where a log begins that was made anew. Not `Offset::Beginning`: for that, librdkafka takes what
/// the last answer for the old log said.
const FIRST: Offset = Offset::Offset(0);

/// What librdkafka calls back into, on the polling thread.
pub(crate) struct Context {
    pub(crate) shared: Arc<Shared>,
    start: StartAt,
    pub(crate) out_of_range: OutOfRange,
    /// Which log each topic is.
    pub(crate) topics: Topics,
    /// How long the questions of a rebalance may take together.
    bound: Duration,
    /// How long revoked deliveries are waited for.
    drain: Duration,
    /// Set while the source lives; the queue holds the consumer, so it is taken out before the
    /// consumer is dropped.
    queue: Mutex<Option<Arc<Queue<Context>>>>,
    /// The last error of the client as a whole, for whoever waits for the broker.
    trouble: Mutex<Option<(RDKafkaErrorCode, String)>>,
    pub(crate) outage: Arc<Outage>,
    /// Set when another client has taken the place of this one: what it still has to say is of no
    /// interest.
    pub(crate) is_replaced: AtomicBool,
}

impl Context {
    pub(crate) fn new(shared: Arc<Shared>, kafka: &Kafka, outage: Arc<Outage>) -> Self {
        let (start, out_of_range, drain) = (kafka.start, kafka.where_out_of_range(), kafka.drain());
        let (topics, bound, queue, trouble) = (
            Topics::default(),
            kafka.bound(),
            Mutex::default(),
            Mutex::default(),
        );
        Self {
            shared,
            start,
            out_of_range,
            topics,
            bound,
            drain,
            queue,
            trouble,
            outage,
            is_replaced: AtomicBool::new(false),
        }
    }

    /// The same, with what the client before it has heard of the topics.
    pub(crate) fn knowing(self, topics: Topics) -> Self {
        Self { topics, ..self }
    }

    /// The last error of the client as a whole, and forgets it.
    pub(crate) fn take_trouble(&self) -> Option<(RDKafkaErrorCode, String)> {
        self.trouble
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(crate) fn queue(&self) -> Option<Arc<Queue<Context>>> {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn set_queue(&self, queue: Option<Arc<Queue<Context>>>) {
        *self.queue.lock().unwrap_or_else(PoisonError::into_inner) = queue;
    }

    fn assign(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        // Before assigning, or first messages come through the main queue.
        let Some(queue) = self.queue() else {
            // The source is leaving: nothing is read any more, and a client that closes is not told
            // where the group stands.
            return self.take_over(consumer, partitions);
        };
        let mut assigned = partitions.clone();
        let is_leaving =
            || self.shared.lock().phase() > Phase::Running || consumer.assignment_lost();
        let patience = standing::Patience::new(self.bound, &is_leaving);
        for (topic, partition, begins) in
            standing::ask(consumer, partitions, &self.topics, patience, || {
                queue.hear()
            })
        {
            if queue.adopt(&topic, partition) == Adoption::NoSuchPartition {
                tracing::error!(
                    topic,
                    partition,
                    "the partition's queue cannot be read in batches"
                );
            }
            self.shared
                .assign(&topic, partition, begins, self.topics.log(&topic, begins));
            if let Some(offset) = self.begin(&topic, partition, begins) {
                complain(
                    "a beginning",
                    assigned.set_partition_offset(&topic, partition, offset),
                );
            }
        }
        metrics::counter!(crate::metric::ASSIGNED).increment(partitions.count() as u64);
        self.take_over(consumer, &assigned);
        // Nothing was read yet, and librdkafka says so: from now on its word counts.
        self.pass_markers(consumer);
    }

    /// Says where a partition is read on. Answers what librdkafka is told, if it is not to begin
    /// where the group stands, or as `auto.offset.reset` says.
    fn begin(&self, topic: &str, partition: i32, begins: Begins) -> Option<Offset> {
        match begins {
            Begins::At(offset) => {
                tracing::info!(topic, partition, offset, "partition assigned");
                return None;
            }
            Begins::Replica(offset) | Begins::Ambiguous(offset) => {
                metrics::counter!(crate::metric::REPLICA_OFFSETS).increment(1);
                tracing::info!(topic, partition, offset, "partition assigned");
                if matches!(begins, Begins::Ambiguous(_)) && self.out_of_range == OutOfRange::Error
                {
                    self.shared.lock().bar(topic, partition);
                    self.shared
                        .fail(standing::ambiguous(topic, partition, offset));
                }
                return None;
            }
            Begins::Unknown => {
                tracing::info!(topic, partition, "partition assigned");
                return None;
            }
            Begins::Anew => {
                metrics::counter!(crate::metric::TOPICS_MADE_ANEW).increment(1);
                tracing::error!(
                    topic,
                    partition,
                    "partition assigned; topic made anew: what the group has committed is an offset of the log before it"
                );
                if self.out_of_range == OutOfRange::Error {
                    self.shared.lock().bar(topic, partition);
                    self.shared.fail(standing::made_anew(topic));
                }
            }
            Begins::Added => {
                metrics::counter!(crate::metric::PARTITIONS_ADDED).increment(1);
                tracing::warn!(
                    topic,
                    partition,
                    "partition assigned; partition added: the group reads its topic already, and nothing of it was ever read; reading it from its beginning"
                );
            }
            Begins::Nowhere if self.start == StartAt::Earliest => {
                tracing::info!(
                    topic,
                    partition,
                    "partition assigned; the group has no offset for it yet, so it is read from its beginning"
                );
            }
            Begins::Nowhere => {
                tracing::info!(
                    topic,
                    partition,
                    "partition assigned; the group has no offset for it"
                );
                return None;
            }
        }
        Some(if begins == Begins::Anew {
            FIRST
        } else {
            Offset::Beginning
        })
    }

    fn take_over(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        fault::point("kafka.assign.before");
        let outcome = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(partitions),
            _ => consumer.assign(partitions),
        };
        fault::point("kafka.assign.after");
        complain("assigning partitions", outcome);
    }

    /// Lets what was handed out be settled, for a while, and stores how far it came; librdkafka
    /// commits that when it unassigns, before anyone else gets the partitions. A lost assignment is
    /// someone else's already.
    fn revoke(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        let leaving = names(partitions);
        let how = how_they_leave(consumer);
        let lost = how == Leave::Lost;
        let store = || commits::store(consumer, &self.shared);
        let unsettled = self
            .shared
            .give_up(&leaving, how, |epochs| self.drain(epochs), store);
        for (topic, partition) in &leaving {
            tracing::info!(topic, partition, lost, unsettled, "partition revoked");
        }
        metrics::counter!(crate::metric::REVOKED, "lost" => if lost { "yes" } else { "no" })
            .increment(leaving.len() as u64);
        self.unassign(consumer, partitions);
    }

    pub(crate) fn drain(&self, epochs: &[u64]) {
        let end = Instant::now() + self.drain;
        while Instant::now() < end {
            let state = self.shared.lock();
            if state.phase() >= Phase::Closing || state.out(epochs) == 0 {
                return;
            }
            drop(state);
            self.hear();
            self.pump(DRAIN_TURN);
        }
        tracing::warn!(bound = ?self.drain, "revoked partitions go with deliveries unsettled: they are delivered again elsewhere");
    }

    fn unassign(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        fault::point("kafka.unassign.before");
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
            _ => consumer.unassign(),
        };
        fault::point("kafka.unassign.after");
        complain("giving partitions back", unassigned);
    }

    /// Listens to what librdkafka has logged.
    pub(crate) fn hear(&self) {
        if let Some(queue) = self.queue() {
            queue.hear();
        }
    }

    /// Reads one batch, or waits. Does not serve the main queue, so it may run inside a rebalance.
    pub(crate) fn pump(&self, wait: Duration) {
        let Some(queue) = self.queue() else {
            return self.shared.wait(wait);
        };
        let mut state = self.shared.lock();
        state.waits(queue.waiting());
        let (room, full) = (state.room(), state.full());
        drop(state);
        queue.set_apart(full);
        if room == 0 {
            return self.shared.wait(wait);
        }
        let batch = queue.read(room, wait);
        let count = batch.records.len() + batch.faults.len();
        self.take_in(batch, &queue);
        self.shared.lock().was_read(count as u64);
    }

    pub(crate) fn take_in(&self, batch: Batch, queue: &Queue<Self>) {
        for fault in &batch.faults {
            match unreadable(fault) {
                Some(error) => {
                    // Before the records: what follows on the unreadable part may stand in the same
                    // batch.
                    self.shared.lock().bar(&fault.topic, fault.partition);
                    self.shared.fail(error);
                }
                // Handled as a change of the topic's id, in this turn.
                None if fault.code == RDKafkaErrorCode::AutoOffsetReset
                    && self.topics.is_change_pending(&fault.topic) => {}
                None if fault.code == RDKafkaErrorCode::AutoOffsetReset => {
                    let stood = self.shared.lock().stands(&fault.topic, fault.partition);
                    self.shared.fail(standing::lost(queue, fault, stood));
                }
                None => self.judge(fault.code, &format!("{}/{}", fault.topic, fault.partition)),
            }
        }
        let findings = self.shared.take_in(batch.records);
        for jump in findings.jumps {
            let first = queue.first_offset(&jump.topic, jump.partition);
            missing::look_into(jump, first, &self.shared);
        }
        // After the records, which may stand before.
        let faulty = batch.faults.iter().filter(|fault| fault.offset >= 0);
        let faulty = faulty.map(|fault| (&*fault.topic, fault.partition, Some(fault.offset)));
        for (topic, partition, stood) in faulty.chain(
            findings
                .restarted
                .iter()
                .map(|(topic, partition)| (&**topic, *partition, None)),
        ) {
            self.read_on(topic, partition, stood, queue);
        }
    }

    /// Has librdkafka read on after the last message that was read. It counts an error that it
    /// hands over as a message, and does not notice when a log begins anew: after the next
    /// rebalance it would read on too far up, and skip what lies before.
    fn read_on(&self, topic: &str, partition: i32, stood: Option<i64>, queue: &Queue<Self>) {
        let Some(offset) = self.shared.lock().distrust(topic, partition, stood) else {
            return;
        };
        fault::point("kafka.seek.before");
        let sought = queue
            .consumer()
            .seek(topic, partition, Offset::Offset(offset), SEEK);
        fault::point("kafka.seek.after");
        match sought {
            Ok(()) => self.shared.lock().told_where(topic, partition),
            Err(error) => tracing::warn!(%error, topic, partition, offset, "reading on"),
        }
    }

    /// What is handed over is a message; how far librdkafka has read, it counts in markers of
    /// transactions too.
    pub(crate) fn pass_markers(&self, consumer: &BaseConsumer<Self>) {
        let (Ok(positions), Some(queue)) = (consumer.position(), self.queue()) else {
            return;
        };
        let mut state = self.shared.lock();
        let reached = positions.elements().into_iter().filter_map(|it| {
            let offset = if let Offset::Offset(offset) = it.offset() {
                Some(offset)
            } else {
                None
            };
            state.reached(it.topic(), it.partition(), offset)
        });
        let jumps: Vec<Jump> = reached.collect();
        drop(state);
        let first_of = |topic: &str, partition| queue.first_offset(topic, partition);
        for jump in jumps {
            let first = first_of(&jump.topic, jump.partition);
            missing::look_into(jump, first, &self.shared);
        }
        missing::look_again(first_of, &self.shared);
    }

    /// Most errors pass by themselves, and librdkafka retries them. Those that do not end the
    /// source.
    pub(crate) fn judge(&self, code: RDKafkaErrorCode, place: &str) {
        match for_a_person(code, place) {
            Some(fault) => self.shared.fail(fault),
            // The client as a whole has told it.
            None if Outage::is(code) => tracing::debug!(%code, place, "Kafka"),
            None => tracing::warn!(%code, place, "Kafka"),
        }
    }
}

/// The error of what no time heals, and a person has to change.
pub(crate) fn for_a_person(code: RDKafkaErrorCode, place: &str) -> Option<SourceError> {
    use RDKafkaErrorCode as E;
    Some(match code {
        E::TopicAuthorizationFailed => SourceError::misconfigured(
            "topic",
            format!("not allowed to read {place}"),
            "grant Read and Describe on the topic",
        ),
        E::GroupAuthorizationFailed => SourceError::misconfigured(
            "group",
            "not allowed to use the group",
            "grant Read on the group",
        ),
        // Not replaced by another client: that one would fence the other member, which would fence
        // it in turn, without end.
        E::FencedInstanceId | E::Fenced => SourceError::misconfigured(
            "group.instance.id",
            "another member of the group uses the same instance id",
            "give each member an instance id of its own",
        ),
        E::InvalidGroupId => SourceError::misconfigured(
            "group",
            "the broker refuses this group id",
            "choose another one",
        ),
        E::UnsupportedAssignor => SourceError::misconfigured(
            "group.remote.assignor",
            "the broker has no assignor of this name",
            "leave it away, or name one of the broker's group.consumer.assignors",
        ),
        E::UnsupportedVersion | E::UnsupportedFeature => SourceError::misconfigured(
            "group.protocol",
            "the broker does not know this protocol of groups",
            "leave it away, or use Kafka 4.0 or later",
        ),
        _ => return None,
    })
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.topics.hear(line);
        log::line(level, facility, line);
    }

    fn stats_raw(&self, told: &[u8]) {
        if !self.is_replaced.load(Ordering::Relaxed) {
            self.shared
                .lock()
                .hears_of_the_group(statistics::is_with_its_group(told), Instant::now());
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(code) if Outage::is(code) => self.outage.tell(reason),
            Some(RDKafkaErrorCode::Fatal) => tracing::error!(%error, reason, "Kafka"),
            _ => tracing::warn!(%error, reason, "Kafka"),
        }
        if let Some(code) = error.rdkafka_error_code() {
            let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            // That all brokers are down is said right after the reason why.
            if !(Outage::is(code)
                && trouble
                    .as_ref()
                    .is_some_and(|(before, _)| refusal::is_of_the_broker(*before)))
            {
                *trouble = Some((code, reason.to_owned()));
            }
        }
    }
}

impl ConsumerContext for Context {
    fn rebalance(
        &self,
        consumer: &BaseConsumer<Self>,
        what: RDKafkaRespErr,
        partitions: &mut TopicPartitionList,
    ) {
        match what {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS
                if self.is_replaced.load(Ordering::Relaxed) =>
            {
                self.unassign(consumer, partitions);
            }
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => {
                self.assign(consumer, partitions)
            }
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__REVOKE_PARTITIONS => {
                self.revoke(consumer, partitions)
            }
            other => {
                tracing::error!(code = %RDKafkaErrorCode::from(other), "rebalance");
                self.unassign(consumer, partitions);
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        fault::point("kafka.commit.confirmed");
        let all = match result {
            Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::NoOffset)) => return,
            Err(error) => Some(error),
            Ok(()) => None,
        };
        let failed = |it: &TopicPartitionListElem<'_>| all.clone().or_else(|| it.error().err());
        let (mut failures, mut state) = (Vec::new(), self.shared.lock());
        for it in offsets.elements() {
            match (failed(&it), it.offset()) {
                (Some(error), _) => {
                    state.commit_again(it.topic(), it.partition());
                    failures.push((error, it));
                }
                (None, Offset::Offset(offset)) => {
                    state.confirmed(it.topic(), it.partition(), offset)
                }
                (None, _) => {}
            }
        }
        drop(state);
        if let Some((error, it)) = failures.first() {
            tracing::warn!(%error, topic = it.topic(), partition = it.partition(), partitions = failures.len(), "committing offsets again");
        }
    }
}

/// Whether the group still takes this member's partitions for its own.
pub(crate) fn how_they_leave(consumer: &BaseConsumer<Context>) -> Leave {
    if consumer.assignment_lost() {
        Leave::Lost
    } else {
        Leave::GivenBack
    }
}

/// The error of a part of a log that this client will never read, however often it tries.
fn unreadable(fault: &Fault) -> Option<SourceError> {
    use RDKafkaErrorCode as E;
    let Fault {
        topic,
        partition,
        offset,
        code,
    } = fault;
    let remedy = match code {
        E::BadMessage | E::BadCompression | E::InvalidMessage => {
            "restore that part of the log from a replica"
        }
        E::NotImplemented | E::UnsupportedCompressionType => {
            "let its producer use another format or compression"
        }
        E::MessageSizeTooLarge => "raise receive.message.max.bytes",
        _ => return None,
    };
    Some(SourceError::misconfigured(
        "topic",
        format!("{topic}/{partition} cannot be read on at offset {offset}: {code}"),
        format!("{remedy}, or move the group past it: kafka-consumer-groups.sh --reset-offsets"),
    ))
}

fn names(partitions: &TopicPartitionList) -> Vec<(String, i32)> {
    partitions
        .elements()
        .iter()
        .map(|it| (it.topic().to_owned(), it.partition()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// librdkafka answers `Beginning` with where the log before it began, if it has fetched of
    /// that.
    #[test]
    fn a_topic_made_anew_begins_at_offset_0_and_not_where_the_one_before_it_began() {
        let (kafka, shared) = (
            Kafka::topic("t").brokers("b").group("g"),
            Arc::<Shared>::default(),
        );
        let context = Context::new(shared, &kafka, Arc::new(Outage::of("b")));
        let begin = |begins| context.begin("t", 0, begins);
        assert_eq!(begin(Begins::Anew), Some(Offset::Offset(0)));
        assert_eq!(
            [Begins::Added, Begins::Nowhere].map(begin),
            [Some(Offset::Beginning); 2]
        );
        assert_eq!(
            [
                Begins::At(7),
                Begins::Unknown,
                Begins::Replica(7),
                Begins::Ambiguous(7)
            ]
            .map(begin),
            [None; 4]
        );
    }
}
