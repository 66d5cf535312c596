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
//! - It acknowledges the contiguous prefix of settled deliveries with one `basic.ack`
//!   (`multiple`).
//! - It publishes dead letters, in-doubt messages and long delays on a second connection, with
//!   publisher confirms, and acknowledges the original after the confirm. After a crash in between
//!   both messages exist.
//! - A released delivery waits in memory for up to five seconds; a longer delay uses a delay queue.
//!   A delayed delivery because of which hundreds of later ones cannot be acknowledged together moves
//!   to a delay queue, too. If the connection is lost, deliveries that wait in memory are redelivered
//!   at once.
#![forbid(unsafe_code)]

// `source` implements core's `Source` and sends commands to the `driver`, a task on a thread of its
// own. The driver owns one `session` (a consuming channel, opened by `open_session`) with its
// `ack_ledger` and `delay_buffer`; `incoming` converts its deliveries, and the `incoming_queue` passes
// them to the source. The `publisher` publishes each `message_copy` on a `publish_channel`. `node`
// parses the URLs, `connector` connects, and `client` has the workarounds.
mod ack_ledger;
mod backoff;
mod client;
mod connector;
mod delay_buffer;
mod driver;
#[doc(hidden)]
pub mod fuzzing;
mod incoming;
mod incoming_queue;
mod message_copy;
mod metric;
mod node;
mod open_session;
mod problem_throttle;
mod publish_channel;
mod publisher;
mod queue_settings;
mod session;
mod settings;
mod source;
mod status;
mod tls;
mod topology;

pub use metric::RABBITMQ_METRICS;
pub use settings::{QueueKind, RabbitMq, Rejects, Topology};
pub use source::RabbitMqSource;
pub use status::{RabbitMqSnapshot, RabbitMqStatus};
