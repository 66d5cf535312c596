//! Keeps the last warnings and errors of oncegate.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

use oncegate::internal::Lock;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// The maximum number of lines that are kept.
const CAPACITY: usize = 20;
/// The maximum length of a line, in bytes.
pub(crate) const MAX_LINE_BYTES: usize = 500;
/// Fields that identify a message. In a line with one of them, the field `error` may come from the
/// handler.
const MESSAGE_FIELDS: &[&str] = &["id", "key", "origin"];

/// Keeps the last 20 warnings and errors that oncegate logged, for the status page. Clones share
/// them.
///
/// A layer for `tracing-subscriber`: add it to the registry, and pass a clone to
/// [`Admin::last_errors`](crate::Admin::last_errors). Add a level filter for all layers, too: without
/// one, a registry enables every level of every crate, message bodies in the log of lapin included.
///
/// Omits error texts and panic messages of handlers, because they may quote a payload.
///
/// ```
/// use oncegate_admin::{Admin, LastErrors};
/// use tracing_subscriber::layer::SubscriberExt;
///
/// let errors = LastErrors::new();
/// let subscriber = tracing_subscriber::registry()
///     .with(tracing_subscriber::filter::LevelFilter::INFO)
///     .with(errors.clone());
/// let admin = Admin::new().last_errors(errors);
/// ```
#[derive(Clone, Default)]
pub struct LastErrors(Arc<Lock<VecDeque<LogLine>>>);

/// A logged event.
#[derive(Clone)]
pub(crate) struct LogLine {
    pub(crate) at: Instant,
    pub(crate) level: &'static str,
    pub(crate) target: &'static str,
    pub(crate) text: String,
}

impl LastErrors {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// All lines, newest first.
    pub(crate) fn newest_first(&self) -> Vec<LogLine> {
        self.lock().iter().rev().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<LogLine>> {
        // Nothing panics while the lock is held.
        self.0.lock()
    }
}

impl<S: Subscriber> Layer<S> for LastErrors {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let is_oncegate =
            metadata.target() == "oncegate" || metadata.target().starts_with("oncegate_");
        if !is_oncegate || *metadata.level() > Level::WARN {
            return;
        }
        let mut visitor = LineVisitor::default();
        event.record(&mut visitor);
        let logged = LogLine {
            at: Instant::now(),
            level: metadata.level().as_str(),
            target: metadata.target(),
            text: visitor.finish(),
        };
        let mut lines = self.lock();
        if lines.len() == CAPACITY {
            lines.pop_front();
        }
        lines.push_back(logged);
    }
}

impl fmt::Debug for LastErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.newest_first().iter().map(|logged| &logged.text))
            .finish()
    }
}

/// Formats the message and fields of an event as one line.
#[derive(Default)]
struct LineVisitor {
    message: String,
    fields: String,
    error: Option<String>,
    /// Whether the event has one of [`MESSAGE_FIELDS`].
    concerns_message: bool,
}

impl Visit for LineVisitor {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.concerns_message |= MESSAGE_FIELDS.contains(&field.name());
        let written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "error" => {
                self.error = Some(format!("{value:?}"));
                Ok(())
            }
            "panic" => Ok(()),
            name => write!(self.fields, " {name}={value:?}"),
        };
        written.expect("writing to a String never fails");
    }
}

impl LineVisitor {
    fn finish(self) -> String {
        let Self {
            mut message,
            fields,
            error,
            concerns_message,
        } = self;
        const PANICKED: &str = "panicked: ";
        if let Some(start) = message.find(PANICKED) {
            message.truncate(start + PANICKED.len());
            message.push_str("see the log");
        }
        message.push_str(&fields);
        match error {
            Some(_) if concerns_message => message.push_str(" error=(see the log)"),
            Some(error) => message.push_str(&format!(" error={error}")),
            None => {}
        }
        message.truncate(truncation_point(&message, MAX_LINE_BYTES));
        message
    }
}

/// The largest length up to `at_most` at a character boundary. (`str::floor_char_boundary` requires
/// a newer Rust than the minimum version.)
pub(crate) fn truncation_point(text: &str, at_most: usize) -> usize {
    (0..=at_most.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn recorded(log: impl FnOnce()) -> Vec<String> {
        let errors = LastErrors::new();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(errors.clone()), log);
        errors
            .newest_first()
            .into_iter()
            .map(|logged| format!("{} {}", logged.level, logged.text))
            .collect()
    }

    #[test]
    fn keeps_the_last_warnings_and_errors_of_oncegate() {
        let all = recorded(|| {
            for n in 0..30 {
                tracing::warn!(target: "oncegate_redis", n, "store unavailable");
            }
            tracing::error!(target: "oncegate_core", error = %"no connection", "stopping");
            tracing::info!(target: "oncegate_core", "an info");
            tracing::error!(target: "oncegater", "another crate");
        });
        assert_eq!(all.len(), CAPACITY);
        assert_eq!(
            all[..2],
            [
                "ERROR stopping error=no connection",
                "WARN store unavailable n=29"
            ]
        );
    }

    #[test]
    fn omits_texts_that_may_quote_a_payload() {
        let all = recorded(|| {
            tracing::warn!(target: "oncegate_core", reason = "rejected", id = "pay-42", error = "the card canary", "message dead-lettered");
            tracing::error!(target: "oncegate_core", panic = "canary", "the handler panicked while it was dropped");
            tracing::error!(target: "oncegate_core", origin = ?"payments", "the function that reads the id panicked: canary");
        });
        assert_eq!(
            all[2],
            "WARN message dead-lettered reason=rejected id=pay-42 error=(see the log)"
        );
        assert_eq!(all[1], "ERROR the handler panicked while it was dropped");
        assert!(
            all[0].starts_with("ERROR the function that reads the id panicked: see the log"),
            "{}",
            all[0]
        );
        assert!(!all.concat().contains("canary"));
    }

    #[test]
    fn truncates_long_lines_between_characters() {
        let all =
            recorded(|| tracing::warn!(target: "oncegate_core", "{}", "ü".repeat(MAX_LINE_BYTES)));
        assert_eq!(all[0].len(), "WARN ".len() + MAX_LINE_BYTES);
    }
}
