//! [`Gate`]: runs work once per id, without a broker.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::unbounded_channel;
use tracing::Instrument;

use crate::boot_time::BootTime;
use crate::breaker::{Breaker, BreakerDecision};
use crate::builder::preflight;
use crate::context::SharedDelivery;
use crate::driver::{DriverCommand, LifecycleDriver, OnRelease};
use crate::error::Error;
use crate::handler::Failure;
use crate::id::{MessageId, Scope};
use crate::lease::Lease;
use crate::lifecycle::{
    ClaimReply, DoubtCause, Event, Freshness, History, Outcome, Policy, Reason, Settlement, Stage,
};
use crate::marker::{Ask, Guarantee, Operation, Terms, Token, Verdict};
use crate::outcome::Outcomes;
use crate::renewals::Renewals;
use crate::run::{BoundedEnd, RunClock, bounded};
use crate::settings::{LONGEST, Settings, VolatileStore};
use crate::slots::{Slot, Slots};
use crate::spans;
use crate::store::{Store, StoreError};

/// Runs any work once per id: a cron job, an HTTP call, a cache refresh, a one-time migration.
///
/// It uses the same two functions as the consumer: [`marker::apply`](crate::marker::apply) in the
/// store, and [`lifecycle::transition`](crate::lifecycle::transition). Clones share the gate.
#[derive(Clone)]
pub struct Gate(Arc<GateInner>);

struct GateInner {
    store: Arc<dyn Store>,
    settings: Settings,
    policy: Policy,
    when_held: WhenHeld,
    outcomes: Outcomes,
    /// Shared by all callers, so that together they retry an unavailable store a few times a
    /// second.
    breaker: Mutex<Breaker>,
    renewals: Arc<Renewals>,
    slots: Mutex<Slots<()>>,
}

/// What to do if another process or task runs the same id at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhenHeld {
    /// Return [`RunOutcome::HeldElsewhere`] at once. For jobs that any one of many machines may
    /// run.
    #[default]
    Skip,
    /// Return [`GateError::HeldElsewhere`] at once: the caller has to retry. For requests whose
    /// sender waits.
    GiveUp,
    /// Wait up to this long for the other run to end, then return [`GateError::HeldElsewhere`]. If
    /// the other run succeeds, the result is [`RunOutcome::AlreadyDone`]; if it fails, the work
    /// runs here.
    Wait(Duration),
}

/// The result of [`Gate::run`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome<T> {
    /// The work ran now and returned this.
    Executed(T),
    /// The work ran before, within the dedup window.
    AlreadyDone,
    /// Another run of this id is in progress, and may still fail. Only with [`WhenHeld::Skip`].
    HeldElsewhere,
}

/// Why [`Gate::run`] has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GateError {
    /// The id is empty.
    #[error("the id is empty: pass an id that is unique to the work")]
    MissingId,
    /// The work failed without an effect. After [`Failure::Retry`] the id may run again; after
    /// [`Failure::Reject`] it is rejected.
    #[error(transparent)]
    Failed(Failure),
    /// It is unknown whether the work happened: it panicked, timed out, lost its lease, or was
    /// interrupted. With at most once it does not run again by itself: check whether it happened,
    /// then resolve the id.
    #[error("unknown whether it happened: {0}")]
    InDoubt(String),
    /// The id was rejected before, has used all attempts, or was used for other work.
    #[error("not run: {0}")]
    Refused(&'static str),
    /// Another run of this id is in progress, or still was when the wait ended. It may still fail:
    /// try again later.
    #[error("another run of this id is in progress; try again later")]
    HeldElsewhere,
    /// The work ran, but the store did not record its outcome, which counts as unknown when the
    /// lease ends.
    #[error(
        "the work ran, but the store did not record its outcome, which counts as unknown when the lease ends; check the store and its network"
    )]
    NotRecorded,
    /// The store is unavailable; the work did not run.
    #[error("not run, because the store is unavailable: {0}")]
    Store(#[source] StoreError),
}

