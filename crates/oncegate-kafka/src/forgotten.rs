//! Suspects a client of having forgotten its brokers.

use std::time::{Duration, Instant};

/// After which time without a broker, and how often then, a client of its own is asked whether there are brokers; and how seldom at the
/// most, while there are none.
const ASK_ANOTHER: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(60));
/// In which time a client that has lost its brokers tries them again: librdkafka's `reconnect.backoff.max.ms` is ten seconds.
const TRIES_AGAIN: Duration = Duration::from_secs(15);

/// Whether the watched client may have forgotten its brokers. librdkafka 2.12 lets go of all that a metadata answer does not name, as that
/// of a broker that is out of its cluster for a moment names none, and it may then never ask those again that it was given.
pub(crate) struct Forgotten {
    /// Since when the client reaches nobody.
    alone: Option<Instant>,
    /// When another one was asked last, how long to wait after that, and since when it has been answered.
    asked: Option<Instant>,
    pause: Duration,
    answered: Option<Instant>,
}

impl Forgotten {
    /// Nothing asked yet.
    pub(crate) const fn new() -> Self {
        Self { alone: None, asked: None, pause: ASK_ANOTHER.0, answered: None }
    }

    /// Whether others have been answered for so long that this one would have been, too: it tries again every ten seconds.
    pub(crate) fn look(&mut self, alone: Option<Instant>, clock: impl Fn() -> Instant, answers: impl FnOnce() -> bool) -> bool {
        if self.alone != alone {
            *self = Self { alone, ..Self::new() };
        }
        let Some(begun) = self.asked.or(alone) else { return false };
        if clock().duration_since(begun) < self.pause {
            return false;
        }
        let does_answer = answers();
        let now = clock();
        self.asked = Some(now);
        // A cluster that is away for long, or comes back, is not asked by everybody over and over.
        self.pause = if does_answer { ASK_ANOTHER.0 } else { (self.pause * 2).min(ASK_ANOTHER.1) };
        self.answered = if does_answer { self.answered.or(Some(now)) } else { None };
        self.answered.is_some_and(|at| now.duration_since(at) >= TRIES_AGAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_suspected_once_others_were_answered_for_as_long_as_it_may_take() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        // Alone from 0 on; `answered` is from when on others are, by the second.
        let found = |alone_until: u64, answered: u64| {
            let mut forgotten = Forgotten::new();
            (0..200).find(|now| forgotten.look((*now < alone_until).then_some(begun), || at(*now), || *now >= answered))
        };
        assert_eq!(found(200, 0), Some(20), "asked after 5 s, and then every 5 s");
        assert_eq!(found(200, 33), Some(50), "asked at 5, 15 and 35: while nobody is answered, nobody is to blame");
        assert_eq!(found(200, 76), Some(150), "asked at 75 and 135");
        assert_eq!(found(19, 0), None, "it has come back");
        // Whoever is not answered once begins anew, and so does who is alone a second time.
        let mut forgotten = Forgotten::new();
        assert!([(5, true), (10, false), (20, true), (30, true)].iter().all(|(now, is)| !forgotten.look(Some(begun), || at(*now), || *is)));
        assert!(forgotten.look(Some(begun), || at(35), || true));
        assert!(!forgotten.look(Some(at(36)), || at(55), || true));
        assert!(forgotten.look(Some(at(36)), || at(70), || true));
    }
}
