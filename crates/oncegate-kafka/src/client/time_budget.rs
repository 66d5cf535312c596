//! Limits the time of the requests that a rebalance waits for, and retries them.

use std::time::{Duration, Instant};

use rdkafka::error::{KafkaResult, RDKafkaErrorCode};

use super::error;

/// Timeout of one request.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// The pause before a failed request is retried.
const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// The remaining time for all requests of one rebalance.
pub(super) struct TimeBudget<'a> {
    remaining: Duration,
    /// Whether the results are no longer needed: the source is closing, or the assignment is lost.
    is_cancelled: &'a dyn Fn() -> bool,
}

impl<'a> TimeBudget<'a> {
    pub(super) fn new(remaining: Duration, is_cancelled: &'a dyn Fn() -> bool) -> Self {
        Self {
            remaining,
            is_cancelled,
        }
    }

    /// Runs one request, with its timeout as the argument. Runs nothing and returns `None` if no
    /// time remains or the budget is cancelled.
    pub(super) fn request<T>(&mut self, send: impl FnOnce(Duration) -> T) -> Option<T> {
        if self.remaining.is_zero() || (self.is_cancelled)() {
            return None;
        }
        let started = Instant::now();
        let answer = send(self.remaining.min(REQUEST_TIMEOUT));
        self.remaining = self.remaining.saturating_sub(started.elapsed());
        Some(answer)
    }

    /// Repeats a request until it succeeds. Returns `None` after a permanent error, or if the
    /// budget allows no further request.
    pub(super) fn retry<T>(
        &mut self,
        name: &str,
        mut send: impl FnMut(Duration) -> KafkaResult<T>,
    ) -> Option<T> {
        let mut is_logged = false;
        loop {
            let answer = self.request(|budget| {
                let started = Instant::now();
                let answer = send(budget);
                if answer.is_err() {
                    std::thread::sleep(RETRY_PAUSE.min(budget.saturating_sub(started.elapsed())));
                }
                answer
            });
            let error = match answer {
                Some(Ok(answer)) => return Some(answer),
                Some(Err(error)) => error,
                None => return None,
            };
            if !std::mem::replace(&mut is_logged, true) {
                tracing::warn!(%error, request = name, "kafka request failed during a rebalance; after transient errors it is retried for up to a third of max.poll.interval.ms; without an answer, expired messages and recreated topics are not detected; check the group coordinator and the rights on group and topics");
            }
            if !error.rdkafka_error_code().is_some_and(is_transient) {
                return None;
            }
        }
    }
}

/// Whether a request that failed with this code may succeed if it is repeated.
pub(super) fn is_transient(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as E;
    let coordinator = [
        E::WaitingForCoordinator,
        E::CoordinatorLoadInProgress,
        E::CoordinatorNotAvailable,
        E::NotCoordinator,
    ];
    error::is_connection(code) || coordinator.contains(&code)
}

#[cfg(test)]
mod tests {
    use rdkafka::error::KafkaError;

    use super::*;

    fn budget(left: Duration) -> TimeBudget<'static> {
        TimeBudget::new(left, &|| false)
    }

    #[test]
    fn a_request_is_retried_after_transient_errors_only() {
        let failed = |code| Err(KafkaError::OffsetFetch(code));
        let mut answers = [
            failed(RDKafkaErrorCode::OperationTimedOut),
            failed(RDKafkaErrorCode::NotCoordinator),
            Ok(7),
        ]
        .into_iter();
        assert_eq!(
            budget(REQUEST_TIMEOUT * 20).retry("what", |_| answers
                .next()
                .expect("no request after a success")),
            Some(7)
        );
        let mut answers = [failed(RDKafkaErrorCode::GroupAuthorizationFailed)].into_iter();
        assert_eq!(
            budget(REQUEST_TIMEOUT).retry("what", |_| answers
                .next()
                .expect("no retry after a permanent error")),
            None::<i32>
        );
        let times_out = |budget| {
            std::thread::sleep(budget);
            failed(RDKafkaErrorCode::OperationTimedOut)
        };
        assert_eq!(
            budget(Duration::from_millis(20)).retry("what", times_out),
            None::<i32>
        );
    }

    #[test]
    fn a_closing_source_sends_no_requests() {
        let mut budget = TimeBudget::new(REQUEST_TIMEOUT, &|| true);
        assert_eq!(
            budget.request(|_| unreachable!("the source is closing")),
            None::<()>
        );
    }
}
