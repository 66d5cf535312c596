//! `oncegate`: what an operator asks and does.
//!
//! One command a file; what several need lies beside them.
#![forbid(unsafe_code)]
// What a broker or a store that was left out alone needs.
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
mod doctor;
mod explain;
mod failure;
mod in_doubt;
mod letters;
mod marker;
mod markers;
mod plan;
mod say;
mod show_config;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Parser, Subcommand};

use crate::config::Config;
use crate::failure::{Code, Failure};
use crate::say::Format;

/// Was it handled, and why not twice? Looks into the store, the dead letters and the messages in
/// doubt, and changes what an operator decides, with an audit.
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
    /// The configuration; `oncegate.toml` here, if there is one, where this is not said.
    #[arg(long, global = true, env = "ONCEGATE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Writes JSON for machines instead of text for people.
    #[arg(long, global = true)]
    json: bool,
    /// Who acts, for the audit; by default the user of this machine.
    #[arg(
        long = "as",
        global = true,
        env = "ONCEGATE_OPERATOR",
        value_name = "NAME"
    )]
    operator: Option<String>,
}

impl Common {
    fn format(&self) -> Format {
        if self.json {
            Format::Machines
        } else {
            Format::People
        }
    }
}

#[derive(Subcommand)]
enum Command {
    /// The whole story of an id: was it handled, and why not twice?
    Explain(explain::Explain),
    /// What the store remembers of ids.
    #[command(subcommand)]
    Marker(marker::MarkerCommand),
    /// Messages that were set aside because they cannot be handled.
    #[command(subcommand)]
    DeadLetters(dead_letters::DeadLettersCommand),
    /// Messages of which nobody knows whether they happened.
    #[command(subcommand)]
    InDoubt(in_doubt::InDoubtCommand),
    /// Asks the servers, and says what is wrong with them and with the settings, and what to do
    /// about it.
    Doctor(doctor::DoctorArguments),
    /// What operators did.
    Audit(audit::AuditArguments),
    /// What a load needs of Redis: memory, servers, connections.
    Plan(plan::PlanArguments),
    /// The configuration.
    #[command(subcommand)]
    Config(show_config::ConfigCommand),
}

/// What every command goes by.
pub(crate) struct Context {
    pub(crate) config: Config,
    pub(crate) format: Format,
    pub(crate) operator: String,
}

impl Context {
    fn of(common: &Common) -> Result<Self, Failure> {
        // A variable that is no text is nobody's that we know.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        let config = Config::read(common.config.as_deref(), variables)?;
        let format = common.format();
        let operator = common
            .operator
            .clone()
            .unwrap_or_else(audit::user_of_this_machine);
        Ok(Self {
            config,
            format,
            operator,
        })
    }

    /// Whether anything is configured.
    ///
    /// # Errors
    /// Nothing is: there is nothing to look at.
    pub(crate) fn has_configuration(&self) -> Result<(), Failure> {
        if self.config.set().next().is_some() {
            return Ok(());
        }
        let file = self.config.file().map_or_else(
            || "there is no oncegate.toml here".to_owned(),
            |it| format!("{} is empty", it.display()),
        );
        Err(Failure::usage(format!(
            "nothing is configured: {file}, and no variable sets a key; give it --config FILE, or set ONCEGATE_STORE_URL and the variables of \
             a broker, which `oncegate config keys` lists"
        )))
    }
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) if names_nothing_known(&error) => {
            let _ = error.print();
            return ExitCode::from(Code::UnknownWord as u8);
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
        Err(error) => return told(format, &Failure::server(format!("no runtime: {error}"))),
    };
    let done = runtime.block_on(run(arguments));
    // A client that is still connecting to somebody is not waited for.
    runtime.shutdown_background();
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => told(format, &failure),
    }
}

/// Whether a word was said where only some are known, such as a reason or a state.
fn names_nothing_known(error: &clap::Error) -> bool {
    let said = matches!(error.get(ContextKind::InvalidValue), Some(ContextValue::String(word)) if !word.is_empty());
    let known = matches!(error.get(ContextKind::ValidValue), Some(ContextValue::Strings(words)) if !words.is_empty());
    error.kind() == ErrorKind::InvalidValue && said && known
}

fn told(format: Format, failure: &Failure) -> ExitCode {
    format.failed(failure);
    eprintln!("oncegate: {}", say::plain(&failure.to_string()));
    failure.exit()
}

async fn run(arguments: Arguments) -> Result<(), Failure> {
    let context = Context::of(&arguments.common)?;
    match arguments.command {
        Command::Explain(explain) => explain::run(&context, explain).await,
        #[cfg(feature = "redis")]
        Command::Plan(arguments) => plan::run(&context, &arguments),
        #[cfg(not(feature = "redis"))]
        Command::Plan(_) => Err(Failure::left_out("Redis", "redis")),
        Command::Marker(command) => marker::run(&context, command).await,
        Command::DeadLetters(command) => dead_letters::run(&context, command).await,
        Command::InDoubt(command) => in_doubt::run(&context, command).await,
        Command::Doctor(arguments) => doctor::run(&context, arguments).await,
        Command::Audit(command) => audit::run(&context, command).await,
        Command::Config(command) => show_config::run(&context, command),
    }
}
