//! Connections to Redis servers, through the driver, the crate `redis`.

pub(crate) mod connection;
mod frozen_server;
pub(crate) mod sentinel;
pub(crate) mod server;
mod tcp_settings;
pub(crate) mod tls;
