//! The settings that the lifecycle depends on.

use std::time::Duration;

use super::Grant;
use crate::internal::doubled;
use crate::marker::{Attempts, Guarantee};

/// What the consumer does while its store is unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outage {
    /// Start no handler until the store is available again.
    #[default]
    Hold,
    /// Run handlers without the store, and count these runs. Messages are handled at least once
    /// during the outage. Needs effectively once.
    PassThrough,
}

/// The settings that `transition` depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// The guarantee.
    pub guarantee: Guarantee,
    /// The maximum number of attempts before a message is dead-lettered.
    pub max_attempts: u32,
    /// The maximum number of crashes before a message is dead-lettered.
    pub max_crashes: u32,
    /// The maximum number of inline retries within one attempt.
    pub max_inline_retries: u32,
    /// The maximum number of `reconcile` calls.
    pub max_reconciles: u32,
    /// The maximum number of repeats of a claim, while another holder has the id, before the
    /// delivery is released.
    pub max_claim_retries: u32,
    /// The first pause before a retry. Each further one is twice as long.
    pub backoff: Duration,
    /// The longest pause before a retry.
    pub longest_backoff: Duration,
    /// What to do while the store is unavailable.
    pub outage: Outage,
}

impl Policy {
    /// The pause before the retry that follows this number of tries: the first pause, doubled for
    /// each try, up to the longest.
    pub fn pause(&self, tries: u32) -> Duration {
        doubled(self.backoff, tries, self.longest_backoff)
    }

    /// How a message is isolated from others, because it may crash the processes that handle it.
    ///
    /// `None` after a single crash: any message that was in flight then may be the cause. A message
    /// runs alone if its next crash would dead-letter it.
    pub fn isolation(&self, attempts: Attempts) -> Option<Isolation> {
        match attempts.crashes {
            0 | 1 => None,
            crashes if crashes >= self.max_crashes => Some(Isolation::Alone),
            2 => Some(Isolation::Group),
            _ => Some(Isolation::GrowingGroup),
        }
    }

    /// Whether no attempt is left after this one.
    pub(super) fn is_last_attempt(&self, grant: Grant) -> bool {
        grant.spent() >= self.max_attempts
    }

    /// Whether more processes crashed while they held the id than the policy allows.
    pub(super) fn has_too_many_crashes(&self, attempts: Attempts) -> bool {
        attempts.crashes > self.max_crashes
    }
}

/// How a message runs that may cause the crashes of the processes that handle it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isolation {
    /// Only together with other such messages, in groups of a fixed maximum size.
    Group,
    /// Only together with other such messages, in groups that start with one message and double in
    /// size after each group that finishes without a crash.
    GrowingGroup,
    /// Alone in its process.
    Alone,
}
