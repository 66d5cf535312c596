//! The gate on its own, without a broker.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::unbounded_channel;
use tracing::Instrument;

use crate::breaker::{Breaker, Judgement};
use crate::builder::preflight;
use crate::driver::{DriverCommand, LifecycleDriver, OnRelease};
use crate::error::Error;
use crate::handler::Failure;
use crate::id::{MessageId, Scope};
use crate::lease::Lease;
use crate::lifecycle::{
    ClaimReply, DoubtCause, Event, Freshness, History, Outcome, Policy, Reason, Settlement, Stage,
};
use crate::marker::{Ask, Guarantee, Operation, Terms, Token, Verdict};
use crate::moment::Moment;
use crate::outcome::Outcomes;
use crate::renewals::Renewals;
use crate::run::{Ended, bounded, caught};
use crate::settings::{LONGEST, Settings, VolatileStore};
use crate::slots::{Slot, Slots};
use crate::spans;
use crate::store::{Store, StoreError};

/// Guards any piece of work with an id: a cron job, an HTTP call, a cache refresh, a one-time
/// migration.
///
/// It drives the same two functions as the consumer: [`marker::apply`](crate::marker::apply) in the
/// store, [`lifecycle::transition`](crate::lifecycle::next) here. Cloning shares it.
#[derive(Clone)]
pub struct Gate(Arc<Inner>);

struct Inner {
    store: Arc<dyn Store>,
    settings: Settings,
    policy: Policy,
    when_held: WhenHeld,
    outcomes: Outcomes,
    /// What callers know of the store together: however many they are, a silent one is asked a few
    /// times a second.
    breaker: Mutex<Breaker>,
    renewals: Arc<Renewals>,
    places: Mutex<Slots<()>>,
}

/// What to do about work that someone else runs at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenHeld {
    /// Answer [`RunOutcome::HeldElsewhere`] at once: the other does it. For jobs that any one of many machines
    /// may run.
    #[default]
    Skip,
    /// Answer [`GateError::HeldElsewhere`] at once: the caller has to try again. For requests whose
    /// sender waits.
    GiveUp,
    /// Wait for the other to end, for so long at the most, and then answer
    /// [`GateError::HeldElsewhere`]. If it succeeds, the answer is [`RunOutcome::AlreadyDone`]; if it fails,
    /// the work runs here.
    Wait(Duration),
}

/// What became of guarded work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOutcome<T> {
    /// It ran now; this is what it gave.
    Executed(T),
    /// It ran before, within the window.
    AlreadyDone,
    /// Someone else runs it at this moment, and may yet fail. Only with [`WhenHeld::Skip`].
    HeldElsewhere,
}

