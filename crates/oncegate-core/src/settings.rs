//! The settings of a consumer, which are checked at start.

use std::sync::Arc;
use std::time::Duration;

use crate::defaults;
use crate::error::Error;
use crate::id::{IdSource, Scope};
use crate::lifecycle::{Outage, Policy};
use crate::marker::{Fingerprint, Guarantee};
use crate::message::Message;
use crate::readiness::Readiness;
use crate::source::Order;
use crate::status::ConsumerStatus;

/// Whether a message is a conflict if the store has its id with a different body.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Fingerprints {
    /// Compares the body in at most once, and nothing otherwise.
    #[default]
    ByGuarantee,
    /// Compares nothing: only the id counts.
    Off,
    /// Compares a hash of the body.
    Body,
    /// Compares the number that this function computes from the message.
    By(Arc<dyn Fn(&Message) -> u64 + Send + Sync>),
}

impl Fingerprints {
    pub(crate) fn of(&self, message: &Message, guarantee: Guarantee) -> Option<Fingerprint> {
        match self {
            Self::Off => None,
            Self::ByGuarantee if guarantee != Guarantee::AtMostOnce => None,
            Self::ByGuarantee | Self::Body => Some(Fingerprint::of(&message.body)),
            Self::By(number) => Some(Fingerprint::new(number(message))),
        }
    }
}

impl std::fmt::Debug for Fingerprints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ByGuarantee => "ByGuarantee",
            Self::Off => "Off",
            Self::Body => "Body",
            Self::By(_) => "By(function)",
        })
    }
}

/// Where handlers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Execution {
    /// Each in its own tokio task, on all cores.
    #[default]
    Spawned,
    /// Each is polled once by the consumer, and spawned only if it is pending: the fastest for
    /// handlers that are ready at once. A handler that blocks stops the consumer.
    Inline,
}

/// The maximum of every duration, ten years, so that no sum of a clock and a duration overflows.
pub(crate) const MAX_DURATION: Duration = Duration::from_secs(3650 * 24 * 3600);

/// The minimum of a lease: it is renewed after a third of its duration, and the store has to answer
/// the renewal before it ends.
const SHORTEST_LEASE: Duration = Duration::from_millis(100);

/// The minimum of the dedup window.
const SHORTEST_WINDOW: Duration = Duration::from_secs(1);

/// The maximum number of repeats of a claim before its delivery is released.
const MAX_CLAIM_RETRIES: u32 = 1000;

/// The settings of a consumer.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) guarantee: Guarantee,
    pub(crate) id: Option<IdSource>,
    pub(crate) scope: Scope,
    pub(crate) fingerprints: Fingerprints,
    pub(crate) dedup_window: Duration,
    pub(crate) lease: Duration,
    /// The lower bound of an adaptive lease; `None` for a fixed one.
    pub(crate) shortest_lease: Option<Duration>,
    pub(crate) max_attempts: u32,
    pub(crate) max_crashes: u32,
    pub(crate) max_inline_retries: u32,
    pub(crate) backoff: Duration,
    pub(crate) longest_backoff: Duration,
    pub(crate) max_reconciles: u32,
    pub(crate) handler_timeout: Duration,
    pub(crate) max_in_flight: usize,
    pub(crate) max_in_flight_bytes: usize,
    pub(crate) max_queued: usize,
    pub(crate) max_queued_bytes: usize,
    pub(crate) drain_timeout: Duration,
    pub(crate) max_age: Option<Duration>,
    pub(crate) order: Option<Order>,
    pub(crate) execution: Execution,
    pub(crate) outage: Outage,
    pub(crate) volatile_store: VolatileStore,
    pub(crate) inbox: InboxUse,
    pub(crate) replies: ReplyUse,
    pub(crate) readiness: Readiness,
    pub(crate) status: Option<ConsumerStatus>,
    /// The seed of the jitter of pauses; `None` for a random one.
    pub(crate) jitter_seed: Option<u64>,
}

