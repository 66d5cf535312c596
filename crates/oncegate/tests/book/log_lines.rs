//! The page of log lines has every line of level warn and error of the libraries and tools.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{read, root};

const PAGE: &str = "docs/src/log-lines.md";

/// Crates without code that runs in production.
const EXCLUDED_CRATES: &[&str] = &["oncegate-model", "oncegate-testkit"];

/// Log calls whose message is only a value: the crate, the message, and the beginnings of the values.
/// The lines of librdkafka are not documented.
const VALUE_MESSAGES: &[(&str, &str, &[&str])] = &[
    (
        "oncegate-amqp",
        "{warning}",
        &["a delivery may exceed RabbitMQ's consumer_timeout"],
    ),
    (
        "oncegate-core",
        "{error}",
        &["the function that reads the id or the fingerprint {}"],
    ),
    ("oncegate-kafka", "{line}", &[]),
    // The callers of `log_error` pass the text.
    ("oncegate-kafka", "{what}", &[]),
    (
        "oncegate-redis",
        "{server} {warning}",
        &[
            "has version {version}, which supports only Guarantee::Bare, as configured",
            "has maxmemory-policy {policy}",
            "rejects {name} at the moment",
            "uses {used} of {limit} bytes of memory",
            "has a clock that differs",
            "has {replicas} replicas",
            "does not let this user run INFO",
        ],
    ),
];

/// A log line in the source code, or a row of the page.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct LogLine {
    level: &'static str,
    message: String,
}

impl LogLine {
    fn new(level: &'static str, message: &str) -> Self {
        Self {
            level,
            message: message.to_owned(),
        }
    }

    /// The row of the page for this line.
    fn row(&self) -> String {
        let quotes = if self.message.contains('`') {
            "``"
        } else {
            "`"
        };
        format!(
            "| {} | {quotes}{}{quotes} | CAUSE | REMEDY |",
            self.level, self.message
        )
    }

    /// Whether this row documents this line: the level is the same, and the line begins with the words
    /// of the row.
    fn is_documented_by(&self, row: &LogLine) -> bool {
        let rest = self.message.strip_prefix(&row.message);
        self.level == row.level
            && rest.is_some_and(|rest| !rest.starts_with(|char: char| char.is_alphanumeric()))
    }
}

/// A string literal at the start of `source`, without its quotes, and with continued lines joined.
fn literal(source: &str) -> Option<String> {
    let mut text = String::new();
    let mut chars = source.strip_prefix('"')?.chars();
    while let Some(char) = chars.next() {
        match char {
            '"' => return Some(text),
            '\\' => match chars.next()? {
                '\n' => chars = chars.as_str().trim_start().chars(),
                escaped => text.push(escaped),
            },
            char => text.push(char),
        }
    }
    None
}

/// The arguments of a macro or function call. `source` begins after the opening parenthesis.
fn arguments(source: &str) -> Vec<&str> {
    let (mut depth, mut in_text, mut escaped, mut start) = (0, false, false, 0);
    let mut arguments = Vec::new();
    for (at, char) in source.char_indices() {
        match char {
            _ if escaped => escaped = false,
            '\\' if in_text => escaped = true,
            '"' => in_text = !in_text,
            _ if in_text => {}
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth > 0 => depth -= 1,
            ',' | ')' if depth == 0 => {
                arguments.push(source[start..at].trim());
                if char == ')' {
                    break;
                }
                start = at + 1;
            }
            _ => {}
        }
    }
    arguments
}

/// The log lines of a file, without those of its tests.
fn log_lines_of(source: &str) -> Vec<LogLine> {
    let code = source
        .split_once("\nmod tests {")
        .map_or(source, |(code, _)| code);
    let mut lines = Vec::new();
    for (call, level) in [
        ("warn!(", "warn"),
        ("error!(", "error"),
        ("log_error(", "error"),
    ] {
        for (at, _) in code.match_indices(call) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|char| char.is_alphanumeric() || char == '_') {
                continue;
            }
            lines.extend(
                arguments(&code[at + call.len()..])
                    .into_iter()
                    .find_map(literal)
                    .map(|message| LogLine::new(level, &message)),
            );
        }
    }
    lines
}

