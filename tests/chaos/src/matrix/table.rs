//! The result table of the matrix: each step by guarantee, broker and store.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::cell::CellResult;
use super::group::Combination;
use super::service_cell::ServiceResult;
use super::step::{CrashStep, STEPS};
use super::{columns, consumer::TestedStore};
use crate::Error;
use crate::check::TestedGuarantee;
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
    #[serde(rename = "made")]
    pub combination: Combination,
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
    pub(crate) fn absent(step: &CrashStep, combination: Combination, why: &str) -> Self {
        Self {
            absent: Some(why.to_owned()),
            ..Self::empty(step, combination)
        }
    }

    fn empty(step: &CrashStep, combination: Combination) -> Self {
        let (step, wrong) = (step.name.to_owned(), Vec::new());
        Self {
            step,
            combination,
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
    pub(crate) fn of(
        step: &CrashStep,
        combination: Combination,
        result: &Result<CellResult, Error>,
    ) -> Self {
        let mut cell = Self::empty(step, combination);
        match result {
            Err(error) => cell.wrong.push(error.to_string()),
            Ok(CellResult {
                checked,
                seen,
                missed,
                ..
            }) => {
                let counts = &checked.counts;
                (cell.runs, cell.confirmed, cell.lost) =
                    (u64::from(*seen), counts.acknowledged, counts.lost);
                cell.doubled = if combination.guarantee == TestedGuarantee::AtMostOnce {
                    counts.duplicated
                } else {
                    0
                };
                cell.explained = counts.explained.values().sum();
                cell.wrong.clone_from(missed);
                let text = |it: &crate::check::Violation| {
                    format!(
                        "{} {}: {}",
                        it.invariant,
                        it.id.as_deref().unwrap_or("-"),
                        it.why
                    )
                };
                cell.wrong.extend(checked.violations.iter().map(text));
            }
        }
        cell
    }

    /// The result of a run with an inbox.
    pub(crate) fn of_rows(
        step: &CrashStep,
        combination: Combination,
        result: &Result<ServiceResult, Error>,
    ) -> Self {
        let mut cell = Self::empty(step, combination);
        match result {
            Err(error) => cell.wrong.push(error.to_string()),
            Ok(result) => {
                (cell.runs, cell.confirmed) = (result.aborted, result.sent);
                (cell.lost, cell.doubled) = (result.lost, result.doubled);
                cell.wrong.clone_from(&result.wrong);
            }
        }
        cell
    }

    /// Whether no invariant was violated and all processes aborted at the step.
    pub fn passed(&self) -> bool {
        self.wrong.is_empty() && (self.absent.is_some() || self.runs >= self.combination.runs())
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
            named(self.combination)
        )
    }
}

