//! Opening a channel, for the first time and again.

use std::sync::Arc;
use std::time::Duration;

use oncegate_core::source::SourceError;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::link::Trouble;
use crate::session::{SILENCE, Session};
use crate::settings::Settings;
use crate::telling::Telling;

/// The longest pause before it connects again: with the handshake, five seconds after the node is
/// back it consumes.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// The first and the longest pause while the queue is another than the source was told: each time
/// the broker is asked, it writes an error into its log.
const MISMATCHED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Opens a channel for the first time: waits for a broker that is not there, and gives up on what a
/// person must change.
pub(crate) async fn first(settings: &Settings) -> Result<Session, SourceError> {
    let mut attempts = Attempts::default();
    loop {
        match Session::open(settings, 1, settings.prefetch, SILENCE).await {
            Ok(session) => {
                tracing::info!(
                    queue = &*settings.name,
                    broker = settings.shown(),
                    prefetch = settings.prefetch,
                    "consuming"
                );
                return Ok(session);
            }
            Err(Trouble::Wrong(error) | Trouble::Mismatch(error)) => return Err(error),
            Err(trouble @ Trouble::Passing(_)) => attempts.wait(settings, &trouble).await,
        }
    }
}

/// Opens a channel again, after a pause. Whatever is wrong is waited for: it worked before.
pub(crate) async fn again(
    settings: Arc<Settings>,
    epoch: u64,
    prefetch: u16,
    silence: Duration,
    pause: Duration,
) -> Session {
    tokio::time::sleep(pause).await;
    let mut attempts = Attempts::default();
    loop {
        match Session::open(&settings, epoch, prefetch, silence).await {
            Ok(session) => return session,
            Err(trouble) => attempts.wait(&settings, &trouble).await,
        }
    }
}

/// Attempts to open a channel, each a pause after the last.
struct Attempts {
    backoff: Backoff,
    /// While the queue is another than the source was told.
    seldom: Backoff,
    telling: Telling,
    /// The mismatch that was told. It is told once: whoever has to change it has it in the log.
    mismatch: Option<String>,
}

impl Default for Attempts {
    fn default() -> Self {
        let (first, longest) = MISMATCHED;
        let seldom = Backoff::between(first, longest);
        Self {
            backoff: Backoff::up_to(LONGEST_PAUSE),
            seldom,
            telling: Telling::default(),
            mismatch: None,
        }
    }
}

impl Attempts {
    /// Waits before the next, and tells why, unless that was told.
    async fn wait(&mut self, settings: &Settings, trouble: &Trouble) {
        let (queue, broker, problem) = (&*settings.name, settings.shown(), trouble.to_string());
        let (pause, is_new) = self.next(trouble, &problem);
        if !is_new {
            tracing::debug!(queue, broker, ?pause, "still not consuming. {problem}");
        } else if let Trouble::Mismatch(_) = trouble {
            let longest = MISMATCHED.1;
            tracing::error!(
                queue,
                broker,
                ?longest,
                "not consuming until the queue is another; trying again ever more seldom. {problem}"
            );
        } else {
            tracing::warn!(queue, broker, "not consuming; trying again. {problem}");
        }
        tokio::time::sleep(pause).await;
    }

    /// The pause before the next attempt, and whether to tell why.
    fn next(&mut self, trouble: &Trouble, problem: &str) -> (Duration, bool) {
        match trouble {
            Trouble::Mismatch(_) => {
                let is_new = self.mismatch.as_deref() != Some(problem);
                self.mismatch = Some(problem.to_owned());
                (self.seldom.pause(), is_new)
            }
            Trouble::Wrong(_) | Trouble::Passing(_) => (
                self.backoff.pause(),
                self.telling.is_due(problem, Instant::now()),
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mismatch() -> Trouble {
        Trouble::Mismatch(SourceError::misconfigured(
            "queue",
            "it is another",
            "make it anew",
        ))
    }

    #[test]
    fn a_queue_that_stays_another_is_asked_for_seldom_and_told_once() {
        let mut attempts = Attempts::default();
        let (mut waited, mut asked, mut told) = (Duration::ZERO, 0, 0);
        while waited < Duration::from_secs(3_600) {
            let (pause, is_new) = attempts.next(&mismatch(), "it is another");
            assert!(pause <= MISMATCHED.1);
            (waited, asked, told) = (waited + pause, asked + 1, told + usize::from(is_new));
        }
        assert!((60..130).contains(&asked), "{asked} times an hour");
        assert_eq!(told, 1);
        assert!(attempts.next(&mismatch(), "it is yet another").1);
    }

    #[test]
    fn whatever_else_is_wrong_is_tried_again_soon() {
        let mut attempts = Attempts::default();
        for _ in 0..20 {
            attempts.next(&mismatch(), "it is another");
            assert!(attempts.next(&Trouble::Passing("down".into()), "down").0 <= LONGEST_PAUSE);
        }
    }
}
