//! The callbacks of librdkafka (rebalances, commits, errors, log), and reading in batches.

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

use crate::client;
use crate::client::batch::{ForwardResult, MessageQueue, PartitionError, RecordBatch};
use crate::client::connection_errors::ConnectionErrors;
use crate::client::log::{self, log_error};
use crate::client::statistics;
use crate::client::topic_id_log::RECREATED_LOG_START;
use crate::commits;
use crate::committed_offset;
use crate::expired;
use crate::kafka::{Kafka, OutOfRange, StartAt};
use crate::missing_topics;
use crate::shared::{OffsetGap, RevocationKind, SharedState, SourcePhase, StartPosition};
use crate::topic_recreated::TopicIds;

/// How long one read waits for a message while a revocation waits for unsettled deliveries.
const DRAIN_TURN: Duration = Duration::from_millis(5);
/// Timeout of one seek.
pub(crate) const SEEK_TIMEOUT: Duration = Duration::from_secs(1);

/// The consumer's callbacks, which run on the polling thread.
pub(crate) struct CallbackContext {
    pub(crate) shared: Arc<SharedState>,
    pub(crate) group: String,
    start: StartAt,
    pub(crate) out_of_range: OutOfRange,
    /// The topic ids that this client has seen.
    pub(crate) topics: TopicIds,
    /// The time budget for all requests of one rebalance.
    request_budget: Duration,
    /// How long a revocation waits for unsettled deliveries.
    drain_timeout: Duration,
    /// `None` before the client is served, and once it closes. The queue holds the consumer, so the
    /// queue is removed before the consumer is dropped.
    queue: Mutex<Option<Arc<MessageQueue<CallbackContext>>>>,
    /// The last error of the whole client. `topics` reads it while it waits for a broker.
    last_error: Mutex<Option<(RDKafkaErrorCode, String)>>,
    pub(crate) connection_errors: Arc<ConnectionErrors>,
    /// Set once another client has replaced this one; its statistics and rebalances are ignored.
    pub(crate) is_replaced: AtomicBool,
}

impl CallbackContext {
    pub(crate) fn new(
        shared: Arc<SharedState>,
        kafka: &Kafka,
        connection_errors: Arc<ConnectionErrors>,
    ) -> Self {
        let (start, out_of_range, drain_timeout) = (
            kafka.start,
            kafka.out_of_range_policy(),
            kafka.drain_timeout(),
        );
        let (topics, request_budget, queue, last_error) = (
            TopicIds::default(),
            kafka.rebalance_step_limit(),
            Mutex::default(),
            Mutex::default(),
        );
        Self {
            shared,
            group: kafka.group.clone(),
            start,
            out_of_range,
            topics,
            request_budget,
            drain_timeout,
            queue,
            last_error,
            connection_errors,
            is_replaced: AtomicBool::new(false),
        }
    }

    /// Takes over the topic ids that the previous client has seen.
    pub(crate) fn with_topic_ids(self, topics: TopicIds) -> Self {
        Self { topics, ..self }
    }

