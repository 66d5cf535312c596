//! The spans along the road.

use std::fmt::Debug;

use tracing::field::{Empty, debug};
use tracing::{Span, debug_span};

use crate::id::MessageId;
use crate::marker::Ask;

/// What is asked of the store, from the question to its answer: `oncegate.claim`, `.complete`, and one for each other.
pub(crate) fn asked(ask: &Ask, id: Option<&MessageId>, attempt: u32) -> Span {
    macro_rules! span {
        ($name:literal) => {
            debug_span!($name, id = id.map(display), attempt = (attempt > 0).then_some(attempt), outcome = Empty)
        };
    }
    match ask {
        Ask::Claim => span!("oncegate.claim"),
        Ask::Renew => span!("oncegate.renew"),
        Ask::Complete => span!("oncegate.complete"),
        Ask::Clear(_) => span!("oncegate.clear"),
        Ask::Reject(_) => span!("oncegate.reject"),
        Ask::Doubt => span!("oncegate.doubt"),
        Ask::Resolve(_) => span!("oncegate.resolve"),
        Ask::Forget { .. } => span!("oncegate.forget"),
    }
}

/// What was answered; the span ends here.
pub(crate) fn answered(span: Span, outcome: &dyn Debug, attempt: Option<u32>) {
    span.record("outcome", debug(outcome));
    if let Some(attempt) = attempt {
        span.record("attempt", attempt);
    }
}
