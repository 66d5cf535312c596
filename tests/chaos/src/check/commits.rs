//! I6 and I7: what Kafka says that the group has committed.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use super::faults::FREEZE_KAFKA;
use super::{Finder, Invariant};
use crate::ledger::{Settling, What};

/// How long after a frozen broker was woken it may still carry out a commit that another one has
/// overtaken: the client has given that up by then and sent a later one by another connection, and
/// the broker reads both. Seen up to 2.1 seconds, beside a compiler that had both cores.
const OVERTAKEN: Duration = Duration::from_secs(5);
/// How long after it happened the player may see what is committed, in microseconds.
const SEEN: u64 = 1_000_000;

pub(super) fn check(finder: &mut Finder<'_>) {
    let mut settled: HashSet<(i32, i64)> = HashSet::new();
    let mut committed: HashMap<i32, i64> = HashMap::new();
    let mut of_the_old: HashMap<i32, i64> = HashMap::new();
    let mut assignments: HashSet<(&str, i32, &str)> = HashSet::new();
    let mut assigned_anew: HashMap<i32, u64> = HashMap::new();
    let mut broken = Vec::new();
    for record in finder.ledger.records() {
        match &record.what {
            // Before it is settled: the commit can only come after.
            What::Settled {
                how: Settling::Accepted | Settling::Rejected,
                position,
                ..
            } => {
                settled.extend(read(position).map(|(partition, offset, _)| (partition, offset)));
            }
            What::Received { position, .. } => {
                if let Some((partition, _, assignment)) = read(position)
                    && assignments.insert((&record.by, partition, assignment))
                {
                    assigned_anew.insert(partition, record.at);
                }
            }
            // What is settled of the old log says nothing of the new one.
            What::MadeAnew => {
                settled.clear();
                of_the_old = std::mem::take(&mut committed);
            }
            // Kafka may still tell what was committed of the old one: the group has not come to the
            // new one yet.
            What::Committed { partition, offset } if of_the_old.get(partition) == Some(offset) => {}
            What::Committed { partition, offset } => {
                finder.checked.counts.commits += 1;
                let before = committed.entry(*partition).or_default();
                let woken = finder.windows.last_over(FREEZE_KAFKA, record.at, OVERTAKEN);
                // Once the group has assigned the partition anew, Kafka refuses what is left of the
                // time before.
                let anew = |woken: u64| {
                    assigned_anew
                        .get(partition)
                        .is_some_and(|at| *at > woken && at + SEEN < record.at)
                };
                if offset < before && woken.is_some_and(|woken| !anew(woken)) {
                    finder.checked.counts.commits_overtaken += 1;
                    // The next member begins here, and commits again what lies behind it: that was
                    // settled.
                    settled.extend((*offset..*before).map(|again| (*partition, again)));
                    *before = *offset;
                } else if offset < before {
                    broken.push((
                        Invariant::I6,
                        format!("partition {partition} went back from {before} to {offset}"),
                    ));
                }
                for passed in *before..*offset {
                    if !settled.remove(&(*partition, passed)) {
                        broken.push((
                            Invariant::I7,
                            format!("partition {partition} was committed up to {offset}, and {passed} is not settled"),
                        ));
                    }
                }
                *before = (*before).max(*offset);
            }
            _ => {}
        }
    }
    for (invariant, why) in broken {
        finder.found(invariant, None, why);
    }
}

/// A position as the ledger has it: partition, offset, and the assignment by which it came.
fn read(position: &str) -> Option<(i32, i64, &str)> {
    let (partition, rest) = position.split_once('/')?;
    let (offset, assignment) = rest.split_once('@')?;
    Some((partition.parse().ok()?, offset.parse().ok()?, assignment))
}