/// The combination as text.
fn named(combination: Combination) -> String {
    let guarantee = match combination.guarantee {
        _ if combination.markers.is_inbox() => "exactly once in a database",
        TestedGuarantee::AtMostOnce => "at most once",
        TestedGuarantee::EffectivelyOnce => "effectively once",
        TestedGuarantee::Bare => "bare",
    };
    let broker = if combination.broker == Broker::Kafka {
        "Kafka"
    } else {
        "RabbitMQ"
    };
    format!(
        "{guarantee}, {broker}, {}",
        match combination.markers {
            TestedStore::Redis => "Redis",
            TestedStore::Sqlite => "SQLite",
            TestedStore::PostgresInbox => "PostgreSQL",
            TestedStore::PostgresBatches => "PostgreSQL in batches",
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
                columns().iter().position(|it| *it == cell.combination),
            )
        });
    }

    /// Adds the results of another run.
    pub fn add(&mut self, other: Self) {
        for cell in other.cells {
            match self
                .cells
                .iter_mut()
                .find(|it| it.step == cell.step && it.combination == cell.combination)
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
    pub fn passed(&self) -> bool {
        !self.cells.is_empty()
            && self.cells.iter().all(Cell::passed)
            && self.refused.is_empty()
            && !self.bare_lost_nothing()
    }

    /// Whether `bare` ran and lost nothing in any cell.
    fn bare_lost_nothing(&self) -> bool {
        let mut of_bare = self
            .cells
            .iter()
            .filter(|cell| {
                cell.combination.guarantee == TestedGuarantee::Bare && cell.absent.is_none()
            })
            .peekable();
        of_bare.peek().is_some() && of_bare.all(|cell| cell.lost == 0)
    }

    /// A summary in one line.
    pub fn verdict(&self) -> String {
        let sum = |of: fn(&Cell) -> u64| self.cells.iter().map(of).sum::<u64>();
        let wrong = self.cells.iter().filter(|cell| !cell.passed()).count();
        let cells = self
            .cells
            .iter()
            .filter(|cell| cell.absent.is_none())
            .count();
        format!(
            "matrix: {cells} cells, {} processes ended at their step, {} messages, {} lost, {} doubled, {} extra effects explained, {wrong} cells wrong, {} acknowledgements refused, {} s{}",
            sum(|it| it.runs),
            sum(|it| it.confirmed),
            sum(|it| it.lost),
            sum(|it| it.doubled),
            sum(|it| it.explained),
            self.refused.len(),
            self.seconds,
            if self.bare_lost_nothing() {
                "; bare lost nothing, so the harness may not detect losses"
            } else {
                ""
            }
        )
    }

    /// Writes `matrix.md` and `matrix.json`.
    ///
    /// # Errors
    /// The error of the file system.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        std::fs::write(folder.join("matrix.md"), self.to_markdown())?;
        std::fs::write(folder.join("matrix.json"), serde_json::to_vec_pretty(self)?)
    }

    /// The table.
    pub fn to_markdown(&self) -> String {
        let mut text = format!("# {}\n\n", self.verdict());
        let columns: Vec<Combination> = columns()
            .into_iter()
            .filter(|combination| {
                self.cells
                    .iter()
                    .any(|cell| cell.combination == *combination)
            })
            .collect();
        text += "Each cell: processes ended there / messages lost / ids doubled / extra effects explained.\n\n| step |";
        for combination in &columns {
            let _ = write!(text, " {} |", named(*combination));
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
            for combination in &columns {
                let cell = self
                    .cells
                    .iter()
                    .find(|cell| cell.step == step.name && cell.combination == *combination);
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
                        let mark = if cell.passed() { "" } else { " **wrong**" };
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
        for cell in self.cells.iter().filter(|cell| !cell.passed()) {
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

    fn cell(step: &str, combination: Combination, lost: u64) -> Cell {
        let step = CrashStep::named(step).expect("a step");
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
            ..Cell::empty(step, combination)
        }
    }

    #[test]
    fn a_cell_with_a_missing_abort_or_a_loss_fails() {
        let combination = columns()[0];
        let right = Matrix {
            cells: vec![cell("claim.before", combination, 0)],
            ..Matrix::default()
        };
        assert!(right.passed() && !Matrix::default().passed());
        let mut lost = right.clone();
        lost.add(Matrix {
            cells: vec![cell("claim.before", combination, 1)],
            ..Matrix::default()
        });
        assert_eq!(
            (lost.cells.len(), lost.cells[0].runs, lost.passed()),
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
            ..cell("claim.before", combination, 0)
        };
        assert!(!unseen.passed());
    }

    #[test]
    fn the_table_says_why_a_cell_does_not_exist() {
        let columns = columns();
        let (doubt, effectively_once) = (
            CrashStep::named("doubt.before").expect("a step"),
            columns[4],
        );
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
                "| before an id is recorded as in doubt (`doubt.before`) | 3 / 0 / 0 / 0 | n/a (1) |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| 3 / 2 / 0 / 0 **wrong** |") && text.contains(&format!("(1) {why}.")),
            "{text}"
        );
        assert!(
            text.find("claim.after").expect("the row exists")
                < text.find("doubt.before").expect("the row exists")
        );
    }
}
