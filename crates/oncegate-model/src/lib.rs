//! Explores every interleaving of a small system: one id, two consumers, one key in the store, a
//! broker, a sink that counts effects, and an operator who handles dead letters and in-doubt
//! messages.
//!
//! The rules are [`marker::apply`](oncegate_core::marker::apply) and
//! [`lifecycle::transition`](oncegate_core::internal::lifecycle::transition), executed by
//! [`LifecycleDriver`](oncegate_core::internal::driver::LifecycleDriver): the code that runs in
//! production. This crate models everything else.
#![forbid(unsafe_code)]

mod actions;
mod explore;
pub mod lines;
mod operator;
mod properties;
pub mod state;
mod system;
mod trace;

pub use explore::{Expected, Line, explore, head};
pub use system::{EffectsIn, RecoveryOrder, RetriesWait, Rules, Setup, SystemModel};
