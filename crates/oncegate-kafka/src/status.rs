//! The status of a Kafka source and of its partitions.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crate::shared::SharedState;

/// The status of a Kafka source: for each partition, the offset to commit next, the lag, and the
/// message that blocks commits. Clones share the status.
///
/// ```
/// use oncegate_kafka::{Kafka, KafkaStatus};
///
/// let status = KafkaStatus::new();
/// let payments = Kafka::topic("payments").brokers("localhost:9092").group("ledger").status(status.clone());
/// // Later, from anywhere:
/// for partition in status.partitions() {
///     println!("{partition}");
/// }
/// ```
#[derive(Clone, Default)]
pub struct KafkaStatus(Arc<OnceLock<Weak<SharedState>>>);

impl KafkaStatus {
    /// A status that no source uses yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The partitions that are assigned to this member, sorted by topic and number; none before the
    /// source is open and after its end.
    pub fn partitions(&self) -> Vec<PartitionStatus> {
        self.shared()
            .map(|shared| shared.lock().status())
            .unwrap_or_default()
    }

    /// How many times the Kafka client was replaced because it stalled, did not reach its group
    /// coordinator, had a fatal error, or read a topic that moved to another cluster.
    pub fn clients_replaced(&self) -> u64 {
        self.shared()
            .map_or(0, |shared| shared.lock().client.replacements())
    }

    /// How many offsets retention or `DeleteRecords` removed before the group read them, since the
    /// source was opened. Compacted records and transaction markers among them count as well.
    pub fn messages_expired(&self) -> u64 {
        self.shared().map_or(0, |shared| shared.lock().expired())
    }

    /// Connects the status to this source. A status that is passed to two sources shows the first
    /// one.
    pub(crate) fn attach(&self, shared: &Arc<SharedState>) {
        let _ = self.0.set(Arc::downgrade(shared));
    }

    fn shared(&self) -> Option<Arc<SharedState>> {
        self.0.get()?.upgrade()
    }
}

impl fmt::Debug for KafkaStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KafkaStatus")
            .field(&self.partitions())
            .finish()
    }
}

/// The status of one partition that is assigned to this member.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionStatus {
    /// The topic.
    pub topic: Arc<str>,
    /// The partition.
    pub partition: i32,
    /// The offset to commit next: every offset below it is settled. `None` while the group's offset
    /// is unknown.
    pub committable: Option<i64>,
    /// The last stable offset. It is fetched every ten seconds, or more often if
    /// [`stalled_after`](crate::Kafka::stalled_after) is below 40 s; `None` until then.
    pub log_end: Option<i64>,
    /// The number of offsets between `committable` and `log_end`; `None` until both are known.
    pub lag: Option<u64>,
    /// The number of deliveries that the consumer has received and that are not settled yet.
    pub handed_out: usize,
    /// The message that blocks commits; `None` if everything that was read is settled.
    pub blocker: Option<Blocker>,
}

/// The lowest unsettled message of a partition. No offset above it is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Blocker {
    /// Its offset. `kcat -C -t <topic> -p <partition> -o <offset> -c 1 -J` shows the message with
    /// its id.
    pub offset: i64,
    /// For how long it has blocked commits.
    pub blocked_for: Duration,
    /// The step that the message waits for.
    pub blocked_by: BlockedBy,
}

/// The step that an unsettled message waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockedBy {
    /// It was read, and the consumer has not taken it yet.
    Queue,
    /// The consumer has it: it waits for other messages of its key, for the store, for its handler
    /// or for its next attempt.
    Consumer,
    /// It was rejected, and the broker has not confirmed its dead letter or in-doubt message yet.
    /// If that cannot be published, the log names the topic and the error.
    DeadLetter,
}

/// One line: `payments/3: committable 1042, lag 17, blocked by 1042 for 12s (Consumer)`.
impl fmt::Display for PartitionStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)?;
        match self.committable {
            Some(offset) => write!(f, ": committable {offset}")?,
            None => f.write_str(": committable unknown")?,
        }
        if let Some(lag) = self.lag {
            write!(f, ", lag {lag}")?;
        }
        match self.blocker {
            Some(Blocker {
                offset,
                blocked_for,
                blocked_by,
            }) => write!(
                f,
                ", blocked by {offset} for {}s ({blocked_by:?})",
                blocked_for.as_secs()
            ),
            None => Ok(()),
        }
    }
}
