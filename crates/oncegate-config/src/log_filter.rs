//! The log filter.

use tracing_subscriber::filter::{EnvFilter, LevelFilter};

use crate::error::Error;

/// Parses the configured filter, or the default, `info`. lapin logs errors that oncegate logs as
/// well, in one line with a remedy, so the lines of lapin are turned off unless the filter names
/// lapin.
pub(crate) fn parse(configured: Option<&str>) -> Result<EnvFilter, Error> {
    let mut text = with_oncegate_warnings(configured.unwrap_or("info"));
    if !text.contains("lapin") {
        text += ",lapin=off";
    }
    let filter = EnvFilter::builder().parse(text);
    filter.map_err(|error| {
        Error::misconfigured(format!("log.filter: {error}; use the syntax of RUST_LOG"))
    })
}

/// Adds oncegate's warnings to a filter that has no default level and names no crate of a consumer
/// (see [`is_consumer_crate`]). Such a filter may be a misspelled level, which tracing reads as the
/// name of a crate.
pub(crate) fn with_oncegate_warnings(text: &str) -> String {
    let covers_oncegate = text.split(',').map(str::trim).any(|directive| {
        let target = directive.split(['=', '[', ':']).next().unwrap_or_default();
        target.is_empty() || target.parse::<LevelFilter>().is_ok() || is_consumer_crate(target)
    });
    if covers_oncegate {
        text.to_owned()
    } else {
        format!("{text},oncegate=warn")
    }
}

/// Whether this is a crate of oncegate that logs in a consumer.
fn is_consumer_crate(target: &str) -> bool {
    target == "oncegate"
        || target.strip_prefix("oncegate_").is_some_and(|name| {
            [
                "admin", "amqp", "config", "core", "kafka", "postgres", "redis", "sql",
            ]
            .contains(&name)
        })
}

#[cfg(all(test, feature = "run"))]
mod tests {
    use std::sync::Mutex;

    use tracing_subscriber::fmt::MakeWriter;
    use tracing_subscriber::layer::{Layer, SubscriberExt};

    use super::*;

    #[test]
    fn lapin_is_silent_unless_the_filter_names_it() {
        for (configured, expected) in [
            (None, 1),
            (Some("info"), 1),
            (Some("error"), 1),
            (Some("info,lapin=error"), 2),
            (Some("off"), 0),
            (Some("inof"), 1),
            (Some("my_payments=debug,hyper=info"), 1),
            (Some("oncegatecore=debug"), 1),
            (Some("oncegate_amqp=off"), 0),
        ] {
            static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
            let layer = tracing_subscriber::fmt::layer().with_writer(|| LOG.make_writer());
            let subscriber = tracing_subscriber::registry()
                .with(layer.with_filter(parse(configured).expect("a filter")));
            tracing::subscriber::with_default(subscriber, || {
                tracing::error!(target: "lapin::channels", "Connection error");
                tracing::error!(target: "oncegate_amqp::session", "the broker refuses the login");
            });
            let text = std::mem::take(&mut *LOG.lock().expect("the lock is not poisoned"));
            let text = String::from_utf8(text).expect("text");
            assert_eq!(text.lines().count(), expected, "{configured:?}: {text}");
        }
    }
}
