//! `oncegate in-doubt`: lists messages whose effect is unknown, and records whether it happened, as
//! an operator found out.

use std::collections::HashMap;

use clap::{Args, Subcommand};
use oncegate::MessageId;
use oncegate::marker::{Effect, Finding, OperationKind};
use oncegate_config::StoreKind;
use serde_json::{Value, json};

use crate::CliContext;
use crate::audit::{ActionStage, Audit, AuditEntry, PlannedAction};
use crate::config;
use crate::destination::bulk::{
    BulkCommand, BulkReport, ConfirmArgs, StopSignal, close_reader, publish, remove,
};
use crate::destination::filter::restrict_reasons;
use crate::destination::listing::{self, ListArgs, QueueAccessArgs, ShowArgs};
use crate::destination::redrive_policy::{self, AcceptedRisks};
use crate::destination::{
    Broker, CopyAge, DeadLetter, DeadLetterState, Destination, DestinationReader,
};
use crate::error::{CliError, CliErrorCode};
use crate::marker::change::ObservedMarker;
use crate::marker::description::{self, MarkerState, is_being_reconciled};
use crate::marker_store::MarkerStore;
use crate::output::Unchecked;

#[derive(Subcommand)]
pub(crate) enum InDoubtCommand {
    /// List messages in doubt that were not resolved
    #[command(mut_arg("reasons", |it| restrict_reasons(it, Destination::InDoubt)))]
    List(ListArgs),
    /// Show the messages in doubt of an id, with their headers
    Show(ShowArgs),
    /// Record whether the effects of one or more ids happened. With --happened the ids are recorded
    /// as done; with --did-not-happen their messages are sent back to be handled
    Resolve(ResolveArgs),
}

