//! Explores every interleaving of a small world in which oncegate's rules run: one id, two
//! consumers, one key in the store, a broker, a provider that keeps count, and a person who looks
//! after what was set aside.
//!
//! The rules are [`marker::apply`](oncegate_core::marker::apply) and
//! [`lifecycle::transition`](oncegate_core::lifecycle::transition), carried out by
//! [`LifecycleDriver`](oncegate_core::driver::LifecycleDriver): the code that runs in production. This crate
//! plays the rest of the world.
#![forbid(unsafe_code)]

mod actions;
mod explore;
pub mod lines;
mod person;
mod properties;
mod story;
mod trial;
pub mod world;

pub use explore::{Expected, Line, explore, head};
pub use trial::{First, Rules, Setup, Trial};
