//! What is committed, and what became of it.

use std::time::{Duration, Instant};

use super::State;
use super::assigned::{Assigned, Commit};

/// How long after a commit that failed the next one is sent.
pub(super) const COMMIT_AGAIN: Duration = Duration::from_secs(1);

impl State {
    /// What there is to commit since the last call.
    pub(crate) fn commits(&mut self) -> Vec<Commit> {
        let now = Instant::now();
        for assigned in self.assigned.values_mut() {
            let stands = assigned.watermark.position();
            if assigned.stood.0 != stands {
                assigned.stood = (stands, now);
            }
        }
        self.assigned
            .values_mut()
            .filter_map(|it| it.commit(now))
            .collect()
    }

    /// A commit of this partition failed: its position is sent by itself soon.
    pub(crate) fn commit_again(&mut self, topic: &str, partition: i32) {
        let soon = Instant::now() + COMMIT_AGAIN;
        self.all_of(topic, partition)
            .for_each(|it| it.send_from = Some(soon));
    }

    /// A commit of this partition stands. One above all that was ever to be committed under this
    /// assignment is of one before it: it was tried again, and carried out after the lower one that
    /// this assignment began with. librdkafka would send nothing until that is passed, and a crash
    /// would skip what lies between; so the position is sent again at once. One below what stood
    /// before librdkafka sends again by itself.
    pub(crate) fn confirmed(&mut self, topic: &str, partition: i32, offset: i64) {
        let now = Instant::now();
        let overtaken =
            |it: &&mut Assigned| it.watermark.given().is_some_and(|given| offset > given);
        self.all_of(topic, partition)
            .filter(overtaken)
            .for_each(|it| it.send_from = Some(now));
    }

    fn all_of<'a>(
        &'a mut self,
        topic: &'a str,
        partition: i32,
    ) -> impl Iterator<Item = &'a mut Assigned> {
        self.assigned
            .values_mut()
            .filter(move |it| it.partition == partition && *it.topic == *topic)
    }
}
