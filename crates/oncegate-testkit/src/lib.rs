//! A kit to try your handler with, the laws that every store keeps, fault tools, and real servers
//! for oncegate's tests.
//!
//! [`Kit`] runs a handler of yours in memory, with duplicates, crashes and lost replies.
//!
//! [`store_laws!`] holds a store of yours, or one of oncegate's, against the contract, and
//! [`source_laws!`] a source. [`bad_input`] is a table of what strangers send, tried on a source.
//! [`poison`] is one message that always fails among many. [`Lines`] is what was logged.
//! [`LosesReplies`] is a store behind a network that loses replies.
//!
//! [`kafka_brokers`], [`rabbitmq_url`] and [`redis_url`] say where the servers that all tests share
//! answer; [`servers`] starts servers of a test's own, which may be stopped, killed, frozen and
//! started again.
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
pub use loses_replies::{Fate, LosesReplies};
