//! What a source is doing, for those who ask from outside.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use crate::partition::PartitionStatus;
use crate::shared::Shared;

/// What a Kafka source is doing: how far each partition is, how far behind, and what holds it up.
/// Clones share it.
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
pub struct KafkaStatus(Arc<OnceLock<Weak<Shared>>>);

impl KafkaStatus {
    /// Of a source that is not open.
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

    /// How often the Kafka client was replaced because it had stalled, was without its group or had
    /// failed for good.
    pub fn clients_replaced(&self) -> u64 {
        self.shared().map_or(0, |shared| shared.lock().replaced())
    }

    /// How many messages were removed from the log before the group had read them, since the source
    /// was opened, as far as offsets tell: those that nobody would have been handed count too.
    pub fn messages_missed(&self) -> u64 {
        self.shared().map_or(0, |shared| shared.lock().missed())
    }

    /// Of this source, from now on; a status that was given to two sources stays with the first.
    pub(crate) fn of(&self, shared: &Arc<Shared>) {
        let _ = self.0.set(Arc::downgrade(shared));
    }

    fn shared(&self) -> Option<Arc<Shared>> {
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
