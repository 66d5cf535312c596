//! The matrix: aborts a process at every step of the delivery lifecycle, with each guarantee,
//! broker and store, three times each.

mod cell;
pub mod consumer;
pub(crate) mod group;
pub mod servers;
pub mod step;
pub mod table;
mod tricks;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

pub(crate) use cell::{message, play as play_cell};
use consumer::Markers;
use group::Made;
use servers::Servers;
use step::{STEPS, Step};
use table::{Cell, Matrix};

use crate::check::Promise;
use crate::report::{Report, Run};
use crate::worker::Broker;
use crate::{Error, Stopping, lock};

/// The default number of parallel consumer groups: they mostly wait for leases and sessions to end.
const SIDE_BY_SIDE: usize = 12;

/// The selected cells.
#[derive(Clone, Debug, Default)]
pub struct Wish {
    /// Prefixes of step names; all steps if empty.
    pub steps: Vec<String>,
    /// Only this broker.
    pub broker: Option<Broker>,
    /// Only this guarantee.
    pub promise: Option<Promise>,
    /// How many groups run in parallel.
    pub side_by_side: Option<usize>,
}

/// Every combination, in the order of the table's columns. `bare` runs only if it is selected.
pub fn columns() -> Vec<Made> {
    let mut all = Vec::new();
    for promise in [Promise::AtMostOnce, Promise::EffectivelyOnce, Promise::Bare] {
        for broker in [Broker::Kafka, Broker::Rabbitmq] {
            for markers in [Markers::Redis, Markers::Sqlite] {
                all.push(Made {
                    broker,
                    markers,
                    promise,
                });
            }
        }
    }
    all
}

/// Runs the selected cells, and writes `matrix.md`, `matrix.json` and the report of all groups into
/// the folder.
///
/// # Errors
/// No cell is selected, a server does not start, or a signal requested a stop.
pub fn run(
    wish: &Wish,
    folder: &Path,
    stopping: &Stopping,
) -> Result<(Matrix, Option<Report>), Error> {
    if !cfg!(oncegate_chaos) {
        return Err("this build has no crash points: run `cargo xtask chaos --matrix`".into());
    }
    std::fs::create_dir_all(folder)?;
    let servers = Servers::start()?;
    let versions = servers.versions();
    let begun = Instant::now();
    let wanted = |step: &Step| {
        wish.steps.is_empty()
            || wish
                .steps
                .iter()
                .any(|name| step.name.starts_with(name.as_str()))
    };
    let made = |made: &Made| {
        wish.broker.is_none_or(|it| it == made.broker)
            && wish
                .promise
                .map_or(made.promise != Promise::Bare, |it| it == made.promise)
    };
    let mut matrix = Matrix::default();
    let mut due: VecDeque<(&'static Step, Made)> = VecDeque::new();
    for step in STEPS.iter().filter(|step| wanted(step)) {
        for made in columns().into_iter().filter(made) {
            match step.absent(made) {
                Some(why) => matrix.cells.push(Cell::absent(step, made, why)),
                None => due.push_back((step, made)),
            }
        }
    }
    let all = due.len();
    if all == 0 {
        return Err("no step has this name for the selected broker and guarantee".into());
    }
    let (due, done) = (Mutex::new(due), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..wish.side_by_side.unwrap_or(SIDE_BY_SIDE) {
            scope.spawn(|| {
                while stopping.go_on().is_ok() {
                    let Some((step, made)) = lock(&due).pop_front() else {
                        return;
                    };
                    let folder = folder_of(folder, step, made);
                    let since = Instant::now();
                    let played = cell::play(&servers, step, made, &[], &folder);
                    let seconds = since.elapsed().as_secs();
                    let cell = Cell::of(step, made, &played);
                    let report = played.ok().map(|played| {
                        let (scenario, broker) = (
                            format!("matrix {}", step.name),
                            made.broker.name().to_owned(),
                        );
                        let run = Run {
                            scenario,
                            broker,
                            seed: 0,
                            rules: played.rules,
                            versions: versions.clone(),
                            seconds,
                            lost: 0,
                        };
                        Report::of(run, played.checked, Default::default())
                    });
                    // The line in the table is enough for a cell without violations.
                    if cell.is_right() {
                        let _ = std::fs::remove_dir_all(&folder);
                    } else if let Some(report) = &report {
                        let _ = report.write(&folder);
                    }
                    let mut done = lock(&done);
                    done.push((cell, report));
                    let (cell, _) = &done[done.len() - 1];
                    println!(
                        "chaos: {:>3}/{all} {} ({seconds} s){}",
                        done.len(),
                        cell.line(),
                        if cell.is_right() { "" } else { " !" }
                    );
                }
            });
        }
    });
    stopping.go_on()?;
    let mut sum: Option<Report> = None;
    for (cell, report) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
        matrix.cells.push(cell);
        match (&mut sum, report) {
            (Some(sum), Some(report)) => sum.add(report)?,
            (none @ None, report) => *none = report,
            _ => {}
        }
    }
    matrix.seconds = begun.elapsed().as_secs();
    matrix.versions = versions;
    matrix.refused = servers.refused_acknowledgements()?;
    matrix.sort();
    matrix.write(folder)?;
    if let Some(sum) = &sum {
        sum.write(folder)?;
    }
    Ok((matrix, sum))
}

fn folder_of(folder: &Path, step: &Step, made: Made) -> PathBuf {
    let promise = serde_json::to_value(made.promise).unwrap_or_default();
    let promise = promise.as_str().unwrap_or_default();
    folder.join(format!(
        "{}-{promise}-{}-{}",
        step.name,
        made.broker.name(),
        made.markers.name()
    ))
}
