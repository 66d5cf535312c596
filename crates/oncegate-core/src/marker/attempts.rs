//! The attempts of an id.

/// The attempts of an id: the number of the last one, how many of them do not count towards
/// `max_attempts`, and how many ended in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempts {
    /// The number of the last attempt, from 1: the fencing token, which a handler passes to its
    /// sink (the system in which it causes its effect). While the marker exists, later attempts
    /// have higher numbers, also after an unknown outcome and after an operator has freed the id.
    /// If attempt 1 is cleared, rejected or withdrawn without an effect, the marker is deleted
    /// (except when at most once rejects), and the next attempt is 1 again.
    pub number: u32,
    /// How many of the attempts do not count towards `max_attempts`. A grant in doubt, a crash in
    /// `handle`, and a withdrawn grant whose marker is kept add one each; a crash in `reconcile`
    /// adds only to `crashes`. A redrive or a forget sets this to `number`.
    pub base: u32,
    /// How many leases ended without a recorded outcome since the last redrive or forget: the
    /// process crashed, or lost its connection to the store.
    pub crashes: u32,
}

impl Attempts {
    /// The attempts up to this number, all of which count towards `max_attempts`.
    pub const fn new(number: u32) -> Self {
        Self {
            number,
            base: 0,
            crashes: 0,
        }
    }

    /// The attempts up to this number, none of which counts towards `max_attempts`.
    pub const fn none_counted(number: u32) -> Self {
        Self {
            number,
            base: number,
            crashes: 0,
        }
    }

    /// How many attempts count towards `max_attempts`.
    pub const fn spent(self) -> u32 {
        self.number.saturating_sub(self.base)
    }

    /// With one more grant.
    pub(super) const fn granted(self) -> Self {
        Self {
            number: self.number.saturating_add(1),
            ..self
        }
    }

    /// With one more grant, to reconcile: it has a higher fencing token, and does not count towards
    /// `max_attempts`, because `handle` does not run.
    pub(super) const fn granted_in_doubt(self) -> Self {
        self.granted().uncounted()
    }

    /// With one more crash: the lease of the holder ended without a recorded outcome.
    pub(super) const fn crashed(self) -> Self {
        Self {
            crashes: self.crashes.saturating_add(1),
            ..self
        }
    }

    /// With one more attempt that does not count towards `max_attempts`.
    pub(super) const fn uncounted(self) -> Self {
        Self {
            base: self.base.saturating_add(1),
            ..self
        }
    }
}
