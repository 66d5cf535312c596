//! Prints text, tables, times and JSON.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::error::{CliError, CliErrorCode};

/// The format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputFormat {
    Text,
    Json,
}

impl OutputFormat {
    /// Prints the JSON or the text on standard output. [`check_printed`] later returns the error of
    /// a write that failed.
    ///
    /// # Errors
    /// The value cannot be written as JSON.
    pub(crate) fn print(
        self,
        json: &impl Serialize,
        text: impl fmt::Display,
    ) -> Result<(), CliError> {
        let text = match self {
            Self::Text => text.to_string(),
            Self::Json => serde_json::to_string_pretty(json).map_err(|error| {
                CliError::incomplete(format!("cannot be written as JSON: {error}"))
            })?,
        };
        print_line(&text);
        Ok(())
    }

    /// Prints a failure as JSON if the format is JSON, unless the command already printed its
    /// output: standard output must contain only one JSON document.
    pub(crate) fn print_failure(self, failure: &CliError) {
        if self == Self::Json && !PRINTED.load(Ordering::Relaxed) {
            print_line(
                &serde_json::json!({ "failed": failure.to_string(), "code": failure.code as u8 })
                    .to_string(),
            );
        }
    }
}

/// Whether anything was printed on standard output.
static PRINTED: AtomicBool = AtomicBool::new(false);

/// The first error of a write to standard output.
static WRITE_ERROR: OnceLock<io::Error> = OnceLock::new();

/// Checks that everything was written to standard output.
///
/// # Errors
/// A write failed, for example because the disk is full.
pub(crate) fn check_printed() -> Result<(), CliError> {
    match WRITE_ERROR.get() {
        None => Ok(()),
        Some(error) => Err(CliError::incomplete(format!(
            "the output is incomplete: cannot write to standard output: {error}"
        ))),
    }
}

/// Prints lines on standard output. Replaces control characters except line breaks, since a
/// terminal would interpret them. Ignores a closed pipe, as with `head`; [`check_printed`] returns
/// other errors.
pub(crate) fn print_line(text: &str) {
    PRINTED.store(true, Ordering::Relaxed);
    let replace_control = |character: char| {
        if character.is_control() && character != '\n' {
            '\u{fffd}'
        } else {
            character
        }
    };
    let text: String = text.trim_end().chars().map(replace_control).collect();
    let mut stdout = io::stdout().lock();
    let written = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
    if let Err(error) = written
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        let _ = WRITE_ERROR.set(error); // keeps the first
    }
}

/// Milliseconds since 1970, by the local clock.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, ms)
}

/// A duration in whole milliseconds.
pub(crate) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The items that the command could not check, and why.
#[derive(Debug, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct Unchecked(Vec<UncheckedItem>);

#[derive(Debug, Serialize)]
struct UncheckedItem {
    #[serde(rename = "where")]
    item: String,
    why: String,
    #[serde(skip)]
    code: CliErrorCode,
}

impl Unchecked {
    /// Adds an item, unless it was added before.
    pub(crate) fn note(&mut self, item: impl Into<String>, why: CliError) {
        let item = item.into();
        if !self.0.iter().any(|it| it.item == item) {
            self.0.push(UncheckedItem {
                item,
                why: why.to_string(),
                code: why.code,
            });
        }
    }

    /// The names of all items; `None` if everything was checked.
    pub(crate) fn names(&self) -> Option<String> {
        let names: Vec<&str> = self.0.iter().map(|it| it.item.as_str()).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// One line for each item.
    pub(crate) fn to_text(&self) -> String {
        self.0
            .iter()
            .map(|it| {
                format!(
                    "\nNot checked: {}: {}",
                    printable(&it.item),
                    printable(&it.why)
                )
            })
            .collect()
    }

    /// The result of a command that has printed its output.
    ///
    /// # Errors
    /// Something was not checked.
    pub(crate) fn end(&self) -> Result<(), CliError> {
        match self.names() {
            None => Ok(()),
            Some(names) => {
                // A missing feature has its own exit code, since another build would check the
                // item.
                if let Some(feature_missing) = self
                    .0
                    .iter()
                    .find(|it| it.code == CliErrorCode::FeatureMissing)
                {
                    return Err(CliError::feature_missing_text(feature_missing.why.clone()));
                }
                let text = format!("not checked: {names}; the output may be incomplete");
                Err(if self.0.iter().all(|it| it.code == CliErrorCode::Usage) {
                    CliError::usage(text)
                } else {
                    CliError::server(text)
                })
            }
        }
    }
}

/// A point in time as RFC 3339, in UTC and whole seconds.
pub(crate) fn utc_text(ms: u64) -> String {
    let seconds = ms / 1_000;
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years, as in Howard Hinnant's "chrono-Compatible
    // Low-Level Date Algorithms".
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 {
        from_march + 3
    } else {
        from_march - 9
    };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        rest / 3_600,
        rest / 60 % 60,
        rest % 60
    )
}

/// A duration in its two largest units.
pub(crate) fn duration_text(duration: Duration) -> String {
    let seconds = duration.as_secs();
    if seconds == 0 {
        return format!("{} ms", duration.as_millis());
    }
    let units = [
        (86_400 * 365, "y"),
        (86_400, "d"),
        (3_600, "h"),
        (60, "min"),
        (1, "s"),
    ];
    let first = units
        .iter()
        .position(|(unit, _)| seconds >= *unit)
        .unwrap_or(units.len() - 1);
    let (unit, name) = units[first];
    let mut text = format!("{} {name}", seconds / unit);
    if let Some((smaller, name)) = units.get(first + 1)
        && seconds % unit / smaller > 0
    {
        text = format!("{text} {} {name}", seconds % unit / smaller);
    }
    text
}

/// A text from a broker, store or file, with its control characters, also line breaks, replaced.
pub(crate) fn printable(text: &str) -> String {
    text.chars()
        .map(|character| {
            if character.is_control() {
                '\u{fffd}'
            } else {
                character
            }
        })
        .collect()
}

/// The maximum number of characters of a cell, and of the last cell of a row. Longer cells are cut.
const CELL: usize = 72;
const LAST_CELL: usize = 400;

/// A table for text output.
pub(crate) struct TextTable {
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub(crate) fn new(head: &[&str]) -> Self {
        Self {
            rows: vec![head.iter().map(|cell| cell.to_uppercase()).collect()],
        }
    }

    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        let last = cells.len().saturating_sub(1);
        let cut = |(column, cell): (usize, &String)| {
            let longest = if column == last { LAST_CELL } else { CELL };
            match cell.char_indices().nth(longest) {
                Some((end, _)) => format!("{}…", printable(&cell[..end])),
                None => printable(cell),
            }
        };
        self.rows.push(cells.iter().enumerate().map(cut).collect());
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}
