//! `oncegate outbox`: lists, retries and drops messages of the outbox in PostgreSQL. Each change is
//! recorded in the audit before and after it.

use clap::{Args, Subcommand};

use crate::destination::bulk::ConfirmArgs;

#[derive(Subcommand)]
pub(crate) enum OutboxCommand {
    /// List parked messages, which cannot be published
    List(OutboxListArgs),
    /// Let the relay publish parked messages again
    Retry(OutboxChangeArgs),
    /// Delete parked messages, with --unsent also others, without publishing them
    Drop(OutboxChangeArgs),
}

#[derive(Args)]
pub(crate) struct OutboxSelection {
    /// Only this row; may be repeated. `list` also shows it if it is not parked
    #[arg(long = "number", value_name = "NUMBER")]
    numbers: Vec<i64>,
    /// Only messages for this queue, topic or routing key
    #[arg(long, value_name = "NAME")]
    destination: Option<String>,
    /// Also messages that are not parked: they wait for the relay
    #[arg(long)]
    unsent: bool,
    /// Maximum number of messages
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

#[derive(Args)]
pub(crate) struct OutboxListArgs {
    #[command(flatten)]
    selection: OutboxSelection,
}

#[derive(Args)]
pub(crate) struct OutboxChangeArgs {
    #[command(flatten)]
    selection: OutboxSelection,
    /// Needed without --number and --destination: select parked messages (with --unsent, all), up to
    /// --limit
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    confirm: ConfirmArgs,
}

#[cfg(not(feature = "postgres"))]
pub(crate) async fn run(
    _: &crate::CliContext,
    _: OutboxCommand,
) -> Result<(), crate::error::CliError> {
    Err(crate::error::CliError::feature_missing(
        "PostgreSQL",
        "postgres",
    ))
}

#[cfg(feature = "postgres")]
pub(crate) use on_postgres::run;

#[cfg(feature = "postgres")]
mod on_postgres {
    use oncegate_config::StoreKind;
    use oncegate_postgres::{ListedMessage, OutboxFilter, Postgres};
    use serde::Serialize;

    use super::{OutboxChangeArgs, OutboxCommand, OutboxSelection};
    use crate::CliContext;
    use crate::audit::{Audit, PlannedAction};
    use crate::error::CliError;
    use crate::marker_store::REPLY_TIMEOUT;
    use crate::output::{TextTable, utc_text};

    pub(crate) async fn run(context: &CliContext, command: OutboxCommand) -> Result<(), CliError> {
        context.check_configured()?;
        let postgres = match context.config.store_kind()? {
            Some(StoreKind::Postgres) => context.config.postgres(Some(REPLY_TIMEOUT))?,
            _ => {
                return Err(CliError::usage(
                    "the outbox is in PostgreSQL: set store.url to its database",
                ));
            }
        };
        match command {
            OutboxCommand::List(list) => self::list(context, &postgres, &list.selection).await,
            OutboxCommand::Retry(change) => {
                self::change(context, &postgres, OutboxChange::Retry, change).await
            }
            OutboxCommand::Drop(change) => {
                self::change(context, &postgres, OutboxChange::Drop, change).await
            }
        }
    }

    #[derive(Clone, Copy)]
    enum OutboxChange {
        Retry,
        Drop,
    }

    impl OutboxChange {
        fn what(self) -> &'static str {
            match self {
                Self::Retry => "outbox retry",
                Self::Drop => "outbox drop",
            }
        }

