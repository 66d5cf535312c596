//! The status of a running consumer, for status pages and health checks.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::now;
use crate::id::MessageId;
use crate::internal::Lock;
use crate::lifecycle::Stage;
use crate::message::{Origin, Position};
use crate::store_health::{StoreHealth, StoreSnapshot};

/// How often a consumer publishes its status.
pub(crate) const PUBLISH_INTERVAL: Duration = Duration::from_millis(500);

/// The maximum number of deliveries in [`ConsumerSnapshot::oldest`].
const MAX_OLDEST: usize = 20;

/// The status of a consumer: how many deliveries it has, the oldest of them, and whether its store
/// answers. Clones share it.
///
/// Updated twice a second while the consumer runs, so it is at most half a second old unless an
/// inline handler blocks the consumer. The state of the store is updated at once.
///
/// ```
/// use oncegate_core::{Consumer, ConsumerStatus};
///
/// let status = ConsumerStatus::new();
/// let consumer = Consumer::builder().status(status.clone());
/// // Later, from anywhere:
/// for delivery in status.snapshot().oldest {
///     println!("{delivery}");
/// }
/// ```
#[derive(Clone, Default)]
pub struct ConsumerStatus(Arc<Lock<StatusData>>);

/// The last published status.
#[derive(Default)]
pub(crate) struct StatusData {
    pub(crate) in_flight: usize,
    pub(crate) queued: usize,
    /// See [`ConsumerSnapshot::isolated`].
    pub(crate) isolated: usize,
    /// The oldest deliveries with their times of receipt, the oldest first.
    pub(crate) oldest: Vec<(Instant, InFlightDelivery)>,
    pub(crate) store: Option<StoreHealth>,
}

/// The status of a consumer at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerSnapshot {
    /// Deliveries in flight: all unsettled ones that are not queued, so also those that wait for
    /// their next claim or for isolation.
    pub in_flight: usize,
    /// Deliveries that wait behind another of their key or partition, or for the end of their
    /// backoff after a failed attempt.
    pub queued: usize,
    /// Deliveries that run apart from all others, or wait for that, because processes crashed while
    /// they handled these messages: above 0, a crash loop is possible.
    pub isolated: usize,
    /// The oldest unsettled deliveries, at most 20, the oldest first.
    pub oldest: Vec<InFlightDelivery>,
    /// The state of its store; `None` before the consumer starts and after it ends.
    pub store: Option<StoreSnapshot>,
}

/// One unsettled delivery of a consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InFlightDelivery {
    /// Its id; `None` if the message has no usable one.
    pub id: Option<MessageId>,
    /// The topic or queue, and on Kafka the partition and the offset.
    pub origin: Origin,
    /// How long ago it was received.
    pub elapsed: Duration,
    /// What it waits for.
    pub state: DeliveryState,
    /// The number of the attempt, from 1; 0 before its claim is granted.
    pub attempt: u32,
    /// How many processes crashed, or lost the lease, while they handled this message.
    pub crashes: u32,
}

/// What a delivery waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveryState {
    /// The end of another delivery of its key or partition, the end of its backoff after a failed
    /// attempt, or, because at least two processes crashed while they handled it, its turn to run
    /// in isolation.
    Waiting,
    /// The store's answer to its claim.
    Claiming,
    /// The repeat of its claim, because another delivery holds its id or the store is unavailable.
    AwaitingClaim,
    /// The end of another handler, because `max_in_flight` handlers run. If it has to run in
    /// isolation, the answers to the claims that were sent before.
    Ready,
    /// Its handler.
    Handling,
    /// The backoff before an inline retry.
    Pausing,
    /// `reconcile`, or the backoff before it is retried.
    Reconciling,
    /// The store, to record its outcome.
    Recording,
}

