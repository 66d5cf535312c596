//! An HTTP port for the liveness, readiness, status and metrics of oncegate consumers.
//!
//! | path | response |
//! | --- | --- |
//! | `GET /` | these paths, as text |
//! | `GET /live` | 200 while the process responds, even if a broker or a store is unavailable, which a restart does not fix |
//! | `GET /ready` | 200 once every consumer has connected, while its store answers and it does not drain, 503 otherwise |
//! | `GET /status` | consumers, sources and the last warnings and errors, as JSON |
//! | `GET /metrics` | all metrics of the process in the Prometheus text format |
//!
//! The pages contain message ids, names of topics and queues, and log lines. They never contain
//! payloads, headers, error texts of handlers, or secrets. Ids can be personal data, and there is
//! no authentication: by default the port is open on 127.0.0.1 only.
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
mod connections;
mod last_errors;
mod scrape;
mod status;

pub use admin::{Admin, AdminServer, PORT, ServeError};
pub use last_errors::LastErrors;
pub use scrape::{InstallError, Metrics};
