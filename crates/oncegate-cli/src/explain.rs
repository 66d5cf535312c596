//! `oncegate explain`: was it handled, and why not twice? From all that is known of one id.

mod verdict;

use std::time::Duration;

use clap::Args;
use oncegate::Guarantee;
use serde::Serialize;

use crate::Context;
use crate::audit::{self, Audit, Entry};
use crate::config;
use crate::failure::Failure;
use crate::letters::filter::Filter;
use crate::letters::look::{Looking, gather};
use crate::letters::{Broker, Letter, Shelf, look};
#[cfg(feature = "kafka")]
use crate::letters::{Done, kafka};
use crate::marker::told::Told;
use crate::markers::Markers;
use crate::say::{NotLookedAt, plain};
use verdict::Verdict;

#[derive(Args)]
pub(crate) struct Explain {
    /// As the producer wrote it, or as it stands in keys and logs.
    id: String,
    /// Goes through the Kafka topic too, and counts the messages with this id in it; needs
    /// `gate.id`. Refused where only RabbitMQ is configured: a queue keeps nothing that was
    /// consumed.
    #[arg(long)]
    copies: bool,
    #[command(flatten)]
    looking: Looking,
}

/// All that is known of an id.
#[derive(Serialize)]
struct Story {
    id: String,
    verdict: Verdict,
    says: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    marker: Option<Told>,
    /// Null where none was found, and not all was looked at.
    dead_letters: Option<Vec<serde_json::Value>>,
    in_doubt: Option<Vec<serde_json::Value>>,
    /// Where messages with this id stand in the topic.
    #[serde(skip_serializing_if = "Option::is_none")]
    copies: Option<Vec<String>>,
    audit: Vec<Entry>,
    /// What could not be asked, and why.
    not_looked_at: NotLookedAt,
}

/// What was found.
pub(crate) struct Known {
    pub(crate) marker: Option<Told>,
    pub(crate) dead_letters: Vec<Letter>,
    pub(crate) in_doubt: Vec<Letter>,
    pub(crate) copies: Option<Vec<String>>,
    /// The destinations of which not all was looked at.
    pub(crate) unseen: Vec<Shelf>,
    pub(crate) acts: Vec<Entry>,
    pub(crate) guarantee: Guarantee,
    pub(crate) window: Duration,
    /// The same in words.
    pub(crate) window_told: String,
}

impl Known {
    fn nothing(context: &Context) -> Self {
        Self {
            marker: None,
            dead_letters: Vec::new(),
            in_doubt: Vec::new(),
            copies: None,
            unseen: Vec::new(),
            acts: Vec::new(),
            guarantee: context.config.guarantee(),
            window: context.config.window(),
            window_told: config::window_told(&context.config),
        }
    }
}

pub(crate) async fn run(context: &Context, explain: Explain) -> Result<(), Failure> {
    context.has_configuration()?;
    let id = config::id(&context.config, &explain.id)?;
    if explain.copies {
        can_be_counted(context)?;
    }
    let (mut known, mut not_looked_at) = (Known::nothing(context), NotLookedAt::default());
    match marker(context, &id).await {
        Ok(told) => known.marker = Some(told),
        Err(failure) => not_looked_at.note("the store", failure),
    }
    match acts(context, &id).await {
        Ok(acts) => known.acts = acts,
        Err(failure) => not_looked_at.note("the audit", failure),
    }
    let filter = Filter::of_id(context, id.as_str(), None)?;
    if Broker::note_incomplete(context, &mut not_looked_at) {
        known.unseen = vec![Shelf::DeadLetters, Shelf::InDoubt];
    }
    let counts = explain.looking.counts(context);
    for broker in Broker::configured(context, None).unwrap_or_default() {
        for (shelf, found) in [
            (Shelf::DeadLetters, &mut known.dead_letters),
            (Shelf::InDoubt, &mut known.in_doubt),
        ] {
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
                Ok((letters, _)) => found.extend(letters),
                Err(failure) => {
                    not_looked_at.note(look::named(shelf, broker), failure);
                    known.unseen.push(shelf);
                }
            }
        }
    }
    if explain.copies {
        known.copies = Some(copies(context, &filter).await?);
    }
    let ended = not_looked_at.end();
    // Without a broker there is a store alone, as behind a gate of its own, and nothing is set
    // aside.
    if !Broker::is_any(context) {
        not_looked_at.note(
            "the dead letters and messages in doubt",
            Failure::usage("no broker is configured"),
        );
    }
    let (verdict, mut says) = verdict::of(&known);
    if let Some(places) = not_looked_at.places() {
        says.push_str(&format!(
            " Not looked at: {places}; what stands there is not known."
        ));
    }
    let view = |shelf: Shelf, letters: &[Letter]| {
        let views: Vec<_> = letters
            .iter()
            .map(|letter| serde_json::json!(letter.view()))
            .collect();
        let is_whole = Broker::is_any(context) && !known.unseen.contains(&shelf);
        (is_whole || !views.is_empty()).then_some(views)
    };
    let story = Story {
        id: id.to_string(),
        verdict,
        says,
        dead_letters: view(Shelf::DeadLetters, &known.dead_letters),
        in_doubt: view(Shelf::InDoubt, &known.in_doubt),
        marker: known.marker.clone(),
        copies: known.copies.clone(),
        audit: known.acts.clone(),
        not_looked_at,
    };
    context.format.print(&story, for_people(&story, &known))?;
    ended
}

