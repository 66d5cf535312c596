//! Logs a lasting problem once per interval, and a new one at once.

use std::time::Duration;

use oncegate_core::internal::LogThrottle;
use tokio::time::Instant;

/// How often the same problem is logged.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// A [`LogThrottle`] that is reset by each new problem.
#[derive(Debug)]
pub(crate) struct ProblemThrottle {
    problem: String,
    throttle: LogThrottle,
}

impl Default for ProblemThrottle {
    fn default() -> Self {
        Self {
            problem: String::new(),
            throttle: LogThrottle::every(LOG_INTERVAL),
        }
    }
}

impl ProblemThrottle {
    /// Whether to log this problem now.
    pub(crate) fn is_due(&mut self, problem: &str, now: Instant) -> bool {
        if self.problem != problem {
            *self = Self {
                problem: problem.to_owned(),
                ..Self::default()
            };
        }
        self.throttle.due(now.into_std()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_problem_is_logged_once_per_interval_and_a_new_one_at_once() {
        let (mut throttle, started) = (ProblemThrottle::default(), Instant::now());
        assert!(throttle.is_due("a", started) && !throttle.is_due("a", started + LOG_INTERVAL / 2));
        assert!(throttle.is_due("b", started + LOG_INTERVAL / 2));
        assert!(!throttle.is_due("b", started + LOG_INTERVAL));
        assert!(throttle.is_due("b", started + LOG_INTERVAL * 2));
    }
}
