//! A line in the log that would come with each delivery.

use std::time::{Duration, Instant};

/// Lets some lines through in each period and counts those that it suppresses: a store that is away
/// or a topic of broken messages must not fill a disk with logs.
#[derive(Debug)]
pub struct LogThrottle {
    lines: u32,
    period: Duration,
    /// When the period began, and how many lines it has let through.
    began: Option<Instant>,
    written: u32,
    suppressed: u64,
}

impl LogThrottle {
    /// One line in a period.
    pub const fn every(period: Duration) -> Self {
        Self::up_to(1, period)
    }

    /// So many lines in a period.
    pub const fn up_to(lines: u32, period: Duration) -> Self {
        Self {
            lines,
            period,
            began: None,
            written: 0,
            suppressed: 0,
        }
    }

    /// How many lines were suppressed since the last, if one may be written now.
    pub fn due(&mut self, now: Instant) -> Option<u64> {
        if self
            .began
            .is_none_or(|began| now.duration_since(began) >= self.period)
        {
            (self.began, self.written) = (Some(now), 0);
        }
        if self.written >= self.lines {
            self.suppressed += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(mut seldom: LogThrottle, seconds: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
        let begun = Instant::now();
        seconds
            .filter_map(|second| Some((second, seldom.due(begun + Duration::from_secs(second))?)))
            .collect()
    }

    #[test]
    fn the_first_is_written_and_then_one_in_each_period_with_the_number_of_the_others() {
        assert_eq!(
            written(LogThrottle::every(Duration::from_secs(10)), 0..25),
            [(0, 0), (10, 9), (20, 9)]
        );
    }

    #[test]
    fn at_a_low_rate_each_is_written() {
        let ten = LogThrottle::up_to(10, Duration::from_secs(10));
        assert_eq!(written(ten, (0..30).step_by(2)).len(), 15);
        let two = LogThrottle::up_to(2, Duration::from_secs(10));
        assert_eq!(
            written(two, [0, 0, 0, 5, 11].into_iter()),
            [(0, 0), (0, 0), (11, 2)]
        );
    }
}
