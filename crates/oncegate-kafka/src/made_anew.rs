//! Topics that are deleted and made anew: which log a topic's name stands for now.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::shared::{Begins, Ids, Log};
use crate::topic_identity::{TopicIdentity, TopicMatch};

/// The ids of topics, as librdkafka's log tells them, and those that have changed. Kafka gives each
/// topic one when it is made.
///
/// Clones share it: a client that takes the place of another has heard nothing yet, and a topic may
/// have been made anew between the two.
#[derive(Clone, Default)]
pub(crate) struct Topics(Arc<Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    ids: HashMap<String, Arc<str>>,
    /// The cluster id that librdkafka has reported last.
    cluster_id: Option<Arc<str>>,
    /// Topics whose id has changed, with their identity before the change. Not compared yet.
    changes: Vec<(String, TopicIdentity)>,
    made_anew: Vec<String>,
    /// Topics whose id has changed because the brokers are those of another cluster, or may be.
    on_another_cluster: Vec<String>,
    /// For each topic whose id has ever changed, the result of the last comparison.
    compared: HashMap<String, TopicMatch>,
}

impl Heard {
    fn identity(&self, topic: &str) -> Option<TopicIdentity> {
        Some(TopicIdentity {
            topic_id: self.ids.get(topic)?.clone(),
            cluster_id: self.cluster_id.clone(),
        })
    }
}

impl Topics {
    /// Listens to a line of librdkafka's log. It reads on where it stood in a topic that has
    /// another id, and says it nowhere else.
    pub(crate) fn hear(&self, line: &str) {
        let Some(told) = Told::of(line) else { return };
        let mut heard = self.lock();
        let known = heard.ids.insert(told.topic.to_owned(), Arc::from(told.id));
        let before = known.unwrap_or_else(|| Arc::from(told.before));
        if *before != *NO_ID && *before != *told.id {
            let before = TopicIdentity {
                topic_id: before,
                cluster_id: heard.cluster_id.clone(),
            };
            heard.changes.push((told.topic.to_owned(), before));
        }
    }

    /// A topic whose id has changed and was not compared yet.
    pub(crate) fn changed(&self) -> Option<String> {
        self.lock().changes.first().map(|(topic, _)| topic.clone())
    }

    /// Compares each topic whose id has changed with the topic before it. `cluster_id` must not be
    /// older than the topic ids: librdkafka logs the topic ids of a response before it stores the
    /// cluster id of that response.
    pub(crate) fn compare(&self, cluster_id: Option<String>) {
        let heard = &mut *self.lock();
        heard.cluster_id = cluster_id.map(Arc::from);
        for (topic, before) in std::mem::take(&mut heard.changes) {
            let Some(current) = heard.identity(&topic) else {
                continue;
            };
            let compared = before.compare(&current);
            match compared {
                TopicMatch::Same => continue,
                TopicMatch::Recreated => heard.made_anew.push(topic.clone()),
                TopicMatch::Replica | TopicMatch::Ambiguous => {
                    heard.on_another_cluster.push(topic.clone())
                }
            }
            heard.compared.insert(topic, compared);
        }
    }

    /// Whether the cluster id is known.
    pub(crate) fn knows_cluster(&self) -> bool {
        self.lock().cluster_id.is_some()
    }

    /// The identity of a topic; `None` before librdkafka has seen it.
    pub(crate) fn identity(&self, topic: &str) -> Option<TopicIdentity> {
        self.lock().identity(topic)
    }

    /// What is known of the log of a partition that is begun like this. Once the id of a topic has
    /// changed, positions may repeat under each later assignment too: one may be lost before
    /// anything of it was read.
    pub(crate) fn log(&self, topic: &str, begins: Begins) -> Log {
        let is_other_topic = matches!(
            begins,
            Begins::Anew | Begins::Replica(_) | Begins::Ambiguous(_)
        );
        let may_repeat = is_other_topic || self.lock().compared.contains_key(topic);
        Log {
            identity: self.identity(topic),
            ids: if may_repeat { Ids::ANEW } else { Ids::Unique },
        }
    }

