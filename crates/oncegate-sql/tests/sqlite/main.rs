//! The SQLite store on real files, of several handles and several processes.
#![forbid(unsafe_code)]

mod crash;
mod differential;
mod expiry;
mod files;
mod laws;
mod sharing;
mod support;
