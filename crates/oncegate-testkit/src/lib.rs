//! Test support: [`Kit`] for handlers, conformance tests (*laws*) for stores and sources, fault
//! injection, and test servers.
//!
//! [`Kit`] runs a handler in memory, with duplicates, crashes and lost replies; [`Effects`] counts
//! the handler's effects.
//!
//! [`store_laws!`] tests a store against its contract, and [`source_laws!`] a source. [`bad_input`]
//! sends a table of malformed messages through a source. [`poison`] sends a message that always
//! fails among many that succeed. [`operations`] has short forms of store operations.
//!
//! [`proxy`] is a TCP proxy that loses replies, resets and delays connections. [`LosesReplies`] is
//! a store that loses replies. [`Lines`] collects log lines.
//!
//! [`kafka_brokers`], [`rabbitmq_url`], [`redis_url`] and [`postgres_url`] return the addresses of
//! the servers that all tests share, and [`Servers`] starts those that are missing. [`servers`]
//! starts servers for one test, which can be stopped, killed, frozen and started again.
#![forbid(unsafe_code)]

pub mod bad_input;
mod env;
pub mod kit;
pub mod laws;
mod lines;
mod loses_replies;
pub mod operations;
pub mod poison;
pub mod proxy;
pub mod servers;

pub use env::{MissingServer, Servers, kafka_brokers, postgres_url, rabbitmq_url, redis_url};
pub use kit::{Effects, Kit};
pub use lines::Lines;
pub use loses_replies::{LosesReplies, ReplyFault};
