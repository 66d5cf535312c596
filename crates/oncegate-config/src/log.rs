//! Logging of a consumer that is built from its configuration.

use std::io::IsTerminal;

use oncegate_admin::LastErrors;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::Config;
use crate::error::Error;
use crate::log_filter;

/// The environment variable with a log filter, which other Rust programs read as well.
const RUST_LOG: &str = "RUST_LOG";

/// What logging and tracing need while the consumer runs.
pub(crate) struct Logging {
    pub(crate) errors: LastErrors,
    #[cfg(feature = "otlp")]
    _traces: Option<crate::traces::Traces>,
}

/// Starts logging on standard error and, if an OTLP endpoint is configured, exporting spans. Does
/// neither if the program has installed a subscriber.
pub(crate) fn init(config: &Config) -> Result<Logging, Error> {
    let errors = LastErrors::new();
    let filter = match std::env::var(RUST_LOG) {
        // Invalid directives are ignored, as other programs do with this variable.
        Ok(text) if !text.is_empty() => {
            EnvFilter::builder().parse_lossy(log_filter::with_oncegate_warnings(&text))
        }
        _ => log_filter::parse(config.text("log.filter"))?,
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let subscriber =
        tracing_subscriber::registry().with(lines.and_then(errors.clone()).with_filter(filter));
    #[cfg(feature = "otlp")]
    {
        let name = config
            .text("kafka.group")
            .or(config.text("store.scope"))
            .unwrap_or("oncegate");
        let traces = crate::traces::Traces::from_environment(name)?;
        let _ = subscriber
            .with(traces.as_ref().map(crate::traces::Traces::layer))
            .try_init();
        Ok(Logging {
            errors,
            _traces: traces,
        })
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = subscriber.try_init();
        Ok(Logging { errors })
    }
}
