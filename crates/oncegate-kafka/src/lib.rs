//! The Kafka source of oncegate: a consumer group whose offsets say what is settled, and nothing
//! else.
//!
//! ```no_run
//! use oncegate_kafka::Kafka;
//!
//! let payments = Kafka::topic("payments").brokers("localhost:9092").group("ledger");
//! ```
//!
//! [`Kafka`] describes the source; opening it gives a [`KafkaSource`]. What is committed for a
//! partition is the lowest offset that was handed over and is not settled, so that a crash brings
//! back everything that was not settled, and some of what was.

//! # The modules
//!
//! Each imports only from groups that stand below its own, or from what stands behind it in its
//! group.
//!
//! | what | where |
//! | --- | --- |
//! | what a user holds | `open` (settings, topics, group, threads), `source` (receive, settle, close) |
//! | the threads | `poll` (alone speaks to the group) with `assignment_wait` (logs that nothing is assigned), `watch` (asks from beside how far it is), `dead_letters` |
//! | before the group is joined | `topics` (are they there), `retention` (for how long do they keep) |
//! | what librdkafka calls back into | `context` (rebalances, what was read), `commits`, `standing` (where the group stands), `made_anew` (which log that is), `topic_identity` (whose offset was committed), `missing` (what is not in it any more) |
//! | the state, behind one lock | `shared` (`assigned`, `telling`), `watermark` (which offset may be committed), `status` and `partition` |
//! | what a user describes | `kafka`, `security`, `brokers`; `client` (for tools beside the source) |
//! | librdkafka | `batch` (the only `unsafe`), `log`, `statistics`, `outage`, `refusal` |

#![warn(clippy::undocumented_unsafe_blocks)]

mod assignment_wait;
// Denied by the workspace everywhere else; `batch` alone lifts it.
#[allow(unsafe_code)]
mod batch;
mod brokers;
mod client;
mod commits;
mod context;
mod dead_letters;
mod forgotten;
mod kafka;
mod log;
mod made_anew;
mod metric;
mod missing;
mod open;
mod outage;
mod partition;
mod poll;
mod refusal;
mod retention;
mod security;
mod shared;
mod source;
mod standing;
mod statistics;
mod status;
mod topic_identity;
mod topics;
mod watch;
mod watermark;

pub use kafka::{Kafka, OutOfRange, StartAt, TopicCreation};
pub use metric::KAFKA_METRICS;
pub use partition::{Holder, PartitionStatus, Stuck};
pub use security::KafkaLogin;
pub use source::KafkaSource;
pub use status::KafkaStatus;
