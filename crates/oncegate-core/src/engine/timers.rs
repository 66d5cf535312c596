//! The alarms of deliveries.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use crate::marker::Token;
use crate::slots::Slot;

/// The alarms of deliveries that pause, back off, or wait to repeat an operation.
///
/// Each alarm has the generation that its delivery had when the alarm was set, a number that
/// increases with each run, alarm and operation of the delivery. The engine ignores an alarm of an
/// earlier generation, so alarms are never removed before they are due.
pub(super) struct Timers {
    alarms: BinaryHeap<Reverse<(Instant, Slot, u32)>>,
    /// The state of a pseudo-random generator (xorshift), never 0.
    jitter: u64,
}

impl Timers {
    pub(super) fn new(jitter_seed: Option<u64>) -> Self {
        Self {
            alarms: BinaryHeap::new(),
            jitter: jitter_seed.unwrap_or_else(|| Token::random().0 as u64) | 1,
        }
    }

    /// Sets an alarm after 75 % to 125 % of this time, so that deliveries that failed together are
    /// not retried together.
    pub(super) fn set(&mut self, slot: Slot, generation: u32, now: Instant, after: Duration) {
        self.jitter ^= self.jitter << 13;
        self.jitter ^= self.jitter >> 7;
        self.jitter ^= self.jitter << 17;
        let factor = 0.75 + (self.jitter >> 11) as f64 / (1u64 << 53) as f64 / 2.0;
        self.alarms
            .push(Reverse((now + after.mul_f64(factor), slot, generation)));
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.alarms.peek().map(|Reverse((at, ..))| *at)
    }

    /// Removes the next alarm that is due. Returns its delivery and generation.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<(Slot, u32)> {
        self.next().filter(|at| *at <= now)?;
        self.alarms
            .pop()
            .map(|Reverse((_, slot, generation))| (slot, generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slots::Slots;

    #[test]
    fn alarms_are_due_in_order_within_a_quarter_of_their_time() {
        let (mut timers, now) = (Timers::new(None), Instant::now());
        let mut slots = Slots::new(2);
        let (late, early) = (slots.insert(()), slots.insert(()));
        let second = Duration::from_secs(1);
        timers.set(late, 1, now, second * 100);
        for generation in 0..100 {
            timers.set(early, generation, now, second);
        }
        assert_eq!(timers.pop_due(now + second * 3 / 4 - second / 1000), None);
        let mut due = Vec::new();
        while let Some((slot, generation)) = timers.pop_due(now + second * 5 / 4) {
            assert_eq!(slot, early);
            due.push(generation);
        }
        assert_eq!(due.len(), 100);
        assert!(!due.is_sorted(), "there is no jitter");
        let next = timers.next().expect("the late alarm") - now;
        assert!(next >= second * 75 && next <= second * 125, "{next:?}");
    }
}
