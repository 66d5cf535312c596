//! The consumer of the end-to-end tests.
//!
//! The tests start, kill and stop the program `consumer` of this package. It records its runs and
//! effects in a [`diary`], a file that survives a crash.
#![forbid(unsafe_code)]

pub mod counters;
pub mod diary;
pub mod scripted;
