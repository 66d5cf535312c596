//! A circuit breaker for requests to the store.

use std::time::{Duration, Instant};

use crate::internal::doubled;

/// Counts consecutive requests without an answer. While the store is unavailable, it gets a few
/// requests a second, however many deliveries wait for it.
#[derive(Debug)]
pub(crate) struct Breaker {
    unanswered: u32,
    /// When the first of the unanswered requests failed.
    since: Instant,
    next_try: Instant,
}

/// The state of a circuit breaker: whether a request may be sent to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BreakerState {
    /// The store answers: any number of requests may be sent.
    Closed,
    /// The store did not answer, and the pause since then is over: one request may be sent.
    HalfOpen,
    /// The store did not answer, and the pause is not over: no request may be sent.
    Open,
}

/// The pause after the first failure. The renewals pause as long, so a consumer with up to 256 running
/// messages and leases of 600 ms or more sends at most 20 requests a second to an unavailable store.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause, and so the longest delay until a recovered store is used again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Breaker {
    pub(crate) fn closed() -> Self {
        let now = Instant::now();
        Self {
            unanswered: 0,
            since: now,
            next_try: now,
        }
    }

    pub(crate) fn state(&self, now: Instant) -> BreakerState {
        match self.unanswered {
            0 => BreakerState::Closed,
            _ if now >= self.next_try => BreakerState::HalfOpen,
            _ => BreakerState::Open,
        }
    }

    /// When the next request may be sent; `None` while the breaker is closed.
    pub(crate) fn next_try_at(&self) -> Option<Instant> {
        (self.unanswered > 0).then_some(self.next_try)
    }

    /// A request was sent while half-open: the breaker is open for [`FIRST_PAUSE`].
    pub(crate) fn request_sent(&mut self, now: Instant) {
        self.next_try = now + FIRST_PAUSE;
    }

    /// A request was answered. Returns how long the store was unavailable, if it was.
    pub(crate) fn answered(&mut self, now: Instant) -> Option<Duration> {
        (std::mem::take(&mut self.unanswered) > 0).then(|| now.duration_since(self.since))
    }

    /// A request was not answered.
    pub(crate) fn not_answered(&mut self, now: Instant) {
        if self.unanswered == 0 {
            self.since = now;
        }
        self.next_try = now + doubled(FIRST_PAUSE, self.unanswered, LONGEST_PAUSE);
        self.unanswered = self.unanswered.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unavailable_store_gets_few_requests_and_one_that_answers_is_not_limited() {
        let start = Instant::now();
        let mut breaker = Breaker::closed();
        assert_eq!(
            (breaker.state(start), breaker.next_try_at()),
            (BreakerState::Closed, None)
        );
        let mut now = start;
        let mut requests = 0;
        while now < start + Duration::from_secs(10) {
            match breaker.state(now) {
                BreakerState::Open => {
                    now = breaker
                        .next_try_at()
                        .expect("a breaker that waits has a next try")
                }
                BreakerState::Closed | BreakerState::HalfOpen => {
                    requests += 1;
                    breaker.not_answered(now);
                }
            }
        }
        assert!((5..=14).contains(&requests), "{requests} in ten seconds");
        assert!(
            breaker
                .answered(now)
                .is_some_and(|unavailable_for| unavailable_for >= Duration::from_secs(9))
        );
        assert_eq!(
            (breaker.state(now), breaker.answered(now)),
            (BreakerState::Closed, None)
        );
    }
}
