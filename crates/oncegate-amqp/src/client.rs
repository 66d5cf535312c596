//! The AMQP client, with what works around its defects.

pub(crate) mod ack_drain;
pub(crate) mod frame_sanitizer;
pub(crate) mod handshake;
pub(crate) mod sanitized_stream;
pub(crate) mod silence_probe;
