//! The contracts, the gate and the consumer loop of oncegate, with an in-memory source and store.
//!
//! Start with [`Handler`] and [`Consumer`]; [`marker`] and [`lifecycle`] hold the promise.
#![forbid(unsafe_code)]

mod breaker;
mod builder;
mod consumer;
pub mod context;
pub mod decode;
pub mod defaults;
pub mod driver;
pub mod error;
#[doc(hidden)]
pub mod fault;
pub mod gate;
pub mod handler;
pub mod id;
pub mod in_flight;
mod lanes;
mod lease;
pub mod lifecycle;
mod log_throttle;
pub mod marker;
mod measures;
pub mod memory;
pub mod message;
pub mod metric;
mod moment;
pub mod outcome;
mod readiness;
mod renewals;
mod run;
mod runtime_estimator;
mod seen;
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
pub use gate::{Gate, GateBuilder, GateError, RunOutcome, WhenHeld};
pub use handler::{Failure, FailureExt, Handler, IntoCause, IntoFailure, Reconciled};
pub use id::{IdSource, Key, MessageId, Scope};
pub use lifecycle::Outage;
#[doc(hidden)]
pub use log_throttle::LogThrottle;
pub use marker::{Fingerprint, Guarantee};
pub use memory::{DeadLetter, MemoryBroker, MemorySource, MemoryStore};
pub use message::{Headers, HeadersBuilder, Message, Origin, Position};
pub use readiness::Readiness;
pub use seen::{StoreSnapshot, StoreState, StoreTrouble};
pub use settings::{Execution, Fingerprints};
pub use shadow::{Shadow, ShadowOutcome, ShadowReport};
pub use shutdown::shutdown_signal;
pub use source::{
    Delivery, FailureHistory, Incoming, Limit, Open, Order, Receipt, Settled, Source, SourceError,
};
pub use status::{ConsumerSnapshot, ConsumerStatus, DeliveryState, InFlightDelivery};
pub use store::{Listed, Persistence, Standing, Store, StoreError};
