//! `list` and `show` for dead letters and messages in doubt.

use clap::Args;
use serde::Serialize;

use super::bulk::close_reader;
use super::filter::{FilterMatch, MessageFilter, unknown_age_note};
use super::{
    AuditedStates, Broker, DeadLetter, DeadLetterSummary, DeliveryCountPolicy, Destination,
    DestinationReader, REPLACE_AT_COUNT,
};
use crate::CliContext;
use crate::audit::{Audit, AuditEntry};
use crate::error::CliError;
use crate::output::{TextTable, Unchecked, duration_text, printable};

#[derive(Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    filter: MessageFilter,
    /// Maximum number of messages to show
    #[arg(long, default_value_t = 100)]
    limit: usize,
    /// Also show redriven, dropped and resolved messages, which Kafka keeps
    #[arg(long)]
    everything: bool,
    #[command(flatten)]
    queue_access: QueueAccessArgs,
}

#[derive(Args)]
pub(crate) struct ShowArgs {
    /// The id as the producer wrote it, or as keys and logs show it. For a message without an id,
    /// pass what `list` shows in the id column
    id: String,
    /// Also show bodies
    #[arg(long)]
    body: bool,
    /// Only this broker, if both are configured
    #[arg(long)]
    broker: Option<Broker>,
    #[command(flatten)]
    queue_access: QueueAccessArgs,
}

/// Whether RabbitMQ queues are read that may count each read towards a delivery limit.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct QueueAccessArgs {
    /// Read a RabbitMQ queue even if its arguments differ from those that oncegate declares, and
    /// replace no message by a copy. A quorum queue may count each read towards its delivery limit,
    /// above which it drops the message
    #[arg(long)]
    accept_delivery_counts: bool,
}

impl QueueAccessArgs {
    /// The policy from this flag or from `rabbitmq.delivery-counts`.
    pub(crate) fn count_policy(self, context: &CliContext) -> DeliveryCountPolicy {
        let is_accepted = self.accept_delivery_counts
            || context.config.text("rabbitmq.delivery-counts") == Some("accepted");
        if is_accepted {
            DeliveryCountPolicy::Accepted
        } else {
            DeliveryCountPolicy::Refused
        }
    }
}

/// The actions in the audit; none if no audit is configured.
async fn actions(context: &CliContext) -> Result<Vec<AuditEntry>, CliError> {
    if Audit::is_configured(context)? {
        Audit::of(context)?.actions().await
    } else {
        Ok(Vec::new())
    }
}

/// Opens a destination together with the audited states of its messages.
pub(crate) async fn open(
    context: &CliContext,
    broker: Broker,
    destination: Destination,
    count_policy: DeliveryCountPolicy,
) -> Result<DestinationReader, CliError> {
    DestinationReader::open(
        context,
        broker,
        destination,
        AuditedStates::of(&actions(context).await?),
        count_policy,
    )
    .await
}

/// Opens a destination for a command that changes nothing. On RabbitMQ the audit only shows
/// interrupted actions, so the messages are read even if the audit cannot be read.
async fn open_read_only(
    context: &CliContext,
    broker: Broker,
    destination: Destination,
    count_policy: DeliveryCountPolicy,
    unchecked: &mut Unchecked,
) -> Result<DestinationReader, CliError> {
    match open(context, broker, destination, count_policy).await {
        Ok(reader) if broker == Broker::Kafka && !Audit::is_configured(context)? => {
            let text = "no store and no audit.file is configured: redriven and dropped messages are shown as waiting";
            unchecked.note("the audit", CliError::usage(text));
            Ok(reader)
        }
        Err(error) if broker == Broker::Rabbitmq => {
            let Err(failure) = actions(context).await else {
                return Err(error);
            };
            unchecked.note("the audit", failure);
            DestinationReader::open(
                context,
                broker,
                destination,
                AuditedStates::of(&[]),
                count_policy,
            )
            .await
        }
        opened => opened,
    }
}

