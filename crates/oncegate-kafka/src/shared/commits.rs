//! Offsets to commit, and the results of commits.

use std::time::{Duration, Instant};

use super::SourceState;
use super::assignment::{AssignedPartition, OffsetCommit};

/// The pause before a failed commit is repeated.
pub(super) const COMMIT_RETRY_PAUSE: Duration = Duration::from_secs(1);

impl SourceState {
    /// The offsets to commit since the last call.
    pub(crate) fn commits(&mut self) -> Vec<OffsetCommit> {
        let now = Instant::now();
        for assigned in self.assigned.values_mut() {
            let position = assigned.watermark.position();
            if assigned.lowest_since.0 != position {
                assigned.lowest_since = (position, now);
            }
        }
        self.assigned
            .values_mut()
            .filter_map(|it| it.commit(now))
            .collect()
    }

    /// A commit of this partition failed: its position is committed again soon.
    pub(crate) fn commit_again(&mut self, topic: &str, partition: i32) {
        let soon = Instant::now() + COMMIT_RETRY_PAUSE;
        self.all_of(topic, partition)
            .for_each(|it| it.send_from = Some(soon));
    }

    /// A commit of this partition succeeded. If its offset is above every offset of this
    /// assignment, it is a retried commit of an earlier assignment, which has overtaken the lower
    /// one that this assignment started with. librdkafka would commit nothing until that offset is
    /// passed, and a crash would skip messages; so the position is committed again at once.
    /// librdkafka itself repeats a commit below an earlier one.
    pub(crate) fn commit_confirmed(&mut self, topic: &str, partition: i32, offset: i64) {
        let now = Instant::now();
        let overtaken = |it: &&mut AssignedPartition| {
            it.watermark
                .last_taken()
                .is_some_and(|last_taken| offset > last_taken)
        };
        self.all_of(topic, partition)
            .filter(overtaken)
            .for_each(|it| it.send_from = Some(now));
    }

    fn all_of<'a>(
        &'a mut self,
        topic: &'a str,
        partition: i32,
    ) -> impl Iterator<Item = &'a mut AssignedPartition> {
        self.assigned
            .values_mut()
            .filter(move |it| it.partition == partition && *it.topic == *topic)
    }
}
