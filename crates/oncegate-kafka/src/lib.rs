//! The Kafka source of oncegate: a consumer group whose offsets say what is settled, and nothing else.
//!
//! ```no_run
//! use oncegate_kafka::Kafka;
//!
//! let payments = Kafka::topic("payments").brokers("localhost:9092").group("ledger");
//! ```
//!
//! [`Kafka`] describes the source; opening it gives a [`KafkaSource`]. What is committed for a partition is the lowest
//! offset that was handed over and is not settled, so that a crash brings back everything that was not settled, and
//! some of what was.

#![warn(clippy::undocumented_unsafe_blocks)]

// Denied by the workspace everywhere else; `batch` alone lifts it.
#[allow(unsafe_code)]
mod batch;
mod brokers;
mod context;
mod dead_letters;
mod kafka;
mod open;
mod outage;
mod poll;
mod security;
mod shared;
mod source;
mod standing;
mod status;
mod topics;
mod watch;
mod watermark;

pub use kafka::{Kafka, OutOfRange, StartAt, TopicCreation};
pub use security::KafkaLogin;
pub use source::KafkaSource;
pub use status::{Holder, KafkaStatus, PartitionStatus, Stuck};
