//! The code that uses librdkafka through rdkafka, its Rust wrapper.
//!
//! | modules | content |
//! | --- | --- |
//! | `topics`, `retention` | before the group is joined: topics exist and retain dead letters |
//! | `poll`, `assignment_wait` | the polling thread, the only one that serves the group |
//! | `callbacks`, `rebalance`, `records`, `start_position`, `time_budget`, `topic_ids`, `commits`, `error_position`, `lowered_commit` | what runs on the polling thread: rebalances, records, errors, offsets |
//! | `watch`, `stall`, `missing_topics`, `lost_metadata` | a second client and thread: lag, stalled partitions, deleted topics, the group coordinator |
//! | `dead_letters`, `outbox_publisher`, `restarting_producer` | the producers |
//! | `batch` | reading in batches: the only `unsafe` code |
//! | `log`, `error`, `connection_errors`, `statistics`, `missing_topic_log`, `topic_id_log`, `cluster_id`, `commit_metadata` | logs, errors, statistics and metadata of librdkafka |
//!
//! # Workarounds
//!
//! `docs/upstream/README.md` lists the workarounds for defects of librdkafka and rdkafka, with
//! their upstream issues or reports. The documentation of each module describes its workarounds.

mod assignment_wait;
// The workspace denies `unsafe` code; of the libraries, only `batch` allows it.
#[allow(unsafe_code)]
pub(crate) mod batch;
pub(crate) mod callbacks;
mod cluster_id;
mod commit_metadata;
mod commits;
pub(crate) mod connection_errors;
pub(crate) mod dead_letters;
pub(crate) mod error;
mod error_position;
mod log;
mod lost_metadata;
mod lowered_commit;
mod missing_topic_log;
mod missing_topics;
pub(crate) mod outbox_publisher;
pub(crate) mod poll;
mod rebalance;
mod records;
mod restarting_producer;
mod retention;
mod stall;
mod start_position;
pub(crate) mod statistics;
mod time_budget;
mod topic_id_log;
mod topic_ids;
pub(crate) mod topics;
pub(crate) mod watch;