/// Builds a [`Gate`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `open` is awaited"]
pub struct GateBuilder<T> {
    store: T,
    settings: Settings,
    scope: Option<String>,
    when_held: WhenHeld,
}

impl Gate {
    /// A builder with every setting at its default. A store is required.
    pub fn builder() -> GateBuilder<()> {
        GateBuilder {
            store: (),
            settings: Settings::default(),
            scope: None,
            when_held: WhenHeld::default(),
        }
    }

    /// Runs the work if it has not run for this id within the dedup window, and records that it
    /// did.
    ///
    /// The lease is renewed while the work runs, and the work is dropped if the lease is lost. It
    /// is retried inline after [`Failure::Retry`].
    ///
    /// # Errors
    /// [`GateError`]: the work failed, did not run, or its outcome is unknown.
    pub async fn run<T, W: Future<Output = Result<T, Failure>>>(
        &self,
        id: impl AsRef<[u8]>,
        work: impl FnMut() -> W,
    ) -> Result<RunOutcome<T>, GateError> {
        let id = MessageId::new(id).ok_or(GateError::MissingId)?;
        let slot = self
            .0
            .slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(());
        let history = History {
            failures: 0,
            freshness: Freshness::Fresh,
        };
        let driver = LifecycleDriver::new(history, OnRelease::ReturnToSource);
        GuardedRun {
            gate: self,
            id,
            slot,
            driver,
            grant: None,
            result: None,
            failure: None,
            store_error: None,
        }
        .run(work)
        .await
    }
}

impl GateInner {
    /// Whether an operation may be sent to the store now. Waits up to a second while the breaker is
    /// open.
    async fn may_ask(&self) -> bool {
        for _ in 0..2 {
            let now = Instant::now();
            let next_try_at = {
                let mut breaker = self.breaker();
                match breaker.decide(now) {
                    BreakerDecision::Ask => return true,
                    BreakerDecision::TryOnce => {
                        breaker.trying(now);
                        return true;
                    }
                    BreakerDecision::Wait => breaker.next_try_at().unwrap_or(now),
                }
            };
            tokio::time::sleep(next_try_at.saturating_duration_since(now)).await;
        }
        false
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many operations in a row the store may leave unanswered before a run is abandoned.
const MAX_UNANSWERED: u32 = 5;

/// The longest pause between two claims of a run that waits for another holder.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// One call of [`Gate::run`].
struct GuardedRun<'a, T> {
    gate: &'a Gate,
    id: MessageId,
    slot: Slot,
    driver: LifecycleDriver,
    /// The grant, with its lease.
    grant: Option<Arc<SharedDelivery>>,
    result: Option<T>,
    failure: Option<Failure>,
    store_error: Option<StoreError>,
}

impl<T> GuardedRun<'_, T> {
    async fn run<W: Future<Output = Result<T, Failure>>>(
        mut self,
        mut work: impl FnMut() -> W,
    ) -> Result<RunOutcome<T>, GateError> {
        let policy = self.gate.0.policy;
        let give_up_at = match self.gate.0.when_held {
            WhenHeld::Wait(at_most) => Instant::now() + at_most.min(LONGEST),
            WhenHeld::Skip | WhenHeld::GiveUp => Instant::now(),
        };
        let mut event = Event::Arrived;
        let mut unanswered = 0;
        loop {
            let before = self.driver.stage();
            self.gate.0.outcomes.happened(event);
            event = match self.driver.handle(event, &policy, |_| Token::random()) {
                DriverCommand::Apply => match self.driver.stage().pending_ask() {
                    Some(ask) => self.ask(ask).await,
                    None => return Err(self.no_result()), // does not occur
                },
                DriverCommand::AwaitRun if self.lease_is_over() => Event::LeaseOver,
                DriverCommand::AwaitRun => Event::Slot,
                // The part of the work before its first await may panic, too.
                DriverCommand::Run => self.work(async { work().await }).await,
                DriverCommand::Reconcile => Event::CannotReconcile,
                DriverCommand::Wake(after)
                    if matches!(
                        self.driver.stage(),
                        Stage::AwaitingHolder(_, _, ClaimReply::Answered)
                    ) =>
                {
                    let left = give_up_at.saturating_duration_since(Instant::now());
                    tokio::time::sleep(after.min(left).min(MAX_POLL_INTERVAL)).await;
                    if left.is_zero() {
                        Event::Drain
                    } else {
                        Event::Woke
                    }
                }
                DriverCommand::Wake(after) => {
                    tokio::time::sleep(after).await;
                    if self.driver.stage().waits_on_lease() && self.lease_is_over() {
                        Event::LeaseOver
                    } else {
                        Event::Woke
                    }
                }
                DriverCommand::Settle(settlement) => return self.settled(before, settlement),
                // `Abandon` follows `StopNow`. The others do not occur: a gate has no ordering keys, and no
                // limit of crashes.
                DriverCommand::Hold { .. }
                | DriverCommand::AwaitTurn
                | DriverCommand::Nothing
                | DriverCommand::Abandon => {
                    return Err(self.no_result());
                }
            };
            unanswered = if event == Event::Unavailable {
                unanswered + 1
            } else if event == Event::Woke {
                unanswered
            } else {
                0
            };
            if unanswered > MAX_UNANSWERED {
                event = Event::StopNow;
            }
        }
    }

