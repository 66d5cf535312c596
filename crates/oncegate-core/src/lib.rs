//! The core of oncegate: the traits of sources, stores and handlers, the consumer loop, the gate, and
//! an in-memory source and store.
//!
//! Start with [`Handler`] and [`Consumer`]. Two pure functions decide everything that the guarantee
//! depends on: [`marker::apply`] the next marker of a key, and `lifecycle::transition` the next action
//! for a delivery. [Terms](https://github.com/oncegate/oncegate/blob/main/docs/src/promises.md#terms):
//! marker, claim, lease, attempt, in doubt, settlement, drain, fingerprint.
#![forbid(unsafe_code)]

mod boot_time;
mod breaker;
mod builder;
mod clock;
mod consumer;
mod consumer_metrics;
pub mod context;
pub mod decode;
pub mod defaults;
mod driver;
mod engine;
pub mod error;
mod fault;
pub mod gate;
pub mod handler;
pub mod id;
mod in_flight;
pub mod inbox;
#[doc(hidden)]
pub mod internal;
mod lease;
pub mod lifecycle;
mod log_throttle;
mod lost_claim;
pub mod marker;
pub mod memory;
pub mod message;
mod message_age;
pub mod metric;
mod ordering;
pub mod outbox;
pub mod outcome;
mod preflight;
mod readiness;
mod relay;
mod renewals;
pub mod replies;
mod result_store;
mod run;
mod run_context;
mod runtime_estimator;
mod settings;
mod shadow;
mod shutdown;
mod slots;
pub mod source;
mod spans;
mod status;
pub mod store;
mod store_health;

pub use async_trait::async_trait;
pub use builder::Builder;
pub use consumer::{Consumer, DrainHandle};
pub use context::Context;
pub use decode::{Decode, Json, Raw, RawBytes};
pub use error::Error;
pub use gate::{
    Gate, GateBuilder, GateError, GateRequest, MissingResult, ResultCodec, RunOutcome, Stored,
    UnstorableResult, WhenHeld,
};
pub use handler::{Failure, FailureExt, Handler, IntoCause, IntoFailure, Reconciled};
pub use id::{IdSource, IntoIdSource, Key, MessageId, Scope};
pub use inbox::{
    BatchItem, BatchTransactionalHandler, Inbox, TransactionalHandler, transactional_fn,
};
pub use lifecycle::Outage;
pub use marker::{Fingerprint, Guarantee};
pub use memory::{DeadLetter, MemoryBroker, MemorySource, MemoryStore};
pub use message::{Headers, HeadersBuilder, Message, Origin, Position, ReplyAddress};
pub use outbox::{Outbox, Outgoing, Publisher, Relay};
pub use readiness::Readiness;
pub use result_store::{Completion, ResultStore};
pub use settings::{Execution, Fingerprints};
pub use shadow::{Shadow, ShadowOutcome, ShadowReport};
pub use shutdown::shutdown_signal;
pub use source::{
    Connect, ConnectOptions, Delivery, FailureHistory, Incoming, Limit, Order, QueueLevel, Receipt,
    RetryDelays, Settled, Source, SourceError, SourceProperties,
};
pub use status::{ConsumerSnapshot, ConsumerStatus, DeliveryState, InFlightDelivery};
pub use store::{ListedKey, MarkerWithExpiry, Persistence, Store, StoreError};
pub use store_health::{LastStoreError, StoreSnapshot, StoreState};
