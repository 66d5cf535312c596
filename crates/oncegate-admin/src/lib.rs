//! An admin port for oncegate's consumers: is it alive, does it take messages, what holds it up,
//! what has it counted.
//!
//! | path | answers |
//! | --- | --- |
//! | `GET /` | these paths, as text |
//! | `GET /live` | 200 while the process answers; trouble with a broker or a store, which no restart heals, changes nothing |
//! | `GET /ready` | 200 while every consumer takes messages, 503 otherwise |
//! | `GET /status` | what each consumer and source holds and waits for, and the last warnings, as JSON |
//! | `GET /metrics` | all metrics of the process, as Prometheus reads them |
//!
//! It shows ids, names of topics and queues, and what the log says. It never shows a payload, a
//! header, what a handler said, or a secret. Ids can be personal data, and there is no login: it
//! listens on 127.0.0.1 unless told otherwise.
//!
//! ```no_run
//! use oncegate::{Consumer, ConsumerStatus, Readiness};
//! use oncegate_admin::{Admin, Metrics};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let metrics = Metrics::install()?; // before the first consumer is built
//! let (readiness, status) = (Readiness::new(), ConsumerStatus::new());
//! let consumer = Consumer::builder().readiness(readiness.clone()).status(status.clone());
//! let serving = Admin::new().consumer("payments", readiness, status).metrics(metrics).serve()?;
//! println!("http://{}/status", serving.address());
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod admin;
mod last_errors;
mod scrape;
mod status;

pub use admin::{Admin, PORT, ServeError, Serving};
pub use last_errors::LastErrors;
pub use scrape::{InstallError, Metrics};
