//! The result table of the matrix: each step by guarantee, broker and store.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cell::Played;
use super::group::Made;
use super::step::{STEPS, Step};
use super::{columns, consumer::Markers};
use crate::Error;
use crate::check::Promise;
use crate::worker::Broker;

/// All cells.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matrix {
    /// In the order of the steps.
    pub cells: Vec<Cell>,
    /// The duration, in seconds.
    pub seconds: u64,
    /// The tested versions.
    pub versions: BTreeMap<String, String>,
    /// Lines of RabbitMQ's log in which it closed a channel because of an acknowledgement (406), of
    /// all cells.
    #[serde(default)]
    pub refused: Vec<String>,
}

/// The result of one cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cell {
    /// The step's name.
    pub step: String,
    /// The combination of broker, store and guarantee.
    pub made: Made,
    /// Why the cell does not exist.
    pub absent: Option<String>,
    /// The number of aborts at the step.
    pub runs: u64,
    /// Messages that the broker confirmed.
    pub confirmed: u64,
    /// Confirmed messages without an effect, dead letter or in-doubt message.
    pub lost: u64,
    /// Ids with more than one effect, with at most once.
    pub doubled: u64,
    /// Effects after the first of their id, with a cause in the fault log.
    pub explained: u64,
    /// Violations, or the error that prevented the run.
    pub wrong: Vec<String>,
}

impl Cell {
    /// A cell that does not exist.
    pub(crate) fn absent(step: &Step, made: Made, why: &str) -> Self {
        Self {
            absent: Some(why.to_owned()),
            ..Self::empty(step, made)
        }
    }

    fn empty(step: &Step, made: Made) -> Self {
        let (step, wrong) = (step.name.to_owned(), Vec::new());
        Self {
            step,
            made,
            absent: None,
            runs: 0,
            confirmed: 0,
            lost: 0,
            doubled: 0,
            explained: 0,
            wrong,
        }
    }

    /// The result of a run.
    pub(crate) fn of(step: &Step, made: Made, played: &Result<Played, Error>) -> Self {
        let mut cell = Self::empty(step, made);
        match played {
            Err(error) => cell.wrong.push(error.to_string()),
            Ok(Played {
                checked,
                seen,
                missed,
                ..
            }) => {
                let counts = &checked.counts;
                (cell.runs, cell.confirmed, cell.lost) =
                    (u64::from(*seen), counts.acknowledged, counts.lost);
                cell.doubled = if made.promise == Promise::AtMostOnce {
                    counts.duplicated
                } else {
                    0
                };
                cell.explained = counts.explained.values().sum();
                cell.wrong.clone_from(missed);
                let told = |it: &crate::check::Violation| {
                    format!(
                        "{} {}: {}",
                        it.invariant,
                        it.id.as_deref().unwrap_or("-"),
                        it.why
                    )
                };
                cell.wrong.extend(checked.violations.iter().map(told));
            }
        }
        cell
    }

    /// Whether no invariant was violated and all processes aborted at the step.
    pub fn is_right(&self) -> bool {
        self.wrong.is_empty() && (self.absent.is_some() || self.runs >= 3)
    }

    /// One line.
    pub fn line(&self) -> String {
        let Self {
            step,
            runs,
            lost,
            doubled,
            explained,
            ..
        } = self;
        let wrong = self
            .wrong
            .first()
            .map(|it| format!("; {it}"))
            .unwrap_or_default();
        format!(
            "{step}, {}: ended {runs} times, {lost} lost, {doubled} doubled, {explained} extra effects explained{wrong}",
            named(self.made)
        )
    }
}

/// The combination as text.
fn named(made: Made) -> String {
    let promise = match made.promise {
        Promise::AtMostOnce => "at most once",
        Promise::EffectivelyOnce => "effectively once",
        Promise::Bare => "bare",
    };
    let broker = if made.broker == Broker::Kafka {
        "Kafka"
    } else {
        "RabbitMQ"
    };
    format!(
        "{promise}, {broker}, {}",
        if made.markers == Markers::Redis {
            "Redis"
        } else {
            "SQLite"
        }
    )
}

