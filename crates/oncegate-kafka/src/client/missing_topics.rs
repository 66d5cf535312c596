//! Logs topics that were deleted while the group reads them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use oncegate_core::internal::LogThrottle;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::RDKafkaErrorCode;

use super::topics;
use crate::settings::Kafka;
use crate::shared::SharedState;

/// How often a missing topic is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether this error says that a topic or partition does not exist.
pub(super) fn is_missing(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    matches!(
        code,
        E::UnknownTopicOrPartition | E::UnknownTopic | E::UnknownPartition
    )
}

/// The topics that the group reads, which are looked up when an error says that one may be missing.
pub(super) struct MissingTopics<'a> {
    kafka: &'a Kafka,
    /// The number of partitions of each topic when it was last found, for the command that creates
    /// the topic.
    partitions: HashMap<&'a str, usize>,
    throttles: HashMap<&'a str, LogThrottle>,
}

impl<'a> MissingTopics<'a> {
    pub(super) fn new(kafka: &'a Kafka) -> Self {
        Self {
            kafka,
            partitions: HashMap::new(),
            throttles: HashMap::new(),
        }
    }

    /// Looks up each topic whose number of partitions is unknown, and all topics if one may be
    /// missing. If a missing topic was suspected before this call, logs each missing topic. A
    /// metadata request of a consumer creates no topic.
    pub(super) fn check<C: ConsumerContext>(
        &mut self,
        client: &BaseConsumer<C>,
        shared: &SharedState,
    ) {
        let is_suspected = shared.lock().client.topic_may_be_missing();
        let mut is_missing_still = false;
        for topic in &self.kafka.topics {
            if !is_suspected && self.partitions.contains_key(topic.as_str()) {
                continue;
            }
            let Ok(metadata) = client.fetch_metadata(Some(topic), REQUEST_TIMEOUT) else {
                return;
            };
            let Some(found) = metadata.topics().first() else {
                continue;
            };
            match found.error().map(RDKafkaErrorCode::from) {
                None => {
                    self.partitions.insert(topic, found.partitions().len());
                }
                Some(code) if is_missing(code) => {
                    is_missing_still = true;
                    if is_suspected {
                        self.log(topic, metadata.brokers().len());
                    }
                }
                Some(_) => {}
            }
        }
        let mut state = shared.lock();
        state.client.suspect_missing_topic(is_missing_still);
    }

    fn log(&mut self, topic: &'a str, brokers: usize) {
        let throttle = self
            .throttles
            .entry(topic)
            .or_insert_with(|| LogThrottle::every(LOG_INTERVAL));
        let Some(suppressed_lines) = throttle.due(Instant::now()) else {
            return;
        };
        let options = self
            .partitions
            .get(topic)
            .map(|partitions| format!(" --partitions {partitions}"))
            .unwrap_or_default();
        let replicas = Kafka::replicas(brokers);
        let create = topics::create_command(self.kafka, topic, replicas, &options);
        tracing::error!(
            topic,
            group = self.kafka.group,
            suppressed_lines,
            "topic deleted: it does not exist any more, and its unread messages are lost; the consumer reads the topic once it exists again; create it: {create}"
        );
    }
}
