//! `oncegate explain`: was an id handled, and are later messages with it skipped?

mod verdict;

use std::time::Duration;

use clap::Args;
use oncegate::Guarantee;
use oncegate_config::StoreKind;
use serde::Serialize;

use crate::CliContext;
use crate::audit::{self, Audit, AuditEntry};
use crate::config;
use crate::destination::filter::MessageFilter;
use crate::destination::listing::{QueueAccessArgs, collect_messages};
#[cfg(feature = "kafka")]
use crate::destination::{AuditedStates, kafka};
use crate::destination::{Broker, DeadLetter, Destination, listing};
use crate::error::CliError;
use crate::marker::description::{self, MarkerDescription, MarkerState};
use crate::marker_store::MarkerStore;
use crate::output::{Unchecked, printable};
use verdict::HandlingVerdict;

#[derive(Args)]
pub(crate) struct ExplainArgs {
    /// The id as the producer wrote it, or as keys and logs show it
    id: String,
    /// Also count the messages with this id in the Kafka topic; needs `gate.id`. Refused if only
    /// RabbitMQ is configured: a queue does not keep consumed messages
    #[arg(long)]
    copies: bool,
    #[command(flatten)]
    queue_access: QueueAccessArgs,
}

/// The explanation of an id as JSON.
#[derive(Serialize)]
struct Explanation {
    id: String,
    verdict: HandlingVerdict,
    description: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    marker: Option<MarkerDescription>,
    /// Null if none was found and a dead-letter destination was not checked completely.
    dead_letters: Option<Vec<serde_json::Value>>,
    /// Null if none was found and an in-doubt destination was not checked completely.
    in_doubt: Option<Vec<serde_json::Value>>,
    /// Positions of messages with this id in the topic, with `--copies`. Null if the topic was not
    /// read to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    copies: Option<Option<Vec<String>>>,
    /// Null if the audit could not be read.
    audit: Option<Vec<AuditEntry>>,
    /// What could not be checked, and why.
    #[serde(rename = "not_checked")]
    unchecked: Unchecked,
}

/// What was found about an id: its marker, its messages and the audited actions on it.
pub(crate) struct Evidence {
    /// `None` if the store could not be read.
    pub(crate) marker: Option<MarkerDescription>,
    pub(crate) dead_letters: Vec<DeadLetter>,
    pub(crate) in_doubt: Vec<DeadLetter>,
    /// The positions of messages with the id in the consumed topic; `None` without `--copies`, or if
    /// it could not be read.
    pub(crate) copies: Option<Vec<String>>,
    /// Destinations that were not completely checked.
    pub(crate) incomplete: Vec<Destination>,
    pub(crate) actions: Vec<AuditEntry>,
    /// Whether the actions could be read.
    pub(crate) has_audit: bool,
    pub(crate) guarantee: Guarantee,
    pub(crate) window: Duration,
    /// The dedup window as text.
    pub(crate) window_description: String,
    /// Whether `gate.mode` is `shadow`: no duplicate is blocked.
    pub(crate) is_shadow: bool,
    /// Whether messages are handled without the store while it is unavailable.
    pub(crate) passes_through: bool,
    /// Whether the consumer may have an inbox in the configured database. Its records are done
    /// markers, as those of a store.
    pub(crate) may_have_inbox: bool,
}

impl Evidence {
    /// Whether a destination or the audit was not completely checked.
    fn is_incomplete(&self) -> bool {
        !self.incomplete.is_empty() || !self.has_audit
    }

    /// Whether the store answered that it has no marker.
    fn has_no_marker(&self) -> bool {
        let marker = self.marker.as_ref();
        marker.is_some_and(|marker| marker.state == MarkerState::Absent)
    }

    /// The evidence before anything was read.
    fn empty(context: &CliContext) -> Self {
        let guarantee = context.config.guarantee();
        let is_shadow = context.config.text("gate.mode") == Some("shadow");
        let passes_through = context.config.text("gate.outage") == Some("pass-through");
        let has_database = matches!(
            context.config.store_kind(),
            Ok(Some(StoreKind::Postgres | StoreKind::Sqlite(_)))
        );
        Self {
            marker: None,
            dead_letters: Vec::new(),
            in_doubt: Vec::new(),
            copies: None,
            incomplete: Vec::new(),
            actions: Vec::new(),
            has_audit: false,
            guarantee,
            window: context.config.dedup_window(),
            window_description: config::window_description(&context.config),
            is_shadow,
            passes_through,
            may_have_inbox: has_database
                && guarantee == Guarantee::EffectivelyOnce
                && !is_shadow
                && !passes_through,
        }
    }
}

