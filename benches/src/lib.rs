//! Benchmarks: compares oncegate with the plain clients, on the same servers with the same
//! messages, in alternating runs.
//!
//! Each measurement runs in a separate process ([`side`]), so that its CPU time and memory are not
//! mixed with those of others. [`rounds`] alternates the sides of a table, [`suites`] defines the
//! sides, [`report`] prints tables, ratios and JSON, and [`plot`] draws them. [`profile`] samples
//! the CPU time of one side.
#![forbid(unsafe_code)]

pub mod load;
pub mod machine;
pub mod plot;
pub mod profile;
pub mod report;
pub mod rounds;
pub mod side;
pub mod stage;
pub mod suites;

/// The result of a part of a benchmark. An error ends the whole run; nothing is retried.
pub type BenchResult<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
