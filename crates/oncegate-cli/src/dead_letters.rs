//! `oncegate dead-letters`: lists, redrives and drops dead letters.

use clap::{Args, Subcommand};
use oncegate::Guarantee;
use oncegate::marker::{Effect, Hold, Marker, OperationKind, UNKNOWN_ATTEMPT};

use crate::CliContext;
use crate::audit::{Audit, DROPPED_CONFLICT, PlannedAction};
use crate::config;
use crate::destination::bulk::{
    BulkCommand, BulkLimits, BulkReport, ConfirmArgs, RateLimiter, StopSignal, close_reader,
    publish,
};
use crate::destination::filter::{FilterMatch, MessageFilter, restrict_reasons};
use crate::destination::listing::{self, ListArgs, QueueAccessArgs, ShowArgs};
use crate::destination::redrive_policy::{self, AcceptedRisks, CopyPlan};
use crate::destination::{Broker, CopyAge, DeadLetter, Destination, DestinationReader};
use crate::error::CliError;
use crate::marker::change::ObservedMarker;
use crate::marker::description::{self, MarkerState};
use crate::marker_store::MarkerStore;
use crate::output::Unchecked;

#[derive(Subcommand)]
pub(crate) enum DeadLettersCommand {
    /// List dead letters that were not redriven or dropped
    #[command(mut_arg("reasons", |it| restrict_reasons(it, Destination::DeadLetters)))]
    List(ListArgs),
    /// Show the dead letters of an id, with their headers
    Show(ShowArgs),
    /// Publish dead letters again to the topic or queue that they came from; the consumer
    /// deduplicates them by id. Rejected ids are handled again. Skips messages whose id was, or may
    /// have been, handled meanwhile
    #[command(mut_arg("reasons", |it| restrict_reasons(it, Destination::DeadLetters)))]
    Redrive(RedriveArgs),
    /// Drop dead letters: RabbitMQ removes them; on Kafka they stay, and the audit records that
    /// they were dropped
    #[command(mut_arg("reasons", |it| restrict_reasons(it, Destination::DeadLetters)))]
    Drop(BulkArgs),
}

/// The arguments of commands that change many messages.
#[derive(Args)]
pub(crate) struct BulkArgs {
    #[command(flatten)]
    filter: MessageFilter,
    #[command(flatten)]
    limits: BulkLimits,
    #[command(flatten)]
    confirm: ConfirmArgs,
    #[command(flatten)]
    queue_access: QueueAccessArgs,
}

#[derive(Args)]
pub(crate) struct RedriveArgs {
    #[command(flatten)]
    bulk: BulkArgs,
    #[command(flatten)]
    accepted: AcceptedRisks,
}

pub(crate) async fn run(context: &CliContext, command: DeadLettersCommand) -> Result<(), CliError> {
    match command {
        DeadLettersCommand::List(list) => {
            listing::list(context, Destination::DeadLetters, list).await
        }
        DeadLettersCommand::Show(show) => {
            listing::show(context, Destination::DeadLetters, show).await
        }
        DeadLettersCommand::Redrive(RedriveArgs { bulk, accepted }) => {
            run_bulk(context, bulk, DeadLetterAction::Redrive(accepted)).await
        }
        DeadLettersCommand::Drop(bulk) => run_bulk(context, bulk, DeadLetterAction::Drop).await,
    }
}

#[derive(Clone, Copy)]
enum DeadLetterAction {
    Redrive(AcceptedRisks),
    Drop,
}

impl DeadLetterAction {
    fn command(self) -> BulkCommand {
        match self {
            Self::Redrive(_) => BulkCommand {
                name: "dead-letters redrive",
                verb: "redriven",
            },
            Self::Drop => BulkCommand {
                name: "dead-letters drop",
                verb: "dropped",
            },
        }
    }
}

