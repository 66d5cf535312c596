//! One cell of the matrix: aborts three processes at the same step, one after the other, while
//! messages arrive; a fourth process handles the rest.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use super::group::{Combination, ConsumerGroup, GroupMember};
use super::servers::MatrixServers;
use super::step::{CrashStep, Trigger};
use crate::Error;
use crate::check::{CheckRules, Checked};
use crate::fleet::status_text;
use crate::ledger::{Ledger, StoreOperation, What};
use crate::message::{OutgoingMessage, Work};

/// The time limit until a process reaches its step.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(120);
/// The status of a process that aborted.
pub(super) const ABORTED: &str = "signal 6";

/// The result of a cell.
pub(crate) struct CellResult {
    pub(crate) checked: Checked,
    pub(crate) rules: CheckRules,
    /// The number of runs in which a process aborted at the step.
    pub(crate) seen: u32,
    /// What happened in the other runs.
    pub(crate) missed: Vec<String>,
}

/// Runs the cell with these environment variables and the one that arms the step.
pub(crate) fn run(
    servers: &MatrixServers,
    step: &CrashStep,
    combination: Combination,
    environment: &[(&str, &str)],
    folder: &Path,
) -> Result<CellResult, Error> {
    let mut group = ConsumerGroup::open(servers, combination, folder)?;
    match step.trigger {
        // The queue must exist: the consumers only check it.
        Trigger::DrainWhileSomethingIsHeld => {
            let first = group.start("a0", environment, &[])?;
            group.declared(first)?;
            group.set("topology", "check");
        }
        Trigger::RejectedByTheQueue => group.set("rejects", "by-queue"),
        _ => {}
    }
    let waits = matches!(
        step.trigger,
        Trigger::DrainWhileSomethingWaits | Trigger::DrainWhileSomethingIsHeld
    );
    let (mut seen, mut missed) = (0, Vec::new());
    for (run, pass) in step.passes.into_iter().enumerate() {
        let armed = format!("{}:{pass}", step.name);
        let armed_too: Vec<(&str, &str)> = environment
            .iter()
            .copied()
            .chain([("ONCEGATE_FAILPOINT", armed.as_str())])
            .collect();
        let pause: &[&str] = if waits {
            &["--pause-ms=3000", "--longest-pause-ms=3000"]
        } else {
            &[]
        };
        let mut consumer = group.start(&format!("c{run}.1"), &armed_too, pause)?;
        group.publish(wave(run, step.trigger))?;
        if step.trigger == Trigger::TopicRecreated {
            group.until_done(STEP_TIMEOUT)?;
            group.recreate_topic()?;
            group.publish(
                (50..53)
                    .map(|number| message(format!("u-{run}{number}"), None, 20))
                    .collect(),
            )?;
        }
        trigger_step(&mut group, &consumer, step.trigger)?;
        match group.ended(&mut consumer, STEP_TIMEOUT)? {
            Some(status) => {
                let how = status_text(status);
                if how == ABORTED && consumer.aborted_at(folder, &armed)? {
                    seen += 1;
                } else {
                    missed.push(format!(
                        "run {}: the process ended with {how}, not at {armed}",
                        run + 1
                    ));
                }
                group.was_ended(&consumer, step.name, status);
            }
            None => {
                missed.push(format!(
                    "run {}: {armed} was not reached within {STEP_TIMEOUT:?}",
                    run + 1
                ));
                group.kill(consumer, step.name)?;
            }
        }
    }
    let last = group.start("z0", environment, &[])?;
    group.drain(vec![last], environment)?;
    let rules = group.rules();
    Ok(CellResult {
        checked: group.check(&rules)?,
        rules,
        seen,
        missed,
    })
}

/// Sends the signal that the step needs, once the consumer is in the required state.
fn trigger_step(
    group: &mut ConsumerGroup<'_>,
    consumer: &GroupMember,
    trigger: Trigger,
) -> Result<(), Error> {
    let by = consumer.name.clone();
    let waits = matches!(
        trigger,
        Trigger::DrainWhileSomethingWaits | Trigger::DrainWhileSomethingIsHeld
    );
    let shows = move |ledger: &Ledger| {
        ledger.records().iter().any(|record| {
            record.by == by
                && match &record.what {
                    What::Started { id, .. } => trigger == Trigger::Drain && id.starts_with("u-"),
                    // It waits for its next attempt from now on.
                    What::Answered {
                        operation: StoreOperation::Clear,
                        id,
                        ..
                    } => waits && id.starts_with("fail-"),
                    _ => false,
                }
        })
    };
    if (trigger == Trigger::Drain || waits) && group.until(STEP_TIMEOUT, shows)? {
        consumer.signal(Signal::TERM)?;
    }
    Ok(())
}

/// The messages of a run: some succeed, three of them with the same key and one of them longer than
/// a third of the lease; one is sent twice, one always fails, one always panics, one is rejected.
fn wave(run: usize, trigger: Trigger) -> Vec<OutgoingMessage> {
    let long = if trigger == Trigger::Drain { 1_500 } else { 20 };
    let free =
        |prefix: &str, number: u32, ms| message(format!("{prefix}-{run}{number:02}"), None, ms);
    let keyed = |number: u32| {
        message(
            format!("k{run:02}-{run}{number:02}"),
            Some(format!("k{run:02}")),
            20,
        )
    };
    vec![
        free("u", 0, long),
        keyed(1),
        free("panic", 2, 5),
        free("refuse", 3, 5),
        free("fail", 4, 5),
        keyed(5),
        free("u", 6, 1_500),
        free("u", 7, 60),
        free("u", 7, 60),
        free("u", 8, 30),
        keyed(9),
    ]
}

/// A message whose handler takes this many milliseconds.
pub(crate) fn message(id: String, key: Option<String>, ms: u64) -> OutgoingMessage {
    OutgoingMessage {
        id,
        key,
        body: serde_json::to_string(&Work { ms }).expect("a number"),
    }
}
