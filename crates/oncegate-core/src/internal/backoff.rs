//! Pauses between retries.

use std::time::Duration;

use crate::marker::Token;

/// How often a pause doubles at most, so that its factor fits into a `u32`.
const MAX_DOUBLINGS: u32 = 20;

/// The first pause, doubled this often, and at most the longest.
#[inline]
pub fn doubled(first: Duration, doublings: u32, longest: Duration) -> Duration {
    first
        .saturating_mul(1 << doublings.min(MAX_DOUBLINGS))
        .min(longest)
}

/// Exponential backoff: each pause is twice as long as the one before, up to the longest.
#[derive(Clone, Debug)]
pub struct Backoff {
    /// How many pauses were returned since the last reset.
    pauses: u32,
    first: Duration,
    longest: Duration,
}

impl Backoff {
    /// A backoff that doubles from the first pause to the longest.
    pub const fn between(first: Duration, longest: Duration) -> Self {
        Self {
            pauses: 0,
            first,
            longest,
        }
    }

    /// A backoff that doubles from 100 ms to this pause.
    pub const fn up_to(longest: Duration) -> Self {
        Self::between(Duration::from_millis(100), longest)
    }

    /// The pause that [`advance`](Self::advance) would return.
    pub fn current(&self) -> Duration {
        doubled(self.first, self.pauses, self.longest)
    }

    /// The next pause.
    pub fn advance(&mut self) -> Duration {
        let pause = self.current();
        self.pauses = self.pauses.saturating_add(1);
        pause
    }

    /// The next pause, shortened by up to a half, so that many processes do not retry at the same
    /// moment.
    pub fn advance_with_jitter(&mut self) -> Duration {
        let random = (Token::random().0 >> 75) as f64 / (1_u64 << 53) as f64;
        self.advance().mul_f64(0.5 + random / 2.0)
    }

    /// Starts again with the first pause, after a success.
    pub fn reset(&mut self) {
        self.pauses = 0;
    }
}

impl Default for Backoff {
    /// From 100 ms to 5 s.
    fn default() -> Self {
        Self::up_to(Duration::from_secs(5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(5);

    #[test]
    fn pauses_double_up_to_the_longest() {
        let mut backoff = Backoff::between(FIRST, LONGEST);
        let pauses: Vec<_> = (0..40).map(|_| backoff.advance()).collect();
        assert_eq!(pauses[..3], [FIRST, 2 * FIRST, 4 * FIRST]);
        assert!(pauses[6..].iter().all(|pause| *pause == LONGEST));
        backoff.reset();
        assert_eq!(backoff.advance(), FIRST);
    }

    #[test]
    fn jitter_shortens_each_pause_by_up_to_a_half() {
        let mut backoff = Backoff::up_to(LONGEST);
        for number in 0..40 {
            let longest = doubled(FIRST, number, LONGEST);
            let pause = backoff.advance_with_jitter();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
        }
        let pause = backoff.advance_with_jitter();
        assert!((0..20).any(|_| backoff.advance_with_jitter() != pause));
    }
}
