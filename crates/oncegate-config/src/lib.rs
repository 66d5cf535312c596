//! One `oncegate.toml` and `ONCEGATE_…` variables: read, checked, and made into a consumer.
//!
//! A program hands over its handler; the file says all else, and `oncegate`, the operator's tool,
//! reads the same file:
//!
//! ```no_run
//! # #[cfg(feature = "run")]
//! # async fn worker(handler: impl oncegate::Handler) -> Result<(), oncegate_config::Error> {
//! use oncegate_config::Config;
//!
//! Config::load()?.run(handler).await
//! # }
//! ```
//!
//! A key that means nothing is refused, with the nearest one that does. Secrets may stand in files
//! of their own. Whoever needs more than a file can say takes from it what it says:
//! [`Config::consumer`] sets up a builder, and [`Config::store`] makes a store.
#![forbid(unsafe_code)]

#[cfg(feature = "run")]
mod admin;
mod check;
mod config;
mod error;
mod gate;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "run")]
mod log;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
mod read;
#[cfg(feature = "run")]
mod run;
pub mod settings;
mod store;
#[cfg(feature = "otlp")]
mod traces;
mod value;

pub use config::{Config, Set};
pub use error::{Broker, Error};
pub use store::{AnyStore, Place};
#[cfg(feature = "otlp")]
pub use traces::Traces;
pub use value::{Value, time};
