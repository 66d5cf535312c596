//! The leases of deliveries, as the engine registers them with the renewals.

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

/// The leases that were granted or given up since the renewals were last updated, once for each
/// batch.
///
/// All leases of a batch are registered before any of its handlers runs: an inline handler that
/// blocks must not let the other leases of the batch end.
pub(super) struct Leases {
    /// `None` with the bare gate, which has no leases, and after the thread has failed.
    renewals: Option<Arc<Renewals>>,
    lost: UnboundedReceiver<LostLease>,
    granted: Vec<(usize, Arc<SharedDelivery>)>,
    /// Slab indexes of leases that were given up.
    ended: Vec<usize>,
    adaptive: AdaptiveLease,
}

/// The duration of the next lease.
struct AdaptiveLease {
    runtimes: RuntimeEstimator,
    /// `None` if the lease does not adapt.
    shortest: Option<Duration>,
    longest: Duration,
    next: Duration,
}

impl Leases {
    /// Starts the renewals.
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

    /// Adapts the lease to the duration of a run, if it adapts.
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

    /// Whether grants have leases.
    #[inline]
    pub(super) fn are_renewed(&self) -> bool {
        self.renewals.is_some()
    }

    /// A delivery got a lease.
    #[inline]
    pub(super) fn granted(&mut self, slot: Slot, delivery: Arc<SharedDelivery>) {
        self.granted.push((slot.index, delivery));
    }

    /// The lease of a delivery was given up.
    #[inline]
    pub(super) fn ended(&mut self, slot: Slot) {
        self.ended.push(slot.index);
    }

    /// Updates the renewals.
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
