//! The SQLite store on real files, with several handles and several processes.
#![forbid(unsafe_code)]

mod bad_table;
mod browse;
mod crash;
mod differential;
mod expiry;
mod files;
mod inbox;
mod laws;
mod results;
mod sharing;
mod support;
