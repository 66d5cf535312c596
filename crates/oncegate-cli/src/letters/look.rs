//! `list` and `show`, of dead letters and of messages in doubt.

use clap::Args;
use serde::Serialize;

use super::act::closing;
use super::filter::{Filter, Meant, ageless};
use super::{Broker, COUNTED_OFTEN, Counts, Done, Letter, Reader, Shelf, View};
use crate::Context;
use crate::audit::{Audit, Entry};
use crate::failure::Failure;
use crate::say::{NotLookedAt, Table, plain, span};

#[derive(Args)]
pub(crate) struct List {
    #[command(flatten)]
    filter: Filter,
    /// The most to show.
    #[arg(long, default_value_t = 100)]
    limit: usize,
    /// Shows what was redriven, dropped or resolved too: on Kafka it stays where it is.
    #[arg(long)]
    everything: bool,
    #[command(flatten)]
    looking: Looking,
}

#[derive(Args)]
pub(crate) struct Show {
    /// As the producer wrote it, or as it stands in keys and logs.
    id: String,
    /// Shows the bodies too.
    #[arg(long)]
    body: bool,
    /// The broker to look at, where both are configured.
    #[arg(long)]
    broker: Option<Broker>,
    #[command(flatten)]
    looking: Looking,
}

/// How queues are looked into.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Looking {
    /// Looks into a RabbitMQ queue that has other arguments than oncegate gives it, though a quorum
    /// queue counts that towards its delivery limit.
    #[arg(long)]
    accept_delivery_counts: bool,
}

impl Looking {
    /// As it was said here, or once and for all.
    pub(crate) fn counts(self, context: &Context) -> Counts {
        let is_accepted = self.accept_delivery_counts
            || context.config.text("rabbitmq.delivery-counts") == Some("accepted");
        if is_accepted {
            Counts::Accepted
        } else {
            Counts::Refused
        }
    }
}

async fn acts(context: &Context) -> Result<Vec<Entry>, Failure> {
    if Audit::has_place(context)? {
        Audit::of(context)?.acts().await
    } else {
        Ok(Vec::new())
    }
}

/// Opens a destination, with what the audit knows of it.
pub(crate) async fn open(
    context: &Context,
    broker: Broker,
    shelf: Shelf,
    counts: Counts,
) -> Result<Reader, Failure> {
    Reader::open(
        context,
        broker,
        shelf,
        Done::of(&acts(context).await?),
        counts,
    )
    .await
}

/// The same to look at it alone. On RabbitMQ the audit knows of what was cut off alone, and without
/// it the letters are still to be seen.
async fn open_to_look(
    context: &Context,
    broker: Broker,
    shelf: Shelf,
    counts: Counts,
    not_looked_at: &mut NotLookedAt,
) -> Result<Reader, Failure> {
    match open(context, broker, shelf, counts).await {
        Ok(reader) if broker == Broker::Kafka && !Audit::has_place(context)? => {
            let says = "no store and no audit.file is configured: what was redriven or dropped is shown as waiting";
            not_looked_at.note("the audit", Failure::usage(says));
            Ok(reader)
        }
        Err(_)
            if broker == Broker::Rabbitmq
                && let Err(failure) = acts(context).await =>
        {
            not_looked_at.note("the audit", failure);
            Reader::open(context, broker, shelf, Done::of(&[]), counts).await
        }
        opened => opened,
    }
}

/// A bar for who waits at a terminal.
pub(crate) fn bar(reader: &Reader, message: &'static str) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(reader.total()).with_message(message);
    let style = indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar
}

/// All letters that are meant, without their bodies unless they are wanted, and whether there may
/// be more.
pub(crate) async fn gather(
    context: &Context,
    shelf: Shelf,
    broker: Broker,
    counts: Counts,
    limit: usize,
    not_looked_at: &mut NotLookedAt,
    mut takes: impl FnMut(&Letter) -> bool,
) -> Result<(Vec<Letter>, bool), Failure> {
    let mut reader = open_to_look(context, broker, shelf, counts, not_looked_at).await?;
    let bar = bar(&reader, "looked at");
    let (mut found, mut more) = (Vec::new(), false);
    let read = async {
        while let Some(letter) = reader.next().await? {
            bar.inc(1);
            if !takes(&letter) {
                continue;
            }
            if found.len() == limit {
                more = true;
                break;
            }
            found.push(letter);
        }
        Ok(())
    };
    let read: Result<(), Failure> = read.await;
    closing(reader, bar).await;
    read.map(|()| (found, more))
}

/// How a destination is named where it was not looked at.
pub(crate) fn named(shelf: Shelf, broker: Broker) -> String {
    format!("the {} destination on {}", shelf.name(), broker.name())
}

