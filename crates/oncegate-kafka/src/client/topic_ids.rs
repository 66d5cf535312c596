//! Topic ids, and the topics that were deleted and created again.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};

use super::topic_id_log::{IdChange, NO_ID};
use crate::partition::{LogIdentity, PositionIds, StartPosition, TopicIdentity, TopicMatch};
use oncegate_core::internal::Lock;

/// The topic ids from librdkafka's log, and which of them have changed. Kafka assigns each topic an
/// id when it is created.
///
/// Clones share the state, so that a replacement client has the topic ids of the replaced one: a
/// topic may be recreated after the old client ends and before the new one starts.
#[derive(Clone, Default)]
pub(crate) struct TopicIds(Arc<Lock<TopicIdState>>);

#[derive(Default)]
struct TopicIdState {
    /// The last topic id that librdkafka logged, by topic.
    ids: HashMap<String, Arc<str>>,
    /// The cluster id that was last read from librdkafka.
    cluster_id: Option<Arc<str>>,
    /// Topics with a changed id that [`TopicIds::compare`] has not handled yet, each with its
    /// identity before the change.
    changes: Vec<(String, TopicIdentity)>,
    /// Topics that were recreated, for [`TopicIds::take_recreated`].
    recreated: Vec<String>,
    /// Topics whose id has changed because the brokers are, or may be, those of another cluster.
    cluster_changed: Vec<String>,
    /// The result of the last comparison, for each topic whose id has changed since the start.
    compared: HashMap<String, TopicMatch>,
}

impl TopicIdState {
    fn identity(&self, topic: &str) -> Option<TopicIdentity> {
        Some(TopicIdentity {
            topic_id: self.ids.get(topic)?.clone(),
            cluster_id: self.cluster_id.clone(),
        })
    }
}

impl TopicIds {
    /// Handles a line of librdkafka's log, which may report the topic id of a metadata response.
    pub(crate) fn on_log_line(&self, line: &str) {
        let Some(change) = IdChange::parse(line) else {
            return;
        };
        let mut state = self.lock();
        let previous = state
            .ids
            .insert(change.topic.to_owned(), Arc::from(change.id));
        let before = previous.unwrap_or_else(|| Arc::from(change.before));
        if *before != *NO_ID && *before != *change.id {
            let before = TopicIdentity {
                topic_id: before,
                cluster_id: state.cluster_id.clone(),
            };
            state.changes.push((change.topic.to_owned(), before));
        }
    }

    /// A topic with a changed id that [`compare`](Self::compare) has not handled yet.
    pub(crate) fn changed(&self) -> Option<String> {
        self.lock().changes.first().map(|(topic, _)| topic.clone())
    }

    /// Compares each changed topic id with the one before it. `cluster_id` must not be older than
    /// the topic ids: librdkafka logs the topic ids of a response before it stores its cluster id.
    pub(crate) fn compare(&self, cluster_id: Option<String>) {
        let state = &mut *self.lock();
        state.cluster_id = cluster_id.map(Arc::from);
        for (topic, before) in std::mem::take(&mut state.changes) {
            let Some(current) = state.identity(&topic) else {
                continue;
            };
            let compared = before.compare(&current);
            match compared {
                TopicMatch::Same => continue,
                TopicMatch::Recreated => state.recreated.push(topic.clone()),
                TopicMatch::Mirrored | TopicMatch::Ambiguous => {
                    state.cluster_changed.push(topic.clone())
                }
            }
            state.compared.insert(topic, compared);
        }
    }

    /// Whether the last [`compare`](Self::compare) was given a cluster id.
    pub(crate) fn knows_cluster(&self) -> bool {
        self.lock().cluster_id.is_some()
    }

    /// The identity of a topic; `None` before librdkafka has seen it.
    pub(crate) fn identity(&self, topic: &str) -> Option<TopicIdentity> {
        self.lock().identity(topic)
    }

    /// The log identity of a partition that starts at `start`. Once a topic's id has changed,
    /// offsets may repeat in every later assignment, not only in the first one: this member may
    /// have lost the first one before it read a message.
    pub(crate) fn log(&self, topic: &str, start: StartPosition) -> LogIdentity {
        let is_other_topic = matches!(
            start,
            StartPosition::Recreated | StartPosition::Mirrored(_) | StartPosition::Ambiguous(_)
        );
        let may_repeat = is_other_topic || self.lock().compared.contains_key(topic);
        LogIdentity {
            identity: self.identity(topic),
            position_ids: if may_repeat {
                PositionIds::RECREATED
            } else {
                PositionIds::Unique
            },
        }
    }

