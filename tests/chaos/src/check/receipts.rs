//! I8: what was handed over is settled once at the most.

use std::collections::HashMap;

use super::{Finder, Invariant};
use crate::ledger::What;

pub(super) fn check(finder: &mut Finder<'_>) {
    // Kafka hands over again, at the same place, what was released.
    let mut held: HashMap<(&str, &str), u32> = HashMap::new();
    let mut twice = Vec::new();
    for record in finder.ledger.records() {
        match &record.what {
            What::Received { position, .. } => {
                *held.entry((&record.by, position)).or_default() += 1
            }
            What::Settled { id, position, .. } => {
                match held.get_mut(&(record.by.as_str(), position.as_str())) {
                    Some(held @ 1..) => *held -= 1,
                    _ => twice.push((
                        id.as_str(),
                        format!(
                            "{} settled {position} more often than it was handed over",
                            record.by
                        ),
                    )),
                }
            }
            _ => {}
        }
    }
    for (id, why) in twice {
        finder.found(Invariant::I8, Some(id), why);
    }
}