    /// Returns and clears the last error of the whole client.
    pub(crate) fn take_last_error(&self) -> Option<(RDKafkaErrorCode, String)> {
        self.last_error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(crate) fn queue(&self) -> Option<Arc<MessageQueue<CallbackContext>>> {
        self.queue
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(crate) fn set_queue(&self, queue: Option<Arc<MessageQueue<CallbackContext>>>) {
        *self.queue.lock().unwrap_or_else(PoisonError::into_inner) = queue;
    }

    fn assign(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        // A partition's queue is forwarded to the message queue before the assignment; otherwise its
        // first messages arrive in librdkafka's main queue.
        let Some(queue) = self.queue() else {
            // The client is closing: nothing more is read, and a closing client receives no
            // committed offsets.
            return self.assign_partitions(consumer, partitions);
        };
        let mut assigned = partitions.clone();
        let is_cancelled =
            || self.shared.lock().phase() > SourcePhase::Running || consumer.assignment_lost();
        let mut budget = committed_offset::TimeBudget::new(self.request_budget, &is_cancelled);
        let starts = committed_offset::start_positions(
            consumer,
            partitions,
            &self.topics,
            &mut budget,
            || queue.forward_log(),
        );
        let mut log_starts =
            committed_offset::log_starts(consumer, &starts, self.start, &mut budget);
        for (topic, partition, start) in starts {
            if queue.forward_partition(&topic, partition) == ForwardResult::NoSuchPartition {
                tracing::error!(
                    topic,
                    partition,
                    "partition queue not found in librdkafka; its messages are read one by one, which takes longer; restart the consumer to read them in batches"
                );
            }
            let log = self.topics.log(&topic, start);
            self.shared.assign(&topic, partition, start, log);
            if let Some(log_start) = log_starts.remove(&(topic.clone(), partition)) {
                self.shared.lock().start_at(&topic, partition, log_start);
            }
            if let Some(offset) = self.start_offset(&topic, partition, start) {
                log_error(
                    "cannot set the start offset of a partition; auto.offset.reset decides where it starts",
                    assigned.set_partition_offset(&topic, partition, offset),
                );
            }
        }
        metrics::counter!(crate::metric::ASSIGNED).increment(partitions.count() as u64);
        self.assign_partitions(consumer, &assigned);
        // librdkafka has no position yet in a partition that was just assigned. That shows that its
        // next position is not left from an earlier assignment.
        self.advance_past_transaction_markers(consumer);
    }

    /// Logs where reading starts. Returns the offset to assign; `None` if librdkafka starts at the
    /// committed offset or as `auto.offset.reset` says.
    fn start_offset(&self, topic: &str, partition: i32, start: StartPosition) -> Option<Offset> {
        match start {
            StartPosition::Committed(offset) => {
                tracing::info!(topic, partition, offset, "partition assigned");
                return None;
            }
            StartPosition::Replica(offset) | StartPosition::Ambiguous(offset) => {
                metrics::counter!(crate::metric::REPLICA_OFFSETS).increment(1);
                tracing::info!(topic, partition, offset, "partition assigned");
                if matches!(start, StartPosition::Ambiguous(_))
                    && self.out_of_range == OutOfRange::Error
                {
                    self.shared.lock().halt(topic, partition);
                    self.shared
                        .fail(committed_offset::ambiguous(topic, partition, offset));
                }
                return None;
            }
            StartPosition::Unknown => {
                tracing::info!(topic, partition, "partition assigned");
                return None;
            }
            StartPosition::Recreated => {
                metrics::counter!(crate::metric::TOPICS_RECREATED).increment(1);
                tracing::error!(
                    topic,
                    partition,
                    "partition assigned; topic recreated: the committed offset belongs to the deleted topic; reading from the beginning; with IdSource::position(), give the consumer another .scope(…)"
                );
                if self.out_of_range == OutOfRange::Error {
                    self.shared.lock().halt(topic, partition);
                    self.shared.fail(committed_offset::recreated(topic));
                }
            }
            StartPosition::AddedPartition => {
                metrics::counter!(crate::metric::PARTITIONS_ADDED).increment(1);
                tracing::warn!(
                    topic,
                    partition,
                    "partition assigned; partition added: the group already reads its topic; reading the new partition from its beginning; check whether producers now send a key's messages to another partition, since no order holds across two"
                );
            }
            StartPosition::NoOffset if self.start == StartAt::Earliest => {
                tracing::info!(
                    topic,
                    partition,
                    "partition assigned; the group has no committed offset for it; reading from the beginning"
                );
            }
            StartPosition::NoOffset => {
                tracing::info!(
                    topic,
                    partition,
                    "partition assigned; the group has no committed offset for it"
                );
                return None;
            }
        }
        Some(if start == StartPosition::Recreated {
            RECREATED_LOG_START
        } else {
            Offset::Beginning
        })
    }

    fn assign_partitions(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        fault::point("kafka.assign.before");
        let outcome = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(partitions),
            _ => consumer.assign(partitions),
        };
        fault::point("kafka.assign.after");
        log_error(
            "cannot assign partitions; nothing is read from them before the next rebalance; restart the consumer if the lag grows",
            outcome,
        );
    }

    /// Waits for unsettled deliveries up to the drain timeout and stores the offsets. librdkafka
    /// commits them when it unassigns the partitions, before another member is assigned them. Lost
    /// partitions already belong to another member, so nothing is awaited or committed.
    fn revoke(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        let revoked = names(partitions);
        let kind = revocation_kind(consumer);
        let lost = kind == RevocationKind::Lost;
        let store = || commits::store(consumer, &self.shared);
        let unsettled =
            self.shared
                .end_assignments(&revoked, kind, |epochs| self.drain(epochs), store);
        for (topic, partition) in &revoked {
            tracing::info!(topic, partition, lost, unsettled, "partition revoked");
        }
        metrics::counter!(crate::metric::REVOKED, "lost" => if lost { "yes" } else { "no" })
            .increment(revoked.len() as u64);
        self.unassign(consumer, partitions);
    }

    /// Waits until every delivery of these assignments is settled or released, up to the drain
    /// timeout. Other partitions are read meanwhile.
    pub(crate) fn drain(&self, epochs: &[u64]) {
        let end = Instant::now() + self.drain_timeout;
        while Instant::now() < end {
            let state = self.shared.lock();
            if state.phase() >= SourcePhase::Closing || state.handed_out(epochs) == 0 {
                return;
            }
            drop(state);
            self.forward_log();
            self.read_batch(DRAIN_TURN);
        }
        let unsettled = self.shared.lock().handed_out(epochs);
        tracing::warn!(
            group = self.group,
            unsettled,
            timeout = ?self.drain_timeout,
            "drain timeout exceeded, revoking partitions with unsettled deliveries; they are redelivered to another member; raise .drain_on_revoke(…) if handlers take longer"
        );
    }

    fn unassign(&self, consumer: &BaseConsumer<Self>, partitions: &TopicPartitionList) {
        fault::point("kafka.unassign.before");
        let unassigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_unassign(partitions),
            _ => consumer.unassign(),
        };
        fault::point("kafka.unassign.after");
        log_error(
            "cannot unassign partitions; the group waits for this member until max.poll.interval.ms; restart the consumer if it stays without partitions",
            unassigned,
        );
    }

