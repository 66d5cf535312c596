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

// # Modules
//
// A module imports only from groups below its own and from modules further right in its group.
//
// | group | modules |
// | --- | --- |
// | public types | `open` (settings, topics, group, threads), `source` (receive, settle, close) |
// | threads | `poll` (the only thread that serves the group) with `assignment_wait` (logs a missing assignment), `watch` (lag, stalled partitions) with `missing_topics` (logs deleted topics), `dead_letters` |
// | before joining the group | `topics` (existence, creation), `retention` (retention of the topics) |
// | callbacks of librdkafka | `context` (rebalances, records), `commits`, `committed_offset` (start positions), `topic_recreated` (topic ids), `topic_identity` (the topic of a committed offset), `expired` (offset gaps) |
// | state, behind one lock | `shared` (`assignment`, `health`), `watermark` (the offset to commit), `status` and `partition` |
// | settings | `kafka`, `security`, `brokers`; `tool_client` |
// | librdkafka | `client`: `batch` (the only `unsafe` code), `log`, `statistics`, `connection_errors`, `error`, `lost_metadata`, and a table of workarounds |

#![warn(clippy::undocumented_unsafe_blocks)]

mod assignment_wait;
mod brokers;
mod client;
mod commits;
mod committed_offset;
mod context;
mod dead_letters;
mod expired;
mod kafka;
mod metric;
mod missing_topics;
mod open;
mod partition;
mod poll;
mod retention;
mod security;
mod shared;
mod source;
mod status;
mod tool_client;
mod topic_identity;
mod topic_recreated;
mod topics;
mod watch;
mod watermark;

pub use kafka::{Kafka, OutOfRange, StartAt, TopicCreation};
pub use metric::KAFKA_METRICS;
pub use partition::{BlockedBy, Blocker, PartitionStatus};
pub use security::KafkaLogin;
pub use source::KafkaSource;
pub use status::KafkaStatus;
