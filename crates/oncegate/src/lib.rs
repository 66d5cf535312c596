//! Idempotent message consumers for Kafka and RabbitMQ.
//!
//! After crashes, redeliveries, lost replies and rebalances, an effect is repeated or lost only as
//! far as the chosen [`Guarantee`] allows. This crate re-exports the other crates of oncegate and
//! contains no logic of its own. [`prelude`] has the names that a consumer and its handler need.
#![forbid(unsafe_code)]

pub mod metrics;
pub mod prelude;

// The consumer and its settings.
pub use oncegate_core::{
    Builder, Consumer, ConsumerStatus, DrainHandle, Error, Execution, Fingerprints, Guarantee,
    IdSource, Order, Outage, Readiness, Scope, Shadow, ShadowOutcome, ShadowReport,
    shutdown_signal,
};
// Handlers.
pub use oncegate_core::{
    BatchItem, BatchTransactionalHandler, Context, Decode, Failure, FailureExt, Handler, Inbox,
    Json, Raw, RawBytes, Reconciled, TransactionalHandler, async_trait, transactional_fn,
};
// Messages that transactions send. The module `outbox` has the types that only implementations
// need.
pub use oncegate_core::{Outgoing, Relay};
// Work without a broker.
pub use oncegate_core::{Gate, GateError, RunOutcome, WhenHeld};
// Messages.
pub use oncegate_core::{Headers, Key, Message, MessageId, Origin, Position};
// Sources and stores. The modules `source` and `store` have the types that only implementations
// need.
pub use oncegate_core::{Persistence, Source, SourceError, Store, StoreError};
// The source and the store in memory.
pub use oncegate_core::{MemoryBroker, MemoryStore};

#[doc(hidden)]
pub use oncegate_core::internal;
pub use oncegate_core::{
    context, decode, defaults, error, gate, handler, id, inbox, lifecycle, marker, memory, message,
    metric, outbox, outcome, replies, source, store,
};

#[cfg(feature = "rabbitmq")]
pub use oncegate_amqp::{
    QueueKind, RabbitMq, RabbitMqPublisher, RabbitMqSource, RabbitMqStatus, Rejects, Topology,
};
#[cfg(feature = "kafka")]
pub use oncegate_kafka::{
    GroupProtocol, Kafka, KafkaLogin, KafkaPublisher, KafkaSource, KafkaStatus, OutOfRange,
    StartAt, TopicCreation,
};
#[cfg(feature = "redis")]
pub use oncegate_redis::{Durability, Redis};
#[cfg(feature = "sqlite")]
pub use oncegate_sql::{Sqlite, SqliteInbox, SqliteTransaction, Synchronous};

/// The types that `ConsumerStatus`, `KafkaStatus` and `RabbitMqStatus` return.
pub mod status {
    #[cfg(feature = "rabbitmq")]
    pub use oncegate_amqp::RabbitMqSnapshot;
    pub use oncegate_core::{
        ConsumerSnapshot, DeliveryState, InFlightDelivery, LastStoreError, StoreSnapshot,
        StoreState,
    };
    #[cfg(feature = "kafka")]
    pub use oncegate_kafka::{BlockedBy, Blocker, PartitionStatus};
}

/// For tools that inspect a Redis store: its markers, its servers, and an estimate of the memory
/// that it needs.
#[cfg(feature = "redis")]
pub mod redis {
    pub use oncegate_redis::{
        Browse, ForeignValue, Load, Markers, Plan, ServerInfo, ToolRights, plan,
    };
}

/// For tools that inspect an SQLite store: its markers.
#[cfg(feature = "sqlite")]
pub mod sqlite {
    pub use oncegate_sql::{SqliteBrowse, SqliteListed};
}