#[derive(Args)]
pub(crate) struct ResolveArgs {
    /// The ids as the producer wrote them, or as keys and logs show them
    #[arg(required = true)]
    ids: Vec<String>,
    #[command(flatten)]
    finding: FindingArgs,
    /// Also clear the marker of an id whose message is not in the in-doubt destination; no message
    /// is sent. Check first that no other reader has received the message (RabbitMQ)
    #[arg(long)]
    without_message: bool,
    /// Only this broker, if both are configured
    #[arg(long)]
    broker: Option<Broker>,
    #[command(flatten)]
    confirm: ConfirmArgs,
    #[command(flatten)]
    accepted: AcceptedRisks,
    #[command(flatten)]
    queue_access: QueueAccessArgs,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct FindingArgs {
    /// The effect happened
    #[arg(long)]
    happened: bool,
    /// The effect did not happen and no longer can: no request of an earlier attempt is in progress
    #[arg(long)]
    did_not_happen: bool,
}

pub(crate) async fn run(context: &CliContext, command: InDoubtCommand) -> Result<(), CliError> {
    match command {
        InDoubtCommand::List(list) => listing::list(context, Destination::InDoubt, list).await,
        InDoubtCommand::Show(show) => listing::show(context, Destination::InDoubt, show).await,
        InDoubtCommand::Resolve(resolve) => self::resolve(context, resolve).await,
    }
}

const NO_BROKER: &str = "no broker is configured, so there was no message to move";

const COMMAND: BulkCommand = BulkCommand {
    name: "in-doubt resolve",
    verb: "resolved",
};

async fn resolve(context: &CliContext, resolve: ResolveArgs) -> Result<(), CliError> {
    let finding = if resolve.finding.happened {
        Finding::Happened
    } else {
        Finding::DidNotHappen
    };
    let mut unchecked = Unchecked::default();
    // A gate may be used without a broker; then only markers are resolved.
    let has_broker = resolve.broker.is_some() || Broker::any_named(context);
    let brokers = if has_broker {
        Broker::selected(context, resolve.broker, &mut unchecked)?
    } else {
        Vec::new()
    };
    let (audit, confirm) = (Audit::of(context)?, &resolve.confirm);
    let mut session = ResolveSession {
        context,
        audit,
        finding,
        accepted: resolve.accepted,
        without_message: resolve.without_message || !has_broker,
        why: confirm.why.as_deref(),
        store: match context.config.store_kind()? {
            Some(StoreKind::Redis) => "Redis",
            Some(StoreKind::Sqlite(_)) => "the SQLite file",
            Some(StoreKind::Postgres) => "PostgreSQL",
            _ => "the store",
        },
        no_message: if has_broker {
            "the in-doubt destination shows no message with this id"
        } else {
            NO_BROKER
        },
        ids: HashMap::new(),
    };
    session.read_markers(&resolve.ids).await?;
    let (mut report, mut stopped, mut stop_signal) =
        (BulkReport::default(), None, StopSignal::watch());
    for broker in brokers {
        let opened = listing::open(
            context,
            broker,
            Destination::InDoubt,
            resolve.queue_access.count_policy(context),
        );
        let mut reader = match stop_signal.run(opened).await {
            Ok(reader) => reader,
            // The report still shows the actions on the previous broker.
            Err(failure) => {
                stopped = Some(failure);
                break;
            }
        };
        let bar = listing::progress_bar(&reader, "read");
        let processed = async {
            while let Some(message) = stop_signal.run(reader.next()).await? {
                bar.inc(1);
                let selected = message.id().and_then(|id| session.ids.get_mut(id));
                if let (DeadLetterState::Resolved, Some(entry)) = (message.state, selected) {
                    entry.was_resolved = true;
                }
                if message.state.is_pending()
                    && message.id().is_some_and(|id| session.ids.contains_key(id))
                {
                    report.note(
                        &message,
                        session
                            .resolve_message(&mut reader, &message, confirm.yes)
                            .await,
                    )?;
                }
            }
            Ok(())
        };
        stopped = processed.await.err();
        close_reader(reader, bar).await;
        if stopped.is_some() {
            break;
        }
    }
    if stopped.is_none() {
        stopped = session
            .resolve_markers_without_messages(&mut report, confirm.yes)
            .await
            .err();
    }
    for id in &resolve.ids {
        if let Some(entry) = session.ids.get(config::id(&context.config, id)?.as_str()) {
            report.note_marker(session.marker(entry, confirm.yes));
        }
    }
    let broker_errors = unchecked.end();
    if !has_broker {
        unchecked.note("the messages in doubt", CliError::usage(NO_BROKER));
    }
    report.finish(context, confirm, COMMAND, stopped, &unchecked)?;
    broker_errors
}

/// The state of one resolve command.
struct ResolveSession<'a> {
    context: &'a CliContext,
    audit: Audit,
    finding: Finding,
    accepted: AcceptedRisks,
    /// Whether to clear the markers of ids that have no message in the in-doubt destination.
    without_message: bool,
    why: Option<&'a str>,
    /// The name of the store, for the output.
    store: &'static str,
    /// Why the command found no message of an id, for the output.
    no_message: &'static str,
    /// The selected ids with their markers.
    ids: HashMap<String, SelectedId<'a>>,
}

/// An id to resolve.
struct SelectedId<'a> {
    marker: ObservedMarker<'a>,
    update: MarkerUpdate,
    /// The number of messages with this id that were read.
    messages: usize,
    /// Whether a message with this id was resolved before; Kafka keeps it.
    was_resolved: bool,
}

/// The entry of an id, if its marker still has to be updated.
fn needing_update<'m, 'a>(
    ids: &'m mut HashMap<String, SelectedId<'a>>,
    id: &str,
) -> Option<&'m mut SelectedId<'a>> {
    ids.get_mut(id)
        .filter(|entry| entry.update == MarkerUpdate::Needed)
}

/// Whether the marker has to be updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MarkerUpdate {
    /// The finding is not recorded yet.
    Needed,
    /// This command recorded the finding.
    Written,
    /// The marker recorded the finding before this command.
    NotNeeded,
}

