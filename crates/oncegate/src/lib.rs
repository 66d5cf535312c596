//! Idempotent message consumers for Kafka and RabbitMQ.
//!
//! Crashes, redeliveries, lost replies and rebalances repeat or lose no effect beyond what the chosen
//! [`Guarantee`] allows. This crate re-exports the others and contains no logic.
//! [`prelude`] has what a consumer needs.
#![forbid(unsafe_code)]

pub mod metrics;
pub mod prelude;

// The consumer and its settings.
pub use oncegate_core::{
    Builder, Consumer, ConsumerSnapshot, ConsumerStatus, DeliveryState, DrainHandle, Error,
    Execution, Fingerprint, Fingerprints, Guarantee, IdSource, InFlightDelivery, LastStoreError,
    Order, Outage, Readiness, Scope, Shadow, ShadowOutcome, ShadowReport, StoreSnapshot,
    StoreState, shutdown_signal,
};
// Handlers.
pub use oncegate_core::{
    Context, Decode, Failure, FailureExt, Handler, Inbox, IntoCause, IntoFailure, Json, Raw,
    RawBytes, Reconciled, TransactionalHandler, async_trait,
};
// Work without a broker.
pub use oncegate_core::{Gate, GateBuilder, GateError, RunOutcome, WhenHeld};
// Messages.
pub use oncegate_core::{Headers, HeadersBuilder, Key, Message, MessageId, Origin, Position};
// What sources and stores implement.
pub use oncegate_core::{
    Connect, ConnectOptions, Delivery, FailureHistory, Incoming, Limit, Persistence, QueueLevel,
    Receipt, RetryDelays, Settled, Source, SourceError, SourceProperties, Store, StoreError,
};
// In memory.
pub use oncegate_core::{DeadLetter, MemoryBroker, MemorySource, MemoryStore};

#[doc(hidden)]
pub use oncegate_core::fault;
pub use oncegate_core::{
    context, decode, defaults, error, gate, handler, id, inbox, lifecycle, marker, memory, message,
    metric, outcome, source, store,
};

#[cfg(feature = "rabbitmq")]
pub use oncegate_amqp::{
    QueueKind, RABBITMQ_METRICS, RabbitMq, RabbitMqSnapshot, RabbitMqSource, RabbitMqStatus,
    Rejects, Topology,
};
#[cfg(feature = "kafka")]
pub use oncegate_kafka::{
    BlockedBy, Blocker, GroupProtocol, KAFKA_METRICS, Kafka, KafkaLogin, KafkaSource, KafkaStatus,
    OutOfRange, PartitionStatus, StartAt, TopicCreation,
};
#[cfg(feature = "redis")]
pub use oncegate_redis::{Durability, REDIS_METRICS, Redis};
#[cfg(feature = "sqlite")]
pub use oncegate_sql::{SQLITE_METRICS, Sqlite, Synchronous};

/// For tools that inspect a Redis store: an estimate of its memory, its markers and its servers.
#[cfg(feature = "redis")]
pub mod redis {
    pub use oncegate_redis::{
        Browse, ForeignValue, Load, Markers, Plan, ServerInfo, ToolRights, plan,
    };
}

/// For tools that inspect an SQLite store.
#[cfg(feature = "sqlite")]
pub mod sqlite {
    pub use oncegate_sql::{SqliteBrowse, SqliteListed};
}
