//! Renews leases on a thread of its own, which no handler can block.

use std::cell::RefCell;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::join_all;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use crate::boot_time::BootTime;
use crate::fault;
use crate::lease::Lease;
use crate::log_throttle::LogThrottle;
use crate::marker::{Token, Verdict};
use crate::store::{Store, StoreError};

/// The leases that are renewed, by the slab index of their delivery.
pub(crate) struct Renewals {
    places: Mutex<Vec<Option<Arc<Lease>>>>,
    /// Closed when the last handle is dropped, which ends the thread at once. Each thread has a
    /// runtime, and threads that end late use up the file descriptors of a process that starts
    /// many consumers.
    _alive: oneshot::Sender<()>,
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
        let (alive, dropped) = oneshot::channel();
        let renewals = Arc::new(Self {
            places: Mutex::default(),
            _alive: alive,
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
                runtime.block_on(renew_until_dropped(&weak, dropped, &*store, lease, &over));
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
    dropped: oneshot::Receiver<()>,
    store: &dyn Store,
    lease: Duration,
    over: &UnboundedSender<LostLease>,
) {
    tokio::select! {
        _ = dropped => {}
        () = renew_at_each_tick(renewals, store, lease, over) => {}
    }
}

async fn renew_at_each_tick(
    renewals: &Weak<Renewals>,
    store: &dyn Store,
    lease: Duration,
    over: &UnboundedSender<LostLease>,
) {
    let log = RefCell::new(RenewalLog::default());
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
                .map(|batch| renew(store, batch, lease / 3, &log)),
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

/// The throttles of the log lines about renewals that failed. An unavailable store fails them many
/// times a second.
struct RenewalLog {
    unanswered: LogThrottle,
    failed: LogThrottle,
}

impl Default for RenewalLog {
    fn default() -> Self {
        let every = || LogThrottle::every(Duration::from_secs(10));
        Self {
            unanswered: every(),
            failed: every(),
        }
    }
}

impl RenewalLog {
    fn unanswered(&mut self, leases: usize, now: Instant) {
        if let Some(suppressed_lines) = self.unanswered.due(now) {
            tracing::warn!(
                leases,
                suppressed_lines,
                "leases not renewed, the store does not answer in time: retrying while they last; check the store and its network"
            );
        }
    }

    fn failed(&mut self, leases: usize, error: &StoreError, now: Instant) {
        if let Some(suppressed_lines) = self.failed.due(now) {
            tracing::warn!(leases, %error, suppressed_lines, "leases not renewed, retrying while they last; check the store");
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
async fn renew(
    store: &dyn Store,
    batch: &[(usize, Arc<Lease>)],
    timeout: Duration,
    log: &RefCell<RenewalLog>,
) -> StoreReply {
    let operations: Vec<_> = batch.iter().map(|(_, lease)| lease.renewal()).collect();
    fault::before(&operations);
    let sent = BootTime::now();
    let Ok(answers) = tokio::time::timeout(timeout, store.apply(&operations)).await else {
        log.borrow_mut().unanswered(batch.len(), Instant::now());
        return StoreReply::Missing;
    };
    fault::after(&operations);
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
        log.borrow_mut().failed(failed, &error, Instant::now());
    }
    answered
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::unbounded_channel;
    use tracing_subscriber::fmt::MakeWriter;

    use super::*;
    use crate::marker::Operation;

    /// A store that does not answer.
    struct Silent;

    #[async_trait::async_trait]
    impl Store for Silent {
        async fn apply(&self, _: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
            std::future::pending().await
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_renewals_end_at_once_when_the_last_handle_is_dropped() {
        let (alive, dropped) = oneshot::channel();
        let renewals = Arc::new(Renewals {
            places: Mutex::default(),
            _alive: alive,
        });
        let (weak, (over, _lost)) = (Arc::downgrade(&renewals), unbounded_channel());
        let began = tokio::time::Instant::now();
        drop(renewals);
        renew_until_dropped(&weak, dropped, &Silent, Duration::from_secs(30), &over).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[test]
    fn failed_renewals_are_logged_once_in_ten_seconds() {
        static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(|| LOG.make_writer())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let (mut log, start) = (RenewalLog::default(), Instant::now());
            let error = StoreError::NotApplied("connection refused".into());
            for tenths in 0..=100 {
                let now = start + Duration::from_millis(tenths * 100);
                log.unanswered(3, now);
                log.failed(3, &error, now);
            }
        });
        let text = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
        for message in ["does not answer in time", "check the store leases="] {
            let found: Vec<_> = text.lines().filter(|line| line.contains(message)).collect();
            assert_eq!(found.len(), 2, "{text}");
            assert!(found[0].contains("suppressed_lines=0"), "{text}");
            assert!(found[1].contains("suppressed_lines=99"), "{text}");
        }
    }
}
