//! The table at the end. Charges are counted in the provider's ledger, and what is in doubt or
//! dead-lettered at the broker, never by what oncegate reports.

use std::collections::{HashMap, HashSet};
use std::process::ExitCode;

use crate::traffic::Outgoing;

const LEDGER: &str = "payments, by the provider's ledger";

/// The ids of the messages at the broker that need a person; a message may be there twice.
#[derive(Default)]
pub(crate) struct Rejected {
    pub(crate) in_doubt: Vec<String>,
    pub(crate) dead_letters: Vec<String>,
}

/// A row of the table: the name, the count and what is counted. The key in JSON has underscores.
type Row = (&'static str, i64, &'static str);

pub(crate) struct Report {
    pub(crate) rows: Vec<Row>,
    charged_twice: usize,
    lost: usize,
    wrong: Vec<String>,
}

impl Report {
    /// Judges the messages by how often each was charged and by what was rejected.
    pub(crate) fn of(
        charges: &HashMap<String, i64>,
        counts: &HashMap<String, i64>,
        messages: &[Outgoing],
        rejected: &Rejected,
    ) -> Self {
        let in_doubt: HashSet<&String> = rejected.in_doubt.iter().collect();
        let dead: HashSet<&String> = rejected.dead_letters.iter().collect();
        let (mut lost, mut wrong) = (HashSet::new(), Vec::new());
        for message in messages {
            let name = message.id.clone();
            let (dead, charges) = (dead.contains(&name), charges.get(&name));
            if message.is_valid && dead {
                wrong.push(format!("a valid payment in the dead letters: {name}"));
            }
            if !message.is_valid && charges.is_some() {
                wrong.push(format!("a malformed message was charged: {name}"));
            }
            let is_settled = charges.is_some() || !message.is_valid && dead;
            if !is_settled && !in_doubt.contains(&name) {
                lost.insert(name);
            }
        }
        let count = |outcome: &str| counts.get(outcome).copied().unwrap_or_default();
        let accepted = count("completed") + count("duplicate") + count("passed_without_gate");
        let delivered = accepted + count("released") + count("rejected") + count("in_doubt");
        let charged_twice = charges.values().filter(|it| **it > 1).count();
        #[rustfmt::skip] // a table
        let rows = vec![
            ("sent", messages.len() as i64, "messages, with copies and broken ones"),
            ("delivered", delivered, "copies and redeliveries too"),
            ("charged", charges.len() as i64, LEDGER),
            ("duplicates stopped", count("duplicate"), "already handled"),
            ("retried", count("retried"), "nothing had happened"),
            ("reconciled: happened", count("reconciled_happened"), "unknown, then found at the provider"),
            ("reconciled: had not", count("reconciled_did_not_happen"), "unknown, then voided and charged again"),
            ("in doubt", rejected.in_doubt.len() as i64, "messages at the broker; outcome unknown, for an operator"),
            ("dead letters", rejected.dead_letters.len() as i64, "messages at the broker; malformed or refused"),
            ("charged twice", charged_twice as i64, LEDGER),
            ("lost", lost.len() as i64, "payments neither charged nor in doubt, and malformed messages not dead-lettered"),
        ];
        Self {
            rows,
            charged_twice,
            lost: lost.len(),
            wrong,
        }
    }

    pub(crate) fn is_right(&self) -> bool {
        self.charged_twice == 0 && self.lost == 0 && self.wrong.is_empty()
    }

    /// Prints the counts and what is wrong; success only if nothing is.
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
        ExitCode::from(u8::from(!self.is_right()))
    }
}

#[test]
fn a_second_charge_and_a_lost_payment_are_counted() {
    let message = |id: &str| Outgoing {
        id: id.to_owned(),
        body: String::new(),
        is_valid: id != "broken",
    };
    let messages = ["once", "once", "other", "in doubt", "broken"].map(message);
    let judge = |charges: &[(&str, i64)], dead: &str| {
        let rejected = Rejected {
            in_doubt: vec!["in doubt".to_owned()],
            dead_letters: vec![dead.to_owned()],
        };
        let charges = charges.iter().map(|(id, times)| (id.to_string(), *times));
        let report = Report::of(&charges.collect(), &HashMap::new(), &messages, &rejected);
        (report.charged_twice, report.lost, report.wrong.len())
    };
    assert_eq!(judge(&[("once", 1), ("other", 1)], "broken"), (0, 0, 0));
    assert_eq!(judge(&[("once", 1), ("other", 2)], "broken"), (1, 0, 0));
    assert_eq!(judge(&[("once", 1)], "broken"), (0, 1, 0));
    // The message "once" was sent twice; "broken" is lost.
    assert_eq!(judge(&[("once", 1), ("other", 1)], "once"), (0, 1, 2));
}