    /// Returns and clears the topics that were deleted and created again.
    pub(crate) fn take_recreated(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().recreated)
    }

    /// Returns and clears the topics that are, or may be, on another cluster than before.
    pub(crate) fn take_cluster_changed(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().cluster_changed)
    }

    /// Whether the polling thread has not handled a change of this topic's id yet.
    pub(crate) fn is_change_pending(&self, topic: &str) -> bool {
        let state = self.lock();
        state
            .changes
            .iter()
            .map(|(it, _)| it)
            .chain(&state.recreated)
            .chain(&state.cluster_changed)
            .any(|it| it == topic)
    }

    /// Whether a topic was deleted and created again while this process ran.
    pub(crate) fn was_recreated(&self, topic: &str) -> bool {
        self.lock().compared.get(topic) == Some(&TopicMatch::Recreated)
    }

    fn lock(&self) -> MutexGuard<'_, TopicIdState> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "F2xUbUAeQcSPGv0PhIKTZg";
    const SECOND: &str = "q5BZ55PYTTyxda8B1C5Amg";
    const CLUSTER: &str = "b25jZWdhdGUta2Fma2EtMQ";

    fn line(from: &str, to: &str) -> String {
        format!("[thrd:main]: Topic a.Topic changed id from {from} to {to}")
    }

    fn topic_id(topics: &TopicIds) -> Option<Arc<str>> {
        Some(topics.identity("a.Topic")?.topic_id)
    }

    /// The topic ids of a client whose topic has changed its id, compared with this cluster id.
    fn changed(cluster_id: Option<&str>) -> TopicIds {
        let topics = TopicIds::default();
        topics.on_log_line(&line(NO_ID, FIRST));
        topics.compare(Some(CLUSTER.to_owned()));
        assert_eq!(
            (
                topic_id(&topics).as_deref(),
                topics.changed(),
                topics.is_change_pending("a.Topic")
            ),
            (Some(FIRST), None, false)
        );
        topics.on_log_line("[thrd:main]: Topic a [0] Leader 1 Epoch 0");
        topics.on_log_line(&line(FIRST, SECOND));
        assert_eq!(
            (topic_id(&topics).as_deref(), topics.changed().as_deref()),
            (Some(SECOND), Some("a.Topic"))
        );
        assert!(
            topics.is_change_pending("a.Topic") && !topics.is_change_pending("a"),
            "the change is pending until the polling thread handles it"
        );
        topics.compare(cluster_id.map(str::to_owned));
        assert!(topics.is_change_pending("a.Topic") && topics.changed().is_none());
        assert_eq!(
            topics
                .log("a.Topic", StartPosition::Committed(0))
                .position_ids,
            PositionIds::RECREATED
        );
        assert_eq!(
            (
                topics.log("a", StartPosition::Committed(0)).position_ids,
                topics.log("a", StartPosition::Recreated).position_ids
            ),
            (PositionIds::Unique, PositionIds::RECREATED)
        );
        topics
    }

    #[test]
    fn a_changed_topic_id_is_distinguished_from_the_first_one() {
        let topics = changed(Some(CLUSTER));
        assert!(topics.was_recreated("a.Topic") && !topics.was_recreated("a"));
        assert_eq!(
            (topics.take_recreated(), topics.take_recreated()),
            (vec!["a.Topic".to_owned()], vec![])
        );
        assert_eq!(topics.take_cluster_changed(), [""; 0]);
    }

    #[test]
    fn a_topic_that_may_be_on_another_cluster_was_not_recreated() {
        for cluster_id in [Some("b25jZWdhdGUta2Fma2EtMg"), None] {
            let topics = changed(cluster_id);
            assert!(!topics.was_recreated("a.Topic"));
            assert_eq!(
                (topics.take_cluster_changed(), topics.take_cluster_changed()),
                (vec!["a.Topic".to_owned()], vec![])
            );
            assert_eq!(topics.take_recreated(), [""; 0]);
        }
    }

    #[test]
    fn a_replacement_client_knows_the_topic_ids_of_the_replaced_one() {
        let before = TopicIds::default();
        before.on_log_line(&line(NO_ID, FIRST));
        before.compare(Some(CLUSTER.to_owned()));
        let after = before.clone();
        assert_eq!(topic_id(&after).as_deref(), Some(FIRST));
        after.on_log_line(&line(NO_ID, FIRST));
        assert_eq!(after.changed(), None);
        after.on_log_line(&line(NO_ID, SECOND));
        after.compare(Some(CLUSTER.to_owned()));
        assert_eq!(after.take_recreated(), ["a.Topic"]);
    }
}
