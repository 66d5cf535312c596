//! Counts and logs the messages that *expired* before they were read: those that retention or
//! `DeleteRecords` has removed from the log.
//!
//! # Workaround
//! - *Symptom:* an error response resets the cached log start offset. *Version:* librdkafka 2.12.1.
//! - *Workaround:* the gaps between offsets are kept until the log start offset is known again.
//! - *Upstream:* `docs/upstream/librdkafka-watermarks-after-error.md`.
//! - *Test:* `a_deferred_gap_is_counted_once_when_the_log_start_is_known`, below.
//! - *May be removed* when librdkafka keeps the offset.

use std::time::{Duration, Instant};

use oncegate_core::internal::LogThrottle;

use super::{AssignedPartition, SourceState};
use crate::partition::{ExpiredGap, PartitionAction, PartitionEvent};

/// How often expired messages are logged per partition.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Limits how often the gaps of an assignment are logged.
#[derive(Default)]
pub(super) struct GapLog {
    expired: ThrottledCount,
    unclassified: ThrottledCount,
}

/// Counts messages or gaps, and reports at most once per [`LOG_INTERVAL`] how many were added since
/// the last report.
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
    /// Counts and logs the expired messages in the gaps between offsets that were read.
    /// `log_start_of` returns the log start offset of a partition; while it is unknown, a gap is
    /// logged and kept.
    pub(crate) fn count_expired(&mut self, log_start_of: impl Fn(&str, i32) -> Option<i64>) {
        let now = Instant::now();
        for it in self.assigned.values_mut() {
            if it.partition.has_gaps() {
                let log_start = log_start_of(&it.topic, it.number);
                self.expired += it.classify_gaps(log_start, now);
            }
        }
    }
}

impl AssignedPartition {
    /// Counts and logs the expired messages of the partition; returns their number.
    fn classify_gaps(&mut self, log_start: Option<i64>, now: Instant) -> u64 {
        match self.partition.apply(PartitionEvent::LogStart(log_start)) {
            PartitionAction::CountExpired(gaps) => {
                gaps.iter().for_each(|gap| self.log_expired(gap, now));
                gaps.iter().map(|it| it.expired).sum()
            }
            PartitionAction::WarnOfGaps { count, last } => {
                if let Some(gaps) = self.gap_log.unclassified.add(count, now) {
                    tracing::warn!(
                        topic = %self.topic,
                        partition = self.number,
                        expected = last.start,
                        next = last.end,
                        gaps,
                        "messages may have expired: the log start offset is unknown, so the gap may also be compacted records or transaction markers; once it is known, expired messages are counted in oncegate_kafka_messages_expired_total"
                    );
                }
                0
            }
            _ => 0,
        }
    }

    fn log_expired(&mut self, gap: &ExpiredGap, now: Instant) {
        metrics::counter!(crate::metric::MESSAGES_EXPIRED).increment(gap.expired);
        let Some(expired) = self.gap_log.expired.add(gap.expired, now) else {
            return;
        };
        let (topic, partition, log_start) = (&self.topic, self.number, gap.log_start);
        let (expected, next) = (gap.gap.start, gap.gap.end);
        if log_start <= next {
            tracing::error!(
                %topic,
                partition,
                expected,
                log_start,
                expired,
                "messages expired: they were removed from the log before the group read them; reading continues at the log start offset; raise the retention of the topic, or add consumers if the lag grows"
            );
        } else {
            tracing::error!(
                %topic,
                partition,
                expected,
                next,
                log_start,
                expired,
                "messages expired, or offset gap: the log start offset has moved past the gap, so expired messages cannot be distinguished from compacted records or transaction markers; reading continues at the next message; raise the retention of the topic, or add consumers if the lag grows"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{assigned, record};
    use super::*;
    use crate::partition::StartPosition;

    /// A partition of which every second offset was read, up to `offsets`.
    fn with_gaps(offsets: i64) -> SourceState {
        let mut state = assigned(StartPosition::Committed(0));
        state.add_records((0..offsets / 2).map(|it| record(0, it * 2 + 1)).collect());
        state
    }

    #[test]
    fn a_deferred_gap_is_counted_once_when_the_log_start_is_known() {
        let mut state = assigned(StartPosition::Committed(0));
        state.add_records(vec![record(0, 5), record(0, 6)]);
        state.count_expired(|_, _| None);
        state.add_records(vec![record(0, 12)]);
        state.count_expired(|_, _| None);
        assert_eq!(state.expired(), 0);
        // The second gap is above the log start offset: its messages were compacted.
        state.count_expired(|_, _| Some(5));
        state.count_expired(|_, _| Some(5));
        assert_eq!(state.expired(), 5);
        state.add_records(vec![record(0, 20)]);
        state.count_expired(|_, _| Some(15));
        assert_eq!(state.expired(), 7);
    }

    #[test]
    fn expired_messages_of_a_bounded_number_of_gaps_are_counted() {
        let mut state = with_gaps(1_000);
        state.count_expired(|_, _| Some(1_000));
        assert_eq!(state.expired(), 500);
        let mut state = with_gaps(5_000);
        state.count_expired(|_, _| None);
        state.count_expired(|_, _| Some(5_000));
        assert_eq!(state.expired(), 1_000, "more gaps are not kept");
    }

    #[test]
    fn the_first_count_is_reported_at_once_and_the_rest_once_a_minute() {
        let (mut count, started) = (ThrottledCount::default(), Instant::now());
        let reported: Vec<u64> = (0..150)
            .filter_map(|second| count.add(1, started + Duration::from_secs(second)))
            .collect();
        assert_eq!(reported, [1, 60, 60]);
    }
}
