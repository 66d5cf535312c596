//! Selects messages of a destination.

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{Broker, DeadLetter, Destination};
use crate::CliContext;
use crate::config::{self, TimeArg};
use crate::error::CliError;
use crate::output::{ms, now_ms};

/// Filters by id, reason and age; all given filters must match.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct MessageFilter {
    /// Only messages with this id. For a message without an id, pass what `list` shows in the id
    /// column
    #[arg(long)]
    pub(crate) id: Option<String>,
    /// The argument of `--id`, compared with [`DeadLetter::handle`] of messages without an id.
    #[arg(skip)]
    handle: Option<String>,
    /// Only messages with this reason; may be repeated
    // [`restrict_reasons`] restricts the values to those of the command's destination.
    #[arg(long = "reason", value_name = "REASON")]
    reasons: Vec<String>,
    /// Only messages older than this, such as 2h. The age counts from the time of sending; if that
    /// is unknown, from the time of dead-lettering. Messages with neither time are skipped and
    /// counted
    #[arg(long, value_name = "AGE")]
    older_than: Option<TimeArg>,
    /// Only messages at most this old, such as 2h. The age is that of --older-than
    #[arg(long, value_name = "AGE")]
    younger_than: Option<TimeArg>,
    /// Only this broker, if both are configured
    #[arg(long)]
    pub(crate) broker: Option<Broker>,
}

/// Restricts `--reason` of a command to the reasons of its destination.
pub(crate) fn restrict_reasons(argument: clap::Arg, destination: Destination) -> clap::Arg {
    argument.value_parser(PossibleValuesParser::new(super::reasons(destination)))
}

impl MessageFilter {
    /// Whether any filter except `--broker` is given.
    pub(crate) fn is_restrictive(&self) -> bool {
        self.id.is_some()
            || !self.reasons.is_empty()
            || self.older_than.is_some()
            || self.younger_than.is_some()
    }

    /// The filter with the id in the form of message headers, in which long ids are hashed, and
    /// with the handle to compare.
    ///
    /// # Errors
    /// The id is empty.
    pub(crate) fn normalized(mut self, context: &CliContext) -> Result<Self, CliError> {
        self.handle = self.id.clone();
        self.id = self
            .id
            .as_deref()
            .map(|id| config::id(&context.config, id))
            .transpose()?
            .map(|id| id.to_string());
        Ok(self)
    }

    /// A filter that selects the messages of one id, or of one handle.
    pub(crate) fn for_id(
        context: &CliContext,
        id: &str,
        broker: Option<Broker>,
    ) -> Result<Self, CliError> {
        Self {
            id: Some(id.to_owned()),
            broker,
            ..Self::default()
        }
        .normalized(context)
    }

    /// Whether the message has the id or handle of `--id`; true without `--id`.
    pub(crate) fn matches_id(&self, message: &DeadLetter) -> bool {
        self.id.as_deref().is_none_or(|id| match message.id() {
            Some(message_id) => message_id == id,
            None => message.handle() == self.handle,
        })
    }

    /// The error if no message of the searched destinations has the id of `--id`.
    pub(crate) fn id_not_found(&self, searched: &[String]) -> CliError {
        CliError::incomplete(format!(
            "no message with the id {} was found in {}",
            self.handle.as_deref().unwrap_or_default(),
            searched.join(" or ")
        ))
    }

    /// Applies all filters except `--broker`.
    pub(crate) fn matches(&self, message: &DeadLetter) -> FilterMatch {
        let matches_other_filters = self.matches_id(message)
            && (self.reasons.is_empty()
                || self.reasons.iter().any(|reason| message.reason() == reason));
        if !matches_other_filters {
            return FilterMatch::No;
        }
        let filters_by_age = self.older_than.is_some() || self.younger_than.is_some();
        let Some(age) = message
            .sent_or_rejected_ms()
            .map(|time| now_ms().saturating_sub(time))
        else {
            return if filters_by_age {
                FilterMatch::UnknownAge
            } else {
                FilterMatch::Yes
            };
        };
        let is_in_range = self.older_than.is_none_or(|limit| age > ms(limit.0))
            && self.younger_than.is_none_or(|limit| age <= ms(limit.0));
        if is_in_range {
            FilterMatch::Yes
        } else {
            FilterMatch::No
        }
    }

    /// Whether the message matches all filters; false if an age filter is given and the age is
    /// unknown.
    pub(crate) fn selects(&self, message: &DeadLetter) -> bool {
        self.matches(message) == FilterMatch::Yes
    }
}

/// Whether a message matches a filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FilterMatch {
    Yes,
    No,
    /// All other filters match, but the age is unknown.
    UnknownAge,
}

/// The summary line about messages of unknown age.
pub(crate) fn unknown_age_note(count: usize) -> String {
    match count {
        0 => String::new(),
        _ => format!("\n{count} more were skipped: their age is unknown."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oncegate::source::headers;

    #[test]
    fn an_id_selects_only_its_message_and_its_absence_is_an_error() {
        let filter = MessageFilter {
            id: Some("pay-1".into()),
            handle: Some("pay-1".into()),
            ..MessageFilter::default()
        };
        let message = |id| DeadLetter::with_headers(&[(headers::ID, id)]);
        assert!(filter.matches_id(&message("pay-1")) && !filter.matches_id(&message("pay-2")));
        let failure = filter.id_not_found(&[
            "the dead-letter destination on kafka".into(),
            "the dead-letter destination on rabbitmq".into(),
        ]);
        assert_eq!(failure.code, crate::error::CliErrorCode::Incomplete);
        assert_eq!(
            failure.to_string(),
            "no message with the id pay-1 was found in the dead-letter destination on kafka or the \
             dead-letter destination on rabbitmq"
        );
    }
}
