//! What an operator changes of a marker: shown first, written down, done only if the marker still
//! is what was shown.

use clap::Args;
use oncegate::marker::{self, Ask, Effect, Marker, Operation, Token, UNKNOWN_ATTEMPT, Verdict};
use oncegate::{Key, MessageId, Standing};
use serde::Serialize;

use super::told::{self, State, Told};
use crate::Context;
use crate::audit::{Act, Audit};
use crate::config;
use crate::failure::Failure;
use crate::markers::Markers;

#[derive(Args)]
pub(crate) struct Change {
    /// As the producer wrote it, or as it stands in keys and logs.
    id: String,
    /// Does it; without this it only shows what it would do.
    #[arg(long)]
    yes: bool,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT")]
    why: Option<String>,
}

/// One id on the store.
pub(crate) struct Subject<'a> {
    context: &'a Context,
    pub(crate) markers: Markers,
    pub(crate) id: MessageId,
    pub(crate) key: Key,
    pub(crate) standing: Standing,
}

impl<'a> Subject<'a> {
    pub(crate) async fn look(
        context: &'a Context,
        markers: &Markers,
        id: MessageId,
    ) -> Result<Self, Failure> {
        let key = config::key(&context.config, &id)?;
        let standing = markers.look(&key).await?;
        Ok(Self {
            context,
            markers: markers.clone(),
            id,
            key,
            standing,
        })
    }

    pub(crate) fn state(&self) -> State {
        told::state(&self.standing)
    }

    /// In one line, for the audit.
    pub(crate) fn in_words(&self) -> String {
        match told::attempt(&self.standing.marker) {
            Some(attempt) => format!("{}, attempt {attempt}", self.state().word()),
            None => self.state().word().to_owned(),
        }
    }

    /// Asks the store for a change of the marker as it was seen. Where it frees the id for another
    /// run, the fence goes on above `known`, the highest attempt that a dead letter or the audit
    /// names; 0 if none does.
    ///
    /// # Errors
    /// The store's; or it has become another meanwhile, and nothing was changed.
    pub(crate) async fn ask(&self, ask: Ask, known: u32) -> Result<(), Failure> {
        match self.markers.apply(self.operation(ask, known)).await? {
            Verdict::Kept | Verdict::Done { .. } => Ok(()),
            _ => Err(Failure::not_all(format!(
                "{}: the marker changed since it was read; nothing was written; look again",
                self.id
            ))),
        }
    }

    /// What the id becomes if it is freed so, in a few words.
    pub(crate) fn freed(&self, ask: Ask, known: u32) -> String {
        match marker::freed(&self.operation(ask, known)) {
            Some(Marker::Cleared { attempts, .. }) => {
                format!("cleared, attempt {}", attempts.number)
            }
            _ => State::Absent.word().to_owned(),
        }
    }

    fn operation(&self, ask: Ask, known: u32) -> Operation {
        let hold = match self.standing.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold),
            _ => None,
        };
        let config = &self.context.config;
        let mut terms = config::terms(config, hold.and_then(|hold| hold.fingerprint));
        let frees = matches!(ask, Ask::SendBack { .. } | Ask::Forget { .. });
        if frees {
            // The literal gate takes whatever is there for a duplicate: it is deleted.
            terms.guarantee = config.guarantee();
        }
        // Who resolves or completes speaks of the claim that was seen.
        let holder = hold.filter(|_| !frees);
        Operation {
            key: self.key.clone(),
            ask,
            token: holder.map_or_else(Token::random, |hold| hold.token),
            attempt: holder.map_or(known, |hold| hold.attempts.number),
            terms,
        }
    }
}

/// The number above which attempts go on after an id that is done is forgotten: nobody knows how
/// far they had come since `known`.
fn fence_above(known: u32) -> u32 {
    (known / UNKNOWN_ATTEMPT)
        .saturating_add(1)
        .saturating_mul(UNKNOWN_ATTEMPT)
}

pub(crate) async fn forget(context: &Context, change: Change) -> Result<(), Failure> {
    let subject = Subject::look(
        context,
        &Markers::of(&context.config)?,
        config::id(&context.config, &change.id)?,
    )
    .await?;
    let id = &subject.id;
    let seen = subject.standing.marker;
    let (ask, consequence) = match subject.state() {
        State::Done => (
            Ask::Forget { seen },
            "was handled, and would be handled AGAIN if a message with this id came",
        ),
        State::Rejected => (
            Ask::SendBack {
                seen,
                effect: Effect::Unknown,
            },
            "was rejected, and would be handled if a message with this id came; `dead-letters redrive` frees it and publishes the message again",
        ),
        State::Absent => return nothing_to_do(context, "marker forget", &subject),
        State::Cleared => {
            return Err(Failure::not_all(format!(
                "{id} is cleared: it is free to be claimed already. Its attempt is kept, since an earlier run may not be over; it goes with \
                 the window"
            )));
        }
        State::InDoubt => {
            return Err(Failure::not_all(format!(
                "{id} is in doubt: find out whether it happened, then say so with `oncegate in-doubt resolve {id} --happened` or \
                 `--did-not-happen`"
            )));
        }
        State::InProgress | State::Lapsed | State::Unreadable => {
            return Err(Failure::not_all(format!(
                "{id} is {}: whoever holds it may be at work; let it end, or be found in doubt",
                subject.state().word()
            )));
        }
    };
    let known = match subject.state() {
        State::Done => fence_above(Audit::of(context)?.fence(id).await?),
        _ => 0,
    };
    let what = What {
        what: "marker forget",
        ask,
        known,
        after: subject.freed(ask, known),
        lasts: None,
        consequence,
    };
    run(context, &change, &subject, what).await
}

