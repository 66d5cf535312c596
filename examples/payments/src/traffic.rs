//! What is sent: payments, some of them twice, some of them broken.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::payment::Payment;

/// One message to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outgoing {
    /// What stands in the header; a message without an id is malformed too.
    pub(crate) id: Option<String>,
    /// The body.
    pub(crate) body: String,
    /// Whether it is a payment at all.
    pub(crate) kind: Kind,
}

impl Outgoing {
    /// What tells it from others, here and where it ends.
    pub(crate) fn name(&self) -> String {
        name(self.id.clone(), self.body.as_bytes())
    }
}

/// What tells a message from others: the id in its header, or its body if it has none.
pub(crate) fn name(id: Option<String>, body: &[u8]) -> String {
    id.unwrap_or_else(|| format!("without an id: {}", String::from_utf8_lossy(body)))
}

/// Whether a message is a payment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// It must be charged once, with this amount.
    Valid {
        /// In cents.
        amount: u64,
    },
    /// It must end in the dead letters.
    Malformed,
}

/// Makes that many payments, with ids that begin with the prefix.
pub(crate) fn payments(count: usize, prefix: &str, seed: u64) -> Vec<Payment> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (1..=count)
        .map(|n| Payment {
            id: format!("{prefix}-{n:06}"),
            card: format!("card-{:04}", rng.u16(0..10_000)),
            amount: rng.u64(100..50_000),
        })
        .collect()
}

/// Reads payments from a file with one JSON object a line.
///
/// # Errors
/// If the file cannot be read, or a line is no payment: the error names the line.
pub(crate) fn read(path: &Path) -> io::Result<Vec<Payment>> {
    let text = std::fs::read_to_string(path)?;
    let lines = text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(n, line)| {
            let no_payment = |why: String| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("line {} is no payment: {why}", n + 1),
                )
            };
            let payment: Payment =
                serde_json::from_str(line).map_err(|error| no_payment(error.to_string()))?;
            if payment.id.trim().is_empty() {
                return Err(no_payment(
                    "its id is empty; give each payment an id of its own".to_owned(),
                ));
            }
            Ok(payment)
        })
        .collect()
}

/// What is sent for these payments: of a hundred, ten are sent a second time (half of them at once,
/// while the first copy runs), and one comes with a message beside it that is broken.
pub(crate) fn of(payments: &[Payment], seed: u64) -> Vec<Outgoing> {
    let mut rng = fastrand::Rng::with_seed(seed ^ 0x7261_6666_6963);
    let mut placed = Vec::with_capacity(payments.len() * 9 / 8);
    for (place, payment) in payments.iter().enumerate() {
        let body = serde_json::to_string(payment).expect("a struct of text and numbers is JSON");
        let message = Outgoing {
            id: Some(payment.id.clone()),
            body,
            kind: Kind::Valid {
                amount: payment.amount,
            },
        };
        if rng.u8(0..10) == 0 {
            let distance = if rng.bool() { 0 } else { rng.usize(50..500) };
            placed.push((place + distance, message.clone()));
        }
        if rng.u8(0..100) == 0 {
            placed.push((place, broken(&message, rng.bool())));
        }
        placed.push((place, message));
    }
    placed.sort_by_key(|(place, _)| *place);
    placed.into_iter().map(|(_, message)| message).collect()
}

/// Cut short, or without an id.
fn broken(message: &Outgoing, cut: bool) -> Outgoing {
    let id = message
        .id
        .as_ref()
        .filter(|_| cut)
        .map(|id| format!("broken-{id}"));
    let body = if cut {
        message.body[..message.body.len() / 2].to_owned()
    } else {
        message.body.clone()
    };
    Outgoing {
        id,
        body,
        kind: Kind::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn every_payment_is_sent_and_about_a_tenth_twice() {
        let payments = payments(2000, "pay", 1);
        let sent = of(&payments, 1);
        assert_eq!(sent, of(&payments, 1));
        let mut copies: HashMap<&str, usize> = HashMap::new();
        for message in sent
            .iter()
            .filter(|message| matches!(message.kind, Kind::Valid { .. }))
        {
            *copies
                .entry(message.id.as_deref().expect("payments have ids"))
                .or_default() += 1;
        }
        assert_eq!(copies.len(), 2000);
        assert!((150..250).contains(&copies.values().filter(|count| **count == 2).count()));
    }

    #[test]
    fn what_is_broken_never_stands_under_a_payments_id() {
        let payments = payments(2000, "pay", 1);
        let sent = of(&payments, 1);
        let broken: Vec<_> = sent
            .iter()
            .filter(|message| message.kind == Kind::Malformed)
            .collect();
        assert!(!broken.is_empty());
        for message in broken {
            assert!(
                message
                    .id
                    .as_ref()
                    .is_none_or(|id| id.starts_with("broken-")
                        && serde_json::from_str::<Payment>(&message.body).is_err())
            );
        }
    }

    #[test]
    fn a_line_of_the_input_that_is_no_payment_is_named() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let good = r#"{"id":"a","card":"c","amount":5}"#;
        let refusal = |bad: &str| {
            std::fs::write(file.path(), format!("{good}\n\n{bad}\n")).expect("written");
            read(file.path()).expect_err("no payment").to_string()
        };
        assert!(
            refusal(r#"{"id":"b","card":"c"}"#)
                .starts_with("line 3 is no payment: missing field `amount`")
        );
        for id in ["", " "] {
            let bad = format!(r#"{{"id":"{id}","card":"c","amount":5}}"#);
            assert_eq!(
                refusal(&bad),
                "line 3 is no payment: its id is empty; give each payment an id of its own"
            );
        }
        std::fs::write(file.path(), good).expect("written");
        assert_eq!(read(file.path()).expect("payments").len(), 1);
    }
}
