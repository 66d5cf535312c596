//! `oncegate in-doubt`: messages of which nobody knows whether they happened, until a person says
//! so.

use std::collections::HashMap;

use clap::{Args, Subcommand};
use oncegate::marker::{Ask, Effect, Finding};
use serde_json::{Value, json};

use crate::Context;
use crate::audit::{Act, Audit};
use crate::config;
use crate::failure::{Code, Failure};
use crate::letters::act::{Acting, Doing, Report, Stop, closing, publish, take_out};
use crate::letters::judge::{self, Accepts};
use crate::letters::look::{self, List, Looking, Show};
use crate::letters::{Begins, Broker, Letter, Reader, Shelf};
use crate::marker::change::Subject;
use crate::marker::told::{self, State, is_being_reconciled};
use crate::markers::Markers;
use crate::say::NotLookedAt;

#[derive(Subcommand)]
pub(crate) enum InDoubtCommand {
    /// Lists what waits there.
    List(List),
    /// Shows all that stands there under an id, with its headers.
    Show(Show),
    /// Says what you found out about one or more ids. What happened is recorded as done; what did
    /// not is sent back, to be handled.
    Resolve(Resolve),
}

#[derive(Args)]
pub(crate) struct Resolve {
    /// As the producer wrote them, or as they are in keys and logs.
    #[arg(required = true)]
    ids: Vec<String>,
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

const ACT: Acting = Acting {
    name: "in-doubt resolve",
    verb: "resolved",
};

async fn resolve(context: &Context, resolve: Resolve) -> Result<(), Failure> {
    let finding = if resolve.found.happened {
        Finding::Happened
    } else {
        Finding::DidNotHappen
    };
    let mut not_looked_at = NotLookedAt::default();
    let brokers = Broker::wanted(context, resolve.broker, &mut not_looked_at)?;
    let (audit, doing) = (Audit::of(context)?, &resolve.doing);
    let mut desk = Desk {
        context,
        audit,
        finding,
        accepts: resolve.accepts,
        why: doing.why.as_deref(),
        cases: HashMap::new(),
    };
    desk.look(&resolve.ids).await?;
    let (mut report, mut stopped, mut stop) = (Report::default(), None, Stop::watch());
    for broker in brokers {
        let opened = look::open(
            context,
            broker,
            Shelf::InDoubt,
            resolve.looking.counts(context),
        );
        let mut reader = match stop.or(opened).await {
            Ok(reader) => reader,
            // What was done on another broker is told all the same.
            Err(failure) => {
                stopped = Some(failure);
                break;
            }
        };
        let bar = look::bar(&reader, "looked at");
        let passed = async {
            while let Some(letter) = stop.or(reader.next()).await? {
                bar.inc(1);
                if letter.state.waits() && letter.id().is_some_and(|id| desk.cases.contains_key(id))
                {
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
    if stopped.is_none() {
        stopped = desk
            .settle_markers_alone(&mut report, doing.yes)
            .await
            .err();
    }
    for id in &resolve.ids {
        if let Some(case) = desk.cases.get(config::id(&context.config, id)?.as_str()) {
            report.note_marker(desk.marker(case, doing.yes));
        }
    }
    report.finish(context, doing, ACT, stopped)?;
    not_looked_at.end()
}

/// What a person found out about ids.
struct Desk<'a> {
    context: &'a Context,
    audit: Audit,
    finding: Finding,
    accepts: Accepts,
    why: Option<&'a str>,
    /// By id.
    cases: HashMap<String, Case<'a>>,
}

/// One id.
struct Case<'a> {
    subject: Subject<'a>,
    recorded: Recorded,
    /// How many of its letters were dealt with.
    letters: usize,
}

/// Whether the marker says what was found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recorded {
    /// It is recorded before the first letter is dealt with.
    NotYet,
    Now,
    /// It said so before.
    Before,
}

impl<'a> Desk<'a> {
    /// Looks at the markers, and whether they may become what was found out.
    async fn look(&mut self, ids: &[String]) -> Result<(), Failure> {
        let markers = Markers::of(&self.context.config)?;
        for id in ids {
            let id = config::id(&self.context.config, id)?;
            let subject = Subject::look(self.context, &markers, id.clone()).await?;
            let recorded = may_be_recorded(&subject, self.finding)?;
            self.cases.insert(
                id.to_string(),
                Case {
                    subject,
                    recorded,
                    letters: 0,
                },
            );
        }
        Ok(())
    }

    fn after(&self) -> String {
        let window = config::window_told(&self.context.config);
        match self.finding {
            Finding::Happened => format!("done for {window}, as an operator found out"),
            Finding::DidNotHappen => {
                format!("free to be claimed for {window}, as an operator found out")
            }
        }
    }

    fn marker(&self, case: &Case<'_>, did: bool) -> Value {
        let before = case.subject.in_words();
        let changes = case.recorded == Recorded::Now || (!did && case.recorded == Recorded::NotYet);
        let after = if changes {
            self.after()
        } else {
            before.clone()
        };
        json!({ "id": case.subject.id.to_string(), "before": before, "after": after })
    }

    /// Looks again right before anything is done about an id: others may have acted since all were
    /// looked at.
    async fn look_again(&mut self, id: &str) -> Result<(), Failure> {
        let Some(case) = self
            .cases
            .get_mut(id)
            .filter(|case| case.recorded == Recorded::NotYet)
        else {
            return Ok(());
        };
        let subject =
            Subject::look(self.context, &case.subject.markers, case.subject.id.clone()).await?;
        (case.recorded, case.subject) = (may_be_recorded(&subject, self.finding)?, subject);
        Ok(())
    }

    /// Records what was found out about an id, once.
    async fn settle_marker(&mut self, id: &str, fence: u32) -> Result<(), Failure> {
        let after = self.after();
        let Some(case) = self
            .cases
            .get_mut(id)
            .filter(|case| case.recorded == Recorded::NotYet)
        else {
            return Ok(());
        };
        let (subject, seen) = (&case.subject, case.subject.standing.marker);
        let ask = match (self.finding, subject.state()) {
            (Finding::Happened, State::InDoubt) => Ask::Resolve(Finding::Happened),
            (Finding::Happened, _) => Ask::Complete,
            (Finding::DidNotHappen, _) => Ask::SendBack {
                seen,
                effect: Effect::Nothing,
            },
        };
        let attempt = Some(told::attempt(&seen).unwrap_or(0).max(fence));
        let act = Act {
            what: ACT.name,
            id: Some(id.to_owned()),
            place: None,
            before: subject.in_words(),
            after,
            attempt,
        };
        let begun = self.audit.begin(act, self.why).await?;
        if let Err(failure) = subject.ask(ask, fence).await {
            self.audit.failed(begun, &failure).await?;
            return Err(failure);
        }
        case.recorded = Recorded::Now;
        self.audit.done(begun).await
    }

    /// A copy stands, confirmed, before the letter is taken out.
    async fn settle(
        &mut self,
        reader: &mut Reader,
        letter: &Letter,
        does: bool,
    ) -> Result<String, Failure> {
        let another = || Failure::not_all("left: another id");
        let id = letter.id().ok_or_else(another)?;
        self.cases.get_mut(id).ok_or_else(another)?.letters += 1;
        judge::is_ours(letter, reader.target())?;
        if does {
            self.look_again(id).await?;
        }
        let case = self.cases.get(id).ok_or_else(another)?;
        let (is, recorded) = (case.subject.in_words(), case.recorded);
        if self.finding == Finding::DidNotHappen {
            judge::is_whole(letter, self.accepts)?;
            may_be_sent(&case.subject, letter, self.accepts, self.context)?;
        }
        let (would, after) = match self.finding {
            Finding::Happened if recorded == Recorded::NotYet => (
                format!("would be recorded as {}, and taken out", self.after()),
                "taken out, since it happened".to_owned(),
            ),
            Finding::Happened => (
                "would be taken out".into(),
                "taken out, since it happened".to_owned(),
            ),
            Finding::DidNotHappen => {
                let target = reader.target();
                (
                    format!("would be freed, sent to {target}, and taken out"),
                    format!("sent to {target}, since it did not happen"),
                )
            }
        };
        if !does {
            return Ok(format!("{is}; {would}"));
        }
        self.settle_marker(id, letter.fence()).await?;
        let place = Some(letter.place.clone());
        let act = Act {
            what: ACT.name,
            id: Some(id.to_owned()),
            place,
            before: "set aside".into(),
            after: after.clone(),
            attempt: None,
        };
        let begun = self.audit.begin(act, self.why).await?;
        match self.finding {
            Finding::DidNotHappen => {
                publish(&self.audit, begun, reader, letter, Begins::Afresh).await?
            }
            Finding::Happened => take_out(&self.audit, begun, reader, letter).await?,
        }
        Ok(after)
    }

    /// Of an id without a letter the marker alone may be in doubt: there is no copy to send, and
    /// the producer may send it again.
    async fn settle_markers_alone(
        &mut self,
        report: &mut Report,
        does: bool,
    ) -> Result<(), Failure> {
        let alone: Vec<String> = self
            .cases
            .iter()
            .filter(|(_, case)| case.letters == 0)
            .map(|(id, _)| id.clone())
            .collect();
        for id in alone {
            if does && let Err(failure) = self.look_again(&id).await {
                match failure.code {
                    Code::NotAll => report.note_left(&id, failure.to_string()),
                    _ => return Err(failure),
                }
                continue;
            }
            let Some(case) = self.cases.get(&id) else {
                continue;
            };
            let (before, state) = (case.subject.in_words(), case.subject.state());
            if state != State::InDoubt {
                report.note_left(
                    &id,
                    format!(
                        "{id} is {before}, and no message with this id waits in the in-doubt destination. Check how the \
                     id is written, or mark it done with `oncegate marker complete`"
                    ),
                );
                continue;
            }
            let (was, is) = if does {
                ("was", "is")
            } else {
                ("is", "would be")
            };
            let says = format!(
                "{id}: {was} {before}, {is} {}; no message with this id is in the in-doubt destination",
                self.after()
            );
            if does && let Err(failure) = self.settle_marker(&id, 0).await {
                match failure.code {
                    Code::NotAll => report.note_left(&id, failure.to_string()),
                    _ => return Err(failure),
                }
                continue;
            }
            report.note_done(&id, says);
        }
        Ok(())
    }
}

/// The doubt of which a person speaks has to be this one: what is absent may have been freed, and
/// handled since.
fn may_be_sent(
    subject: &Subject<'_>,
    letter: &Letter,
    accepts: Accepts,
    context: &Context,
) -> Result<(), Failure> {
    let state = if subject.state() == State::InDoubt {
        State::Rejected
    } else {
        subject.state()
    };
    match judge::judge(letter, state, true, accepts, context)?.begins {
        Begins::Afresh => Ok(()),
        // It would be doubted again.
        Begins::Aged(_) => Err(Failure::not_all(format!(
            "left: its id is not in doubt any more, and may have been freed and handled longer ago than the window of {}; find out, and say \
             --happened, or --accept-forgotten",
            config::window_told(&context.config)
        ))),
    }
}

/// Whether the marker has to be changed first.
///
/// # Errors
/// It may not be.
fn may_be_recorded(subject: &Subject<'_>, finding: Finding) -> Result<Recorded, Failure> {
    let id = &subject.id;
    let refused = |why: &str| {
        Err(Failure::not_all(format!(
            "{id} is {}: {why}",
            subject.in_words()
        )))
    };
    match (subject.state(), finding) {
        (State::InDoubt, _) if is_being_reconciled(&subject.standing) => {
            refused("somebody is finding out at this moment; try again later")
        }
        (State::Done, Finding::Happened) => Ok(Recorded::Before),
        (State::Done, Finding::DidNotHappen) => {
            refused("it was handled, or somebody has said so; `oncegate explain` tells more")
        }
        // Where the doubt has ended in the meantime, the letters are still there.
        (State::InDoubt | State::Absent | State::Cleared, _) => Ok(Recorded::NotYet),
        (State::Rejected, _) => refused("it stands in the dead letters, and nothing happened"),
        (State::InProgress, _) => refused("somebody is handling it; let that end first"),
        (State::Lapsed, _) => refused(
            "its holder is gone, and its next delivery finds it in doubt; where none comes, redrive its dead letter",
        ),
        (State::Unreadable, _) => refused("its marker cannot be read"),
    }
}
