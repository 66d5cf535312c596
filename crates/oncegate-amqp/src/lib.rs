//! The RabbitMQ source of oncegate.
//!
//! ```no_run
//! use oncegate_amqp::{RabbitMq, Topology};
//!
//! let source = RabbitMq::queue("payments").url("amqp://guest:guest@localhost:5672/%2f").prefetch(512).topology(Topology::Declare);
//! ```
//!
//! # What it does
//! - It owns its connections and rebuilds them after any trouble, with backoff. A receipt belongs
//!   to its channel: one from a channel that is gone is counted and dropped, never sent.
//! - It acknowledges the contiguous prefix of settled deliveries with one frame.
//! - Dead letters, in-doubt messages and long delays travel on a connection of their own, as
//!   confirmed copies that stand in their queue before the original is acknowledged. A crash in
//!   between leaves both.
//! - A released delivery waits in memory for up to five seconds, else in a delay queue. One that
//!   keeps hundreds behind it from being acknowledged together moves to a delay queue, too. If the
//!   connection is lost meanwhile, what waited in memory comes back at once.
#![forbid(unsafe_code)]

// Where to begin: `source` is what the consumer drives, and hands everything on to the `engine`. A
// `session` is one channel that consumes, from its `opening` on, with its `acks` and what is `held`
// back; `incoming` reads what it brings, and the `inbox` takes that back to the source. The
// `publisher` sends each `copy` in a `flight`. From the URL to the bytes go `node`, `link`,
// `handshake`, `guard` and `frames`.
mod acks;
mod backoff;
mod copy;
mod engine;
mod flight;
mod frames;
mod guard;
mod handshake;
mod held;
mod inbox;
mod incoming;
mod link;
mod metric;
mod node;
mod opening;
mod publisher;
mod session;
mod settings;
mod source;
mod status;
mod telling;
mod tls;
mod topology;

pub use metric::RABBITMQ_METRICS;
pub use settings::{QueueKind, RabbitMq, Rejects, Topology};
pub use source::RabbitMqSource;
pub use status::{RabbitMqSnapshot, RabbitMqStatus};
