//! `oncegate dead-letters`: what was set aside, and how it gets on.

use clap::{Args, Subcommand};
use oncegate::marker::Ask;

use crate::Context;
use crate::audit::{Act, Audit};
use crate::config;
use crate::failure::Failure;
use crate::letters::act::{Acting, Doing, Pace, Report, Turns, closing, send_back};
use crate::letters::filter::{Filter, Meant};
use crate::letters::judge::{self, Accepts};
use crate::letters::look::{self, List, Looking, Show, Why};
use crate::letters::{Begins, Broker, Letter, Reader, Shelf};
use crate::marker::change::Subject;
use crate::marker::told::State;
use crate::markers::Markers;

#[derive(Subcommand)]
pub(crate) enum DeadLettersCommand {
    /// Lists what waits there.
    List(List),
    /// Shows all that stands there under an id, with its headers.
    Show(Show),
    /// Sends them back to where they came from, through the gate: what was rejected is forgotten first. What was handled
    /// meanwhile is left, and so is what may have been.
    Redrive(Redrive),
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

#[derive(Args)]
pub(crate) struct Redrive {
    #[command(flatten)]
    choice: Choice,
    #[command(flatten)]
    accepts: Accepts,
}

pub(crate) async fn run(context: &Context, command: DeadLettersCommand) -> Result<(), Failure> {
    match command {
        DeadLettersCommand::List(list) => look::list(context, Shelf::DeadLetters, list).await,
        DeadLettersCommand::Show(show) => look::show(context, Shelf::DeadLetters, show).await,
        DeadLettersCommand::Redrive(Redrive { choice, accepts }) => each(context, choice, What::Redrive(accepts)).await,
        DeadLettersCommand::Drop(choice) => each(context, choice, What::Drop).await,
    }
}

#[derive(Clone, Copy)]
enum What {
    Redrive(Accepts),
    Drop,
}

impl What {
    fn acting(self) -> Acting {
        match self {
            Self::Redrive(_) => Acting { name: "dead-letters redrive", verb: "redriven" },
            Self::Drop => Acting { name: "dead-letters drop", verb: "dropped" },
        }
    }
}

async fn each(context: &Context, choice: Choice, what: What) -> Result<(), Failure> {
    let Choice { filter, pace, doing, looking } = choice;
    if !filter.chooses() && !pace.all {
        return Err(Failure::usage("say which: --id, --reason, --older-than or --younger-than; or --all"));
    }
    let filter = filter.checked(context)?;
    let (named, why) = (filter.id.is_some(), doing.why.as_deref());
    let desk = Desk { context, audit: Audit::of(context)?, markers: store(context)?, named, why };
    let (mut report, mut stopped, mut turns) = (Report::default(), None, pace.turns(&doing));
    for broker in Broker::configured(context, filter.broker)? {
        let mut reader = match look::open(context, broker, Shelf::DeadLetters, looking.counts(context), Why::Acting).await {
            Ok(reader) => reader,
            // What was done on another broker is told all the same.
            Err(failure) => {
                stopped = Some(failure);
                break;
            }
        };
        let bar = look::bar(&reader, what.acting().verb);
        let passed = async {
            while !report.is_full(&pace)
                && let Some(letter) = reader.next().await?
            {
                bar.inc(1);
                if !letter.state.waits() {
                    continue;
                }
                match filter.judge(&letter) {
                    Meant::Yes => {}
                    Meant::No => continue,
                    Meant::Ageless => {
                        report.note_ageless();
                        continue;
                    }
                }
                let said = match what {
                    What::Redrive(accepts) => desk.redrive(&mut reader, &letter, accepts, &mut turns, doing.yes).await,
                    What::Drop => desk.drop(&reader, &letter, &mut turns, doing.yes).await,
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
    report.finish(context, &doing, what.acting(), stopped)
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
    /// Whether one id was asked for.
    named: bool,
    why: Option<&'a str>,
}

impl Desk<'_> {
    /// Looks at the marker; then, if it is to be done, frees it, publishes a copy with confirmation, writes that down, and
    /// takes the letter out, in this order. A crash anywhere leaves the letter, or a copy more, which passes the gate.
    ///
    /// # Errors
    /// The letter is left where it is.
    async fn redrive(
        &self,
        reader: &mut Reader,
        letter: &Letter,
        accepts: Accepts,
        turns: &mut Turns,
        does: bool,
    ) -> Result<String, Failure> {
        judge::is_ours(letter, reader.target())?;
        judge::is_whole(letter, accepts)?;
        let subject = self.subject(letter).await?;
        let state = subject.as_ref().map_or(State::Absent, Subject::state);
        let begins = judge::copy(letter, state, self.named, accepts, self.context)?;
        let after = sent(reader.target(), begins, self.context);
        let forgets = subject.as_ref().filter(|_| state == State::Rejected);
        if !does {
            let freed = if forgets.is_some() { "freed, and " } else { "" };
            return Ok(format!("would be {freed}{after}"));
        }
        turns.next().await;
        let before = subject.as_ref().map_or_else(|| "set aside".to_owned(), |subject| format!("set aside, {}", subject.in_words()));
        let begun = self.audit.begin(self.act("dead-letters redrive", letter, before, after.clone()), self.why).await?;
        if let Some(subject) = forgets
            && let Err(failure) = subject.ask(Ask::Forget { seen: subject.standing.marker }).await
        {
            self.audit.failed(begun, &failure).await?;
            return Err(failure);
        }
        send_back(&self.audit, begun, reader, letter, begins).await?;
        Ok(after)
    }

    async fn drop(&self, reader: &Reader, letter: &Letter, turns: &mut Turns, does: bool) -> Result<String, Failure> {
        judge::is_ours(letter, reader.target())?;
        if !does {
            return Ok("would be dropped".into());
        }
        turns.next().await;
        let before = match self.subject(letter).await? {
            Some(subject) => format!("set aside, {}", subject.in_words()),
            None => "set aside".to_owned(),
        };
        let begun = self.audit.begin(self.act("dead-letters drop", letter, before, "dropped".into()), self.why).await?;
        if let Err(failure) = reader.take_out(letter).await {
            self.audit.unknown(begun, &failure).await;
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
        Subject::look(self.context, markers, id).await.map(Some).map_err(Failure::of_one_letter)
    }
}

/// What comes of a letter whose copy goes there.
pub(crate) fn sent(target: &str, begins: Begins, context: &Context) -> String {
    match begins {
        Begins::Afresh => format!("sent to {target}"),
        Begins::Aged(_) => format!(
            "sent to {target} with its age, to be reconciled: it may have been handled longer ago than the window of {}",
            config::window_told(&context.config)
        ),
    }
}
