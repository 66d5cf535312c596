//! The prefetch of 1 after a message that the client cannot parse.
//!
//! # Workaround
//! - *Symptom:* a frame that lapin cannot parse closes the connection, and lapin does not report
//!   the delivery tag of its message. The other unacknowledged deliveries would be redelivered each
//!   time. *Version:* lapin 4.12.3.
//! - *Upstream:* `docs/upstream/lapin-unparsable-delivery.md`.
//! - *Test:* `recovery::an_unparsable_message_blocks_later_messages_and_not_earlier_ones` in `tests/amqp`.
//! - *May be removed* when lapin reports such a message as a delivery.

use std::time::Duration;

use tokio::time::Instant;

use crate::client::open_session::MAX_RECONNECT_PAUSE;
use oncegate_core::internal::Backoff;

/// The loss of a channel that was open for longer than this resets the backoff; the loss of one
/// that fails at once must not.
const STABLE_AFTER: Duration = Duration::from_secs(2);
/// The same for a channel in [`PrefetchMode::OneByOne`].
const STABLE_ONE_BY_ONE_AFTER: Duration = Duration::from_secs(10);
/// How long a channel in [`PrefetchMode::OneByOne`] is open, at least, before the prefetch is
/// restored.
const MIN_ONE_BY_ONE_TIME: Duration = Duration::from_secs(300);
/// The longest pause before reconnecting after a message that the client cannot parse.
const MAX_UNPARSABLE_PAUSE: Duration = Duration::from_secs(30);

/// The prefetch that the driver requests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefetchMode {
    Normal,
    OneByOne,
}

impl PrefetchMode {
    /// The prefetch, of which `configured` is the normal one.
    pub(crate) fn prefetch(self, configured: u16) -> u16 {
        match self {
            Self::Normal => configured,
            Self::OneByOne => 1,
        }
    }

    /// Whether a channel that was opened at `opened_at` may be replaced to restore the prefetch.
    /// The caller checks that no delivery is unacknowledged: the replacement would redeliver it.
    pub(crate) fn may_end(self, opened_at: Instant) -> bool {
        self == Self::OneByOne && opened_at.elapsed() > MIN_ONE_BY_ONE_TIME
    }

    /// The mode and the backoff after the loss of a channel that was opened at `opened_at`.
    pub(crate) fn after_loss(
        self,
        is_unparsable: bool,
        opened_at: Instant,
        mut backoff: Backoff,
    ) -> (Self, Backoff) {
        let stable_after = match self {
            Self::Normal if is_unparsable => {
                return (Self::OneByOne, Backoff::up_to(MAX_UNPARSABLE_PAUSE));
            }
            Self::Normal => STABLE_AFTER,
            Self::OneByOne => STABLE_ONE_BY_ONE_AFTER,
        };
        if opened_at.elapsed() > stable_after {
            match self {
                Self::Normal => backoff = Backoff::up_to(MAX_RECONNECT_PAUSE),
                Self::OneByOne => backoff.reset(),
            }
        }
        (self, backoff)
    }
}
