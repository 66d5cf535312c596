//! Pieces that the crates of oncegate share. Not part of the public API: they change without notice.

mod lock;
mod store_failure;

pub use lock::Lock;
pub use store_failure::{Problem, StoreFailure};
