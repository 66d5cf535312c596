//! I8: each delivery is settled at most once.

use std::collections::HashMap;

use super::{Finder, Invariant};
use crate::ledger::What;

pub(super) fn check(finder: &mut Finder<'_>) {
    // Kafka redelivers a released message with the same position.
    let mut unsettled: HashMap<(&str, &str), u32> = HashMap::new();
    let mut violations = Vec::new();
    for record in finder.ledger.records() {
        match &record.what {
            What::Received { position, .. } => {
                *unsettled.entry((&record.by, position)).or_default() += 1
            }
            What::Settled { id, position, .. } => {
                match unsettled.get_mut(&(record.by.as_str(), position.as_str())) {
                    Some(unsettled @ 1..) => *unsettled -= 1,
                    _ => violations.push((
                        id.as_str(),
                        format!(
                            "{} settled {position} more often than it was delivered",
                            record.by
                        ),
                    )),
                }
            }
            _ => {}
        }
    }
    for (id, why) in violations {
        finder.report_violation(Invariant::I8, Some(id), why);
    }
}