impl<'a> ResolveSession<'a> {
    /// Reads the markers of the ids and checks that they may be updated.
    ///
    /// # Errors
    /// A marker cannot be read, or must not be changed.
    async fn read_markers(&mut self, ids: &[String]) -> Result<(), CliError> {
        let markers = MarkerStore::of(&self.context.config)?;
        for id in ids {
            let id = config::id(&self.context.config, id)?;
            let marker = ObservedMarker::read_marker(self.context, &markers, id.clone()).await?;
            let update = match check_marker(&marker, self.finding) {
                Ok(update) => update,
                Err(failure) => {
                    return Err(match decision(&self.audit, &marker.id).await? {
                        Some(decision) => failure.with(&decision),
                        None => failure,
                    });
                }
            };
            self.ids.insert(
                id.to_string(),
                SelectedId {
                    marker,
                    update,
                    messages: 0,
                    was_resolved: false,
                },
            );
        }
        Ok(())
    }

    /// The state of an id after its marker is updated, as text.
    fn after(&self) -> String {
        let window = config::window_description(&self.context.config);
        match self.finding {
            Finding::Happened => format!("done for {window}, as an operator found out"),
            Finding::DidNotHappen => {
                format!("free to be claimed for {window}, as an operator found out")
            }
        }
    }

    /// The states of the marker before and after the command, as JSON. In a preview the second is
    /// that after the same command with `--yes`.
    fn marker(&self, entry: &SelectedId<'_>, confirmed: bool) -> Value {
        let before = entry.marker.summary();
        let changes = entry.update == MarkerUpdate::Written
            || (!confirmed && entry.update == MarkerUpdate::Needed);
        let after = if changes {
            self.after()
        } else {
            before.clone()
        };
        json!({ "id": entry.marker.id.to_string(), "before": before, "after": after })
    }

    /// Reads the marker again before a change, because it may have changed meanwhile.
    async fn refresh_marker(&mut self, id: &str) -> Result<(), CliError> {
        let Some(entry) = needing_update(&mut self.ids, id) else {
            return Ok(());
        };
        let marker = ObservedMarker::read_marker(
            self.context,
            &entry.marker.markers,
            entry.marker.id.clone(),
        )
        .await?;
        (entry.update, entry.marker) = (check_marker(&marker, self.finding)?, marker);
        Ok(())
    }

    /// Records the finding in the marker of an id, once for each id. `last_attempt` is the number
    /// of the last attempt in the message; 0 if unknown.
    async fn resolve_marker(&mut self, id: &str, last_attempt: u32) -> Result<(), CliError> {
        let after = self.after();
        let Some(entry) = needing_update(&mut self.ids, id) else {
            return Ok(());
        };
        let (marker, seen) = (&entry.marker, entry.marker.stored.marker);
        let request = match (self.finding, marker.state()) {
            (Finding::Happened, MarkerState::InDoubt) => OperationKind::Resolve(Finding::Happened),
            (Finding::Happened, _) => OperationKind::Complete,
            (Finding::DidNotHappen, _) => OperationKind::Redrive {
                seen,
                effect: Effect::Nothing,
            },
        };
        let attempt = Some(
            description::last_attempt(&seen)
                .unwrap_or(0)
                .max(last_attempt),
        );
        let action = PlannedAction {
            what: COMMAND.name,
            id: Some(id.to_owned()),
            handle: None,
            location: None,
            before: marker.summary(),
            after,
            attempt,
        };
        let pending = self.audit.begin(action, self.why).await?;
        if let Err(failure) = marker.apply(request, last_attempt).await {
            self.audit.failed(pending, &failure).await?;
            return Err(failure);
        }
        entry.update = MarkerUpdate::Written;
        self.audit.done(pending).await
    }

