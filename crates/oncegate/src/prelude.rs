//! The names that a consumer and its handler need: `use oncegate::prelude::*;`.

pub use oncegate_core::{
    Consumer, Context, Error, Failure, FailureExt, Guarantee, Handler, IdSource, Message, Order,
    Outgoing, Reconciled, Relay, Router, TransactionalHandler, async_trait, handler_fn,
    shutdown_signal, transactional_fn,
};

#[cfg(feature = "rabbitmq")]
pub use oncegate_amqp::RabbitMq;
#[cfg(feature = "kafka")]
pub use oncegate_kafka::Kafka;
#[cfg(feature = "redis")]
pub use oncegate_redis::Redis;
#[cfg(feature = "sqlite")]
pub use oncegate_sql::Sqlite;
