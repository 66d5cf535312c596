//! How long to wait before trying again.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// 100 ms doubling to 5 s, each cut by up to a half at random, so that many consumers do not come
/// back at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    pauses: u32,
    first: Duration,
    longest: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::up_to(LONGEST)
    }
}

impl Backoff {
    /// With another longest pause.
    pub(crate) fn up_to(longest: Duration) -> Self {
        Self::between(FIRST, longest)
    }

    /// With another first and longest pause.
    pub(crate) fn between(first: Duration, longest: Duration) -> Self {
        Self {
            pauses: 0,
            first,
            longest,
        }
    }

    /// The next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let whole = self
            .first
            .saturating_mul(1 << self.pauses.min(10))
            .min(self.longest);
        self.pauses = self.pauses.saturating_add(1);
        whole.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// It worked: begin anew.
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
                .all(|pause| *pause >= FIRST / 2 && *pause <= LONGEST)
        );
        assert!(pauses[39] >= LONGEST / 2);
        assert!(
            pauses[20..].iter().any(|pause| *pause != pauses[39]),
            "many consumers would come back at once"
        );
        backoff.reset();
        assert!(backoff.pause() <= FIRST);
    }
}
