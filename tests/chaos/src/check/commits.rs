//! I6 and I7: the committed offsets of the group, as Kafka reports them.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::faults::FREEZE_KAFKA;
use super::{Finder, Invariant};
use crate::ledger::{SettlementKind, What};

/// How long after a broker is resumed it may still apply an outdated commit: the client gave it up
/// and sent a later one on another connection, and the broker reads both. Observed: 2.1 seconds on
/// a machine with both cores busy.
const OUTDATED_COMMIT: Duration = Duration::from_secs(5);
/// How late the harness may observe a commit, in microseconds.
const OBSERVATION_DELAY: u64 = 1_000_000;

pub(super) fn check(finder: &mut Finder<'_>) {
    let mut settled: HashSet<(i32, i64)> = HashSet::new();
    let mut committed: HashMap<i32, i64> = HashMap::new();
    let mut before_recreation: HashMap<i32, i64> = HashMap::new();
    let mut assignments: HashSet<(&str, i32, &str)> = HashSet::new();
    let mut last_assigned: HashMap<i32, u64> = HashMap::new();
    let mut broken = Vec::new();
    for record in finder.ledger.records() {
        match &record.what {
            // Recorded before the source settles it, so before any commit.
            What::Settled {
                how: SettlementKind::Accepted | SettlementKind::Rejected,
                position,
                ..
            } => {
                settled.extend(read(position).map(|(partition, offset, _)| (partition, offset)));
            }
            What::Received { position, .. } => {
                if let Some((partition, _, assignment)) = read(position)
                    && assignments.insert((&record.by, partition, assignment))
                {
                    last_assigned.insert(partition, record.at);
                }
            }
            // Offsets of the deleted topic have no meaning in the recreated one.
            What::TopicRecreated => {
                settled.clear();
                before_recreation = std::mem::take(&mut committed);
            }
            // Kafka reports the old committed offset until the group commits in the recreated
            // topic.
            What::Committed { partition, offset }
                if before_recreation.get(partition) == Some(offset) => {}
            What::Committed { partition, offset } => {
                finder.checked.counts.commits += 1;
                let before = committed.entry(*partition).or_default();
                let woken = finder
                    .windows
                    .last_end(FREEZE_KAFKA, record.at, OUTDATED_COMMIT);
                // After a new assignment of the partition Kafka refuses commits of the earlier
                // generation.
                let reassigned = |woken: u64| {
                    last_assigned
                        .get(partition)
                        .is_some_and(|at| *at > woken && at + OBSERVATION_DELAY < record.at)
                };
                if offset < before && woken.is_some_and(|woken| !reassigned(woken)) {
                    finder.checked.counts.commits_applied_late += 1;
                    // The next member starts here and commits these offsets again; they were
                    // settled.
                    settled.extend((*offset..*before).map(|again| (*partition, again)));
                    *before = *offset;
                } else if offset < before {
                    broken.push((
                        Invariant::I6,
                        format!("the committed offset of partition {partition} decreased from {before} to {offset}"),
                    ));
                }
                for passed in *before..*offset {
                    if !settled.remove(&(*partition, passed)) {
                        broken.push((
                            Invariant::I7,
                            format!("partition {partition} was committed up to {offset}, but {passed} is not settled"),
                        ));
                    }
                }
                *before = (*before).max(*offset);
            }
            _ => {}
        }
    }
    for (invariant, why) in broken {
        finder.report_violation(invariant, None, why);
    }
}

/// Parses a position of the ledger: partition, offset, and assignment.
fn read(position: &str) -> Option<(i32, i64, &str)> {
    let (partition, rest) = position.split_once('/')?;
    let (offset, assignment) = rest.split_once('@')?;
    Some((partition.parse().ok()?, offset.parse().ok()?, assignment))
}
