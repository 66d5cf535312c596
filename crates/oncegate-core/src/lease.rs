//! The lease of a granted claim.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::boot_time::BootTime;
use crate::marker::Token;

/// The lease of a granted claim, shared by the engine, the run of the handler and the renewals.
///
/// Its deadline counts from the moment at which the claim, or its last successful renewal, was
/// *sent*.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) token: Token,
    /// When the claim was sent.
    pub(crate) sent: BootTime,
    pub(crate) duration: Duration,
    /// The lease is not renewed after this [`BootTime`].
    renew_until: AtomicU64,
    /// The [`BootTime`] at which the lease ends; 0 once it is lost.
    deadline: AtomicU64,
}

impl Lease {
    #[inline]
    pub(crate) fn new(
        token: Token,
        duration: Duration,
        sent: BootTime,
        renew_until: BootTime,
    ) -> Self {
        Self {
            token,
            sent,
            duration,
            renew_until: AtomicU64::new(renew_until.as_micros()),
            deadline: AtomicU64::new((sent + duration).as_micros()),
        }
    }

    /// Extends the lease from `sent`, unless it was lost.
    pub(crate) fn extend(&self, sent: BootTime) {
        let deadline = (sent + self.duration).as_micros();
        let _ = self
            .deadline
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| {
                (old != 0).then(|| old.max(deadline))
            });
    }

    /// Sets the time until which the lease may be renewed.
    #[inline]
    pub(crate) fn allow_renewals_until(&self, renew_until: BootTime) {
        self.renew_until
            .store(renew_until.as_micros(), Ordering::Release);
    }

    pub(crate) fn may_be_renewed(&self, now: BootTime) -> bool {
        now < BootTime::from_micros(self.renew_until.load(Ordering::Acquire))
    }

    /// Ends the lease now. It cannot be extended afterwards.
    pub(crate) fn mark_lost(&self) {
        self.deadline.store(0, Ordering::Release);
    }

    /// Whether the lease has not ended at this time.
    #[inline]
    pub(crate) fn is_live(&self, now: BootTime) -> bool {
        now < self.deadline()
    }

    /// The time until the lease ends; zero if it has ended.
    pub(crate) fn remaining(&self) -> Duration {
        self.deadline().remaining_at(BootTime::now())
    }

    #[inline]
    fn deadline(&self) -> BootTime {
        BootTime::from_micros(self.deadline.load(Ordering::Acquire))
    }
}

impl Clone for Lease {
    /// Later renewals of the original do not extend the copy.
    fn clone(&self) -> Self {
        let copy = |time: &AtomicU64| AtomicU64::new(time.load(Ordering::Acquire));
        Self {
            renew_until: copy(&self.renew_until),
            deadline: copy(&self.deadline),
            ..*self
        }
    }
}
