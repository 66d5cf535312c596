//! Log lines about messages and the store, limited in rate.

use std::time::{Duration, Instant};

use super::entry::InFlightEntry;
use crate::clock::now;
use crate::id::MessageId;
use crate::lifecycle::{DoubtCause, Event, Outcome, Reason, Settlement, Stage};
use crate::log_throttle::LogThrottle;
use crate::marker::{Attempts, Effect, Finding, Guarantee};
use crate::message::{Message, Origin};
use crate::run::RunResult;
use crate::source::Settled;
use crate::store::StoreError;

/// The throttles of the log lines: one for each kind, so that a frequent kind hides no other.
pub(super) struct Logs {
    unavailable: LogThrottle,
    late_completions_full: LogThrottle,
    queue_full: LogThrottle,
    unknown_age: LogThrottle,
    rejected: LogThrottle,
    in_doubt: LogThrottle,
    panicked: LogThrottle,
    failed: LogThrottle,
    timed_out: LogThrottle,
    outcome_unknown: LogThrottle,
    database_unavailable: LogThrottle,
    reconciled: LogThrottle,
    taken_over: LogThrottle,
    possible_crash_loop: LogThrottle,
    held_elsewhere: LogThrottle,
    lease_lost: LogThrottle,
    handler_dropped: LogThrottle,
    not_recorded: LogThrottle,
}

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

impl Logs {
    pub(super) fn new() -> Self {
        let [
            unavailable,
            late_completions_full,
            queue_full,
            unknown_age,
            failed,
            database_unavailable,
        ] = [10, 10, 10, 600, 1, 10]
            .map(|seconds| LogThrottle::every(Duration::from_secs(seconds)));
        let [
            rejected,
            in_doubt,
            panicked,
            timed_out,
            outcome_unknown,
            reconciled,
            taken_over,
            possible_crash_loop,
            held_elsewhere,
            lease_lost,
            handler_dropped,
        ] = std::array::from_fn(|_| LogThrottle::up_to(MAX_LINES, PERIOD));
        Self {
            unavailable,
            late_completions_full,
            queue_full,
            unknown_age,
            rejected,
            in_doubt,
            panicked,
            failed,
            timed_out,
            outcome_unknown,
            database_unavailable,
            reconciled,
            taken_over,
            possible_crash_loop,
            held_elsewhere,
            lease_lost,
            handler_dropped,
            not_recorded: LogThrottle::up_to(MAX_NOT_RECORDED, Duration::from_secs(1)),
        }
    }

    /// Logs that a message was rejected, to dead letters or to the in-doubt queue.
    pub(super) fn rejected(&mut self, settled: &Settled, destination: Option<String>) {
        let Settlement::Reject(reason) = settled.settlement else {
            return;
        };
        let throttle = if reason.is_in_doubt() {
            &mut self.in_doubt
        } else {
            &mut self.rejected
        };
        let Some(suppressed_lines) = throttle.due(now()) else {
            return;
        };
        let failure_history = settled.failure_history.as_deref();
        let first = failure_history.and_then(|history| history.first_error.as_deref());
        let last = failure_history.and_then(|history| history.last_error.as_deref());
        let (error, last_error) = (
            first.or(last).or(Some(reason.description())),
            last.filter(|_| last != first && first.is_some()),
        );
        let (id, attempts, crashes) = (
            failure_history.and_then(|history| history.id.as_deref()),
            failure_history.map(|history| history.attempts),
            failure_history.map(|history| history.crashes),
        );
        let is_unreadable_marker = reason == Reason::InDoubt(DoubtCause::UnreadableMarker);
        let is_interrupted = reason == Reason::InDoubt(DoubtCause::Interrupted);
        let (reason, origin) = (reason.as_str(), &settled.delivery.message.origin);
        macro_rules! warn {
            ($text:literal) => {
                tracing::warn!(reason, id, attempts, crashes, error, last_error, %origin, destination, suppressed_lines, $text)
            };
        }
        if is_unreadable_marker {
            warn!(
                "message in doubt, sending it to the in-doubt queue: its marker is unreadable; check whether the message took effect; upgrade oncegate here if a newer release wrote the marker, otherwise delete the key that `oncegate explain` shows; then run `oncegate in-doubt resolve`"
            );
        } else if is_interrupted {
            // A marker contains no error text, so the error that the other process had is unknown
            // here.
            warn!(
                "message in doubt, sending it to the in-doubt queue: another process, or an earlier delivery, ended before its outcome was found out; the log of that process may have the error of the handler; check whether the message took effect, then run `oncegate in-doubt resolve`"
            );
        } else if reason.starts_with("in-doubt") {
            warn!(
                "message in doubt, sending it to the in-doubt queue: check whether it took effect, then run `oncegate in-doubt resolve`"
            );
        } else {
            warn!("message rejected, sending it to the dead letters");
        }
    }

