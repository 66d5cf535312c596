//! Speed, side by side with the bare clients: the same servers, the same messages, by turns.
//!
//! Each measurement is a process of its own ([`side`]), so that its CPU time and its memory are its
//! own, and none inherits what another has left in an allocator or a connection. [`rounds`] lets
//! the sides of one table take turns; [`suites`] says which sides there are; [`report`] prints the
//! table, the ratios and the JSON; [`plot`] draws them. [`profile`] says where the time of one side
//! goes.
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

/// What any part of a benchmark ends with when it cannot go on: whoever runs it reads the reason,
/// and nothing is retried.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;