    /// Resolves one message, or describes what would be done if `confirmed` is false. The broker
    /// confirms a copy before the original is removed.
    async fn resolve_message(
        &mut self,
        reader: &mut DestinationReader,
        message: &DeadLetter,
        confirmed: bool,
    ) -> Result<String, CliError> {
        let not_selected = || CliError::incomplete("skipped: another id");
        let id = message.id().ok_or_else(not_selected)?;
        self.ids.get_mut(id).ok_or_else(not_selected)?.messages += 1;
        redrive_policy::check_source(message, reader.source())?;
        if confirmed {
            self.refresh_marker(id).await?;
        }
        let entry = self.ids.get(id).ok_or_else(not_selected)?;
        let (state, update) = (entry.marker.summary(), entry.update);
        if self.finding == Finding::DidNotHappen {
            redrive_policy::check_complete(message, self.accepted)?;
            check_resend(&entry.marker, message, self.accepted, self.context)?;
        }
        let (planned, after) = match self.finding {
            Finding::Happened if update == MarkerUpdate::Needed => (
                format!("would be recorded as {} and removed", self.after()),
                "removed, since the effect happened".to_owned(),
            ),
            Finding::Happened => (
                "would be removed".into(),
                "removed, since the effect happened".to_owned(),
            ),
            Finding::DidNotHappen => {
                let target = reader.source();
                (
                    format!("would be cleared, sent to {target} and removed"),
                    format!("sent to {target}, since the effect did not happen"),
                )
            }
        };
        if !confirmed {
            return Ok(format!("{state}; {planned}"));
        }
        self.resolve_marker(id, message.last_attempt()).await?;
        let location = Some(message.location.clone());
        let action = PlannedAction {
            what: COMMAND.name,
            id: Some(id.to_owned()),
            handle: None,
            location,
            before: "in doubt".into(),
            after: after.clone(),
            attempt: None,
        };
        let pending = self.audit.begin(action, self.why).await?;
        match self.finding {
            Finding::DidNotHappen => {
                publish(&self.audit, pending, reader, message, CopyAge::New).await?
            }
            Finding::Happened => remove(&self.audit, pending, reader, message).await?,
        }
        Ok(after)
    }

    /// Resolves the selected ids of which no message was read. RabbitMQ does not return a message
    /// that another reader has received, so a marker is cleared only if the operator confirms with
    /// `--without-message` that there is no message. An effect that happened is recorded in any
    /// case: that lets no message run.
    async fn resolve_markers_without_messages(
        &mut self,
        report: &mut BulkReport,
        confirmed: bool,
    ) -> Result<(), CliError> {
        let without_messages: Vec<String> = self
            .ids
            .iter()
            .filter(|(_, entry)| entry.messages == 0)
            .map(|(id, _)| id.clone())
            .collect();
        for id in without_messages {
            if confirmed && let Err(failure) = self.refresh_marker(&id).await {
                match failure.code {
                    CliErrorCode::Incomplete => report.note_left(&id, failure.to_string()),
                    _ => return Err(failure),
                }
                continue;
            }
            let Some(entry) = self.ids.get(&id) else {
                continue;
            };
            let (before, state) = (entry.marker.summary(), entry.marker.state());
            let decision = match state {
                MarkerState::InDoubt => None,
                _ => decision(&self.audit, &entry.marker.id).await?,
            };
            if decision.is_some() || (state != MarkerState::InDoubt && entry.was_resolved) {
                report.note_not_in_doubt(
                    &id,
                    format!(
                        "{}, and in {} it is {before}: not changed; `oncegate audit --id {id}` shows that decision",
                        decision.unwrap_or_else(|| format!("{id} was resolved before")),
                        self.store
                    ),
                );
                continue;
            }
            if state != MarkerState::InDoubt {
                let remedy = match self.finding {
                    Finding::Happened => ", or mark it done with `oncegate marker complete`",
                    Finding::DidNotHappen => "; its marker needs no change",
                };
                report.note_not_in_doubt(
                    &id,
                    format!(
                        "no message in doubt has this id: in {} the id {id} is {before}, not in doubt, and {}. Check the spelling of the id{remedy}",
                        self.store,
                        self.no_message
                    ),
                );
                continue;
            }
            if self.finding == Finding::DidNotHappen && !self.without_message {
                report.note_left(
                    &id,
                    format!(
                        "{id} is {before}: not changed, since the in-doubt destination shows no message with this id. On RabbitMQ, messages that \
                         another reader has received (a list, another resolve, a management tool) are not shown: try again. If there is no message, \
                         pass --without-message"
                    ),
                );
                continue;
            }
            let (before_verb, after_verb) = if confirmed {
                ("was", "is")
            } else {
                ("is", "would be")
            };
            let text = format!(
                "{id}: {before_verb} {before}, {after_verb} {}; {}{}",
                self.after(),
                self.no_message,
                match self.finding {
                    _ if self.no_message == NO_BROKER => "",
                    Finding::Happened =>
                        ": only the marker is changed; if `in-doubt list` shows a message later, resolve the id again to remove it",
                    Finding::DidNotHappen => ": only the marker is changed, and nothing is sent",
                }
            );
            if confirmed && let Err(failure) = self.resolve_marker(&id, 0).await {
                match failure.code {
                    CliErrorCode::Incomplete => report.note_left(&id, failure.to_string()),
                    _ => return Err(failure),
                }
                continue;
            }
            report.note_done(&id, text);
        }
        Ok(())
    }
}