    /// All throttles, each with its lines.
    fn throttles(&mut self) -> [(&mut LogThrottle, SuppressedKind); 18] {
        use SuppressedKind::{InDoubt, Info, Rejected, Warn};
        // Without `..`, so that a new throttle is not left out.
        let Self {
            unavailable,
            late_completions_full,
            queue_full,
            unknown_age,
            rejected,
            in_doubt,
            panicked,
            failed,
            timed_out,
            outcome_unknown,
            database_unavailable,
            reconciled,
            taken_over,
            possible_crash_loop,
            held_elsewhere,
            lease_lost,
            handler_dropped,
            not_recorded,
        } = self;
        [
            (rejected, Rejected),
            (in_doubt, InDoubt),
            (unavailable, Warn("store unavailable")),
            (late_completions_full, Warn("completion not recorded")),
            (queue_full, Warn("queue limit reached")),
            (unknown_age, Warn("message without a timestamp")),
            (panicked, Warn("handler panicked")),
            (failed, Warn("handler failed without an effect")),
            (timed_out, Warn("handler timed out")),
            (
                outcome_unknown,
                Warn("handler failed, its outcome is unknown"),
            ),
            (database_unavailable, Warn("transaction not begun")),
            (reconciled, Info("reconcile ended or panicked")),
            (taken_over, Info("message taken over")),
            (possible_crash_loop, Warn("possible crash loop")),
            (held_elsewhere, Info("message waits")),
            (lease_lost, Warn("lease lost")),
            (handler_dropped, Warn("handler dropped")),
            (not_recorded, Warn("outcome not recorded")),
        ]
    }

    /// When [`log_suppressed`](Self::log_suppressed) has something to log.
    pub(super) fn report_at(&mut self) -> Option<Instant> {
        let throttles = self.throttles();
        throttles.iter().filter_map(|(it, _)| it.report_at()).min()
    }

    /// Logs how many lines of each kind were suppressed, if no other line of that kind followed.
    pub(super) fn log_suppressed(&mut self, now: Instant) {
        for (throttle, lines) in self.throttles() {
            let suppressed_lines = throttle.take_suppressed(now);
            if suppressed_lines > 0 {
                lines.log_suppressed(suppressed_lines);
            }
        }
    }

    /// Logs that a handler failed, or the result of `reconcile`.
    #[cold]
    pub(super) fn run_failed(&mut self, entry: &InFlightEntry, finished: &RunResult) {
        let throttle = match finished.event {
            Event::Returned(Outcome::Unknown(DoubtCause::Panicked)) => &mut self.panicked,
            Event::Returned(Outcome::Unknown(DoubtCause::TimedOut)) => &mut self.timed_out,
            Event::Returned(Outcome::Unknown(_)) => &mut self.outcome_unknown,
            Event::Returned(Outcome::Retry) => &mut self.failed,
            Event::Returned(Outcome::Unavailable) => &mut self.database_unavailable,
            Event::Reconciled(_) => &mut self.reconciled,
            _ => return,
        };
        let Some(suppressed_lines) = throttle.due(now()) else {
            return;
        };
        let (id, attempt) = (entry.id().map(MessageId::as_str), entry.attempt());
        let (origin, error) = (&entry.in_flight.message().origin, finished.error.as_deref());
        macro_rules! warn {
            ($text:literal) => {
                tracing::warn!(id, attempt, error, %origin, suppressed_lines, $text)
            };
        }
        match finished.event {
            Event::Returned(Outcome::Retry) => {
                warn!(
                    "handler failed without an effect, the message is retried up to max_attempts"
                );
            }
            Event::Returned(Outcome::Unknown(DoubtCause::Panicked)) => {
                tracing::error!(id, attempt, error, %origin, suppressed_lines, "handler panicked, its outcome is unknown");
            }
            Event::Returned(Outcome::Unknown(DoubtCause::TimedOut)) => {
                warn!("handler timed out, its outcome is unknown");
            }
            Event::Returned(Outcome::Unavailable) => {
                warn!(
                    "transaction not begun, or its commit not confirmed: the message is handled again unless its record is found; check the database and its network"
                );
            }
            Event::Returned(_) => {
                warn!("handler failed, its outcome is unknown");
            }
            Event::Reconciled(finding) => {
                let found = match finding {
                    Some(Finding::Happened) => "happened",
                    Some(Finding::DidNotHappen) => "did not happen",
                    None => "unknown",
                };
                if error.is_some_and(|error| error.starts_with("panicked: ")) {
                    tracing::error!(id, attempt, found, error, %origin, suppressed_lines, "reconcile panicked");
                } else {
                    tracing::info!(id, attempt, found, error, %origin, suppressed_lines, "reconcile ended");
                }
            }
            _ => {}
        }
    }

