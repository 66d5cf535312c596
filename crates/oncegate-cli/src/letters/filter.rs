//! Which letters are meant.

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{Broker, Letter};
use crate::Context;
use crate::config::{self, Span};
use crate::failure::Failure;
use crate::say::{ms, now_ms};

/// What a letter has to be; all of it, where several are said.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Filter {
    /// Those with this id.
    #[arg(long)]
    pub(crate) id: Option<String>,
    /// Those set aside for this reason. May be said several times.
    #[arg(long = "reason", value_name = "REASON", value_parser = PossibleValuesParser::new(super::reasons()))]
    reasons: Vec<String>,
    /// Those that were sent longer ago than this, such as 2h; where that is not known, that were
    /// set aside longer ago. What tells neither is left out, and counted.
    #[arg(long, value_name = "TIME")]
    older_than: Option<Span>,
    /// Those that were sent within this time.
    #[arg(long, value_name = "TIME")]
    younger_than: Option<Span>,
    /// Those on this broker, where both are configured.
    #[arg(long)]
    pub(crate) broker: Option<Broker>,
}

impl Filter {
    /// Whether it leaves anything out.
    pub(crate) fn chooses(&self) -> bool {
        self.id.is_some()
            || !self.reasons.is_empty()
            || self.older_than.is_some()
            || self.younger_than.is_some()
    }

    /// The same with the id as it stands in headers.
    pub(crate) fn checked(mut self, context: &Context) -> Result<Self, Failure> {
        self.id = self
            .id
            .as_deref()
            .map(|id| config::id(&context.config, id))
            .transpose()?
            .map(|id| id.to_string());
        Ok(self)
    }

    pub(crate) fn of_id(
        context: &Context,
        id: &str,
        broker: Option<Broker>,
    ) -> Result<Self, Failure> {
        Self {
            id: Some(id.to_owned()),
            broker,
            ..Self::default()
        }
        .checked(context)
    }

    /// Whether a letter is meant.
    pub(crate) fn judge(&self, letter: &Letter) -> Meant {
        let others = self.id.as_deref().is_none_or(|id| letter.id() == Some(id))
            && (self.reasons.is_empty()
                || self.reasons.iter().any(|reason| letter.reason() == reason));
        if !others {
            return Meant::No;
        }
        let asks = self.older_than.is_some() || self.younger_than.is_some();
        let Some(age) = letter
            .age_from_ms()
            .map(|from| now_ms().saturating_sub(from))
        else {
            return if asks { Meant::Ageless } else { Meant::Yes };
        };
        let is = self.older_than.is_none_or(|than| age > ms(than.0))
            && self.younger_than.is_none_or(|than| age <= ms(than.0));
        if is { Meant::Yes } else { Meant::No }
    }

    pub(crate) fn takes(&self, letter: &Letter) -> bool {
        self.judge(letter) == Meant::Yes
    }
}

/// Whether a letter is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meant {
    Yes,
    No,
    /// It would be but for its age, which it does not tell.
    Ageless,
}

/// What is said of those that do not tell their age.
pub(crate) fn ageless(count: usize) -> String {
    match count {
        0 => String::new(),
        _ => format!("\n{count} more do not tell their age, and were left out."),
    }
}
