//! Idempotent message consumers for Kafka and RabbitMQ.
//!
//! Whatever breaks on the way (a crash, a redelivery, a lost reply, a rebalance), the effect of a
//! message happens the number of times that you chose. This crate re-exports the others, and holds
//! no logic.
#![forbid(unsafe_code)]

pub mod metrics;

pub use oncegate_core::*;

#[cfg(feature = "rabbitmq")]
pub use oncegate_amqp::*;
#[cfg(feature = "kafka")]
pub use oncegate_kafka::*;
#[cfg(feature = "redis")]
pub use oncegate_redis::*;
#[cfg(feature = "sqlite")]
pub use oncegate_sql::*;
