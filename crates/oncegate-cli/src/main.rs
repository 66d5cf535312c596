//! `oncegate`: the command-line tool for operators. Terms such as marker, lapsed and redrive:
//! `docs/src/promises.md` and `docs/src/cli.md`.
#![forbid(unsafe_code)]
// Some items are unused in builds without a broker or a store.
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
mod error;
mod explain;
mod in_doubt;
mod marker;
mod marker_store;
mod outbox;
mod output;
mod plan;
mod show_config;
mod store;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

use crate::config::Config;
use crate::error::{CliError, CliErrorCode};
use crate::output::OutputFormat;

/// Explains what happened to a message id, from the store, the dead letters and the messages in
/// doubt, and applies operator decisions with an audit.
#[derive(Parser)]
#[command(name = "oncegate", version, after_help = error::CODES, arg_required_else_help = true)]
struct CliArgs {
    #[command(flatten)]
    common: GlobalArgs,
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(clap::Args)]
struct GlobalArgs {
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

impl GlobalArgs {
    fn format(&self) -> OutputFormat {
        if self.json {
            OutputFormat::Json
        } else {
            OutputFormat::Text
        }
    }
}

#[derive(Subcommand)]
enum CliCommand {
    /// Explain what happened to an id: was it handled, and are later messages with it skipped?
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
    /// List, retry and drop messages of the outbox in PostgreSQL
    #[command(subcommand)]
    Outbox(outbox::OutboxCommand),
    /// Check servers and settings, and suggest fixes
    Doctor(doctor::DoctorArgs),
    /// Show the actions of operators
    Audit(audit::AuditArgs),
    /// Estimate the memory, servers and connections that Redis needs for a load
    Plan(plan::PlanArgs),
    /// Prepare the store
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Check and print the configuration
    #[command(subcommand)]
    Config(show_config::ConfigCommand),
}

/// The context of every command.
pub(crate) struct CliContext {
    pub(crate) config: Config,
    pub(crate) format: OutputFormat,
    pub(crate) operator: String,
}

impl CliContext {
    fn of(common: &GlobalArgs) -> Result<Self, CliError> {
        // Ignores variables that are not UTF-8: they cannot be settings.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        if let Some(file) = &common.config
            && let Err(error) = std::fs::File::open(file)
        {
            return Err(CliError::usage(format!(
                "{}: {error}; --config or the variable ONCEGATE_CONFIG names this file: correct the name, or omit it",
                file.display()
            )));
        }
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

    /// Checks that at least one setting is configured.
    ///
    /// # Errors
    /// No file and no variable sets a key.
    pub(crate) fn check_configured(&self) -> Result<(), CliError> {
        if self.config.configured_values().next().is_some() {
            return Ok(());
        }
        let file = self.config.file().map_or_else(
            || "the current directory has no oncegate.toml".to_owned(),
            |path| format!("{} sets no key", path.display()),
        );
        Err(CliError::usage(format!(
            "nothing is configured: {file}, and no variable sets a key; pass --config FILE, or set ONCEGATE_STORE_URL and the variables of \
             a broker, which `oncegate config keys` lists"
        )))
    }
}

fn main() -> ExitCode {
    let arguments = match CliArgs::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if is_unknown_value(&error) => {
            let _ = error.print();
            return ExitCode::from(CliErrorCode::UnknownOptionValue as u8);
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
                &CliError::server(format!("cannot start the runtime: {error}")),
            );
        }
    };
    let result = runtime.block_on(run(arguments));
    // Does not wait for blocking threads, which may take as long as the timeout of a connection.
    runtime.shutdown_background();
    let result = match (result, output::check_printed()) {
        (Err(failure), Err(written)) => Err(failure.with(&written.to_string())),
        (result, written) => result.and(written),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => report_failure(format, &failure),
    }
}

/// Whether clap rejected a value because it is not among the possible values of its argument.
fn is_unknown_value(error: &clap::Error) -> bool {
    let has_value = matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(word)) if !word.is_empty());
    let has_choices = matches!(error.get(ContextKind::ValidValue), Some(ContextValue::Strings(words)) if !words.is_empty());
    error.kind() == ErrorKind::InvalidValue && has_value && has_choices
}

fn report_failure(format: OutputFormat, failure: &CliError) -> ExitCode {
    format.print_failure(failure);
    let text = output::printable(&failure.to_string());
    // `eprintln!` panics if standard error cannot be written.
    let _ = writeln!(std::io::stderr(), "oncegate: {text}");
    failure.exit()
}

async fn run(arguments: CliArgs) -> Result<(), CliError> {
    let context = CliContext::of(&arguments.common)?;
    match arguments.command {
        CliCommand::Explain(explain) => explain::run(&context, explain).await,
        #[cfg(feature = "redis")]
        CliCommand::Plan(arguments) => plan::run(&context, &arguments),
        #[cfg(not(feature = "redis"))]
        CliCommand::Plan(_) => Err(CliError::feature_missing("Redis", "redis")),
        CliCommand::Marker(command) => marker::run(&context, command).await,
        CliCommand::DeadLetters(command) => dead_letters::run(&context, command).await,
        CliCommand::InDoubt(command) => in_doubt::run(&context, command).await,
        CliCommand::Outbox(command) => outbox::run(&context, command).await,
        CliCommand::Doctor(arguments) => doctor::run(&context, arguments).await,
        CliCommand::Audit(command) => audit::run(&context, command).await,
        CliCommand::Store(command) => store::run(&context, command).await,
        CliCommand::Config(command) => show_config::run(&context, command),
    }
}