impl Matrix {
    /// Sorts the cells by step and combination.
    pub(crate) fn sort(&mut self) {
        let at = |name: &str| STEPS.iter().position(|step| step.name == name);
        self.cells.sort_by_key(|cell| {
            (
                at(&cell.step),
                columns().iter().position(|it| *it == cell.made),
            )
        });
    }

    /// Adds the results of another run.
    pub fn add(&mut self, other: Self) {
        for cell in other.cells {
            match self
                .cells
                .iter_mut()
                .find(|it| it.step == cell.step && it.made == cell.made)
            {
                None => self.cells.push(cell),
                Some(sum) => {
                    sum.runs += cell.runs;
                    sum.confirmed += cell.confirmed;
                    sum.lost += cell.lost;
                    sum.doubled += cell.doubled;
                    sum.explained += cell.explained;
                    sum.wrong.extend(cell.wrong);
                }
            }
        }
        self.seconds += other.seconds;
        self.versions.extend(other.versions);
        self.refused.extend(other.refused);
        self.sort();
    }

    /// Whether every cell passed, RabbitMQ refused no acknowledgement, and `bare` lost messages if
    /// it ran.
    pub fn is_right(&self) -> bool {
        !self.cells.is_empty()
            && self.cells.iter().all(Cell::is_right)
            && self.refused.is_empty()
            && !self.is_blind()
    }

    /// Whether `bare` ran and lost nothing in any cell.
    fn is_blind(&self) -> bool {
        let mut of_bare = self
            .cells
            .iter()
            .filter(|cell| cell.made.promise == Promise::Bare && cell.absent.is_none())
            .peekable();
        of_bare.peek().is_some() && of_bare.all(|cell| cell.lost == 0)
    }

    /// A summary in one line.
    pub fn verdict(&self) -> String {
        let sum = |of: fn(&Cell) -> u64| self.cells.iter().map(of).sum::<u64>();
        let wrong = self.cells.iter().filter(|cell| !cell.is_right()).count();
        let played = self
            .cells
            .iter()
            .filter(|cell| cell.absent.is_none())
            .count();
        format!(
            "matrix: {played} cells, {} processes ended at their step, {} messages, {} lost, {} doubled, {} extra effects explained, {wrong} cells wrong, {} acknowledgements refused, {} s{}",
            sum(|it| it.runs),
            sum(|it| it.confirmed),
            sum(|it| it.lost),
            sum(|it| it.doubled),
            sum(|it| it.explained),
            self.refused.len(),
            self.seconds,
            if self.is_blind() {
                "; BLIND: bare lost nothing"
            } else {
                ""
            }
        )
    }

