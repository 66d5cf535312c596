//! `model`: runs the model checker, and the mutants of the rules and of isolation (of messages that
//! may have crashed a process).

use std::process::{Command, Stdio};

use crate::Error;
use crate::patched_source::patched_source;
use crate::setup::{self, cargo};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Also explores larger fault budgets. Takes a quarter of an hour and 10 GB of memory.
    #[arg(long, conflicts_with = "mutants")]
    deep: bool,
    /// Checks instead that the model, and the tests of isolation, detect each mutant.
    #[arg(long)]
    mutants: bool,
}

/// The mutants of `crates/oncegate-core/tests/isolation.patch`.
const ISOLATION_MUTANTS: [&str; 4] = [
    "forgets-waiting-suspects",
    "claims-beside-suspects",
    "ignores-isolation",
    "wakes-no-waiting-suspect",
];

pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let mut cargo = cargo();
    let binary = if arguments.mutants {
        "oncegate-model-mutants"
    } else {
        "oncegate-model"
    };
    cargo.args([
        "run",
        "--quiet",
        "--release",
        "--package",
        "oncegate-model",
        "--bin",
        binary,
        "--",
    ]);
    if arguments.deep {
        cargo.arg("--deep");
    }
    let shown = format!("cargo run --release --package oncegate-model --bin {binary}");
    if !succeeds(&mut cargo, &shown)? {
        return Err(Error::Failed(shown));
    }
    if arguments.mutants {
        test_isolation_mutants()?;
    }
    Ok(())
}

/// Checks that the tests of isolation fail with each of its mutants.
fn test_isolation_mutants() -> Result<(), Error> {
    let source = patched_source(
        "crates/oncegate-core/tests/isolation.patch",
        "target/isolation-mutants/source",
    )?;
    let test = |mutant: &str| {
        let mut cargo = cargo();
        cargo
            .args([
                "test",
                "--quiet",
                "--package",
                "oncegate-core",
                "--test",
                "isolation",
            ])
            // The dependencies are compiled there already. A profile of its own keeps Cargo from using the
            // patched library instead of the other one, which has the same name.
            .arg("--target-dir")
            .arg(setup::target_directory())
            .args([
                "--config",
                "profile.dev.package.oncegate-core.codegen-units=17",
            ])
            .env("ONCEGATE_MUTANT", mutant)
            .current_dir(&source);
        cargo
    };
    let shown = "cargo test --package oncegate-core --test isolation";
    // Without a mutant the tests pass, so a failure below is that of the mutant.
    if !succeeds(&mut test(""), shown)? {
        return Err(Error::Failed(shown.to_owned()));
    }
    for mutant in ISOLATION_MUTANTS {
        let shown = format!("ONCEGATE_MUTANT={mutant} {shown}");
        let mut test = test(mutant);
        test.stdout(Stdio::null()).stderr(Stdio::null());
        if succeeds(&mut test, &shown)? {
            return Err(Error::ActionRequired(format!(
                "the tests of isolation do not detect the mutant {mutant}: {shown}"
            )));
        }
        println!("{mutant}: found");
    }
    Ok(())
}

fn succeeds(command: &mut Command, shown: &str) -> Result<bool, Error> {
    let status = command.status().map_err(|source| Error::CannotRun {
        program: shown.to_owned(),
        source,
    })?;
    Ok(status.success())
}