pub(crate) async fn run(context: &CliContext, explain: ExplainArgs) -> Result<(), CliError> {
    context.check_configured()?;
    let id = config::id(&context.config, &explain.id)?;
    if explain.copies {
        check_copies(context)?;
    }
    let (mut evidence, mut unchecked) = (Evidence::empty(context), Unchecked::default());
    match marker(context, &id).await {
        Ok(marker) => evidence.marker = Some(marker),
        Err(failure) => unchecked.note("the store", failure),
    }
    match actions(context, &id).await {
        Ok(actions) => (evidence.actions, evidence.has_audit) = (actions, true),
        Err(failure) => unchecked.note("the audit", failure),
    }
    let filter = MessageFilter::for_id(context, id.as_str(), None)?;
    if Broker::note_incomplete(context, &mut unchecked) {
        evidence.incomplete = vec![Destination::DeadLetters, Destination::InDoubt];
    }
    let count_policy = explain.queue_access.count_policy(context);
    for broker in Broker::configured(context, None).unwrap_or_default() {
        for (destination, found) in [
            (Destination::DeadLetters, &mut evidence.dead_letters),
            (Destination::InDoubt, &mut evidence.in_doubt),
        ] {
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
                Ok((messages, _)) => found.extend(messages),
                Err(failure) => {
                    unchecked.note(listing::description(destination, broker), failure);
                    evidence.incomplete.push(destination);
                }
            }
        }
    }
    if explain.copies {
        match copies(context, &filter).await {
            Ok(copies) => evidence.copies = Some(copies),
            Err(failure) => unchecked.note("the consumed topic on kafka", failure),
        }
    }
    let result = unchecked.end();
    // Noted after `result` is computed, so that it does not change the exit code: a gate may be
    // used without a broker.
    if !Broker::any_named(context) {
        evidence.incomplete = vec![Destination::DeadLetters, Destination::InDoubt];
        unchecked.note(
            "the dead letters and messages in doubt",
            CliError::usage("no broker is configured"),
        );
    }
    let (verdict, mut description) = verdict::of(&evidence);
    if verdict.is_unknown()
        && let Some(number) = context.config.id_of_json_number(&explain.id)
    {
        description.push_str(&format!(
            " If the producer wrote {} as a JSON number, its id is {number}, since gate.id writes whole numbers out: run `oncegate explain {number}`.",
            explain.id
        ));
    }
    if let Some(names) = unchecked.names() {
        description.push_str(&format!(
            " Not checked: {names}; messages there are unknown."
        ));
    }
    let summaries_of = |destination: Destination, messages: &[DeadLetter]| {
        let summaries: Vec<_> = messages
            .iter()
            .map(|message| serde_json::json!(message.summary()))
            .collect();
        let check_complete =
            Broker::any_named(context) && !evidence.incomplete.contains(&destination);
        (check_complete || !summaries.is_empty()).then_some(summaries)
    };
    let explanation = Explanation {
        id: id.to_string(),
        verdict,
        description,
        dead_letters: summaries_of(Destination::DeadLetters, &evidence.dead_letters),
        in_doubt: summaries_of(Destination::InDoubt, &evidence.in_doubt),
        marker: evidence.marker.clone(),
        copies: explain.copies.then(|| evidence.copies.clone()),
        audit: evidence.has_audit.then(|| evidence.actions.clone()),
        unchecked,
    };
    context
        .format
        .print(&explanation, to_text(&explanation, &evidence))?;
    result
}

