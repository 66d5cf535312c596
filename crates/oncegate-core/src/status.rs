//! What a consumer is doing, for those who ask from outside.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::id::MessageId;
use crate::lifecycle::Stage;
use crate::message::{Origin, Position};
use crate::seen::{Seen, StoreSnapshot};

/// How often a consumer tells, if it was asked to.
pub(crate) const TELLS_EVERY: Duration = Duration::from_millis(500);

/// How many of the oldest are named.
const NAMED: usize = 20;

/// What a consumer is doing: how much it holds, what it has held longest, by id and place, and
/// whether its store answers. Clones share it.
///
/// Told twice a second while the consumer runs, also when nothing moves; so it is at most half a
/// second old, unless a handler that runs in place blocks the consumer. What is seen of the store
/// is told at once.
///
/// ```
/// use oncegate_core::{Consumer, ConsumerStatus};
///
/// let status = ConsumerStatus::new();
/// let consumer = Consumer::builder().status(status.clone());
/// // Later, from anywhere:
/// for stuck in status.snapshot().oldest {
///     println!("{stuck}");
/// }
/// ```
#[derive(Clone, Default)]
pub struct ConsumerStatus(Arc<Mutex<Told>>);

/// What was told last.
#[derive(Default)]
pub(crate) struct Told {
    pub(crate) in_flight: usize,
    pub(crate) waiting: usize,
    /// Sorted by how long ago they arrived.
    pub(crate) oldest: Vec<(Instant, InFlightDelivery)>,
    pub(crate) store: Option<Seen>,
}

/// What a consumer holds at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConsumerSnapshot {
    /// Deliveries that are claimed, handled, or on their way out.
    pub in_flight: usize,
    /// Deliveries that wait behind another of their key or partition, or rest after an attempt that
    /// failed.
    pub waiting: usize,
    /// The deliveries that it has held longest, at most 20, the oldest first.
    pub oldest: Vec<InFlightDelivery>,
    /// What it has seen of its store; `None` before its start and after its end.
    pub store: Option<StoreSnapshot>,
}

/// One delivery that a consumer holds.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InFlightDelivery {
    /// Its id; `None` where none could be read.
    pub id: Option<MessageId>,
    /// The topic or queue, and on Kafka the partition and the offset.
    pub origin: Origin,
    /// How long ago it was handed over.
    pub since: Duration,
    /// What it waits for.
    pub doing: DeliveryState,
    /// The number of the attempt, from 1; 0 before its first claim is granted.
    pub attempt: u32,
    /// How many processes ended while they handled it, or lost its lease.
    pub crashes: u32,
}

/// What a delivery waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeliveryState {
    /// Another delivery of its key or partition is before it, it rests after an attempt that
    /// failed, or two processes ended while they handled it, and such messages run one at a time.
    Waiting,
    /// The store: whether its id may be handled.
    Claiming,
    /// Its id is held elsewhere, or the store is away; the claim is asked again later.
    AwaitingHolder,
    /// A free place for its handler, or, if it is to run alone, the claims that are under way.
    Ready,
    /// The handler.
    Handling,
    /// The pause before the handler runs again.
    Pausing,
    /// `reconcile`, or the pause before it is tried again.
    Reconciling,
    /// The store: that what became of it is recorded.
    Recording,
}

impl DeliveryState {
    pub(crate) fn of(stage: Stage) -> Self {
        match stage {
            Stage::New(_) | Stage::Settled => Self::Waiting,
            Stage::Claiming(..) | Stage::Leaving(_) => Self::Claiming,
            Stage::AwaitingHolder(..) => Self::AwaitingHolder,
            Stage::Ready(_) => Self::Ready,
            Stage::Running(..) | Stage::Ungated(_) => Self::Handling,
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

    /// One word for people and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Claiming => "claiming",
            Self::AwaitingHolder => "parked",
            Self::Ready => "ready",
            Self::Handling => "handling",
            Self::Pausing => "pausing",
            Self::Reconciling => "reconciling",
            Self::Recording => "recording",
        }
    }
}

impl ConsumerStatus {
    /// Of a consumer that has not started.
    pub fn new() -> Self {
        Self::default()
    }

    /// What the consumer holds; nothing before its start and after its end. Given to two consumers,
    /// it tells of whichever told last.
    pub fn snapshot(&self) -> ConsumerSnapshot {
        let (told, now) = (self.lock(), Instant::now());
        let since = |arrived: &Instant| now.saturating_duration_since(*arrived);
        let oldest = told
            .oldest
            .iter()
            .map(|(arrived, held)| InFlightDelivery {
                since: since(arrived),
                ..held.clone()
            })
            .collect();
        let store = told.store.as_ref().map(|seen| seen.snapshot(now));
        ConsumerSnapshot {
            in_flight: told.in_flight,
            waiting: told.waiting,
            oldest,
            store,
        }
    }

    /// The oldest of these, which are named with `held`.
    pub(crate) fn tell<T>(
        &self,
        in_flight: usize,
        waiting: usize,
        mut all: Vec<(Instant, T)>,
        held: impl Fn(T) -> Option<InFlightDelivery>,
    ) {
        all.sort_by_key(|(arrived, _)| *arrived);
        all.truncate(NAMED);
        let oldest = all
            .into_iter()
            .filter_map(|(arrived, it)| Some((arrived, held(it)?)))
            .collect();
        let mut told = self.lock();
        (told.in_flight, told.waiting, told.oldest) = (in_flight, waiting, oldest);
    }

    /// The consumer starts, with this store.
    pub(crate) fn begins(&self, store: String) {
        self.lock().store = Some(Seen::nothing_of(store));
    }

    /// Something was seen of the store.
    pub(crate) fn saw(&self, what: impl FnOnce(&mut Seen)) {
        if let Some(seen) = &mut self.lock().store {
            what(seen);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        // What is told is whole at any moment: each part of it is replaced, and nothing panics in
        // between.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Forgets what was told when it is dropped, however the consumer ends.
pub(crate) struct Ends(pub(crate) Option<ConsumerStatus>);

impl Drop for Ends {
    fn drop(&mut self) {
        if let Some(status) = &self.0 {
            *status.lock() = Told::default();
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

/// One line for a person: `pay-42 of payments/3 at 1042: handling since 12s, attempt 1`.
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
            ": {} since {}s",
            self.doing.as_str(),
            self.since.as_secs()
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
