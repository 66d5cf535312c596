//! Topics that are deleted and made anew: which log a topic's name stands for now.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::shared::{Begins, Ids, Log};

/// The ids of topics, as librdkafka's log tells them, and those that have changed. Kafka gives each topic one when it is made.
///
/// Clones share it: a client that takes the place of another has heard nothing yet, and a topic may have been made anew between
/// the two.
#[derive(Clone, Default)]
pub(crate) struct Topics(Arc<Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    ids: HashMap<String, Arc<str>>,
    made_anew: Vec<String>,
    changed: HashSet<String>,
}

impl Topics {
    /// Listens to a line of librdkafka's log. It reads on where it stood in a topic that has another id, and says it nowhere
    /// else.
    pub(crate) fn hear(&self, line: &str) {
        let Some(told) = Told::of(line) else { return };
        let mut heard = self.lock();
        let known = heard.ids.insert(told.topic.to_owned(), Arc::from(told.id));
        let before = known.as_deref().unwrap_or(told.before);
        if before != NO_ID && before != told.id {
            heard.made_anew.push(told.topic.to_owned());
            heard.changed.insert(told.topic.to_owned());
        }
    }

    /// The id of a topic; `None` before librdkafka has seen it.
    pub(crate) fn id(&self, topic: &str) -> Option<Arc<str>> {
        self.lock().ids.get(topic).cloned()
    }

    /// What is known of the log of a partition that is begun like this. Once a topic was made anew its ids may repeat under each
    /// later assignment too: one may be lost before anything of it was read.
    pub(crate) fn log(&self, topic: &str, begins: Begins) -> Log {
        let may_repeat = begins == Begins::Anew || self.has_changed(topic);
        Log { id: self.id(topic), ids: if may_repeat { Ids::ANEW } else { Ids::Unique } }
    }

    /// The topics that were deleted and made anew, since it was asked last.
    pub(crate) fn take_made_anew(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().made_anew)
    }

    /// Whether it is among those that will be taken next.
    pub(crate) fn is_made_anew(&self, topic: &str) -> bool {
        self.lock().made_anew.iter().any(|it| it == topic)
    }

    /// Whether a topic was ever made anew while it was listened to.
    pub(crate) fn has_changed(&self, topic: &str) -> bool {
        self.lock().changed.contains(topic)
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

/// What stands before the topic's id in the metadata of a committed offset.
const MARK: &str = "topic-id=";

/// The metadata of an offset that is committed for the topic of this id.
pub(crate) fn metadata(id: &str) -> String {
    format!("{MARK}{id}")
}

/// The id of the topic that an offset was committed for, by its metadata; `None` if it does not say, such as one that a person
/// has set.
pub(crate) fn id_in(metadata: &str) -> Option<&str> {
    metadata.strip_prefix(MARK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_topic_with_another_id_is_told_from_one_that_is_seen_first() {
        let line = |from, to| format!("[thrd:main]: Topic a.Topic changed id from {from} to {to}");
        let topics = Topics::default();
        assert_eq!(topics.id("a.Topic"), None);
        topics.hear(&line(NO_ID, "F2xUbUAeQcSPGv0PhIKTZg"));
        assert_eq!((topics.id("a.Topic").as_deref(), topics.take_made_anew()), (Some("F2xUbUAeQcSPGv0PhIKTZg"), vec![]));
        topics.hear("[thrd:main]: Topic a [0] Leader 1 Epoch 0");
        topics.hear(&line("F2xUbUAeQcSPGv0PhIKTZg", "q5BZ55PYTTyxda8B1C5Amg"));
        assert_eq!(topics.id("a.Topic").as_deref(), Some("q5BZ55PYTTyxda8B1C5Amg"));
        assert!(topics.is_made_anew("a.Topic") && !topics.is_made_anew("a"));
        assert!(topics.has_changed("a.Topic") && !topics.has_changed("a"));
        assert_eq!(topics.log("a.Topic", Begins::At(0)).ids, Ids::ANEW);
        assert_eq!((topics.log("a", Begins::At(0)).ids, topics.log("a", Begins::Anew).ids), (Ids::Unique, Ids::ANEW));
        assert_eq!((topics.take_made_anew(), topics.take_made_anew()), (vec!["a.Topic".to_owned()], vec![]));
    }

    #[test]
    fn a_client_that_takes_the_place_of_another_knows_which_topics_that_one_read() {
        let (before, line) = (Topics::default(), |id| format!("[thrd:main]: Topic a changed id from {NO_ID} to {id}"));
        before.hear(&line("F2xUbUAeQcSPGv0PhIKTZg"));
        let after = before.clone();
        assert_eq!(after.id("a").as_deref(), Some("F2xUbUAeQcSPGv0PhIKTZg"));
        after.hear(&line("F2xUbUAeQcSPGv0PhIKTZg"));
        assert_eq!(after.take_made_anew(), [""; 0]);
        after.hear(&line("q5BZ55PYTTyxda8B1C5Amg"));
        assert_eq!(after.take_made_anew(), ["a"]);
    }

    #[test]
    fn an_offset_says_of_which_topic_it_is_or_nothing() {
        assert_eq!(id_in(&metadata("q5BZ55PYTTyxda8B1C5Amg")), Some("q5BZ55PYTTyxda8B1C5Amg"));
        assert_eq!((id_in(""), id_in("set by hand")), (None, None));
    }
}
