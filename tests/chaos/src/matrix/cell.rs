//! One cell: three processes are ended at the same step, one after the other, each while messages
//! come in; a fourth takes over.

use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;

use super::group::{Consumer, Group, Made, said};
use super::servers::Servers;
use super::step::{Step, Way};
use crate::Error;
use crate::check::{Checked, Rules};
use crate::ledger::{Ledger, Settling, What};
use crate::message::{Outgoing, Work};

/// How long a process may take to come to its step.
const PATIENCE: Duration = Duration::from_secs(120);
/// How a process ends that aborts.
const ABORTED: &str = "signal 6";

/// What a cell came to.
pub(crate) struct Played {
    pub(crate) checked: Checked,
    pub(crate) rules: Rules,
    /// In how many runs a process was seen to end at the step.
    pub(crate) seen: u32,
    /// What was seen where it did not.
    pub(crate) missed: Vec<String>,
}

/// Plays it, in this environment beside what arms the step.
pub(crate) fn play(
    servers: &Servers,
    step: &Step,
    made: Made,
    environment: &[(&str, &str)],
    folder: &Path,
) -> Result<Played, Error> {
    let mut group = Group::open(servers, made, folder)?;
    match step.way {
        // Somebody has to declare the queue first.
        Way::DrainWhileSomethingIsHeld => {
            let first = group.start("a0", environment, &[])?;
            group.declared(first)?;
            group.set("topology", "check");
        }
        Way::RejectedByTheQueue => group.set("rejects", "by-queue"),
        _ => {}
    }
    let waits = matches!(
        step.way,
        Way::DrainWhileSomethingWaits | Way::DrainWhileSomethingIsHeld
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
        group.publish(wave(run, step.way))?;
        if step.way == Way::TopicMadeAnew {
            group.until_done(PATIENCE)?;
            group.make_anew()?;
            group.publish(
                (50..53)
                    .map(|number| message(format!("u-{run}{number}"), None, 20))
                    .collect(),
            )?;
        }
        lead(&mut group, &consumer, step.way)?;
        match group.ended(&mut consumer, PATIENCE)? {
            Some(status) => {
                let how = said(status);
                let log = std::fs::read_to_string(folder.join(format!("{}.log", consumer.name)))?;
                if how == ABORTED
                    && log
                        .lines()
                        .any(|line| line.ends_with(&format!("oncegate-failpoint {armed}")))
                {
                    seen += 1;
                } else {
                    missed.push(format!(
                        "run {}: it ended with {how}, not at {armed}",
                        run + 1
                    ));
                }
                group.was_ended(&consumer, step.name, status);
            }
            None => {
                missed.push(format!(
                    "run {}: {armed} was not reached within {PATIENCE:?}",
                    run + 1
                ));
                group.kill(consumer, step.name)?;
            }
        }
    }
    let last = group.start("z0", environment, &[])?;
    group.drain(vec![last], environment)?;
    let rules = group.rules();
    Ok(Played {
        checked: group.check(&rules)?,
        rules,
        seen,
        missed,
    })
}

/// Does what the step needs beside messages.
fn lead(group: &mut Group<'_>, consumer: &Consumer, way: Way) -> Result<(), Error> {
    let by = consumer.name.clone();
    let waits = matches!(
        way,
        Way::DrainWhileSomethingWaits | Way::DrainWhileSomethingIsHeld
    );
    let shows = move |ledger: &Ledger| {
        ledger.records().iter().any(|record| {
            record.by == by
                && match &record.what {
                    What::Started { id, .. } => way == Way::Drain && id.starts_with("u-"),
                    What::Settled {
                        how: Settling::Released,
                        id,
                        ..
                    } => waits && id.starts_with("fail-"),
                    _ => false,
                }
        })
    };
    if (way == Way::Drain || waits) && group.until(PATIENCE, shows)? {
        consumer.signal(Signal::TERM)?;
    }
    Ok(())
}

/// A handful of messages: some work, two of them with one key, one longer than a third of its
/// lease; one is sent twice, one always fails, one always panics, one is refused.
fn wave(run: usize, way: Way) -> Vec<Outgoing> {
    let long = if way == Way::Drain { 1_500 } else { 20 };
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

/// A message that takes so many milliseconds.
pub(crate) fn message(id: String, key: Option<String>, ms: u64) -> Outgoing {
    Outgoing {
        id,
        key,
        body: serde_json::to_string(&Work { ms }).expect("a number"),
    }
}
