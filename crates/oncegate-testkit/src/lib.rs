//! A kit to test handlers, laws for stores and sources, fault injection, and real servers for
//! tests.
//!
//! [`Kit`] runs a handler in memory, with duplicates, crashes and lost replies.
//!
//! [`store_laws!`] tests a store against its contract, and [`source_laws!`] a source. [`bad_input`]
//! sends a table of malformed messages through a source. [`poison`] is one message that always
//! fails, among many that succeed. [`Lines`] collects log lines. [`LosesReplies`] is a store that
//! loses replies.
//!
//! [`kafka_brokers`], [`rabbitmq_url`] and [`redis_url`] return the addresses of the servers that
//! all tests share; [`servers`] starts servers for one test, which can be stopped, killed, frozen
//! and started again.
#![forbid(unsafe_code)]

pub mod asking;
pub mod bad_input;
mod env;
pub mod kit;
pub mod laws;
mod lines;
mod loses_replies;
pub mod poison;
pub mod proxy;
pub mod servers;

pub use env::{MissingServer, Servers, kafka_brokers, rabbitmq_url, redis_url};
pub use kit::{Effects, Kit};
pub use lines::Lines;
pub use loses_replies::{LosesReplies, ReplyFault};
