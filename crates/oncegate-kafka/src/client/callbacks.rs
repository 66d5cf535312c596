//! The callbacks that librdkafka calls: for rebalances, commits, errors, statistics and log lines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use oncegate_core::SourceError;
use oncegate_core::internal::fault;
use oncegate_core::internal::{Lock, LogThrottle};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList, TopicPartitionListElem};
use rdkafka::types::RDKafkaRespErr;

use super::batch::MessageQueue;
use super::connection_errors::ConnectionErrors;
use super::topic_ids::TopicIds;
use super::{error, log, missing_topic_log, missing_topics, statistics};
use crate::partition::PartitionEvent;
use crate::settings::{Kafka, OutOfRange, StartAt};
use crate::shared::SharedState;

/// How often failed commits are logged: they are repeated every second.
const COMMIT_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A librdkafka consumer that is a member of the consumer group.
pub(crate) type GroupConsumer = BaseConsumer<CallbackContext>;

/// The consumer's callbacks. They run on the thread that polls or drops the consumer: the polling
/// thread, before it the check of the topics, and for a replaced client the thread that closes it.
pub(crate) struct CallbackContext {
    pub(super) shared: Arc<SharedState>,
    pub(super) group: String,
    pub(super) start: StartAt,
    pub(super) out_of_range: OutOfRange,
    /// The topic ids that this client has seen.
    pub(super) topics: TopicIds,
    /// The time budget for all requests of one rebalance.
    pub(super) request_budget: Duration,
    /// How long a revocation waits for unsettled deliveries.
    pub(super) revoke_drain_timeout: Duration,
    /// The queue that messages are read from. `None` until the polling loop of this client starts,
    /// and once the client closes. The queue holds the consumer, so the queue is removed before the
    /// consumer is dropped.
    queue: Lock<Option<Arc<MessageQueue<CallbackContext>>>>,
    /// The last error that concerns the client and no partition. The check of the topics before the
    /// group is joined (`super::topics`) takes it.
    last_error: Lock<Option<(RDKafkaErrorCode, String)>>,
    pub(super) connection_errors: Arc<ConnectionErrors>,
    /// The throttle of the lines about failed commits.
    commit_log: Lock<LogThrottle>,
    /// Set once another client replaces this one. From then on, the statistics of this client are
    /// ignored, and a revocation only unassigns its partitions.
    pub(super) is_replaced: AtomicBool,
}

impl CallbackContext {
    pub(crate) fn new(
        shared: Arc<SharedState>,
        kafka: &Kafka,
        connection_errors: Arc<ConnectionErrors>,
    ) -> Self {
        Self {
            shared,
            group: kafka.group.clone(),
            start: kafka.start,
            out_of_range: kafka.out_of_range_policy(),
            topics: TopicIds::default(),
            request_budget: kafka.rebalance_step_limit(),
            revoke_drain_timeout: kafka.revoke_drain_timeout(),
            queue: Lock::default(),
            last_error: Lock::default(),
            connection_errors,
            commit_log: Lock::new(LogThrottle::every(COMMIT_LOG_INTERVAL)),
            is_replaced: AtomicBool::new(false),
        }
    }

    /// Continues with the topic ids that the previous client has seen.
    pub(super) fn with_topic_ids(self, topics: TopicIds) -> Self {
        Self { topics, ..self }
    }

    /// Creates a consumer with these callbacks.
    pub(crate) fn consumer(self, kafka: &Kafka) -> Result<GroupConsumer, SourceError> {
        let created = kafka.consumer_config().create_with_context(self);
        created.map_err(error::from_config)
    }

    /// The callbacks of a consumer, with a new shared state.
    #[cfg(test)]
    pub(super) fn with_new_state(kafka: &Kafka) -> Self {
        let connection_errors = Arc::new(ConnectionErrors::new(&kafka.brokers));
        Self::new(Arc::default(), kafka, connection_errors)
    }

    /// Returns and clears the last error that concerns the client and no partition.
    pub(super) fn take_last_error(&self) -> Option<(RDKafkaErrorCode, String)> {
        self.last_error.lock().take()
    }

    pub(super) fn queue(&self) -> Option<Arc<MessageQueue<CallbackContext>>> {
        self.queue.lock().clone()
    }

    pub(super) fn set_queue(&self, queue: Option<Arc<MessageQueue<CallbackContext>>>) {
        *self.queue.lock() = queue;
    }

    /// Passes librdkafka's log lines since the last call to [`log`](ClientContext::log).
    pub(super) fn forward_log(&self) {
        if let Some(queue) = self.queue() {
            queue.forward_log();
        }
    }
}

impl ClientContext for CallbackContext {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        self.topics.on_log_line(line);
        if missing_topic_log::is_missing_line(facility, line) {
            self.shared.lock().client.suspect_missing_topic(true);
            return tracing::debug!(facility, "{line}");
        }
        log::line(level, facility, line);
    }

    fn stats_raw(&self, statistics_json: &[u8]) {
        if !self.is_replaced.load(Ordering::Relaxed) {
            let is_up = statistics::is_coordinator_up(statistics_json);
            let mut state = self.shared.lock();
            state.client.record_coordinator_state(is_up, Instant::now());
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        match error.rdkafka_error_code() {
            Some(code) if error::is_connection(code) => self.connection_errors.log(reason),
            Some(RDKafkaErrorCode::Fatal) => {
                tracing::error!(%error, reason, group = self.group, "fatal kafka client error; the client is replaced, or the source ends if another client would fail in the same way; check the reason")
            }
            _ => {
                tracing::warn!(%error, reason, group = self.group, "kafka client error; librdkafka retries; if it persists, check the brokers' logs")
            }
        }
        if let Some(code) = error.rdkafka_error_code() {
            let mut last_error = self.last_error.lock();
            // librdkafka reports "all brokers down" right after a rejected login. The rejected
            // login is the cause, so that error is kept.
            if !(error::is_connection(code)
                && last_error
                    .as_ref()
                    .is_some_and(|(last, _)| error::is_authentication(*last)))
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
            let Offset::Offset(offset) = it.offset() else {
                continue;
            };
            match error_of(&it) {
                Some(error) => {
                    state.retry_commit(it.topic(), it.partition());
                    let code = error.rdkafka_error_code();
                    if code.is_some_and(missing_topics::is_missing) {
                        // The watching thread looks the topics up, and logs a missing one with the
                        // remedy.
                        state.client.suspect_missing_topic(true);
                        tracing::debug!(%error, topic = it.topic(), partition = it.partition(), "offset commit failed, a topic may be missing");
                    } else {
                        failures.push((error, it));
                    }
                }
                None => {
                    let event = PartitionEvent::CommitConfirmed(offset);
                    state.apply(it.topic(), it.partition(), event);
                }
            }
        }
        drop(state);
        if let Some((error, it)) = failures.first()
            && let Some(suppressed_lines) = self.commit_log.lock().due(Instant::now())
        {
            tracing::warn!(%error, topic = it.topic(), partition = it.partition(), partitions = failures.len(), group = self.group, suppressed_lines, "offset commit failed, retrying; messages settled since the last commit are redelivered if the consumer stops before a commit succeeds; check the group coordinator");
        }
    }
}
