//! The reason why an operation has no verdict, which can be cloned for many operations.

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use crate::store::StoreError;

/// A [`StoreError`] that is `Clone`, because one failed request fails all of its operations.
#[derive(Clone, Debug)]
pub enum StoreFailure {
    /// The store did not apply the operation; it may be repeated.
    NotApplied(Problem),
    /// The store may have applied the operation; it may be repeated with the same token.
    Unknown(Problem),
    /// The value under the key is not a marker; other keys are not affected.
    UnreadableMarker(Problem),
    /// The operation fails until an operator changes what the text names.
    Misconfigured(Problem),
}

/// An error text of one line, and the error that caused it. Must not contain secrets.
#[derive(Clone, Debug)]
pub struct Problem {
    text: Arc<str>,
    source: Option<Arc<dyn Error + Send + Sync>>,
}

/// The source of a [`Problem`] of claims that the store does not grant now, because markers may be
/// lost, or may have expired early after a jump of the clock. The text of the problem says when claims continue, and what to do.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("claims are paused")]
pub struct ClaimsPaused;

impl ClaimsPaused {
    /// Whether this is the cause of an error of a store.
    pub(crate) fn is_cause_of(error: &StoreError) -> bool {
        let problem = error.source();
        let cause = problem.and_then(Error::source);
        cause.is_some_and(|cause| cause.is::<Self>())
    }
}

impl StoreFailure {
    /// A claim that is not sent, because markers may be lost or may have expired early.
    pub fn claims_paused(text: impl AsRef<str>) -> Self {
        Self::NotApplied(Problem::of(text, ClaimsPaused))
    }

    /// A failure that applied nothing.
    pub fn not_applied(text: impl AsRef<str>) -> Self {
        Self::NotApplied(Problem::new(text))
    }

    /// A failure that may have applied the operation.
    pub fn unknown(text: impl AsRef<str>) -> Self {
        Self::Unknown(Problem::new(text))
    }

    /// A failure because the value under a key is not a marker.
    pub fn unreadable_marker(text: impl AsRef<str>) -> Self {
        Self::UnreadableMarker(Problem::new(text))
    }

    /// A failure that lasts until an operator changes the configuration.
    pub fn misconfigured(text: impl AsRef<str>) -> Self {
        Self::Misconfigured(Problem::new(text))
    }

    /// The same failure for an operation that may have been applied.
    #[must_use]
    pub fn possibly_applied(self) -> Self {
        match self {
            Self::NotApplied(problem) => Self::Unknown(problem),
            failure => failure,
        }
    }

    /// Of this failure and one that occurred before it, returns the one to report after requests to
    /// several servers failed: an earlier transient one, otherwise this one; of two
    /// `Misconfigured`, the earlier one.
    #[must_use]
    pub fn prefer_retryable(self, before: Option<Self>) -> Self {
        match (before, self) {
            (Some(before @ Self::Misconfigured(_)), Self::Misconfigured(_)) => before,
            (Some(before @ (Self::NotApplied(_) | Self::Unknown(_))), _) => before,
            (_, failure) => failure,
        }
    }
}

impl From<StoreFailure> for StoreError {
    fn from(failure: StoreFailure) -> Self {
        match failure {
            StoreFailure::NotApplied(problem) => Self::NotApplied(problem.into()),
            StoreFailure::Unknown(problem) => Self::Unknown(problem.into()),
            StoreFailure::UnreadableMarker(problem) => Self::UnreadableMarker(problem.into()),
            StoreFailure::Misconfigured(problem) => Self::Misconfigured(problem.into()),
        }
    }
}

impl Problem {
    /// A problem without a source.
    pub fn new(text: impl AsRef<str>) -> Self {
        Self {
            text: text.as_ref().into(),
            source: None,
        }
    }

    /// A problem with its source.
    pub fn of(text: impl AsRef<str>, source: impl Error + Send + Sync + 'static) -> Self {
        Self {
            text: text.as_ref().into(),
            source: Some(Arc::new(source)),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for Problem {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}