/// The last resolution of an id in the audit, as text; `None` if there is none, or if it did not end:
/// then the message may still be in doubt.
async fn decision(audit: &Audit, id: &MessageId) -> Result<Option<String>, CliError> {
    let mut actions = audit.actions_on(id).await?.into_iter();
    let last = actions.rfind(|action: &AuditEntry| action.what == COMMAND.name);
    let ended = last.filter(|action| action.stage == ActionStage::Done);
    Ok(ended.map(|action| {
        format!(
            "{id} was resolved before by {} at {} ({})",
            action.who, action.at, action.after
        )
    }))
}

/// Checks that the id cannot have been handled since the message was put in doubt: an id without a
/// marker may have been sent back and handled.
///
/// # Errors
/// The id may have been handled, and the operator has not accepted that.
fn check_resend(
    marker: &ObservedMarker<'_>,
    message: &DeadLetter,
    accepted: AcceptedRisks,
    context: &CliContext,
) -> Result<(), CliError> {
    // The operator states that nothing happened; a rejected marker states the same.
    let state = if marker.state() == MarkerState::InDoubt {
        MarkerState::Rejected
    } else {
        marker.state()
    };
    match redrive_policy::plan_for_state(message, state, true, accepted, context)?.age {
        CopyAge::New => Ok(()),
        // The consumer would put the copy in doubt again.
        CopyAge::FirstSeen(_) => Err(CliError::incomplete(format!(
            "skipped: its id is no longer in doubt, and may have been sent back and handled longer ago than the window of {}; find out, and pass \
             --happened or --accept-forgotten",
            config::window_description(&context.config)
        ))),
    }
}

/// Whether the finding has to be recorded in the marker.
///
/// # Errors
/// The finding contradicts the marker, or a consumer may still change the marker.
fn check_marker(marker: &ObservedMarker<'_>, finding: Finding) -> Result<MarkerUpdate, CliError> {
    let id = &marker.id;
    let refused = |why: &str| {
        Err(CliError::incomplete(format!(
            "{id} is {}: {why}",
            marker.summary()
        )))
    };
    match (marker.state(), finding) {
        (MarkerState::InDoubt, _) if is_being_reconciled(&marker.stored) => {
            refused("a consumer is reconciling it right now; try again later")
        }
        (MarkerState::Done, Finding::Happened) => Ok(MarkerUpdate::NotNeeded),
        (MarkerState::Done, Finding::DidNotHappen) => {
            refused("it was handled or recorded as done; see `oncegate explain`")
        }
        // An absent or cleared marker is no longer in doubt, but the message must still be removed
        // or sent back.
        (MarkerState::InDoubt | MarkerState::Absent | MarkerState::Cleared, _) => {
            Ok(MarkerUpdate::Needed)
        }
        (MarkerState::Rejected, _) => refused("it is dead-lettered, and nothing happened"),
        (MarkerState::InProgress, _) => refused("a consumer is handling it; wait until that ends"),
        (MarkerState::Lapsed, _) => refused(
            "its lease expired, and the consumer puts it in doubt at the next delivery; if there is none, redrive its dead letter",
        ),
        (MarkerState::Unreadable, _) => refused("its marker cannot be read"),
    }
}
