//! The in-memory source and store: products for tests and single processes, and the reference for
//! all others.

mod broker;
mod done_log;
mod store;

pub use broker::{DeadLetter, MemoryBroker, MemorySource};
pub use store::MemoryStore;
