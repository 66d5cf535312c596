//! `oncegate audit`: shows the actions of operators.

use std::collections::BTreeSet;

use clap::Args;

use super::{Audit, AuditEntry, MessageLocation};
use crate::CliContext;
use crate::config::TimeArg;
use crate::error::CliError;
use crate::output::{TextTable, ms, now_ms};

#[derive(Args)]
pub(crate) struct AuditArgs {
    /// Only actions on this id. For a message without an id, pass what `dead-letters list` shows in
    /// the id column
    #[arg(long)]
    id: Option<String>,
    /// Only actions by this operator
    #[arg(long)]
    who: Option<String>,
    /// Only actions in this scope, since several services may share an audit; "" selects actions
    /// without a scope
    #[arg(long)]
    scope: Option<String>,
    /// Only actions within this time, such as 24h
    #[arg(long, value_name = "TIME")]
    since: Option<TimeArg>,
    /// Maximum number of actions to show; the newest are shown
    #[arg(long, default_value_t = 100)]
    limit: usize,
}

pub(crate) fn table(actions: &[AuditEntry]) -> TextTable {
    let mut table = TextTable::new(&[
        "when", "who", "what", "scope", "id", "before", "after", "result", "where", "why",
        "failure",
    ]);
    for entry in actions {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        table.row([
            entry.at.clone(),
            entry.who.clone(),
            entry.what.clone(),
            or_dash(entry.scope.clone()),
            or_dash(entry.id.clone().or_else(|| entry.handle.clone())),
            entry.before.clone(),
            entry.after.clone(),
            entry.stage.description().to_owned(),
            or_dash(entry.location.as_ref().map(MessageLocation::to_string)),
            or_dash(entry.why.clone()),
            or_dash(entry.failure.clone()),
        ]);
    }
    table
}

pub(crate) async fn run(context: &CliContext, arguments: AuditArgs) -> Result<(), CliError> {
    context.check_configured()?;
    let id = arguments
        .id
        .as_deref()
        .map(|id| crate::config::id(&context.config, id))
        .transpose()?;
    let since = arguments
        .since
        .map_or(0, |since| now_ms().saturating_sub(ms(since.0)));
    let audit = Audit::of(context)?;
    let (mut actions, unreadable) = audit.read().await?;
    check_filter_value(
        "--who",
        arguments.who.as_deref(),
        actions.iter().map(|entry| entry.who.as_str()),
    )?;
    let configured_scope = context
        .config
        .text("store.scope")
        .into_iter()
        .chain([""])
        .filter(|_| !actions.is_empty());
    check_filter_value(
        "--scope",
        arguments.scope.as_deref(),
        actions
            .iter()
            .map(|entry| entry.scope.as_deref().unwrap_or_default())
            .chain(configured_scope),
    )?;
    actions.retain(|entry| {
        entry.at_ms >= since
            && id.as_ref().is_none_or(|id| {
                entry.concerns(id)
                    || arguments
                        .id
                        .as_deref()
                        .is_some_and(|handle| entry.concerns_handle(handle))
            })
            && arguments.who.as_ref().is_none_or(|who| entry.who == *who)
            && arguments
                .scope
                .as_ref()
                .is_none_or(|scope| entry.scope.as_deref().unwrap_or_default() == scope)
    });
    let shown = &actions[actions.len().saturating_sub(arguments.limit)..];
    let count = match actions.len() {
        all if all > shown.len() => format!("The newest {} of {all} are shown: raise --limit.", shown.len()),
        0 if audit.is_missing_file() => {
            "0 shown: the audit file does not exist. No action was recorded yet, or audit.file names another file.".into()
        }
        all => format!("{all} shown."),
    };
    context
        .format
        .print(&shown, format!("{}{count}", table(shown)))?;
    match unreadable {
        0 => Ok(()),
        _ => Err(CliError::incomplete(format!(
            "lines of the audit that cannot be read, and are not shown: {unreadable}"
        ))),
    }
}

/// Checks that the value of a filter is one of the known values, so that a typing error is not
/// reported as "no actions".
///
/// # Errors
/// The value is not among `known`, which is not empty.
fn check_filter_value<'a>(
    filter: &str,
    value: Option<&str>,
    known: impl Iterator<Item = &'a str>,
) -> Result<(), CliError> {
    let Some(value) = value else { return Ok(()) };
    let known: BTreeSet<&str> = known.collect();
    if known.is_empty() || known.contains(value) {
        return Ok(());
    }
    Err(CliError::unknown_value(
        filter,
        value,
        &known.into_iter().collect::<Vec<_>>(),
    ))
}
