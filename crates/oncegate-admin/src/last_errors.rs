//! What oncegate warned of last.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

/// How many are kept.
const KEPT: usize = 20;
/// How much of each is kept, in bytes.
pub(crate) const LONGEST: usize = 500;
/// Fields that name one message. What an error beside them says is the handler's own words.
const OF_ONE_MESSAGE: &[&str] = &["id", "key", "origin"];

/// The last warnings and errors that oncegate wrote to the log, at most 20, for the status page.
/// Clones share them.
///
/// A layer for `tracing-subscriber`: add it to your registry, and give a clone to
/// [`Admin::last_errors`](crate::Admin::last_errors). It hears what the filters before it let
/// through.
///
/// What a handler said of a message, and with what it panicked, is left out: it may quote a
/// payload.
///
/// ```
/// use oncegate_admin::{Admin, LastErrors};
/// use tracing_subscriber::layer::SubscriberExt;
///
/// let errors = LastErrors::new();
/// let subscriber = tracing_subscriber::registry().with(errors.clone());
/// let admin = Admin::new().last_errors(errors);
/// ```
#[derive(Clone, Default)]
pub struct LastErrors(Arc<Mutex<VecDeque<Said>>>);

/// One line of the log.
#[derive(Clone)]
pub(crate) struct Said {
    pub(crate) at: Instant,
    pub(crate) level: &'static str,
    pub(crate) by: &'static str,
    pub(crate) text: String,
}

impl LastErrors {
    /// Nothing was heard yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The last ones, the newest first.
    pub(crate) fn newest_first(&self) -> Vec<Said> {
        self.lock().iter().rev().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Said>> {
        // Nothing panics while it is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Subscriber> Layer<S> for LastErrors {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let is_ours = metadata.target() == "oncegate" || metadata.target().starts_with("oncegate_");
        if !is_ours || *metadata.level() > Level::WARN {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        let said = Said {
            at: Instant::now(),
            level: metadata.level().as_str(),
            by: metadata.target(),
            text: line.finish(),
        };
        let mut kept = self.lock();
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back(said);
    }
}

impl fmt::Debug for LastErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.newest_first().iter().map(|said| &said.text))
            .finish()
    }
}

/// An event's message and fields, as one line.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
    error: Option<String>,
    is_of_one_message: bool,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.is_of_one_message |= OF_ONE_MESSAGE.contains(&field.name());
        let written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "error" => {
                self.error = Some(format!("{value:?}"));
                Ok(())
            }
            "said" => Ok(()),
            name => write!(self.fields, " {name}={value:?}"),
        };
        written.expect("a string takes all that is written to it");
    }
}

impl Line {
    fn finish(self) -> String {
        let Self {
            mut message,
            fields,
            error,
            is_of_one_message,
        } = self;
        const PANICKED: &str = "panicked: ";
        if let Some(begins) = message.find(PANICKED) {
            message.truncate(begins + PANICKED.len());
            message.push_str("what it said stands in the log");
        }
        message.push_str(&fields);
        match error {
            Some(_) if is_of_one_message => message.push_str(" error=(as it stands in the log)"),
            Some(error) => message.push_str(&format!(" error={error}")),
            None => {}
        }
        message.truncate(boundary(&message, LONGEST));
        message
    }
}

/// Where a text can be cut so that at most so many bytes stay. (`str::floor_char_boundary` is
/// younger than the oldest Rust that builds this.)
pub(crate) fn boundary(text: &str, at_most: usize) -> usize {
    (0..=at_most.min(text.len()))
        .rev()
        .find(|at| text.is_char_boundary(*at))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    fn heard(say: impl FnOnce()) -> Vec<String> {
        let errors = LastErrors::new();
        tracing::subscriber::with_default(tracing_subscriber::registry().with(errors.clone()), say);
        errors
            .newest_first()
            .into_iter()
            .map(|said| format!("{} {}", said.level, said.text))
            .collect()
    }

    #[test]
    fn the_last_warnings_and_errors_of_oncegate_are_kept() {
        let all = heard(|| {
            for n in 0..30 {
                tracing::warn!(target: "oncegate_redis", n, "away");
            }
            tracing::error!(target: "oncegate_core", error = %"no connection", "stopping");
            tracing::info!(target: "oncegate_core", "an info");
            tracing::error!(target: "oncegater", "another crate");
        });
        assert_eq!(all.len(), KEPT);
        assert_eq!(
            all[..2],
            ["ERROR stopping error=no connection", "WARN away n=29"]
        );
    }

    #[test]
    fn what_may_quote_a_payload_is_left_out() {
        let all = heard(|| {
            tracing::warn!(target: "oncegate_core", reason = "rejected", id = "pay-42", error = "the card canary", "set aside");
            tracing::error!(target: "oncegate_core", said = "canary", "the handler panicked while it was dropped");
            tracing::error!(target: "oncegate_core", origin = ?"payments", "the function that reads the id panicked: canary");
        });
        assert_eq!(
            all[2],
            "WARN set aside reason=rejected id=pay-42 error=(as it stands in the log)"
        );
        assert_eq!(all[1], "ERROR the handler panicked while it was dropped");
        assert!(
            all[0].starts_with("ERROR the function that reads the id panicked: what it said"),
            "{}",
            all[0]
        );
        assert!(!all.concat().contains("canary"));
    }

    #[test]
    fn a_long_line_is_cut_between_characters() {
        let all = heard(|| tracing::warn!(target: "oncegate_core", "{}", "ü".repeat(LONGEST)));
        assert_eq!(all[0].len(), "WARN ".len() + LONGEST);
    }
}
