//! Runs the program like an operator, on real servers. `ONCEGATE_KAFKA`, `ONCEGATE_RABBITMQ` and
//! `ONCEGATE_REDIS` name them; `cargo xtask test` sets these variables.
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
mod postgres;
mod redrive;
mod redrive_load;
mod sqlite;
mod tls;
