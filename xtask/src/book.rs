//! `book`: builds the book and fails on warnings.

use std::path::PathBuf;
use std::process::Command;

use crate::Error;
use crate::setup::{cargo, root, run_program, target_directory};

/// The version of mdBook.
const VERSION: &str = "0.5.4";

/// Builds the book into `target/book`. If mdBook is missing, first installs it into
/// `$ONCEGATE_CACHE/mdbook-<version>`, by default in `~/.cache/oncegate`.
pub(crate) fn run() -> Result<(), Error> {
    let mdbook = installed()?;
    let into = target_directory().join("book");
    let mut command = Command::new(&mdbook);
    // The versions of mdBook read different variables for the log level. The user's values could
    // hide warnings.
    command.env("RUST_LOG", "info").env("MDBOOK_LOG", "info");
    command
        .arg("build")
        .arg(root().join("docs"))
        .arg("--dest-dir")
        .arg(&into);
    let output = command.output().map_err(|source| Error::CannotRun {
        program: mdbook.display().to_string(),
        source,
    })?;
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    eprint!("{printed}");
    if !output.status.success() {
        return Err(Error::Failed("mdbook build docs".into()));
    }
    match warnings(&printed) {
        0 => {
            println!("book: {}", into.join("index.html").display());
            Ok(())
        }
        count => Err(Error::ActionRequired(format!(
            "the book has {count} warnings; fix those printed above"
        ))),
    }
}

/// The path of mdBook, installed if necessary.
fn installed() -> Result<PathBuf, Error> {
    let directory = oncegate_testkit::servers::cache().join(format!("mdbook-{VERSION}"));
    let mdbook = directory.join("bin/mdbook");
    if !mdbook.is_file() {
        println!(
            "book: installing mdBook {VERSION} into {}",
            directory.display()
        );
        let mut cargo = cargo();
        // Without the features for serving and searching, and as a debug build, which compiles
        // faster: mdBook runs only for a second.
        cargo
            .args([
                "install",
                "mdbook",
                "--version",
                VERSION,
                "--locked",
                "--no-default-features",
                "--debug",
                "--root",
            ])
            .arg(&directory);
        run_program(&mut cargo)?;
    }
    Ok(mdbook)
}

/// The number of lines that are warnings or errors.
fn warnings(output: &str) -> usize {
    output
        .lines()
        .filter(|line| {
            line.split([' ', '[', ']'])
                .any(|word| word == "WARN" || word == "ERROR")
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_warnings_in_every_log_format() {
        assert_eq!(
            warnings(" INFO Book building has started\n INFO Running the html backend\n"),
            0
        );
        assert_eq!(
            warnings(
                "2026-01-01 00:00:00 [WARN] (mdbook): x\n WARN unclosed tag `<b>`\n[ERROR] y\n"
            ),
            3
        );
    }
}
