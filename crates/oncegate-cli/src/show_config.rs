//! `oncegate config`: what is configured, and what can be.

use clap::Subcommand;
use oncegate_config::Value;
use oncegate_config::settings::{Hides, SETTINGS};
use serde::Serialize;

use crate::Context;
use crate::failure::Failure;
use crate::say::Table;

#[derive(Subcommand)]
pub(crate) enum ConfigCommand {
    /// Reads the configuration, and asks no server. Exit code 2 if anything in it means nothing, or
    /// contradicts itself.
    Check {
        /// Wants all that a consumer needs, too: a store, one broker, an id.
        #[arg(long)]
        consumer: bool,
    },
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
    variable: String,
    secret: bool,
    says: &'static str,
}

pub(crate) fn run(context: &Context, command: ConfigCommand) -> Result<(), Failure> {
    // An empty file is one that somebody wrote, and what a consumer lacks is named below.
    let names_all = matches!(
        command,
        ConfigCommand::Keys | ConfigCommand::Check { consumer: true }
    );
    if !names_all && context.config.file().is_none() {
        context.has_configuration()?;
    }
    match command {
        ConfigCommand::Check { consumer } => check(context, consumer),
        ConfigCommand::Print => print(context),
        ConfigCommand::Keys => keys(context),
    }
}

fn check(context: &Context, for_consumer: bool) -> Result<(), Failure> {
    let config = &context.config;
    if for_consumer {
        config.check_for_consumer()?
    } else {
        config.check()?
    }
    let count = config.set().count();
    let file = config
        .file()
        .map_or_else(|| "no file".to_owned(), |path| path.display().to_string());
    let machines = serde_json::json!({ "settings": count, "file": config.file() });
    let found = if for_consumer {
        "a consumer can be wired from them"
    } else {
        "each means something"
    };
    context.format.print(
        &machines,
        format!("{count} settings ({file} and variables): {found}"),
    )
}

fn print(context: &Context) -> Result<(), Failure> {
    let set = context.config.set();
    let set = set.map(|it| Shown {
        key: it.setting.key,
        value: shown(it.setting.hides, &it.value),
        from: it.origin.clone(),
    });
    let set: Vec<Shown> = set.collect();
    let mut table = Table::new(&["key", "value", "from"]);
    for shown in &set {
        table.row([
            shown.key.to_owned(),
            shown.value.to_string(),
            shown.from.clone(),
        ]);
    }
    context.format.print(&set, table)
}

fn keys(context: &Context) -> Result<(), Failure> {
    let all: Vec<Known> = SETTINGS
        .iter()
        .map(|setting| Known {
            key: setting.key,
            variable: setting.variable(),
            secret: setting.is_secret(),
            says: setting.says,
        })
        .collect();
    let mut table = Table::new(&["key", "variable", "says"]);
    for known in &all {
        table.row([
            known.key.to_owned(),
            known.variable.clone(),
            known.says.to_owned(),
        ]);
    }
    context.format.print(&all, table)
}

fn shown(hides: Hides, value: &Value) -> serde_json::Value {
    let text = |text: &str| match hides {
        Hides::Nothing => text.to_owned(),
        Hides::Password => without_password(text),
        Hides::All => HIDDEN.to_owned(),
    };
    match value {
        Value::Text(it) => text(it).into(),
        Value::Number(number) => (*number).into(),
        Value::List(list) => list.iter().map(|it| text(it)).collect(),
        Value::Names(names) => names
            .iter()
            .map(|(name, value)| {
                let is_secret = ["password", "secret", "key", "config", "token"]
                    .iter()
                    .any(|word| name.contains(word));
                (name.clone(), if is_secret { HIDDEN } else { value })
            })
            .map(|(name, value)| (name, serde_json::Value::from(value)))
            .collect(),
    }
}

/// In the place of a secret.
const HIDDEN: &str = "***";

/// Hides all between the scheme and the last `@` but the user: a password may hold anything.
pub(crate) fn without_password(url: &str) -> String {
    let from = url.find("://").map_or(0, |at| at + 3);
    let Some(to) = url.rfind('@').filter(|to| *to >= from) else {
        // A query may hold one too.
        return url
            .split_once('?')
            .map_or_else(|| url.to_owned(), |(before, _)| format!("{before}?***"));
    };
    let user = url[from..to].split(':').next().unwrap_or_default();
    let rest = url[to..].split('?').next().unwrap_or_default();
    format!("{}{user}:***{rest}", &url[..from])
}
