//! The progress bar: on a terminal only.

use indicatif::{ProgressBar, ProgressStyle};

/// How far it is.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// A bar for so many messages.
    pub(crate) fn new(messages: u64) -> Self {
        let style = ProgressStyle::with_template("  {bar:40} {pos}/{len} {msg}")
            .expect("the template above is one");
        Self(ProgressBar::new(messages).with_style(style))
    }

    /// So many are through.
    pub(crate) fn at(&self, through: u64) {
        self.0.set_position(through);
    }

    /// What happens now.
    #[cfg(feature = "real")]
    pub(crate) fn says(&self, what: impl Into<String>) {
        self.0.set_message(what.into());
    }

    /// It is over.
    pub(crate) fn done(&self) {
        self.0.finish_and_clear();
    }
}
