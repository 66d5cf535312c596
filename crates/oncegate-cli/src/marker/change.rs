//! `marker forget` and `marker complete`. Without `--yes` a change is only shown. With `--yes` it is
//! recorded in the audit and applied: `forget` only if the marker is unchanged since it was read
//! (with `Bare`, always), `complete` unless a consumer handles the id or it was rejected meanwhile.

use clap::Args;
use oncegate::marker::{
    self, Effect, Marker, Operation, OperationKind, Token, UNKNOWN_ATTEMPT, Verdict,
};
use oncegate::store::MarkerWithExpiry;
use oncegate::{Key, MessageId};
use serde::Serialize;

use super::description::{self, MarkerDescription, MarkerState};
use crate::CliContext;
use crate::audit::{Audit, PlannedAction};
use crate::config;
use crate::destination::bulk::ConfirmArgs;
use crate::error::CliError;
use crate::marker_store::MarkerStore;

#[derive(Args)]
pub(crate) struct ChangeArgs {
    /// The id as the producer wrote it, or as keys and logs show it
    id: String,
    #[command(flatten)]
    confirm: ConfirmArgs,
}

impl ChangeArgs {
    /// Reads the marker of the id.
    async fn marker<'a>(&self, context: &'a CliContext) -> Result<ObservedMarker<'a>, CliError> {
        let id = config::id(&context.config, &self.id)?;
        ObservedMarker::read_marker(context, &MarkerStore::of(&context.config)?, id).await
    }
}

/// Why no marker of this module is [`MarkerState::Unreadable`].
const UNREADABLE_IS_AN_ERROR: &str = "reading an unreadable marker is an error";

/// The marker of an id, as it was read.
pub(crate) struct ObservedMarker<'a> {
    context: &'a CliContext,
    pub(crate) markers: MarkerStore,
    pub(crate) id: MessageId,
    pub(crate) key: Key,
    pub(crate) stored: MarkerWithExpiry,
}

impl<'a> ObservedMarker<'a> {
    /// Reads the marker of an id.
    ///
    /// # Errors
    /// The store failed, or the value of the key is not a marker.
    pub(crate) async fn read_marker(
        context: &'a CliContext,
        markers: &MarkerStore,
        id: MessageId,
    ) -> Result<Self, CliError> {
        let key = config::key(&context.config, &id)?;
        let stored = markers.read_marker(&context.config, &key).await?;
        Ok(Self {
            context,
            markers: markers.clone(),
            id,
            key,
            stored,
        })
    }

    pub(crate) fn state(&self) -> MarkerState {
        description::state(&self.stored)
    }

    /// State and attempt in one line, for the audit.
    pub(crate) fn summary(&self) -> String {
        match description::last_attempt(&self.stored.marker) {
            Some(attempt) => format!("{}, attempt {attempt}", self.state().word()),
            None => self.state().word().to_owned(),
        }
    }

    /// Changes the marker. If the change frees the id (lets it be claimed again), later attempts
    /// are numbered above `last_attempt`, because the number is the fencing token. `last_attempt`
    /// is the highest number in a dead letter or the audit; for a done id, whose marker has no
    /// number, it is [`above_all_attempts`]; 0 if it is unknown, or if the marker has it.
    ///
    /// # Errors
    /// The store failed. Or nothing was written because the marker changed since it was read: a
    /// change that frees the id is refused if it is another marker (never with `Bare`), a resolution
    /// if it is no longer in doubt by the same claim, and a completion if a consumer handles the id
    /// or if it was rejected.
    pub(crate) async fn apply(
        &self,
        request: OperationKind,
        last_attempt: u32,
    ) -> Result<(), CliError> {
        match self
            .markers
            .apply(self.operation(request, last_attempt))
            .await?
        {
            Verdict::Applied | Verdict::Done { .. } => Ok(()),
            _ => Err(CliError::incomplete(format!(
                "{}: the marker changed since it was read; nothing was written; run the command again",
                self.id
            ))),
        }
    }

    /// The state of the marker after a change that frees the id, as text.
    pub(crate) fn state_after_freeing(&self, request: OperationKind, last_attempt: u32) -> String {
        match marker::freed(&self.operation(request, last_attempt)) {
            Some(Marker::Cleared { attempts, .. }) => {
                format!("cleared, attempt {}", attempts.number)
            }
            _ => MarkerState::Absent.word().to_owned(),
        }
    }

