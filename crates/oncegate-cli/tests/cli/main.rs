//! The program, run as an operator runs it, on real servers. Their addresses stand in the
//! environment (`ONCEGATE_KAFKA`, `ONCEGATE_RABBITMQ`, `ONCEGATE_REDIS`); `cargo xtask test` sees
//! to that.
#![forbid(unsafe_code)]

mod book;
mod broker_clients;
mod cli;
mod config;
mod destinations;
mod doctor;
mod explain;
mod fixture;
mod forged_headers;
mod interrupted;
mod json_shapes;
mod markers;
mod redrive;
mod redrive_load;
mod sqlite;
mod tls;