/// Why guarded work has no result.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The id is empty.
    #[error("the id is empty: give each piece of work an id of its own")]
    MissingId,
    /// The work failed and did nothing, or never will do anything; the id is free, or rejected.
    #[error(transparent)]
    Failed(Failure),
    /// The work panicked, had no end, lost its lease, or was interrupted before: nobody knows
    /// whether it happened. At most once: find out, then resolve the id; it does not run again by
    /// itself.
    #[error("nobody knows whether it happened: {0}")]
    InDoubt(String),
    /// The id was rejected before, has failed too often, or stands for other work.
    #[error("not run: {0}")]
    Refused(&'static str),
    /// Someone else runs it at this moment, or still did when the wait was over; it may yet fail.
    /// Try again later.
    #[error("someone else runs it at this moment; try again later")]
    HeldElsewhere,
    /// The work ran, but the store could not be told: it counts as unknown until its lease is over.
    #[error("it ran, and the store could not be told")]
    NotRecorded,
    /// The store could not be asked; the work did not run.
    #[error("not run, because the store does not answer: {0}")]
    Store(#[source] StoreError),
}

/// A gate that is being put together.
#[derive(Debug)]
#[must_use = "a builder does nothing until `open` is awaited"]
pub struct GateBuilder<T> {
    store: T,
    settings: Settings,
    scope: Option<String>,
    when_held: WhenHeld,
}

impl Gate {
    /// A gate with every setting at its default, to be given a store.
    pub fn builder() -> GateBuilder<()> {
        GateBuilder {
            store: (),
            settings: Settings::default(),
            scope: None,
            when_held: WhenHeld::default(),
        }
    }

    /// Runs the work if it has not run for this id within the window, and remembers that it did.
    ///
    /// The work is renewed while it runs, and dropped when its lease is lost. It may be started
    /// again in place after [`Failure::Retry`].
    ///
    /// # Errors
    /// [`GateError`] says what is known: it failed, it was not run, or nobody knows.
    pub async fn run<T, W: Future<Output = Result<T, Failure>>>(
        &self,
        id: impl AsRef<[u8]>,
        work: impl FnMut() -> W,
    ) -> Result<RunOutcome<T>, GateError> {
        let id = MessageId::new(id).ok_or(GateError::MissingId)?;
        let place = self
            .0
            .places
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(());
        let history = History {
            failures: 0,
            freshness: Freshness::Fresh,
        };
        let dispatch = LifecycleDriver::new(history, OnRelease::ReturnToSource);
        Guarded {
            gate: self,
            id,
            place,
            dispatch,
            lease: None,
            result: None,
            said: None,
            silence: None,
        }
        .run(work)
        .await
    }
}

impl Inner {
    /// Whether the store may be asked now. Waits once for it to be anyone's turn, a second at the
    /// most.
    async fn may_ask(&self) -> bool {
        for _ in 0..2 {
            let now = Instant::now();
            let opens_at = {
                let mut breaker = self.breaker();
                match breaker.judge(now) {
                    Judgement::Ask => return true,
                    Judgement::TryOnce => {
                        breaker.trying(now);
                        return true;
                    }
                    Judgement::Wait => breaker.opens_at().unwrap_or(now),
                }
            };
            tokio::time::sleep(opens_at.saturating_duration_since(now)).await;
        }
        false
    }

    fn breaker(&self) -> MutexGuard<'_, Breaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How often a silent store is asked before guarded work is given up.
const PATIENCE: u32 = 5;

/// How long one who waits for another holder pauses at the most before it asks again.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// One piece of guarded work on the road.
struct Guarded<'a, T> {
    gate: &'a Gate,
    id: MessageId,
    place: Slot,
    dispatch: LifecycleDriver,
    lease: Option<Arc<Lease>>,
    result: Option<T>,
    said: Option<Failure>,
    silence: Option<StoreError>,
}

impl<T> Guarded<'_, T> {
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
        let mut silent = 0;
        loop {
            let before = self.dispatch.stage();
            self.gate.0.outcomes.happened(event);
            event = match self.dispatch.handle(event, &policy, |_| Token::random()) {
                DriverCommand::Apply(ask) => self.ask(ask).await,
                DriverCommand::AwaitRun if self.lease_is_over() => Event::LeaseOver,
                DriverCommand::AwaitRun => Event::Slot,
                // The part of the work before its first await may panic, too.
                DriverCommand::Run => self.work(async { work().await }).await,
                DriverCommand::Reconcile => Event::Found(None), // nobody here can find out
                DriverCommand::Wake(after)
                    if matches!(
                        self.dispatch.stage(),
                        Stage::AwaitingHolder(_, _, ClaimReply::Answered)
                    ) =>
                {
                    let left = give_up_at.saturating_duration_since(Instant::now());
                    tokio::time::sleep(after.min(left).min(LONGEST_WAIT)).await;
                    if left.is_zero() {
                        Event::Drain
                    } else {
                        Event::Woke
                    }
                }
                DriverCommand::Wake(after) => {
                    tokio::time::sleep(after).await;
                    if self.dispatch.stage().waits_on_lease() && self.lease_is_over() {
                        Event::LeaseOver
                    } else {
                        Event::Woke
                    }
                }
                DriverCommand::Settle(settlement) => return self.settled(before, settlement),
                // It keeps no order and yields to no one, so that nothing is held.
                DriverCommand::Hold { .. }
                | DriverCommand::AwaitTurn
                | DriverCommand::Nothing
                | DriverCommand::Abandon => {
                    return Err(self.gave_up());
                }
            };
            silent = if event == Event::Unavailable {
                silent + 1
            } else if event == Event::Woke {
                silent
            } else {
                0
            };
            if silent > PATIENCE {
                event = Event::StopNow;
            }
        }
    }

    async fn ask(&mut self, ask: Ask) -> Event {
        if !self.gate.0.may_ask().await {
            let silent = || StoreError::NotApplied("it did not answer others just now".into());
            self.silence.get_or_insert_with(silent);
            return Event::Unavailable;
        }
        let Inner {
            store,
            settings,
            renewals,
            ..
        } = &*self.gate.0;
        let Settings {
            guarantee,
            lease,
            window,
            ..
        } = *settings;
        let terms = Terms {
            guarantee,
            lease,
            window,
            fingerprint: None,
        };
        let (token, attempt) = (self.dispatch.token, self.dispatch.attempts.number);
        let operation = Operation {
            key: settings.scope.key(&self.id),
            ask,
            token,
            attempt,
            terms,
        };
        let sent = Moment::now();
        let span = spans::asked(&ask, Some(&self.id), attempt, None);
        let answer = store
            .apply(std::slice::from_ref(&operation))
            .instrument(span.clone())
            .await
            .pop();
        match answer {
            Some(Ok(verdict)) => {
                self.gate.0.breaker().answered(Instant::now());
                spans::answered(span, &verdict, None);
                if let Verdict::Granted(attempts) | Verdict::InDoubt(attempts) = verdict
                    && guarantee != Guarantee::Bare
                {
                    let held = Arc::new(Lease::new(
                        &operation,
                        attempts.number,
                        sent,
                        sent + settings.longest_hold(),
                    ));
                    renewals.hold(std::iter::once((self.place.place, held.clone())));
                    self.lease = Some(held);
                }
                Event::Answer(verdict)
            }
            // No time changes these: whoever called is told at once.
            Some(Err(error @ (StoreError::UnreadableMarker(_) | StoreError::Misconfigured(_)))) => {
                self.gate.0.breaker().answered(Instant::now());
                self.silence = Some(error);
                Event::StopNow
            }
            silence => {
                self.gate.0.breaker().silent(Instant::now());
                let nothing = || StoreError::Unknown("the store answered nothing".into());
                self.silence = Some(silence.and_then(Result::err).unwrap_or_else(nothing));
                Event::Unavailable
            }
        }
    }

    fn lease_is_over(&self) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| !lease.lives(Moment::now()))
    }

    async fn work(&mut self, work: impl Future<Output = Result<T, Failure>>) -> Event {
        let lease = self.lease.clone();
        let span = tracing::debug_span!("oncegate.handle", id = %self.id, attempt = self.dispatch.attempts.number, outcome = tracing::field::Empty);
        let work = std::pin::pin!(caught(work));
        let ended = bounded(
            work,
            &span,
            Instant::now(),
            self.gate.0.settings.handler_timeout,
            lease.as_deref(),
        )
        .await;
        let outcome = match ended {
            Ended::Over(Ok(value)) => {
                self.result = Some(value);
                Outcome::Done
            }
            Ended::Over(Err(failure)) => {
                let outcome = match &failure {
                    Failure::Retry(_) => Outcome::Retry,
                    Failure::Reject(_) => Outcome::Reject,
                    Failure::InDoubt(_) => Outcome::Unknown(DoubtCause::Said),
                };
                self.said = Some(failure);
                outcome
            }
            Ended::Panicked(said) => self.unknown(said, DoubtCause::Panicked),
            Ended::TimedOut => self.unknown("it had no end".into(), DoubtCause::TimedOut),
            Ended::LeaseOver => {
                self.said = Some(Failure::InDoubt("the lease was lost".into()));
                return Event::LeaseOver;
            }
        };
        span.record("outcome", tracing::field::debug(&outcome));
        Event::Returned(outcome)
    }

    fn unknown(&mut self, said: String, cause: DoubtCause) -> Outcome {
        self.said = Some(Failure::InDoubt(said.into()));
        Outcome::Unknown(cause)
    }

    fn settled(mut self, from: Stage, settlement: Settlement) -> Result<RunOutcome<T>, GateError> {
        self.gate.0.outcomes.settled(&settlement);
        let doubt = |said: Option<Failure>| {
            GateError::InDoubt(said.map_or_else(
                || "an earlier run did not end".into(),
                |failure| failure.to_string(),
            ))
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
            Settlement::Release { .. } => match self.said.take() {
                Some(failure @ (Failure::Retry(_) | Failure::Reject(_))) => {
                    Err(GateError::Failed(failure))
                }
                said => Err(doubt(said)),
            },
            Settlement::Reject(Reason::InDoubt(_)) => Err(doubt(self.said.take())),
            Settlement::Reject(reason) => match self.said.take() {
                Some(failure) => Err(GateError::Failed(failure)),
                None => Err(GateError::Refused(reason.as_str())),
            },
        }
    }

    fn gave_up(mut self) -> GateError {
        match (&self.result, self.silence.take()) {
            (None, Some(error)) if self.said.is_none() => GateError::Store(error),
            _ => GateError::NotRecorded,
        }
    }
}

