//! `oncegate`: the command-line tool for operators.
//!
//! Each command has a module of its own.
#![forbid(unsafe_code)]
// Builds without a broker or a store leave some items unused.
#![cfg_attr(
    not(all(
        feature = "kafka",
        feature = "rabbitmq",
        feature = "redis",
        feature = "sqlite"
    )),
    allow(dead_code, unused_imports, unused_variables)
)]

mod audit;
mod config;
mod dead_letters;
mod destination;
mod doctor;
mod explain;
mod failure;
mod in_doubt;
mod marker;
mod marker_store;
mod output;
mod plan;
mod show_config;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

use crate::config::Config;
use crate::failure::{Failure, FailureCode};
use crate::output::OutputFormat;

/// Explains what happened to a message id, from the store, the dead letters and the messages in
/// doubt, and applies operator decisions with an audit.
#[derive(Parser)]
#[command(name = "oncegate", version, after_help = failure::CODES, arg_required_else_help = true)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Args)]
struct Common {
    /// The configuration file; by default `oncegate.toml` in the current directory, if it exists
    #[arg(long, global = true, env = "ONCEGATE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    json: bool,
    /// The operator name for the audit; by default the current user
    #[arg(
        long = "as",
        global = true,
        env = "ONCEGATE_OPERATOR",
        value_name = "NAME"
    )]
    operator: Option<String>,
}

impl Common {
    fn format(&self) -> OutputFormat {
        if self.json {
            OutputFormat::Json
        } else {
            OutputFormat::Text
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// Explain what happened to an id: was it handled, and why not twice?
    Explain(explain::ExplainArgs),
    /// Show and change markers in the store
    #[command(subcommand)]
    Marker(marker::MarkerCommand),
    /// List, redrive and drop messages that could not be handled
    #[command(subcommand)]
    DeadLetters(dead_letters::DeadLettersCommand),
    /// List and resolve messages whose effect is unknown
    #[command(subcommand)]
    InDoubt(in_doubt::InDoubtCommand),
    /// Check servers and settings, and suggest fixes
    Doctor(doctor::DoctorArguments),
    /// Show the actions of operators
    Audit(audit::AuditArguments),
    /// Estimate the memory, servers and connections that Redis needs for a load
    Plan(plan::PlanArguments),
    /// Check and print the configuration
    #[command(subcommand)]
    Config(show_config::ConfigCommand),
}

/// The context of every command.
pub(crate) struct Context {
    pub(crate) config: Config,
    pub(crate) format: OutputFormat,
    pub(crate) operator: String,
}

impl Context {
    fn of(common: &Common) -> Result<Self, Failure> {
        // Variables that are not UTF-8 cannot be ours.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let config = Config::read(common.config.as_deref(), variables)?;
        let format = common.format();
        let operator = common
            .operator
            .clone()
            .filter(|name| !name.trim().is_empty())
            .unwrap_or_else(audit::login_name);
        Ok(Self {
            config,
            format,
            operator,
        })
    }

    /// Checks that anything is configured.
    ///
    /// # Errors
    /// No file and no variable sets a key.
    pub(crate) fn has_configuration(&self) -> Result<(), Failure> {
        if self.config.set().next().is_some() {
            return Ok(());
        }
        let file = self.config.file().map_or_else(
            || "there is no oncegate.toml here".to_owned(),
            |it| format!("{} is empty", it.display()),
        );
        Err(Failure::usage(format!(
            "nothing is configured: {file}, and no variable sets a key; pass --config FILE, or set ONCEGATE_STORE_URL and the variables of \
             a broker, which `oncegate config keys` lists"
        )))
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if is_unknown_value(&error) => {
            let _ = error.print();
            return ExitCode::from(FailureCode::UnknownWord as u8);
        }
        Err(error) => error.exit(),
    };
    let format = arguments.common.format();
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            return report_failure(
                format,
                &Failure::server(format!("cannot start the runtime: {error}")),
            );
        }
    };
    let done = runtime.block_on(run(arguments));
    // Do not wait for a client that is still connecting.
    runtime.shutdown_background();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report_failure(format, &failure),
    }
}

/// Whether an argument has a value that is not one of its possible values.
fn is_unknown_value(error: &clap::Error) -> bool {
    let has_value = matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(word)) if !word.is_empty());
    let has_choices = matches!(error.get(ContextKind::ValidValue), Some(ContextValue::Strings(words)) if !words.is_empty());
    error.kind() == ErrorKind::InvalidValue && has_value && has_choices
}

fn report_failure(format: OutputFormat, failure: &Failure) -> ExitCode {
    format.print_failure(failure);
    eprintln!("oncegate: {}", output::printable(&failure.to_string()));
    failure.exit()
}

async fn run(arguments: Arguments) -> Result<(), Failure> {
    let context = Context::of(&arguments.common)?;
    match arguments.command {
        Command::Explain(explain) => explain::run(&context, explain).await,
        #[cfg(feature = "redis")]
        Command::Plan(arguments) => plan::run(&context, &arguments),
        #[cfg(not(feature = "redis"))]
        Command::Plan(_) => Err(Failure::feature_missing("Redis", "redis")),
        Command::Marker(command) => marker::run(&context, command).await,
        Command::DeadLetters(command) => dead_letters::run(&context, command).await,
        Command::InDoubt(command) => in_doubt::run(&context, command).await,
        Command::Doctor(arguments) => doctor::run(&context, arguments).await,
        Command::Audit(command) => audit::run(&context, command).await,
        Command::Config(command) => show_config::run(&context, command),
    }
}
