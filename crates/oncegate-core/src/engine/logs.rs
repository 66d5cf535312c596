//! Log lines about messages and the store, limited in rate.

use std::time::{Duration, Instant};

use super::entry::InFlightEntry;
use super::log_kind::LogKind;
use crate::clock::now;
use crate::id::MessageId;
use crate::internal::ClaimsPaused;
use crate::lifecycle::{DoubtCause, Event, Outcome, Reason, Settlement, Stage};
use crate::log_throttle::LogThrottle;
use crate::lost_claim::LostClaim;
use crate::marker::{Attempts, Effect, Finding, Guarantee};
use crate::message::{Message, Origin};
use crate::run::RunResult;
use crate::settings::InboxUse;
use crate::source::Settled;
use crate::store::StoreError;

pub(super) struct Logs {
    /// The throttles, by [`LogKind`].
    throttles: [LogThrottle; LogKind::ALL.len()],
    /// Whether the handler runs in transactions of an inbox.
    in_transactions: bool,
    /// Since when no operation was answered, or claims are paused, until the log says that this has
    /// ended.
    unavailable_since: Option<Instant>,
    /// Whether the store paused the last claims.
    claims_paused: bool,
}

impl Logs {
    pub(super) fn new(inbox: InboxUse) -> Self {
        Self {
            throttles: LogKind::ALL.map(LogKind::throttle),
            in_transactions: inbox != InboxUse::None,
            unavailable_since: None,
            claims_paused: false,
        }
    }

    /// If a line of this kind may be written, returns how many were suppressed since the last one.
    fn due(&mut self, kind: LogKind) -> Option<u64> {
        self.throttles[kind as usize].due(now())
    }

    /// When [`log_suppressed`](Self::log_suppressed) has something to log.
    pub(super) fn report_at(&self) -> Option<Instant> {
        self.throttles
            .iter()
            .filter_map(LogThrottle::report_at)
            .min()
    }

    /// Logs how many lines of each kind were suppressed, if no other line of that kind followed.
    pub(super) fn log_suppressed(&mut self, now: Instant) {
        for kind in LogKind::ALL {
            let suppressed_lines = self.throttles[kind as usize].take_suppressed(now);
            if suppressed_lines > 0 {
                kind.log_suppressed(suppressed_lines);
            }
        }
    }

