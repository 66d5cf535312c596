//! Each Rust block of the README and the book is, word for word, part of a file that is compiled; and
//! the tables of the book equal the code.

#[path = "book/architecture.rs"]
mod architecture;
#[path = "book/dependencies.rs"]
mod dependencies;
#[path = "book/generated.rs"]
mod generated;
#[path = "book/links.rs"]
mod links;
#[path = "book/log_lines.rs"]
mod log_lines;
#[path = "book/names.rs"]
mod names;
#[path = "book/reference.rs"]
mod reference;
#[path = "book/upstream.rs"]
mod upstream;

use std::path::{Path, PathBuf};

use oncegate::outcome::OUTCOMES;

/// The directories with the files that blocks are copied from.
const COMPILED: &[&str] = &[
    "crates/oncegate/examples",
    "crates/oncegate/tests",
    "crates/oncegate-admin/examples",
    "crates/oncegate-postgres/examples",
    "crates/oncegate-testkit/tests/laws",
    "examples/idempotent-api/src",
    "examples/payments/src",
    "examples/payments",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files(directory: &str, extension: &str) -> Vec<PathBuf> {
    let directory = root().join(directory);
    let entries = std::fs::read_dir(&directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let paths = entries.map(|entry| entry.expect("an entry that can be read").path());
    paths
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect()
}

/// The pages of the book.
fn pages() -> Vec<PathBuf> {
    let folders = std::fs::read_dir(root().join("docs/src")).expect("the book");
    let folders = folders
        .map(|entry| entry.expect("an entry that can be read"))
        .filter(|entry| entry.path().is_dir());
    let within = folders
        .flat_map(|folder| files(&format!("docs/src/{}", folder.file_name().display()), "md"));
    files("docs/src", "md").into_iter().chain(within).collect()
}

/// The pages with code for users: the book, and the READMEs of the repository and of its crates.
fn pages_with_code() -> Vec<PathBuf> {
    let crates = std::fs::read_dir(root().join("crates")).expect("the crates");
    let readmes = crates
        .map(|entry| {
            entry
                .expect("an entry that can be read")
                .path()
                .join("README.md")
        })
        .filter(|readme| readme.is_file());
    let mut pages = pages();
    pages.extend(readmes);
    pages.push(root().join("README.md"));
    pages
}

/// The code blocks that begin with exactly this line.
fn blocks(markdown: &str, fence: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut open: Option<String> = None;
    for line in markdown.lines() {
        match &mut open {
            None if line.trim() == fence => open = Some(String::new()),
            None => {}
            Some(_) if line.trim() == "```" => blocks.extend(open.take()),
            Some(block) => *block += &format!("{line}\n"),
        }
    }
    assert!(
        open.is_none(),
        "a block that begins with {fence} does not end"
    );
    blocks
}

/// Whether a file contains this block, unchanged or indented by up to 16 spaces, as an excerpt from a
/// function is.
fn has(file: &str, block: &str) -> bool {
    (0..=4).any(|depth| {
        let margin = "    ".repeat(depth);
        let indented: String = block
            .lines()
            .map(|line| {
                if line.is_empty() {
                    "\n".to_owned()
                } else {
                    format!("{margin}{line}\n")
                }
            })
            .collect();
        file.contains(&indented)
    })
}

/// `DidNotHappen` states that no attempt up to and including the current one can have its effect any
/// more. If it covered only lower attempts, an effect could happen twice: the model shows that with
/// the mutant "DidNotHappen prevents only lower attempts".
#[test]
fn the_code_and_the_book_agree_that_did_not_happen_includes_the_current_attempt() {
    for (file, words) in [
        (
            "docs/src/promises.md",
            "an attempt up to and including `cx.attempt()`",
        ),
        (
            "crates/oncegate-core/src/handler.rs",
            "*and that no attempt up to and including `cx.attempt()` can have one later*",
        ),
        (
            "examples/payments/src/provider.rs",
            "attempts up to and including this one",
        ),
        (
            "crates/oncegate-model/src/system.rs",
            "voids: |attempt| attempt,",
        ),
        (
            "crates/oncegate-model/mutants/main.rs",
            "voids: |attempt| attempt - 1",
        ),
    ] {
        let text = read(&root().join(file));
        let lines: Vec<&str> = text
            .lines()
            .map(|line| line.trim().trim_start_matches("///").trim())
            .collect();
        assert!(
            lines.join(" ").contains(words),
            "{file} does not contain: {words}"
        );
    }
}

#[test]
fn every_rust_block_is_part_of_a_compiled_file() {
    let compiled: Vec<String> = COMPILED
        .iter()
        .flat_map(|directory| files(directory, "rs"))
        .map(|path| read(&path))
        .collect();
    let mut checked = 0;
    for page in pages_with_code() {
        let text = read(&page);
        let other_fence = text
            .lines()
            .find(|line| line.trim().starts_with("```rust") && line.trim() != "```rust");
        assert_eq!(
            other_fence,
            None,
            "{}: open Rust blocks with ```rust alone, so that they are checked",
            page.display()
        );
        for block in blocks(&text, "```text") {
            assert!(
                !block.contains("::builder()"),
                "{}: this is Rust, open it with ```rust:\n{block}",
                page.display()
            );
        }
        for block in blocks(&text, "```rust") {
            assert!(
                !block.contains("ctrl_c"),
                "{}: containers send SIGTERM; show shutdown_signal():\n{block}",
                page.display()
            );
            assert!(
                compiled.iter().any(|file| has(file, &block)),
                "{}: no compiled file contains this block:\n{block}",
                page.display()
            );
            checked += 1;
        }
    }
    assert!(checked >= 3, "only {checked} blocks were found");
}

/// Samples that run until a signal and are not in the list of `tests/build.rs`: the tests of this
/// package start `stop` as it is, and those of the demo stop its workers.
const STOPPED_ELSEWHERE: &[&str] = &["oncegate/examples/stop.rs", "examples/payments/src/real.rs"];

#[test]
fn each_sample_that_runs_until_a_signal_is_stopped_by_a_test() {
    let listed = read(&root().join("tests/build.rs"));
    let mut stopped = 0;
    for directory in COMPILED {
        for path in files(directory, "rs") {
            let is_test = path.ends_with("crates/oncegate/tests/readme.rs");
            if is_test || !read(&path).contains("shutdown_signal()") {
                continue;
            }
            let name = path.file_name().expect("a file").display();
            let sample = format!("{}/{name}", directory.trim_start_matches("crates/"));
            let is_stopped = listed.contains(&format!("\"{sample}\","))
                || STOPPED_ELSEWHERE.contains(&sample.as_str());
            assert!(
                is_stopped,
                "{sample}: add it to SAMPLES in tests/build.rs, and a test to end_to_end/samples.rs"
            );
            stopped += 1;
        }
    }
    assert!(stopped >= 7, "only {stopped} samples were found");
}

#[test]
fn the_readme_shows_the_whole_handler_of_the_demo() {
    let handler = read(&root().join("examples/payments/src/charge.rs"));
    assert!(
        blocks(&read(&root().join("README.md")), "```rust").contains(&handler),
        "copy charge.rs into the README again"
    );
}

/// A Markdown table, as the book has it.
fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let line = |cells: [String; N]| format!("| {} |\n", cells.join(" | "));
    let head = line(head.map(str::to_owned));
    let rule = format!("|{}\n", "---|".repeat(N));
    head + &rule + &rows.into_iter().map(line).collect::<String>()
}

#[test]
fn the_book_lists_every_metric() {
    let page = read(&root().join("docs/src/metrics.md"));
    let metrics = table(
        ["metric", "kind", "meaning"],
        oncegate::metrics::all().map(|metric| {
            let labels = if metric.labels.is_empty() {
                String::new()
            } else {
                format!("{{{}}}", metric.labels.join(", "))
            };
            [
                format!("`{}{labels}`", metric.name),
                metric.kind.as_str().to_owned(),
                metric.help.to_owned(),
            ]
        }),
    );
    let outcomes = table(
        ["`outcome`", "meaning"],
        OUTCOMES
            .iter()
            .map(|(outcome, description)| [format!("`{outcome}`"), description.to_string()]),
    );
    for table in [metrics, outcomes] {
        assert!(
            page.contains(&table),
            "docs/src/metrics.md does not have this table:\n{table}"
        );
    }
}

#[test]
fn the_grace_periods_of_containers_are_longer_than_the_drain_timeout() {
    let mut checked = 0;
    for (file, key) in [
        ("docker-compose.yml", "stop_grace_period:"),
        ("docs/src/containers.md", "stop_grace_period:"),
        ("docs/src/containers.md", "terminationGracePeriodSeconds:"),
        ("docs/src/containers.md", "TimeoutStopSec="),
    ] {
        for value in read(&root().join(file))
            .lines()
            .filter_map(|line| line.trim().strip_prefix(key))
        {
            let seconds: u64 = value.trim().trim_end_matches('s').parse().expect("seconds");
            assert!(
                seconds >= oncegate::defaults::DRAIN_TIMEOUT.as_secs() + 10,
                "{file}: {key} {seconds}"
            );
            checked += 1;
        }
    }
    assert_eq!(checked, 5);
}

#[test]
fn a_block_that_differs_from_the_file_is_detected() {
    let file = "fn main() {\n    one();\n\n    two();\n}\n";
    assert!(has(file, "one();\n\ntwo();\n"));
    assert!(has(file, file));
    assert!(!has(file, "one();\ntwo();\n"));
    assert!(!has(file, "one();\n\nthree();\n"));
    assert_eq!(
        blocks("a\n```rust\nx\n```\n```toml\ny\n```\n", "```rust"),
        ["x\n"]
    );
}
