//! The part of the RabbitMQ adapter's `client` module that parses bytes from the broker.

#[allow(dead_code, reason = "the adapter uses the rest")]
#[path = "../../../crates/oncegate-amqp/src/client/frame_sanitizer.rs"]
pub(crate) mod frame_sanitizer;
