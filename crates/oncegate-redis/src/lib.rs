//! The Redis store of oncegate: [`Redis::at`] for a single server, [`Redis::sentinel`] for a primary
//! that Sentinels monitor, [`Redis::cluster`] for a Cluster; Redis 7.0 or newer.
//!
//! A claim is one `SET … NX GET PX`; outside of a Cluster, many may be one `MSETEX`. The
//! completions of many ids are one script call in the same pipeline, or one `SET … IFEQ` each where
//! the server has that option. The script implements [`oncegate_core::marker::apply`] and uses the
//! server's clock.
//!
//! Terms such as claim and marker: <https://github.com/oncegate/oncegate/blob/main/docs/src/promises.md#terms>.
#![forbid(unsafe_code)]

mod anomaly;
mod batch;
mod browse;
mod canary;
mod claim_groups;
mod client;
mod cluster;
mod conditional;
mod durability;
mod failure;
#[doc(hidden)]
pub mod fuzzing;
mod info;
mod loss_detector;
mod metric;
mod persistence;
mod plan;
mod preflight;
mod record;
mod refresh;
mod reply;
mod results;
mod router;
mod script;
mod store;
mod tool_rights;

pub use browse::{Browse, ServerInfo};
pub use durability::Durability;
pub use metric::REDIS_METRICS;
pub use plan::{Load, Markers, Plan, plan};
pub use store::Redis;
pub use tool_rights::{ForeignValue, ToolRights};
