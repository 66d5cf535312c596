//! Logging of a consumer that is built from its configuration.

use std::io::IsTerminal;

use oncegate_admin::LastErrors;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::Config;
use crate::error::Error;

/// The standard variable for log filters.
const RUST_LOG: &str = "RUST_LOG";

/// Logging resources that live as long as the consumer.
pub(crate) struct Logging {
    pub(crate) errors: LastErrors,
    #[cfg(feature = "otlp")]
    _traces: Option<crate::traces::Traces>,
}

/// The configured filter. lapin logs errors that oncegate reports in one line with a remedy, so a
/// filter that does not name lapin turns its lines off.
fn filter(configured: Option<&str>) -> Result<EnvFilter, Error> {
    let text = configured.unwrap_or("info");
    let text = if text.contains("lapin") {
        text.to_owned()
    } else {
        format!("{text},lapin=off")
    };
    let filter = EnvFilter::builder().parse(text);
    filter.map_err(|error| {
        Error::misconfigured(format!("log.filter: {error}; use the syntax of RUST_LOG"))
    })
}

/// Starts logging on standard error and, if configured, exporting spans. Keeps a subscriber that
/// the program has installed.
pub(crate) fn init(config: &Config) -> Result<Logging, Error> {
    let errors = LastErrors::new();
    let filter = match std::env::var(RUST_LOG) {
        // As usual, invalid parts are ignored.
        Ok(text) if !text.is_empty() => EnvFilter::builder().parse_lossy(text),
        _ => filter(config.text("log.filter"))?,
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

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0
                .lock()
                .expect("the lock is not poisoned")
                .extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lapin_is_silent_unless_the_filter_names_it() {
        for (configured, expected) in [
            (None, 1),
            (Some("info"), 1),
            (Some("error"), 1),
            (Some("info,lapin=error"), 2),
            (Some("off"), 0),
        ] {
            let lines = Lines::default();
            let written = lines.clone();
            let layer = tracing_subscriber::fmt::layer().with_writer(move || written.clone());
            let subscriber = tracing_subscriber::registry()
                .with(layer.with_filter(filter(configured).expect("a filter")));
            tracing::subscriber::with_default(subscriber, || {
                tracing::error!(target: "lapin::channels", "Connection error");
                tracing::error!(target: "oncegate_amqp::session", "the broker refuses the login");
            });
            let text = String::from_utf8(lines.0.lock().expect("the lock is not poisoned").clone())
                .expect("text");
            assert_eq!(text.lines().count(), expected, "{configured:?}: {text}");
        }
    }
}