    async fn ask(&mut self, ask: Ask) -> Event {
        if !self.gate.0.may_ask().await {
            let unavailable =
                || StoreError::NotApplied("its last operation was not answered".into());
            self.store_error.get_or_insert_with(unavailable);
            return Event::Unavailable;
        }
        let GateInner {
            store,
            settings,
            renewals,
            ..
        } = &*self.gate.0;
        let Settings {
            guarantee,
            lease,
            dedup_window,
            ..
        } = *settings;
        let terms = Terms {
            guarantee,
            lease,
            window: dedup_window,
            fingerprint: None,
        };
        let (token, attempt) = (self.driver.token, self.driver.attempts.number);
        let operation = Operation {
            key: settings.scope.key(&self.id),
            ask,
            token,
            attempt,
            terms,
        };
        let sent = BootTime::now();
        let span = spans::operation(&ask, Some(&self.id), attempt, None);
        let answer = store
            .apply(std::slice::from_ref(&operation))
            .instrument(span.clone())
            .await
            .pop();
        match answer {
            Some(Ok(verdict)) => {
                self.gate.0.breaker().answered(Instant::now());
                spans::end_operation(span, &verdict, None);
                if let Verdict::Granted(attempts) | Verdict::InDoubt(attempts) = verdict
                    && guarantee != Guarantee::Bare
                {
                    let renew_until = sent + settings.longest_hold();
                    let grant = Arc::new(SharedDelivery {
                        id: Some(self.id.clone()),
                        message: None,
                        terms,
                        failures: 0,
                        attempt: attempts.number,
                        lease: Some(Lease::new(token, lease, sent, renew_until)),
                    });
                    let index = self.slot.index;
                    renewals.update(std::iter::empty(), std::iter::once((index, grant.clone())));
                    self.grant = Some(grant);
                }
                Event::Answer(verdict)
            }
            // The store answered, and a retry does not help.
            Some(Err(error @ (StoreError::UnreadableMarker(_) | StoreError::Misconfigured(_)))) => {
                self.gate.0.breaker().answered(Instant::now());
                self.store_error = Some(error);
                Event::StopNow
            }
            unanswered => {
                self.gate.0.breaker().not_answered(Instant::now());
                let no_verdict = || StoreError::Unknown("the store returned no verdict".into());
                self.store_error =
                    Some(unanswered.and_then(Result::err).unwrap_or_else(no_verdict));
                Event::Unavailable
            }
        }
    }

    fn lease_is_over(&self) -> bool {
        self.grant
            .as_ref()
            .and_then(|grant| grant.lease.as_ref())
            .is_some_and(|lease| !lease.is_live(BootTime::now()))
    }