/// The description of the marker of an id, or of a value in its place that is not a marker.
async fn marker(
    context: &CliContext,
    id: &oncegate::MessageId,
) -> Result<MarkerDescription, CliError> {
    let key = config::key(&context.config, id)?;
    let found = MarkerStore::of(&context.config)?
        .read_marker_or_describe(&key)
        .await?;
    Ok(match found {
        Ok(stored) => MarkerDescription::of(key.as_str(), &stored, context.config.dedup_window()),
        Err(value) => MarkerDescription::unreadable(
            key.as_str(),
            description::foreign_value_text(&context.config, &key, &value),
        ),
    })
}

/// The actions on an id, in the order of their last audit lines.
async fn actions(
    context: &CliContext,
    id: &oncegate::MessageId,
) -> Result<Vec<AuditEntry>, CliError> {
    let mut actions = Audit::of(context)?.actions_on(id).await?;
    actions.sort_by_key(|entry| entry.at_ms);
    Ok(actions)
}

/// Checks that a Kafka topic and `gate.id` are configured.
///
/// # Errors
/// One is missing; the error names the setting.
fn check_copies(context: &CliContext) -> Result<(), CliError> {
    let config = &context.config;
    if cfg!(not(feature = "kafka")) {
        return Err(Broker::Kafka.missing_feature_error());
    }
    if Broker::configured(context, Some(Broker::Kafka)).is_err() {
        return Err(CliError::usage(
            if Broker::configured(context, Some(Broker::Rabbitmq)).is_ok() {
                "--copies counts the messages with this id in a Kafka topic. A RabbitMQ queue does not keep consumed messages, so there is \
             nothing to count: omit --copies. The marker and the messages in the destinations explain the id, and \
             oncegate_deliveries_total{outcome=\"duplicate\"} counts the duplicates of all ids"
            } else {
                "--copies counts the messages with this id in a Kafka topic, and none is configured: set kafka.brokers and kafka.topic, or omit \
             --copies"
            },
        ));
    }
    match config.id_source()? {
        Some(_) => Ok(()),
        None => Err(CliError::usage(
            "--copies needs gate.id, to read the ids of messages",
        )),
    }
}

/// The positions of matching messages in the topic.
#[cfg(feature = "kafka")]
async fn copies(context: &CliContext, filter: &MessageFilter) -> Result<Vec<String>, CliError> {
    let topic = kafka::topic(&context.config)?;
    let mut reader = crate::destination::DestinationReader::Kafka(
        kafka::TopicReader::open_topic(context, topic, AuditedStates::of(&[])).await?,
    );
    let bar = listing::progress_bar(&reader, "messages read");
    let mut copies = Vec::new();
    while let Some(message) = reader.next().await? {
        bar.inc(1);
        if filter.selects(&message) {
            copies.push(message.location.to_string());
        }
    }
    bar.finish_and_clear();
    Ok(copies)
}

#[cfg(not(feature = "kafka"))]
async fn copies(_: &CliContext, _: &MessageFilter) -> Result<Vec<String>, CliError> {
    Err(Broker::Kafka.missing_feature_error())
}

fn to_text(explanation: &Explanation, evidence: &Evidence) -> String {
    let incomplete = explanation
        .unchecked
        .names()
        .map(|names| format!("; not checked: {names}"))
        .unwrap_or_default();
    let mut text = format!(
        "{}: {}{incomplete}\n{}\n",
        explanation.id,
        explanation.verdict.label(evidence.guarantee),
        printable(&explanation.description)
    );
    let mut section = |title: &str, lines: String| {
        if !lines.is_empty() {
            text.push_str(&format!("\n{title}\n{}\n", lines.trim_end()));
        }
    };
    section(
        "The marker",
        explanation
            .marker
            .as_ref()
            .map(MarkerDescription::to_text)
            .unwrap_or_default(),
    );
    for (title, messages) in [
        ("Dead letters", &evidence.dead_letters),
        ("In doubt", &evidence.in_doubt),
    ] {
        section(
            title,
            if messages.is_empty() {
                String::new()
            } else {
                listing::table(messages).to_string()
            },
        );
    }
    section(
        "Messages with this id in the topic",
        evidence.copies.as_deref().unwrap_or_default().join("\n"),
    );
    section(
        "Actions of operators",
        match explanation.audit.as_deref() {
            None | Some([]) => String::new(),
            Some(actions) => audit::table(actions).to_string(),
        },
    );
    text.push_str(&explanation.unchecked.to_text());
    text
}
