//! `oncegate dead-letters`: what was set aside, and how it gets on.

use clap::{Args, Subcommand};
use oncegate::marker::Ask;

use crate::Context;
use crate::audit::{Act, Audit};
use crate::config;
use crate::failure::Failure;
use crate::letters::act::{Doing, Pace, Report, closing};
use crate::letters::filter::Filter;
use crate::letters::look::{self, List, Looking, Show};
use crate::letters::{Broker, Letter, Reader, Shelf, kafka};
use crate::marker::change::Subject;
use crate::marker::told::State;
use crate::markers::Markers;

#[derive(Subcommand)]
pub(crate) enum DeadLettersCommand {
    /// Lists what waits there.
    List(List),
    /// Shows all that stands there under an id, with its headers.
    Show(Show),
    /// Sends them back to where they came from, through the gate: what was rejected is forgotten first, and what was handled
    /// meanwhile is left.
    Redrive(Choice),
    /// Gives them up. On RabbitMQ they are gone; on Kafka they stay, and the audit says that nothing is to be done about them.
    Drop(Choice),
}

/// Which letters, and how.
#[derive(Args)]
pub(crate) struct Choice {
    #[command(flatten)]
    filter: Filter,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    doing: Doing,
    #[command(flatten)]
    looking: Looking,
}

pub(crate) async fn run(context: &Context, command: DeadLettersCommand) -> Result<(), Failure> {
    match command {
        DeadLettersCommand::List(list) => look::list(context, Shelf::DeadLetters, list).await,
        DeadLettersCommand::Show(show) => look::show(context, Shelf::DeadLetters, show).await,
        DeadLettersCommand::Redrive(choice) => each(context, choice, What::Redrive).await,
        DeadLettersCommand::Drop(choice) => each(context, choice, What::Drop).await,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Redrive,
    Drop,
}

async fn each(context: &Context, choice: Choice, what: What) -> Result<(), Failure> {
    let Choice { filter, pace, doing, looking } = choice;
    if !filter.chooses() && !pace.all {
        return Err(Failure::usage("say which: --id, --reason, --older-than or --younger-than; or --all"));
    }
    let filter = filter.checked(context)?;
    let desk = Desk { context, audit: Audit::of(context)?, markers: store(context)?, why: doing.why.as_deref() };
    let (mut report, mut stopped, mut turns) = (Report::default(), None, pace.turns());
    let verb = if what == What::Redrive { "redriven" } else { "dropped" };
    for broker in Broker::configured(context, filter.broker)? {
        let mut reader = look::open(context, broker, Shelf::DeadLetters, looking.counts()).await?;
        let bar = look::bar(&reader, verb);
        let passed = async {
            while let Some(letter) = reader.next().await? {
                bar.inc(1);
                if !filter.takes_waiting(&letter) {
                    continue;
                }
                if report.is_full(&pace) {
                    break;
                }
                turns.next().await;
                let said = match (what, doing.yes) {
                    (What::Redrive, _) => desk.redrive(&mut reader, &letter, doing.yes).await,
                    (What::Drop, true) => desk.drop(&reader, &letter).await,
                    (What::Drop, false) => Ok("would be dropped".to_owned()),
                };
                report.note(&letter, said)?;
            }
            Ok(())
        };
        stopped = passed.await.err();
        closing(reader, bar).await;
        if stopped.is_some() {
            break;
        }
    }
    report.finish(context, &doing, verb, stopped)
}

/// Without a store nothing is looked at: the gate itself still keeps what was handled from being handled again.
fn store(context: &Context) -> Result<Option<Markers>, Failure> {
    context.config.place()?.map(|_| Markers::of(&context.config)).transpose()
}

/// Where letters are dealt with.
struct Desk<'a> {
    context: &'a Context,
    audit: Audit,
    markers: Option<Markers>,
    why: Option<&'a str>,
}

