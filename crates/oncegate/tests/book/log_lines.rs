//! The page of log lines has every line of level warn and error of the libraries and tools.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{read, root};

const PAGE: &str = "docs/src/log-lines.md";

/// Crates that do not run beside a consumer.
const LEFT_OUT: &[&str] = &["oncegate-model", "oncegate-testkit"];

/// Lines whose whole message is a value: the crate, the message, and how the values begin. The lines
/// of librdkafka are not documented here.
const PASSED_ON: &[(&str, &str, &[&str])] = &[
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
    // The text is that of the callers of `log_error`.
    ("oncegate-kafka", "{what}", &[]),
    (
        "oncegate-redis",
        "{server} {warning}",
        &[
            "has version {version}, which supports only Guarantee::Bare, as configured",
            "uses {used} of {limit} bytes of memory",
            "has a clock that differs",
            "has {replicas} replicas",
            "does not let this user run INFO",
        ],
    ),
];

/// A line as the source has it.
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

    /// The row that the page needs.
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

    /// Whether a row of this level and beginning is about this line. A beginning ends with a word.
    fn is_of(&self, row: &LogLine) -> bool {
        let rest = self.message.strip_prefix(&row.message);
        self.level == row.level
            && rest.is_some_and(|rest| !rest.starts_with(|it: char| it.is_alphanumeric()))
    }
}

/// A string literal at the start of `source`, without its quotes, and with continued lines joined.
fn literal(source: &str) -> Option<String> {
    let mut text = String::new();
    let mut letters = source.strip_prefix('"')?.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '"' => return Some(text),
            '\\' => match letters.next()? {
                '\n' => letters = letters.as_str().trim_start().chars(),
                escaped => text.push(escaped),
            },
            letter => text.push(letter),
        }
    }
    None
}

/// The arguments of a macro or function, from behind its opening parenthesis.
fn arguments(source: &str) -> Vec<&str> {
    let (mut depth, mut in_text, mut escaped, mut start) = (0, false, false, 0);
    let mut arguments = Vec::new();
    for (at, letter) in source.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' if in_text => escaped = true,
            '"' => in_text = !in_text,
            _ if in_text => {}
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' if depth > 0 => depth -= 1,
            ',' | ')' if depth == 0 => {
                arguments.push(source[start..at].trim());
                if letter == ')' {
                    break;
                }
                start = at + 1;
            }
            _ => {}
        }
    }
    arguments
}

/// The lines of a file, without those of its tests.
fn lines_of(source: &str) -> Vec<LogLine> {
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
            if before.is_some_and(|it| it.is_alphanumeric() || it == '_') {
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
        } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with("tests.rs") {
            into.push(path);
        }
    }
}

/// The lines of all crates, each with its file.
fn logged() -> Vec<(String, LogLine)> {
    let crates = root().join("crates");
    let mut logged = Vec::new();
    for entry in std::fs::read_dir(&crates).expect("the crates") {
        let entry = entry.expect("an entry that can be read");
        let name = entry.file_name().to_string_lossy().into_owned();
        let directory = entry.path().join("src");
        if !directory.is_dir() || LEFT_OUT.contains(&name.as_str()) {
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
            for line in lines_of(source) {
                let lines = resolved(&name, &sources, line);
                logged.extend(lines.into_iter().map(|line| (file.to_string(), line)));
            }
        }
    }
    logged
}

/// The lines behind a line that is nothing but a value; any other is itself.
fn resolved(name: &str, sources: &[String], line: LogLine) -> Vec<LogLine> {
    let is_value = |word: &str| word.starts_with('{') && word.ends_with('}');
    if !line.message.split(' ').all(is_value) {
        return vec![line];
    }
    if name == "oncegate-redis" && line.message == "{description}" {
        return anomalies(line.level);
    }
    let (_, _, values) = PASSED_ON
        .iter()
        .find(|(place, message, _)| *place == name && *message == line.message)
        .unwrap_or_else(|| {
            panic!(
                "{name}: a log line is the value {}: add its texts to PASSED_ON",
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

/// What the Redis store has seen: lost data is an error, all else a warning.
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
            let name = arm.split(|it: char| !it.is_alphanumeric()).next()?;
            let is_loss = losses
                .split("Self::")
                .any(|it| it.split(|it: char| !it.is_alphanumeric()).next() == Some(name));
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
            let level = ["warn", "error"].into_iter().find(|it| *it == cells[0])?;
            assert!(
                cells.len() == 4 && cells.iter().all(|cell| !cell.trim().is_empty()),
                "{PAGE}: level, message, cause and remedy: {line}"
            );
            let message = cells[1].trim_matches(['`', ' ']);
            Some(LogLine::new(level, message))
        })
        .collect()
}

/// What the page lacks, and which of its rows no line of the source begins with.
fn differences(logged: &[(String, LogLine)], rows: &[LogLine]) -> (BTreeSet<String>, Vec<String>) {
    let missing = logged
        .iter()
        .filter(|(_, line)| !rows.iter().any(|row| line.is_of(row)))
        .map(|(file, line)| format!("{}    (crates/{file})", line.row()))
        .collect();
    let stale = rows
        .iter()
        .filter(|row| !logged.iter().any(|(_, line)| line.is_of(row)))
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
fn lines_and_rows_are_found() {
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
    let found = lines_of(&source);
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