impl DeliveryState {
    pub(crate) fn of(stage: Stage) -> Self {
        match stage {
            Stage::New(_) | Stage::Settled => Self::Waiting,
            Stage::Claiming(..) | Stage::ClaimingInDrain(_) => Self::Claiming,
            Stage::AwaitingClaim(..) => Self::AwaitingClaim,
            Stage::Ready(_) => Self::Ready,
            Stage::Running(..) | Stage::WithoutClaim(_) => Self::Handling,
            Stage::Pausing(..) => Self::Pausing,
            Stage::Reconciling(..) | Stage::ReconcilePausing(..) => Self::Reconciling,
            Stage::Withdrawing(..)
            | Stage::Doubting(..)
            | Stage::Resolving(..)
            | Stage::Completing(_)
            | Stage::Clearing(..)
            | Stage::Rejecting(..) => Self::Recording,
        }
    }

    /// The state as one word, for labels and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Claiming => "claiming",
            Self::AwaitingClaim => "awaiting-claim",
            Self::Ready => "ready",
            Self::Handling => "handling",
            Self::Pausing => "pausing",
            Self::Reconciling => "reconciling",
            Self::Recording => "recording",
        }
    }
}

impl ConsumerStatus {
    /// The status of a consumer that has not started.
    pub fn new() -> Self {
        Self::default()
    }

    /// The last published status; empty before the consumer starts and after it ends. If two
    /// consumers share it, the one that published last.
    pub fn snapshot(&self) -> ConsumerSnapshot {
        let (data, now) = (self.0.lock(), now());
        let elapsed_since = |arrived: &Instant| now.saturating_duration_since(*arrived);
        let oldest = data
            .oldest
            .iter()
            .map(|(arrived, delivery)| InFlightDelivery {
                elapsed: elapsed_since(arrived),
                ..delivery.clone()
            })
            .collect();
        let store = data.store.as_ref().map(|health| health.snapshot(now));
        ConsumerSnapshot {
            in_flight: data.in_flight,
            queued: data.queued,
            isolated: data.isolated,
            oldest,
            store,
        }
    }

    /// Publishes the counts and the oldest deliveries of `all`, each with its time of receipt and
    /// described by `describe`.
    pub(crate) fn publish<T>(
        &self,
        in_flight: usize,
        queued: usize,
        isolated: usize,
        mut all: Vec<(Instant, T)>,
        describe: impl Fn(T) -> Option<InFlightDelivery>,
    ) {
        all.sort_by_key(|(arrived, _)| *arrived);
        all.truncate(MAX_OLDEST);
        let oldest = all
            .into_iter()
            .filter_map(|(arrived, delivery)| Some((arrived, describe(delivery)?)))
            .collect();
        let mut data = self.0.lock();
        (data.in_flight, data.queued) = (in_flight, queued);
        (data.isolated, data.oldest) = (isolated, oldest);
    }

    pub(crate) fn start(&self, store: String) {
        self.0.lock().store = Some(StoreHealth::new(store));
    }

    pub(crate) fn update_store(&self, update: impl FnOnce(&mut StoreHealth)) {
        if let Some(health) = &mut self.0.lock().store {
            update(health);
        }
    }
}

/// Clears the status on drop, however the consumer ends.
pub(crate) struct ClearStatusOnDrop(pub(crate) Option<ConsumerStatus>);

impl Drop for ClearStatusOnDrop {
    fn drop(&mut self) {
        if let Some(status) = &self.0 {
            *status.0.lock() = StatusData::default();
        }
    }
}

impl fmt::Debug for ConsumerStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConsumerStatus")
            .field(&self.snapshot())
            .finish()
    }
}

/// One line of text: `pay-42 of payments/3 at 1042: handling, received 12s ago, attempt 1`.
impl fmt::Display for InFlightDelivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.id {
            Some(id) => write!(f, "{id}")?,
            None => f.write_str("no id")?,
        }
        write!(f, " of {}", self.origin.name)?;
        if let Position::Offset { partition, offset } = self.origin.position {
            write!(f, "/{partition} at {offset}")?;
        }
        write!(
            f,
            ": {}, received {}s ago",
            self.state.as_str(),
            self.elapsed.as_secs()
        )?;
        if self.attempt > 0 {
            write!(f, ", attempt {}", self.attempt)?;
        }
        if self.crashes > 0 {
            write!(f, ", {} crashes", self.crashes)
        } else {
            Ok(())
        }
    }
}
