//! Applies an action to many messages and reports the results.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use clap::Args;
use oncegate::shutdown_signal;
use serde::Serialize;

use super::filter::unknown_age_note;
use super::{CopyAge, DeadLetter, DestinationReader, PublishError};
use crate::CliContext;
use crate::audit::{Audit, PendingAction};
use crate::error::{CliError, CliErrorCode};
use crate::output::{TextTable, Unchecked};

/// Whether to apply a change, and why.
#[derive(Args)]
pub(crate) struct ConfirmArgs {
    /// Show what would be done and exit with 0
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Apply the change; without this, show what would be done and exit with 4
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) yes: bool,
    /// The reason, for the audit
    #[arg(long, value_name = "TEXT")]
    pub(crate) why: Option<String>,
}

/// Selects and limits the messages of one command.
#[derive(Args)]
pub(crate) struct BulkLimits {
    /// Select every pending message, if no filter is given
    #[arg(long)]
    pub(crate) all: bool,
    /// Maximum number of messages to process; skipped ones do not count
    #[arg(long)]
    pub(crate) limit: Option<usize>,
    /// Maximum number of messages per second
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: Option<u32>,
}

impl BulkLimits {
    /// Limits the rate of changes to `--rate`; a preview is not limited.
    pub(crate) fn rate_limiter(&self, confirm: &ConfirmArgs) -> RateLimiter {
        RateLimiter(self.rate.filter(|_| confirm.yes).map(|rate| {
            let mut interval = tokio::time::interval(Duration::from_secs(1) / rate);
            interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            interval
        }))
    }
}

/// Spaces changes evenly; without a rate it does not wait.
pub(crate) struct RateLimiter(Option<tokio::time::Interval>);

impl RateLimiter {
    /// Waits until the next change is allowed.
    pub(crate) async fn next(&mut self) {
        if let Some(interval) = &mut self.0 {
            interval.tick().await;
        }
    }
}

/// Ends the command on SIGTERM or Ctrl-C after the current message, so that it prints the report
/// and leaves no message with an unknown result.
pub(crate) struct StopSignal(Pin<Box<dyn Future<Output = ()> + Send>>);

impl StopSignal {
    /// Installs handlers for SIGTERM and Ctrl-C, so that they no longer end the process.
    pub(crate) fn watch() -> Self {
        Self(Box::pin(shutdown_signal()))
    }

    /// Runs an operation. Drops it if a stop signal arrives first.
    ///
    /// # Errors
    /// That of the operation, or a signal arrived.
    ///
    /// # Panics
    /// If it is called again after a signal arrived.
    pub(crate) async fn run<T>(
        &mut self,
        operation: impl Future<Output = Result<T, CliError>>,
    ) -> Result<T, CliError> {
        tokio::select! {
            biased;
            () = &mut self.0 => Err(CliError::incomplete("stopped by a signal before the end; run the command again for the remaining messages")),
            result = operation => result,
        }
    }
}

/// The actual or planned result for one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum BulkOutcome {
    /// The action was applied, or would be.
    Done,
    /// The message was skipped and stays in its destination, or would.
    Left,
}

#[derive(Serialize)]
struct BulkRow {
    location: String,
    id: Option<String>,
    /// What commands accept in place of the id, if the message has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    handle: Option<String>,
    reason: String,
    outcome: BulkOutcome,
    description: String,
}

/// The results of a command for all its messages and ids.
#[derive(Default)]
pub(crate) struct BulkReport {
    rows: Vec<BulkRow>,
    done: usize,
    left: usize,
    /// The number of messages that match all filters except those by age, because their age is
    /// unknown.
    unknown_age: usize,
    /// Marker changes, for JSON output.
    markers: Vec<serde_json::Value>,
    /// A text for each id that has neither a marker in doubt nor a message: the decision about it,
    /// or the store and the destinations that were searched.
    not_in_doubt: Vec<String>,
}