impl<T> Drop for Guarded<'_, T> {
    /// Whoever drops the future interrupts the work: its lease is left to end, and the renewals let
    /// it go.
    fn drop(&mut self) {
        self.gate
            .0
            .renewals
            .let_go(std::iter::once(self.place.place));
        self.gate
            .0
            .places
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(self.place);
    }
}

impl<T> GateBuilder<T> {
    /// What remembers ids.
    pub fn store<T2: Store + 'static>(self, store: T2) -> GateBuilder<T2> {
        GateBuilder {
            store,
            settings: self.settings,
            scope: self.scope,
            when_held: self.when_held,
        }
    }

    /// What is promised when nobody knows whether the work happened. Default: effectively once.
    pub fn guarantee(mut self, guarantee: Guarantee) -> Self {
        self.settings.guarantee = guarantee;
        self
    }

    /// Separates this gate from others on the same store. 1 to 100 bytes of the alphabet of ids.
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// How long an id is remembered, at least 1 s. Default: 24 h.
    pub fn dedup_window(mut self, window: Duration) -> Self {
        self.settings.window = window;
        self
    }

    /// How long a claim holds without renewal, at least 100 ms. Default: 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// What to do about work that someone else runs at this moment. Default: [`WhenHeld::Skip`].
    pub fn when_held(mut self, when_held: WhenHeld) -> Self {
        self.when_held = when_held;
        self
    }

    /// How often the work is run again in place after [`Failure::Retry`]. Default: 3.
    pub fn max_inline_retries(mut self, retries: u32) -> Self {
        self.settings.retries = retries;
        self
    }

    /// The first and the longest pause before a retry. Default: 100 ms and 10 s.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        (self.settings.backoff, self.settings.longest_backoff) = (first, longest.max(first));
        self
    }

    /// How long the work may take. Default: 5 min.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.handler_timeout = timeout;
        self
    }

    /// Lets at most once run on a store that may forget what it said.
    pub fn allow_volatile_store(mut self) -> Self {
        self.settings.volatile_store = VolatileStore::Allowed;
        self
    }
}

impl<T> GateBuilder<T> {
    /// Checks the settings and the store; waits for a store that is not there yet, with a warning
    /// in the log.
    ///
    /// # Errors
    /// What a person has to change.
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
        // The guard asks the lease itself, and wakes when it ends: nobody has to be told.
        let (over, _) = unbounded_channel();
        let renewals =
            Renewals::start(store.clone(), settings.lease, over).map_err(Error::threads)?;
        let parks = match when_held {
            WhenHeld::Skip | WhenHeld::GiveUp => 0,
            WhenHeld::Wait(_) => u32::MAX, // it is the clock that ends the wait
        };
        // No one can reconcile here.
        let policy = Policy {
            parks,
            reconciles: 1,
            attempts: u32::MAX,
            crashes: u32::MAX,
            ..settings.policy()
        };
        Ok(Gate(Arc::new(Inner {
            store,
            settings,
            policy,
            when_held,
            outcomes: Outcomes::new(),
            breaker: Mutex::new(Breaker::closed()),
            renewals,
            places: Mutex::new(Slots::new(16)),
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
