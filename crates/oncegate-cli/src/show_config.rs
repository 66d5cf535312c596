//! `oncegate config`: checks and prints the configuration.

use clap::Subcommand;
use oncegate_config::settings::{Redaction, SETTINGS};
use oncegate_config::{SettingValue, StoreKind};
use serde::Serialize;

use crate::CliContext;
use crate::destination::Broker;
use crate::error::CliError;
use crate::output::{TextTable, Unchecked};

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check the configuration without contacting a server; exits with 2 if a setting is unknown,
    /// invalid or contradictory, with 6 if this build cannot check the configured broker or store
    Check {
        /// Also require the settings of a consumer: a store, one broker and an id
        #[arg(long)]
        consumer: bool,
        /// Always refused; the error names the setting to use instead
        #[arg(long, hide = true)]
        broker: Option<String>,
    },
    /// Print the effective settings and their origin, with passwords hidden
    Print,
    /// List every key, its variable and its meaning
    Keys,
}

/// A setting that has a value, with its origin.
#[derive(Serialize)]
struct ConfigEntry {
    key: &'static str,
    value: serde_json::Value,
    from: String,
}

/// A setting that exists.
#[derive(Serialize)]
struct SettingEntry {
    key: &'static str,
    variable: String,
    secret: bool,
    description: &'static str,
}

pub(crate) fn run(context: &CliContext, command: ConfigCommand) -> Result<(), CliError> {
    // `check_configured` fails if nothing is set. It is not called for an existing file, which may
    // be empty on purpose, for `keys`, and for `check --consumer`, which names the missing settings
    // itself.
    let skips_empty_check = matches!(
        command,
        ConfigCommand::Keys | ConfigCommand::Check { consumer: true, .. }
    );
    if !skips_empty_check && context.config.file().is_none() {
        context.check_configured()?;
    }
    match command {
        ConfigCommand::Check {
            broker: Some(broker),
            ..
        } => Err(CliError::usage(format!(
            "config check has no --broker: it checks [kafka] and [rabbitmq]; with --consumer, the broker in gate.broker; to set that \
             for one command, run ONCEGATE_GATE_BROKER={broker} oncegate config check --consumer"
        ))),
        ConfigCommand::Check { consumer, .. } => check(context, consumer),
        ConfigCommand::Print => print(context),
        ConfigCommand::Keys => keys(context),
    }
}

fn check(context: &CliContext, for_consumer: bool) -> Result<(), CliError> {
    let config = &context.config;
    if for_consumer {
        config.check_for_consumer()?
    } else {
        config.check()?
    }
    let mut unchecked = Unchecked::default();
    for broker in [Broker::Kafka, Broker::Rabbitmq] {
        if broker.is_named(context)
            && let Some(missing) = broker.missing_feature()
        {
            unchecked.note(format!("[{}]", broker.name()), missing);
        }
    }
    if let Some(missing) = missing_store_feature(context)? {
        unchecked.note("[store]", missing);
    }
    let count = config.configured_values().count();
    let origin = config.file().map_or_else(
        || "variables only".to_owned(),
        |path| format!("{} and variables", path.display()),
    );
    let json =
        serde_json::json!({ "settings": count, "file": config.file(), "not_checked": unchecked });
    let result = match (unchecked.names(), for_consumer) {
        (Some(_), _) => "valid except the sections below, which were not checked",
        (None, true) => "a consumer can be built from them",
        (None, false) => {
            "each is valid; add --consumer to check them together, as a consumer does at start"
        }
    };
    let unchecked_text = unchecked.to_text();
    context.format.print(
        &json,
        format!("{count} settings ({origin}): {result}{unchecked_text}"),
    )?;
    unchecked.end()
}

/// The error for a configured store that this build does not include; `None` if it does.
fn missing_store_feature(context: &CliContext) -> Result<Option<CliError>, CliError> {
    Ok(match context.config.store_kind()? {
        Some(StoreKind::Redis) if cfg!(not(feature = "redis")) => {
            Some(CliError::feature_missing("Redis", "redis"))
        }
        Some(StoreKind::Sqlite(_)) if cfg!(not(feature = "sqlite")) => {
            Some(CliError::feature_missing("SQLite", "sqlite"))
        }
        Some(StoreKind::Postgres) if cfg!(not(feature = "postgres")) => {
            Some(CliError::feature_missing("PostgreSQL", "postgres"))
        }
        _ => None,
    })
}

fn print(context: &CliContext) -> Result<(), CliError> {
    let entries = context.config.configured_values();
    let entries = entries.map(|it| ConfigEntry {
        key: it.setting.key,
        value: display_value(it.setting.redaction, &it.value),
        from: it.origin.clone(),
    });
    let entries: Vec<ConfigEntry> = entries.collect();
    let mut table = TextTable::new(&["key", "value", "from"]);
    for entry in &entries {
        table.row([
            entry.key.to_owned(),
            entry.value.to_string(),
            entry.from.clone(),
        ]);
    }
    context.format.print(&entries, table)
}

fn keys(context: &CliContext) -> Result<(), CliError> {
    let all: Vec<SettingEntry> = SETTINGS
        .iter()
        .map(|setting| SettingEntry {
            key: setting.key,
            variable: setting.variable(),
            secret: setting.is_secret(),
            description: setting.description,
        })
        .collect();
    let mut table = TextTable::new(&["key", "variable", "description"]);
    for known in &all {
        table.row([
            known.key.to_owned(),
            known.variable.clone(),
            known.description.to_owned(),
        ]);
    }
    context.format.print(&all, table)
}

/// The value of a setting as JSON, with its secrets hidden.
fn display_value(redaction: Redaction, value: &SettingValue) -> serde_json::Value {
    let text = |text: &str| match redaction {
        Redaction::Nothing => text.to_owned(),
        Redaction::Password => without_password(text),
        // `All`, and what a later version adds.
        _ => HIDDEN.to_owned(),
    };
    match value {
        SettingValue::Text(it) => text(it).into(),
        SettingValue::Number(number) => (*number).into(),
        SettingValue::List(list) => list.iter().map(|it| text(it)).collect(),
        SettingValue::Pairs(pairs) => pairs
            .iter()
            .map(|(name, value)| {
                let is_secret = ["password", "secret", "key", "config", "token"]
                    .iter()
                    .any(|word| name.contains(word));
                (name.clone(), if is_secret { HIDDEN } else { value })
            })
            .map(|(name, value)| (name, serde_json::Value::from(value)))
            .collect(),
        _ => HIDDEN.into(),
    }
}

/// Printed in place of a secret.
const HIDDEN: &str = "***";

/// A URL with the text between the user and the last `@` hidden, since a password may contain any
/// character, and with the query hidden, which may contain a password. If an `@` follows a `?`, it
/// may belong to either of them, and all is hidden but the scheme.
pub(crate) fn without_password(url: &str) -> String {
    let from = url.find("://").map_or(0, |at| at + 3);
    let Some(to) = url.rfind('@').filter(|to| *to >= from) else {
        return url
            .split_once('?')
            .map_or_else(|| url.to_owned(), |(before, _)| format!("{before}?***"));
    };
    if url[from..to].contains('?') {
        return format!("{}{HIDDEN}", &url[..from]);
    }
    let user = url[from..to].split(':').next().unwrap_or_default();
    let host_and_path = url[to..].split('?').next().unwrap_or_default();
    format!("{}{user}:***{host_and_path}", &url[..from])
}
