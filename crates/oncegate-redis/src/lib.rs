//! The Redis store of oncegate: [`Redis::at`] a single server, [`Redis::sentinel`] a primary that
//! Sentinels watch, [`Redis::cluster`] a Cluster; 7.0 or newer.
//!
//! A claim is one `SET … NX GET PX`; completions of many ids are one script call in the same
//! pipeline. Everything that a script decides is [`oncegate_core::marker::apply`] row by row, by
//! the server's clock.
#![forbid(unsafe_code)]

mod batch;
mod browse;
mod canary;
mod cluster;
mod doubt;
mod durability;
mod failure;
mod finding;
mod info;
mod link;
mod memory;
mod metric;
mod plan;
mod preflight;
mod record;
mod reply;
mod route;
mod script;
mod sentinel;
mod server;
mod store;
mod tls;
mod watch;

pub use browse::{Browse, ServerInfo};
pub use durability::Durability;
pub use metric::REDIS_METRICS;
pub use plan::{Load, Markers, Plan, plan};
pub use store::Redis;
