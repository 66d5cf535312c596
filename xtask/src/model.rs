//! `model`: runs the model checker.

use std::process::Command;

use crate::Error;
use crate::setup;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also explores larger fault budgets. Takes a quarter of an hour and 10 GB of memory.
    #[arg(long, conflicts_with = "mutants")]
    deep: bool,
    /// Checks instead that the model detects each mutant.
    #[arg(long)]
    mutants: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let binary = if arguments.mutants {
        "oncegate-model-mutants"
    } else {
        "oncegate-model"
    };
    cargo
        .args([
            "run",
            "--quiet",
            "--release",
            "--package",
            "oncegate-model",
            "--bin",
            binary,
            "--",
        ])
        .current_dir(setup::root());
    if arguments.deep {
        cargo.arg("--deep");
    }
    let shown = format!("cargo run --release --package oncegate-model --bin {binary}");
    let status = cargo.status().map_err(|source| Error::CannotRun {
        program: shown.clone(),
        source,
    })?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Failed(shown))
    }
}
