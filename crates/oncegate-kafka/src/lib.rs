//! The Kafka source of oncegate: a member of a consumer group that commits an offset only when
//! every delivery below it is settled.
//!
//! ```no_run
//! use oncegate_kafka::Kafka;
//!
//! let payments = Kafka::topic("payments").brokers("localhost:9092").group("ledger");
//! ```
//!
//! [`Kafka`] describes the source; opening it returns a [`KafkaSource`]. The committed offset of a
//! partition is its lowest delivered and unsettled offset. After a crash the group redelivers every
//! unsettled message, and may redeliver settled ones.

// # Modules, from top to bottom
//
// | module | content |
// | --- | --- |
// | `settings` | `Kafka`, the description of a source; TLS and logins; clients for tools |
// | `source`, `status`, `metric` | `KafkaSource`: connect, receive, settle, close; its status and metrics |
// | `partition` | pure functions: which offset of a partition is committed, and from which it is read |
// | `shared` | the state of all partitions and deliveries, shared by the polling thread and the consumer |
// | `client` | librdkafka: its threads, callbacks and workarounds; the only `unsafe` code |
//
// `partition` imports nothing of this crate.

#![warn(clippy::undocumented_unsafe_blocks)]

mod client;
mod metric;
mod partition;
mod settings;
mod shared;
mod source;
mod status;

pub use client::outbox_publisher::KafkaPublisher;
pub use metric::KAFKA_METRICS;
pub use settings::{GroupProtocol, Kafka, KafkaLogin, OutOfRange, StartAt, TopicCreation};
pub use source::KafkaSource;
pub use status::{BlockedBy, Blocker, KafkaStatus, PartitionStatus};
