//! `model`: explores every interleaving of a small world.

use std::process::Command;

use crate::Error;
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Allows for more trouble at once: minutes instead of seconds, and some gigabytes of memory.
    #[arg(long)]
    deep: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["run", "--quiet", "--release", "--package", "oncegate-model", "--"]).current_dir(setup::root());
    if arguments.deep {
        cargo.arg("--deep");
    }
    let shown = "cargo run --release --package oncegate-model".to_owned();
    let status = cargo.status().map_err(|source| Error::CannotRun { program: shown.clone(), source })?;
    if status.success() { Ok(()) } else { Err(Error::Failed(shown)) }
}
