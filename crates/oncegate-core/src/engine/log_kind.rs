//! The kinds of log lines, each with a limit of its own.

use std::time::Duration;

use crate::log_throttle::LogThrottle;

/// The maximum number of lines of most kinds in each [`PERIOD`], so that a burst of messages that
/// fail at once is logged message by message.
const MAX_LINES: u32 = 100;
/// The period of [`MAX_LINES`].
const PERIOD: Duration = Duration::from_secs(10);
/// The longest period of a throttle.
pub(super) const LONGEST_PERIOD: Duration = Duration::from_secs(600);
/// The maximum number of lines about unrecorded outcomes per second. They are logged only when a
/// consumer ends, for each delivery in flight.
const MAX_NOT_RECORDED: u32 = 1000;

/// A kind of log line. Each has a throttle, so that a frequent kind hides no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogKind {
    Unavailable,
    ClaimsPaused,
    LateCompletionsFull,
    QueueFull,
    UnknownAge,
    Rejected,
    InDoubt,
    Panicked,
    Failed,
    TimedOut,
    OutcomeUnknown,
    DatabaseUnavailable,
    Reconciled,
    TakenOver,
    PossibleCrashLoop,
    HeldElsewhere,
    LeaseLost,
    MarkerLost,
    Fenced,
    HandlerDropped,
    NotRecorded,
}

impl LogKind {
    /// All kinds, in the order of their declaration.
    pub(super) const ALL: [Self; 21] = [
        Self::Unavailable,
        Self::ClaimsPaused,
        Self::LateCompletionsFull,
        Self::QueueFull,
        Self::UnknownAge,
        Self::Rejected,
        Self::InDoubt,
        Self::Panicked,
        Self::Failed,
        Self::TimedOut,
        Self::OutcomeUnknown,
        Self::DatabaseUnavailable,
        Self::Reconciled,
        Self::TakenOver,
        Self::PossibleCrashLoop,
        Self::HeldElsewhere,
        Self::LeaseLost,
        Self::MarkerLost,
        Self::Fenced,
        Self::HandlerDropped,
        Self::NotRecorded,
    ];

    pub(super) fn throttle(self) -> LogThrottle {
        match self {
            Self::Failed => LogThrottle::every(Duration::from_secs(1)),
            Self::Unavailable
            | Self::ClaimsPaused
            | Self::LateCompletionsFull
            | Self::QueueFull
            | Self::DatabaseUnavailable => LogThrottle::every(PERIOD),
            Self::UnknownAge => LogThrottle::every(LONGEST_PERIOD),
            Self::NotRecorded => LogThrottle::up_to(MAX_NOT_RECORDED, Duration::from_secs(1)),
            _ => LogThrottle::up_to(MAX_LINES, PERIOD),
        }
    }

    /// How the lines of this kind begin.
    fn beginning(self) -> &'static str {
        match self {
            Self::Unavailable => "store unavailable",
            Self::ClaimsPaused => "claims paused",
            Self::LateCompletionsFull => "completion not recorded",
            Self::QueueFull => "queue limit reached",
            Self::UnknownAge => "message without a timestamp",
            Self::Rejected => "message rejected",
            Self::InDoubt => "message in doubt",
            Self::Panicked => "handler panicked",
            Self::Failed => "handler failed without an effect",
            Self::TimedOut => "handler timed out",
            Self::OutcomeUnknown => "handler failed, its",
            Self::DatabaseUnavailable => "transaction not begun",
            Self::Reconciled => "reconcile",
            Self::TakenOver => "message taken over",
            Self::PossibleCrashLoop => "possible crash loop",
            Self::HeldElsewhere => "message waits",
            Self::LeaseLost => "lease lost",
            Self::MarkerLost => "marker lost",
            Self::Fenced => "completion refused",
            Self::HandlerDropped => "handler dropped",
            Self::NotRecorded => "outcome not recorded",
        }
    }

    /// Logs how many lines of this kind were suppressed.
    #[cold]
    pub(super) fn log_suppressed(self, suppressed_lines: u64) {
        let lines = self.beginning();
        match self {
            Self::Rejected => tracing::warn!(
                suppressed_lines,
                "more messages rejected than logged: see them with `oncegate dead-letters list`"
            ),
            Self::InDoubt => tracing::warn!(
                suppressed_lines,
                "more messages in doubt than logged: see them with `oncegate in-doubt list`"
            ),
            Self::Reconciled | Self::TakenOver | Self::HeldElsewhere => {
                tracing::info!(suppressed_lines, lines, "more events than logged")
            }
            _ => tracing::warn!(
                suppressed_lines,
                lines,
                "more events than logged: see the last line that begins as `lines` says"
            ),
        }
    }
}