/// The maximum number of messages that a report lists; its totals include the others.
const MAX_LISTED: usize = 1_000;

impl BulkReport {
    fn add(&mut self, message: &DeadLetter, outcome: BulkOutcome, description: impl Into<String>) {
        match outcome {
            BulkOutcome::Done => self.done += 1,
            BulkOutcome::Left => self.left += 1,
        }
        if self.rows.len() < MAX_LISTED {
            let (location, id, reason) = (
                message.location.to_string(),
                message.id().map(str::to_owned),
                message.reason().to_owned(),
            );
            self.rows.push(BulkRow {
                location,
                id,
                handle: message.handle(),
                reason,
                outcome,
                description: description.into(),
            });
        }
    }

    /// Adds the result for one message.
    ///
    /// # Errors
    /// Returns the failure of the message if it concerns all messages, so that the command must
    /// stop.
    pub(crate) fn note(
        &mut self,
        message: &DeadLetter,
        result: Result<String, CliError>,
    ) -> Result<(), CliError> {
        match result {
            Ok(text) => self.add(message, BulkOutcome::Done, text),
            Err(failure) => {
                self.add(message, BulkOutcome::Left, failure.to_string());
                if !concerns_one_message(&failure) {
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn total(&self) -> usize {
        self.done + self.left
    }

    /// Whether `--limit` is reached. Skipped messages do not count: otherwise, each run would end
    /// at the same skipped messages.
    pub(crate) fn is_full(&self, limits: &BulkLimits) -> bool {
        limits.limit.is_some_and(|limit| self.done >= limit)
    }

    pub(crate) fn note_unknown_age(&mut self) {
        self.unknown_age += 1;
    }

    pub(crate) fn note_marker(&mut self, marker: serde_json::Value) {
        self.markers.push(marker);
    }

    /// Adds the result for an id that has no message.
    pub(crate) fn note_done(&mut self, id: &str, description: String) {
        self.done += 1;
        self.note_id(id, BulkOutcome::Done, description);
    }

    /// Adds a skipped id that has no message.
    pub(crate) fn note_left(&mut self, id: &str, description: String) {
        self.left += 1;
        self.note_id(id, BulkOutcome::Left, description);
    }

    /// Adds a skipped id that has neither a marker in doubt nor a message.
    pub(crate) fn note_not_in_doubt(&mut self, id: &str, description: String) {
        self.not_in_doubt.push(description.clone());
        self.note_left(id, description);
    }

    fn note_id(&mut self, id: &str, outcome: BulkOutcome, description: String) {
        if self.rows.len() < MAX_LISTED {
            let none = || "-".to_owned();
            self.rows.push(BulkRow {
                location: none(),
                id: Some(id.to_owned()),
                handle: None,
                reason: none(),
                outcome,
                description,
            });
        }
    }

    /// Prints the report.
    ///
    /// # Errors
    /// The failure that stopped the command; otherwise that this was a preview, or that messages or
    /// ids were skipped.
    pub(crate) fn finish(
        self,
        context: &CliContext,
        confirm: &ConfirmArgs,
        command: BulkCommand,
        stopped: Option<CliError>,
        unchecked: &Unchecked,
    ) -> Result<(), CliError> {
        let mut table = TextTable::new(&["where", "id", "reason", "what"]);
        for row in &self.rows {
            table.row([
                row.location.clone(),
                row.id
                    .clone()
                    .or_else(|| row.handle.clone())
                    .unwrap_or_else(|| "-".into()),
                row.reason.clone(),
                row.description.clone(),
            ]);
        }
        let (total, shown) = (self.total(), self.rows.len());
        let truncation_note = if shown < total {
            format!("Only the first {shown} of {total} are shown.\n")
        } else {
            String::new()
        };
        let (verb, would) = (command.verb, if confirm.yes { "" } else { "would be " });
        let unknown_age_note = unknown_age_note(self.unknown_age);
        let summary = format!(
            "{truncation_note}{} {would}{verb}, {} {would}left where they are.{unknown_age_note}{}",
            self.done,
            self.left,
            unchecked.to_text()
        );
        self.print(
            context,
            confirm,
            command,
            stopped.as_ref(),
            unchecked,
            format!("{table}{summary}"),
        )?;
        self.end(confirm, stopped)
    }

    fn print(
        &self,
        context: &CliContext,
        confirm: &ConfirmArgs,
        command: BulkCommand,
        stopped: Option<&CliError>,
        unchecked: &Unchecked,
        text: String,
    ) -> Result<(), CliError> {
        let json = serde_json::json!({
            "action": command.name, "changed": confirm.yes, "done": self.done, "left": self.left, "without_age": self.unknown_age,
            "markers": self.markers, "messages": self.rows, "all": self.rows.len() == self.total(), "stopped": stopped.map(ToString::to_string),
            "not_checked": unchecked,
        });
        context.format.print(&json, text)
    }

    fn end(&self, confirm: &ConfirmArgs, stopped: Option<CliError>) -> Result<(), CliError> {
        match stopped {
            Some(failure) => Err(failure),
            None if confirm.dry_run => Ok(()),
            // The same command with --yes would change nothing, so the preview does not suggest it.
            None if !confirm.yes
                && self.done == 0
                && self.left == self.not_in_doubt.len()
                && self.left > 0 =>
            {
                Err(CliError::incomplete(self.not_in_doubt.join("; ")))
            }
            None if !confirm.yes => Err(CliError::not_confirmed()),
            None if self.left > 0 => Err(CliError::incomplete(format!(
                "{} were left where they are",
                self.left
            ))),
            None => Ok(()),
        }
    }
}

/// The name of a bulk command and the verb for its report.
#[derive(Clone, Copy)]
pub(crate) struct BulkCommand {
    pub(crate) name: &'static str,
    pub(crate) verb: &'static str,
}

/// Publishes a copy and waits for its confirmation, records it in the audit, and removes the
/// original, in this order. After a crash the original remains, perhaps with a copy that the
/// consumer deduplicates.
///
/// # Errors
/// The message stays in its destination, or, after its copy was confirmed on RabbitMQ, it is unknown
/// whether it was removed; the audit records whether a copy may exist.
pub(crate) async fn publish(
    audit: &Audit,
    pending: PendingAction,
    reader: &mut DestinationReader,
    message: &DeadLetter,
    age: CopyAge,
) -> Result<(), CliError> {
    match reader.publish(message, age).await {
        Ok(()) => {}
        Err(PublishError::Refused(failure)) => {
            audit.not_sent(pending, &failure).await?;
            return Err(failure);
        }
        Err(PublishError::Unconfirmed(failure)) => {
            audit.unknown(pending, &failure).await;
            return Err(failure);
        }
    }
    remove(audit, pending, reader, message)
        .await
        .map_err(|failure| failure.with(&format!("its copy was sent to {}", reader.source())))
}

/// Records the action as done in the audit and removes the message.
///
/// # Errors
/// The audit cannot be written, and the message stays; or RabbitMQ closed the channel, and it is
/// unknown whether the message was removed.
pub(crate) async fn remove(
    audit: &Audit,
    pending: PendingAction,
    reader: &DestinationReader,
    message: &DeadLetter,
) -> Result<(), CliError> {
    audit.done(pending).await?;
    reader.remove(message).await
}

/// Whether the failure concerns only this message, so that the next may be tried.
fn concerns_one_message(failure: &CliError) -> bool {
    failure.code == CliErrorCode::Incomplete
}

/// Removes the progress bar and closes the reader, which requeues unacknowledged messages on
/// RabbitMQ.
pub(crate) async fn close_reader(reader: DestinationReader, bar: indicatif::ProgressBar) {
    bar.finish_and_clear();
    reader.close().await;
}
