//! Items of the core that are public only for the other crates of this workspace.
//!
//! Their users are the adapters (backoff, log throttles, locks, marker columns, store errors, and
//! the points at which the chaos tests abort a process), `oncegate-admin`,
//! `oncegate-http` (locks, log throttles), the model and its mutants, `oncegate-testkit`, and the
//! tests of this workspace. They are not part of the public API: any
//! release may change or remove them. If a program needs one, please open an issue.

mod backoff;
mod lock;
mod marker_columns;
mod store_failure;

pub use crate::log_throttle::LogThrottle;
pub use crate::run_context::RunContext;
pub use backoff::{Backoff, doubled};
pub use lock::Lock;
pub use marker_columns::{MarkerColumns, UnreadableRow, milliseconds};
pub use store_failure::{ClaimsPaused, Problem, StoreFailure};

/// Executes the rules of the lifecycle for one delivery, without I/O. For the model.
pub mod driver {
    pub use crate::driver::{DriverCommand, LifecycleDriver};
}

/// Points at which the chaos tests abort a process. For the adapters and the chaos tests.
pub mod fault {
    pub use crate::fault::*;
}

/// One delivery in flight. For the tests which show that it cannot be settled twice.
pub mod in_flight {
    pub use crate::in_flight::InFlight;
}

/// The rules of the consumer for one delivery, and their data. For the model, its mutants and
/// `store_laws!`.
pub mod lifecycle {
    pub use crate::lifecycle::action::Action;
    pub use crate::lifecycle::event::{Event, Outcome};
    pub use crate::lifecycle::policy::{Isolation, Policy};
    pub use crate::lifecycle::stage::{
        AfterDoubt, AfterWithdrawal, ClaimReply, ClaimTries, Freshness, Grant, History, Stage,
        Tries,
    };

    /// The next stage and action of a delivery. Total: an event that does not apply to a stage
    /// changes nothing and returns [`Action::Wait`].
    #[inline(always)]
    pub fn transition(stage: Stage, event: Event, policy: &Policy) -> (Stage, Action) {
        crate::lifecycle::transition(stage, event, policy)
    }
}
