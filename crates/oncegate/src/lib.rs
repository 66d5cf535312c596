//! Idempotent message consumers for Kafka and RabbitMQ.
//!
//! Whatever breaks on the way (a crash, a redelivery, a lost reply, a rebalance), the effect of a
//! message happens the number of times that you chose. This crate re-exports the others, and holds
//! no logic. [`prelude`] has what a consumer needs.
#![forbid(unsafe_code)]

pub mod metrics;
pub mod prelude;

// The consumer and its settings.
pub use oncegate_core::{
    Builder, Consumer, ConsumerSnapshot, ConsumerStatus, DeliveryState, Error, Execution,
    Fingerprint, Fingerprints, Guarantee, IdSource, InFlightDelivery, Order, Outage, Readiness,
    Scope, Shadow, ShadowOutcome, ShadowReport, StoreSnapshot, StoreState, StoreTrouble,
    shutdown_signal,
};
// Handlers.
pub use oncegate_core::{
    Context, Decode, Failure, FailureExt, Handler, IntoCause, IntoFailure, Json, Raw, RawBytes,
    Reconciled, async_trait,
};
// Work without a broker.
pub use oncegate_core::{Gate, GateBuilder, GateError, RunOutcome, WhenHeld};
// Messages.
pub use oncegate_core::{Headers, HeadersBuilder, Key, Message, MessageId, Origin, Position};
// What sources and stores implement.
pub use oncegate_core::{
    Delivery, FailureHistory, Incoming, Limit, Listed, Open, Persistence, Receipt, Settled, Source,
    SourceError, Standing, Store, StoreError,
};
// In memory.
pub use oncegate_core::{DeadLetter, MemoryBroker, MemorySource, MemoryStore};

#[doc(hidden)]
pub use oncegate_core::fault;
pub use oncegate_core::{
    context, decode, defaults, driver, error, gate, handler, id, in_flight, lifecycle, marker,
    memory, message, metric, outcome, source, store,
};

#[cfg(feature = "rabbitmq")]
pub use oncegate_amqp::{
    QueueKind, RABBITMQ_METRICS, RabbitMq, RabbitMqSnapshot, RabbitMqSource, RabbitMqStatus,
    Rejects, Topology,
};
#[cfg(feature = "kafka")]
pub use oncegate_kafka::{
    BlockedBy, Blocker, KAFKA_METRICS, Kafka, KafkaLogin, KafkaSource, KafkaStatus, OutOfRange,
    PartitionStatus, StartAt, TopicCreation,
};
#[cfg(feature = "redis")]
pub use oncegate_redis::{
    Browse, Durability, Load, Markers, Plan, REDIS_METRICS, Redis, ServerInfo, plan,
};
#[cfg(feature = "sqlite")]
pub use oncegate_sql::{SQLITE_METRICS, Sqlite, SqliteBrowse, SqliteListed, Synchronous};
