//! The laws of stores: kept by the memory store and by one that a user wrote, and broken by what breaks them.

mod caught;
mod memory;
mod own_store;
