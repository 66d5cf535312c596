//! Detects partitions that the client does not read although their log grows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::internal::doubled;

use crate::shared::ReadProgress;

/// How many times the whole message queue must have been read before a partition counts as stalled.
/// librdkafka fetches for all partitions when the queue is short. The first time, the queue may
/// have only messages that were fetched before the partition had new ones. The second time, it has
/// the new messages. The third time covers a fetch response that arrived while the queue was read.
const REQUIRED_QUEUE_READS: u32 = 3;
/// Maximum number of times that the time limit of a partition is doubled: up to 64 times
/// `stalled_after`.
const MAX_DOUBLINGS: u32 = 6;

/// Detects stalled partitions, from the results of this and earlier checks.
#[derive(Default)]
pub(super) struct StallDetector {
    /// The candidates, by the epoch of their [`Partition`](crate::partition::Partition): each
    /// assignment of a partition has another one.
    candidates: HashMap<u64, StallCandidate>,
    /// Partitions whose client was replaced and that have made no progress since.
    backoffs: HashMap<(Arc<str>, i32), ReplacementBackoff>,
}

/// The backoff of a partition that has made no progress since its client was replaced. The fetches
/// of the partition may only be slow, and each replacement restarts them, so each client gets twice
/// the time of the one before.
#[derive(Clone, Copy, Debug, Default)]
struct ReplacementBackoff {
    /// The position at the last replacement.
    position: Option<i64>,
    /// How many times the time limit is doubled.
    doublings: u32,
}

/// A partition that makes no progress although its log does not end at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StallCandidate {
    /// Since when the partition has made no progress.
    since: Instant,
    position: Option<i64>,
    /// The log end at `since`.
    end: i64,
    /// How many times the whole message queue has been read since then.
    queue_reads: u32,
    /// The polling thread's progress at the start of the current reading of the whole queue.
    queue_read_start: ReadProgress,
}

impl StallCandidate {
    /// Updates the candidate of a partition that is read from `position` and whose log ends at
    /// `end`; `None` if all was read. A log that ends below `position` was truncated.
    fn next(
        before: Option<Self>,
        position: Option<i64>,
        end: i64,
        progress: ReadProgress,
        now: Instant,
    ) -> Option<Self> {
        if position == Some(end) {
            return None;
        }
        let start = Self {
            since: now,
            position,
            end,
            queue_reads: 0,
            queue_read_start: progress,
        };
        // A log that ended below the position, and no longer does, was not truncated: the log end
        // was fetched before the position.
        let was_behind = |before: &Self| Some(before.end) < position && position <= Some(end);
        let mut next = before
            .filter(|before| before.position == position && !was_behind(before))
            .unwrap_or(start);
        if next.queue_read_start.is_queue_read_at(progress) {
            (next.queue_reads, next.queue_read_start) = (next.queue_reads + 1, progress);
        }
        Some(next)
    }

    /// Whether the partition has made no progress for `after` although its log grew and the message
    /// queue was read completely [`REQUIRED_QUEUE_READS`] times. A log that does not grow is no
    /// sign of a stall, because its unread offsets may be transaction markers. Nor is a queue that
    /// is not read, because the source may have no room.
    fn is_stalled(&self, end: i64, now: Instant, after: Duration) -> bool {
        end > self.end
            && self.queue_reads >= REQUIRED_QUEUE_READS
            && now.duration_since(self.since) >= after
    }
}

impl StallDetector {
    /// Checks partitions, given as assignment epoch, topic, partition and position, and returns a
    /// description of each that is stalled. A candidate whose log end is unknown stays a candidate.
    pub(super) fn check(
        &mut self,
        partitions: Vec<(u64, Arc<str>, i32, Option<i64>)>,
        log_ends: &HashMap<(String, i32), i64>,
        progress: ReadProgress,
        now: Instant,
        stalled_after: Duration,
    ) -> Vec<String> {
        let (mut candidates, mut stalled) = (HashMap::new(), Vec::new());
        for (epoch, topic, partition, position) in partitions {
            let before = self.candidates.get(&epoch).copied();
            let Some(end) = log_ends.get(&(topic.to_string(), partition)) else {
                candidates.extend(before.map(|before| (epoch, before)));
                continue;
            };
            let Some(next) = StallCandidate::next(before, position, *end, progress, now) else {
                continue;
            };
            let time_limit = self.time_limit(&topic, partition, position, stalled_after);
            if !next.is_stalled(*end, now, time_limit) {
                candidates.insert(epoch, next);
                continue;
            }
            // The partition is no candidate any more, so that its measurement starts again.
            stalled.push(format!(
                "no progress on {topic}/{partition} at offset {position:?} for {time_limit:?}, while its log ends at {end}"
            ));
            let backoff = self.backoffs.entry((topic, partition)).or_default();
            backoff.position = position;
            backoff.doublings = (backoff.doublings + 1).min(MAX_DOUBLINGS);
        }
        self.candidates = candidates;
        stalled
    }

    /// How long a partition that was read to `position` may make no progress. Progress since its
    /// client was replaced resets the limit.
    fn time_limit(
        &mut self,
        topic: &Arc<str>,
        partition: i32,
        position: Option<i64>,
        stalled_after: Duration,
    ) -> Duration {
        let key = (topic.clone(), partition);
        match self.backoffs.get(&key) {
            None => stalled_after,
            Some(before) if position <= before.position => {
                doubled(stalled_after, before.doublings, Duration::MAX)
            }
            Some(_) => {
                self.backoffs.remove(&key);
                stalled_after
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_position_without_progress_in_a_growing_log_is_stalled() {
        let (started, after, progress) = (
            Instant::now(),
            Duration::from_secs(60),
            ReadProgress::default(),
        );
        let at = |seconds| started + Duration::from_secs(seconds);
        let next = |before, at, end, now| {
            let next = StallCandidate::next(before, at, end, progress, now)?;
            Some(StallCandidate {
                queue_reads: REQUIRED_QUEUE_READS,
                ..next
            })
        };
        assert_eq!(
            next(None, Some(7), 7, started),
            None,
            "a partition that was read completely is no candidate"
        );
        let first = next(None, Some(5), 7, started)
            .expect("a partition with unread messages is a candidate");
        let later = next(Some(first), Some(5), 9, at(70))
            .expect("a partition with unread messages is a candidate");
        assert_eq!(later, first);
        assert!(later.is_stalled(9, at(70), after));
        assert!(
            !later.is_stalled(9, at(59), after),
            "the time limit is not reached"
        );
        assert!(
            !later.is_stalled(7, at(70), after),
            "the remaining offsets may be transaction markers"
        );
        let progressed = next(Some(first), Some(6), 9, at(70))
            .expect("a partition with unread messages is a candidate");
        assert!(
            !progressed.is_stalled(12, at(80), after),
            "a message was read"
        );
        let truncated =
            next(None, Some(50), 10, started).expect("a position above the log end is a candidate");
        assert!(truncated.is_stalled(11, at(60), after));
        let fetched_before = next(None, Some(105), 100, started)
            .expect("a position above the log end is a candidate");
        let later = next(Some(fetched_before), Some(105), 106, at(1))
            .expect("a partition with unread messages is a candidate");
        assert!(!later.is_stalled(106, at(70), after));
        let unread = next(None, None, 3, started).expect("an unread partition is a candidate");
        assert!(
            next(Some(unread), None, 4, at(60))
                .expect("a partition with unread messages is a candidate")
                .is_stalled(4, at(60), after)
        );
    }
}
