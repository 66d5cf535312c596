//! What goes wrong at the provider, decided by the seed alone.

use std::hash::{DefaultHasher, Hash, Hasher};

/// Decides what goes wrong. The same seed gives the same faults to the same ids, in whatever order
/// they come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    seed: u64,
}

/// What becomes of a charge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// It is booked and answered.
    Answered,
    /// It is booked, and the answer is lost.
    AnswerLost,
    /// The answer is lost, and it is booked only later.
    ArrivesLate,
    /// It is never booked, and nobody says so.
    NeverArrives,
}

impl Faults {
    /// Faults by this seed.
    pub(crate) fn seeded(seed: u64) -> Self {
        Self { seed }
    }

    /// What becomes of the nth charge that is asked for under an id: of a hundred, two go through
    /// without an answer, two arrive late, two never do.
    pub(crate) fn charge(&self, id: &str, nth: u32) -> Fate {
        match self.draw(id, u64::from(nth)) {
            0..2 => Fate::AnswerLost,
            2..4 => Fate::ArrivesLate,
            4..6 => Fate::NeverArrives,
            _ => Fate::Answered,
        }
    }

    /// Whether the nth look-up at the provider fails: five of a hundred.
    pub(crate) fn look_up_fails(&self, nth: u64) -> bool {
        self.draw("look-up", nth) < 5
    }

    /// A number below 100.
    fn draw(&self, what: &str, nth: u64) -> u8 {
        let mut hasher = DefaultHasher::new(); // its keys are fixed: the same on every run
        (self.seed, what, nth).hash(&mut hasher);
        fastrand::Rng::with_seed(hasher.finish()).u8(0..100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_alone_decides_and_every_fate_occurs() {
        let fates = |seed| {
            (0..1000)
                .map(|n| Faults::seeded(seed).charge(&format!("pay-{n}"), 1))
                .collect::<Vec<_>>()
        };
        assert_eq!(fates(7), fates(7));
        assert_ne!(fates(7), fates(8));
        for fate in [
            Fate::Answered,
            Fate::AnswerLost,
            Fate::ArrivesLate,
            Fate::NeverArrives,
        ] {
            assert!(fates(7).contains(&fate), "{fate:?}");
        }
    }
}
