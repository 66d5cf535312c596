//! The table at the end: what was sent, and what became of it.

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;

use crate::counters::Counts;
use crate::ledger::Ledger;

/// What became of the payments. `charged_twice` and `lost` are counted from the provider's ledger and the broker, never
/// from what the framework says of itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    /// Messages that were sent, copies and broken ones too.
    pub(crate) sent: u64,
    /// Deliveries that reached the workers.
    pub(crate) delivered: u64,
    /// Payments that the provider charged.
    pub(crate) charged: u64,
    /// Deliveries of payments that were handled before.
    pub(crate) duplicates_stopped: u64,
    /// Handlers that ran again because nothing had happened.
    pub(crate) retried: u64,
    /// Unknown outcomes that turned out to have happened.
    pub(crate) reconciled_happened: u64,
    /// Unknown outcomes that had not happened, and cannot any more.
    pub(crate) reconciled_had_not: u64,
    /// Messages that wait for a person, because nobody can tell.
    pub(crate) in_doubt: u64,
    /// Messages that will never work.
    pub(crate) dead_letters: u64,
    /// Payments that were charged more than once.
    pub(crate) charged_twice: u64,
    /// Payments that were neither charged nor set aside for a person.
    pub(crate) lost: u64,
}

/// What the broker set aside.
#[derive(Clone, Debug, Default)]
pub(crate) struct SetAside {
    /// How many messages lie in the in-doubt queue.
    pub(crate) in_doubt: u64,
    /// How many messages lie in the dead letters.
    pub(crate) dead_letters: u64,
    /// The ids of both.
    pub(crate) ids: HashSet<String>,
}

impl Report {
    /// Counts. `payments` are the ids of all valid payments that were sent.
    pub(crate) fn count<'a>(
        (sent, delivered): (u64, u64),
        payments: impl IntoIterator<Item = &'a str>,
        ledger: &Ledger,
        set_aside: &SetAside,
        counts: &Counts,
    ) -> Self {
        let payments: HashSet<&str> = payments.into_iter().collect();
        let (charged, not_charged): (Vec<&str>, Vec<&str>) = payments.into_iter().partition(|id| ledger.has_charged(id));
        Self {
            sent,
            delivered,
            charged: charged.len() as u64,
            duplicates_stopped: counts.of("duplicate"),
            retried: counts.of("retried"),
            reconciled_happened: counts.of("reconciled_happened"),
            reconciled_had_not: counts.of("reconciled_did_not_happen"),
            in_doubt: set_aside.in_doubt,
            dead_letters: set_aside.dead_letters,
            charged_twice: ledger.charged_twice() as u64,
            lost: not_charged.iter().filter(|id| !set_aside.ids.contains(**id)).count() as u64,
        }
    }

    /// Whether every payment was charged once or stands aside for a person.
    pub(crate) fn is_right(&self) -> bool {
        self.charged_twice == 0 && self.lost == 0
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = [
            ("sent", self.sent, "messages, with copies and broken ones"),
            ("delivered", self.delivered, "copies and redeliveries too"),
            ("charged", self.charged, "payments, by the provider's ledger"),
            ("duplicates stopped", self.duplicates_stopped, "already handled"),
            ("retried", self.retried, "nothing had happened"),
            ("reconciled: happened", self.reconciled_happened, "unknown, then found at the provider"),
            ("reconciled: had not", self.reconciled_had_not, "unknown, then voided and charged anew"),
            ("in doubt", self.in_doubt, "nobody can tell: for a person"),
            ("dead letters", self.dead_letters, "will never work"),
            ("charged twice", self.charged_twice, "by the provider's ledger"),
            ("lost", self.lost, "neither charged nor set aside"),
        ];
        for (name, count, meaning) in rows {
            writeln!(f, "  {name:<21} {count:>8}   {meaning}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Repeats;

    #[test]
    fn the_ledger_and_the_broker_decide_what_is_lost_and_charged_twice() {
        let mut ledger = Ledger::in_memory();
        for id in ["once", "twice", "twice"] {
            ledger.charge(id, 1, 1, Repeats::ChargeAgain).expect("booked");
        }
        let set_aside = SetAside { in_doubt: 1, dead_letters: 0, ids: HashSet::from(["aside".to_owned()]) };
        let report = Report::count((9, 9), ["once", "twice", "aside", "gone"], &ledger, &set_aside, &Counts::default());
        assert_eq!((report.charged, report.charged_twice, report.lost), (2, 1, 1));
        assert!(!report.is_right());
    }

    #[test]
    fn json_has_the_keys_that_scripts_read() {
        let json = serde_json::to_value(Report::default()).expect("a struct of numbers is JSON");
        let mut keys: Vec<_> = json.as_object().expect("an object").keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            [
                "charged",
                "charged_twice",
                "dead_letters",
                "delivered",
                "duplicates_stopped",
                "in_doubt",
                "lost",
                "reconciled_had_not",
                "reconciled_happened",
                "retried",
                "sent"
            ]
        );
    }
}
