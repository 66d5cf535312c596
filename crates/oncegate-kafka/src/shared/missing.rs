//! What is missing of a log: counted always, and said once in a while.

use std::time::{Duration, Instant};

use super::State;
use super::assigned::{Assigned, Jump};

/// How often it is said of one partition.
const SAID_EVERY: Duration = Duration::from_secs(60);
/// Gaps of one partition that are kept until it is known where its log begins.
const KEPT: usize = 1_000;

/// What was missing of one partition under one assignment.
#[derive(Default)]
pub(super) struct Missing {
    missed: Seldom,
    unclear: Seldom,
    /// Gaps that came while nobody knew where the log begins.
    kept: Vec<Jump>,
}

/// Says a thing at once, and from then on what has come together, once in a while.
#[derive(Default)]
struct Seldom {
    said: Option<Instant>,
    unsaid: u64,
}

impl Seldom {
    /// How much is to be said now, if something is.
    fn add(&mut self, count: u64, now: Instant) -> Option<u64> {
        self.unsaid += count;
        if self
            .said
            .is_some_and(|said| now.duration_since(said) < SAID_EVERY)
        {
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

impl State {
    /// Counts messages that were removed before they were read. Answers how many of the partition
    /// are to be said now: these, and those before them that were not.
    pub(crate) fn miss(&mut self, jump: &Jump, missed: u64, now: Instant) -> Option<u64> {
        self.missed += missed;
        match self.missing_of(jump) {
            Some(missing) => missing.missed.add(missed, now),
            None => Some(missed),
        }
    }

    /// Keeps a gap of which nobody can tell what it is, since it is not known where the log begins.
    /// Answers how many such gaps of the partition are to be said now.
    pub(crate) fn keep_gap(&mut self, jump: Jump, now: Instant) -> Option<u64> {
        let Some(missing) = self.missing_of(&jump) else {
            return Some(1);
        };
        let gaps = missing.unclear.add(1, now);
        if missing.kept.len() < KEPT {
            missing.kept.push(jump);
        }
        gaps
    }

    /// The gaps that are kept, of which somebody may know by now what they are: those of which
    /// `is_known` says so.
    pub(crate) fn take_gaps(&mut self, is_known: impl Fn(&str, i32) -> bool) -> Vec<Jump> {
        let with_gaps = self
            .assigned
            .values_mut()
            .filter(|it| !it.missing.kept.is_empty() && is_known(&it.topic, it.partition));
        with_gaps
            .flat_map(|it| std::mem::take(&mut it.missing.kept))
            .collect()
    }

    /// How many messages were removed before they were read.
    pub(crate) fn missed(&self) -> u64 {
        self.missed
    }

    fn missing_of(&mut self, jump: &Jump) -> Option<&mut Missing> {
        let theirs = |it: &&mut Assigned| it.partition == jump.partition && it.topic == jump.topic;
        self.assigned
            .values_mut()
            .find(theirs)
            .map(|it| &mut it.missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_said_at_once_and_then_once_a_minute_with_all_that_came_meanwhile() {
        let (mut seldom, begun) = (Seldom::default(), Instant::now());
        let said: Vec<u64> = (0..150)
            .filter_map(|second| seldom.add(1, begun + Duration::from_secs(second)))
            .collect();
        assert_eq!(said, [1, 60, 60]);
    }
}