    /// Forwards librdkafka's log lines.
    pub(crate) fn forward_log(&self) {
        if let Some(queue) = self.queue() {
            queue.forward_log();
        }
    }

    /// Reads one batch, or waits for `wait` if there is no message or no room for one. Does not serve
    /// librdkafka's main queue, so it may run inside a rebalance.
    pub(crate) fn read_batch(&self, wait: Duration) {
        let Some(queue) = self.queue() else {
            return self.shared.wait(wait);
        };
        let mut state = self.shared.lock();
        state.set_queue_length(queue.length());
        let (room, full_partitions) = (state.room(), state.full_partitions());
        drop(state);
        queue.hold_back(full_partitions);
        if room == 0 {
            return self.shared.wait(wait);
        }
        let batch = queue.read(room, wait);
        let count = batch.records.len() + batch.errors.len();
        self.process_batch(batch, &queue);
        self.shared.lock().count_read(count as u64);
    }

    pub(crate) fn process_batch(&self, batch: RecordBatch, queue: &MessageQueue<Self>) {
        for error in &batch.errors {
            match unreadable(error) {
                Some(source_error) => {
                    // Before the records: the same batch may contain records after the unreadable
                    // part.
                    self.shared.lock().halt(&error.topic, error.partition);
                    self.shared.fail(source_error);
                }
                // The polling thread handles the changed topic id later in this turn.
                None if error.code == RDKafkaErrorCode::AutoOffsetReset
                    && self.topics.is_change_pending(&error.topic) => {}
                None if error.code == RDKafkaErrorCode::AutoOffsetReset => {
                    let position = self
                        .shared
                        .lock()
                        .position_of(&error.topic, error.partition);
                    self.shared
                        .fail(committed_offset::out_of_range(queue, error, position));
                }
                None => {
                    self.handle_error(error.code, &format!("{}/{}", error.topic, error.partition))
                }
            }
        }
        let intake = self.shared.add_records(batch.records);
        for gap in intake.gaps {
            let log_start = queue.log_start_offset(&gap.topic, gap.partition);
            expired::classify_gap(gap, log_start, &self.shared);
        }
        // After the records were added, because some of them precede the error.
        let errors_with_offset = batch.errors.iter().filter(|error| error.offset >= 0);
        let error_positions =
            errors_with_offset.map(|error| (&*error.topic, error.partition, Some(error.offset)));
        for (topic, partition, position) in error_positions.chain(
            intake
                .restarted
                .iter()
                .map(|(topic, partition)| (&**topic, *partition, None)),
        ) {
            self.seek_after_last_read(topic, partition, position, queue);
        }
    }

