//! The in-memory source and store, for tests and single processes. A test suite compares every
//! other store with this store.

mod broker;
mod done_log;
mod key_hash;
mod store;

pub use broker::{DeadLetter, MemoryBroker, MemorySource};
pub use store::MemoryStore;
