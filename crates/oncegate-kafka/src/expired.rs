//! Classifies offset gaps: messages that expired before they were read, or offsets that are never
//! delivered (compacted records and transaction markers).

use std::time::Instant;

use crate::shared::{OffsetGap, SharedState};

/// Counts and logs the expired messages of a gap, given the current log start offset. If that is
/// unknown, the gap is logged and kept for [`classify_deferred_gaps`].
pub(crate) fn classify_gap(gap: OffsetGap, log_start: Option<i64>, shared: &SharedState) {
    let now = Instant::now();
    let OffsetGap {
        ref topic,
        partition,
        from: expected,
        to,
    } = gap;
    let Some(log_start) = log_start else {
        // librdkafka clears the log start offset after each error response. The gap may contain no
        // message, so it is logged and not counted yet.
        let topic = topic.clone();
        let gaps = shared.lock().defer_gap(gap, now);
        if let Some(gaps) = gaps {
            tracing::warn!(
                %topic,
                partition,
                expected,
                next = to,
                gaps,
                "messages may have expired: the log start offset is unknown, so the gap may also be compacted records or transaction markers; once it is known, expired messages are counted in oncegate_kafka_messages_expired_total"
            );
        }
        return;
    };
    let expired = gap.expired(log_start);
    if expired == 0 {
        return;
    }
    metrics::counter!(crate::metric::MESSAGES_EXPIRED).increment(expired);
    let Some(expired) = shared.lock().count_expired(&gap, expired, now) else {
        return;
    };
    if log_start <= to {
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
            next = to,
            log_start,
            expired,
            "messages expired, or offset gap: the log start offset has moved past it, so expired messages cannot be told from compacted records or transaction markers; reading continues at the next message; raise the retention of the topic, or add consumers if the lag grows"
        );
    }
}

/// Classifies the deferred gaps of the partitions for which `log_start_of` returns a log start offset.
pub(crate) fn classify_deferred_gaps(
    log_start_of: impl Fn(&str, i32) -> Option<i64>,
    shared: &SharedState,
) {
    let gaps = shared
        .lock()
        .take_deferred_gaps(|topic, partition| log_start_of(topic, partition).is_some());
    for gap in gaps {
        let log_start = log_start_of(&gap.topic, gap.partition);
        classify_gap(gap, log_start, shared);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shared::{LogIdentity, StartPosition};

    fn gap(from: i64, to: i64) -> OffsetGap {
        OffsetGap {
            topic: Arc::from("t"),
            partition: 0,
            from,
            to,
        }
    }

    #[test]
    fn a_deferred_gap_is_counted_once_when_the_log_start_is_known() {
        let shared: SharedState = SharedState::default();
        shared.assign("t", 0, StartPosition::Committed(0), LogIdentity::default());
        classify_gap(gap(0, 5), None, &shared);
        classify_gap(gap(7, 12), None, &shared);
        classify_deferred_gaps(|_, _| None, &shared);
        assert_eq!(shared.lock().expired(), 0);
        // No message of the second gap expired: it was compacted.
        classify_deferred_gaps(|_, _| Some(5), &shared);
        classify_deferred_gaps(|_, _| Some(5), &shared);
        assert_eq!(shared.lock().expired(), 5);
        classify_gap(gap(12, 20), Some(15), &shared);
        assert_eq!(shared.lock().expired(), 8);
    }

    #[test]
    fn each_expired_gap_is_counted_and_one_line_per_minute_logged() {
        let shared: SharedState = SharedState::default();
        shared.assign("t", 0, StartPosition::Committed(0), LogIdentity::default());
        let mut state = shared.lock();
        let now = Instant::now();
        let logged: Vec<u64> = (0..1_000)
            .filter_map(|at| state.count_expired(&gap(at * 2, at * 2 + 1), 1, now))
            .collect();
        assert_eq!((logged, state.expired()), (vec![1], 1_000));
        assert_eq!(
            (0..5_000)
                .filter_map(|at| state.defer_gap(gap(at * 2, at * 2 + 1), now))
                .collect::<Vec<_>>(),
            [1]
        );
        assert_eq!(
            state.take_deferred_gaps(|_, _| true).len(),
            1_000,
            "more are not kept"
        );
    }
}
