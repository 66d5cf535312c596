//! Renews leases on a thread of its own, which no handler can block.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::sync::mpsc::UnboundedSender;

use crate::boot_time::BootTime;
use crate::fault;
use crate::lease::Lease;
use crate::marker::{Token, Verdict};
use crate::store::Store;

/// The leases that are renewed, by the slab index of their delivery.
pub(crate) struct Renewals {
    places: Mutex<Vec<Option<Arc<Lease>>>>,
}

/// A lease that has ended: the slab index of its delivery, and the token of its claim.
pub(crate) type LostLease = (usize, Token);

/// The pause after a renewal that was not answered, if the lease is long enough.
const PAUSE: Duration = Duration::from_millis(100);

/// The maximum number of renewals in a batch.
const BATCH: usize = 256;

impl Renewals {
    /// Starts the thread, which ends when the last handle is dropped. It sends each lease that has
    /// ended to `over`, which is closed if the thread fails.
    pub(crate) fn start(
        store: Arc<dyn Store>,
        lease: Duration,
        over: UnboundedSender<LostLease>,
    ) -> std::io::Result<Arc<Self>> {
        let renewals = Arc::new(Self {
            places: Mutex::default(),
        });
        let weak = Arc::downgrade(&renewals);
        std::thread::Builder::new()
            .name("oncegate-renewals".into())
            .spawn(move || {
                // Created on this thread: a runtime that is dropped inside another one panics.
                let runtime = match tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                {
                    Ok(runtime) => runtime,
                    Err(error) => return tracing::error!(%error, "cannot start the tokio runtime that renews leases, the consumer stops; check the limits of threads and file descriptors"),
                };
                let store = store.for_renewals().unwrap_or(store);
                runtime.block_on(renew_until_dropped(&weak, &*store, lease, &over));
                // Closes the store's connection before the runtime that drives it.
                drop(store);
            })?;
        Ok(renewals)
    }

    /// Starts to renew these leases.
    pub(crate) fn start_renewing(&self, leases: impl Iterator<Item = (usize, Arc<Lease>)>) {
        let mut places = self.lock();
        for (place, lease) in leases {
            if places.len() <= place {
                places.resize(place + 1, None);
            }
            places[place] = Some(lease);
        }
    }

    /// Stops renewing the leases of these deliveries.
    pub(crate) fn stop(&self, stopped: impl Iterator<Item = usize>) {
        let mut places = self.lock();
        for place in stopped {
            if let Some(held) = places.get_mut(place) {
                *held = None;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<Lease>>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The leases with less than two thirds left, and those that have ended, which are removed.
    fn due(&self, now: BootTime) -> (Vec<(usize, Arc<Lease>)>, Vec<LostLease>) {
        let (mut due, mut over) = (Vec::new(), Vec::new());
        for (place, held) in self.lock().iter_mut().enumerate() {
            let Some(lease) = held else { continue };
            if !lease.is_live(now) {
                over.push((place, lease.token));
                *held = None;
            } else if lease.may_be_renewed(now) && lease.remaining() < lease.terms.lease * 2 / 3 {
                due.push((place, lease.clone()));
            }
        }
        (due, over)
    }
}

async fn renew_until_dropped(
    renewals: &Weak<Renewals>,
    store: &dyn Store,
    lease: Duration,
    over: &UnboundedSender<LostLease>,
) {
    let tick = (lease / 24).clamp(Duration::from_millis(5), Duration::from_secs(1));
    loop {
        tokio::time::sleep(tick).await;
        let Some(renewals) = renewals.upgrade() else {
            return;
        };
        let (due, ended) = renewals.due(BootTime::now());
        drop(renewals);
        for ended in ended {
            let _ = over.send(ended); // fails only after the consumer was dropped
        }
        let renewed = join_all(
            due.chunks(BATCH)
                .map(|batch| renew(store, batch, lease / 3)),
        );
        let answered = AssertUnwindSafe(renewed)
            .catch_unwind()
            .await
            .unwrap_or_else(|_| {
                tracing::error!(
                    leases = due.len(),
                    "store panicked during a renewal, retrying while the leases last"
                );
                Vec::new()
            });
        if !due.is_empty() && !answered.contains(&StoreReply::Received) {
            tokio::time::sleep((lease / 6).min(PAUSE)).await;
        }
    }
}

/// Whether the store answered a batch of renewals.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StoreReply {
    Received,
    Missing,
}

/// Renews a batch. Leases that were not answered in time are retried at the next tick, until they
/// end.
async fn renew(store: &dyn Store, batch: &[(usize, Arc<Lease>)], timeout: Duration) -> StoreReply {
    let operations: Vec<_> = batch.iter().map(|(_, lease)| lease.renewal()).collect();
    fault::before(&operations);
    let sent = BootTime::now();
    let Ok(answers) = tokio::time::timeout(timeout, store.apply(&operations)).await else {
        tracing::warn!(
            leases = batch.len(),
            "leases not renewed, the store does not answer in time: retrying while they last; check the store and its network"
        );
        return StoreReply::Missing;
    };
    fault::after(&operations);
    #[cfg(oncegate_chaos)]
    let sent = if fault::wrong("renewal-from-the-reply") {
        BootTime::now()
    } else {
        sent
    };
    let mut answered = StoreReply::Missing;
    let (mut failed, mut why) = (0, None);
    for ((_, lease), answer) in batch.iter().zip(answers) {
        match answer {
            Ok(Verdict::Kept) => lease.extend(sent),
            Ok(_) => lease.lose(),
            Err(error) => {
                failed += 1;
                why = Some(error);
                continue;
            }
        }
        answered = StoreReply::Received;
    }
    if let Some(error) = why {
        tracing::warn!(leases = failed, %error, "leases not renewed, retrying while they last; check the store");
    }
    answered
}
