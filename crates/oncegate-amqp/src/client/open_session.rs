//! Opens the consuming channel at start and after a loss, with backoff. The *epoch* of a channel is
//! its number: 1 for the first one of a source.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::source::SourceError;
use tokio::time::Instant;

use crate::client::connector::ConnectError;
use crate::client::context::SourceContext;
use crate::client::lost_consumer_probe::PROBE_INTERVAL;
use crate::client::problem_throttle::ProblemThrottle;
use crate::client::session::ConsumerSession;
use oncegate_core::internal::Backoff;

/// The longest pause before reconnecting. With the handshake, the source consumes again within about
/// five seconds after the node is available.
pub(crate) const MAX_RECONNECT_PAUSE: Duration = Duration::from_secs(3);
/// The first and the longest pause while the queue does not match the settings: the broker logs an
/// error at each attempt.
const MISMATCH_PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Opens the first channel. Retries until the broker is available.
///
/// # Errors
/// An error that an operator has to correct.
pub(crate) async fn open_first(context: &SourceContext) -> Result<ConsumerSession, SourceError> {
    let mut attempts = OpenAttempts::default();
    loop {
        match ConsumerSession::open(context, 1, context.prefetch, PROBE_INTERVAL).await {
            Ok(session) => {
                tracing::info!(
                    queue = &*context.name,
                    broker = context.redacted_url(),
                    prefetch = context.prefetch,
                    "consuming"
                );
                return Ok(session);
            }
            Err(ConnectError::Misconfigured(error) | ConnectError::QueueMismatch(error)) => {
                return Err(error);
            }
            Err(error @ ConnectError::Transient(_)) => attempts.wait(context, &error).await,
        }
    }
}

/// Opens the next channel after a pause. Retries after every error, because these settings worked
/// before.
pub(crate) async fn reopen(
    context: Arc<SourceContext>,
    epoch: u64,
    prefetch: u16,
    probe_interval: Duration,
    pause: Duration,
) -> ConsumerSession {
    tokio::time::sleep(pause).await;
    let mut attempts = OpenAttempts::default();
    loop {
        match ConsumerSession::open(&context, epoch, prefetch, probe_interval).await {
            Ok(session) => return session,
            Err(error) => attempts.wait(&context, &error).await,
        }
    }
}

/// The pauses between attempts to open a channel, and which of their errors are logged.
struct OpenAttempts {
    backoff: Backoff,
    /// The pauses while the queue does not match the settings.
    mismatch_backoff: Backoff,
    throttle: ProblemThrottle,
    /// The mismatch that was logged last. It is not logged again at each attempt.
    logged_mismatch: Option<String>,
}

impl Default for OpenAttempts {
    fn default() -> Self {
        let (first, longest) = MISMATCH_PAUSES;
        let mismatch_backoff = Backoff::between(first, longest);
        Self {
            backoff: Backoff::up_to(MAX_RECONNECT_PAUSE),
            mismatch_backoff,
            throttle: ProblemThrottle::default(),
            logged_mismatch: None,
        }
    }
}

impl OpenAttempts {
    /// Logs the error, at a limited rate, and waits until the next attempt.
    async fn wait(&mut self, context: &SourceContext, error: &ConnectError) {
        let (queue, broker, text) = (&*context.name, context.redacted_url(), error.to_string());
        let (pause, is_due) = self.next_pause(error, &text);
        if !is_due {
            tracing::debug!(
                queue,
                broker,
                ?pause,
                error = text,
                "still not consuming; retrying"
            );
        } else if let ConnectError::QueueMismatch(_) = error {
            tracing::error!(
                queue,
                broker,
                error = text,
                max_pause = ?MISMATCH_PAUSES.1,
                "not consuming: the queue does not match the settings; retrying with growing pauses; delete the queue or correct the settings"
            );
        } else {
            tracing::warn!(
                queue,
                broker,
                error = text,
                "not consuming; retrying until the broker serves the queue"
            );
        }
        tokio::time::sleep(pause).await;
    }

    /// The pause before the next attempt, and whether to log the error as a warning or an error.
    fn next_pause(&mut self, error: &ConnectError, problem: &str) -> (Duration, bool) {
        match error {
            ConnectError::QueueMismatch(_) => {
                let is_new = self.logged_mismatch.as_deref() != Some(problem);
                self.logged_mismatch = Some(problem.to_owned());
                (self.mismatch_backoff.advance_with_jitter(), is_new)
            }
            ConnectError::Misconfigured(_) | ConnectError::Transient(_) => (
                self.backoff.advance_with_jitter(),
                self.throttle.is_due(problem, Instant::now()),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mismatch() -> ConnectError {
        ConnectError::QueueMismatch(SourceError::misconfigured(
            "queue",
            "it has other arguments",
            "declare it again",
        ))
    }

    #[test]
    fn a_queue_mismatch_is_retried_with_long_pauses_and_logged_once() {
        let mut attempts = OpenAttempts::default();
        let (mut waited, mut count, mut logged) = (Duration::ZERO, 0, 0);
        while waited < Duration::from_secs(3_600) {
            let (pause, is_new) = attempts.next_pause(&mismatch(), "it has other arguments");
            assert!(pause <= MISMATCH_PAUSES.1);
            (waited, count, logged) = (waited + pause, count + 1, logged + usize::from(is_new));
        }
        assert!((60..130).contains(&count), "{count} times an hour");
        assert_eq!(logged, 1);
        assert!(attempts.next_pause(&mismatch(), "it is a stream").1);
    }

    #[test]
    fn other_errors_are_retried_soon() {
        let mut attempts = OpenAttempts::default();
        for _ in 0..20 {
            attempts.next_pause(&mismatch(), "it has other arguments");
            assert!(
                attempts
                    .next_pause(&ConnectError::Transient("down".into()), "down")
                    .0
                    <= MAX_RECONNECT_PAUSE
            );
        }
    }
}