    /// Seeks to the offset after the last message that was read. librdkafka's position is higher:
    /// it counts an error as a message, and does not decrease when a log was truncated. After the
    /// next rebalance librdkafka would resume there and skip messages.
    fn seek_after_last_read(
        &self,
        topic: &str,
        partition: i32,
        position: Option<i64>,
        queue: &MessageQueue<Self>,
    ) {
        let Some(offset) = self
            .shared
            .lock()
            .distrust_position(topic, partition, position)
        else {
            return;
        };
        fault::point("kafka.seek.before");
        let result = queue
            .consumer()
            .seek(topic, partition, Offset::Offset(offset), SEEK_TIMEOUT);
        fault::point("kafka.seek.after");
        match result {
            Ok(()) => self.shared.lock().seek_succeeded(topic, partition),
            Err(error) => {
                tracing::warn!(%error, topic, partition, offset, "cannot seek to the next unread message; a rebalance may skip messages; restart the consumer to read from the committed offset")
            }
        }
    }

    /// Advances each partition to librdkafka's position, which also passes transaction markers. These
    /// are not delivered as messages.
    pub(crate) fn advance_past_transaction_markers(&self, consumer: &BaseConsumer<Self>) {
        let (Ok(positions), Some(queue)) = (consumer.position(), self.queue()) else {
            return;
        };
        let mut state = self.shared.lock();
        let gaps = positions.elements().into_iter().filter_map(|it| {
            let offset = if let Offset::Offset(offset) = it.offset() {
                Some(offset)
            } else {
                None
            };
            state.advance_to(it.topic(), it.partition(), offset)
        });
        let gaps: Vec<OffsetGap> = gaps.collect();
        drop(state);
        let log_start_of = |topic: &str, partition| queue.log_start_offset(topic, partition);
        for gap in gaps {
            let log_start = log_start_of(&gap.topic, gap.partition);
            expired::classify_gap(gap, log_start, &self.shared);
        }
        expired::classify_deferred_gaps(log_start_of, &self.shared);
    }

    /// Ends the source if the error is permanent. librdkafka retries all others, which are logged.
    pub(crate) fn handle_error(&self, code: RDKafkaErrorCode, subject: &str) {
        match permanent_error(code, subject) {
            Some(error) => self.shared.fail(error),
            // The error callback of the client has already logged that it cannot reach a broker.
            None if client::error::is_connection(code) => {
                tracing::debug!(%code, subject, "cannot reach a broker")
            }
            // The watching thread looks the topics up, and logs a missing one with the remedy.
            None if missing_topics::is_missing(code) => {
                self.shared.lock().suspect_missing_topic(true);
                tracing::debug!(%code, subject, "a topic may be missing")
            }
            None => {
                tracing::warn!(%code, subject, group = self.group, "kafka error, librdkafka retries; if it persists, check the brokers' logs")
            }
        }
    }
}

/// The error of the source for a permanent error code; `None` if a retry may succeed.
pub(crate) fn permanent_error(code: RDKafkaErrorCode, subject: &str) -> Option<SourceError> {
    use RDKafkaErrorCode as E;
    Some(match code {
        E::TopicAuthorizationFailed => SourceError::misconfigured(
            "topic",
            format!("not allowed to read {subject}"),
            "grant Read and Describe on the topic",
        ),
        E::GroupAuthorizationFailed => SourceError::misconfigured(
            "group",
            "not allowed to use the group",
            "grant Read on the group",
        ),
        // Permanent, because a replacement client and the other member would fence each other forever.
        E::FencedInstanceId | E::Fenced => SourceError::misconfigured(
            "group.instance.id",
            "another member of the group uses the same instance id",
            "give each member an instance id of its own",
        ),
        E::InvalidGroupId => SourceError::misconfigured(
            "group",
            "the broker rejects this group id",
            "choose another group id",
        ),
        E::UnsupportedAssignor => SourceError::misconfigured(
            "group.remote.assignor",
            "the broker has no assignor of this name",
            "remove the property, or name one of the broker's group.consumer.assignors",
        ),
        E::UnsupportedVersion | E::UnsupportedFeature => SourceError::misconfigured(
            "group.protocol",
            "the broker does not support this group protocol",
            "remove the property, or use Kafka 4.0 or later",
        ),
        _ => return None,
    })
}