    /// Writes `matrix.md` and `matrix.json`.
    ///
    /// # Errors
    /// What the file system said.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        std::fs::write(folder.join("matrix.md"), self.to_markdown())?;
        std::fs::write(folder.join("matrix.json"), serde_json::to_vec_pretty(self)?)
    }

    /// The table.
    pub fn to_markdown(&self) -> String {
        let mut text = format!("# {}\n\n", self.verdict());
        let columns: Vec<Made> = columns()
            .into_iter()
            .filter(|made| self.cells.iter().any(|cell| cell.made == *made))
            .collect();
        text += "Each cell: processes ended there / messages lost / ids doubled / extra effects explained.\n\n| step |";
        for made in &columns {
            let _ = write!(text, " {} |", named(*made));
        }
        text += "\n| --- |";
        text += &" ---: |".repeat(columns.len());
        text.push('\n');
        let mut reasons: Vec<&str> = Vec::new();
        for step in STEPS
            .iter()
            .filter(|step| self.cells.iter().any(|cell| cell.step == step.name))
        {
            let _ = write!(text, "| {} (`{}`) |", step.text, step.name);
            for made in &columns {
                let cell = self
                    .cells
                    .iter()
                    .find(|cell| cell.step == step.name && cell.made == *made);
                let shown = match cell {
                    None => String::new(),
                    Some(Cell {
                        absent: Some(why), ..
                    }) => {
                        let number = reasons.iter().position(|it| it == why).unwrap_or_else(|| {
                            reasons.push(why);
                            reasons.len() - 1
                        });
                        format!("n/a ({})", number + 1)
                    }
                    Some(cell) => {
                        let mark = if cell.is_right() { "" } else { " **wrong**" };
                        format!(
                            "{} / {} / {} / {}{mark}",
                            cell.runs, cell.lost, cell.doubled, cell.explained
                        )
                    }
                };
                let _ = write!(text, " {shown} |");
            }
            text.push('\n');
        }
        for (number, why) in (1..).zip(reasons) {
            let _ = write!(text, "\n({number}) {why}.\n");
        }
        for cell in self.cells.iter().filter(|cell| !cell.is_right()) {
            let _ = write!(text, "\n## {}\n", cell.line());
            for wrong in &cell.wrong {
                let _ = write!(text, "\n- {wrong}");
            }
            text.push('\n');
        }
        for line in &self.refused {
            let _ = write!(text, "\nRabbitMQ: {line}\n");
        }
        let versions: Vec<String> = self
            .versions
            .iter()
            .map(|(what, version)| format!("{what} {version}"))
            .collect();
        let _ = write!(text, "\nVersions: {}.\n", versions.join(", "));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(step: &str, made: Made, lost: u64) -> Cell {
        let step = Step::named(step).expect("a step");
        let wrong = if lost > 0 {
            vec!["I1 u-1: confirmed, and neither".to_owned()]
        } else {
            Vec::new()
        };
        Cell {
            runs: 3,
            confirmed: 30,
            lost,
            wrong,
            ..Cell::empty(step, made)
        }
    }

    #[test]
    fn what_was_not_seen_to_end_is_as_wrong_as_what_was_lost() {
        let made = columns()[0];
        let right = Matrix {
            cells: vec![cell("claim.before", made, 0)],
            ..Matrix::default()
        };
        assert!(right.is_right() && !Matrix::default().is_right());
        let mut lost = right.clone();
        lost.add(Matrix {
            cells: vec![cell("claim.before", made, 1)],
            ..Matrix::default()
        });
        assert_eq!(
            (lost.cells.len(), lost.cells[0].runs, lost.is_right()),
            (1, 6, false)
        );
        assert!(
            lost.verdict()
                .contains("6 processes ended at their step, 60 messages, 1 lost"),
            "{}",
            lost.verdict()
        );
        let unseen = Cell {
            runs: 2,
            ..cell("claim.before", made, 0)
        };
        assert!(!unseen.is_right());
    }

    #[test]
    fn the_table_says_why_there_is_no_such_cell() {
        let columns = columns();
        let (doubt, effectively_once) = (Step::named("doubt.before").expect("a step"), columns[4]);
        let why = doubt.absent(effectively_once).expect("it is absent");
        let mut matrix = Matrix {
            cells: vec![
                cell("doubt.before", columns[0], 0),
                cell("claim.after", columns[0], 2),
            ],
            ..Matrix::default()
        };
        matrix
            .cells
            .push(Cell::absent(doubt, effectively_once, why));
        matrix.sort();
        let text = matrix.to_markdown();
        assert!(
            text.contains(
                "| before an id is put in doubt (`doubt.before`) | 3 / 0 / 0 / 0 | n/a (1) |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| 3 / 2 / 0 / 0 **wrong** |") && text.contains(&format!("(1) {why}.")),
            "{text}"
        );
        assert!(
            text.find("claim.after").expect("it stands there")
                < text.find("doubt.before").expect("it stands there")
        );
    }
}
