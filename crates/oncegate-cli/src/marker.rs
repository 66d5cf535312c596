//! `oncegate marker`: shows, lists and changes markers.

pub(crate) mod change;
pub(crate) mod description;

use std::collections::BTreeSet;

use clap::{Args, Subcommand};

use crate::CliContext;
use crate::config;
use crate::error::CliError;
use crate::marker_store::MarkerStore;
use crate::output::TextTable;
use description::MarkerDescription;

#[derive(Subcommand)]
pub(crate) enum MarkerCommand {
    /// Show the marker of an id
    Show {
        /// The id as the producer wrote it, or as keys and logs show it
        id: String,
    },
    /// List markers, in no particular order
    List(MarkerListArgs),
    /// Clear the marker of a done or rejected id, so that the id can be handled again
    Forget(change::ChangeArgs),
    /// Record an id as done, so that it is not handled again
    Complete(change::ChangeArgs),
}

#[derive(Args)]
pub(crate) struct MarkerListArgs {
    /// Only markers in this state; may be repeated. `lapsed`: in progress, and the lease has
    /// expired; `cleared`: free to be claimed after a failed attempt or an operator action
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<description::MarkerState>,
    /// List markers of every scope, even if a scope is configured
    #[arg(long)]
    every_scope: bool,
    /// Maximum number of markers to show
    #[arg(long, default_value_t = 100)]
    limit: usize,
    /// Maximum number of keys to scan
    #[arg(long, default_value_t = 1_000_000)]
    scan: usize,
}

/// The maximum number of other scopes that `list` names.
const MAX_NAMED_SCOPES: usize = 5;

/// The scope of a key, or `none`.
fn scope_text(key: &str) -> String {
    key.split_once('|')
        .map_or_else(|| "none".to_owned(), |(scope, _)| scope.to_owned())
}

pub(crate) async fn run(context: &CliContext, command: MarkerCommand) -> Result<(), CliError> {
    match command {
        MarkerCommand::Show { id } => show(context, &id).await,
        MarkerCommand::List(list) => self::list(context, list).await,
        MarkerCommand::Forget(change) => change::forget(context, change).await,
        MarkerCommand::Complete(change) => change::complete(context, change).await,
    }
}

async fn show(context: &CliContext, id: &str) -> Result<(), CliError> {
    let key = config::key(&context.config, &config::id(&context.config, id)?)?;
    let stored = MarkerStore::of(&context.config)?
        .read_marker(&context.config, &key)
        .await?;
    let description = MarkerDescription::of(key.as_str(), &stored, context.config.dedup_window());
    context.format.print(&description, description.to_text())
}

async fn list(context: &CliContext, list: MarkerListArgs) -> Result<(), CliError> {
    // Keys per request: few enough not to block other clients of Redis.
    const PAGE: usize = 500;
    let window = context.config.dedup_window();
    let mut browse = MarkerStore::of(&context.config)?.browse(PAGE).await?;
    let scope = context
        .config
        .text("store.scope")
        .filter(|_| !list.every_scope)
        .map(|scope| format!("{scope}|"));
    let bar = indicatif::ProgressBar::new_spinner().with_message("keys scanned");
    bar.set_style(
        indicatif::ProgressStyle::with_template("{spinner} {pos} {msg}")
            .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()),
    );
    let (mut shown, mut scanned, mut more) = (Vec::new(), 0, false);
    let (mut in_scope, mut other_scopes) = (0, BTreeSet::new());
    while let Some(page) = browse.next().await? {
        scanned += page.len();
        bar.set_position(scanned as u64);
        let selected = page.into_iter().filter(|listed| match &scope {
            Some(scope) if !listed.name.starts_with(scope) => {
                if other_scopes.len() < MAX_NAMED_SCOPES {
                    other_scopes.insert(scope_text(&listed.name));
                }
                false
            }
            _ => {
                in_scope += 1;
                true
            }
        });
        let descriptions = selected.map(|listed| MarkerDescription::of_listed(&listed, window));
        shown.extend(descriptions.filter(|description| {
            list.states.is_empty() || list.states.contains(&description.state)
        }));
        if shown.len() > list.limit || scanned >= list.scan {
            more = true;
            break;
        }
    }
    bar.finish_and_clear();
    shown.truncate(list.limit);
    let mut table = TextTable::new(&[
        "key",
        "state",
        "attempts",
        "last attempt",
        "written",
        "expires in",
        "fingerprint",
    ]);
    for description in &shown {
        table.row(description.cells());
    }
    let more_note = if more {
        "\nThere may be more: raise --limit and --scan."
    } else {
        ""
    };
    let scope_note = match &scope {
        Some(scope) if in_scope == 0 && scanned > 0 => format!(
            "\nNo key has the scope {}. Scopes of scanned keys: {}. Correct store.scope, or pass --every-scope.",
            scope.trim_end_matches('|'),
            Vec::from_iter(other_scopes).join(", ")
        ),
        _ => String::new(),
    };
    let json = serde_json::json!({ "markers": shown, "scanned": scanned, "all": !more });
    context.format.print(
        &json,
        format!(
            "{table}{} shown of {scanned} scanned.{more_note}{scope_note}",
            shown.len()
        ),
    )
}
