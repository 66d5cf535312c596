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

/// The filter that is configured. What RabbitMQ's client says of a refusal, in several lines at the
/// level of errors, oncegate says in one, with what to do; so its lines are left out of a filter
/// that does not name it.
fn filter(configured: Option<&str>) -> Result<EnvFilter, Error> {
    let text = configured.unwrap_or("info");
    let text = if text.contains("lapin") {
        text.to_owned()
    } else {
        format!("{text},lapin=off")
    };
    let filter = EnvFilter::builder().parse(text);
    filter.map_err(|error| {
        Error::misconfigured(format!(
            "log.filter: {error}; write it as RUST_LOG is written"
        ))
    })
}

/// Begins to log on standard error, and to export spans where that is wanted. A program that has a
/// subscriber of its own keeps it, and nothing is added.
pub(crate) fn begin(config: &Config) -> Result<Told, Error> {
    let errors = LastErrors::new();
    let filter = match std::env::var(RUST_LOG) {
        // As everywhere: what cannot be read of it is passed over.
        Ok(text) if !text.is_empty() => EnvFilter::builder().parse_lossy(text),
        _ => filter(config.text("log.filter"))?,
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let said =
        tracing_subscriber::registry().with(lines.and_then(errors.clone()).with_filter(filter));
    #[cfg(feature = "otlp")]
    {
        let name = config
            .text("kafka.group")
            .or(config.text("store.scope"))
            .unwrap_or("oncegate");
        let traces = crate::traces::Traces::from_environment(name)?;
        let _ = said
            .with(traces.as_ref().map(crate::traces::Traces::layer))
            .try_init();
        Ok(Told {
            errors,
            _traces: traces,
        })
    }
    #[cfg(not(feature = "otlp"))]
    {
        let _ = said.try_init();
        Ok(Told { errors })
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
                .expect("nobody panicked")
                .extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_the_client_of_rabbitmq_says_is_left_out_unless_it_is_named() {
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
            let said = tracing_subscriber::registry()
                .with(layer.with_filter(filter(configured).expect("a filter")));
            tracing::subscriber::with_default(said, || {
                tracing::error!(target: "lapin::channels", "Connection error");
                tracing::error!(target: "oncegate_amqp::session", "the broker refuses the login");
            });
            let text =
                String::from_utf8(lines.0.lock().expect("nobody panicked").clone()).expect("text");
            assert_eq!(text.lines().count(), expected, "{configured:?}: {text}");
        }
    }
}
