//! The state of the shutdown of the consumer.

use std::time::{Duration, Instant};

use crate::defaults::STOP_TIMEOUT;
use crate::error::Error;

/// The phase of the drain, its deadline and the error that caused it.
///
/// At the end of a drain the source is closed. A later call of `begin` never postpones the
/// deadline. If deliveries are in flight when the drain timeout is over, the deadline is extended once,
/// by [`STOP_TIMEOUT`], in which the store records the outcomes of dropped handlers.
pub(super) struct Drain {
    state: DrainState,
    timeout: Duration,
}

/// Whether the consumer receives messages or drains.
enum DrainState {
    Receiving,
    Draining {
        until: Instant,
        cause: Option<Error>,
        phase: DrainPhase,
    },
}

/// What the drain waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DrainPhase {
    /// Running handlers and the store.
    Handlers,
    /// The drain timeout is over: only the store, which records the outcomes of dropped handlers.
    Outcomes,
}

/// What the loop does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DrainStep {
    /// Continue: the consumer receives, or the drain waits.
    Continue,
    /// Drop running handlers: the drain timeout is over.
    DropHandlers,
    /// Close the source and end.
    Close,
}

/// What is not finished yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfinished {
    /// Deliveries are in flight.
    Deliveries,
    /// All deliveries are settled; the store has not recorded all completions of messages that were
    /// handled without it.
    Completions,
    /// Everything is finished.
    Nothing,
}

impl Drain {
    pub(super) fn new(timeout: Duration) -> Self {
        Self {
            state: DrainState::Receiving,
            timeout,
        }
    }

    pub(super) fn has_begun(&self) -> bool {
        matches!(self.state, DrainState::Draining { .. })
    }

    /// Begins the drain. A later call only adds its cause, if there is none yet, and never
    /// postpones the deadline. Returns whether this call was the first.
    pub(super) fn begin(&mut self, cause: Option<Error>, now: Instant) -> bool {
        let deadline = now + self.timeout;
        match &mut self.state {
            DrainState::Draining {
                until,
                cause: first,
                phase: _,
            } => {
                *until = deadline.min(*until);
                if first.is_none() {
                    *first = cause;
                }
                false
            }
            state @ DrainState::Receiving => {
                *state = DrainState::Draining {
                    until: deadline,
                    cause,
                    phase: DrainPhase::Handlers,
                };
                true
            }
        }
    }

    /// The deadline of the current phase of the drain.
    pub(super) fn deadline(&self) -> Option<Instant> {
        match self.state {
            DrainState::Draining { until, .. } => Some(until),
            DrainState::Receiving => None,
        }
    }

    /// What the loop does next, if `unfinished` is not finished yet.
    pub(super) fn next_step(&self, now: Instant, unfinished: Unfinished) -> DrainStep {
        let DrainState::Draining { until, phase, .. } = self.state else {
            return DrainStep::Continue;
        };
        let is_over = now >= until;
        match (phase, unfinished) {
            (DrainPhase::Handlers, Unfinished::Deliveries) if is_over => DrainStep::DropHandlers,
            (_, Unfinished::Nothing) => DrainStep::Close,
            (DrainPhase::Outcomes, Unfinished::Completions) => DrainStep::Close,
            _ if is_over => DrainStep::Close,
            _ => DrainStep::Continue,
        }
    }

    /// The engine has dropped the running handlers: the drain now waits until the store has
    /// recorded their outcomes.
    pub(super) fn handlers_dropped(&mut self, now: Instant) {
        if let DrainState::Draining { until, phase, .. } = &mut self.state {
            (*until, *phase) = (now + STOP_TIMEOUT, DrainPhase::Outcomes);
        }
    }

    /// The deadline for closing the source. The time that the store took to record outcomes is
    /// subtracted, so that a stop takes at most the drain timeout plus 10 s.
    pub(super) fn close_by(&self, now: Instant) -> Instant {
        let recording = match self.state {
            DrainState::Draining {
                until,
                phase: DrainPhase::Outcomes,
                ..
            } => STOP_TIMEOUT.saturating_sub(until.saturating_duration_since(now)),
            _ => Duration::ZERO,
        };
        let shortest = Duration::from_secs(1);
        let bound = self.timeout.clamp(shortest, Duration::from_secs(10));
        now + bound.saturating_sub(recording).max(shortest)
    }

    /// The first error that was passed to `begin`.
    pub(super) fn into_cause(self) -> Option<Error> {
        match self.state {
            DrainState::Draining { cause, .. } => cause,
            DrainState::Receiving => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    #[test]
    fn handlers_are_dropped_at_the_deadline_and_the_store_gets_more_time() {
        let (mut drain, now) = (Drain::new(TIMEOUT), Instant::now());
        assert_eq!(
            drain.next_step(now, Unfinished::Nothing),
            DrainStep::Continue
        );
        assert!(drain.begin(None, now));
        assert!(!drain.begin(Some(Error::Renewals), now + TIMEOUT));
        assert_eq!(drain.deadline(), Some(now + TIMEOUT), "never later");
        for unfinished in [Unfinished::Deliveries, Unfinished::Completions] {
            assert_eq!(drain.next_step(now, unfinished), DrainStep::Continue);
        }
        assert_eq!(drain.next_step(now, Unfinished::Nothing), DrainStep::Close);
        let over = now + TIMEOUT;
        assert_eq!(
            drain.next_step(over, Unfinished::Deliveries),
            DrainStep::DropHandlers
        );
        assert_eq!(
            drain.next_step(over, Unfinished::Completions),
            DrainStep::Close
        );
        drain.handlers_dropped(over);
        assert_eq!(
            drain.next_step(over, Unfinished::Deliveries),
            DrainStep::Continue
        );
        assert_eq!(
            drain.next_step(over + STOP_TIMEOUT, Unfinished::Deliveries),
            DrainStep::Close
        );
        assert!(matches!(drain.into_cause(), Some(Error::Renewals)));
    }

    #[test]
    fn recording_outcomes_shortens_the_time_to_close() {
        let (mut drain, now) = (Drain::new(TIMEOUT), Instant::now());
        drain.begin(None, now);
        assert_eq!(drain.close_by(now), now + Duration::from_secs(10));
        drain.handlers_dropped(now);
        let later = now + STOP_TIMEOUT;
        assert_eq!(
            drain.close_by(later) - later,
            Duration::from_secs(10)
                .saturating_sub(STOP_TIMEOUT)
                .max(Duration::from_secs(1))
        );
    }
}
