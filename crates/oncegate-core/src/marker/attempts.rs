//! The attempts of an id.

/// The attempts of an id: the number of the last one, how many of them `max_attempts` does not
/// count, and how many ended in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attempts {
    /// The number of the last attempt, from 1: the fencing token that a handler passes to its sink.
    /// Later attempts have higher numbers, also after an unknown outcome and after an operator has
    /// freed the id.
    pub number: u32,
    /// How many attempts `max_attempts` does not count. A grant to reconcile, a crash and a withdrawn
    /// grant add one each; a redrive sets it to `number`.
    pub base: u32,
    /// How many leases ended without a recorded outcome since the last redrive: the process crashed,
    /// or lost its connection to the store.
    pub crashes: u32,
}

impl Attempts {
    /// The attempts up to this number, all counted.
    pub const fn new(number: u32) -> Self {
        Self {
            number,
            base: 0,
            crashes: 0,
        }
    }

    /// The attempts up to this number, none counted: all of `max_attempts` are left.
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

    /// One more grant.
    pub(super) const fn granted(self) -> Self {
        Self {
            number: self.number.saturating_add(1),
            ..self
        }
    }

    /// One more grant, to reconcile: a higher fencing token. It is not a run, so it is not counted.
    pub(super) const fn granted_in_doubt(self) -> Self {
        self.granted().uncounted()
    }

    /// The holder's lease ended without an outcome.
    pub(super) const fn crashed(self) -> Self {
        Self {
            crashes: self.crashes.saturating_add(1),
            ..self
        }
    }

    /// Excludes the last attempt from the count.
    pub(super) const fn uncounted(self) -> Self {
        Self {
            base: self.base.saturating_add(1),
            ..self
        }
    }
}