impl ClientContext for CallbackContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.topics.on_log_line(line);
        if missing_topics::is_missing_line(facility, line) {
            self.shared.lock().suspect_missing_topic(true);
            return tracing::debug!(facility, "{line}");
        }
        log::line(level, facility, line);
    }

    fn stats_raw(&self, statistics_json: &[u8]) {
        if !self.is_replaced.load(Ordering::Relaxed) {
            self.shared.lock().record_group_state(
                statistics::is_coordinator_up(statistics_json),
                Instant::now(),
            );
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(code) if client::error::is_connection(code) => self.connection_errors.log(reason),
            Some(RDKafkaErrorCode::Fatal) => {
                tracing::error!(%error, reason, group = self.group, "fatal kafka client error; the client is replaced, or the source ends if another client would fail in the same way; check the reason")
            }
            _ => {
                tracing::warn!(%error, reason, group = self.group, "kafka client error; librdkafka retries; if it persists, check the brokers' logs")
            }
        }
        if let Some(code) = error.rdkafka_error_code() {
            let mut last_error = self
                .last_error
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            // librdkafka reports "all brokers down" right after a rejected login, which is the cause
            // and is kept.
            if !(client::error::is_connection(code)
                && last_error
                    .as_ref()
                    .is_some_and(|(last, _)| client::error::is_authentication(*last)))
            {
                *last_error = Some((code, reason.to_owned()));
            }
        }
    }
}

impl ConsumerContext for CallbackContext {
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
                tracing::error!(code = %RDKafkaErrorCode::from(other), group = self.group, "rebalance failed, unassigning all partitions; unsettled messages are redelivered after the next rebalance; check the group coordinator");
                self.unassign(consumer, partitions);
            }
        }
    }

    fn commit_callback(&self, result: KafkaResult<()>, offsets: &TopicPartitionList) {
        fault::point("kafka.commit.confirmed");
        let commit_error = match result {
            // There was no offset to commit.
            Err(KafkaError::ConsumerCommit(RDKafkaErrorCode::NoOffset)) => return,
            Err(error) => Some(error),
            Ok(()) => None,
        };
        let error_of =
            |it: &TopicPartitionListElem<'_>| commit_error.clone().or_else(|| it.error().err());
        let (mut failures, mut state) = (Vec::new(), self.shared.lock());
        for it in offsets.elements() {
            match (error_of(&it), it.offset()) {
                (Some(error), _) => {
                    state.commit_again(it.topic(), it.partition());
                    failures.push((error, it));
                }
                (None, Offset::Offset(offset)) => {
                    state.commit_confirmed(it.topic(), it.partition(), offset)
                }
                (None, _) => {}
            }
        }
        drop(state);
        if let Some((error, it)) = failures.first() {
            tracing::warn!(%error, topic = it.topic(), partition = it.partition(), partitions = failures.len(), group = self.group, "offset commit failed, retrying; messages settled since the last commit are redelivered if the consumer stops before a commit succeeds; check the group coordinator");
        }
    }
}

/// Whether the partitions still belong to this member when they are revoked.
pub(crate) fn revocation_kind(consumer: &BaseConsumer<CallbackContext>) -> RevocationKind {
    if consumer.assignment_lost() {
        RevocationKind::Lost
    } else {
        RevocationKind::Revoked
    }
}

/// The error of the source if this client can never read a part of a log; `None` for any other error.
fn unreadable(error: &PartitionError) -> Option<SourceError> {
    use RDKafkaErrorCode as E;
    let PartitionError {
        topic,
        partition,
        offset,
        code,
    } = error;
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
        format!("{topic}/{partition} cannot be read at offset {offset}: {code}"),
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

    /// For `Offset::Beginning` librdkafka would use the log start offset of the deleted topic if it
    /// has read that topic.
    #[test]
    fn a_recreated_topic_starts_at_offset_0() {
        let (kafka, shared) = (
            Kafka::topic("t").brokers("b").group("g"),
            Arc::<SharedState>::default(),
        );
        let context = CallbackContext::new(shared, &kafka, Arc::new(ConnectionErrors::new("b")));
        let start_offset = |start| context.start_offset("t", 0, start);
        assert_eq!(
            start_offset(StartPosition::Recreated),
            Some(Offset::Offset(0))
        );
        assert_eq!(
            [StartPosition::AddedPartition, StartPosition::NoOffset].map(start_offset),
            [Some(Offset::Beginning); 2]
        );
        assert_eq!(
            [
                StartPosition::Committed(7),
                StartPosition::Unknown,
                StartPosition::Replica(7),
                StartPosition::Ambiguous(7)
            ]
            .map(start_offset),
            [None; 4]
        );
    }
}
