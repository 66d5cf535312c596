//! End to end: real brokers, real stores, real crashes.
//!
//! The consumer that the tests start, kill and stop is the program `consumer` of this package. What
//! it does is written into a [`diary`], which outlives it.
#![forbid(unsafe_code)]

pub mod counters;
pub mod diary;
pub mod scripted;
