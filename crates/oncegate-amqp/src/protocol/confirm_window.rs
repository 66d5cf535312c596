//! Copies of consumed messages, published to the dead-letter, in-doubt or delay queue on one channel:
//! which are confirmed, and which are published again after a failure.
//!
//! # Workaround
//! - *Symptom:* lapin attaches a returned message to the next confirm on the channel, not to that
//!   of the message. So after a returned message no outstanding confirm counts. *Version:* lapin
//!   4.12.3.
//! - *Upstream:* nothing to report: `basic.return` has no delivery tag.
//! - *Test:* `copies::a_missing_dead_letter_queue_affects_no_copy_to_another_queue` in `tests/amqp`.
//! - *May be removed:* never.

use std::collections::BTreeMap;
use std::fmt;

/// Why a copy is not confirmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PublishFailure {
    /// The broker returned a copy that was published on the channel (`basic.return`), or refused one
    /// (`basic.nack`).
    ReturnedOrNacked(String),
    /// The channel could not be opened, was closed, or sent no confirm in time.
    ChannelFailed(String),
}

impl fmt::Display for PublishFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReturnedOrNacked(problem) | Self::ChannelFailed(problem) => f.write_str(problem),
        }
    }
}

/// The copies of type `C` that were published on one channel and are not confirmed yet.
///
/// lapin attaches a returned message to the next confirm on the channel, which may be that of another
/// copy. That confirm is processed before the one of the returned copy, because the broker sends a
/// return before the confirm of the same message. So a confirm counts if no returned message is
/// attached to any confirm that arrived before it or with it: the caller records all confirms that have
/// arrived before it calls [`take_confirmed`](Self::take_confirmed).
#[derive(Debug)]
pub(crate) struct ConfirmWindow<C> {
    /// The copies whose confirm has not arrived or does not count yet, by their sequence number.
    outstanding: BTreeMap<u64, C>,
    next_sequence: u64,
    /// The sequence numbers of outstanding copies whose confirm has arrived.
    arrived: Vec<u64>,
    failure: Option<PublishFailure>,
}

/// The copies of a channel that failed, and why it failed.
#[derive(Debug)]
pub(crate) struct FailedWindow<C> {
    pub(crate) confirmed: Vec<C>,
    /// Copies that may not be in the queue, in their order.
    pub(crate) unconfirmed: Vec<C>,
    pub(crate) failure: PublishFailure,
}

impl<C> ConfirmWindow<C> {
    /// The window of a new channel.
    pub(crate) fn new() -> Self {
        Self {
            outstanding: BTreeMap::new(),
            next_sequence: 0,
            arrived: Vec::new(),
            failure: None,
        }
    }

    /// Adds a copy that is published now, and returns its sequence number.
    pub(crate) fn publish(&mut self, copy: C) -> u64 {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.outstanding.insert(sequence, copy);
        sequence
    }

    /// Records the confirm of a copy, or why there is none.
    pub(crate) fn record(&mut self, sequence: u64, confirm: Result<(), PublishFailure>) {
        match (confirm, &self.failure) {
            (Ok(()), _) => self.arrived.push(sequence),
            (Err(failure @ PublishFailure::ReturnedOrNacked(_)), _) | (Err(failure), None) => {
                self.failure = Some(failure);
            }
            (Err(_), Some(_)) => {}
        }
    }

    /// Removes the copies whose confirms count. After a returned or nacked copy no outstanding one
    /// counts.
    pub(crate) fn take_confirmed(&mut self) -> Vec<C> {
        if let Some(PublishFailure::ReturnedOrNacked(_)) = self.failure {
            return Vec::new();
        }
        self.arrived
            .drain(..)
            .filter_map(|sequence| self.outstanding.remove(&sequence))
            .collect()
    }

    /// Whether a copy failed: nothing more may be published on the channel.
    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// How many copies are outstanding.
    pub(crate) fn len(&self) -> usize {
        self.outstanding.len()
    }

    /// Ends the window of a channel that failed. Confirms that arrive after this are ignored.
    /// `problem` is the failure if none is recorded.
    pub(crate) fn fail(mut self, problem: impl FnOnce() -> String) -> FailedWindow<C> {
        let confirmed = self.take_confirmed();
        FailedWindow {
            confirmed,
            unconfirmed: self.outstanding.into_values().collect(),
            failure: self
                .failure
                .unwrap_or_else(|| PublishFailure::ChannelFailed(problem())),
        }
    }
}

impl<C> FailedWindow<C> {
    /// Whether exactly one copy was outstanding when the channel failed. That copy is probably the
    /// cause, and would close the next channel, too.
    pub(crate) fn is_probably_caused_by_one_copy(&self) -> bool {
        matches!(self.failure, PublishFailure::ChannelFailed(_))
            && self.confirmed.is_empty()
            && self.unconfirmed.len() == 1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeSet, VecDeque};

    use super::*;

    fn returned() -> Result<(), PublishFailure> {
        Err(PublishFailure::ReturnedOrNacked("NO_ROUTE".into()))
    }

