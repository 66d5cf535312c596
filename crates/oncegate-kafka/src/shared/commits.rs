//! Offsets to commit, and the results of commits.

use std::time::{Duration, Instant};

use super::SourceState;
use super::assignment::{AssignedPartition, OffsetCommit};

/// The pause before a failed commit is repeated.
pub(super) const COMMIT_RETRY_PAUSE: Duration = Duration::from_secs(1);

impl SourceState {
    /// Takes the offsets to commit that were not returned before.
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

    /// A commit of this partition failed. Its position is committed again after
    /// [`COMMIT_RETRY_PAUSE`].
    pub(crate) fn commit_again(&mut self, topic: &str, partition: i32) {
        let retry_at = Instant::now() + COMMIT_RETRY_PAUSE;
        self.all_of(topic, partition)
            .for_each(|it| it.commit_immediately_from = Some(retry_at));
    }

    /// A commit of this partition succeeded. An offset above all that this assignment has committed
    /// comes from a retried commit of an earlier assignment, which the broker handled after the lower
    /// commit of this one. librdkafka would commit nothing until that offset is reached, and a crash
    /// would skip messages, so the position is committed again at once. For two commits of the same
    /// assignment, librdkafka does this itself.
    pub(crate) fn commit_confirmed(&mut self, topic: &str, partition: i32, offset: i64) {
        let now = Instant::now();
        let is_overwritten = |it: &&mut AssignedPartition| {
            it.watermark
                .last_taken()
                .is_some_and(|last_taken| offset > last_taken)
        };
        self.all_of(topic, partition)
            .filter(is_overwritten)
            .for_each(|it| it.commit_immediately_from = Some(now));
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
