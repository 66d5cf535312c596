//! Real servers for oncegate's tests.
//!
//! [`kafka_brokers`], [`rabbitmq_url`] and [`redis_url`] say where the servers that all tests share answer;
//! [`servers`] starts servers of a test's own, which may be stopped, killed, frozen and started again.
#![forbid(unsafe_code)]

mod env;
pub mod proxy;
pub mod servers;

pub use env::{MissingServer, Servers, kafka_brokers, rabbitmq_url, redis_url};
