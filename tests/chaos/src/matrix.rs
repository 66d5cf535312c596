//! The matrix: aborts a process at every step of the delivery lifecycle, with each guarantee,
//! broker and store, three times each, and at every step of the inbox and its relay, twenty times
//! each.

mod cell;
pub mod consumer;
pub(crate) mod group;
pub mod servers;
pub mod service;
mod service_cell;
pub mod step;
mod store_faults;
pub mod table;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub(crate) use cell::{message, run as run_cell};
use consumer::TestedStore;
use group::Combination;
use oncegate::internal::Lock;
use servers::MatrixServers;
pub(crate) use service_cell::run as run_service_cell;
use step::{CrashStep, STEPS};
use table::{Cell, Matrix};

use crate::check::TestedGuarantee;
use crate::report::{Report, ReportedRun};
use crate::worker::Broker;
use crate::{Error, Stopping};

/// The default number of parallel consumer groups: they mostly wait for leases and sessions to end.
const SIDE_BY_SIDE: usize = 12;

/// The selected cells.
#[derive(Clone, Debug, Default)]
pub struct MatrixOptions {
    /// Prefixes of step names; all steps if empty.
    pub steps: Vec<String>,
    /// Only this broker.
    pub broker: Option<Broker>,
    /// Only this store.
    pub store: Option<TestedStore>,
    /// Only this guarantee.
    pub guarantee: Option<TestedGuarantee>,
    /// How many groups run in parallel.
    pub side_by_side: Option<usize>,
}

/// Every combination, in the order of the table's columns. `bare` runs only if it is selected.
pub fn columns() -> Vec<Combination> {
    let mut all = Vec::new();
    for guarantee in [
        TestedGuarantee::AtMostOnce,
        TestedGuarantee::EffectivelyOnce,
        TestedGuarantee::Bare,
    ] {
        for broker in [Broker::Kafka, Broker::Rabbitmq] {
            for markers in [TestedStore::Redis, TestedStore::Sqlite] {
                all.push(Combination {
                    broker,
                    markers,
                    guarantee,
                });
            }
        }
    }
    for markers in [TestedStore::PostgresInbox, TestedStore::PostgresBatches] {
        for broker in [Broker::Kafka, Broker::Rabbitmq] {
            all.push(Combination {
                broker,
                markers,
                guarantee: TestedGuarantee::EffectivelyOnce,
            });
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
    options: &MatrixOptions,
    folder: &Path,
    stopping: &Stopping,
) -> Result<(Matrix, Option<Report>), Error> {
    if !cfg!(oncegate_chaos) {
        return Err("this build has no crash points: run `cargo xtask chaos --matrix`".into());
    }
    std::fs::create_dir_all(folder)?;
    let servers = MatrixServers::start()?;
    let versions = servers.versions();
    let begun = Instant::now();
    let wanted = |step: &CrashStep| {
        options.steps.is_empty()
            || options
                .steps
                .iter()
                .any(|name| step.name.starts_with(name.as_str()))
    };
    let combination = |combination: &Combination| {
        options.broker.is_none_or(|it| it == combination.broker)
            && options.store.is_none_or(|it| it == combination.markers)
            && options
                .guarantee
                .map_or(combination.guarantee != TestedGuarantee::Bare, |it| {
                    it == combination.guarantee
                })
    };
    let mut matrix = Matrix::default();
    let mut due: VecDeque<(&'static CrashStep, Combination)> = VecDeque::new();
    for step in STEPS.iter().filter(|step| wanted(step)) {
        for combination in columns().into_iter().filter(combination) {
            match step.absent(combination) {
                Some(why) => matrix.cells.push(Cell::absent(step, combination, why)),
                None => due.push_back((step, combination)),
            }
        }
    }
    let all = due.len();
    if all == 0 {
        return Err("no step has this name for the selected broker and guarantee".into());
    }
    let (due, done) = (Lock::new(due), Lock::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..options.side_by_side.unwrap_or(SIDE_BY_SIDE) {
            scope.spawn(|| {
                while stopping.check().is_ok() {
                    let Some((step, combination)) = due.lock().pop_front() else {
                        return;
                    };
                    let folder = folder_of(folder, step, combination);
                    let since = Instant::now();
                    let (cell, result) = if combination.markers.is_inbox() {
                        let runs = combination.runs();
                        let result =
                            service_cell::run(&servers, step, combination, &[], runs, &folder);
                        (Cell::of_rows(step, combination, &result), None)
                    } else {
                        let result = cell::run(&servers, step, combination, &[], &folder);
                        (Cell::of(step, combination, &result), result.ok())
                    };
                    let seconds = since.elapsed().as_secs();
                    let report = result.map(|result| {
                        let (scenario, broker) = (
                            format!("matrix {}", step.name),
                            combination.broker.name().to_owned(),
                        );
                        let run = ReportedRun {
                            scenario,
                            broker,
                            seed: 0,
                            rules: result.rules,
                            versions: versions.clone(),
                            seconds,
                            lost: 0,
                        };
                        Report::of(run, result.checked, Default::default())
                    });
                    // The line in the table is enough for a cell without violations.
                    if cell.passed() {
                        let _ = std::fs::remove_dir_all(&folder);
                    } else if let Some(report) = &report {
                        let _ = report.write(&folder);
                    }
                    let mut done = done.lock();
                    done.push((cell, report));
                    let (cell, _) = &done[done.len() - 1];
                    println!(
                        "chaos: {:>3}/{all} {} ({seconds} s){}",
                        done.len(),
                        cell.line(),
                        if cell.passed() { "" } else { " !" }
                    );
                }
            });
        }
    });
    stopping.check()?;
    let mut sum: Option<Report> = None;
    for (cell, report) in done.into_inner() {
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

fn folder_of(folder: &Path, step: &CrashStep, combination: Combination) -> PathBuf {
    let guarantee = serde_json::to_value(combination.guarantee).unwrap_or_default();
    let guarantee = guarantee.as_str().unwrap_or_default();
    folder.join(format!(
        "{}-{guarantee}-{}-{}",
        step.name,
        combination.broker.name(),
        combination.markers.name()
    ))
}