pub(crate) async fn list(context: &Context, shelf: Shelf, list: List) -> Result<(), Failure> {
    let (filter, counts) = (list.filter.checked(context)?, list.looking.counts(context));
    let (mut letters, mut more, mut without_age) = (Vec::new(), false, 0);
    let mut not_looked_at = NotLookedAt::default();
    for broker in Broker::wanted(context, filter.broker, &mut not_looked_at)? {
        let takes = |letter: &Letter| {
            if !list.everything && !letter.state.waits() {
                return false;
            }
            let meant = filter.judge(letter);
            without_age += usize::from(meant == Meant::Ageless);
            meant == Meant::Yes
        };
        let left = list.limit - letters.len();
        match gather(
            context,
            shelf,
            broker,
            counts,
            left,
            &mut not_looked_at,
            takes,
        )
        .await
        {
            Ok((found, rest)) => {
                letters.extend(found);
                more |= rest;
            }
            Err(failure) => not_looked_at.note(named(shelf, broker), failure),
        }
    }
    let views: Vec<View<'_>> = letters.iter().map(Letter::view).collect();
    let rest = if more {
        "\nThere are more: raise --limit."
    } else {
        ""
    };
    let all = !more && not_looked_at.places().is_none();
    let machines = serde_json::json!({ "letters": views, "all": all, "without_age": without_age, "not_looked_at": not_looked_at });
    let (count, counted) = (
        letters.len(),
        if counts == Counts::Refused {
            counted(&letters)
        } else {
            String::new()
        },
    );
    let unseen = not_looked_at.for_people();
    context.format.print(
        &machines,
        format!(
            "{}{count} shown.{rest}{}{counted}{unseen}",
            table(&letters),
            ageless(without_age)
        ),
    )?;
    not_looked_at.end()
}

/// What looking does to letters on a queue that counts it.
fn counted(letters: &[Letter]) -> String {
    match letters.iter().filter_map(|letter| letter.looks).max() {
        None => String::new(),
        Some(0) => String::new(),
        Some(looks) => format!(
            "\nRabbitMQ may count each look at them: {} before this one. What was counted {COUNTED_OFTEN} times is replaced by a copy at the next \
             look, which is counted from zero: a policy may set a delivery-limit, and what goes over that is dropped.",
            looks
        ),
    }
}

pub(crate) fn table(letters: &[Letter]) -> Table {
    let mut table = Table::new(&[
        "where",
        "id",
        "reason",
        "attempts",
        "fence",
        "from",
        "state",
        "last error",
    ]);
    for letter in letters {
        let view = letter.view();
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        table.row([
            letter.place.to_string(),
            or_dash(view.id.map(str::to_owned)),
            view.reason.to_owned(),
            or_dash(view.attempts.map(|count| count.to_string())),
            or_dash(view.fence.map(|number| number.to_string())),
            or_dash(view.from.clone()),
            format!("{:?}", view.state).to_lowercase(),
            or_dash(view.last_error.map(str::to_owned)),
        ]);
    }
    table
}

/// A letter with all that it bears.
#[derive(Serialize)]
struct Whole<'a> {
    #[serde(flatten)]
    view: View<'a>,
    headers: &'a [(String, String)],
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
}

pub(crate) async fn show(context: &Context, shelf: Shelf, show: Show) -> Result<(), Failure> {
    let filter = Filter::of_id(context, &show.id, show.broker)?;
    let (mut letters, mut not_looked_at) = (Vec::new(), NotLookedAt::default());
    for broker in Broker::wanted(context, show.broker, &mut not_looked_at)? {
        let counts = show.looking.counts(context);
        match gather(
            context,
            shelf,
            broker,
            counts,
            usize::MAX,
            &mut not_looked_at,
            |letter| filter.takes(letter),
        )
        .await
        {
            Ok((found, _)) => letters.extend(found),
            Err(failure) => not_looked_at.note(named(shelf, broker), failure),
        }
    }
    let body = |letter: &Letter| {
        show.body
            .then(|| String::from_utf8_lossy(letter.bytes()).into_owned())
    };
    let whole: Vec<Whole<'_>> = letters
        .iter()
        .map(|letter| Whole {
            view: letter.view(),
            headers: &letter.headers,
            body: body(letter),
        })
        .collect();
    let mut text = String::new();
    for letter in &letters {
        text.push_str(&format!(
            "{} ({})\n",
            letter.place,
            format!("{:?}", letter.state).to_lowercase()
        ));
        if let Some(from) = letter.age_from_ms() {
            let age = std::time::Duration::from_millis(crate::say::now_ms().saturating_sub(from));
            text.push_str(&format!(
                "  from {}, {} ago\n",
                crate::say::utc(from),
                span(age)
            ));
        }
        for (name, value) in &letter.headers {
            text.push_str(&format!("  {}: {}\n", plain(name), plain(value)));
        }
        text.push_str(&format!("  {} bytes of body\n", letter.bytes().len()));
        if let Some(looks) = letter.looks {
            text.push_str(&format!("  given back {looks} times by RabbitMQ's count\n"));
        }
        if let Some(body) = body(letter) {
            text.push_str(&format!("  {}\n", plain(&body)));
        }
    }
    if context.format == crate::say::Format::People {
        text.push_str(not_looked_at.for_people().trim_start());
    }
    context.format.print(&whole, &text)?;
    not_looked_at.end()?;
    let waiting = letters.iter().any(|letter| letter.state.waits());
    if letters.is_empty() {
        return Err(Failure::not_all(format!(
            "{}: no message with this id stands there",
            filter.id.unwrap_or_default()
        )));
    }
    if !waiting && context.format == crate::say::Format::People {
        crate::say::line("Nothing of it waits: all of it was dealt with.");
    }
    Ok(())
}
