//! Log lines about claims that were lost before their completion was recorded.

use crate::marker::{OperationKind, Verdict};
use crate::message::Origin;

/// What the store found instead of the claim that a completion belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LostClaim {
    /// No claim: the id is recorded as done.
    MarkerLost,
    /// The claim of another delivery: the completion is refused.
    Fenced,
}

impl LostClaim {
    /// `None` unless the verdict means that a completion found its claim lost.
    #[inline]
    pub(crate) fn of(kind: &OperationKind, verdict: &Verdict) -> Option<Self> {
        match (kind, verdict) {
            (OperationKind::Complete, Verdict::Done { marker_lost: true }) => {
                Some(Self::MarkerLost)
            }
            (OperationKind::Complete, Verdict::Lost) => Some(Self::Fenced),
            _ => None,
        }
    }

    /// Logs that the effect of an id may have happened twice. The throttle belongs to the caller.
    #[cold]
    pub(crate) fn log(
        self,
        id: Option<&str>,
        attempt: u32,
        origin: Option<&Origin>,
        suppressed_lines: u64,
    ) {
        let origin = origin.map(tracing::field::display);
        match self {
            Self::MarkerLost => tracing::warn!(
                id,
                attempt,
                origin,
                suppressed_lines,
                "marker lost while the handler ran: its id is recorded as done now, but another attempt may have run meanwhile, so the effect may have happened twice; check the effect of this id, and why the claim was lost (data loss, an eviction, a deleted key, or a lease that ended)"
            ),
            Self::Fenced => tracing::warn!(
                id,
                attempt,
                origin,
                suppressed_lines,
                "completion refused, another delivery has claimed or rejected the id since: the handler succeeded, but may run again or has run elsewhere, so the effect may happen twice; check the effect of this id, also before you redrive its dead letter, and why the claim was lost (data loss, an eviction, a deleted key, or a lease that ended)"
            ),
        }
    }
}
