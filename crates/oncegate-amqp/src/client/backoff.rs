//! Pauses between retries.

use std::time::Duration;

/// The first pause of [`Backoff::up_to`].
const DEFAULT_FIRST: Duration = Duration::from_millis(100);
/// The longest pause of [`Backoff::default`].
const DEFAULT_LONGEST: Duration = Duration::from_secs(5);

/// Exponential backoff, 100 ms doubling to 5 s by default. Jitter shortens each pause by up to a
/// half, so that many consumers do not reconnect at the same moment.
#[derive(Debug)]
pub(crate) struct Backoff {
    /// How many pauses were returned since the last reset.
    pauses: u32,
    first: Duration,
    longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::up_to(DEFAULT_LONGEST)
    }
}

impl Backoff {
    /// A backoff that doubles from 100 ms to this pause.
    pub(crate) fn up_to(longest: Duration) -> Self {
        Self::between(DEFAULT_FIRST, longest)
    }

    /// A backoff that doubles from the first pause to the longest.
    pub(crate) fn between(first: Duration, longest: Duration) -> Self {
        Self {
            pauses: 0,
            first,
            longest,
        }
    }

    /// The next pause, with jitter.
    pub(crate) fn pause(&mut self) -> Duration {
        let without_jitter = self
            .first
            .saturating_mul(1 << self.pauses.min(10))
            .min(self.longest);
        self.pauses = self.pauses.saturating_add(1);
        without_jitter.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// Starts again with the first pause, after a success.
    pub(crate) fn reset(&mut self) {
        self.pauses = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_within_their_bounds() {
        let mut backoff = Backoff::default();
        let pauses: Vec<_> = (0..40).map(|_| backoff.pause()).collect();
        assert!(
            pauses
                .iter()
                .all(|pause| *pause >= DEFAULT_FIRST / 2 && *pause <= DEFAULT_LONGEST)
        );
        assert!(pauses[39] >= DEFAULT_LONGEST / 2);
        assert!(
            pauses[20..].iter().any(|pause| *pause != pauses[39]),
            "without jitter many consumers would reconnect at the same moment"
        );
        backoff.reset();
        assert!(backoff.pause() <= DEFAULT_FIRST);
    }
}
