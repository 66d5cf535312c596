//! The in-memory source and store, for tests and single processes.

mod broker;
mod done_log;
mod key_hash;
mod store;

pub use broker::{DeadLetter, MemoryBroker, MemorySource};
pub use store::MemoryStore;