/// Whether the handler runs in transactions of an inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InboxUse {
    /// The consumer has a store, and no inbox.
    None,
    /// There is an inbox, and no handler for its transactions yet.
    NoHandler,
    /// There is an inbox with a [`TransactionalHandler`](crate::TransactionalHandler).
    Transactions { max_transactions: usize },
    /// There is an inbox with a
    /// [`BatchTransactionalHandler`](crate::inbox::BatchTransactionalHandler).
    Batches,
}

/// Whether the handler replies to the senders of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyUse {
    None,
    /// The source sends the replies that the handler returns and the store keeps.
    Replies,
    /// The source, the store or the handler was set afterwards, so that no reply would be sent.
    Replaced,
}

impl ReplyUse {
    /// After the source, the store or the handler was set.
    pub(crate) fn replaced(self) -> Self {
        match self {
            Self::None => Self::None,
            Self::Replies | Self::Replaced => Self::Replaced,
        }
    }
}

/// Whether at most once, or an inbox, accepts a store that may lose data in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VolatileStore {
    Refused,
    Allowed,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            guarantee: Guarantee::default(),
            id: None,
            scope: Scope::none(),
            fingerprints: Fingerprints::default(),
            dedup_window: defaults::DEDUP_WINDOW,
            lease: defaults::LEASE,
            shortest_lease: None,
            max_attempts: defaults::MAX_ATTEMPTS,
            max_crashes: defaults::MAX_CRASHES,
            max_inline_retries: defaults::MAX_INLINE_RETRIES,
            backoff: defaults::BACKOFF,
            longest_backoff: defaults::LONGEST_BACKOFF,
            max_reconciles: defaults::MAX_RECONCILES,
            handler_timeout: defaults::HANDLER_TIMEOUT,
            max_in_flight: defaults::MAX_IN_FLIGHT,
            max_in_flight_bytes: defaults::MAX_IN_FLIGHT_BYTES,
            max_queued: defaults::MAX_QUEUED,
            max_queued_bytes: defaults::MAX_QUEUED_BYTES,
            drain_timeout: defaults::DRAIN_TIMEOUT,
            max_age: None,
            order: None,
            execution: Execution::default(),
            outage: Outage::default(),
            volatile_store: VolatileStore::Refused,
            inbox: InboxUse::None,
            replies: ReplyUse::None,
            readiness: Readiness::new(),
            status: None,
            jitter_seed: None,
        }
    }
}

fn misconfigured(
    setting: &'static str,
    problem: String,
    remedy: &'static str,
) -> Result<(), Error> {
    Err(Error::Misconfigured {
        setting,
        problem,
        remedy,
    })
}

