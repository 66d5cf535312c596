//! Renews leases on a separate thread, which no handler can block.

use std::cell::RefCell;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::{OptionFuture, join_all};
use tokio::runtime::Handle;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use crate::boot_time::BootTime;
use crate::context::SharedDelivery;
use crate::fault;
use crate::id::Scope;
use crate::internal::Lock;
use crate::log_throttle::LogThrottle;
use crate::marker::{Token, Verdict};
use crate::store::{Store, StoreError};

/// A handle to the renewal thread. Has the leases that the thread renews, by the slab index of
/// their delivery.
pub(crate) struct Renewals {
    held: Lock<Vec<Option<Arc<SharedDelivery>>>>,
    /// Dropped with the last handle, which ends the thread at once. Each thread has a runtime, and
    /// threads that end late use up the file descriptors of a process that starts many consumers.
    _alive: oneshot::Sender<()>,
}

/// A lease that has ended: the slab index of its delivery, and the token of its claim.
pub(crate) type LostLease = (usize, Token);

/// The pause after renewals without an answer; a sixth of the lease if that is shorter.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The maximum number of renewals in a batch.
const BATCH: usize = 256;

/// How long the runtime of the handlers may take to run a task before it is reported as blocked.
const BLOCKED_AFTER: Duration = Duration::from_secs(5);

impl Renewals {
    /// Starts the thread, which ends when the last handle is dropped. The thread sends each lease
    /// that has ended to `lost_leases`, and closes that channel if it fails. It logs when
    /// `watched`, the runtime of a consumer, is blocked; `None` for a gate, whose runtime need not
    /// run all the time.
    pub(crate) fn start(
        store: Arc<dyn Store>,
        scope: Scope,
        lease: Duration,
        lost_leases: UnboundedSender<LostLease>,
        watched: Option<Handle>,
    ) -> std::io::Result<Arc<Self>> {
        let (alive, dropped) = oneshot::channel();
        let renewals = Arc::new(Self {
            held: Lock::default(),
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
                    Err(error) => return tracing::error!(%error, "cannot start the tokio runtime that renews leases: a consumer stops, and a gate drops each run when its lease ends; raise the limit of file descriptors and restart"),
                };
                let store = store.for_renewals().unwrap_or(store);
                let renewer = Renewer {
                    store: &*store,
                    scope,
                    lease,
                };
                let blocked =
                    OptionFuture::from(watched.map(|runtime| report_if_blocked(runtime, BLOCKED_AFTER)));
                runtime.block_on(async {
                    tokio::select! {
                        () = renew_until_dropped(&weak, dropped, &renewer, &lost_leases) => {}
                        Some(()) = blocked => {}
                    }
                });
                // Closes the store's connection before the runtime that drives it.
                drop(store);
            })?;
        Ok(renewals)
    }

    /// Stops renewing the leases of the deliveries at the indexes `ended`, and starts renewing
    /// those of `granted`, which may reuse the same indexes.
    pub(crate) fn update(
        &self,
        ended: impl Iterator<Item = usize>,
        granted: impl Iterator<Item = (usize, Arc<SharedDelivery>)>,
    ) {
        let mut held = self.lock();
        for index in ended {
            if let Some(delivery) = held.get_mut(index) {
                *delivery = None;
            }
        }
        for (index, delivery) in granted {
            if held.len() <= index {
                held.resize(index + 1, None);
            }
            held[index] = Some(delivery);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Option<Arc<SharedDelivery>>>> {
        self.held.lock()
    }

    /// The leases with less than two thirds of their duration left, to renew them, and the leases
    /// that have ended, which this call removes.
    fn due(&self, now: BootTime) -> (Vec<Arc<SharedDelivery>>, Vec<LostLease>) {
        let (mut due, mut ended) = (Vec::new(), Vec::new());
        for (index, held) in self.lock().iter_mut().enumerate() {
            let Some(delivery) = held else { continue };
            let Some(lease) = &delivery.lease else {
                continue;
            };
            if !lease.is_live(now) {
                ended.push((index, lease.token));
                *held = None;
            } else if lease.may_be_renewed(now) && lease.remaining() < lease.duration * 2 / 3 {
                due.push(delivery.clone());
            }
        }
        (due, ended)
    }
}

/// Logs a warning when the runtime does not run a task within `blocked_after`, because handlers
/// block all of its threads. Then no message is received, settled or timed out, but leases are
/// still renewed.
async fn report_if_blocked(runtime: Handle, blocked_after: Duration) {
    let mut log = LogThrottle::every(Duration::from_secs(60));
    loop {
        let mut probe = runtime.spawn(async {});
        if tokio::time::timeout(blocked_after, &mut probe)
            .await
            .is_err()
        {
            if let Some(suppressed_lines) = log.due(Instant::now()) {
                tracing::warn!(
                    ?blocked_after,
                    suppressed_lines,
                    "tokio runtime blocked: handlers block all of its threads or the CPU is overloaded, so no message is received or settled and no timeout ends; run blocking code with tokio::task::spawn_blocking"
                );
            }
            let _ = probe.await; // fails only when the runtime shuts down
        }
        tokio::time::sleep(blocked_after).await;
    }
}

/// The store and the settings of renewals.
struct Renewer<'a> {
    store: &'a dyn Store,
    scope: Scope,
    /// The shortest lease.
    lease: Duration,
}