async fn run_bulk(
    context: &CliContext,
    bulk: BulkArgs,
    action: DeadLetterAction,
) -> Result<(), CliError> {
    let BulkArgs {
        filter,
        limits,
        confirm,
        queue_access,
    } = bulk;
    if !filter.is_restrictive() && !limits.all {
        return Err(CliError::usage(
            "no messages are selected; pass --id, --reason, --older-than or --younger-than, or --all",
        ));
    }
    let filter = filter.normalized(context)?;
    let (by_id, why) = (filter.id.is_some(), confirm.why.as_deref());
    let session = DeadLetterSession {
        context,
        audit: Audit::of(context)?,
        markers: open_marker_store(context)?,
        by_id,
        why,
    };
    let (mut report, mut stopped, mut rate_limiter, mut stop_signal) = (
        BulkReport::default(),
        None,
        limits.rate_limiter(&confirm),
        StopSignal::watch(),
    );
    let mut unchecked = Unchecked::default();
    let (mut searched, mut has_match) = (Vec::new(), false);
    for broker in Broker::selected(context, filter.broker, &mut unchecked)? {
        let opened = listing::open(
            context,
            broker,
            Destination::DeadLetters,
            queue_access.count_policy(context),
        );
        let mut reader = match stop_signal.run(opened).await {
            Ok(reader) => reader,
            // The report still shows the actions on the previous broker.
            Err(failure) => {
                stopped = Some(failure);
                break;
            }
        };
        let bar = listing::progress_bar(&reader, action.command().verb);
        let processed = async {
            while !report.is_full(&limits)
                && let Some(message) = stop_signal.run(reader.next()).await?
            {
                bar.inc(1);
                has_match |= filter.matches_id(&message);
                if !message.state.is_pending() {
                    continue;
                }
                match filter.matches(&message) {
                    FilterMatch::Yes => {}
                    FilterMatch::No => continue,
                    FilterMatch::UnknownAge => {
                        report.note_unknown_age();
                        continue;
                    }
                }
                let result = match action {
                    DeadLetterAction::Redrive(accepted) => {
                        session
                            .redrive(
                                &mut reader,
                                &message,
                                accepted,
                                &mut rate_limiter,
                                confirm.yes,
                            )
                            .await
                    }
                    DeadLetterAction::Drop => {
                        session
                            .drop(&reader, &message, &mut rate_limiter, confirm.yes)
                            .await
                    }
                };
                report.note(&message, result)?;
            }
            Ok(())
        };
        stopped = processed.await.err();
        close_reader(reader, bar).await;
        if stopped.is_some() {
            break;
        }
        searched.push(listing::description(Destination::DeadLetters, broker));
    }
    // With --limit 0, or a broker that was not checked, the message may exist.
    if by_id
        && !has_match
        && stopped.is_none()
        && unchecked.names().is_none()
        && !report.is_full(&limits)
    {
        stopped = Some(filter.id_not_found(&searched));
    }
    report.finish(context, &confirm, action.command(), stopped, &unchecked)?;
    unchecked.end()
}

/// Opens the configured store; `None` if no store is configured. Then no marker is read: the
/// consumer still deduplicates copies, and messages whose marker might block a copy are skipped.
fn open_marker_store(context: &CliContext) -> Result<Option<MarkerStore>, CliError> {
    context
        .config
        .store_kind()?
        .map(|_| MarkerStore::of(&context.config))
        .transpose()
}

/// The state of one redrive or drop command.
struct DeadLetterSession<'a> {
    context: &'a CliContext,
    audit: Audit,
    markers: Option<MarkerStore>,
    /// Whether `--id` selects the messages.
    by_id: bool,
    why: Option<&'a str>,
}