    /// Logs, in at most once, that `max_age` is not checked because a message has no timestamp.
    pub(super) fn unknown_age(&mut self, message: &Message) {
        if let Some(suppressed_lines) = self.unknown_age.due(now()) {
            tracing::warn!(
                origin = %message.origin,
                suppressed_lines,
                "message without a timestamp: max_age is not checked, so a copy older than the dedup window would run again; \
                 set a timestamp in the producer (RabbitMQ: the property `timestamp`, in seconds)"
            );
        }
    }

    /// Logs that the consumer receives nothing, because too many deliveries are queued.
    pub(super) fn queue_full(&mut self, queued: usize, bytes: usize) {
        if let Some(suppressed_lines) = self.queue_full.due(now()) {
            tracing::warn!(
                queued,
                bytes,
                suppressed_lines,
                "queue limit reached, receiving is paused: too many deliveries wait for a retry, or behind others of their key or partition; see which messages fail, or raise `max_queued` or `max_queued_bytes`"
            );
        }
    }

    /// Logs that the store did not answer an operation.
    pub(super) fn unavailable(&mut self, error: &StoreError, in_flight: usize) {
        if let Some(suppressed_lines) = self.unavailable.due(now()) {
            tracing::warn!(%error, in_flight, suppressed_lines, "store unavailable, requests are retried until it answers; check the store and its network");
        }
    }

    /// Logs that the completion of a message that was handled without the store will not be
    /// recorded.
    pub(super) fn late_completions_full(&mut self) {
        if let Some(suppressed_lines) = self.late_completions_full.due(now()) {
            tracing::warn!(
                suppressed_lines,
                "completion not recorded: too many messages were handled without the store; a redelivery of this one runs again"
            );
        }
    }

    /// Logs that the claim of a message took over a lease that ended without a recorded outcome.
    pub(super) fn taken_over(&mut self, entry: &InFlightEntry, attempts: Attempts) {
        if let Some(suppressed_lines) = self.taken_over.due(now()) {
            let (id, origin) = id_and_origin(entry);
            let Attempts {
                number: attempt,
                crashes,
                ..
            } = attempts;
            tracing::info!(
                id,
                attempt,
                crashes,
                %origin,
                suppressed_lines,
                "message taken over: the process that handled it crashed or lost its lease"
            );
        }
    }

    /// Logs that the lease of a message ended while its handler or `reconcile` ran.
    pub(super) fn lease_lost(&mut self, entry: &InFlightEntry) {
        if let Some(suppressed_lines) = self.lease_lost.due(now()) {
            let (id, origin) = id_and_origin(entry);
            let attempt = entry.attempt();
            tracing::warn!(
                id,
                attempt,
                %origin,
                suppressed_lines,
                "lease lost, the handler or `reconcile` is dropped and its outcome is unknown: the process or the store was paused for longer than the lease, or the marker was deleted or evicted, and another consumer may handle the message; use a longer lease, and a store that evicts nothing"
            );
        }
    }

    /// Logs that the handler of a message still ran at the end of the drain timeout.
    pub(super) fn handler_dropped(&mut self, entry: &InFlightEntry) {
        if let Some(suppressed_lines) = self.handler_dropped.due(now()) {
            let (id, origin) = id_and_origin(entry);
            let attempt = entry.attempt();
            tracing::warn!(
                id,
                attempt,
                %origin,
                suppressed_lines,
                "handler dropped at the end of the drain timeout, its outcome is unknown"
            );
        }
    }

    /// Logs the outcome of a message that the store has not recorded when the consumer stops.
    #[cold]
    pub(super) fn not_recorded(&mut self, entry: &InFlightEntry) {
        use Stage::*;
        let outcome = match entry.stage() {
            Completing(_) => "handled",
            Clearing(_, Effect::Nothing, _) => "failed without an effect",
            Rejecting(..) => "rejected by the handler",
            Resolving(_, Finding::Happened) => "reconcile found that it happened",
            Resolving(_, Finding::DidNotHappen) => "reconcile found that it did not happen",
            Clearing(..) | Doubting(..) | Running(..) | Pausing(..) | Reconciling(..)
            | ReconcilePausing(..) => "unknown",
            New(_) | Claiming(..) | AwaitingClaim(..) | ClaimingInDrain(_) | Withdrawing(..)
            | Ready(_) | WithoutClaim(_) | Settled => return,
        };
        let Some(suppressed_lines) = self.not_recorded.due(now()) else {
            return;
        };
        let (id, origin) = id_and_origin(entry);
        let attempt = entry.attempt();
        macro_rules! warn {
            ($text:literal) => {
                tracing::warn!(id, attempt, outcome, %origin, suppressed_lines, $text)
            };
        }
        match entry.in_flight.shared().terms.guarantee {
            Guarantee::AtMostOnce => warn!(
                "outcome not recorded, because the consumer stops before the store answers: after the lease the message is in doubt; compare the field `outcome` before you resolve it"
            ),
            Guarantee::EffectivelyOnce => warn!(
                "outcome not recorded, because the consumer stops before the store answers: after the lease the message is handled again"
            ),
            Guarantee::Bare => warn!(
                "outcome not recorded, because the consumer stops before the store answers: while its key exists, the message counts as handled; delete the key if the outcome is not `handled`"
            ),
        }
    }

