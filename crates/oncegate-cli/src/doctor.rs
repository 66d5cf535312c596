//! `oncegate doctor`: what is wrong with a set-up, and what to do about it. Asks; changes nothing.

mod codes;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
mod settings;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "redis")]
mod store;

use clap::Args;
use oncegate_config::Place;
use serde::Serialize;

use crate::Context;
use crate::failure::Failure;
use crate::letters::Broker;
use crate::say::{NotLookedAt, Table, plain};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Level {
    /// It does not work, or breaks what was promised.
    Error,
    /// It may lose or double something, or stop, one day.
    Warning,
    /// It is worth knowing.
    Advice,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// What it is, in a word that stays the same; the book lists them.
    pub(crate) code: &'static str,
    pub(crate) level: Level,
    /// A server, topic, queue or setting.
    pub(crate) at: String,
    pub(crate) what: String,
    pub(crate) remedy: String,
}

/// What was found so far.
#[derive(Default)]
pub(crate) struct Findings(Vec<Finding>);

impl Findings {
    pub(crate) fn add(
        &mut self,
        level: Level,
        code: &'static str,
        at: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        debug_assert!(
            codes::CODES.iter().any(|(known, _)| *known == code),
            "{code} is not in the list"
        );
        self.0.push(Finding {
            code,
            level,
            at: at.into(),
            what: what.into(),
            remedy: remedy.into(),
        });
    }

    pub(crate) fn error(
        &mut self,
        code: &'static str,
        at: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.add(Level::Error, code, at, what, remedy);
    }

    pub(crate) fn warning(
        &mut self,
        code: &'static str,
        at: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.add(Level::Warning, code, at, what, remedy);
    }

    pub(crate) fn has(&self, code: &str) -> bool {
        self.0.iter().any(|finding| finding.code == code)
    }
}

#[derive(Args)]
pub(crate) struct DoctorArguments {
    /// Lists every code that a finding may have, and asks nobody.
    #[arg(long)]
    list: bool,
}

pub(crate) async fn run(context: &Context, arguments: DoctorArguments) -> Result<(), Failure> {
    if arguments.list {
        let mut table = Table::new(&["code", "says"]);
        codes::CODES
            .iter()
            .for_each(|(code, says)| table.row([(*code).to_owned(), (*says).to_owned()]));
        return context.format.print(&codes::CODES, table);
    }
    context.has_configuration()?;
    let config = &context.config;
    let (store, brokers) = (
        config.place()?,
        Broker::configured(context, None).unwrap_or_default(),
    );
    let (mut findings, mut looked_at, mut not_looked_at) = (
        Findings::default(),
        vec!["the settings"],
        NotLookedAt::default(),
    );
    let is_incomplete = Broker::note_incomplete(context, &mut not_looked_at);
    settings::look(config, &mut findings)?;
    if store.is_none() && brokers.is_empty() && !is_incomplete {
        return Err(Failure::usage(
            "no server is configured: set store.url, and kafka.brokers and kafka.topic, or rabbitmq.url and rabbitmq.queue",
        ));
    }
    // Who cannot be asked keeps nobody from hearing what else was found.
    let mut note = |whom: &str, asked: Result<(), Failure>| {
        if let Err(failure) = asked {
            not_looked_at.note(whom, failure);
        }
    };
    match store {
        Some(Place::Redis) => {
            looked_at.push("Redis");
            #[cfg(feature = "redis")]
            note("Redis", store::look(config, &mut findings).await);
            #[cfg(not(feature = "redis"))]
            note("Redis", Err(Failure::left_out("Redis", "redis")));
        }
        #[cfg(feature = "sqlite")]
        Some(Place::Sqlite(file)) => {
            looked_at.push("SQLite");
            sqlite::look(config, file, &mut findings).await;
        }
        #[cfg(not(feature = "sqlite"))]
        Some(Place::Sqlite(_)) => note("SQLite", Err(Failure::left_out("SQLite", "sqlite"))),
        Some(Place::Memory) => {
            let what = "it is the memory of the consumer's process: what was handled is forgotten with that process";
            let remedy = "for more than a test name Redis or an SQLite file in store.url";
            findings.add(
                settings::forgetting(config),
                "store-forgets",
                "store.url",
                what,
                remedy,
            );
        }
        None => {}
    }
    for broker in brokers {
        match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => {
                looked_at.push("Kafka");
                note("Kafka", kafka::look(config, &mut findings).await);
            }
            #[cfg(feature = "rabbitmq")]
            Broker::Rabbitmq => {
                looked_at.push("RabbitMQ");
                note("RabbitMQ", rabbitmq::look(config, &mut findings).await);
            }
            #[allow(unreachable_patterns)]
            broker => note(broker.name(), Err(broker.left_out())),
        }
    }
    let mut findings = findings.0;
    findings.sort_by_key(|finding| finding.level);
    let mut text = String::new();
    for Finding {
        code,
        level,
        at,
        what,
        remedy,
    } in &findings
    {
        let level = format!("{level:?}").to_uppercase();
        text.push_str(&format!(
            "{level}  {}  [{code}]\n  {}\n  Do: {}\n\n",
            plain(at),
            plain(what),
            plain(remedy)
        ));
    }
    let bad = findings
        .iter()
        .filter(|finding| finding.level != Level::Advice)
        .count();
    text.push_str(&format!(
        "Looked at {}: {bad} to be mended, {} to be known.",
        looked_at.join(", "),
        findings.len() - bad
    ));
    text.push_str(&not_looked_at.for_people());
    context.format.print(&serde_json::json!({ "findings": findings, "looked_at": looked_at, "not_looked_at": not_looked_at }), text)?;
    not_looked_at.end()?;
    if bad == 0 {
        Ok(())
    } else {
        Err(Failure::not_all(format!("{bad} to be mended")))
    }
}
