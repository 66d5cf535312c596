//! The contracts, the gate and the consumer loop of oncegate, with an in-memory source and store.
//!
//! Start with [`Handler`] and [`Consumer`]; [`marker`] and [`road`] hold the promise.
#![forbid(unsafe_code)]

pub mod context;
pub mod decode;
pub mod handler;
pub mod id;
mod lease;
pub mod marker;
pub mod message;
pub mod road;
pub mod source;
pub mod store;

pub use context::Context;
pub use decode::{Decode, Json, Raw, RawBytes};
pub use handler::{Failure, Handler, Knows, Reconciled};
pub use id::{IdSource, Key, MessageId, Scope};
pub use marker::{Fingerprint, Guarantee};
pub use message::{Headers, HeadersBuilder, Message, Origin, Position};
pub use road::Outage;
pub use source::{Delivery, Incoming, Limit, Open, Order, Receipt, Settled, Source, SourceError, Story};
pub use store::{Memory, Store, StoreError};