impl Desk<'_> {
    /// Looks at the marker; then, if it is to be done, frees it, publishes a copy with confirmation, writes that down, and
    /// takes the letter out, in this order. A crash anywhere leaves the letter, or a copy more, which passes the gate.
    ///
    /// # Errors
    /// The letter is left where it is.
    async fn redrive(&self, reader: &mut Reader, letter: &Letter, does: bool) -> Result<String, Failure> {
        kafka::is_whole(letter)?;
        let subject = self.subject(letter).await?;
        if let Some(subject) = &subject {
            may_run(subject, letter, self.context)?;
        }
        let target = reader.target().to_owned();
        let forgets = subject.as_ref().filter(|subject| subject.state() == State::Rejected);
        if !does {
            return Ok(match forgets {
                Some(_) => format!("would be freed, and sent to {target}"),
                None => format!("would be sent to {target}"),
            });
        }
        let before = subject.as_ref().map_or_else(|| "set aside".to_owned(), |subject| format!("set aside, {}", subject.in_words()));
        let act = self.act("dead-letters redrive", letter, before, format!("sent to {target}"));
        let begun = self.audit.begin(act, self.why).await?;
        let sent = async {
            if let Some(subject) = forgets {
                subject.ask(Ask::Forget { seen: subject.standing.marker }).await?;
            }
            reader.publish(letter).await
        };
        if let Err(failure) = sent.await {
            self.audit.not_done(begun, &failure.to_string()).await?;
            return Err(failure);
        }
        self.audit.done(begun).await?;
        reader.take_out(letter).await?;
        Ok(format!("sent to {target}"))
    }

    async fn drop(&self, reader: &Reader, letter: &Letter) -> Result<String, Failure> {
        let before = match self.subject(letter).await? {
            Some(subject) => format!("set aside, {}", subject.in_words()),
            None => "set aside".to_owned(),
        };
        let begun = self.audit.begin(self.act("dead-letters drop", letter, before, "dropped".into()), self.why).await?;
        if let Err(failure) = reader.take_out(letter).await {
            self.audit.not_done(begun, &failure.to_string()).await?;
            return Err(failure);
        }
        self.audit.done(begun).await?;
        Ok("dropped".into())
    }

    fn act(&self, what: &'static str, letter: &Letter, before: String, after: String) -> Act {
        Act { what, id: letter.id().map(str::to_owned), place: Some(letter.place.clone()), before, after }
    }

    async fn subject(&self, letter: &Letter) -> Result<Option<Subject<'_>>, Failure> {
        let (Some(markers), Some(id)) = (&self.markers, letter.id()) else { return Ok(None) };
        // What somebody else wrote into the header may be anything.
        let Ok(id) = config::id(&self.context.config, id) else { return Ok(None) };
        Subject::look(self.context, markers, id).await.map(Some)
    }
}

/// Whether a copy would be handled, rather than vanish as a duplicate or come back.
fn may_run(subject: &Subject<'_>, letter: &Letter, context: &Context) -> Result<(), Failure> {
    let left = |why: &str| Err(Failure::not_all(format!("left: {why}")));
    let is_conflict = letter.reason() == "conflict";
    match subject.state() {
        State::Done if is_conflict => left("its id was handled with another body; give it an id of its own, or drop it"),
        State::Done => left("its id was handled meanwhile, so a copy would be a duplicate; drop it"),
        State::Rejected if is_conflict => left("its id belongs to another body, which was rejected: deal with that one first"),
        State::InDoubt => left("nobody knows whether its id happened: `oncegate in-doubt resolve` first"),
        State::InProgress => left("its id is being handled at this moment: try again later"),
        State::Lapsed if context.config.guarantee() == oncegate::Guarantee::AtMostOnce => {
            left("its id was left by its holder, and its next delivery will be in doubt")
        }
        State::Rejected | State::Absent | State::Cleared | State::Lapsed | State::Unreadable => Ok(()),
    }
}
