//! `oncegate doctor`: finds problems in servers and settings and suggests fixes. Changes nothing.

mod codes;
#[cfg(feature = "kafka")]
mod kafka;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "rabbitmq")]
mod rabbitmq;
#[cfg(feature = "redis")]
mod redis;
mod settings;
#[cfg(feature = "sqlite")]
mod sqlite;

use clap::Args;
use oncegate_config::StoreKind;
use serde::Serialize;

use crate::CliContext;
use crate::destination::Broker;
use crate::error::CliError;
use crate::output::{TextTable, Unchecked, printable};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Severity {
    /// The consumer does not work, or a guarantee does not hold.
    Error,
    /// The consumer may lose or duplicate messages, or stop, under some conditions.
    Warning,
    /// A recommended change; the consumer is safe without it.
    Advice,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct DoctorFinding {
    /// A stable code; `oncegate doctor --list` prints all of them.
    pub(crate) code: &'static str,
    #[serde(rename = "level")]
    pub(crate) severity: Severity,
    /// The server, topic, queue or setting with the problem.
    pub(crate) at: String,
    /// The problem.
    pub(crate) what: String,
    pub(crate) remedy: String,
}

/// Collects findings.
#[derive(Default)]
pub(crate) struct DoctorFindings(Vec<DoctorFinding>);

impl DoctorFindings {
    pub(crate) fn add(
        &mut self,
        severity: Severity,
        code: &'static str,
        at: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        debug_assert!(
            codes::CODES.iter().any(|(known, _)| *known == code),
            "{code} is not in the list"
        );
        self.0.push(DoctorFinding {
            code,
            severity,
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
        self.add(Severity::Error, code, at, what, remedy);
    }

    pub(crate) fn warning(
        &mut self,
        code: &'static str,
        at: impl Into<String>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.add(Severity::Warning, code, at, what, remedy);
    }

    /// Adds the finding that the consumer does not start, because of this section of the
    /// configuration.
    #[cfg(any(feature = "kafka", feature = "rabbitmq"))]
    fn add_refused_settings(&mut self, section: &str, error: &oncegate_config::Error) {
        self.error(
            "settings-refused",
            section,
            error.to_string(),
            "correct it; a consumer with this configuration does not start, so the broker was not checked",
        );
    }

    /// Replaces the remedy of the last finding with this code, and appends `more` to its problem.
    /// Does nothing if there is none.
    pub(crate) fn amend(&mut self, code: &str, more: Option<String>, remedy: String) {
        if let Some(finding) = self.0.iter_mut().rfind(|finding| finding.code == code) {
            finding.remedy = remedy;
            if let Some(more) = more {
                finding.what.push_str("; ");
                finding.what.push_str(&more);
            }
        }
    }

    pub(crate) fn has(&self, code: &str) -> bool {
        self.0.iter().any(|finding| finding.code == code)
    }
}

#[derive(Args)]
pub(crate) struct DoctorArgs {
    /// List every code that a finding may have, without contacting a server
    #[arg(long)]
    list: bool,
}

pub(crate) async fn run(context: &CliContext, arguments: DoctorArgs) -> Result<(), CliError> {
    if arguments.list {
        let mut table = TextTable::new(&["code", "description"]);
        codes::CODES
            .iter()
            .for_each(|(code, says)| table.row([(*code).to_owned(), (*says).to_owned()]));
        return context.format.print(&codes::CODES, table);
    }
    context.check_configured()?;
    let config = &context.config;
    let (store, brokers) = (
        config.store_kind()?,
        Broker::configured(context, None).unwrap_or_default(),
    );
    let (mut findings, mut checked, mut unchecked) = (
        DoctorFindings::default(),
        vec!["the settings"],
        Unchecked::default(),
    );
    let is_incomplete = Broker::note_incomplete(context, &mut unchecked);
    settings::check(config, &mut findings)?;
    if store.is_none() && brokers.is_empty() && !is_incomplete {
        return Err(CliError::usage(
            "no server is configured: set store.url, and kafka.brokers and kafka.topic, or rabbitmq.url and rabbitmq.queue",
        ));
    }
    if brokers.is_empty() && !is_incomplete {
        findings.add(
            Severity::Advice,
            "broker-not-configured",
            "kafka.brokers, rabbitmq.url",
            "no broker is configured, so only the store is checked; a program that uses only a gate needs no broker",
            "for a consumer set kafka.brokers, kafka.topic and kafka.group, or rabbitmq.url and rabbitmq.queue",
        );
    }
    // The other servers are checked even if one is unreachable.
    let mut note = |server: &'static str, result: Result<(), CliError>| match result {
        Ok(()) => checked.push(server),
        Err(failure) => unchecked.note(server, failure),
    };
    match store {
        Some(StoreKind::Redis) => {
            #[cfg(feature = "redis")]
            note("Redis", redis::check(config, &mut findings).await);
            #[cfg(not(feature = "redis"))]
            note("Redis", Err(CliError::feature_missing("Redis", "redis")));
        }
        #[cfg(feature = "sqlite")]
        Some(StoreKind::Sqlite(file)) => {
            sqlite::check(config, file, &mut findings).await;
            note("SQLite", Ok(()));
        }
        #[cfg(not(feature = "sqlite"))]
        Some(StoreKind::Sqlite(_)) => {
            note("SQLite", Err(CliError::feature_missing("SQLite", "sqlite")))
        }
        #[cfg(feature = "postgres")]
        Some(StoreKind::Postgres) => {
            note("PostgreSQL", postgres::check(config, &mut findings).await)
        }
        #[cfg(not(feature = "postgres"))]
        Some(StoreKind::Postgres) => note(
            "PostgreSQL",
            Err(CliError::feature_missing("PostgreSQL", "postgres")),
        ),
        Some(StoreKind::Memory) => {
            let what = "it is the memory of the consumer process: its markers are lost when that process ends";
            let remedy = "outside of tests, set store.url to Redis, PostgreSQL or an SQLite file";
            findings.add(
                settings::volatile_store_severity(config),
                "store-volatile",
                "store.url",
                what,
                remedy,
            );
        }
        Some(_) => note("the store", Err(CliError::unknown_store())),
        None => findings.error(
            "store-not-configured",
            "store.url",
            "no store is configured, so a consumer with this configuration does not start, and commands that read or change markers fail",
            "set store.url in oncegate.toml ([store], url = \"redis://localhost:6379\" or \"sqlite:markers.db\"), or ONCEGATE_STORE_URL",
        ),
    }
    for broker in brokers {
        match broker {
            #[cfg(feature = "kafka")]
            Broker::Kafka => match kafka::check_settings(config) {
                Ok(()) => note("Kafka", kafka::check(config, &mut findings).await),
                Err(error) => findings.add_refused_settings("[kafka]", &error),
            },
            #[cfg(feature = "rabbitmq")]
            Broker::Rabbitmq => match config.check_source(oncegate_config::Broker::RabbitMq) {
                Ok(()) => note("RabbitMQ", rabbitmq::check(config, &mut findings).await),
                Err(error) => findings.add_refused_settings("[rabbitmq]", &error),
            },
            #[allow(unreachable_patterns)]
            broker => note(broker.name(), Err(broker.missing_feature_error())),
        }
    }
    let mut findings = findings.0;
    findings.sort_by_key(|finding| finding.severity);
    let mut text = String::new();
    for DoctorFinding {
        code,
        severity,
        at,
        what,
        remedy,
    } in &findings
    {
        let severity = format!("{severity:?}").to_uppercase();
        text.push_str(&format!(
            "{severity}  {}  [{code}]\n  {}\n  Fix: {}\n\n",
            printable(at),
            printable(what),
            printable(remedy)
        ));
    }
    let count = |severity| {
        let findings = findings.iter();
        findings.filter(|it| it.severity == severity).count()
    };
    let errors = count(Severity::Error);
    text.push_str(&format!(
        "Checked {}; errors: {errors}, warnings: {}, advice: {}.",
        checked.join(", "),
        count(Severity::Warning),
        count(Severity::Advice)
    ));
    text.push_str(&unchecked.to_text());
    context.format.print(
        &serde_json::json!({ "findings": findings, "checked": checked, "not_checked": unchecked }),
        text,
    )?;
    unchecked.end()?;
    // Warnings alone do not fail, because the defaults of Kafka and oncegate cause some.
    if errors == 0 {
        Ok(())
    } else {
        Err(CliError::incomplete(format!("errors found: {errors}")))
    }
}
