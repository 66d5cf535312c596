//! `oncegate marker`: what the store remembers, and what an operator makes of it.

pub(crate) mod change;
pub(crate) mod told;

use clap::{Args, Subcommand};

use crate::Context;
use crate::config;
use crate::failure::Failure;
use crate::markers::Markers;
use crate::say::Table;
use told::Told;

#[derive(Subcommand)]
pub(crate) enum MarkerCommand {
    /// Says what stands under an id.
    Show {
        /// As the producer wrote it, or as it stands in keys and logs.
        id: String,
    },
    /// Lists markers, in no order.
    List(List),
    /// Lets an id be handled again: what is done, rejected or in doubt is forgotten.
    Forget(change::Change),
    /// Records an id as done, so that it is not handled any more.
    Complete(change::Change),
}

#[derive(Args)]
pub(crate) struct List {
    /// Only those in this state: in-progress, lapsed, in-doubt, rejected, cleared, done or
    /// unreadable. May be said several times.
    #[arg(long = "state", value_name = "STATE")]
    states: Vec<told::State>,
    /// Those of every scope, though one is configured.
    #[arg(long)]
    every_scope: bool,
    /// The most to show.
    #[arg(long, default_value_t = 100)]
    limit: usize,
    /// The most keys to look at; a store may hold a hundred million.
    #[arg(long, default_value_t = 1_000_000)]
    scan: usize,
}

pub(crate) async fn run(context: &Context, command: MarkerCommand) -> Result<(), Failure> {
    match command {
        MarkerCommand::Show { id } => show(context, &id).await,
        MarkerCommand::List(list) => self::list(context, list).await,
        MarkerCommand::Forget(change) => change::forget(context, change).await,
        MarkerCommand::Complete(change) => change::complete(context, change).await,
    }
}

async fn show(context: &Context, id: &str) -> Result<(), Failure> {
    let key = config::key(&context.config, &config::id(&context.config, id)?)?;
    let standing = Markers::of(&context.config)?.look(&key).await?;
    let told = Told::of(key.as_str(), &standing, context.config.window());
    context.format.print(&told, told.for_people())
}

async fn list(context: &Context, list: List) -> Result<(), Failure> {
    // Small enough not to hold the server up.
    const PAGE: usize = 500;
    let window = context.config.window();
    let mut browse = Markers::of(&context.config)?.browse(PAGE).await?;
    let scope = context
        .config
        .text("store.scope")
        .filter(|_| !list.every_scope)
        .map(|scope| format!("{scope}|"));
    let bar = indicatif::ProgressBar::new_spinner().with_message("keys looked at");
    bar.set_style(
        indicatif::ProgressStyle::with_template("{spinner} {pos} {msg}")
            .unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()),
    );
    let (mut shown, mut looked_at, mut more) = (Vec::new(), 0, false);
    while let Some(page) = browse.next().await? {
        looked_at += page.len();
        bar.set_position(looked_at as u64);
        let ours = page.into_iter().filter(|listed| {
            scope
                .as_ref()
                .is_none_or(|scope| listed.name.starts_with(scope))
        });
        let told = ours.map(|listed| Told::of_listed(&listed, window));
        shown.extend(
            told.filter(|told| list.states.is_empty() || list.states.contains(&told.state)),
        );
        if shown.len() > list.limit || looked_at >= list.scan {
            more = true;
            break;
        }
    }
    bar.finish_and_clear();
    shown.truncate(list.limit);
    let mut table = Table::new(&[
        "key",
        "state",
        "attempts",
        "fence",
        "written",
        "expires in",
        "fingerprint",
    ]);
    for told in &shown {
        table.row(told.cells());
    }
    let rest = if more {
        "\nThere may be more: raise --limit and --scan."
    } else {
        ""
    };
    let machines = serde_json::json!({ "markers": shown, "looked_at": looked_at, "all": !more });
    context.format.print(
        &machines,
        format!(
            "{table}{} shown of {looked_at} looked at.{rest}",
            shown.len()
        ),
    )
}
