//! The status of a Kafka source.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use crate::partition::PartitionStatus;
use crate::shared::SharedState;

/// The status of a Kafka source: the position, the lag and the blocker of each partition. Clones
/// share it.
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

    /// The partitions that are assigned to this member, in order; none before the source is open
    /// and after its end.
    pub fn partitions(&self) -> Vec<PartitionStatus> {
        self.shared()
            .map(|shared| shared.lock().status())
            .unwrap_or_default()
    }

    /// How often the Kafka client was replaced because it stalled, did not reach its group
    /// coordinator or had a fatal error.
    pub fn clients_replaced(&self) -> u64 {
        self.shared()
            .map_or(0, |shared| shared.lock().replacements())
    }

    /// How many messages expired before the group read them, since the source was opened. Counted
    /// by offsets, so that compacted records and transaction markers among them count too.
    pub fn messages_expired(&self) -> u64 {
        self.shared().map_or(0, |shared| shared.lock().expired())
    }

    /// Connects the status to this source. A status that is passed to two sources keeps the first.
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
