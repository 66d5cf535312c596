//! Registers the leases of deliveries with the renewals, and adapts the duration of leases.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::context::SharedDelivery;
use crate::error::Error;
use crate::marker::Guarantee;
use crate::renewals::{LostLease, Renewals};
use crate::runtime_estimator::RuntimeEstimator;
use crate::settings::Settings;
use crate::slots::Slot;
use crate::store::Store;

/// The leases that were granted or given up since the last update of the renewals. The renewals are
/// updated once for each batch of answers.
///
/// All leases of a batch are registered before any of its handlers runs: an inline handler that
/// blocks must not let the other leases of the batch end.
pub(super) struct Leases {
    /// `None` with [`Guarantee::Bare`], which has no leases, and after the renewal thread has
    /// failed.
    renewals: Option<Arc<Renewals>>,
    /// The leases that have ended, from the renewal thread.
    lost: UnboundedReceiver<LostLease>,
    /// Slab indexes of deliveries that got a lease, with their shared records.
    granted: Vec<(usize, Arc<SharedDelivery>)>,
    /// Slab indexes of deliveries that gave up their lease.
    ended: Vec<usize>,
    adaptive: AdaptiveLease,
}

/// Adapts the duration of leases to that of runs.
struct AdaptiveLease {
    runtimes: RuntimeEstimator,
    /// `None` if the lease does not adapt.
    shortest: Option<Duration>,
    longest: Duration,
    /// The duration of the next lease.
    next: Duration,
}

impl Leases {
    pub(super) fn start(store: Arc<dyn Store>, settings: &Settings) -> Result<Self, Error> {
        let (lost_sender, lost) = unbounded_channel();
        let renewals = match settings.guarantee {
            Guarantee::Bare => None,
            Guarantee::AtMostOnce | Guarantee::EffectivelyOnce => Some(
                Renewals::start(
                    store,
                    settings.scope.clone(),
                    settings.shortest_lease(),
                    lost_sender,
                    Handle::try_current().ok(),
                )
                .map_err(Error::renewal_thread)?,
            ),
        };
        Ok(Self {
            renewals,
            lost,
            granted: Vec::new(),
            ended: Vec::new(),
            adaptive: AdaptiveLease {
                runtimes: RuntimeEstimator::new(),
                shortest: settings.shortest_lease,
                longest: settings.lease,
                next: settings.lease,
            },
        })
    }

    /// The duration of the next lease.
    pub(super) fn duration(&self) -> Duration {
        self.adaptive.next
    }

    /// Adapts the next lease to the duration of a run, if the user chose an adaptive lease.
    #[inline]
    pub(super) fn record_runtime(&mut self, runtime: Duration) {
        let AdaptiveLease {
            runtimes,
            shortest: Some(shortest),
            longest,
            next,
        } = &mut self.adaptive
        else {
            return;
        };
        runtimes.record(runtime);
        if let Some(lease) = runtimes.lease() {
            *next = lease.clamp(*shortest, *longest);
        }
    }

    /// Whether leases are renewed: if not, grants have no leases.
    #[inline]
    pub(super) fn are_renewed(&self) -> bool {
        self.renewals.is_some()
    }

    /// Registers the lease of a delivery at the next update.
    #[inline]
    pub(super) fn register(&mut self, slot: Slot, delivery: Arc<SharedDelivery>) {
        self.granted.push((slot.index, delivery));
    }

    /// Stops the renewal of the lease of a delivery at the next update.
    #[inline]
    pub(super) fn unregister(&mut self, slot: Slot) {
        self.ended.push(slot.index);
    }

    /// Passes the granted and the ended leases to the renewals.
    pub(super) fn update_renewals(&mut self) {
        if self.granted.is_empty() && self.ended.is_empty() {
            return;
        }
        let (ended, granted) = (self.ended.drain(..), self.granted.drain(..));
        if let Some(renewals) = &self.renewals {
            renewals.update(ended, granted);
        }
    }

    /// The next lease that has ended, without waiting.
    pub(super) fn try_lost(&mut self) -> Option<LostLease> {
        self.lost.try_recv().ok()
    }

    /// Waits for the next lease that ends. `None` if the thread of the renewals has failed.
    pub(super) async fn lost(&mut self) -> Option<LostLease> {
        let lost = self.lost.recv().await;
        if lost.is_none() {
            self.renewals = None; // the thread ended and closed the channel
        }
        lost
    }
}
