//! The filter of the log.

use tracing_subscriber::filter::EnvFilter;

use crate::error::Error;

/// The configured filter. lapin logs errors that oncegate reports in one line with a remedy, so a
/// filter that does not name lapin turns its lines off.
pub(crate) fn parse(configured: Option<&str>) -> Result<EnvFilter, Error> {
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

#[cfg(all(test, feature = "run"))]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::layer::{Layer, SubscriberExt};

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
                .with(layer.with_filter(parse(configured).expect("a filter")));
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