    /// Logs that a message was rejected, to dead letters or to the in-doubt queue.
    pub(super) fn rejected(&mut self, settled: &Settled, destination: Option<String>) {
        let Settlement::Reject(reason) = settled.settlement else {
            return;
        };
        let kind = if reason.is_in_doubt() {
            LogKind::InDoubt
        } else {
            LogKind::Rejected
        };
        let Some(suppressed_lines) = self.due(kind) else {
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

    /// Logs that a handler failed, or the result of `reconcile`.
    #[cold]
    pub(super) fn run_failed(&mut self, entry: &InFlightEntry, finished: &RunResult) {
        let kind = match finished.event {
            Event::Returned(Outcome::Unknown(DoubtCause::Panicked)) => LogKind::Panicked,
            Event::Returned(Outcome::Unknown(DoubtCause::TimedOut)) => LogKind::TimedOut,
            Event::Returned(Outcome::Unknown(_)) => LogKind::OutcomeUnknown,
            Event::Returned(Outcome::Retry) => LogKind::Failed,
            Event::Returned(Outcome::Unavailable) => LogKind::DatabaseUnavailable,
            Event::Reconciled(_) => LogKind::Reconciled,
            _ => return,
        };
        let Some(suppressed_lines) = self.due(kind) else {
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
            Event::Returned(Outcome::Unknown(DoubtCause::Panicked)) if self.in_transactions => {
                tracing::error!(id, attempt, error, %origin, suppressed_lines, "handler panicked, its transaction is rolled back");
            }
            Event::Returned(Outcome::Unknown(DoubtCause::TimedOut)) if self.in_transactions => {
                warn!("handler timed out, its transaction is rolled back");
            }
            Event::Returned(Outcome::Unknown(_)) if self.in_transactions => {
                warn!("handler failed, its transaction is rolled back");
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
        if let Some(suppressed_lines) = self.due(LogKind::UnknownAge) {
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
        if let Some(suppressed_lines) = self.due(LogKind::QueueFull) {
            tracing::warn!(
                queued,
                bytes,
                suppressed_lines,
                "queue limit reached, receiving is paused: too many deliveries wait for a retry, or behind others of their key or partition; see which messages fail, or raise `max_queued` or `max_queued_bytes`"
            );
        }
    }

    pub(super) fn unavailable(&mut self, error: &StoreError, in_flight: usize) {
        if ClaimsPaused::is_cause_of(error) {
            self.claims_paused = true;
            self.unavailable_since.get_or_insert_with(now);
            if let Some(suppressed_lines) = self.due(LogKind::ClaimsPaused) {
                tracing::warn!(%error, in_flight, suppressed_lines, "claims paused, because the store may have lost markers: messages wait until the pause ends or the loss is accepted; do what `error` says");
            }
        } else if let Some(suppressed_lines) = self.due(LogKind::Unavailable) {
            tracing::warn!(%error, in_flight, suppressed_lines, "store unavailable, requests are retried until it answers; check the store and its network");
        }
    }

    /// Logs that the store is available again, after it was unavailable for this time (`None`: it
    /// was not). While claims are paused, the line waits for an answered claim.
    pub(super) fn answered(&mut self, unavailable_for: Option<Duration>, claim_answered: bool) {
        if let Some(unavailable_for) = unavailable_for {
            let now = now();
            self.unavailable_since
                .get_or_insert(now.checked_sub(unavailable_for).unwrap_or(now));
        }
        self.claims_paused &= !claim_answered;
        if self.claims_paused {
            return;
        }
        if let Some(since) = self.unavailable_since.take() {
            let unavailable_for = now().saturating_duration_since(since);
            let suppressed_lines = [LogKind::Unavailable, LogKind::ClaimsPaused]
                .map(|kind| self.throttles[kind as usize].take_all_suppressed())
                .iter()
                .sum::<u64>();
            tracing::info!(?unavailable_for, suppressed_lines, "store available again");
        }
    }

    /// Logs that the completion of a message that was handled without the store will not be
    /// recorded.
    pub(super) fn late_completions_full(&mut self) {
        if let Some(suppressed_lines) = self.due(LogKind::LateCompletionsFull) {
            tracing::warn!(
                suppressed_lines,
                "completion not recorded: too many messages were handled without the store; a redelivery of this one runs again"
            );
        }
    }

    /// Logs that the claim of a message took over a lease that ended without a recorded outcome.
    pub(super) fn taken_over(&mut self, entry: &InFlightEntry, attempts: Attempts) {
        if let Some(suppressed_lines) = self.due(LogKind::TakenOver) {
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
        if let Some(suppressed_lines) = self.due(LogKind::LeaseLost) {
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

    /// Logs that the claim of a message was lost before its completion was recorded.
    #[cold]
    pub(super) fn claim_lost(&mut self, entry: &InFlightEntry, lost: LostClaim) {
        let kind = match lost {
            LostClaim::MarkerLost => LogKind::MarkerLost,
            LostClaim::Fenced => LogKind::Fenced,
        };
        if let Some(suppressed_lines) = self.due(kind) {
            let (id, origin) = id_and_origin(entry);
            lost.log(id, entry.attempt(), Some(origin), suppressed_lines);
        }
    }

    /// Logs that the handler of a message still ran at the end of the drain timeout.
    pub(super) fn handler_dropped(&mut self, entry: &InFlightEntry) {
        if let Some(suppressed_lines) = self.due(LogKind::HandlerDropped) {
            let (id, origin) = id_and_origin(entry);
            let attempt = entry.attempt();
            let follows = match self.in_transactions {
                true => "its transaction is rolled back unless its commit had begun",
                false => "its outcome is unknown",
            };
            tracing::warn!(
                id,
                attempt,
                %origin,
                suppressed_lines,
                "handler dropped at the end of the drain timeout, {follows}"
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
        let Some(suppressed_lines) = self.due(LogKind::NotRecorded) else {
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
            _ if self.in_transactions => warn!(
                "outcome not recorded, because the consumer stops before the database answers: the message is handled again unless its record is found"
            ),
            Guarantee::AtMostOnce => warn!(
                "outcome not recorded, because the consumer stops before the store answers: after the lease the message is in doubt, or runs again if the store lost its claim; compare the field `outcome` first"
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
        if let Some(suppressed_lines) = self.due(LogKind::PossibleCrashLoop) {
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
                "possible crash loop: processes crashed or lost the lease while they handled this message; it runs in isolation, and messages without crashes are not claimed until all in isolation are finished; find out why processes crash or pause"
            );
        }
    }

    /// Logs that a message waits because another delivery holds its id.
    pub(super) fn held_elsewhere(&mut self, entry: &InFlightEntry, remaining: Duration) {
        if let Some(suppressed_lines) = self.due(LogKind::HeldElsewhere) {
            let (id, origin) = id_and_origin(entry);
            tracing::info!(id, ?remaining, %origin, suppressed_lines, "message waits: another delivery holds the lease of its id, or held it when its process crashed");
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
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use tracing_subscriber::fmt::MakeWriter;

    use super::super::log_kind::LONGEST_PERIOD;
    use super::*;

    #[test]
    fn each_kind_is_at_its_index() {
        for (index, kind) in LogKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index, "{kind:?}");
        }
    }

    #[test]
    fn the_last_suppressed_lines_of_each_kind_are_reported() {
        static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(|| LOG.make_writer())
            .finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let (mut logs, start) = (Logs::new(InboxUse::None), Instant::now());
        assert_eq!(logs.report_at(), None);
        for kind in LogKind::ALL {
            while logs.throttles[kind as usize].due(start).is_some() {}
        }
        let first = logs.report_at().expect("a time");
        assert_eq!(first, start + Duration::from_secs(1));
        logs.log_suppressed(start + LONGEST_PERIOD);
        assert_eq!(logs.report_at(), None);
        let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
        for line in log.lines() {
            assert!(line.contains("suppressed_lines=1"), "{line}");
        }
        let different: BTreeSet<&str> = log
            .lines()
            .filter_map(|line| line.split_once(": ").map(|(_, text)| text))
            .collect();
        assert_eq!(different.len(), LogKind::ALL.len(), "{log}");
        assert_eq!(log.lines().count(), LogKind::ALL.len(), "{log}");
    }
}