    async fn work(&mut self, work: impl Future<Output = Result<T, Failure>>) -> Event {
        let grant = self.grant.clone();
        let span = tracing::debug_span!("oncegate.handle", id = %self.id, attempt = self.driver.attempts.number, outcome = tracing::field::Empty);
        let work = std::pin::pin!(Some(work));
        let now = BootTime::now();
        let ended = bounded(
            work,
            Some(&span),
            RunClock { began: now, now },
            self.gate.0.settings.handler_timeout,
            grant.as_ref().and_then(|grant| grant.lease.as_ref()),
        )
        .await;
        let outcome = match ended {
            BoundedEnd::Completed(Ok(value)) => {
                self.result = Some(value);
                Outcome::Done
            }
            BoundedEnd::Completed(Err(failure)) => {
                let outcome = match &failure {
                    Failure::Retry(_) => Outcome::Retry,
                    Failure::Reject(_) => Outcome::Reject,
                    Failure::InDoubt(_) => Outcome::Unknown(DoubtCause::HandlerReported),
                };
                self.failure = Some(failure);
                outcome
            }
            BoundedEnd::Panicked(failure) => self.unknown(failure, DoubtCause::Panicked),
            BoundedEnd::TimedOut => self.unknown("the work timed out".into(), DoubtCause::TimedOut),
            BoundedEnd::LeaseOver => {
                self.failure = Some(Failure::InDoubt("the lease was lost".into()));
                return Event::LeaseOver;
            }
        };
        span.record("outcome", tracing::field::debug(&outcome));
        Event::Returned(outcome)
    }

    fn unknown(&mut self, failure: String, cause: DoubtCause) -> Outcome {
        self.failure = Some(Failure::InDoubt(failure.into()));
        Outcome::Unknown(cause)
    }

    fn settled(mut self, from: Stage, settlement: Settlement) -> Result<RunOutcome<T>, GateError> {
        self.gate.0.outcomes.settled(&settlement);
        let (id, guarantee) = (self.id.clone(), self.gate.0.settings.guarantee);
        let doubt = |failure: Option<Failure>| {
            let why = failure.map_or_else(
                || "an earlier run was interrupted".into(),
                |failure| failure.to_string(),
            );
            // With another guarantee the id runs again by itself, and there is nothing to resolve.
            GateError::InDoubt(if guarantee == Guarantee::AtMostOnce {
                format!(
                    "{why}; id {id}: check whether it happened, then run `oncegate in-doubt resolve {id} --happened` or \
                     `oncegate in-doubt resolve {id} --did-not-happen`"
                )
            } else {
                format!("{why}; id {id}")
            })
        };
        match settlement {
            Settlement::Accept(_) => Ok(self
                .result
                .take()
                .map_or(RunOutcome::AlreadyDone, RunOutcome::Executed)),
            Settlement::Release { .. }
                if matches!(from, Stage::Claiming(..) | Stage::AwaitingHolder(..)) =>
            {
                match self.gate.0.when_held {
                    WhenHeld::Skip => Ok(RunOutcome::HeldElsewhere),
                    WhenHeld::GiveUp | WhenHeld::Wait(_) => Err(GateError::HeldElsewhere),
                }
            }
            Settlement::Release { .. } => match self.failure.take() {
                Some(failure @ (Failure::Retry(_) | Failure::Reject(_))) => {
                    Err(GateError::Failed(failure))
                }
                failure => Err(doubt(failure)),
            },
            Settlement::Reject(Reason::InDoubt(_)) => Err(doubt(self.failure.take())),
            Settlement::Reject(reason) => match self.failure.take() {
                Some(failure) => Err(GateError::Failed(failure)),
                None => Err(GateError::Refused(reason.as_str())),
            },
        }
    }

    fn no_result(mut self) -> GateError {
        match (&self.result, self.store_error.take()) {
            (None, Some(error)) if self.failure.is_none() => GateError::Store(error),
            _ => GateError::NotRecorded,
        }
    }
}

