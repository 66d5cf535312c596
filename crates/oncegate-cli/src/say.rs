//! How things are said: times, tables, and text that came from outside.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::failure::{Code, Failure};

/// For whom it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    People,
    Machines,
}

impl Format {
    /// Prints one or the other on standard output.
    pub(crate) fn print(
        self,
        machines: &impl Serialize,
        people: impl fmt::Display,
    ) -> Result<(), Failure> {
        let text = match self {
            Self::People => people.to_string(),
            Self::Machines => serde_json::to_string_pretty(machines)
                .map_err(|error| Failure::not_all(format!("cannot be written as JSON: {error}")))?,
        };
        line(&text);
        Ok(())
    }

    /// Tells machines of a failure, unless they were told of something already.
    pub(crate) fn failed(self, failure: &Failure) {
        if self == Self::Machines && !TOLD.load(Ordering::Relaxed) {
            line(
                &serde_json::json!({ "failed": failure.to_string(), "code": failure.code as u8 })
                    .to_string(),
            );
        }
    }
}

/// Whether something stands on standard output.
static TOLD: AtomicBool = AtomicBool::new(false);

/// Lines on standard output, without what a terminal would obey. Who reads no more of it, as `head`
/// does, is not told more.
pub(crate) fn line(text: &str) {
    use std::io::Write;
    TOLD.store(true, Ordering::Relaxed);
    let shown = |letter: char| {
        if letter.is_control() && letter != '\n' {
            '\u{fffd}'
        } else {
            letter
        }
    };
    let _ = writeln!(
        std::io::stdout().lock(),
        "{}",
        text.trim_end().chars().map(shown).collect::<String>()
    );
}

/// Milliseconds since 1970, by this machine's clock.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, ms)
}

pub(crate) fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// What was not looked at, and why: of it nothing is known, and nothing is claimed.
#[derive(Debug, Default, Serialize)]
#[serde(transparent)]
pub(crate) struct NotLookedAt(Vec<Unseen>);

#[derive(Debug, Serialize)]
struct Unseen {
    #[serde(rename = "where")]
    place: String,
    why: String,
    #[serde(skip)]
    code: Code,
}

impl NotLookedAt {
    /// Notes a place once.
    pub(crate) fn note(&mut self, place: impl Into<String>, why: Failure) {
        let place = place.into();
        if !self.0.iter().any(|it| it.place == place) {
            self.0.push(Unseen {
                place,
                why: why.to_string(),
                code: why.code,
            });
        }
    }

    /// The places, in one line; `None` if all was looked at.
    pub(crate) fn places(&self) -> Option<String> {
        let places: Vec<&str> = self.0.iter().map(|it| it.place.as_str()).collect();
        (!places.is_empty()).then(|| places.join(", "))
    }

    /// A line for each.
    pub(crate) fn for_people(&self) -> String {
        self.0
            .iter()
            .map(|it| format!("\nNot looked at: {}: {}", plain(&it.place), plain(&it.why)))
            .collect()
    }

    /// How a command ends that has printed what it saw.
    ///
    /// # Errors
    /// Something was not looked at.
    pub(crate) fn end(&self) -> Result<(), Failure> {
        match self.places() {
            None => Ok(()),
            Some(places) => {
                // Another build would look there: that is what the user has to hear.
                if let Some(left_out) = self.0.iter().find(|it| it.code == Code::LeftOut) {
                    return Err(Failure::left_out_as(left_out.why.clone()));
                }
                let says = format!("not looked at: {places}; there may be more than what is shown");
                Err(if self.0.iter().all(|it| it.code == Code::Usage) {
                    Failure::usage(says)
                } else {
                    Failure::server(says)
                })
            }
        }
    }
}

/// A point in time as RFC 3339, in UTC and whole seconds.
pub(crate) fn utc(ms: u64) -> String {
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

/// A time in its two largest units.
pub(crate) fn span(duration: Duration) -> String {
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
    let mut said = format!("{} {name}", seconds / unit);
    if let Some((smaller, name)) = units.get(first + 1)
        && seconds % unit / smaller > 0
    {
        said = format!("{said} {} {name}", seconds % unit / smaller);
    }
    said
}

/// Text from outside, on one line and without what a terminal would obey.
pub(crate) fn plain(text: &str) -> String {
    text.chars()
        .map(|letter| {
            if letter.is_control() {
                '\u{fffd}'
            } else {
                letter
            }
        })
        .collect()
}

/// The longest text in a cell, and in the last one, which pushes nothing aside.
const CELL: usize = 72;
const LAST_CELL: usize = 400;

/// A table for people.
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
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
                Some((end, _)) => format!("{}…", plain(&cell[..end])),
                None => plain(cell),
            }
        };
        self.rows.push(cells.iter().enumerate().map(cut).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let wide = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(wide).collect();
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