    fn operation(&self, request: OperationKind, last_attempt: u32) -> Operation {
        let hold = match self.stored.marker {
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => Some(hold),
            _ => None,
        };
        let config = &self.context.config;
        let mut terms = config::terms(config, hold.and_then(|hold| hold.fingerprint));
        let frees = matches!(
            request,
            OperationKind::Redrive { .. } | OperationKind::Forget { .. }
        );
        if frees {
            // A consumer with `Bare` treats every marker as a duplicate, so with this guarantee the
            // operation deletes the marker.
            terms.guarantee = config.guarantee();
        }
        // `Resolve` and `Complete` have the token and attempt of the claim that was read.
        let holder = hold.filter(|_| !frees);
        Operation {
            key: self.key.clone(),
            kind: request,
            token: holder.map_or_else(Token::random, |hold| hold.token),
            attempt: holder.map_or(last_attempt, |hold| hold.attempts.number),
            terms,
        }
    }
}

/// A number above all attempts of a done id, of which `highest_known` is the highest in the audit:
/// the next multiple of [`UNKNOWN_ATTEMPT`] above it, which no series of attempts reaches.
fn above_all_attempts(highest_known: u32) -> u32 {
    (highest_known / UNKNOWN_ATTEMPT)
        .saturating_add(1)
        .saturating_mul(UNKNOWN_ATTEMPT)
}

pub(crate) async fn forget(context: &CliContext, change: ChangeArgs) -> Result<(), CliError> {
    let marker = change.marker(context).await?;
    let id = &marker.id;
    let seen = marker.stored.marker;
    let (request, consequence) = match marker.state() {
        MarkerState::Done => (
            OperationKind::Forget { seen },
            "was handled, and would be handled AGAIN if a message with this id came",
        ),
        MarkerState::Rejected => (
            OperationKind::Redrive {
                seen,
                effect: Effect::Unknown,
            },
            "was rejected, and would be handled if a message with this id came; `dead-letters redrive` frees it and publishes the message again",
        ),
        MarkerState::Absent => return report_unchanged(context, "marker forget", &marker),
        MarkerState::Cleared => {
            return Err(CliError::incomplete(format!(
                "{id} is cleared: it is already free to be claimed. Its attempt is kept, since an earlier run may not have ended; the marker expires with \
                 the window"
            )));
        }
        MarkerState::InDoubt => {
            return Err(CliError::incomplete(format!(
                "{id} is in doubt: find out whether it happened, then run `oncegate in-doubt resolve {id} --happened` or \
                 `--did-not-happen`"
            )));
        }
        MarkerState::InProgress => {
            return Err(CliError::incomplete(format!(
                "{id} is in progress: a consumer may be handling it; wait until that ends"
            )));
        }
        MarkerState::Lapsed => {
            return Err(CliError::incomplete(format!(
                "{id} is lapsed: the next delivery claims it again, or with at most once puts it in doubt; if there is none, redrive its dead \
                 letter, or record it as done with `oncegate marker complete`"
            )));
        }
        MarkerState::Unreadable => unreachable!("{UNREADABLE_IS_AN_ERROR}"),
    };
    let last_attempt = match marker.state() {
        MarkerState::Done => above_all_attempts(Audit::of(context)?.highest_attempt(id).await?),
        _ => 0,
    };
    let planned = MarkerChange {
        what: "marker forget",
        request,
        last_attempt,
        after: marker.state_after_freeing(request, last_attempt),
        duration: None,
        consequence,
    };
    run(context, &change, &marker, planned).await
}

pub(crate) async fn complete(context: &CliContext, change: ChangeArgs) -> Result<(), CliError> {
    let marker = change.marker(context).await?;
    let id = &marker.id;
    match marker.state() {
        MarkerState::Absent | MarkerState::Cleared | MarkerState::Lapsed | MarkerState::InDoubt => {
        }
        MarkerState::Done => return report_unchanged(context, "marker complete", &marker),
        MarkerState::Rejected => {
            return Err(CliError::incomplete(format!(
                "{id} is rejected and will not run; `dead-letters drop` drops its dead letter"
            )));
        }
        MarkerState::InProgress => {
            return Err(CliError::incomplete(format!(
                "{id} is in progress: a consumer is handling it and will record the result"
            )));
        }
        MarkerState::Unreadable => unreachable!("{UNREADABLE_IS_AN_ERROR}"),
    }
    let consequence = "would count as handled: a message with this id is accepted without a run while the marker is done";
    let duration = Some(config::window_description(&context.config));
    let planned = MarkerChange {
        what: "marker complete",
        request: OperationKind::Complete,
        last_attempt: 0,
        after: "done".into(),
        duration,
        consequence,
    };
    run(context, &change, &marker, planned).await
}

