//! Tells what was removed before it was read from what nobody is ever handed (compacted away,
//! markers of transactions).

use std::time::Instant;

use crate::shared::{Jump, Shared};

/// Says and counts what is missing, where the partition's log begins at `first` by now, as far as
/// that is known. Where it is not, the gap is said and kept; see [`look_again`].
pub(crate) fn look_into(jump: Jump, first: Option<i64>, shared: &Shared) {
    let now = Instant::now();
    let Jump {
        ref topic,
        partition,
        from: stood,
        to,
    } = jump;
    let Some(first) = first else {
        // librdkafka forgets it with each answer that is an error. It may be a gap as any other:
        // said, and not counted yet.
        let topic = topic.clone();
        let gaps = shared.lock().keep_gap(jump, now);
        if let Some(gaps) = gaps {
            tracing::warn!(
                %topic,
                partition,
                stood,
                next = to,
                gaps,
                "messages may be missed: where the log begins is not known at this moment, so that nobody can tell a gap from what was removed; counted once it is known"
            );
        }
        return;
    };
    let missed = jump.missed(first);
    if missed == 0 {
        return;
    }
    metrics::counter!(crate::metric::MESSAGES_MISSED).increment(missed);
    let Some(missed) = shared.lock().miss(&jump, missed, now) else {
        return;
    };
    if first <= to {
        tracing::error!(
            %topic,
            partition,
            stood,
            first,
            missed,
            "messages missed: they were removed from the log before the group had read them; reading on at the first that is left"
        );
    } else {
        tracing::error!(
            %topic,
            partition,
            stood,
            next = to,
            first,
            missed,
            "messages missed, or offsets that nobody is handed: by now the log begins behind all of them, so that nobody can tell; reading on at the next"
        );
    }
}

/// Looks into the gaps again that were kept, of partitions of which it is known by now where their
/// logs begin.
pub(crate) fn look_again(first_of: impl Fn(&str, i32) -> Option<i64>, shared: &Shared) {
    let gaps = shared
        .lock()
        .take_gaps(|topic, partition| first_of(topic, partition).is_some());
    for gap in gaps {
        let first = first_of(&gap.topic, gap.partition);
        look_into(gap, first, shared);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shared::{Begins, Log};

    fn gap(from: i64, to: i64) -> Jump {
        Jump {
            topic: Arc::from("t"),
            partition: 0,
            from,
            to,
        }
    }

    #[test]
    fn a_gap_is_counted_once_it_is_known_where_the_log_begins_and_once_only() {
        let shared: Shared = Shared::default();
        shared.assign("t", 0, Begins::At(0), Log::default());
        look_into(gap(0, 5), None, &shared);
        look_into(gap(7, 12), None, &shared);
        look_again(|_, _| None, &shared);
        assert_eq!(shared.lock().missed(), 0);
        // Of the second gap no offset was removed: compacted away.
        look_again(|_, _| Some(5), &shared);
        look_again(|_, _| Some(5), &shared);
        assert_eq!(shared.lock().missed(), 5);
        look_into(gap(12, 20), Some(15), &shared);
        assert_eq!(shared.lock().missed(), 8);
    }

    #[test]
    fn of_a_log_that_begins_behind_all_of_it_each_gap_is_counted_and_one_line_a_minute_said() {
        let shared: Shared = Shared::default();
        shared.assign("t", 0, Begins::At(0), Log::default());
        let mut state = shared.lock();
        let now = Instant::now();
        let said: Vec<u64> = (0..1_000)
            .filter_map(|at| state.miss(&gap(at * 2, at * 2 + 1), 1, now))
            .collect();
        assert_eq!((said, state.missed()), (vec![1], 1_000));
        assert_eq!(
            (0..5_000)
                .filter_map(|at| state.keep_gap(gap(at * 2, at * 2 + 1), now))
                .collect::<Vec<_>>(),
            [1]
        );
        assert_eq!(
            state.take_gaps(|_, _| true).len(),
            1_000,
            "more are not kept"
        );
    }
}
