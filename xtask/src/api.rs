//! `api`: compares the public API of each published library with its listing, `api.txt`.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::setup::{cargo, root, run_program, target_directory};

/// The published libraries.
pub(crate) const LIBRARIES: &[&str] = &[
    "oncegate",
    "oncegate-admin",
    "oncegate-amqp",
    "oncegate-config",
    "oncegate-core",
    "oncegate-http",
    "oncegate-kafka",
    "oncegate-redis",
    "oncegate-postgres",
    "oncegate-sql",
    "oncegate-testkit",
];

#[derive(Default, clap::Args)]
pub(crate) struct Arguments {
    /// Writes the listings instead of comparing them.
    #[arg(long)]
    write: bool,
}

/// Compares the listings with the code, or writes them. Prints each difference as a unified diff,
/// and fails if there is one.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Error> {
    document()?;
    let mut changed = Vec::new();
    for library in LIBRARIES {
        let listing = listing(library)?;
        let path = root().join("crates").join(library).join("api.txt");
        if arguments.write {
            write(&path, &listing)?;
        } else if std::fs::read_to_string(&path).ok().as_ref() != Some(&listing) {
            print_difference(library, &path, &listing)?;
            changed.push(*library);
        }
    }
    if changed.is_empty() {
        println!("api: {} libraries equal their api.txt", LIBRARIES.len());
        return Ok(());
    }
    Err(Error::ActionRequired(format!(
        "the public API of {} differs from api.txt; if that is intended: cargo xtask api --write",
        changed.join(", ")
    )))
}

/// Writes rustdoc's JSON for all libraries, all features enabled.
///
/// Stable rustdoc writes JSON only with `RUSTC_BOOTSTRAP`. A script sets the variable for rustdoc
/// alone, because cargo runs the build scripts of dependencies again when the variable changes.
fn document() -> Result<(), Error> {
    let script = target_directory().join("xtask/rustdoc");
    std::fs::create_dir_all(script.parent().expect("the script has a parent directory")).map_err(
        |source| Error::File {
            path: script.clone(),
            source,
        },
    )?;
    write(
        &script,
        "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n",
    )?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).map_err(
        |source| Error::File {
            path: script.clone(),
            source,
        },
    )?;
    let mut cargo = cargo();
    cargo
        .env("RUSTDOC", std::path::absolute(&script).unwrap_or(script))
        .env("RUSTDOCFLAGS", "-Z unstable-options --output-format json")
        .args(["doc", "--quiet", "--no-deps", "--lib", "--all-features"]);
    for library in LIBRARIES {
        cargo.args(["-p", library]);
    }
    run_program(&mut cargo)
}

/// The public items of a library, sorted, one per line. Lists derived implementations without their
/// items. Omits `#[doc(hidden)]` items, auto traits and blanket implementations.
fn listing(library: &str) -> Result<String, Error> {
    let json = target_directory()
        .join("doc")
        .join(format!("{}.json", library.replace('-', "_")));
    let items = |without_derived: bool| -> Result<Vec<String>, Error> {
        let api = public_api::Builder::from_rustdoc_json(&json)
            .sorted(true)
            .omit_blanket_impls(true)
            .omit_auto_trait_impls(true)
            .omit_auto_derived_impls(without_derived)
            .build()
            .map_err(|error| {
                Error::ActionRequired(format!(
                    "{}: {error}; the crate public-api in Cargo.toml must read what this rustdoc writes",
                    json.display()
                ))
            })?;
        Ok(api.items().map(ToString::to_string).collect())
    };
    let not_derived: BTreeSet<String> = items(true)?.into_iter().collect();
    let mut listing = String::new();
    for item in items(false)? {
        let is_derived = item.starts_with("impl") && !item.contains("StructuralPartialEq");
        if is_derived || not_derived.contains(&item) {
            listing.push_str(&item);
            listing.push('\n');
        }
    }
    Ok(listing)
}

fn print_difference(library: &str, path: &Path, listing: &str) -> Result<(), Error> {
    let new: PathBuf = target_directory()
        .join("xtask")
        .join(format!("{library}.txt"));
    write(&new, listing)?;
    // `diff` exits with 1 if the files differ.
    Command::new("diff")
        .args(["-u", "-N", "--label", "api.txt", "--label", library])
        .args([path, &new])
        .status()
        .map(drop)
        .map_err(|source| Error::CannotRun {
            program: "diff".into(),
            source,
        })
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    std::fs::write(path, text).map_err(|source| Error::File {
        path: path.to_owned(),
        source,
    })
}
