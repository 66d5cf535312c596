//! The laws of stores and sources: kept by those in memory and by a store that a user wrote, and broken by what breaks them.

mod caught;
mod caught_sources;
mod memory;
mod memory_broker;
mod own_store;