impl<T> Drop for GuardedRun<'_, T> {
    /// Stops the renewal: if the future was dropped, the work was interrupted and its lease ends.
    fn drop(&mut self) {
        let ended = std::iter::once(self.slot.index);
        self.gate.0.renewals.update(ended, std::iter::empty());
        self.gate
            .0
            .slots
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(self.slot);
    }
}

impl<T> GateBuilder<T> {
    /// The store that remembers ids.
    pub fn store<T2: Store + 'static>(self, store: T2) -> GateBuilder<T2> {
        GateBuilder {
            store,
            settings: self.settings,
            scope: self.scope,
            when_held: self.when_held,
        }
    }

    /// The guarantee: what follows when it is unknown whether the work happened. Default:
    /// effectively once.
    pub fn guarantee(mut self, guarantee: Guarantee) -> Self {
        self.settings.guarantee = guarantee;
        self
    }

    /// Separates this gate from others on the same store. 1 to 100 bytes of `[A-Za-z0-9._:@/+=-]`.
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// The dedup window: how long an id is remembered, at least 1 s. Default: 24 h.
    pub fn dedup_window(mut self, window: Duration) -> Self {
        self.settings.dedup_window = window;
        self
    }

    /// How long a claim holds without renewal, at least 100 ms. Default: 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// What to do if another run of the same id is in progress. Default: [`WhenHeld::Skip`].
    pub fn when_held(mut self, when_held: WhenHeld) -> Self {
        self.when_held = when_held;
        self
    }

    /// The maximum number of inline retries after [`Failure::Retry`]. Default: 3.
    pub fn max_inline_retries(mut self, retries: u32) -> Self {
        self.settings.max_inline_retries = retries;
        self
    }

    /// The first and the longest pause before a retry. Default: 100 ms and 10 s.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        (self.settings.backoff, self.settings.longest_backoff) = (first, longest.max(first));
        self
    }

    /// The timeout of the work. Default: 5 min.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.handler_timeout = timeout;
        self
    }

    /// Allows at most once on a store that may lose data in a crash.
    pub fn allow_volatile_store(mut self) -> Self {
        self.settings.volatile_store = VolatileStore::Allowed;
        self
    }
}

impl<T> GateBuilder<T> {
    /// Checks the settings and the store. Waits for a store that is unavailable, and logs a
    /// warning.
    ///
    /// # Errors
    /// A wrong setting, or a store that cannot keep the guarantee.
    pub async fn open(self) -> Result<Gate, Error>
    where
        T: Store + 'static,
    {
        let Self {
            store,
            mut settings,
            scope,
            when_held,
        } = self;
        settings.check()?;
        if let Some(scope) = scope {
            settings.scope = Scope::named(&scope)?;
        }
        let store: Arc<dyn Store> = Arc::new(store);
        preflight(&*store, &settings).await?;
        // `bounded` watches the lease itself, so the channel is unused.
        let (lost_leases, _) = unbounded_channel();
        let renewals = Renewals::start(
            store.clone(),
            settings.scope.clone(),
            settings.lease,
            lost_leases,
            None,
        )
        .map_err(Error::renewal_thread)?;
        let claim_retries = match when_held {
            WhenHeld::Skip | WhenHeld::GiveUp => 0,
            WhenHeld::Wait(_) => u32::MAX, // the time ends the wait, not a number of claims
        };
        let policy = Policy {
            claim_retries,
            attempts: u32::MAX,
            crashes: u32::MAX,
            ..settings.policy()
        };
        Ok(Gate(Arc::new(GateInner {
            store,
            settings,
            policy,
            when_held,
            outcomes: Outcomes::new(),
            breaker: Mutex::new(Breaker::closed()),
            renewals,
            slots: Mutex::new(Slots::new(16)),
        })))
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("settings", &self.0.settings)
            .finish_non_exhaustive()
    }
}
