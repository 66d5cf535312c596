//! The provider's own book: what was charged, and what is refused. Neither a worker nor the
//! framework can write in it.

use std::collections::HashMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

mod file;

use file::Appended;
#[cfg(feature = "real")]
pub(crate) use file::LedgerFile;

/// What the provider does with a second charge under one id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Repeats {
    /// It charges again: it takes no idempotency key.
    #[default]
    ChargeAgain,
    /// It answers as it did before: the id is its idempotency key.
    Deduplicated,
}

/// One line of the book.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Entry {
    /// Money moved.
    Charged {
        /// The payment.
        id: String,
        /// In cents.
        amount: u64,
        /// The attempt that asked for it.
        attempt: u32,
    },
    /// Charges of this payment are refused, up to and including this attempt.
    Voided {
        /// The payment.
        id: String,
        /// The last attempt that is refused.
        through: u32,
    },
}

/// The charge came too late: its attempt was voided.
#[derive(Debug, thiserror::Error)]
#[error("attempt {attempt} of payment {id} was voided")]
pub(crate) struct Voided {
    id: String,
    attempt: u32,
}

/// Why a charge was not booked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotBooked {
    /// It was voided before.
    #[error(transparent)]
    Voided(#[from] Voided),
    /// The book cannot be written.
    #[error("the ledger cannot be written: {0}")]
    Unwritten(#[from] io::Error),
}

/// The book: in memory, and line by line in a file where there is one.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    /// The amount of each charge.
    charges: HashMap<String, Vec<u64>>,
    voided: HashMap<String, u32>,
    file: Option<Appended>,
}

impl Ledger {
    /// A book that lives as long as the process.
    pub(crate) fn in_memory() -> Self {
        Self::default()
    }

    /// Opens the book of a file, which is made if it is missing. Every entry is written before it
    /// is answered.
    ///
    /// # Errors
    /// If the file cannot be opened, another provider has it open, or a line of it is no entry.
    pub(crate) fn in_file(path: &Path) -> io::Result<Self> {
        let (file, read) = Appended::open(path)?;
        Ok(Self {
            file: Some(file),
            ..read
        })
    }

    /// Books a charge, unless its attempt was voided or its repetition is known.
    ///
    /// # Errors
    /// [`NotBooked`]: then nothing was charged.
    pub(crate) fn charge(
        &mut self,
        id: &str,
        amount: u64,
        attempt: u32,
        repeats: Repeats,
    ) -> Result<(), NotBooked> {
        if self
            .voided
            .get(id)
            .is_some_and(|through| attempt <= *through)
        {
            return Err(Voided {
                id: id.to_owned(),
                attempt,
            }
            .into());
        }
        if repeats == Repeats::Deduplicated && self.charges.contains_key(id) {
            return Ok(());
        }
        self.write(Entry::Charged {
            id: id.to_owned(),
            amount,
            attempt,
        })?;
        Ok(())
    }

    /// Whether this payment was charged; if not, refuses its attempts up to and including this one
    /// from now on.
    ///
    /// # Errors
    /// If the refusal cannot be written; then nothing is refused.
    pub(crate) fn find_or_void(&mut self, id: &str, attempt: u32) -> io::Result<bool> {
        if self.charges.contains_key(id) {
            return Ok(true);
        }
        if self.voided.get(id).is_none_or(|through| *through < attempt) {
            self.write(Entry::Voided {
                id: id.to_owned(),
                through: attempt,
            })?;
        }
        Ok(false)
    }

    /// How many payments were charged at least once.
    pub(crate) fn charged(&self) -> usize {
        self.charges.len()
    }

    /// How many payments were charged more than once.
    pub(crate) fn charged_twice(&self) -> usize {
        self.charges
            .values()
            .filter(|amounts| amounts.len() > 1)
            .count()
    }

    /// What was charged: each payment with the amount of each of its charges.
    pub(crate) fn charges(&self) -> impl Iterator<Item = (&str, &[u64])> {
        self.charges
            .iter()
            .map(|(id, amounts)| (id.as_str(), amounts.as_slice()))
    }

    /// Whether this payment was charged.
    pub(crate) fn has_charged(&self, id: &str) -> bool {
        self.charges.contains_key(id)
    }

    fn write(&mut self, entry: Entry) -> io::Result<()> {
        if let Some(file) = &mut self.file {
            let mut line = serde_json::to_vec(&entry)?;
            line.push(b'\n');
            file.append(&line)?;
        }
        self.note(entry);
        Ok(())
    }

    fn note(&mut self, entry: Entry) {
        match entry {
            Entry::Charged { id, amount, .. } => self.charges.entry(id).or_default().push(amount),
            Entry::Voided { id, through } => {
                let voided = self.voided.entry(id).or_default();
                *voided = through.max(*voided);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_charge_counts_as_charged_twice() {
        let mut ledger = Ledger::in_memory();
        for _ in 0..2 {
            ledger
                .charge("a", 5, 1, Repeats::ChargeAgain)
                .expect("booked");
        }
        ledger
            .charge("b", 5, 1, Repeats::ChargeAgain)
            .expect("booked");
        assert_eq!((ledger.charged(), ledger.charged_twice()), (2, 1));
    }

    #[test]
    fn an_idempotency_key_charges_once() {
        let mut ledger = Ledger::in_memory();
        for attempt in 1..3 {
            ledger
                .charge("a", 5, attempt, Repeats::Deduplicated)
                .expect("answered");
        }
        assert_eq!((ledger.charged(), ledger.charged_twice()), (1, 0));
    }

    #[test]
    fn a_late_charge_is_refused_once_voided_and_the_next_attempt_is_not() {
        let mut ledger = Ledger::in_memory();
        assert!(!ledger.find_or_void("a", 1).expect("in memory"));
        assert!(matches!(
            ledger.charge("a", 5, 1, Repeats::ChargeAgain),
            Err(NotBooked::Voided(_))
        ));
        ledger
            .charge("a", 5, 2, Repeats::ChargeAgain)
            .expect("booked");
        assert!(ledger.find_or_void("a", 2).expect("in memory"));
        assert_eq!((ledger.charged(), ledger.charged_twice()), (1, 0));
    }
}
