//! `oncegate in-doubt`: messages of which nobody knows whether they happened, until a person says so.

use clap::{Args, Subcommand};
use oncegate::marker::{Ask, Finding};

use crate::Context;
use crate::audit::{Act, Audit};
use crate::config;
use crate::failure::Failure;
use crate::letters::act::{Doing, Report, closing};
use crate::letters::filter::Filter;
use crate::letters::look::{self, List, Looking, Show};
use crate::letters::{Broker, Letter, Reader, Shelf, State as LetterState, kafka};
use crate::marker::change::Subject;
use crate::marker::told::{State, is_being_reconciled};
use crate::markers::Markers;

#[derive(Subcommand)]
pub(crate) enum InDoubtCommand {
    /// Lists what waits there.
    List(List),
    /// Shows all that stands there under an id, with its headers.
    Show(Show),
    /// Says what you found out about an id. What happened is recorded as done; what did not is sent back, to be handled.
    Resolve(Resolve),
}

#[derive(Args)]
pub(crate) struct Resolve {
    /// As the producer wrote it, or as it stands in keys and logs.
    id: String,
    #[command(flatten)]
    found: Found,
    /// The broker to look at, where both are configured.
    #[arg(long)]
    broker: Option<Broker>,
    #[command(flatten)]
    doing: Doing,
    #[command(flatten)]
    looking: Looking,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Found {
    /// The effect happened.
    #[arg(long)]
    happened: bool,
    /// It did not, and nothing still can: no request of an earlier attempt is under way any more.
    #[arg(long)]
    did_not_happen: bool,
}

pub(crate) async fn run(context: &Context, command: InDoubtCommand) -> Result<(), Failure> {
    match command {
        InDoubtCommand::List(list) => look::list(context, Shelf::InDoubt, list).await,
        InDoubtCommand::Show(show) => look::show(context, Shelf::InDoubt, show).await,
        InDoubtCommand::Resolve(resolve) => self::resolve(context, resolve).await,
    }
}

async fn resolve(context: &Context, resolve: Resolve) -> Result<(), Failure> {
    let finding = if resolve.found.happened { Finding::Happened } else { Finding::DidNotHappen };
    let (markers, id) = (Markers::of(&context.config)?, config::id(&context.config, &resolve.id)?);
    let filter = Filter::of_id(context, id.as_str(), resolve.broker)?;
    let brokers = Broker::configured(context, resolve.broker)?;
    let subject = Subject::look(context, &markers, id).await?;
    let ask = ask(&subject, finding)?;
    let audit = Audit::of(context)?;
    let after = match finding {
        Finding::Happened => "done, as an operator found out",
        Finding::DidNotHappen => "free to be claimed, as an operator found out",
    };
    if resolve.doing.yes
        && let Some(ask) = ask
    {
        let act = Act {
            what: "in-doubt resolve",
            id: Some(subject.id.to_string()),
            place: None,
            before: subject.in_words(),
            after: after.to_owned(),
        };
        let begun = audit.begin(act, resolve.doing.why.as_deref()).await?;
        if let Err(failure) = subject.ask(ask).await {
            if failure.code == crate::failure::Code::NotAll {
                audit.not_done(begun, &failure.to_string()).await?;
            }
            return Err(failure);
        }
        audit.done(begun).await?;
    }
    let mut report = Report::default();
    let mut stopped = None;
    for broker in brokers {
        let mut reader = look::open(context, broker, Shelf::InDoubt, resolve.looking.counts()).await?;
        let bar = look::bar(&reader, "looked at");
        let passed = async {
            while let Some(letter) = reader.next().await? {
                bar.inc(1);
                if letter.state != LetterState::Waiting || !filter.takes(&letter) {
                    continue;
                }
                let said = if resolve.doing.yes {
                    settle(&audit, &mut reader, &letter, finding, resolve.doing.why.as_deref()).await
                } else {
                    Ok(would(&subject, finding, &reader))
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
    if report.seen() == 0 && stopped.is_none() {
        let told = match (ask, resolve.doing.yes) {
            (Some(_), true) => format!("{}: was {}, is {after}", subject.id, subject.in_words()),
            (Some(_), false) => format!("{}: is {}, would be {after}", subject.id, subject.in_words()),
            (None, _) => format!("{}: is {}", subject.id, subject.in_words()),
        };
        let more = "no message with this id waits in the in-doubt destination";
        return match (ask, finding) {
            // The marker alone was in doubt: there is no copy to send, and the producer may send it again.
            (Some(_), _) => {
                let machines = serde_json::json!({ "did": resolve.doing.yes, "id": subject.id.to_string(), "before": subject.in_words(), "after": after, "letters": [] });
                context.format.print(&machines, format!("{told}; {more}"))?;
                if resolve.doing.yes || resolve.doing.dry_run { Ok(()) } else { Err(Failure::not_confirmed()) }
            }
            (None, _) => Err(Failure::not_all(format!("{told}; {more}"))),
        };
    }
    report.finish(context, &resolve.doing, "resolved", stopped)
}

/// What to ask of the store first; nothing, where the marker says it already.
fn ask(subject: &Subject<'_>, finding: Finding) -> Result<Option<Ask>, Failure> {
    let id = &subject.id;
    let refused = |why: &str| Err(Failure::not_all(format!("{id} is {}: {why}", subject.in_words())));
    match (subject.state(), finding) {
        (State::InDoubt, _) if is_being_reconciled(&subject.standing) => refused("somebody is finding out at this moment; try again later"),
        (State::InDoubt, finding) => Ok(Some(Ask::Resolve(finding))),
        (State::Done, Finding::Happened) => Ok(None),
        (State::Done, Finding::DidNotHappen) => refused("it was handled, or somebody has said so; `oncegate explain` tells more"),
        // The doubt has ended in the meantime; the letters are still there.
        (State::Absent | State::Cleared, Finding::Happened) => Ok(Some(Ask::Complete)),
        (State::Absent | State::Cleared, Finding::DidNotHappen) => Ok(None),
        (State::Rejected, _) => refused("it stands in the dead letters, and nothing happened"),
        (State::InProgress | State::Lapsed, _) => refused("somebody is handling it; let that end first"),
        (State::Unreadable, _) => refused("its marker cannot be read"),
    }
}

fn would(subject: &Subject<'_>, finding: Finding, reader: &Reader) -> String {
    let is = subject.in_words();
    match finding {
        Finding::Happened => format!("{is}; would be recorded as done, and taken out"),
        Finding::DidNotHappen => format!("{is}; would be freed, sent to {}, and taken out", reader.target()),
    }
}

/// A copy stands, confirmed, before the letter is taken out.
async fn settle(audit: &Audit, reader: &mut Reader, letter: &Letter, finding: Finding, why: Option<&str>) -> Result<String, Failure> {
    let after = match finding {
        Finding::Happened => "taken out, since it happened".to_owned(),
        Finding::DidNotHappen => format!("sent to {}, since it did not happen", reader.target()),
    };
    if finding == Finding::DidNotHappen {
        kafka::is_whole(letter)?;
    }
    let (id, place) = (letter.id().map(str::to_owned), Some(letter.place.clone()));
    let begun = audit.begin(Act { what: "in-doubt resolve", id, place, before: "set aside".into(), after: after.clone() }, why).await?;
    if finding == Finding::DidNotHappen
        && let Err(failure) = reader.publish(letter).await
    {
        audit.not_done(begun, &failure.to_string()).await?;
        return Err(failure);
    }
    audit.done(begun).await?;
    reader.take_out(letter).await?;
    Ok(after)
}
