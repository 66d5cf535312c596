//! Reads the metadata of committed offsets.
//!
//! # Workaround
//! - *Symptom:* rdkafka's `metadata()` panics if the metadata is not UTF-8. Any program may commit
//!   such metadata for the group. *Version:* rdkafka 0.39.0.
//! - *Workaround:* [`read`] catches the panic.
//! - *Upstream:* `docs/upstream/rust-rdkafka-commit-metadata.md`.
//! - *Test:* none.
//! - *May be removed* when rdkafka returns the bytes or an error.

use std::panic::{AssertUnwindSafe, catch_unwind};

use rdkafka::topic_partition_list::TopicPartitionListElem;

/// The metadata of a committed offset; empty if it is not UTF-8.
pub(crate) fn read(committed: &TopicPartitionListElem<'_>) -> String {
    catch_unwind(AssertUnwindSafe(|| committed.metadata().to_owned())).unwrap_or_default()
}
