//! What is done about one letter after the other, and what came of it.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use clap::Args;
use oncegate::shutdown_signal;
use serde::Serialize;

use super::filter::ageless;
use super::{Begins, Letter, Reader, Unsent};
use crate::Context;
use crate::audit::{Audit, Begun};
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
    /// The most to do; what is left where it is does not count.
    #[arg(long)]
    pub(crate) limit: Option<usize>,
    /// The most a second.
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: Option<u32>,
}

impl Pace {
    /// Waits for the turn of the next; what only shows itself need not.
    pub(crate) fn turns(&self, doing: &Doing) -> Turns {
        Turns(self.rate.filter(|_| doing.yes).map(|rate| {
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

/// SIGTERM or Ctrl-C: the program ends after the letter at hand, and tells how far it came. SIGKILL
/// alone cuts a letter off.
pub(crate) struct Stop(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Stop {
    /// From now on no signal ends the program by itself.
    pub(crate) fn watch() -> Self {
        Self(Box::pin(shutdown_signal()))
    }

    /// What this comes to, unless the program is asked to stop first.
    ///
    /// # Errors
    /// Asked to stop, after which this is not used again.
    pub(crate) async fn or<T>(
        &mut self,
        step: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = &mut self.0 => Err(Failure::not_all("stopped by a signal before the end; run the command again for the remaining messages")),
            done = step => done,
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
    /// How many would have been meant but for their age, which they do not tell.
    without_age: usize,
    /// What is said of the markers, for machines.
    markers: Vec<serde_json::Value>,
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
            let (place, id, reason) = (
                letter.place.to_string(),
                letter.id().map(str::to_owned),
                letter.reason().to_owned(),
            );
            self.rows.push(Row {
                place,
                id,
                reason,
                outcome,
                says: says.into(),
            });
        }
    }

    /// Notes what came of a letter.
    ///
    /// # Errors
    /// What went wrong, if it would go wrong with the next letter, too.
    pub(crate) fn note(
        &mut self,
        letter: &Letter,
        said: Result<String, Failure>,
    ) -> Result<(), Failure> {
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

    /// What is left does not count: it would be left the next time too, and nothing behind it ever
    /// be reached.
    pub(crate) fn is_full(&self, pace: &Pace) -> bool {
        pace.limit.is_some_and(|limit| self.done >= limit)
    }

    pub(crate) fn note_ageless(&mut self) {
        self.without_age += 1;
    }

    pub(crate) fn note_marker(&mut self, marker: serde_json::Value) {
        self.markers.push(marker);
    }

    /// Notes what was done about an id that has no letter.
    pub(crate) fn note_done(&mut self, id: &str, says: String) {
        self.done += 1;
        self.note_id(id, Outcome::Done, says);
    }

    /// Notes that nothing was done about an id that has no letter.
    pub(crate) fn note_left(&mut self, id: &str, says: String) {
        self.left += 1;
        self.note_id(id, Outcome::Left, says);
    }

    fn note_id(&mut self, id: &str, outcome: Outcome, says: String) {
        if self.rows.len() < ROWS {
            let none = || "-".to_owned();
            self.rows.push(Row {
                place: none(),
                id: Some(id.to_owned()),
                reason: none(),
                outcome,
                says,
            });
        }
    }

    /// Prints it, and says how the program ends: with what stopped it, if something did.
    pub(crate) fn finish(
        self,
        context: &Context,
        doing: &Doing,
        act: Acting,
        stopped: Option<Failure>,
    ) -> Result<(), Failure> {
        let mut table = Table::new(&["where", "id", "reason", "what"]);
        for row in &self.rows {
            table.row([
                row.place.clone(),
                row.id.clone().unwrap_or_else(|| "-".into()),
                row.reason.clone(),
                row.says.clone(),
            ]);
        }
        let (seen, told) = (self.seen(), self.rows.len());
        let cut = if told < seen {
            format!("The first {told} of {seen} are told.\n")
        } else {
            String::new()
        };
        let (verb, would) = (act.verb, if doing.yes { "" } else { "would be " });
        let ageless = ageless(self.without_age);
        let summary = format!(
            "{cut}{} {would}{verb}, {} {would}left where they are.{ageless}",
            self.done, self.left
        );
        self.print(
            context,
            doing,
            act,
            stopped.as_ref(),
            format!("{table}{summary}"),
        )?;
        self.end(doing, stopped)
    }

    fn print(
        &self,
        context: &Context,
        doing: &Doing,
        act: Acting,
        stopped: Option<&Failure>,
        people: String,
    ) -> Result<(), Failure> {
        let machines = serde_json::json!({
            "act": act.name, "did": doing.yes, "done": self.done, "left": self.left, "without_age": self.without_age,
            "markers": self.markers, "letters": self.rows, "all": self.rows.len() == self.seen(), "stopped": stopped.map(ToString::to_string),
        });
        context.format.print(&machines, people)
    }

    fn end(&self, doing: &Doing, stopped: Option<Failure>) -> Result<(), Failure> {
        match stopped {
            Some(failure) => Err(failure),
            None if doing.dry_run => Ok(()),
            None if !doing.yes => Err(Failure::not_confirmed()),
            None if self.left > 0 => Err(Failure::not_all(format!(
                "{} were left where they are",
                self.left
            ))),
            None => Ok(()),
        }
    }
}

/// What is done, as the audit and machines have it, and in a sentence.
#[derive(Clone, Copy)]
pub(crate) struct Acting {
    pub(crate) name: &'static str,
    pub(crate) verb: &'static str,
}

/// Publishes a copy with confirmation, writes down that it was done, and takes the letter out, in
/// this order. A crash anywhere leaves the letter, or a copy more, which passes the gate.
///
/// # Errors
/// The letter is left where it is, and the audit says whether a copy may stand.
pub(crate) async fn publish(
    audit: &Audit,
    begun: Begun,
    reader: &mut Reader,
    letter: &Letter,
    begins: Begins,
) -> Result<(), Failure> {
    match reader.publish(letter, begins).await {
        Ok(()) => {}
        Err(Unsent::Refused(failure)) => {
            audit.not_sent(begun, &failure).await?;
            return Err(failure);
        }
        Err(Unsent::Unknown(failure)) => {
            audit.unknown(begun, &failure).await;
            return Err(failure);
        }
    }
    take_out(audit, begun, reader, letter).await
}

/// Writes down that it was done, and takes the letter out.
///
/// # Errors
/// The letter is left where it is.
pub(crate) async fn take_out(
    audit: &Audit,
    begun: Begun,
    reader: &Reader,
    letter: &Letter,
) -> Result<(), Failure> {
    audit.done(begun).await?;
    reader.take_out(letter).await
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
