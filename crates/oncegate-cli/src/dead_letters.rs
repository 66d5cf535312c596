//! `oncegate dead-letters`: what was set aside, and how it gets on.

use clap::{Args, Subcommand};
use oncegate::Guarantee;
use oncegate::marker::{Ask, Effect, Hold, Marker, UNKNOWN_ATTEMPT};

use crate::Context;
use crate::audit::{Act, Audit};
use crate::config;
use crate::failure::Failure;
use crate::letters::act::{Acting, Doing, Pace, Report, Stop, Turns, closing, publish};
use crate::letters::filter::{Filter, Meant};
use crate::letters::judge::{self, Accepts, Copy};
use crate::letters::look::{self, List, Looking, Show};
use crate::letters::{Begins, Broker, Letter, Reader, Shelf};
use crate::marker::change::Subject;
use crate::marker::told;
use crate::markers::Markers;
use crate::say::NotLookedAt;

#[derive(Subcommand)]
pub(crate) enum DeadLettersCommand {
    /// Lists what waits there.
    List(List),
    /// Shows all that stands there under an id, with its headers.
    Show(Show),
    /// Sends them back to where they came from, through the gate, to be run whatever they failed of
    /// before. What was handled meanwhile is left, and so is what may have been.
    Redrive(Redrive),
    /// Gives them up. On RabbitMQ they are gone; on Kafka they stay, and the audit says that
    /// nothing is to be done about them.
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
        DeadLettersCommand::Redrive(Redrive { choice, accepts }) => {
            each(context, choice, What::Redrive(accepts)).await
        }
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
            Self::Redrive(_) => Acting {
                name: "dead-letters redrive",
                verb: "redriven",
            },
            Self::Drop => Acting {
                name: "dead-letters drop",
                verb: "dropped",
            },
        }
    }
}

async fn each(context: &Context, choice: Choice, what: What) -> Result<(), Failure> {
    let Choice {
        filter,
        pace,
        doing,
        looking,
    } = choice;
    if !filter.chooses() && !pace.all {
        return Err(Failure::usage(
            "say which: --id, --reason, --older-than or --younger-than; or --all",
        ));
    }
    let filter = filter.checked(context)?;
    let (named, why) = (filter.id.is_some(), doing.why.as_deref());
    let desk = Desk {
        context,
        audit: Audit::of(context)?,
        markers: store(context)?,
        named,
        why,
    };
    let (mut report, mut stopped, mut turns, mut stop) =
        (Report::default(), None, pace.turns(&doing), Stop::watch());
    let mut not_looked_at = NotLookedAt::default();
    for broker in Broker::wanted(context, filter.broker, &mut not_looked_at)? {
        let opened = look::open(context, broker, Shelf::DeadLetters, looking.counts(context));
        let mut reader = match stop.or(opened).await {
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
                && let Some(letter) = stop.or(reader.next()).await?
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
                    What::Redrive(accepts) => {
                        desk.redrive(&mut reader, &letter, accepts, &mut turns, doing.yes)
                            .await
                    }
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
    report.finish(context, &doing, what.acting(), stopped)?;
    not_looked_at.end()
}

/// Without a store nothing is looked at: the gate itself still keeps what was handled from being
/// handled again, and what it may keep from running is left.
fn store(context: &Context) -> Result<Option<Markers>, Failure> {
    context
        .config
        .place()?
        .map(|_| Markers::of(&context.config))
        .transpose()
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
    /// Looks at the marker; then, if it is to be done, sends it back, publishes a copy with
    /// confirmation, writes that down, and takes the letter out, in this order. A crash anywhere
    /// leaves the letter, or a copy more, which passes the gate.
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
        if self.markers.is_none() {
            judge::runs_without_a_look(letter)?;
        }
        let subject = self.subject(letter).await?;
        let Copy { begins, word } =
            judge::copy(letter, subject.as_ref(), self.named, accepts, self.context)?;
        let after = sent(reader.target(), begins, self.context);
        let frees = subject
            .as_ref()
            .and_then(|subject| Some((subject, send_back(subject, word, letter, self.context)?)));
        if !does {
            let freed = if frees.is_some() { "freed, and " } else { "" };
            return Ok(format!("would be {freed}{after}"));
        }
        turns.next().await;
        let before = subject.as_ref().map_or_else(
            || "set aside".to_owned(),
            |subject| format!("set aside, {}", subject.in_words()),
        );
        let fence = subject
            .as_ref()
            .and_then(|subject| told::attempt(&subject.standing.marker))
            .unwrap_or(0)
            .max(known(letter));
        let act = Act {
            attempt: Some(fence),
            ..self.act("dead-letters redrive", letter, before, after.clone())
        };
        let begun = self.audit.begin(act, self.why).await?;
        if let Some((subject, ask)) = frees
            && let Err(failure) = subject.ask(ask, known(letter)).await
        {
            self.audit.failed(begun, &failure).await?;
            return Err(failure);
        }
        publish(&self.audit, begun, reader, letter, begins).await?;
        Ok(after)
    }

    async fn drop(
        &self,
        reader: &Reader,
        letter: &Letter,
        turns: &mut Turns,
        does: bool,
    ) -> Result<String, Failure> {
        judge::is_ours(letter, reader.target())?;
        if !does {
            return Ok("would be dropped".into());
        }
        turns.next().await;
        let before = match self.subject(letter).await? {
            Some(subject) => format!("set aside, {}", subject.in_words()),
            None => "set aside".to_owned(),
        };
        let begun = self
            .audit
            .begin(
                self.act("dead-letters drop", letter, before, "dropped".into()),
                self.why,
            )
            .await?;
        if let Err(failure) = reader.take_out(letter).await {
            self.audit.unknown(begun, &failure).await;
            return Err(failure);
        }
        self.audit.done(begun).await?;
        Ok("dropped".into())
    }

    fn act(&self, what: &'static str, letter: &Letter, before: String, after: String) -> Act {
        Act {
            what,
            id: letter.id().map(str::to_owned),
            place: Some(letter.place.clone()),
            before,
            after,
            attempt: None,
        }
    }

    async fn subject(&self, letter: &Letter) -> Result<Option<Subject<'_>>, Failure> {
        let (Some(markers), Some(id)) = (&self.markers, letter.id()) else {
            return Ok(None);
        };
        // What somebody else wrote into the header may be anything.
        let Ok(id) = config::id(&self.context.config, id) else {
            return Ok(None);
        };
        Subject::look(self.context, markers, id)
            .await
            .map(Some)
            .map_err(Failure::of_one_letter)
    }
}

/// What is asked of the store before a copy is published, so that it is run whatever its id was
/// rejected for before. `None` where nothing is known of the id that would keep it from running, or
/// where the gate has to find it in doubt first.
fn send_back(
    subject: &Subject<'_>,
    word: Effect,
    letter: &Letter,
    context: &Context,
) -> Option<Ask> {
    let seen = subject.standing.marker;
    let doubted =
        |hold: &Hold| [hold.guarantee, context.config.guarantee()].contains(&Guarantee::AtMostOnce);
    match seen {
        Marker::Absent if known(letter) == 0 && word == Effect::Nothing => None,
        Marker::InProgress(hold) if doubted(&hold) => None,
        _ => Some(Ask::SendBack { seen, effect: word }),
    }
}

/// How far the attempts of its id had come when it was dead-lettered. Of an id that was used for
/// another body nobody knows.
fn known(letter: &Letter) -> u32 {
    if letter.fence() == 0 && letter.reason() == "conflict" {
        UNKNOWN_ATTEMPT
    } else {
        letter.fence()
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
