//! The contracts, the gate and the consumer loop of oncegate, with an in-memory source and store.
//!
//! Start with [`Handler`] and [`Consumer`]; [`marker`] and [`road`] hold the promise.
#![forbid(unsafe_code)]

mod breaker;
mod builder;
mod consumer;
pub mod context;
pub mod decode;
pub mod defaults;
pub mod dispatch;
pub mod error;
#[doc(hidden)]
pub mod fault;
pub mod gate;
pub mod handler;
pub mod id;
mod lanes;
mod lease;
pub mod marker;
mod measures;
pub mod memory;
pub mod message;
pub mod metric;
mod moment;
pub mod outcome;
mod pace;
pub mod passage;
mod readiness;
mod renewals;
pub mod road;
mod run;
mod seen;
mod seldom;
mod settings;
mod shadow;
mod shutdown;
mod slots;
pub mod source;
mod spans;
mod status;
pub mod store;

pub use async_trait::async_trait;
pub use builder::{Builder, Consumer};
pub use context::Context;
pub use decode::{Decode, Json, Raw, RawBytes};
pub use error::Error;
pub use gate::{Gate, GateBuilder, GateError, Ran, WhenHeld};
pub use handler::{Failure, Handler, IntoCause, IntoFailure, Knows, Reconciled};
pub use id::{IdSource, Key, MessageId, Scope};
pub use marker::{Fingerprint, Guarantee};
pub use memory::{DeadLetter, MemoryBroker, MemorySource, MemoryStore};
pub use message::{Headers, HeadersBuilder, Message, Origin, Position};
pub use readiness::Readiness;
pub use road::Outage;
pub use seen::{StoreSnapshot, StoreState, StoreTrouble};
#[doc(hidden)]
pub use seldom::Seldom as LogThrottle;
pub use settings::{Fingerprints, Handlers};
pub use shadow::{Shadow, ShadowReport, Would};
pub use shutdown::shutdown_signal;
pub use source::{
    Delivery, Incoming, Limit, Open, Order, Receipt, Settled, Source, SourceError, Story,
};
pub use status::{ConsumerSnapshot, ConsumerStatus, Doing, Held};
pub use store::{Listed, Memory, Standing, Store, StoreError};