fn rust_files(directory: &Path, into: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(directory)
        .unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    for entry in entries {
        let path = entry.expect("an entry that can be read").path();
        if path.is_dir() {
            rust_files(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs")
            && !path.ends_with("tests.rs")
        {
            into.push(path);
        }
    }
}

/// The log lines of all crates, each with its file.
fn logged() -> Vec<(String, LogLine)> {
    let crates = root().join("crates");
    let mut logged = Vec::new();
    for entry in std::fs::read_dir(&crates).expect("the crates") {
        let entry = entry.expect("an entry that can be read");
        let name = entry.file_name().to_string_lossy().into_owned();
        let directory = entry.path().join("src");
        if !directory.is_dir() || EXCLUDED_CRATES.contains(&name.as_str()) {
            continue;
        }
        let mut files = Vec::new();
        rust_files(&directory, &mut files);
        let sources: Vec<String> = files.iter().map(|file| read(file)).collect();
        for (file, source) in files.iter().zip(&sources) {
            let file = file
                .strip_prefix(&crates)
                .expect("a file of a crate")
                .display();
            for line in log_lines_of(source) {
                let lines = resolved(&name, &sources, line);
                logged.extend(lines.into_iter().map(|line| (file.to_string(), line)));
            }
        }
    }
    logged
}

/// The lines that a log call writes: several if its message is only a value, from
/// [`VALUE_MESSAGES`].
fn resolved(name: &str, sources: &[String], line: LogLine) -> Vec<LogLine> {
    let is_value = |word: &str| word.starts_with('{') && word.ends_with('}');
    if !line.message.split(' ').all(is_value) {
        return vec![line];
    }
    if name == "oncegate-redis" && line.message == "{description}" {
        return anomalies(line.level);
    }
    let (_, _, values) = VALUE_MESSAGES
        .iter()
        .find(|(package, message, _)| *package == name && *message == line.message)
        .unwrap_or_else(|| {
            panic!(
                "{name}: a log line is the value {}: add its texts to VALUE_MESSAGES",
                line.message
            )
        });
    for value in *values {
        assert!(
            sources.iter().any(|source| source.contains(value)),
            "{name} has no text that begins with: {value}"
        );
    }
    values
        .iter()
        .map(|value| LogLine::new(line.level, value))
        .collect()
}

/// The anomalies that the Redis store logs: lost data is an error, all others are warnings.
fn anomalies(level: &'static str) -> Vec<LogLine> {
    let source = read(&root().join("crates/oncegate-redis/src/anomaly.rs"));
    let (_, texts) = source
        .split_once("fn description")
        .expect("the descriptions");
    let (texts, rest) = texts.split_once("\n    }\n").expect("the end of them");
    let (_, losses) = rest.split_once("fn is_data_loss").expect("what is a loss");
    let (losses, _) = losses.split_once("=> true").expect("what is a loss");
    texts
        .split("Self::")
        .skip(1)
        .filter_map(|arm| {
            let name = arm.split(|char: char| !char.is_alphanumeric()).next()?;
            let is_loss = losses
                .split("Self::")
                .any(|loss| loss.split(|char: char| !char.is_alphanumeric()).next() == Some(name));
            let text = literal(&arm[arm.find('"')?..])?;
            ((level == "error") == is_loss).then(|| LogLine::new(level, &text))
        })
        .collect()
}

/// The rows of a page.
fn rows(page: &str) -> Vec<LogLine> {
    page.lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line
                .strip_prefix("| ")?
                .strip_suffix(" |")?
                .split(" | ")
                .collect();
            let level = ["warn", "error"]
                .into_iter()
                .find(|level| *level == cells[0])?;
            assert!(
                cells.len() == 4 && cells.iter().all(|cell| !cell.trim().is_empty()),
                "{PAGE}: level, message, cause and remedy: {line}"
            );
            let message = cells[1].trim_matches(['`', ' ']);
            Some(LogLine::new(level, message))
        })
        .collect()
}

/// The rows that the page lacks, and those that no log line begins with.
fn differences(logged: &[(String, LogLine)], rows: &[LogLine]) -> (BTreeSet<String>, Vec<String>) {
    let missing = logged
        .iter()
        .filter(|(_, line)| !rows.iter().any(|row| line.is_documented_by(row)))
        .map(|(file, line)| format!("{}    (crates/{file})", line.row()))
        .collect();
    let stale = rows
        .iter()
        .filter(|row| !logged.iter().any(|(_, line)| line.is_documented_by(row)))
        .map(|row| row.row())
        .collect();
    (missing, stale)
}

#[test]
fn the_book_lists_every_warning_and_error_of_the_log() {
    let page = read(&root().join(PAGE));
    let (logged, rows) = (logged(), rows(&page));
    assert!(logged.len() > 70, "only {} lines were found", logged.len());
    let (missing, stale) = differences(&logged, &rows);
    let missing: Vec<String> = missing.into_iter().collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "{PAGE}\nadd these rows (the message may be cut after any word), with cause and remedy:\n{}\nremove or correct these rows, which no log line begins with:\n{}",
        missing.join("\n"),
        stale.join("\n")
    );
    for (at, row) in rows.iter().enumerate() {
        assert!(!rows[..at].contains(row), "{PAGE}: twice: {}", row.row());
    }
    assert!(page.contains("a field `facility`"));
}

#[test]
fn log_calls_and_rows_are_parsed() {
    let source = r#"
        fn one(it: &str) {
            tracing::warn!(topic = name(it, ","), %error, "one, two; {}", it);
            warn!(
                "a long line \
                 that continues"
            );
            not_a_warn!("none");
            log_error("cannot do it", result);
            tracing::error!(said, $text);
            tracing::info!("none");
        }
        #[cfg(test)]
        mod tests { fn two() { tracing::error!("none"); } }
    "#;
    // The module begins its line.
    let source = source.replace("\n        ", "\n");
    let found = log_lines_of(&source);
    let expected = [
        LogLine::new("warn", "one, two; {}"),
        LogLine::new("warn", "a long line that continues"),
        LogLine::new("error", "cannot do it"),
    ];
    assert_eq!(found, expected);
    let page = "| level | message |\n| warn | `one, two` | c | r |\n| warn | `a long line tha` | c | r |\n| error | ``cannot `do` it`` | c | r |\n";
    let logged: Vec<(String, LogLine)> = found.into_iter().map(|line| ("f".into(), line)).collect();
    let (missing, stale) = differences(&logged, &rows(page));
    assert_eq!(
        missing.into_iter().collect::<Vec<_>>(),
        [
            "| error | `cannot do it` | CAUSE | REMEDY |    (crates/f)",
            "| warn | `a long line that continues` | CAUSE | REMEDY |    (crates/f)",
        ]
    );
    assert_eq!(
        stale,
        [
            "| warn | `a long line tha` | CAUSE | REMEDY |",
            "| error | ``cannot `do` it`` | CAUSE | REMEDY |",
        ]
    );
}
