//! The program, run as an operator runs it, on real servers. Their addresses stand in the
//! environment (`ONCEGATE_KAFKA`, `ONCEGATE_RABBITMQ`, `ONCEGATE_REDIS`); `cargo xtask test` sees
//! to that.
#![forbid(unsafe_code)]

mod book;
mod clients;
mod config;
mod cut;
mod desk;
mod doctor;
mod explain;
mod forged;
mod letters;
mod markers;
mod redrive;
mod send_back;
mod shapes;
mod sqlite;
mod tls;
mod world;