    /// The topics that were deleted and made anew, since it was asked last.
    pub(crate) fn take_made_anew(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().made_anew)
    }

    /// The topics that are or may be on another cluster than before, since the last call.
    pub(crate) fn take_on_another_cluster(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().on_another_cluster)
    }

    /// Whether the id of a topic has changed and the polling thread has not acted on it yet.
    pub(crate) fn is_change_pending(&self, topic: &str) -> bool {
        let heard = self.lock();
        heard
            .changes
            .iter()
            .map(|(it, _)| it)
            .chain(&heard.made_anew)
            .chain(&heard.on_another_cluster)
            .any(|it| it == topic)
    }

    /// Whether a topic was deleted and created again, as far as this process has seen.
    pub(crate) fn was_recreated(&self, topic: &str) -> bool {
        self.lock().compared.get(topic) == Some(&TopicMatch::Recreated)
    }

    fn lock(&self) -> MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The id of no topic, as librdkafka writes it.
const NO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

/// What a line says of a topic's id.
#[derive(Debug, PartialEq, Eq)]
struct Told<'a> {
    topic: &'a str,
    before: &'a str,
    id: &'a str,
}

impl<'a> Told<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let (topic, ids) = line.split_once(" changed id from ")?;
        let (_, topic) = topic.rsplit_once("Topic ")?;
        let (before, id) = ids.trim_end().split_once(" to ")?;
        Some(Self { topic, before, id })
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

    fn topic_id(topics: &Topics) -> Option<Arc<str>> {
        Some(topics.identity("a.Topic")?.topic_id)
    }

    /// A topic whose id has changed, after which the cluster has this id.
    fn changed(cluster_id: Option<&str>) -> Topics {
        let topics = Topics::default();
        topics.hear(&line(NO_ID, FIRST));
        topics.compare(Some(CLUSTER.to_owned()));
        assert_eq!(
            (
                topic_id(&topics).as_deref(),
                topics.changed(),
                topics.is_change_pending("a.Topic")
            ),
            (Some(FIRST), None, false)
        );
        topics.hear("[thrd:main]: Topic a [0] Leader 1 Epoch 0");
        topics.hear(&line(FIRST, SECOND));
        assert_eq!(
            (topic_id(&topics).as_deref(), topics.changed().as_deref()),
            (Some(SECOND), Some("a.Topic"))
        );
        assert!(
            topics.is_change_pending("a.Topic") && !topics.is_change_pending("a"),
            "not compared yet"
        );
        topics.compare(cluster_id.map(str::to_owned));
        assert!(topics.is_change_pending("a.Topic") && topics.changed().is_none());
        assert_eq!(topics.log("a.Topic", Begins::At(0)).ids, Ids::ANEW);
        assert_eq!(
            (
                topics.log("a", Begins::At(0)).ids,
                topics.log("a", Begins::Anew).ids
            ),
            (Ids::Unique, Ids::ANEW)
        );
        topics
    }

    #[test]
    fn a_topic_with_another_id_is_told_from_one_that_is_seen_first() {
        let topics = changed(Some(CLUSTER));
        assert!(topics.was_recreated("a.Topic") && !topics.was_recreated("a"));
        assert_eq!(
            (topics.take_made_anew(), topics.take_made_anew()),
            (vec!["a.Topic".to_owned()], vec![])
        );
        assert_eq!(topics.take_on_another_cluster(), [""; 0]);
    }

    #[test]
    fn a_topic_that_may_be_on_another_cluster_was_not_recreated() {
        for cluster_id in [Some("b25jZWdhdGUta2Fma2EtMg"), None] {
            let topics = changed(cluster_id);
            assert!(!topics.was_recreated("a.Topic"));
            assert_eq!(
                (
                    topics.take_on_another_cluster(),
                    topics.take_on_another_cluster()
                ),
                (vec!["a.Topic".to_owned()], vec![])
            );
            assert_eq!(topics.take_made_anew(), [""; 0]);
        }
    }

    #[test]
    fn a_client_that_takes_the_place_of_another_knows_which_topics_that_one_read() {
        let before = Topics::default();
        before.hear(&line(NO_ID, FIRST));
        before.compare(Some(CLUSTER.to_owned()));
        let after = before.clone();
        assert_eq!(topic_id(&after).as_deref(), Some(FIRST));
        after.hear(&line(NO_ID, FIRST));
        assert_eq!(after.changed(), None);
        after.hear(&line(NO_ID, SECOND));
        after.compare(Some(CLUSTER.to_owned()));
        assert_eq!(after.take_made_anew(), ["a.Topic"]);
    }
}