/// Renews leases until the last handle is dropped.
async fn renew_until_dropped(
    renewals: &Weak<Renewals>,
    dropped: oneshot::Receiver<()>,
    renewer: &Renewer<'_>,
    lost_leases: &UnboundedSender<LostLease>,
) {
    tokio::select! {
        _ = dropped => {}
        () = renew_at_each_tick(renewals, renewer, lost_leases) => {}
    }
}

/// Renews the leases that are due about 24 times within a lease (at intervals from 5 ms to 1 s), so
/// that a failed renewal can be repeated several times before the lease ends.
async fn renew_at_each_tick(
    renewals: &Weak<Renewals>,
    renewer: &Renewer<'_>,
    lost_leases: &UnboundedSender<LostLease>,
) {
    let lease = renewer.lease;
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
            let _ = lost_leases.send(ended); // fails only after the consumer was dropped
        }
        let renewed = join_all(due.chunks(BATCH).map(|batch| renew(renewer, batch, &log)));
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
            tokio::time::sleep((lease / 6).min(RETRY_PAUSE)).await;
        }
    }
}

/// The throttles of the log lines about failed renewals. While the store is unavailable, each
/// batch fails at each tick.
struct RenewalLog {
    unanswered: LogThrottle,
    failed: LogThrottle,
}

impl Default for RenewalLog {
    fn default() -> Self {
        let throttle = || LogThrottle::every(Duration::from_secs(10));
        Self {
            unanswered: throttle(),
            failed: throttle(),
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
    /// The store answered at least one renewal.
    Received,
    /// The store answered no renewal.
    Missing,
}

/// Renews the leases of a batch. A renewal without an answer is repeated at the next tick, until
/// its lease ends.
async fn renew(
    renewer: &Renewer<'_>,
    batch: &[Arc<SharedDelivery>],
    log: &RefCell<RenewalLog>,
) -> StoreReply {
    let (leases, operations): (Vec<_>, Vec<_>) = batch
        .iter()
        .filter_map(|delivery| Some((delivery.lease.as_ref()?, delivery.renewal(&renewer.scope)?)))
        .unzip();
    fault::before(&operations);
    let sent = BootTime::now();
    let applied = renewer.store.apply(&operations);
    let Ok(answers) = tokio::time::timeout(renewer.lease / 3, applied).await else {
        log.borrow_mut().unanswered(batch.len(), Instant::now());
        return StoreReply::Missing;
    };
    fault::after(&operations);
    let mut answered = StoreReply::Missing;
    let (mut failed, mut why) = (0, None);
    for (lease, answer) in leases.into_iter().zip(answers) {
        match answer {
            Ok(Verdict::Applied) => lease.extend(sent),
            Ok(_) => lease.mark_lost(),
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
            held: Lock::default(),
            _alive: alive,
        });
        let (weak, (over, _lost)) = (Arc::downgrade(&renewals), unbounded_channel());
        let began = tokio::time::Instant::now();
        drop(renewals);
        let renewer = Renewer {
            store: &Silent,
            scope: Scope::none(),
            lease: Duration::from_secs(30),
        };
        renew_until_dropped(&weak, dropped, &renewer, &over).await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_runtime_whose_threads_are_blocked_is_reported() {
        let build = || {
            tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .build()
                .expect("a runtime")
        };
        let (blocked, free) = (build(), build());
        let (unblock, wait) = std::sync::mpsc::channel::<()>();
        blocked.spawn(async move { wait.recv() });
        let limit = Duration::from_secs(1);
        static LOG: std::sync::Mutex<Vec<u8>> = std::sync::Mutex::new(Vec::new());
        let subscriber = tracing_subscriber::fmt()
            .with_writer(|| LOG.make_writer())
            .finish();
        let _logs = tracing::subscriber::set_default(subscriber);
        for (runtime, reports) in [(&free, 0), (&blocked, 1)] {
            let report = report_if_blocked(runtime.handle().clone(), limit);
            let _ = tokio::time::timeout(limit * 3, report).await;
            let text = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
            assert_eq!(
                text.matches("tokio runtime blocked").count(),
                reports,
                "{text}"
            );
        }
        drop(unblock);
        blocked.shutdown_background();
        free.shutdown_background();
    }

    #[test]
    fn failed_renewals_are_logged_once_in_ten_seconds() {
        static LOG: std::sync::Mutex<Vec<u8>> = std::sync::Mutex::new(Vec::new());
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