impl Settings {
    /// # Errors
    /// The first wrong setting.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let shortest = self.shortest_lease();
        if shortest < SHORTEST_LEASE {
            return misconfigured(
                "lease",
                format!("{shortest:?} is too short to be renewed in time"),
                "set at least 100 ms; 30 s is the default",
            );
        }
        if self.dedup_window.is_zero() {
            return misconfigured(
                "dedup_window",
                "it is 0, so no id would be remembered".into(),
                "set at least twice the longest time after which a message may be redelivered",
            );
        }
        if self.dedup_window < SHORTEST_WINDOW {
            return misconfigured(
                "dedup_window",
                format!("{:?} is below one second", self.dedup_window),
                "set at least 1 s",
            );
        }
        if self.lease >= self.dedup_window {
            let problem = format!(
                "the lease ({:?}) is not shorter than the window ({:?})",
                self.lease, self.dedup_window
            );
            return misconfigured("lease", problem, "shorten the lease or lengthen the window");
        }
        if shortest > self.lease {
            let problem = format!(
                "the shortest lease ({shortest:?}) is longer than the longest ({:?})",
                self.lease
            );
            return misconfigured(
                "adaptive_lease",
                problem,
                "do not call `.lease(…)` after `.adaptive_lease(…)`, which sets the longest lease",
            );
        }
        if self.max_age.is_some_and(|age| age > self.dedup_window) {
            return misconfigured(
                "max_age",
                "it is longer than the dedup window, after which markers expire".into(),
                "set it to at most the dedup window",
            );
        }
        let zeros = [
            ("max_attempts", self.max_attempts == 0, "set at least 1"),
            ("max_in_flight", self.max_in_flight == 0, "set at least 1"),
            (
                "max_in_flight_bytes",
                self.max_in_flight_bytes == 0,
                "set at least the size of one message",
            ),
            ("max_queued", self.max_queued == 0, "set at least 1"),
            (
                "max_queued_bytes",
                self.max_queued_bytes == 0,
                "set at least the size of one message",
            ),
            ("max_reconciles", self.max_reconciles == 0, "set at least 1"),
            (
                "handler_timeout",
                self.handler_timeout.is_zero(),
                "set the longest time that a handler may take",
            ),
        ];
        for (setting, is_zero, remedy) in zeros {
            if is_zero {
                return misconfigured(setting, "it is 0".into(), remedy);
            }
        }
        let durations = [
            ("dedup_window", self.dedup_window),
            ("handler_timeout", self.handler_timeout),
            ("backoff", self.longest_backoff),
            ("drain_timeout", self.drain_timeout),
        ];
        for (setting, duration) in durations {
            if duration > MAX_DURATION {
                return misconfigured(
                    setting,
                    format!("{duration:?} is longer than ten years"),
                    "set at most 3650 days",
                );
            }
        }
        if self.max_crashes < 2 {
            let problem = format!(
                "{} is below 2: a message runs in isolation only after two crashes",
                self.max_crashes
            );
            return misconfigured("max_crashes", problem, "set at least 2");
        }
        if self.backoff < Duration::from_millis(1) {
            return misconfigured(
                "backoff",
                format!(
                    "{:?} would retry without a pause while the store is unavailable",
                    self.backoff
                ),
                "set at least 1 ms",
            );
        }
        if self.longest_backoff < self.backoff {
            return misconfigured(
                "backoff",
                format!(
                    "the longest pause, {:?}, is shorter than the first, {:?}",
                    self.longest_backoff, self.backoff
                ),
                "raise the longest pause, or lower the first",
            );
        }
        self.check_inbox()?;
        self.check_replies()?;
        if self.outage == Outage::PassThrough && self.guarantee != Guarantee::EffectivelyOnce {
            return misconfigured(
                "outage",
                "Outage::PassThrough runs handlers without the store, which breaks this guarantee"
                    .into(),
                "use Outage::Hold, or Guarantee::EffectivelyOnce",
            );
        }
        Ok(())
    }

    fn check_replies(&self) -> Result<(), Error> {
        match self.replies {
            ReplyUse::None => Ok(()),
            ReplyUse::Replies if self.outage == Outage::Hold => Ok(()),
            ReplyUse::Replies => misconfigured(
                "outage",
                "Outage::PassThrough runs handlers without the store, which keeps the replies"
                    .into(),
                "use Outage::Hold, or a handler without replies",
            ),
            ReplyUse::Replaced => misconfigured(
                "replying_handler",
                "the source, the store or the handler was set after it, so no reply would be sent"
                    .into(),
                "call .replying_handler(…) after .source(…) and .store(…), and not .handler(…)",
            ),
        }
    }

    fn check_inbox(&self) -> Result<(), Error> {
        let max_transactions = match self.inbox {
            InboxUse::None => return Ok(()),
            InboxUse::NoHandler => {
                return misconfigured(
                    "handler",
                    "it does not run in transactions of the inbox, so its effects would not be committed with their records".into(),
                    "call .transactional_handler(…) or .batch_transactional_handler(…) after .inbox(…), or .store(…) instead of .inbox(…)",
                );
            }
            InboxUse::Transactions { max_transactions } => max_transactions,
            InboxUse::Batches => usize::MAX,
        };
        if self.guarantee != Guarantee::EffectivelyOnce {
            return misconfigured(
                "guarantee",
                "with an inbox, changes of its database are committed exactly once in any case"
                    .into(),
                "do not call both .guarantee(…) and .inbox(…)",
            );
        }
        if self.outage != Outage::Hold {
            return misconfigured(
                "outage",
                "with an inbox, nothing is handled while its database is unavailable".into(),
                "do not call both .outage(…) and .inbox(…)",
            );
        }
        if self.max_in_flight > max_transactions {
            return misconfigured(
                "max_in_flight",
                format!(
                    "{} messages at once need as many transactions, and the inbox allows {max_transactions}",
                    self.max_in_flight
                ),
                "omit max_in_flight, or lower it; PostgreSQL: or raise max_connections of the pool; SQLite, which runs one transaction at a time: or use .batch_transactional_handler(…)",
            );
        }
        Ok(())
    }

    /// The shortest lease of a claim.
    pub(crate) fn shortest_lease(&self) -> Duration {
        self.shortest_lease.unwrap_or(self.lease)
    }

    /// The maximum time for which the lease of one grant is renewed: one lease, plus the first run,
    /// all inline retries and all `reconcile` calls, each up to the handler timeout and with the
    /// longest pauses between them.
    pub(crate) fn max_renewal_time(&self) -> Duration {
        let runs = self
            .max_inline_retries
            .saturating_add(self.max_reconciles)
            .saturating_add(1);
        let run_and_pauses = self
            .handler_timeout
            .saturating_add(self.longest_backoff.saturating_mul(2));
        self.lease + run_and_pauses.saturating_mul(runs).min(MAX_DURATION)
    }

    /// How long a delivery may stay unsettled: see
    /// [`Builder::max_unsettled_time`](crate::Builder::max_unsettled_time).
    pub(crate) fn max_unsettled_time(&self) -> Duration {
        let retries = if self.guarantee == Guarantee::Bare {
            0
        } else {
            self.max_inline_retries
        };
        let run_and_pause = self.handler_timeout.saturating_add(self.longest_backoff);
        self.lease
            .saturating_mul(2)
            .saturating_add(run_and_pause.saturating_mul(retries.saturating_add(1)))
    }

    /// The maximum age of a message that counts as new if the store does not know its id.
    pub(crate) fn max_age(&self) -> Duration {
        self.max_age.unwrap_or(self.dedup_window / 2)
    }

    /// The policy of the lifecycle. While another holder has an id, its claim is repeated for about
    /// two leases, at most [`MAX_CLAIM_RETRIES`] times.
    pub(crate) fn policy(&self) -> Policy {
        let mut policy = Policy {
            guarantee: self.guarantee,
            max_attempts: self.max_attempts,
            max_crashes: self.max_crashes,
            max_inline_retries: self.max_inline_retries,
            max_reconciles: self.max_reconciles,
            max_claim_retries: 0,
            backoff: self.backoff,
            longest_backoff: self.longest_backoff,
            outage: self.outage,
        };
        let mut waited = Duration::ZERO;
        while waited < self.lease * 2 && policy.max_claim_retries < MAX_CLAIM_RETRIES {
            waited += policy
                .pause(policy.max_claim_retries)
                .max(Duration::from_millis(1));
            policy.max_claim_retries += 1;
        }
        policy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_unsettled_time_is_two_leases_and_all_inline_retries() {
        let settings = Settings::default();
        assert_eq!(
            settings.max_unsettled_time(),
            Duration::from_secs(2 * 30 + 4 * (300 + 10))
        );
        let bare = Settings {
            guarantee: Guarantee::Bare,
            ..settings.clone()
        };
        assert_eq!(
            bare.max_unsettled_time(),
            Duration::from_secs(2 * 30 + 310),
            "the bare gate has no inline retries"
        );
        let longest = Settings {
            max_inline_retries: u32::MAX,
            handler_timeout: MAX_DURATION,
            ..settings
        };
        assert!(longest.max_unsettled_time() >= MAX_DURATION);
    }
}