    /// Logs that a message starts to run in isolation, because processes crashed while they handled
    /// it.
    pub(super) fn possible_crash_loop(
        &mut self,
        entry: &InFlightEntry,
        attempts: Attempts,
        max_crashes: u32,
    ) {
        if let Some(suppressed_lines) = self.possible_crash_loop.due(now()) {
            let (id, origin) = id_and_origin(entry);
            let Attempts {
                number: attempt,
                crashes,
                ..
            } = attempts;
            tracing::warn!(
                id,
                attempt,
                crashes,
                max_crashes,
                %origin,
                suppressed_lines,
                "possible crash loop: processes crashed or lost the lease while they handled this message; it runs in isolation, and no other message is claimed until it is finished; find out why processes crash or pause"
            );
        }
    }

    /// Logs that a message waits because another delivery holds its id.
    pub(super) fn held_elsewhere(&mut self, entry: &InFlightEntry, remaining: Duration) {
        if let Some(suppressed_lines) = self.held_elsewhere.due(now()) {
            let (id, origin) = id_and_origin(entry);
            tracing::info!(id, ?remaining, %origin, suppressed_lines, "message waits: another delivery holds the lease of its id, or held it when its process crashed");
        }
    }
}

/// The lines of one throttle: how they begin, and their level.
#[derive(Clone, Copy)]
enum SuppressedKind {
    Rejected,
    InDoubt,
    Warn(&'static str),
    Info(&'static str),
}

impl SuppressedKind {
    #[cold]
    fn log_suppressed(self, suppressed_lines: u64) {
        match self {
            Self::Rejected => tracing::warn!(
                suppressed_lines,
                "more messages rejected than logged: see them with `oncegate dead-letters list`"
            ),
            Self::InDoubt => tracing::warn!(
                suppressed_lines,
                "more messages in doubt than logged: see them with `oncegate in-doubt list`"
            ),
            Self::Warn(lines) => tracing::warn!(
                suppressed_lines,
                lines,
                "more events than logged: see the last line that begins as `lines` says"
            ),
            Self::Info(lines) => tracing::info!(suppressed_lines, lines, "more events than logged"),
        }
    }
}

/// The fields that identify a message in a log line.
fn id_and_origin(entry: &InFlightEntry) -> (Option<&str>, &Origin) {
    let id = entry.id().map(MessageId::as_str);
    (id, &entry.in_flight.message().origin)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tracing_subscriber::fmt::MakeWriter;

    use super::*;

    #[test]
    fn the_last_suppressed_lines_of_each_kind_are_reported() {
        static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(|| LOG.make_writer())
            .finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let (mut logs, start) = (Logs::new(), Instant::now());
        assert_eq!(logs.report_at(), None);
        let mut fields = Vec::new();
        for (throttle, lines) in logs.throttles() {
            while throttle.due(start).is_some() {}
            fields.push(match lines {
                SuppressedKind::Rejected => "more messages rejected than logged".to_owned(),
                SuppressedKind::InDoubt => "more messages in doubt than logged".to_owned(),
                SuppressedKind::Warn(lines) | SuppressedKind::Info(lines) => {
                    format!("lines=\"{lines}\"")
                }
            });
        }
        let first = logs.report_at().expect("a time");
        assert_eq!(first, start + Duration::from_secs(1));
        logs.log_suppressed(start + LONGEST_PERIOD);
        assert_eq!(logs.report_at(), None);
        let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
        for field in &fields {
            let lines: Vec<&str> = log.lines().filter(|line| line.contains(field)).collect();
            assert_eq!(lines.len(), 1, "{field} in {log}");
            assert!(lines[0].contains("suppressed_lines=1"), "{}", lines[0]);
        }
        assert_eq!(log.lines().count(), fields.len(), "{log}");
    }
}
