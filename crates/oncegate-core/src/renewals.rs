//! OnRelease claims alive, on a thread that no handler can block.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::sync::mpsc::UnboundedSender;

use crate::fault;
use crate::lease::Lease;
use crate::marker::{Token, Verdict};
use crate::moment::Moment;
use crate::store::Store;

/// The leases that are held, one place per delivery in flight.
pub(crate) struct Renewals {
    places: Mutex<Vec<Option<Arc<Lease>>>>,
}

/// Says that the lease in this place, of this claim, is over.
pub(crate) type Over = (usize, Token);

/// How long a store that does not answer is left alone, if the lease allows.
const PAUSE: Duration = Duration::from_millis(100);

/// How many renewals travel together.
const BATCH: usize = 256;

impl Renewals {
    /// Starts the thread; it ends by itself when the last handle is gone. Each lease that is over
    /// is told to `over`, which is closed if the thread cannot go on.
    pub(crate) fn start(
        store: Arc<dyn Store>,
        lease: Duration,
        over: UnboundedSender<Over>,
    ) -> std::io::Result<Arc<Self>> {
        let renewals = Arc::new(Self {
            places: Mutex::default(),
        });
        let weak = Arc::downgrade(&renewals);
        std::thread::Builder::new()
            .name("oncegate-renewals".into())
            .spawn(move || {
                // Made here: one that is dropped inside another runtime, because its thread did not
                // start, panics.
                let runtime = match tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .build()
                {
                    Ok(runtime) => runtime,
                    Err(error) => return tracing::error!(%error, "no runtime for the renewals"),
                };
                let store = store.for_renewals().unwrap_or(store);
                runtime.block_on(keep_alive(&weak, &*store, lease, &over));
                // The store's connection must go before the runtime that drives it.
                drop(store);
            })?;
        Ok(renewals)
    }

    /// Holds these leases, each in its place.
    pub(crate) fn hold(&self, leases: impl Iterator<Item = (usize, Arc<Lease>)>) {
        let mut places = self.lock();
        for (place, lease) in leases {
            if places.len() <= place {
                places.resize(place + 1, None);
            }
            places[place] = Some(lease);
        }
    }

    /// Lets go of what stands in these places.
    pub(crate) fn let_go(&self, given_up: impl Iterator<Item = usize>) {
        let mut places = self.lock();
        for place in given_up {
            if let Some(held) = places.get_mut(place) {
                *held = None;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<Lease>>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those whose last third but one has begun, and those that are over: these leave their place.
    fn due(&self, now: Moment) -> (Vec<(usize, Arc<Lease>)>, Vec<Over>) {
        let (mut due, mut over) = (Vec::new(), Vec::new());
        for (place, held) in self.lock().iter_mut().enumerate() {
            let Some(lease) = held else { continue };
            if !lease.lives(now) {
                over.push((place, lease.token));
                *held = None;
            } else if lease.may_be_renewed(now) && lease.remaining() < lease.terms.lease * 2 / 3 {
                due.push((place, lease.clone()));
            }
        }
        (due, over)
    }
}

async fn keep_alive(
    renewals: &Weak<Renewals>,
    store: &dyn Store,
    lease: Duration,
    over: &UnboundedSender<Over>,
) {
    let tick = (lease / 24).clamp(Duration::from_millis(5), Duration::from_secs(1));
    loop {
        tokio::time::sleep(tick).await;
        let Some(renewals) = renewals.upgrade() else {
            return;
        };
        let (due, ended) = renewals.due(Moment::now());
        drop(renewals);
        for ended in ended {
            let _ = over.send(ended); // the loop is gone: nothing is left to tell
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
                    "the store panicked; what could not be renewed is asked again while it lives"
                );
                Vec::new()
            });
        if !due.is_empty() && !answered.contains(&Answered::Yes) {
            tokio::time::sleep((lease / 6).min(PAUSE)).await;
        }
    }
}

/// Whether the store said anything.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Answered {
    Yes,
    No,
}

/// Renews a batch; what was not answered in time is asked again at the next tick, while it lives.
async fn renew(store: &dyn Store, batch: &[(usize, Arc<Lease>)], patience: Duration) -> Answered {
    let operations: Vec<_> = batch.iter().map(|(_, lease)| lease.renewal()).collect();
    fault::before(&operations);
    let sent = Moment::now();
    let Ok(answers) = tokio::time::timeout(patience, store.apply(&operations)).await else {
        tracing::warn!(
            leases = batch.len(),
            "leases could not be renewed: the store does not answer"
        );
        return Answered::No;
    };
    fault::after(&operations);
    #[cfg(oncegate_chaos)]
    let sent = if fault::wrong("renewal-from-the-reply") {
        Moment::now()
    } else {
        sent
    };
    let mut answered = Answered::No;
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
        answered = Answered::Yes;
    }
    if let Some(error) = why {
        tracing::warn!(leases = failed, %error, "leases could not be renewed");
    }
    answered
}
