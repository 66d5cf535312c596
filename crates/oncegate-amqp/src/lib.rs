//! The RabbitMQ source of oncegate.
//!
//! ```no_run
//! use oncegate_amqp::{RabbitMq, Topology};
//!
//! let source = RabbitMq::queue("payments").url("amqp://guest:guest@localhost:5672/%2f").prefetch(512).topology(Topology::Declare);
//! ```
//!
//! # Behaviour
//! - It opens its own connections and reconnects with backoff after any failure. A delivery tag is
//!   valid only on its channel: a settlement for a closed channel is counted and dropped, and the
//!   broker redelivers the message.
//! - It acknowledges all settled deliveries before the first unsettled one with one `basic.ack`
//!   (`multiple`). If that one is not settled within 100 ms, it acknowledges the settled ones
//!   behind it one by one.
//! - It publishes copies of messages (dead letters, in-doubt messages and those with a long delay)
//!   on a second connection, with publisher confirms, and acknowledges the original after the
//!   confirm. After a crash in between, both the original and the copy exist.
//! - A delivery waits for its next attempt in the consumer for up to five seconds, and longer in a
//!   delay queue. Without delay queues (with an order, a single active consumer, or a topology
//!   other than [`Topology::Declare`]) it always waits in the consumer. If the connection is lost,
//!   the broker redelivers the deliveries that wait in the consumer at once.
#![forbid(unsafe_code)]

// `source` implements core's `Source`. `protocol` decides, without I/O: which delivery is
// acknowledged when, which confirm counts, what the headers of a copy mean, which queues are
// declared. `client` does the I/O with lapin: its `driver`, a task on a thread of its own, executes
// what `protocol` decides.
mod client;
#[doc(hidden)]
pub mod fuzzing;
mod metric;
mod protocol;
mod settings;
mod source;
mod status;

pub use client::outbox_publisher::RabbitMqPublisher;
pub use metric::RABBITMQ_METRICS;
pub use settings::{QueueKind, RabbitMq, Rejects, Topology};
pub use source::RabbitMqSource;
pub use status::{RabbitMqSnapshot, RabbitMqStatus};
