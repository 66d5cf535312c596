//! One run of work through a gate.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Instrument;

use super::{
    Gate, GateError, GateInner, GateRequest, ResultSettings, RunOutcome, UnstorableResult, WhenHeld,
};
use crate::boot_time::BootTime;
use crate::context::SharedDelivery;
use crate::driver::{DriverCommand, LifecycleDriver};
use crate::handler::Failure;
use crate::id::MessageId;
use crate::lease::Lease;
use crate::lifecycle::{
    ClaimReply, DoubtCause, Event, Freshness, History, Outcome, Policy, Reason, Settlement, Stage,
};
use crate::lost_claim::LostClaim;
use crate::marker::{Fingerprint, Guarantee, Operation, OperationKind, Terms, Token, Verdict};
use crate::result_store::ResultStore;
use crate::run::{BoundedEnd, RunClock, bounded};
use crate::settings::{MAX_DURATION, Settings};
use crate::slots::Slot;
use crate::spans;
use crate::store::StoreError;

/// The maximum number of consecutive operations that the store does not answer, or that the breaker
/// does not let through, before a run is abandoned.
const MAX_UNANSWERED: u32 = 5;

/// The longest pause before a run that waits for another holder repeats its claim.
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// One call of [`Gate::run`].
pub(super) struct GuardedRun<'a, T> {
    gate: &'a Gate,
    id: MessageId,
    slot: Slot,
    driver: LifecycleDriver,
    /// The record of the granted claim, with its lease.
    grant: Option<Arc<SharedDelivery>>,
    result: Option<T>,
    /// Set for a run whose result is stored.
    storing: Option<StoredRun<T>>,
    fingerprint: Option<Fingerprint>,
    policy: Policy,
    unstorable_policy: UnstorableResult,
    failure: Option<Failure>,
    store_error: Option<StoreError>,
}

/// The part of a run that stores its result.
struct StoredRun<T> {
    encode: fn(&ResultSettings, &T) -> Result<Vec<u8>, String>,
    /// The result to store.
    encoded: Option<Vec<u8>>,
    /// The result of another run, which was recorded first.
    earlier: Option<Vec<u8>>,
    /// Why the result cannot be stored.
    unstorable: Option<String>,
}

impl<'a, T> GuardedRun<'a, T> {
    /// # Errors
    /// [`GateError::MissingId`].
    pub(super) fn new(request: &GateRequest<'a>) -> Result<Self, GateError> {
        let gate = request.gate;
        let id = request.id.clone().ok_or(GateError::MissingId)?;
        let slot = gate.0.slots.lock().insert(());
        let history = History {
            failures: 0,
            freshness: Freshness::Fresh,
        };
        Ok(Self {
            gate,
            id,
            slot,
            driver: LifecycleDriver::new(history),
            grant: None,
            result: None,
            storing: None,
            fingerprint: request.fingerprint,
            policy: Policy {
                max_inline_retries: request.max_inline_retries,
                ..gate.0.policy
            },
            unstorable_policy: request.unstorable,
            failure: None,
            store_error: None,
        })
    }

    /// Stores the result with the completion. The store must keep results.
    pub(super) fn storing(
        mut self,
        encode: fn(&ResultSettings, &T) -> Result<Vec<u8>, String>,
    ) -> Self {
        self.storing = Some(StoredRun {
            encode,
            encoded: None,
            earlier: None,
            unstorable: None,
        });
        self
    }

    /// The result of another run, which was recorded before that of this run.
    pub(super) fn take_earlier_result(&mut self) -> Option<Vec<u8>> {
        self.storing.as_mut()?.earlier.take()
    }

