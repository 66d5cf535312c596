//! [`Gate`]: runs work once per id, without a broker.

mod builder;
mod run;
mod stored;

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::internal::Lock;
pub use builder::GateBuilder;
use run::GuardedRun;
use serde::Serialize;
use serde::de::DeserializeOwned;
use stored::ResultSettings;
pub use stored::{MissingResult, ResultCodec, Stored, UnstorableResult};

use crate::breaker::{Breaker, BreakerState};
use crate::handler::Failure;
use crate::id::MessageId;
use crate::lifecycle::Policy;
use crate::log_throttle::LogThrottle;
use crate::marker::{Fingerprint, Guarantee};
use crate::outcome::Outcomes;
use crate::renewals::Renewals;
use crate::settings::Settings;
use crate::slots::Slots;
use crate::store::{Store, StoreError};

/// Runs any work once per id: a cron job, an HTTP call, a cache refresh, a one-time migration.
///
/// It makes its decisions with the same two functions as the consumer:
/// [`marker::apply`](crate::marker::apply) in the store, and `lifecycle::transition`. Clones share
/// the gate.
#[derive(Clone)]
pub struct Gate(Arc<GateInner>);

struct GateInner {
    store: Arc<dyn Store>,
    settings: Settings,
    policy: Policy,
    when_held: WhenHeld,
    results: ResultSettings,
    outcomes: Outcomes,
    /// Limits the lines about lost claims.
    lost_claims: Lock<LogThrottle>,
    /// Shared by all runs, so that all of them together send only a few requests a second to an
    /// unavailable store.
    breaker: Lock<Breaker>,
    renewals: Arc<Renewals>,
    /// One slot for each current run. The renewals identify its lease by the index of the slot.
    slots: Lock<Slots<()>>,
}

/// What [`Gate::run`] does while another process or task runs the same id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WhenHeld {
    /// Return [`RunOutcome::HeldElsewhere`] at once. For jobs that any one of many machines may
    /// run.
    #[default]
    Skip,
    /// Return [`GateError::HeldElsewhere`] at once: the caller has to retry. For requests that need
    /// the work done before they are answered.
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
    /// The work failed without an effect, and the id may run again; in at most once not after
    /// [`Failure::Reject`].
    #[error(transparent)]
    Failed(Failure),
    /// It is unknown whether the work happened: it reported that, panicked, timed out, lost its
    /// lease, or an earlier run was interrupted. With at most once it does not run again until an
    /// operator has checked whether it happened and resolved the id with `oncegate in-doubt
    /// resolve`.
    #[error("unknown whether it happened: {0}")]
    InDoubt(String),
    /// The id was used for another [body](GateRequest::body). The work did not run.
    #[error("not run: the id was used for another request; use a new id for each request")]
    OtherBody,
    /// The work succeeded, and its result cannot be stored: see [`UnstorableResult::Refuse`].
    #[error("the work ran, and its result cannot be stored: {0}")]
    UnstorableResult(String),
    /// The id was rejected before.
    #[error("not run: {0}")]
    Refused(&'static str),
    /// Another run of this id is in progress, or still was when the wait ended. It may still fail:
    /// try again later.
    #[error("another run of this id is in progress; try again later")]
    HeldElsewhere,
    /// The work ran, but the store did not record its outcome. The outcome counts as unknown when
    /// the lease ends.
    #[error(
        "the work ran, but the store did not record its outcome, which counts as unknown when the lease ends; check the store and its network"
    )]
    NotRecorded,
    /// The store is unavailable or misconfigured, or its marker of the id is unreadable; the work
    /// did not run.
    #[error("the work did not run: {0}")]
    Store(#[source] StoreError),
}

impl Gate {
    /// A builder with every setting at its default. A store is required.
    pub fn builder() -> GateBuilder<()> {
        GateBuilder {
            store: (),
            settings: Settings::default(),
            scope: None,
            when_held: WhenHeld::default(),
            results: ResultSettings::default(),
        }
    }

