//! Waits until the connection is not blocked, before a copy that may be cancelled is published.
//!
//! # Workaround
//! - *Symptom:* RabbitMQ reports a resource alarm (`connection.blocked`) only to connections that
//!   publish, after the first content header, and a message that is published by then can no longer be
//!   cancelled. *Versions:* all.
//! - *Upstream:* documented behavior, <https://www.rabbitmq.com/docs/connection-blocked>.
//! - *Test:* `blocked_acks::a_delivery_is_redelivered_from_memory_if_its_copy_is_not_confirmed_in_time` in
//!   `tests/amqp`.
//! - *May be removed* when RabbitMQ reports alarms to every connection.

use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel};

/// Publishes messages that are routed to no queue, and waits for their confirms, which do not arrive
/// while the connection is blocked.
pub(crate) async fn confirm(channel: &Channel) -> lapin::Result<()> {
    // Two messages with a body, because during an alarm RabbitMQ still reads the first content header
    // of a new connection.
    for _ in 0..2 {
        // No queue has an empty name, so the message is unroutable.
        let publishing = channel.basic_publish(
            "".into(),
            "".into(),
            BasicPublishOptions::default(),
            b"?",
            BasicProperties::default(),
        );
        publishing.await?.await?;
    }
    Ok(())
}