/// A progress bar of the messages read. Hidden if standard error is not a terminal.
pub(crate) fn progress_bar(
    reader: &DestinationReader,
    message: &'static str,
) -> indicatif::ProgressBar {
    let bar = indicatif::ProgressBar::new(reader.total()).with_message(message);
    let style = indicatif::ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}, {eta} left");
    bar.set_style(style.unwrap_or_else(|_| indicatif::ProgressStyle::default_bar()));
    bar
}

/// Collects up to `limit` matching messages. Returns them and whether there may be more.
pub(crate) async fn collect_messages(
    context: &CliContext,
    destination: Destination,
    broker: Broker,
    count_policy: DeliveryCountPolicy,
    limit: usize,
    unchecked: &mut Unchecked,
    mut selects: impl FnMut(&DeadLetter) -> bool,
) -> Result<(Vec<DeadLetter>, bool), CliError> {
    let mut reader = open_read_only(context, broker, destination, count_policy, unchecked).await?;
    let bar = progress_bar(&reader, "read");
    let (mut found, mut has_more) = (Vec::new(), false);
    let read = async {
        while let Some(message) = reader.next().await? {
            bar.inc(1);
            if !selects(&message) {
                continue;
            }
            if found.len() == limit {
                has_more = true;
                break;
            }
            found.push(message);
        }
        Ok(())
    };
    let read: Result<(), CliError> = read.await;
    close_reader(reader, bar).await;
    read.map(|()| (found, has_more))
}

/// The name of a destination, for errors.
pub(crate) fn description(destination: Destination, broker: Broker) -> String {
    format!(
        "the {} destination on {}",
        destination.name(),
        broker.name()
    )
}

pub(crate) async fn list(
    context: &CliContext,
    destination: Destination,
    list: ListArgs,
) -> Result<(), CliError> {
    let (filter, count_policy) = (
        list.filter.normalized(context)?,
        list.queue_access.count_policy(context),
    );
    let (mut messages, mut more, mut unknown_age) = (Vec::new(), false, 0);
    let mut unchecked = Unchecked::default();
    for broker in Broker::selected(context, filter.broker, &mut unchecked)? {
        let selects = |message: &DeadLetter| {
            if !list.everything && !message.state.is_pending() {
                return false;
            }
            let filter_match = filter.matches(message);
            unknown_age += usize::from(filter_match == FilterMatch::UnknownAge);
            filter_match == FilterMatch::Yes
        };
        let remaining = list.limit - messages.len();
        match collect_messages(
            context,
            destination,
            broker,
            count_policy,
            remaining,
            &mut unchecked,
            selects,
        )
        .await
        {
            Ok((found, has_more)) => {
                messages.extend(found);
                more |= has_more;
            }
            Err(failure) => unchecked.note(description(destination, broker), failure),
        }
    }
    let summaries: Vec<DeadLetterSummary<'_>> = messages.iter().map(DeadLetter::summary).collect();
    let more_note = if more {
        "\nThere are more: raise --limit."
    } else {
        ""
    };
    let all = !more && unchecked.names().is_none();
    let json = serde_json::json!({ "messages": summaries, "all": all, "without_age": unknown_age, "not_checked": unchecked });
    let (count, warning) = (
        messages.len(),
        if count_policy == DeliveryCountPolicy::Refused {
            delivery_count_warning(&messages)
        } else {
            String::new()
        },
    );
    let incomplete = unchecked.to_text();
    context.format.print(
        &json,
        format!(
            "{}{count} shown.{more_note}{}{warning}{incomplete}",
            table(&messages),
            unknown_age_note(unknown_age)
        ),
    )?;
    unchecked.end()
}

/// The warning that a queue may count reads; empty if no message has a delivery count above 0.
fn delivery_count_warning(messages: &[DeadLetter]) -> String {
    match messages
        .iter()
        .filter_map(|message| message.delivery_count)
        .max()
    {
        None | Some(0) => String::new(),
        Some(count) => format!(
            "\nRabbitMQ may count each read; the highest delivery count before this read was {count}. A message with a count of \
             {REPLACE_AT_COUNT} or more is replaced by a copy that counts from zero, since a policy may set a delivery-limit above which \
             messages are dropped."
        ),
    }
}

