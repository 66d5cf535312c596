//! `oncegate config`: what is configured, and what can be.

use clap::Subcommand;
use serde::Serialize;
use toml::Value;

use crate::Context;
use crate::config::settings::{Hides, SETTINGS, Setting};
use crate::failure::Failure;
use crate::say::Table;

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Reads the configuration, and asks no server. Exit code 2 if anything in it means nothing.
    Check,
    /// Shows what holds and where it comes from, passwords hidden.
    Print,
    /// Lists every key, its variable, and what it says.
    Keys,
}

/// A setting as it is.
#[derive(Serialize)]
struct Shown {
    key: &'static str,
    value: serde_json::Value,
    from: String,
}

/// A setting as it may be.
#[derive(Serialize)]
struct Known {
    key: &'static str,
    variable: Option<String>,
    secret: bool,
    says: &'static str,
}

pub(crate) fn run(context: &Context, command: ConfigCommand) -> Result<(), Failure> {
    match command {
        ConfigCommand::Check => check(context),
        ConfigCommand::Print => print(context),
        ConfigCommand::Keys => keys(context),
    }
}

fn check(context: &Context) -> Result<(), Failure> {
    context.config.scope()?;
    context.config.id_source()?;
    if context.config.has_store() {
        context.config.redis()?;
    }
    let count = context.read.origins.len();
    let file = context.read.file.as_ref().map_or_else(|| "no file".to_owned(), |path| path.display().to_string());
    let machines = serde_json::json!({ "settings": count, "file": context.read.file });
    context.format.print(&machines, format!("{count} settings ({file} and variables): each means something"))
}

fn print(context: &Context) -> Result<(), Failure> {
    let set = SETTINGS.iter().filter_map(|setting| {
        let (section, name) = setting.key.split_once('.')?;
        let value = context.read.table.get(section)?.get(name)?;
        let from = context.read.origins.get(setting.key).cloned().unwrap_or_default();
        Some(Shown { key: setting.key, value: shown(setting, value), from })
    });
    let set: Vec<Shown> = set.collect();
    let mut table = Table::new(&["key", "value", "from"]);
    for shown in &set {
        table.row([shown.key.to_owned(), shown.value.to_string(), shown.from.clone()]);
    }
    context.format.print(&set, table)
}

fn keys(context: &Context) -> Result<(), Failure> {
    let all: Vec<Known> = SETTINGS
        .iter()
        .map(|setting| Known { key: setting.key, variable: setting.variable(), secret: setting.is_secret(), says: setting.says })
        .collect();
    let mut table = Table::new(&["key", "variable", "says"]);
    for known in &all {
        table.row([known.key.to_owned(), known.variable.clone().unwrap_or_else(|| "-".into()), known.says.to_owned()]);
    }
    context.format.print(&all, table)
}

fn shown(setting: &Setting, value: &Value) -> serde_json::Value {
    let hidden = || serde_json::Value::from("***");
    match (value, setting.hides) {
        (Value::Table(table), _) => table
            .iter()
            .map(|(name, value)| {
                let is_secret = ["password", "secret", "key", "config", "token"].iter().any(|word| name.contains(word));
                (name.clone(), if is_secret { hidden() } else { value.as_str().unwrap_or_default().into() })
            })
            .collect(),
        (Value::Array(list), _) => list.iter().map(|value| shown(setting, value)).collect(),
        (_, Hides::All) => hidden(),
        (Value::String(text), Hides::Password) => without_password(text).into(),
        (Value::Integer(number), _) => (*number).into(),
        (value, _) => value.as_str().unwrap_or_default().into(),
    }
}

/// Hides all between the scheme and the last `@` but the user: a password may hold anything.
pub(crate) fn without_password(url: &str) -> String {
    let from = url.find("://").map_or(0, |at| at + 3);
    let Some(to) = url.rfind('@').filter(|to| *to >= from) else {
        // A query may hold one too.
        return url.split_once('?').map_or_else(|| url.to_owned(), |(before, _)| format!("{before}?***"));
    };
    let user = url[from..to].split(':').next().unwrap_or_default();
    let rest = url[to..].split('?').next().unwrap_or_default();
    format!("{}{user}:***{rest}", &url[..from])
}