    /// Runs the work if it has not run for this id within the dedup window, and records that it
    /// did.
    ///
    /// The lease is renewed while the work runs, and the work is dropped if the lease is lost.
    /// After [`Failure::Retry`] the work runs again, up to `max_inline_retries` times.
    ///
    /// # Errors
    /// [`GateError`]: the work failed, did not run, or its outcome is unknown.
    pub async fn run<T, W: Future<Output = Result<T, Failure>>>(
        &self,
        id: impl AsRef<[u8]>,
        work: impl FnMut() -> W,
    ) -> Result<RunOutcome<T>, GateError> {
        self.request(id).run(work).await
    }

    /// As [`run`](Self::run), and stores the result of the work: a later call with this id returns
    /// it, also in another process. For callers who need the same answer if they ask twice.
    ///
    /// The result is stored as JSON, together with the record that the id is done: both or neither.
    /// Both expire at the end of the dedup window. It is never logged.
    ///
    /// # Errors
    /// [`GateError`]: the work failed, did not run, or its outcome is unknown; or its result cannot
    /// be stored.
    pub async fn run_stored<T, W>(
        &self,
        id: impl AsRef<[u8]>,
        work: impl FnMut() -> W,
    ) -> Result<Stored<T>, GateError>
    where
        T: Serialize + DeserializeOwned,
        W: Future<Output = Result<T, Failure>>,
    {
        self.request(id).run_stored(work).await
    }

    /// A run with this id and further conditions.
    pub fn request(&self, id: impl AsRef<[u8]>) -> GateRequest<'_> {
        GateRequest {
            gate: self,
            id: MessageId::new(id),
            fingerprint: None,
            max_inline_retries: self.0.policy.max_inline_retries,
            unstorable: self.0.results.unstorable,
        }
    }

    /// The guarantee of this gate.
    pub fn guarantee(&self) -> Guarantee {
        self.0.settings.guarantee
    }

    /// The largest result that [`run_stored`](Self::run_stored) stores, in bytes after the codec.
    pub fn max_result_bytes(&self) -> usize {
        self.0.results.limit
    }
}

/// One run through a [`Gate`], with conditions: [`Gate::request`].
#[derive(Debug)]
#[must_use = "a request does nothing until `run` or `run_stored` is awaited"]
pub struct GateRequest<'a> {
    gate: &'a Gate,
    id: Option<MessageId>,
    fingerprint: Option<Fingerprint>,
    max_inline_retries: u32,
    unstorable: UnstorableResult,
}

impl GateRequest<'_> {
    /// The content of the request, of which the store keeps a hash: if an earlier run of this id had
    /// another body, the work does not run, and the result is [`GateError::OtherBody`]. While that
    /// run is in progress, [`WhenHeld`] applies, and bodies are not compared.
    pub fn body(mut self, body: impl AsRef<[u8]>) -> Self {
        self.fingerprint = Some(Fingerprint::of(body.as_ref()));
        self
    }

    /// The maximum number of inline retries of this run after [`Failure::Retry`]. Default: that of
    /// the gate.
    pub fn max_inline_retries(mut self, retries: u32) -> Self {
        self.max_inline_retries = retries;
        self
    }

    /// What this run does with a result that cannot be stored. Default: as the gate.
    pub fn unstorable_result(mut self, policy: UnstorableResult) -> Self {
        self.unstorable = policy;
        self
    }

    /// As [`Gate::run`].
    ///
    /// # Errors
    /// As [`Gate::run`]; with a [`body`](Self::body) also [`GateError::OtherBody`].
    pub async fn run<T, W: Future<Output = Result<T, Failure>>>(
        self,
        work: impl FnMut() -> W,
    ) -> Result<RunOutcome<T>, GateError> {
        GuardedRun::new(&self)?.run(work).await
    }
}

impl GateInner {
    /// Whether an operation may be sent to the store. If the breaker is open, waits until it allows
    /// a request, at most twice and up to a second each; false if other runs send their requests
    /// first.
    async fn may_send(&self) -> bool {
        for _ in 0..2 {
            let now = Instant::now();
            let next_try_at = {
                let mut breaker = self.breaker.lock();
                match breaker.state(now) {
                    BreakerState::Closed => return true,
                    BreakerState::HalfOpen => {
                        breaker.request_sent(now);
                        return true;
                    }
                    BreakerState::Open => breaker.next_try_at().unwrap_or(now),
                }
            };
            tokio::time::sleep(next_try_at.saturating_duration_since(now)).await;
        }
        false
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("settings", &self.0.settings)
            .finish_non_exhaustive()
    }
}
