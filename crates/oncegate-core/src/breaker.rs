//! A circuit breaker for the store.

use std::time::{Duration, Instant};

/// Counts consecutive batches without an answer. An unavailable store gets a few requests a second,
/// however many deliveries wait for it.
#[derive(Debug)]
pub(crate) struct Breaker {
    unanswered: u32,
    /// When the first of these requests failed.
    since: Instant,
    next_try: Instant,
}

/// Whether a request may be sent to the store now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BreakerDecision {
    /// Closed: the store answers.
    Ask,
    /// Half-open: one request at a time.
    TryOnce,
    /// Open: not yet.
    Wait,
}

/// The pause after the first failure. With renewals, which pause as long, a process sends at most
/// 20 requests a second.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause, and so the longest delay until a recovered store is used again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Breaker {
    /// A closed breaker.
    pub(crate) fn closed() -> Self {
        let now = Instant::now();
        Self {
            unanswered: 0,
            since: now,
            next_try: now,
        }
    }

    pub(crate) fn decide(&self, now: Instant) -> BreakerDecision {
        match self.unanswered {
            0 => BreakerDecision::Ask,
            _ if now >= self.next_try => BreakerDecision::TryOnce,
            _ => BreakerDecision::Wait,
        }
    }

    /// When the next request may be sent; `None` while the breaker is closed.
    pub(crate) fn next_try_at(&self) -> Option<Instant> {
        (self.unanswered > 0).then_some(self.next_try)
    }

    /// A request is sent now; the next one may follow after [`FIRST_PAUSE`].
    pub(crate) fn trying(&mut self, now: Instant) {
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
        self.next_try = now
            + FIRST_PAUSE
                .saturating_mul(1 << self.unanswered.min(10))
                .min(LONGEST_PAUSE);
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
            (breaker.decide(start), breaker.next_try_at()),
            (BreakerDecision::Ask, None)
        );
        let mut now = start;
        let mut tries = 0;
        while now < start + Duration::from_secs(10) {
            match breaker.decide(now) {
                BreakerDecision::Wait => {
                    now = breaker
                        .next_try_at()
                        .expect("a breaker that waits has a next try")
                }
                BreakerDecision::Ask | BreakerDecision::TryOnce => {
                    tries += 1;
                    breaker.not_answered(now);
                }
            }
        }
        assert!((5..=14).contains(&tries), "{tries} in ten seconds");
        assert!(
            breaker
                .answered(now)
                .is_some_and(|unavailable_for| unavailable_for >= Duration::from_secs(9))
        );
        assert_eq!(
            (breaker.decide(now), breaker.answered(now)),
            (BreakerDecision::Ask, None)
        );
    }
}