pub(crate) async fn complete(context: &Context, change: Change) -> Result<(), Failure> {
    let subject = Subject::look(
        context,
        &Markers::of(&context.config)?,
        config::id(&context.config, &change.id)?,
    )
    .await?;
    let id = &subject.id;
    match subject.state() {
        State::Absent | State::Cleared | State::Lapsed | State::InDoubt => {}
        State::Done => return nothing_to_do(context, "marker complete", &subject),
        State::Rejected => {
            return Err(Failure::not_all(format!(
                "{id} is rejected: it is not run as it is; `dead-letters drop` takes its letter out"
            )));
        }
        State::InProgress | State::Unreadable => {
            return Err(Failure::not_all(format!(
                "{id} is {}: whoever holds it is at work, and says itself how it ends",
                subject.state().word()
            )));
        }
    }
    let consequence =
        "would count as handled: a message with this id is accepted without a run for that long";
    let lasts = Some(config::window_told(&context.config));
    let what = What {
        what: "marker complete",
        ask: Ask::Complete,
        known: 0,
        after: "done".into(),
        lasts,
        consequence,
    };
    run(context, &change, &subject, what).await
}

/// What is to be done.
struct What {
    what: &'static str,
    ask: Ask,
    /// The highest attempt that is known of the id, where it is freed.
    known: u32,
    after: String,
    /// For how long, where the window says it.
    lasts: Option<String>,
    consequence: &'static str,
}

async fn run(
    context: &Context,
    change: &Change,
    subject: &Subject<'_>,
    what: What,
) -> Result<(), Failure> {
    let What {
        what,
        ask,
        known,
        after: is,
        lasts,
        consequence,
    } = what;
    let lasts = lasts
        .map(|lasts| format!(" for {lasts}"))
        .unwrap_or_default();
    let after = format!("{is}{lasts}");
    let before = subject.in_words();
    let audit = Audit::of(context)?;
    let stays = if what == "marker forget" {
        stays_in_the_audit(&audit, &subject.id).await
    } else {
        String::new()
    };
    if !change.yes {
        let told = Told::of(
            subject.key.as_str(),
            &subject.standing,
            context.config.window(),
        );
        let people = format!(
            "{}\n{what}: {} {consequence}. It would be {after}.{stays}",
            told.for_people(),
            subject.id
        );
        context
            .format
            .print(&Acted::of(what, false, subject, &before, &after), people)?;
        return Err(Failure::not_confirmed());
    }
    // What is to be forgotten is not to stand in the audit for ever.
    let id = if what == "marker forget" {
        subject.id.clone().hashed()
    } else {
        subject.id.clone()
    };
    let attempt = told::attempt(&subject.standing.marker).max((known > 0).then_some(known));
    let act = Act {
        what,
        id: Some(id.to_string()),
        place: None,
        before: before.clone(),
        after: after.clone(),
        attempt,
    };
    let begun = audit.begin(act, change.why.as_deref()).await?;
    if let Err(failure) = subject.ask(ask, known).await {
        audit.failed(begun, &failure).await?;
        return Err(failure);
    }
    audit.done(begun).await?;
    let people = format!("{}: was {before}, is {is} now{lasts}{stays}", subject.id);
    context
        .format
        .print(&Acted::of(what, true, subject, &before, &after), people)
}

/// What whoever erases an id has to know: an audit is not rewritten, so what was done before names
/// the id still.
async fn stays_in_the_audit(audit: &Audit, id: &MessageId) -> String {
    // Where it cannot be read, the act itself says so.
    let named = audit.acts_on(id).await.map_or(0, |acts| {
        acts.iter()
            .filter(|act| act.id.as_deref() == Some(id.as_str()))
            .count()
    });
    let acts = match named {
        0 => return String::new(),
        1 => "1 earlier act".to_owned(),
        _ => format!("{named} earlier acts"),
    };
    format!(
        "\nThe audit still names it, in {acts}: \"An id has to be erased\" in the book says how they go."
    )
}

fn nothing_to_do(
    context: &Context,
    what: &'static str,
    subject: &Subject<'_>,
) -> Result<(), Failure> {
    let is = subject.in_words();
    let people = format!("{} is {is} already: nothing to do", subject.id);
    context
        .format
        .print(&Acted::of(what, false, subject, &is, &is), people)
}

/// What machines are told of an act, whether it was done or not.
#[derive(Serialize)]
struct Acted<'a> {
    act: &'static str,
    did: bool,
    id: String,
    before: &'a str,
    after: &'a str,
}

impl<'a> Acted<'a> {
    fn of(
        act: &'static str,
        did: bool,
        subject: &Subject<'_>,
        before: &'a str,
        after: &'a str,
    ) -> Self {
        Self {
            act,
            did,
            id: subject.id.to_string(),
            before,
            after,
        }
    }
}