pub(crate) fn table(messages: &[DeadLetter]) -> TextTable {
    let mut table = TextTable::new(&[
        "where",
        "id",
        "reason",
        "attempts",
        "crashes",
        "last attempt",
        "from",
        "state",
        "error",
    ]);
    for message in messages {
        let view = message.summary();
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        table.row([
            message.location.to_string(),
            or_dash(view.id.map(str::to_owned).or(view.handle)),
            view.reason.to_owned(),
            or_dash(view.attempts.map(|count| count.to_string())),
            view.crashes.to_string(),
            or_dash(view.last_attempt.map(|number| number.to_string())),
            or_dash(view.from.clone()),
            format!("{:?}", view.state).to_lowercase(),
            message
                .errors()
                .unwrap_or_else(|| message.reason_text().to_owned()),
        ]);
    }
    table
}

/// A message with its headers, and with its body if `--body` is given.
#[derive(Serialize)]
struct DeadLetterDetails<'a> {
    #[serde(flatten)]
    summary: DeadLetterSummary<'a>,
    headers: &'a [(String, String)],
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
}

pub(crate) async fn show(
    context: &CliContext,
    destination: Destination,
    show: ShowArgs,
) -> Result<(), CliError> {
    let filter = MessageFilter::for_id(context, &show.id, show.broker)?;
    let (mut messages, mut unchecked) = (Vec::new(), Unchecked::default());
    for broker in Broker::selected(context, show.broker, &mut unchecked)? {
        let count_policy = show.queue_access.count_policy(context);
        match collect_messages(
            context,
            destination,
            broker,
            count_policy,
            usize::MAX,
            &mut unchecked,
            |message| filter.selects(message),
        )
        .await
        {
            Ok((found, _)) => messages.extend(found),
            Err(failure) => unchecked.note(description(destination, broker), failure),
        }
    }
    let body = |message: &DeadLetter| {
        show.body
            .then(|| String::from_utf8_lossy(message.bytes()).into_owned())
    };
    let details: Vec<DeadLetterDetails<'_>> = messages
        .iter()
        .map(|message| DeadLetterDetails {
            summary: message.summary(),
            headers: &message.headers,
            body: body(message),
        })
        .collect();
    let mut text = String::new();
    for message in &messages {
        text.push_str(&format!(
            "{} ({})\n  {}\n",
            message.location,
            format!("{:?}", message.state).to_lowercase(),
            message.reason_text()
        ));
        if let Some(handle) = message.handle() {
            text.push_str(&format!("  no id; commands accept {handle} in its place\n"));
        }
        if let Some(from) = message.sent_or_rejected_ms() {
            let age =
                std::time::Duration::from_millis(crate::output::now_ms().saturating_sub(from));
            text.push_str(&format!(
                "  from {}, {} ago\n",
                crate::output::utc_text(from),
                duration_text(age)
            ));
        }
        for (name, value) in &message.headers {
            text.push_str(&format!("  {}: {}\n", printable(name), printable(value)));
        }
        text.push_str(&format!("  {} bytes of body\n", message.bytes().len()));
        if let Some(count) = message.delivery_count {
            text.push_str(&format!("  delivery count of RabbitMQ: {count}\n"));
        }
        if let Some(body) = body(message) {
            text.push_str(&format!("  {}\n", printable(&body)));
        }
    }
    if context.format == crate::output::OutputFormat::Text {
        text.push_str(unchecked.to_text().trim_start());
    }
    context.format.print(&details, &text)?;
    unchecked.end()?;
    let any_pending = messages.iter().any(|message| message.state.is_pending());
    if messages.is_empty() {
        return Err(CliError::incomplete(format!(
            "{}: no message has this id",
            filter.id.unwrap_or_default()
        )));
    }
    if !any_pending && context.format == crate::output::OutputFormat::Text {
        crate::output::print_line("None is pending: all were redriven, dropped or resolved.");
    }
    Ok(())
}