impl DeadLetterSession<'_> {
    /// Redrives one message, or describes what would be done if `confirmed` is false. Clears the
    /// marker, publishes a copy, records the action in the audit and removes the original, in this
    /// order. A crash leaves the original, perhaps with a copy that the consumer deduplicates.
    ///
    /// # Errors
    /// The message cannot be redriven; it stays in its destination.
    async fn redrive(
        &self,
        reader: &mut DestinationReader,
        message: &DeadLetter,
        accepted: AcceptedRisks,
        rate_limiter: &mut RateLimiter,
        confirmed: bool,
    ) -> Result<String, CliError> {
        redrive_policy::check_source(message, reader.source())?;
        redrive_policy::check_complete(message, accepted)?;
        if self.markers.is_none() {
            redrive_policy::check_without_store(message)?;
        }
        let marker = self.marker(message).await?;
        let CopyPlan { age, effect } = redrive_policy::plan_copy(
            message,
            marker.as_ref(),
            self.by_id,
            accepted,
            self.context,
        )?;
        let after = copy_description(reader.source(), age, self.context);
        let clear = marker.as_ref().and_then(|marker| {
            Some((
                marker,
                clear_request(marker, effect, message, self.context)?,
            ))
        });
        let warning = redrive_policy::missing_marker_warning(
            message,
            marker.as_ref().map(ObservedMarker::state),
            self.context,
        );
        if !confirmed {
            let planned = match (&marker, &clear) {
                (None, _) => format!("would be {after}"),
                (Some(marker), None) => {
                    format!("its marker is {}; it would be {after}", marker.summary())
                }
                (Some(marker), Some(_)) if marker.state() == MarkerState::Absent => format!(
                    "its marker is absent, and would be written with the number of its last attempt; it would be {after}"
                ),
                (Some(marker), Some(_)) => format!(
                    "its marker is {}, and would be cleared; it would be {after}",
                    marker.summary()
                ),
            };
            return Ok(format!("{planned}{warning}"));
        }
        rate_limiter.next().await;
        let before = marker.as_ref().map_or_else(
            || "dead-lettered".to_owned(),
            |marker| format!("dead-lettered, {}", marker.summary()),
        );
        let attempt = marker
            .as_ref()
            .and_then(|marker| description::last_attempt(&marker.stored.marker))
            .unwrap_or(0)
            .max(last_attempt(message));
        let action = PlannedAction {
            attempt: Some(attempt),
            ..self.planned_action("dead-letters redrive", message, before, after.clone())
        };
        let pending = self.audit.begin(action, self.why).await?;
        if let Some((marker, request)) = clear
            && let Err(failure) = marker.apply(request, last_attempt(message)).await
        {
            self.audit.failed(pending, &failure).await?;
            return Err(failure);
        }
        publish(&self.audit, pending, reader, message, age).await?;
        Ok(format!("{after}{warning}"))
    }

    /// Removes one message, or describes that if `confirmed` is false. Kafka keeps the record; the
    /// audit records that it was dropped.
    ///
    /// # Errors
    /// The message stays in its destination, or whether it was removed is unknown.
    async fn drop(
        &self,
        reader: &DestinationReader,
        message: &DeadLetter,
        rate_limiter: &mut RateLimiter,
        confirmed: bool,
    ) -> Result<String, CliError> {
        redrive_policy::check_source(message, reader.source())?;
        if !confirmed {
            return Ok("would be dropped".into());
        }
        rate_limiter.next().await;
        let before = match self.marker(message).await? {
            Some(marker) => format!("dead-lettered, {}", marker.summary()),
            None => "dead-lettered".to_owned(),
        };
        let after = match message.reason() {
            "conflict" => DROPPED_CONFLICT,
            _ => "dropped",
        };
        let pending = self
            .audit
            .begin(
                self.planned_action("dead-letters drop", message, before, after.into()),
                self.why,
            )
            .await?;
        if let Err(failure) = reader.remove(message).await {
            self.audit.unknown(pending, &failure).await;
            return Err(failure);
        }
        self.audit.done(pending).await?;
        Ok("dropped".into())
    }

    fn planned_action(
        &self,
        what: &'static str,
        message: &DeadLetter,
        before: String,
        after: String,
    ) -> PlannedAction {
        PlannedAction {
            what,
            id: message.id().map(str::to_owned),
            handle: message.handle(),
            location: Some(message.location.clone()),
            before,
            after,
            attempt: None,
        }
    }

    /// The marker of the message's id; `None` if no store is configured or the message has no valid
    /// id.
    async fn marker(&self, message: &DeadLetter) -> Result<Option<ObservedMarker<'_>>, CliError> {
        let (Some(markers), Some(id)) = (&self.markers, message.id()) else {
            return Ok(None);
        };
        // Another program may have written the header with a value that is not a valid id.
        let Ok(id) = config::id(&self.context.config, id) else {
            return Ok(None);
        };
        ObservedMarker::read_marker(self.context, markers, id)
            .await
            .map(Some)
            .map_err(CliError::for_one_message)
    }
}

/// The marker change that lets the consumer handle a copy. `None` if the marker does not block a
/// copy, or if the marker is an expired claim in at most once: the consumer must put such an id in
/// doubt.
fn clear_request(
    marker: &ObservedMarker<'_>,
    effect: Effect,
    message: &DeadLetter,
    context: &CliContext,
) -> Option<OperationKind> {
    let seen = marker.stored.marker;
    let is_at_most_once =
        |hold: &Hold| [hold.guarantee, context.config.guarantee()].contains(&Guarantee::AtMostOnce);
    match seen {
        Marker::Absent if last_attempt(message) == 0 && effect == Effect::Nothing => None,
        Marker::InProgress(hold) if is_at_most_once(&hold) => None,
        _ => Some(OperationKind::Redrive { seen, effect }),
    }
}

/// The number of the last attempt of the message's id when the message was dead-lettered; 0 if
/// there was none, [`UNKNOWN_ATTEMPT`] if the id was used for another body.
fn last_attempt(message: &DeadLetter) -> u32 {
    if message.last_attempt() == 0 && message.reason() == "conflict" {
        UNKNOWN_ATTEMPT
    } else {
        message.last_attempt()
    }
}

/// The description of a redriven copy.
pub(crate) fn copy_description(target: &str, age: CopyAge, context: &CliContext) -> String {
    match age {
        CopyAge::New => format!("sent to {target}"),
        CopyAge::FirstSeen(_) => format!(
            "sent to {target} with its original oncegate-first-seen, so that the consumer reconciles it first: it may have been handled longer ago than the window of {}",
            config::window_description(&context.config)
        ),
    }
}
