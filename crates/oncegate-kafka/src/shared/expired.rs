//! Counts expired messages, and limits how often they are logged.

use std::time::{Duration, Instant};

use oncegate_core::LogThrottle;

use super::SourceState;
use super::assignment::{AssignedPartition, OffsetGap};

/// How often expired messages are logged per partition.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum number of gaps per partition that are kept until its log start offset is known.
const MAX_DEFERRED: usize = 1_000;

/// The expired messages of one assignment.
#[derive(Default)]
pub(super) struct ExpiryLog {
    expired: ThrottledCount,
    unclassified: ThrottledCount,
    /// The unclassified gaps: those found while the log start offset was unknown.
    deferred: Vec<OffsetGap>,
}

/// Counts occurrences, and reports at most once per [`LOG_INTERVAL`] how many have come since the
/// last report.
struct ThrottledCount {
    throttle: LogThrottle,
    unreported: u64,
}

impl Default for ThrottledCount {
    fn default() -> Self {
        Self {
            throttle: LogThrottle::every(LOG_INTERVAL),
            unreported: 0,
        }
    }
}

impl ThrottledCount {
    /// Adds `count`; returns the number to log if a line is due.
    fn add(&mut self, count: u64, now: Instant) -> Option<u64> {
        self.unreported += count;
        self.throttle.due(now)?;
        Some(std::mem::take(&mut self.unreported))
    }
}

impl SourceState {
    /// Counts messages that expired before they were read. Returns how many to log now, including
    /// those that were not logged before.
    pub(crate) fn count_expired(
        &mut self,
        gap: &OffsetGap,
        expired: u64,
        now: Instant,
    ) -> Option<u64> {
        self.expired += expired;
        match self.expiry_log_of(gap) {
            Some(log) => log.expired.add(expired, now),
            None => Some(expired),
        }
    }

    /// Keeps a gap that cannot be classified while the log start offset is unknown. Returns how
    /// many such gaps to log now.
    pub(crate) fn defer_gap(&mut self, gap: OffsetGap, now: Instant) -> Option<u64> {
        let Some(log) = self.expiry_log_of(&gap) else {
            return Some(1);
        };
        let gaps = log.unclassified.add(1, now);
        if log.deferred.len() < MAX_DEFERRED {
            log.deferred.push(gap);
        }
        gaps
    }

    /// Returns and clears the deferred gaps of the partitions for which `is_known` returns true.
    pub(crate) fn take_deferred_gaps(
        &mut self,
        is_known: impl Fn(&str, i32) -> bool,
    ) -> Vec<OffsetGap> {
        let with_gaps = self
            .assigned
            .values_mut()
            .filter(|it| !it.expiry.deferred.is_empty() && is_known(&it.topic, it.partition));
        with_gaps
            .flat_map(|it| std::mem::take(&mut it.expiry.deferred))
            .collect()
    }

    /// How many messages expired before they were read.
    pub(crate) fn expired(&self) -> u64 {
        self.expired
    }

    fn expiry_log_of(&mut self, gap: &OffsetGap) -> Option<&mut ExpiryLog> {
        let is_match =
            |it: &&mut AssignedPartition| it.partition == gap.partition && it.topic == gap.topic;
        self.assigned
            .values_mut()
            .find(is_match)
            .map(|it| &mut it.expiry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_count_is_reported_at_once_and_the_rest_once_a_minute() {
        let (mut count, started) = (ThrottledCount::default(), Instant::now());
        let reported: Vec<u64> = (0..150)
            .filter_map(|second| count.add(1, started + Duration::from_secs(second)))
            .collect();
        assert_eq!(reported, [1, 60, 60]);
    }
}
