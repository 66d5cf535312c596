//! Suspects a client of having forgotten its brokers.

use std::time::{Duration, Instant};

/// After which time without the group, and how often then, a client of its own is asked whether it
/// gets there; and how seldom at the most, while it does not.
const ASK_ANOTHER: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(15));
/// How long a client may take to connect and to find the group, once it tries.
const TAKES: Duration = Duration::from_secs(5);

/// Whether the watched client has forgotten its brokers. librdkafka 2.12 lets go of all that a
/// metadata answer does not name, as that of a broker that is out of its cluster for a moment names
/// none, and it may then never ask those again that it was given.
pub(crate) struct Forgotten {
    /// In which time a client that has lost its brokers is back.
    returns: Duration,
    /// Since when the client is without its group.
    alone: Option<Instant>,
    /// When another one was asked last, how long to wait after that, and since when it has been
    /// answered.
    asked: Option<Instant>,
    pause: Duration,
    answered: Option<Instant>,
}

impl Forgotten {
    /// Nothing asked yet, of a client that waits so long at the most until it tries its brokers
    /// again.
    pub(crate) fn new(tries_again: Duration) -> Self {
        Self::waiting(tries_again + TAKES, None)
    }

    const fn waiting(returns: Duration, alone: Option<Instant>) -> Self {
        Self {
            returns,
            alone,
            asked: None,
            pause: ASK_ANOTHER.0,
            answered: None,
        }
    }

    /// Whether others have been answered for so long that this one would have been, too.
    pub(crate) fn look(
        &mut self,
        alone: Option<Instant>,
        clock: impl Fn() -> Instant,
        answers: impl FnOnce() -> bool,
    ) -> bool {
        if self.alone != alone {
            *self = Self::waiting(self.returns, alone);
        }
        let Some(begun) = self.asked.or(alone) else {
            return false;
        };
        if clock().duration_since(begun) < self.pause {
            return false;
        }
        let does_answer = answers();
        let now = clock();
        self.asked = Some(now);
        // A cluster that is away for long, or comes back, is not asked by everybody over and over.
        self.pause = if does_answer {
            ASK_ANOTHER.0
        } else {
            (self.pause * 2).min(ASK_ANOTHER.1)
        };
        self.answered = if does_answer {
            self.answered.or(Some(now))
        } else {
            None
        };
        self.answered
            .is_some_and(|at| now.duration_since(at) >= self.returns)
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
            let mut forgotten = Forgotten::new(Duration::from_secs(1));
            (0..200).find(|now| {
                forgotten.look(
                    (*now < alone_until).then_some(begun),
                    || at(*now),
                    || *now >= answered,
                )
            })
        };
        assert_eq!(
            found(200, 0),
            Some(8),
            "asked after 2 s, and then every 2 s"
        );
        assert_eq!(
            found(200, 33),
            Some(50),
            "asked at 2, 6, 14, 29 and 44: while nobody is answered, nobody is to blame"
        );
        assert_eq!(found(8, 0), None, "it has come back");
        // Whoever is not answered once begins anew, and so does who is alone a second time.
        let mut forgotten = Forgotten::new(Duration::from_secs(1));
        assert!(
            [(2, true), (4, false), (8, true), (13, true)]
                .iter()
                .all(|(now, is)| !forgotten.look(Some(begun), || at(*now), || *is))
        );
        assert!(forgotten.look(Some(begun), || at(15), || true));
        assert!(!forgotten.look(Some(at(16)), || at(21), || true));
        assert!(forgotten.look(Some(at(16)), || at(27), || true));
        // One that waits for longer until it tries again has as much longer.
        let mut patient = Forgotten::new(Duration::from_secs(10));
        assert_eq!(
            (0..200).find(|now| patient.look(Some(begun), || at(*now), || true)),
            Some(18)
        );
    }
}
