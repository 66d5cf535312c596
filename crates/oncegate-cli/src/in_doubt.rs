//! `oncegate in-doubt`: messages of which nobody knows whether they happened, until a person says so.

use clap::{Args, Subcommand};
use oncegate::marker::{Ask, Finding};
use serde_json::{Value, json};

use crate::Context;
use crate::audit::{Act, Audit};
use crate::config;
use crate::failure::Failure;
use crate::letters::act::{Acting, Doing, Report, closing, send_back, take_out};
use crate::letters::filter::Filter;
use crate::letters::judge::{self, Accepts};
use crate::letters::look::{self, List, Looking, Show, Why};
use crate::letters::{Begins, Broker, Letter, Reader, Shelf};
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
    accepts: Accepts,
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

const ACT: Acting = Acting { name: "in-doubt resolve", verb: "resolved" };

async fn resolve(context: &Context, resolve: Resolve) -> Result<(), Failure> {
    let finding = if resolve.found.happened { Finding::Happened } else { Finding::DidNotHappen };
    let (markers, id) = (Markers::of(&context.config)?, config::id(&context.config, &resolve.id)?);
    let filter = Filter::of_id(context, id.as_str(), resolve.broker)?;
    let brokers = Broker::configured(context, resolve.broker)?;
    let subject = Subject::look(context, &markers, id).await?;
    let ask = ask(&subject, finding)?;
    let (audit, doing) = (Audit::of(context)?, &resolve.doing);
    let mut desk = Desk { context, audit, subject, ask, finding, accepts: resolve.accepts, why: doing.why.as_deref(), told: None };
    let (mut report, mut stopped) = (Report::default(), None);
    for broker in brokers {
        let mut reader = match look::open(context, broker, Shelf::InDoubt, resolve.looking.counts(context), Why::Acting).await {
            Ok(reader) => reader,
            // What was done on another broker is told all the same.
            Err(failure) => {
                stopped = Some(failure);
                break;
            }
        };
        let bar = look::bar(&reader, "looked at");
        let passed = async {
            while let Some(letter) = reader.next().await? {
                bar.inc(1);
                if letter.state.waits() && filter.takes(&letter) {
                    report.note(&letter, desk.settle(&mut reader, &letter, doing.yes).await)?;
                }
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
        // The marker alone is in doubt: there is no copy to send, and the producer may send it again.
        if desk.subject.state() != State::InDoubt {
            return Err(Failure::not_all(format!(
                "{} is {}, and no message with this id waits in the in-doubt destination. Is it written as its producer writes it? \
                 `oncegate marker complete` records an id of which nothing is known",
                desk.subject.id,
                desk.subject.in_words()
            )));
        }
        if doing.yes {
            desk.settle_marker().await?;
        }
        report.note_marker(desk.marker(doing.yes));
        return report.finish_with(context, doing, ACT, &format!("{}; no message with this id waits there.", desk.in_words(doing.yes)));
    }
    report.note_marker(desk.marker(doing.yes));
    report.finish(context, doing, ACT, stopped)
}

/// One id, and what a person found out about it.
struct Desk<'a> {
    context: &'a Context,
    audit: Audit,
    subject: Subject<'a>,
    /// What is asked of the store, before the first letter is dealt with.
    ask: Option<Ask>,
    finding: Finding,
    accepts: Accepts,
    why: Option<&'a str>,
    /// What became of the marker, once it was asked for.
    told: Option<String>,
}

impl Desk<'_> {
    fn after(&self) -> String {
        let window = config::window_told(&self.context.config);
        match self.finding {
            Finding::Happened => format!("done for {window}, as an operator found out"),
            Finding::DidNotHappen => format!("free to be claimed for {window}, as an operator found out"),
        }
    }

    fn marker(&self, did: bool) -> Value {
        let before = self.subject.in_words();
        let after = if self.told.is_some() || (!did && self.ask.is_some()) { self.after() } else { before.clone() };
        json!({ "id": self.subject.id.to_string(), "before": before, "after": after })
    }

    fn in_words(&self, did: bool) -> String {
        let (was, is) = if did { ("was", "is") } else { ("is", "would be") };
        format!("{}: {was} {}, {is} {}", self.subject.id, self.subject.in_words(), self.after())
    }

    /// Records what was found out, once.
    async fn settle_marker(&mut self) -> Result<(), Failure> {
        let Some(ask) = self.ask.take() else { return Ok(()) };
        let (id, before, after) = (Some(self.subject.id.to_string()), self.subject.in_words(), self.after());
        let begun = self.audit.begin(Act { what: ACT.name, id, place: None, before, after: after.clone() }, self.why).await?;
        if let Err(failure) = self.subject.ask(ask).await {
            self.audit.failed(begun, &failure).await?;
            // Whatever went wrong, no letter of this id can be dealt with.
            return Err(Failure::server(failure.to_string()));
        }
        self.told = Some(after);
        self.audit.done(begun).await
    }

    /// A copy stands, confirmed, before the letter is taken out.
    async fn settle(&mut self, reader: &mut Reader, letter: &Letter, does: bool) -> Result<String, Failure> {
        judge::is_ours(letter, reader.target())?;
        let is = self.subject.in_words();
        if self.finding == Finding::DidNotHappen {
            judge::is_whole(letter, self.accepts)?;
            self.may_be_sent(letter)?;
        }
        let (would, after) = match self.finding {
            Finding::Happened => {
                let recorded = if self.ask.is_some() {
                    format!("would be recorded as {}, and taken out", self.after())
                } else {
                    "would be taken out".into()
                };
                (recorded, "taken out, since it happened".to_owned())
            }
            Finding::DidNotHappen => {
                let target = reader.target();
                (format!("would be freed, sent to {target}, and taken out"), format!("sent to {target}, since it did not happen"))
            }
        };
        if !does {
            return Ok(format!("{is}; {would}"));
        }
        self.settle_marker().await?;
        let (id, place) = (letter.id().map(str::to_owned), Some(letter.place.clone()));
        let act = Act { what: ACT.name, id, place, before: "set aside".into(), after: after.clone() };
        let begun = self.audit.begin(act, self.why).await?;
        match self.finding {
            Finding::DidNotHappen => send_back(&self.audit, begun, reader, letter, Begins::Afresh).await?,
            Finding::Happened => take_out(&self.audit, begun, reader, letter).await?,
        }
        Ok(after)
    }

    /// The doubt of which a person speaks has to be this one: what is absent may have been freed, and handled since.
    fn may_be_sent(&self, letter: &Letter) -> Result<(), Failure> {
        let state = if self.subject.state() == State::InDoubt { State::Cleared } else { self.subject.state() };
        match judge::copy(letter, state, true, self.accepts, self.context)? {
            Begins::Afresh => Ok(()),
            // It would be doubted again.
            Begins::Aged(_) => Err(Failure::not_all(format!(
                "left: its id is not in doubt any more, and may have been freed and handled longer ago than the window of {}; find out, and say \
                 --happened, or --accept-forgotten",
                config::window_told(&self.context.config)
            ))),
        }
    }
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
        (State::InProgress, _) => refused("somebody is handling it; let that end first"),
        (State::Lapsed, _) => {
            refused("its holder is gone, and its next delivery finds it in doubt; where none comes, redrive its dead letter")
        }
        (State::Unreadable, _) => refused("its marker cannot be read"),
    }
}