        /// The state of a message after the change.
        fn after(self) -> &'static str {
            match self {
                Self::Retry => "unsent",
                Self::Drop => "dropped",
            }
        }
    }

    /// A message as JSON.
    #[derive(Serialize)]
    struct OutboxEntry<'a> {
        number: i64,
        id: &'a str,
        exchange: &'a str,
        destination: &'a str,
        state: &'static str,
        stored_at_ms: u64,
        bytes: u64,
        error: Option<&'a str>,
    }

    impl<'a> OutboxEntry<'a> {
        fn of(message: &'a ListedMessage) -> Self {
            Self {
                number: message.number,
                id: &message.id,
                exchange: &message.exchange,
                destination: &message.destination,
                state: state(message),
                stored_at_ms: message.created_ms,
                bytes: message.bytes,
                error: message.error.as_deref(),
            }
        }
    }

    fn state(message: &ListedMessage) -> &'static str {
        match message.error {
            Some(_) => "parked",
            None => "unsent",
        }
    }

    /// The selected messages, and whether they are all. Rows that are selected by their numbers are
    /// included if they are not parked.
    async fn selected(
        postgres: &Postgres,
        selection: &OutboxSelection,
    ) -> Result<(Vec<ListedMessage>, bool), CliError> {
        let filter = OutboxFilter {
            unsent: selection.unsent || !selection.numbers.is_empty(),
            destination: selection.destination.clone(),
            numbers: selection.numbers.clone(),
        };
        let limit = selection.limit.saturating_add(1);
        let mut messages = postgres.list_outbox(&filter, limit).await?;
        let all = messages.len() <= selection.limit;
        messages.truncate(selection.limit);
        Ok((messages, all))
    }

    fn table(messages: &[ListedMessage]) -> TextTable {
        let mut table =
            TextTable::new(&["number", "id", "destination", "state", "stored", "error"]);
        for message in messages {
            let destination = match message.exchange.as_str() {
                "" => message.destination.clone(),
                exchange => format!("{exchange}/{}", message.destination),
            };
            table.row([
                message.number.to_string(),
                message.id.clone(),
                destination,
                state(message).to_owned(),
                utc_text(message.created_ms),
                message.error.clone().unwrap_or_default(),
            ]);
        }
        table
    }

    fn entries(messages: &[ListedMessage]) -> Vec<OutboxEntry<'_>> {
        messages.iter().map(OutboxEntry::of).collect()
    }

    fn more(all: bool) -> &'static str {
        if all {
            ""
        } else {
            "\nThere are more: raise --limit."
        }
    }

    /// Row numbers as text, such as `row 3` or `rows 3, 4`.
    fn rows(numbers: &[i64]) -> String {
        let s = if numbers.len() == 1 { "" } else { "s" };
        let numbers: Vec<String> = numbers.iter().map(i64::to_string).collect();
        format!("row{s} {}", numbers.join(", "))
    }

    async fn list(
        context: &CliContext,
        postgres: &Postgres,
        selection: &OutboxSelection,
    ) -> Result<(), CliError> {
        let (messages, all) = selected(postgres, selection).await?;
        let json = serde_json::json!({ "messages": entries(&messages), "all": all });
        let text = format!("{}{} shown.{}", table(&messages), messages.len(), more(all));
        context.format.print(&json, text)
    }

    /// Shows the change, or applies it with `--yes`, one audited action for each message.
    async fn change(
        context: &CliContext,
        postgres: &Postgres,
        change: OutboxChange,
        arguments: OutboxChangeArgs,
    ) -> Result<(), CliError> {
        let OutboxChangeArgs {
            selection,
            all: every,
            confirm,
        } = arguments;
        if selection.numbers.is_empty() && selection.destination.is_none() && !every {
            return Err(CliError::usage(
                "select messages with --number, --destination or --all",
            ));
        }
        let (found, all) = selected(postgres, &selection).await?;
        let is_missing = |number: &i64| found.iter().all(|message| message.number != *number);
        let by_number = !selection.numbers.is_empty();
        let missing: Vec<i64> = match all {
            true => selection.numbers.into_iter().filter(is_missing).collect(),
            false => Vec::new(), // they may be beyond the limit
        };
        // The relay publishes messages that are not parked.
        let drops_unsent = selection.unsent && matches!(change, OutboxChange::Drop);
        let (messages, unparked): (Vec<_>, Vec<_>) = found
            .into_iter()
            .partition(|message| drops_unsent || message.error.is_some());
        let unparked: Vec<i64> = unparked.iter().map(|message| message.number).collect();
        let what = change.what();
        let (mut problems, mut notes) = (Vec::new(), more(all).to_owned());
        if by_number && !unparked.is_empty() {
            let left = rows(&unparked);
            match change {
                OutboxChange::Retry => {
                    notes.push_str(&format!("\nNot parked, so the relay publishes it: {left}."));
                }
                OutboxChange::Drop => problems.push(format!(
                    "not parked, and waiting for the relay: {left}; add --unsent to drop"
                )),
            }
        }
        if !missing.is_empty() {
            let missing = rows(&missing);
            problems.push(format!(
                "not found: {missing}; published or dropped before, or not for --destination"
            ));
        }
        let summary = |changed: String| match (messages.is_empty(), drops_unsent) {
            (false, _) => format!("{what}: {changed}.{notes}"),
            (true, true) => format!("{what}: no message is selected.{notes}"),
            (true, false) => format!("{what}: no parked message is selected.{notes}"),
        };
        let report = |changed_rows: usize, done: usize| {
            serde_json::json!({
                "action": what, "changed": done > 0, "done": done, "left": unparked.len() + changed_rows,
                "messages": entries(&messages), "all": all,
            })
        };
        if !confirm.yes {
            let text = format!(
                "{}{}",
                table(&messages),
                summary(format!("{} would be {}", messages.len(), change.after()))
            );
            context.format.print(&report(0, 0), text)?;
            return match (problems.is_empty(), confirm.dry_run) {
                (false, _) => Err(CliError::incomplete(problems.join("; "))),
                (true, true) => Ok(()),
                (true, false) => Err(CliError::not_confirmed()),
            };
        }
        let audit = Audit::of(context)?;
        let (mut done, mut changed_rows) = (0, 0);
        for message in &messages {
            let action = PlannedAction {
                what,
                id: Some(message.id.clone()),
                handle: None,
                location: None,
                before: format!("{} in row {}", state(message), message.number),
                after: change.after().to_owned(),
                attempt: None,
            };
            let pending = audit.begin(action, confirm.why.as_deref()).await?;
            let changed = match change {
                OutboxChange::Retry => postgres.retry_outbox(message.number).await,
                OutboxChange::Drop => postgres.drop_outbox(message).await,
            };
            match changed {
                Ok(true) => {
                    audit.done(pending).await?;
                    done += 1;
                }
                Ok(false) => {
                    let text = format!("row {} changed since it was read", message.number);
                    audit.failed(pending, &CliError::incomplete(text)).await?;
                    changed_rows += 1;
                }
                Err(error) => {
                    let failure = error.into();
                    audit.failed(pending, &failure).await?;
                    return Err(failure);
                }
            }
        }
        let text = summary(format!("{done} messages are {} now", change.after()));
        context.format.print(&report(changed_rows, done), text)?;
        if changed_rows > 0 {
            problems.push(format!(
                "{changed_rows} rows changed since they were read, for example because a relay published them; nothing was done to them"
            ));
        }
        match problems.is_empty() {
            true => Ok(()),
            false => Err(CliError::incomplete(problems.join("; "))),
        }
    }
}
