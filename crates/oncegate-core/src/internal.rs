//! Code that the crates of oncegate share. Not part of the public API: it may change in any
//! release.

mod lock;
mod marker_columns;
mod store_failure;

pub use lock::Lock;
pub use marker_columns::{MarkerColumns, UnreadableRow, milliseconds};
pub use store_failure::{Problem, StoreFailure};
