//! Limits the rate of log lines that could be written for each delivery.

use std::time::{Duration, Instant};

/// Allows a number of log lines in each period and counts the suppressed ones, so that an
/// unavailable store or a topic of unreadable messages does not fill a disk with logs.
#[derive(Debug)]
pub struct LogThrottle {
    /// The maximum number of lines in a period.
    max_lines: u32,
    period: Duration,
    /// When the current period started.
    period_start: Option<Instant>,
    /// The number of lines in the current period.
    written: u32,
    /// The number of suppressed lines that were not reported yet.
    suppressed: u64,
}

impl LogThrottle {
    /// Allows one line in each period.
    pub const fn every(period: Duration) -> Self {
        Self::up_to(1, period)
    }

    /// Allows this number of lines in each period.
    pub const fn up_to(lines: u32, period: Duration) -> Self {
        Self {
            max_lines: lines,
            period,
            period_start: None,
            written: 0,
            suppressed: 0,
        }
    }

    /// If a line may be written now, returns the number of lines that were suppressed since the
    /// last written line. `None` if this line must be suppressed.
    pub fn due(&mut self, now: Instant) -> Option<u64> {
        if self
            .period_start
            .is_none_or(|start| now.duration_since(start) >= self.period)
        {
            (self.period_start, self.written) = (Some(now), 0);
        }
        if self.written >= self.max_lines {
            self.suppressed += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.suppressed))
    }

    /// When [`take_suppressed`](Self::take_suppressed) will return the number of suppressed lines;
    /// `None` if there are none.
    pub fn report_at(&self) -> Option<Instant> {
        let start = self.period_start.filter(|_| self.suppressed > 0)?;
        Some(start + self.period)
    }

    /// The number of lines that were suppressed since the last written line, once the period is
    /// over; 0 before. Call it at [`report_at`](Self::report_at), because lines that are suppressed
    /// in the last period of a burst are not reported otherwise.
    pub fn take_suppressed(&mut self, now: Instant) -> u64 {
        match self.report_at() {
            Some(at) if at <= now => self.take_all_suppressed(),
            _ => 0,
        }
    }

    /// The number of lines that were suppressed since the last written line, also within the
    /// period. Call it when their cause has ended, so that no line about it follows.
    pub fn take_all_suppressed(&mut self) -> u64 {
        std::mem::take(&mut self.suppressed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(mut throttle: LogThrottle, seconds: impl Iterator<Item = u64>) -> Vec<(u64, u64)> {
        let start = Instant::now();
        seconds
            .filter_map(|second| Some((second, throttle.due(start + Duration::from_secs(second))?)))
            .collect()
    }

    #[test]
    fn one_line_per_period_is_written_with_the_number_of_suppressed_lines() {
        assert_eq!(
            written(LogThrottle::every(Duration::from_secs(10)), 0..25),
            [(0, 0), (10, 9), (20, 9)]
        );
    }

    #[test]
    fn the_suppressed_lines_of_the_last_period_are_reported_after_it() {
        let (mut throttle, start) = (
            LogThrottle::up_to(2, Duration::from_secs(10)),
            Instant::now(),
        );
        let at = |second| start + Duration::from_secs(second);
        let due: Vec<_> = (0..5).map(|second| throttle.due(at(second))).collect();
        assert_eq!(due, [Some(0), Some(0), None, None, None]);
        assert_eq!(throttle.report_at(), Some(at(10)));
        assert_eq!(throttle.take_suppressed(at(9)), 0);
        assert_eq!(throttle.take_suppressed(at(10)), 3);
        assert_eq!(
            (throttle.report_at(), throttle.take_suppressed(at(11))),
            (None, 0)
        );
        assert_eq!(throttle.due(at(12)), Some(0));
    }

    #[test]
    fn at_a_low_rate_every_line_is_written() {
        let ten = LogThrottle::up_to(10, Duration::from_secs(10));
        assert_eq!(written(ten, (0..30).step_by(2)).len(), 15);
        let two = LogThrottle::up_to(2, Duration::from_secs(10));
        assert_eq!(
            written(two, [0, 0, 0, 5, 11].into_iter()),
            [(0, 0), (0, 0), (11, 2)]
        );
    }
}