    fn closed() -> Result<(), PublishFailure> {
        Err(PublishFailure::ChannelFailed("closed".into()))
    }

    /// Publishes copies 0, 1, … and records these results in their order; returns the confirmed and
    /// the unconfirmed copies.
    fn outcome(confirms: Vec<Result<(), PublishFailure>>) -> (Vec<u64>, Vec<u64>) {
        let mut window = ConfirmWindow::new();
        for number in 0..confirms.len() as u64 {
            assert_eq!(window.publish(number), number);
        }
        for (sequence, confirm) in (0..).zip(confirms) {
            window.record(sequence, confirm);
        }
        let failed = window.fail(|| "no confirm in time".into());
        (failed.confirmed, failed.unconfirmed)
    }

    #[test]
    fn no_outstanding_confirm_counts_beside_a_returned_copy() {
        assert_eq!(outcome(vec![Ok(()), Ok(())]), (vec![0, 1], vec![]));
        assert_eq!(
            outcome(vec![Ok(()), returned(), Ok(())]),
            (vec![], vec![0, 1, 2])
        );
        assert_eq!(
            outcome(vec![Ok(()), closed(), returned()]),
            (vec![], vec![0, 1, 2])
        );
        assert_eq!(outcome(vec![returned(), closed()]), (vec![], vec![0, 1]));
    }

    #[test]
    fn confirms_before_the_channel_was_closed_count() {
        assert_eq!(
            outcome(vec![Ok(()), closed(), Ok(())]),
            (vec![0, 2], vec![1])
        );
    }

    #[test]
    fn confirms_that_were_taken_before_a_return_count() {
        let mut window = ConfirmWindow::new();
        for copy in ["a", "b", "c"] {
            window.publish(copy);
        }
        window.record(1, Ok(()));
        assert_eq!(window.take_confirmed(), ["b"]);
        assert_eq!((window.take_confirmed().len(), window.len()), (0, 2));
        window.record(0, returned());
        window.record(2, Ok(()));
        assert!(window.has_failed() && window.take_confirmed().is_empty());
        assert_eq!(window.fail(String::new).unconfirmed, ["a", "c"]);
    }

    #[test]
    fn only_a_single_copy_that_closed_its_channel_is_identified() {
        for (confirms, is_identified) in [
            (vec![closed()], true),
            (vec![closed(), closed()], false),
            (vec![Ok(()), closed()], false),
            (vec![returned()], false),
        ] {
            let mut window = ConfirmWindow::new();
            for (number, confirm) in confirms.clone().into_iter().enumerate() {
                let sequence = window.publish(number);
                window.record(sequence, confirm);
            }
            assert_eq!(
                window.fail(String::new).is_probably_caused_by_one_copy(),
                is_identified,
                "{confirms:?}"
            );
        }
    }

    /// A broker and lapin: confirms arrive in any order, each return before the confirm of its copy,
    /// and a return is attached to the next confirm.
    #[test]
    fn in_any_order_of_confirms_no_returned_copy_counts_as_confirmed() {
        let mut returns = 0;
        for seed in 0..2_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut window = ConfirmWindow::new();
            let (mut at_broker, mut arriving) = (Vec::new(), VecDeque::new());
            let (mut enqueued, mut waiting_returns) = (BTreeSet::new(), 0);
            for _ in 0..60 {
                match random.u8(..8) {
                    0..3 if !window.has_failed() => at_broker.push(window.publish(seed)),
                    3..6 if !at_broker.is_empty() => {
                        let sequence = at_broker.swap_remove(random.usize(..at_broker.len()));
                        if random.u8(..20) == 0 {
                            (returns, waiting_returns) = (returns + 1, waiting_returns + 1);
                            // Another confirm may arrive between the return and its own confirm.
                            if let Some(other) = at_broker.pop() {
                                enqueued.insert(other);
                                waiting_returns -= 1;
                                arriving.push_back((other, returned()));
                            }
                        } else {
                            enqueued.insert(sequence);
                        }
                        let has_return = waiting_returns > 0;
                        waiting_returns -= i32::from(has_return);
                        arriving
                            .push_back((sequence, if has_return { returned() } else { Ok(()) }));
                    }
                    6 => {
                        // Some more confirms arrive; all that arrived are recorded in any order.
                        let count = random.usize(..=arriving.len());
                        let mut arrived: Vec<_> = arriving.drain(..count).collect();
                        random.shuffle(&mut arrived);
                        for (sequence, confirm) in arrived {
                            window.record(sequence, confirm);
                        }
                        let before: BTreeSet<u64> = window.outstanding.keys().copied().collect();
                        window.take_confirmed();
                        for sequence in before {
                            assert!(
                                window.outstanding.contains_key(&sequence)
                                    || enqueued.contains(&sequence),
                                "seed {seed}: copy {sequence} was returned and counts as confirmed"
                            );
                        }
                    }
                    _ => {}
                }
            }
        }
        assert!(returns > 500, "{returns} returned copies");
    }
}
