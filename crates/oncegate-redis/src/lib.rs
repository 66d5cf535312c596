//! The Redis store of oncegate.
