//! Types have different names, unless they are the same idea in several crates. Reads the `src` and
//! `examples` of each crate in `crates`, the demo, the benchmark, the tests that have
//! programs of their own, and the development commands.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::{read, root};

/// The names that more than one file may declare, with the reason.
const SHARED: &[(&str, &[&str])] = &[
    (
        "the server that the testkit starts, and its client: a test names the module",
        &["Kafka", "Postgres", "Redis"],
    ),
    ("whether the clients of a server use TLS", &["Transport"]),
    (
        "the two brokers, as a section of the configuration and as an argument of a program",
        &["Broker"],
    ),
    (
        "a rejected message and its queue or topic: in the memory broker, the command line and the store laws",
        &["DeadLetter", "Destination"],
    ),
    (
        "which consumers receive from a queue: in the adapter, and in the settings of a chaos run",
        &["ConsumerMode"],
    ),
    (
        "a dead letter or in-doubt message as raw clients read it: in the chaos runs and in the end-to-end tests",
        &["RejectedMessage"],
    ),
    (
        "the system in which effects happen: in the model, and in the chaos runs",
        &["Sink"],
    ),
    ("the error type of each crate", &["Error"]),
    (
        "the command line of each program and of each of its commands",
        &["Arguments", "Command"],
    ),
    (
        "each example is a program of its own",
        &["Charge", "Payment", "Print", "Stock"],
    ),
    (
        "what a run has counted: in the test kit, the chaos runs and the demo",
        &["Report"],
    ),
];

fn rust_files(directory: &Path, files: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    for entry in entries {
        let path = entry.expect("an entry that can be read").path();
        let is_test_module = path
            .file_stem()
            .is_some_and(|stem| stem == "tests" || stem.to_string_lossy().ends_with("_tests"));
        if is_test_module {
            continue;
        }
        if path.is_dir() {
            rust_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The types that a file declares outside of its modules of tests. Associated types are indented,
/// and are not counted.
fn declared(source: &str) -> BTreeSet<&str> {
    let mut names = BTreeSet::new();
    let mut lines = source.lines();
    let mut after_cfg_test = false;
    while let Some(line) = lines.next() {
        if after_cfg_test && line.starts_with("mod ") && line.ends_with('{') {
            lines.by_ref().find(|line| *line == "}");
        }
        after_cfg_test = line.starts_with("#[cfg(test)]") || line.starts_with("#[cfg(all(test");
        let mut words = line.split_whitespace().skip_while(|word| {
            *word == "unsafe" || word.starts_with("pub") || word.starts_with("in ")
        });
        let is_a_type = match words.next() {
            Some("struct" | "enum" | "trait" | "union") => true,
            Some("type") => !line.starts_with(' '),
            _ => false,
        };
        if let Some(word) = words.next().filter(|_| is_a_type) {
            let end = word
                .find(|char: char| !char.is_alphanumeric() && char != '_')
                .unwrap_or(word.len());
            if end > 0 {
                names.insert(&word[..end]);
            }
        }
    }
    names
}

#[test]
fn types_with_the_same_name_are_listed_as_the_same_idea() {
    let mut files = Vec::new();
    let crates = std::fs::read_dir(root().join("crates")).expect("the crates");
    for entry in crates {
        let directory = entry.expect("an entry that can be read").path();
        for part in ["src", "examples"] {
            let directory = directory.join(part);
            if directory.is_dir() {
                rust_files(&directory, &mut files);
            }
        }
    }
    for program in [
        "examples/idempotent-api/src",
        "examples/payments/src",
        "benches/src",
        "benches/instructions/src",
        "tests/chaos/src",
        "tests/src",
        "tests/tests",
        "xtask/src",
    ] {
        rust_files(&root().join(program), &mut files);
    }
    files.sort();
    let sources: Vec<String> = files.iter().map(|path| read(path)).collect();
    let mut by_name: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (path, source) in files.iter().zip(&sources) {
        let path = path.strip_prefix(root()).expect("a file of the checkout");
        for name in declared(source) {
            by_name
                .entry(name)
                .or_default()
                .push(path.display().to_string());
        }
    }
    assert!(
        by_name.len() > 300,
        "only {} types were found",
        by_name.len()
    );

    let allowed: BTreeSet<&str> = SHARED
        .iter()
        .flat_map(|(_, names)| *names)
        .copied()
        .collect();
    let shared = by_name.iter().filter(|(_, files)| files.len() > 1);
    let (known, new): (Vec<_>, Vec<_>) = shared.partition(|(name, _)| allowed.contains(*name));
    assert!(
        new.is_empty(),
        "rename one, or add the name to SHARED if they are the same idea: {new:#?}"
    );
    let known: BTreeSet<&str> = known.into_iter().map(|(name, _)| *name).collect();
    let unused: Vec<_> = allowed.difference(&known).collect();
    assert!(unused.is_empty(), "no longer shared: {unused:?}");
}

#[test]
fn declared_types_are_found_without_those_of_test_modules() {
    let source = "\
pub(crate) struct One<T>(T);
    enum Two {}
pub trait Three: Send {
    type Item;
}
type Four = u8;
#[cfg(test)]
mod tests {
    struct Five;
}
pub unsafe trait Six {}
// struct Seven
";
    let names: Vec<&str> = declared(source).into_iter().collect();
    assert_eq!(names, ["Four", "One", "Six", "Three", "Two"]);
}
