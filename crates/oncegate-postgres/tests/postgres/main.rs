//! The PostgreSQL store against real servers. Needs `ONCEGATE_POSTGRES` and Debian's package
//! `postgresql`.

mod batches;
mod differential;
mod failover;
mod faults;
mod inbox;
mod laws;
mod outbox;
mod preflight;
mod results;
mod support;
mod sweep;
