//! The table at the end, counted in the provider's ledger and at the broker, not by oncegate's metrics.

use std::collections::{HashMap, HashSet};
use std::process::ExitCode;

use crate::traffic::{DemoMessage, MALFORMED};

const LEDGER: &str = "payments, by the provider's ledger";

/// The ids of messages in doubt and of dead letters at the broker; a message may occur twice.
#[derive(Default)]
pub(crate) struct Rejected {
    pub(crate) in_doubt: Vec<String>,
    pub(crate) dead_letters: Vec<String>,
}

pub(crate) struct Report {
    /// The name, the count and what is counted. The key in JSON has underscores.
    pub(crate) rows: Vec<(&'static str, i64, &'static str)>,
    wrong: Vec<String>,
    pub(crate) is_correct: bool,
}

impl Report {
    /// Compares the sent messages with the charges in the ledger and the rejected messages.
    pub(crate) fn of(
        charges: &HashMap<String, i64>,
        metrics: &str,
        messages: &[DemoMessage],
        rejected: &Rejected,
    ) -> Self {
        let in_doubt: HashSet<&String> = rejected.in_doubt.iter().collect();
        let dead: HashSet<&String> = rejected.dead_letters.iter().collect();
        let (mut lost, mut wrong) = (HashSet::new(), Vec::new());
        for DemoMessage { id, .. } in messages {
            let (is_dead, is_charged) = (dead.contains(id), charges.contains_key(id));
            let is_valid = !id.starts_with(MALFORMED);
            if is_valid && is_dead {
                wrong.push(format!("a valid payment in the dead letters: {id}"));
            }
            if !is_valid && is_charged {
                wrong.push(format!("a malformed message was charged: {id}"));
            }
            if !is_charged && (is_valid || !is_dead) && !in_doubt.contains(id) {
                lost.insert(id);
            }
        }
        let count = |outcome: &str| deliveries(metrics, outcome);
        let accepted = count("completed") + count("duplicate") + count("passed_without_store");
        let delivered = accepted + count("released") + count("rejected") + count("in_doubt");
        let charged_twice = charges.values().filter(|it| **it > 1).count();
        #[rustfmt::skip] // a table
        let rows = vec![
            ("sent", messages.len() as i64, "messages, with copies and broken ones"),
            ("delivered", delivered, "copies and redeliveries too"),
            ("charged", charges.len() as i64, LEDGER),
            ("duplicates skipped", count("duplicate"), "already handled"),
            ("retried", count("retried"), "nothing had happened"),
            ("reconciled: happened", count("reconciled_happened"), "unknown, then found at the provider"),
            ("reconciled: did not", count("reconciled_did_not_happen"), "unknown, then voided and charged again"),
            ("in doubt", rejected.in_doubt.len() as i64, "messages at the broker; outcome unknown, for an operator"),
            ("dead letters", rejected.dead_letters.len() as i64, "messages at the broker; malformed or refused"),
            ("charged twice", charged_twice as i64, LEDGER),
            ("lost", lost.len() as i64, "payments neither charged nor in doubt, and malformed messages not dead-lettered"),
        ];
        let is_correct = charged_twice == 0 && lost.is_empty() && wrong.is_empty();
        Self {
            rows,
            wrong,
            is_correct,
        }
    }

    /// Prints the counts and what is wrong. Returns success only if the report is correct.
    pub(crate) fn print(&self, json: bool) -> ExitCode {
        if json {
            let key = |name: &str| name.replace(": ", "_").replace(' ', "_");
            let counts = self.rows.iter().map(|(name, count, _)| (key(name), count));
            println!("{}", serde_json::json!(HashMap::<_, _>::from_iter(counts)));
        } else {
            for (name, count, meaning) in &self.rows {
                println!("  {name:<21} {count:>8}   {meaning}");
            }
        }
        for wrong in &self.wrong {
            eprintln!("payments: wrong: {wrong}");
        }
        ExitCode::from(u8::from(!self.is_correct))
    }
}

/// The deliveries whose outcome starts with this text, from metrics in the Prometheus text format.
pub(crate) fn deliveries(metrics: &str, outcome: &str) -> i64 {
    let series = format!("oncegate_deliveries_total{{outcome=\"{outcome}");
    let lines = metrics.lines().filter(|line| line.starts_with(&series));
    let counts = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<i64>().ok());
    counts.sum()
}

#[test]
fn a_second_charge_and_a_lost_payment_are_counted() {
    let message = |id: &str| DemoMessage {
        id: id.to_owned(),
        body: String::new(),
    };
    let messages = ["once", "once", "other", "in doubt", "broken-1"].map(message);
    let check = |charges: &[(&str, i64)], dead: &str| {
        let rejected = Rejected {
            in_doubt: vec!["in doubt".to_owned()],
            dead_letters: vec![dead.to_owned()],
        };
        let charges = charges.iter().map(|(id, times)| (id.to_string(), *times));
        let report = Report::of(&charges.collect(), "", &messages, &rejected);
        let [.., twice, lost] = &report.rows[..] else {
            unreachable!()
        };
        [lost.1, twice.1, report.wrong.len() as i64]
    };
    assert_eq!(check(&[("once", 1), ("other", 1)], "broken-1"), [0, 0, 0]);
    assert_eq!(check(&[("once", 1), ("other", 2)], "broken-1"), [0, 1, 0]);
    assert_eq!(check(&[("once", 1)], "broken-1"), [1, 0, 0]);
    // The message "once" was sent twice; "broken-1" is lost.
    assert_eq!(check(&[("once", 1), ("other", 1)], "once"), [1, 0, 2]);
}