/// A planned marker change.
struct MarkerChange {
    what: &'static str,
    request: OperationKind,
    /// If the change frees the id, later attempts are numbered above this.
    last_attempt: u32,
    /// The state after the change.
    after: String,
    /// How long that state lasts, if it is shown.
    duration: Option<String>,
    consequence: &'static str,
}

/// Shows the change, or applies it with `--yes`.
async fn run(
    context: &CliContext,
    change: &ChangeArgs,
    marker: &ObservedMarker<'_>,
    planned: MarkerChange,
) -> Result<(), CliError> {
    let MarkerChange {
        what,
        request,
        last_attempt,
        after: state_after,
        duration,
        consequence,
    } = planned;
    let duration = duration
        .map(|duration| format!(" for {duration}"))
        .unwrap_or_default();
    let after = format!("{state_after}{duration}");
    let before = marker.summary();
    let audit = Audit::of(context)?;
    let notice = if what == "marker forget" {
        audit_notice(&audit, &marker.id).await
    } else {
        String::new()
    };
    if !change.confirm.yes {
        let description = MarkerDescription::of(
            marker.key.as_str(),
            &marker.stored,
            context.config.dedup_window(),
        );
        let text = format!(
            "{}\n{what}: {} {consequence}. The marker would be {after}.{notice}",
            description.to_text(),
            marker.id
        );
        context.format.print(
            &ChangeReport::of(what, false, marker, &before, &after),
            text,
        )?;
        return if change.confirm.dry_run {
            Ok(())
        } else {
            Err(CliError::not_confirmed())
        };
    }
    // The audit must not keep a forgotten id.
    let id = if what == "marker forget" {
        marker.id.clone().hashed()
    } else {
        marker.id.clone()
    };
    let attempt = description::last_attempt(&marker.stored.marker)
        .max((last_attempt > 0).then_some(last_attempt));
    let action = PlannedAction {
        what,
        id: Some(id.to_string()),
        handle: None,
        location: None,
        before: before.clone(),
        after: after.clone(),
        attempt,
    };
    let pending = audit.begin(action, change.confirm.why.as_deref()).await?;
    if let Err(failure) = marker.apply(request, last_attempt).await {
        audit.failed(pending, &failure).await?;
        return Err(failure);
    }
    audit.done(pending).await?;
    let text = format!(
        "{}: was {before}, is {state_after} now{duration}{notice}",
        marker.id
    );
    context
        .format
        .print(&ChangeReport::of(what, true, marker, &before, &after), text)
}

/// The notice that earlier lines of the audit contain the forgotten id; empty if none does.
async fn audit_notice(audit: &Audit, id: &MessageId) -> String {
    // An unreadable audit is not reported here: the write of the action fails, too.
    let named = audit.actions_on(id).await.map_or(0, |actions| {
        actions
            .iter()
            .filter(|action| action.id.as_deref() == Some(id.as_str()))
            .count()
    });
    let actions = match named {
        0 => return String::new(),
        1 => "1 earlier action".to_owned(),
        _ => format!("{named} earlier actions"),
    };
    format!(
        "\nThe audit still names the id, in {actions}; to remove them, see \
         https://github.com/oncegate/oncegate/blob/main/docs/src/operating.md#erase-an-id"
    )
}

/// Prints that the marker already has the wanted state.
fn report_unchanged(
    context: &CliContext,
    what: &'static str,
    marker: &ObservedMarker<'_>,
) -> Result<(), CliError> {
    let state = marker.summary();
    let text = format!("{} is already {state}: nothing to do", marker.id);
    context
        .format
        .print(&ChangeReport::of(what, false, marker, &state, &state), text)
}

/// A previewed or applied change as JSON.
#[derive(Serialize)]
struct ChangeReport<'a> {
    action: &'static str,
    #[serde(rename = "changed")]
    done: bool,
    id: String,
    before: &'a str,
    after: &'a str,
}

impl<'a> ChangeReport<'a> {
    fn of(
        action: &'static str,
        done: bool,
        marker: &ObservedMarker<'_>,
        before: &'a str,
        after: &'a str,
    ) -> Self {
        Self {
            action,
            done,
            id: marker.id.to_string(),
            before,
            after,
        }
    }
}
