//! Reads and validates `oncegate.toml` and `ONCEGATE_…` variables, and builds a consumer from them.
//!
//! A program passes its handler; the file configures everything else. `oncegate`, the command-line
//! tool, reads the same file:
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
//! An unknown key is an error, which suggests the most similar known key. A secret may be in a
//! separate file. A program that needs more than a file can express uses parts of the
//! configuration: [`Config::consumer`] configures a builder, and [`Config::store`] creates a store.
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
mod log_filter;
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

pub use config::{Config, ConfiguredValue};
pub use error::{Broker, Error, with_store_keys};
pub use store::{AnyStore, StoreKind};
#[cfg(feature = "otlp")]
pub use traces::Traces;
pub use value::{SettingValue, time};
