//! What is done about one letter after the other, and what came of it.

use std::time::Duration;

use clap::Args;
use serde::Serialize;

use super::{Letter, Reader};
use crate::Context;
use crate::failure::{Code, Failure};
use crate::say::Table;

/// How it is to be done.
#[derive(Args)]
pub(crate) struct Doing {
    /// Only shows what it would do; exit code 0.
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Does it; without this it only shows what it would do, with exit code 4.
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) yes: bool,
    /// Why, for the audit.
    #[arg(long, value_name = "TEXT")]
    pub(crate) why: Option<String>,
}

/// How many, and how fast.
#[derive(Args)]
pub(crate) struct Pace {
    /// All that wait, where nothing else chooses among them.
    #[arg(long)]
    pub(crate) all: bool,
    /// The most to do.
    #[arg(long)]
    pub(crate) limit: Option<usize>,
    /// The most a second.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: Option<u32>,
}

impl Pace {
    /// Waits for the turn of the next.
    pub(crate) fn turns(&self) -> Turns {
        Turns(self.rate.map(|rate| {
            let mut turns = tokio::time::interval(Duration::from_secs(1) / rate);
            turns.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            turns
        }))
    }
}

pub(crate) struct Turns(Option<tokio::time::Interval>);

impl Turns {
    pub(crate) async fn next(&mut self) {
        if let Some(turns) = &mut self.0 {
            turns.tick().await;
        }
    }
}

/// What came of one letter, or would.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Outcome {
    /// It was done, or would be.
    Done,
    /// It was left where it is.
    Left,
}

#[derive(Serialize)]
struct Row {
    place: String,
    id: Option<String>,
    reason: String,
    outcome: Outcome,
    says: String,
}

/// What came of all.
#[derive(Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
    done: usize,
    left: usize,
}

/// The most letters that are told one by one.
const ROWS: usize = 1_000;

impl Report {
    fn add(&mut self, letter: &Letter, outcome: Outcome, says: impl Into<String>) {
        match outcome {
            Outcome::Done => self.done += 1,
            Outcome::Left => self.left += 1,
        }
        if self.rows.len() < ROWS {
            let (place, id, reason) = (letter.place.to_string(), letter.id().map(str::to_owned), letter.reason().to_owned());
            self.rows.push(Row { place, id, reason, outcome, says: says.into() });
        }
    }

    /// Notes what came of a letter.
    ///
    /// # Errors
    /// What went wrong, if it would go wrong with the next letter, too.
    pub(crate) fn note(&mut self, letter: &Letter, said: Result<String, Failure>) -> Result<(), Failure> {
        match said {
            Ok(said) => self.add(letter, Outcome::Done, said),
            Err(failure) => {
                self.add(letter, Outcome::Left, failure.to_string());
                if !is_of_this_letter(&failure) {
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    pub(crate) fn seen(&self) -> usize {
        self.done + self.left
    }

    pub(crate) fn is_full(&self, pace: &Pace) -> bool {
        pace.limit.is_some_and(|limit| self.seen() >= limit)
    }

    /// Prints it, and says how the program ends: with what stopped it, if something did.
    pub(crate) fn finish(self, context: &Context, doing: &Doing, verb: &str, stopped: Option<Failure>) -> Result<(), Failure> {
        let mut table = Table::new(&["where", "id", "reason", "what"]);
        for row in &self.rows {
            table.row([row.place.clone(), row.id.clone().unwrap_or_else(|| "-".into()), row.reason.clone(), row.says.clone()]);
        }
        let (did, would) = if doing.yes { ("", "") } else { ("would be ", "would be ") };
        let summary = format!("{} {did}{verb}, {} {would}left where they are.", self.done, self.left);
        let machines = serde_json::json!({
            "did": doing.yes, verb: self.done, "left": self.left, "letters": self.rows,
            "stopped": stopped.as_ref().map(ToString::to_string),
        });
        context.format.print(&machines, format!("{table}{summary}"))?;
        match stopped {
            Some(failure) => Err(failure),
            None if doing.dry_run => Ok(()),
            None if !doing.yes => Err(Failure::not_confirmed()),
            None if self.left > 0 => Err(Failure::not_all(format!("{} were left where they are", self.left))),
            None => Ok(()),
        }
    }
}

/// Whether it concerns one letter alone, so that the next may be tried.
fn is_of_this_letter(failure: &Failure) -> bool {
    failure.code == Code::NotAll
}

/// Closes the reader whatever happened, so that what it held is given back.
pub(crate) async fn closing(reader: Reader, bar: indicatif::ProgressBar) {
    bar.finish_and_clear();
    reader.close().await;
}
