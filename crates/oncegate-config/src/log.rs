//! What a consumer that is wired from its configuration says, and where.

use std::io::IsTerminal;

use oncegate_admin::LastErrors;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::Config;
use crate::error::Error;

/// The variable that everybody knows.
const RUST_LOG: &str = "RUST_LOG";

/// What runs for as long as the consumer does.
pub(crate) struct Told {
    pub(crate) errors: LastErrors,
    #[cfg(feature = "otlp")]
    _traces: Option<crate::traces::Traces>,
}

/// Begins to log on standard error, and to export spans where that is wanted. A program that has a subscriber of its own keeps
/// it, and nothing is added.
pub(crate) fn begin(config: &Config) -> Result<Told, Error> {
    let errors = LastErrors::new();
    let filter = match std::env::var(RUST_LOG) {
        // As everywhere: what cannot be read of it is passed over.
        Ok(text) if !text.is_empty() => EnvFilter::builder().parse_lossy(text),
        _ => {
            let text = config.text("log.filter").unwrap_or("info");
            EnvFilter::builder()
                .parse(text)
                .map_err(|error| Error::misconfigured(format!("log.filter: {error}; write it as RUST_LOG is written")))?
        }
    };
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(std::io::stderr().is_terminal());
    let said = tracing_subscriber::registry().with(lines.and_then(errors.clone()).with_filter(filter));
    #[cfg(feature = "otlp")]
    {
        let name = config.text("kafka.group").or(config.text("store.scope")).unwrap_or("oncegate");
        let traces = crate::traces::Traces::from_environment(name)?;
        let _ = said.with(traces.as_ref().map(crate::traces::Traces::layer)).try_init();
        Ok(Told { errors, _traces: traces })
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = said.try_init();
        Ok(Told { errors })
    }
}
