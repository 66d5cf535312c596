//! The Redis store of oncegate: [`Redis::at`] a single server, 7.0 or newer.
//!
//! A claim is one `SET … NX GET PX`; completions of many ids are one script call in the same pipeline. Everything
//! that a script decides is [`oncegate_core::marker::apply`] row by row, by the server's clock.
#![forbid(unsafe_code)]

mod batch;
mod failure;
mod link;
mod memory;
mod record;
mod script;
mod store;

pub use store::Redis;
