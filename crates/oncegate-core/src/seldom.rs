//! A line in the log that would come with each delivery.

use std::time::{Duration, Instant};

/// Lets a line through at once and then no more often than this, and counts those that it kept back: a store that is away
/// or a topic of broken messages must not fill a disk with logs.
#[derive(Debug)]
pub(crate) struct Seldom {
    every: Duration,
    said: Option<Instant>,
    kept_back: u64,
}

impl Seldom {
    pub(crate) const fn every(every: Duration) -> Self {
        Self { every, said: None, kept_back: 0 }
    }

    /// How many lines were kept back since the last, if it is time for one.
    pub(crate) fn due(&mut self, now: Instant) -> Option<u64> {
        if self.said.is_some_and(|said| now.duration_since(said) < self.every) {
            self.kept_back += 1;
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.kept_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_said_and_then_one_now_and_then_with_the_number_of_the_others() {
        let (mut seldom, begun) = (Seldom::every(Duration::from_secs(10)), Instant::now());
        let said: Vec<_> = (0..25).filter_map(|second| Some((second, seldom.due(begun + Duration::from_secs(second))?))).collect();
        assert_eq!(said, [(0, 0), (10, 9), (20, 9)]);
    }
}