    pub(super) async fn run<W: Future<Output = Result<T, Failure>>>(
        &mut self,
        mut work: impl FnMut() -> W,
    ) -> Result<RunOutcome<T>, GateError> {
        let policy = self.policy;
        let give_up_at = match self.gate.0.when_held {
            WhenHeld::Wait(at_most) => Instant::now() + at_most.min(MAX_DURATION),
            WhenHeld::Skip | WhenHeld::GiveUp => Instant::now(),
        };
        let mut event = Event::Arrived;
        let mut unanswered = 0;
        loop {
            let stage_before = self.driver.stage();
            self.gate.0.outcomes.count_event(event);
            event = match self.driver.handle(event, &policy, |_| Token::random()) {
                DriverCommand::Apply => match self.driver.stage().pending_operation() {
                    Some(kind) => self.apply(kind).await,
                    None => return Err(self.no_result()), // does not occur
                },
                DriverCommand::AwaitRun if self.lease_is_over() => Event::LeaseOver,
                DriverCommand::AwaitRun => Event::MayRun,
                // The `async` block makes the run catch a panic of `work` itself, too.
                DriverCommand::Run => self.run_work(async { work().await }).await,
                DriverCommand::Reconcile => Event::CannotReconcile,
                DriverCommand::Wake(after)
                    if matches!(
                        self.driver.stage(),
                        Stage::AwaitingClaim(_, _, ClaimReply::Answered)
                    ) =>
                {
                    let remaining = give_up_at.saturating_duration_since(Instant::now());
                    tokio::time::sleep(after.min(remaining).min(MAX_POLL_INTERVAL)).await;
                    if remaining.is_zero() {
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
                DriverCommand::Settle(settlement) => {
                    return self.result_of(stage_before, settlement);
                }
                // The caller decides whether and when to try again.
                DriverCommand::Retry { after, failures } => {
                    let settlement = Settlement::Release { after, failures };
                    return self.result_of(stage_before, settlement);
                }
                // `Abandon` follows `StopNow`. A gate does not run ids in isolation. `Nothing` occurs
                // if the store returns a verdict that does not fit the operation.
                DriverCommand::AwaitIsolation | DriverCommand::Nothing | DriverCommand::Abandon => {
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

    /// Applies an operation to the store and returns its event. If it is a granted claim, starts to
    /// renew the lease.
    async fn apply(&mut self, kind: OperationKind) -> Event {
        if !self.gate.0.may_send().await {
            let unavailable =
                || StoreError::NotApplied("the store did not answer the last operation".into());
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
            fingerprint: self.fingerprint,
        };
        let (token, attempt) = (self.driver.token, self.driver.attempts.number);
        let operation = Operation {
            key: settings.scope.key(&self.id),
            kind,
            token,
            attempt,
            terms,
        };
        let sent = BootTime::now();
        let span = spans::operation(&kind, Some(&self.id), attempt, None);
        let encoded = self.storing.as_mut().and_then(|run| {
            let is_completion = kind == OperationKind::Complete;
            is_completion.then_some((run.encoded.as_deref()?, &mut run.earlier))
        });
        let answer = match (encoded, store.results()) {
            (Some((result, earlier)), Some(results)) => {
                let completion = results
                    .complete(&operation, result)
                    .instrument(span.clone())
                    .await;
                Some(completion.map(|completion| {
                    // The same bytes are those of this run, whose first reply was lost.
                    *earlier = completion.earlier.filter(|earlier| earlier != result);
                    completion.verdict
                }))
            }
            _ => store
                .apply(std::slice::from_ref(&operation))
                .instrument(span.clone())
                .await
                .pop(),
        };
        match answer {
            Some(Ok(verdict)) => {
                self.gate.0.breaker.lock().answered(Instant::now());
                spans::end_operation(span, &verdict, None);
                if let Some(lost) = LostClaim::of(&kind, &verdict)
                    && let Some(suppressed_lines) =
                        self.gate.0.lost_claims.lock().due(Instant::now())
                {
                    lost.log(Some(self.id.as_str()), attempt, None, suppressed_lines);
                }
                // The result of this run was not recorded: that of another run is.
                if verdict == Verdict::Duplicate && self.storing.is_some() {
                    self.result = None;
                }
                if let Verdict::Granted(attempts) | Verdict::InDoubt(attempts) = verdict
                    && guarantee != Guarantee::Bare
                {
                    let renew_until = sent + settings.max_renewal_time();
                    let grant = Arc::new(SharedDelivery {
                        id: Some(self.id.clone()),
                        message: None,
                        terms,
                        failures: 0,
                        attempt: attempts.number,
                        lease: Some(Lease::new(token, lease, sent, renew_until)),
                    });
                    let granted = std::iter::once((self.slot.index, grant.clone()));
                    renewals.update(std::iter::empty(), granted);
                    self.grant = Some(grant);
                }
                Event::Answer(verdict)
            }
            // The store answered, and a retry does not help.
            Some(Err(error @ (StoreError::UnreadableMarker(_) | StoreError::Misconfigured(_)))) => {
                self.gate.0.breaker.lock().answered(Instant::now());
                self.store_error = Some(error);
                Event::StopNow
            }
            unanswered => {
                self.gate.0.breaker.lock().not_answered(Instant::now());
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

    async fn run_work(&mut self, work: impl Future<Output = Result<T, Failure>>) -> Event {
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
            BoundedEnd::Completed(Ok(value)) => self.completed(value),
            BoundedEnd::Completed(Err(failure)) => {
                let outcome = match &failure {
                    Failure::Retry(_) => Outcome::Retry,
                    Failure::Reject(_) => Outcome::Reject,
                    Failure::InDoubt(_) => Outcome::Unknown(DoubtCause::HandlerReported),
                };
                self.failure = Some(failure);
                outcome
            }
            BoundedEnd::Panicked(failure) => self.unknown_outcome(failure, DoubtCause::Panicked),
            BoundedEnd::TimedOut => {
                self.unknown_outcome("the work timed out".into(), DoubtCause::TimedOut)
            }
            BoundedEnd::LeaseOver => {
                self.failure = Some(Failure::InDoubt("the lease was lost".into()));
                return Event::LeaseOver;
            }
        };
        span.record("outcome", tracing::field::debug(&outcome));
        Event::Returned(outcome)
    }

    fn completed(&mut self, value: T) -> Outcome {
        let settings = &self.gate.0.results;
        if let Some(run) = &mut self.storing {
            (run.encoded, run.unstorable) = (None, None);
            match (run.encode)(settings, &value) {
                Ok(encoded) => run.encoded = Some(encoded),
                Err(_) if self.unstorable_policy == UnstorableResult::CompleteWithout => {}
                Err(why) => {
                    run.unstorable = Some(why);
                    return Outcome::Unknown(DoubtCause::HandlerReported);
                }
            }
        }
        self.result = Some(value);
        Outcome::Done
    }

    /// Reads the result of a done id. `None` if none is stored.
    pub(super) async fn read_result(
        &self,
        results: &dyn ResultStore,
    ) -> Result<Option<Vec<u8>>, GateError> {
        let gate = &self.gate.0;
        let key = gate.settings.scope.key(&self.id);
        let mut failure = StoreError::NotApplied("the store did not return the result".into());
        for _ in 0..MAX_UNANSWERED {
            if !gate.may_send().await {
                continue;
            }
            match results.read(&key, self.fingerprint).await {
                Err(error @ (StoreError::NotApplied(_) | StoreError::Unknown(_))) => {
                    gate.breaker.lock().not_answered(Instant::now());
                    failure = error;
                }
                answered => {
                    gate.breaker.lock().answered(Instant::now());
                    return answered.map_err(GateError::Store);
                }
            }
        }
        Err(GateError::Store(failure))
    }

    fn unknown_outcome(&mut self, failure: String, cause: DoubtCause) -> Outcome {
        self.failure = Some(Failure::InDoubt(failure.into()));
        Outcome::Unknown(cause)
    }

    /// The result of a run that ended with this settlement, in the stage after `stage_before`.
    fn result_of(
        &mut self,
        stage_before: Stage,
        settlement: Settlement,
    ) -> Result<RunOutcome<T>, GateError> {
        self.gate.0.outcomes.settled(&settlement);
        if let Some(why) = self.storing.as_mut().and_then(|run| run.unstorable.take()) {
            return Err(GateError::UnstorableResult(why));
        }
        let (id, guarantee) = (self.id.clone(), self.gate.0.settings.guarantee);
        let doubt = |failure: Option<Failure>| {
            let why = failure.map_or_else(
                || "an earlier run was interrupted".into(),
                |failure| failure.to_string(),
            );
            // With another guarantee the next call runs the work again: there is nothing to
            // resolve.
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
                if matches!(stage_before, Stage::Claiming(..) | Stage::AwaitingClaim(..)) =>
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
            Settlement::Reject(Reason::Conflict) => Err(GateError::OtherBody),
            Settlement::Reject(Reason::InDoubt(_)) => Err(doubt(self.failure.take())),
            Settlement::Reject(reason) => match self.failure.take() {
                Some(failure) => Err(GateError::Failed(failure)),
                None => Err(GateError::Refused(reason.as_str())),
            },
        }
    }

    /// The error of an abandoned run.
    fn no_result(&mut self) -> GateError {
        let unstorable = self.storing.as_mut().and_then(|run| run.unstorable.take());
        if let Some(why) = unstorable {
            return GateError::UnstorableResult(why);
        }
        match (&self.result, self.store_error.take()) {
            (None, Some(error)) if self.failure.is_none() => GateError::Store(error),
            _ => GateError::NotRecorded,
        }
    }
}

impl<T> Drop for GuardedRun<'_, T> {
    /// Stops renewing the lease. If the caller dropped the future while the work ran, the lease
    /// then ends without a recorded outcome.
    fn drop(&mut self) {
        let ended = std::iter::once(self.slot.index);
        self.gate.0.renewals.update(ended, std::iter::empty());
        self.gate.0.slots.lock().remove(self.slot);
    }
}