async fn marker(context: &Context, id: &oncegate::MessageId) -> Result<Told, Failure> {
    let key = config::key(&context.config, id)?;
    let standing = Markers::of(&context.config)?.look(&key).await?;
    Ok(Told::of(key.as_str(), &standing, context.config.window()))
}

/// What was done about an id, in the order in which it ended.
async fn acts(context: &Context, id: &oncegate::MessageId) -> Result<Vec<Entry>, Failure> {
    let mut acts = Audit::of(context)?.acts_on(id).await?;
    acts.sort_by_key(|act| act.at_ms);
    Ok(acts)
}

/// Whether there is a topic to go through, and an id to look for in it.
///
/// # Errors
/// There is not: it says why, and what to do instead.
fn can_be_counted(context: &Context) -> Result<(), Failure> {
    let config = &context.config;
    if cfg!(not(feature = "kafka")) {
        return Err(Broker::Kafka.left_out());
    }
    if Broker::configured(context, Some(Broker::Kafka)).is_err() {
        return Err(Failure::usage(
            if Broker::configured(context, Some(Broker::Rabbitmq)).is_ok() {
                "--copies counts the messages with this id in a Kafka topic. A RabbitMQ queue keeps nothing that was consumed, so that there is \
             nothing to go through: leave --copies out. The marker and the letters tell the story of the id, and \
             oncegate_deliveries_total{outcome=\"duplicate\"} counts the duplicates of all ids"
            } else {
                "--copies counts the messages with this id in a Kafka topic, and none is configured: set kafka.brokers and kafka.topic, or leave \
             --copies out"
            },
        ));
    }
    match config.id_source()? {
        Some(_) => Ok(()),
        None => Err(Failure::usage(
            "--copies needs gate.id, to read the ids of messages",
        )),
    }
}

/// Every message of the topic that the filter takes.
#[cfg(feature = "kafka")]
async fn copies(context: &Context, filter: &Filter) -> Result<Vec<String>, Failure> {
    let topic = kafka::topic(&context.config)?;
    let mut reader =
        crate::letters::Reader::Kafka(kafka::Reader::of(context, topic, Done::of(&[])).await?);
    let bar = look::bar(&reader, "messages looked at");
    let mut copies = Vec::new();
    while let Some(letter) = reader.next().await? {
        bar.inc(1);
        if filter.takes(&letter) {
            copies.push(letter.place.to_string());
        }
    }
    bar.finish_and_clear();
    Ok(copies)
}

#[cfg(not(feature = "kafka"))]
async fn copies(_: &Context, _: &Filter) -> Result<Vec<String>, Failure> {
    Err(Broker::Kafka.left_out())
}

fn for_people(story: &Story, known: &Known) -> String {
    let unseen = story
        .not_looked_at
        .places()
        .map(|places| format!("; not looked at: {places}"))
        .unwrap_or_default();
    let mut text = format!(
        "{}: {}{unseen}\n{}\n",
        story.id,
        story.verdict.word(known.guarantee),
        plain(&story.says)
    );
    let mut section = |title: &str, lines: String| {
        if !lines.is_empty() {
            text.push_str(&format!("\n{title}\n{}\n", lines.trim_end()));
        }
    };
    section(
        "The marker",
        story
            .marker
            .as_ref()
            .map(Told::for_people)
            .unwrap_or_default(),
    );
    for (title, letters) in [
        ("Dead letters", &known.dead_letters),
        ("In doubt", &known.in_doubt),
    ] {
        section(
            title,
            if letters.is_empty() {
                String::new()
            } else {
                look::table(letters).to_string()
            },
        );
    }
    section(
        "Messages with this id in the topic",
        story.copies.as_deref().unwrap_or_default().join("\n"),
    );
    section(
        "What operators did",
        if story.audit.is_empty() {
            String::new()
        } else {
            audit::table(&story.audit).to_string()
        },
    );
    text.push_str(&story.not_looked_at.for_people());
    text
}
