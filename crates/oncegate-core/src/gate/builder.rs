//! The builder of a gate.

use std::sync::Arc;
use std::time::Duration;

use crate::internal::Lock;
use tokio::sync::mpsc::unbounded_channel;

use super::{Gate, GateInner, ResultCodec, ResultSettings, UnstorableResult, WhenHeld};
use crate::breaker::Breaker;
use crate::error::Error;
use crate::id::Scope;
use crate::lifecycle::Policy;
use crate::log_throttle::LogThrottle;
use crate::marker::Guarantee;
use crate::outcome::Outcomes;
use crate::preflight::preflight;
use crate::renewals::Renewals;
use crate::settings::{Settings, VolatileStore};
use crate::slots::Slots;
use crate::store::Store;

/// The number of concurrent runs for which memory is allocated at once; more are allocated when
/// they start.
const INITIAL_SLOTS: usize = 16;

/// Builds a [`Gate`].
#[derive(Debug)]
#[must_use = "a builder does nothing until `open` is awaited"]
pub struct GateBuilder<T> {
    pub(super) store: T,
    pub(super) settings: Settings,
    pub(super) scope: Option<String>,
    pub(super) when_held: WhenHeld,
    pub(super) results: ResultSettings,
}

impl<T> GateBuilder<T> {
    /// The store, which keeps the marker of each id.
    pub fn store<T2: Store + 'static>(self, store: T2) -> GateBuilder<T2> {
        GateBuilder {
            store,
            settings: self.settings,
            scope: self.scope,
            when_held: self.when_held,
            results: self.results,
        }
    }

    /// The guarantee, which decides whether the work runs again when it is unknown whether it
    /// happened. Default: effectively once.
    pub fn guarantee(mut self, guarantee: Guarantee) -> Self {
        self.settings.guarantee = guarantee;
        self
    }

    /// The name of this gate in its keys in the store: without a scope, gates that share a store
    /// share ids. 1 to 100 bytes of `[A-Za-z0-9._:@/+=-]`.
    pub fn scope(mut self, scope: impl Into<String>) -> Self {
        self.scope = Some(scope.into());
        self
    }

    /// The dedup window: how long an id is remembered, at least 1 s. Default: 24 h.
    pub fn dedup_window(mut self, window: Duration) -> Self {
        self.settings.dedup_window = window;
        self
    }

    /// How long a claim is valid without renewal, at least 100 ms. Default: 30 s.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease;
        self
    }

    /// What to do if another run of the same id is in progress. Default: [`WhenHeld::Skip`].
    pub fn when_held(mut self, when_held: WhenHeld) -> Self {
        self.when_held = when_held;
        self
    }

    /// The maximum number of inline retries after [`Failure::Retry`](crate::Failure::Retry).
    /// Default: 3.
    pub fn max_inline_retries(mut self, retries: u32) -> Self {
        self.settings.max_inline_retries = retries;
        self
    }

    /// The first and the longest pause before a retry; the longest must not be shorter. Default:
    /// 100 ms and 10 s.
    pub fn backoff(mut self, first: Duration, longest: Duration) -> Self {
        (self.settings.backoff, self.settings.longest_backoff) = (first, longest);
        self
    }

    /// The timeout of the work. Default: 5 min.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.settings.handler_timeout = timeout;
        self
    }

    /// The largest result that [`Gate::run_stored`] stores, in bytes after the codec. Default:
    /// 64 KiB.
    pub fn max_result_bytes(mut self, bytes: usize) -> Self {
        self.results.limit = bytes;
        self
    }

    /// What [`Gate::run_stored`] does with a result that cannot be stored. Default:
    /// [`UnstorableResult::Refuse`].
    pub fn unstorable_result(mut self, policy: UnstorableResult) -> Self {
        self.results.unstorable = policy;
        self
    }

    /// Encodes the results of [`Gate::run_stored`], for example to compress or encrypt them.
    /// Default: JSON as it is.
    pub fn result_codec(mut self, codec: impl ResultCodec) -> Self {
        self.results.codec = Some(Arc::new(codec));
        self
    }

    /// Allows at most once on a store that may lose data in a crash. You accept that an id that is
    /// lost may run again.
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
            results,
        } = self;
        settings.check()?;
        if let Some(scope) = scope {
            settings.scope = Scope::named(&scope)?;
        }
        let store: Arc<dyn Store> = Arc::new(store);
        preflight(&*store, &settings).await?;
        // Nothing receives lost leases, because `run::bounded` checks the lease while it polls the
        // work.
        let (lost_leases, _) = unbounded_channel();
        let renewals = Renewals::start(
            store.clone(),
            settings.scope.clone(),
            settings.lease,
            lost_leases,
            None,
        )
        .map_err(Error::renewal_thread)?;
        let max_claim_retries = match when_held {
            WhenHeld::Skip | WhenHeld::GiveUp => 0,
            WhenHeld::Wait(_) => u32::MAX, // the duration limits the wait
        };
        let policy = Policy {
            max_claim_retries,
            max_attempts: u32::MAX,
            max_crashes: u32::MAX,
            ..settings.policy()
        };
        Ok(Gate(Arc::new(GateInner {
            store,
            settings,
            policy,
            when_held,
            results,
            outcomes: Outcomes::new(),
            lost_claims: Lock::new(LogThrottle::up_to(100, Duration::from_secs(10))),
            breaker: Lock::new(Breaker::closed()),
            renewals,
            slots: Lock::new(Slots::new(INITIAL_SLOTS)),
        })))
    }
}
