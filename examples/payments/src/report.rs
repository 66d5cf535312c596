//! The table at the end: what was sent, and what became of it.

use std::collections::HashSet;
use std::fmt;

use serde::Serialize;

use crate::counters::Counts;
use crate::ledger::{Ledger, Repeats};
use crate::sent::Sent;

/// How many messages are named where something is wrong.
const NAMED: usize = 5;

/// What became of the payments. `charged_twice` and `lost` are counted from the provider's ledger
/// and the broker, never from what the framework says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
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
    /// Payments that were neither charged nor stand in doubt, and broken messages that stand
    /// nowhere. A payment in the dead letters that was not charged is lost as well: nothing was
    /// wrong with it, and nobody is going to charge it.
    pub(crate) lost: u64,
    /// What is wrong apart from that, or in detail: a sentence each.
    #[serde(skip)]
    wrong: Vec<String>,
    /// Messages of which nobody knows whether the broker has them. They cannot be lost.
    #[serde(skip)]
    unconfirmed: u64,
    /// What the provider did with a second charge under one id.
    #[serde(skip)]
    repeats: Repeats,
    /// How many workers were killed, where this was the run to kill them.
    #[serde(skip)]
    killed: Option<u64>,
    /// How much of what the workers counted is known.
    #[serde(skip)]
    heard: Heard,
}

/// How much of what the workers counted is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Heard {
    /// All of it.
    #[default]
    All,
    /// What they wrote down: one that was killed took its last counts along.
    WrittenDown,
}

/// What the broker set aside: the name of each message. One may be set aside twice.
#[derive(Clone, Debug, Default)]
pub(crate) struct SetAside {
    /// What waits for a person.
    pub(crate) in_doubt: Vec<String>,
    /// What will never work.
    pub(crate) dead_letters: Vec<String>,
}

impl Report {
    /// Counts, and looks for all that must not be.
    pub(crate) fn count(
        sent: &Sent,
        delivered: u64,
        (ledger, repeats): (&Ledger, Repeats),
        set_aside: &SetAside,
        counts: &Counts,
    ) -> Self {
        let in_doubt = names(&set_aside.in_doubt);
        let dead_letters = names(&set_aside.dead_letters);
        let mut report = Self {
            sent: sent.confirmed(),
            delivered,
            charged: ledger
                .charges()
                .filter(|(id, _)| sent.amounts(id).is_some())
                .count() as u64,
            duplicates_stopped: counts.of("duplicate"),
            retried: counts.of("retried"),
            reconciled_happened: counts.of("reconciled_happened"),
            reconciled_had_not: counts.of("reconciled_did_not_happen"),
            in_doubt: set_aside.in_doubt.len() as u64,
            dead_letters: set_aside.dead_letters.len() as u64,
            charged_twice: ledger.charged_twice() as u64,
            lost: sent
                .payments()
                .filter(|id| !ledger.has_charged(id) && !in_doubt.contains(id))
                .count() as u64,
            unconfirmed: sent.unconfirmed(),
            repeats,
            ..Self::default()
        };
        report.look_for_payments_among(&dead_letters, sent);
        report.look_for_broken_messages(sent, &in_doubt, &dead_letters);
        report.look_for_charges_that_nobody_sent(sent, ledger);
        report
    }

    /// What the workers counted is what they wrote down; whether one was killed is not known.
    #[cfg_attr(not(feature = "real"), allow(dead_code))]
    pub(crate) fn with_counts_as_written_down(mut self) -> Self {
        self.heard = Heard::WrittenDown;
        self
    }

    /// With how many workers were killed. Fewer than were asked for show less than was promised,
    /// which is wrong.
    pub(crate) fn with_kills(mut self, killed: usize, asked: usize) -> Self {
        self.killed = Some(killed as u64);
        if killed == 0 {
            self.heard = Heard::All; // each wrote down all when it drained
        }
        if killed < asked {
            self.wrong.push(format!("only {killed} of {asked} workers were killed; send more payments, or ask for fewer kills"));
        }
        self
    }

    /// With the payments that the provider never tells of: only a person can, so that each has to
    /// stand in doubt.
    pub(crate) fn with_unsure(mut self, unsure_of: &[String], set_aside: &SetAside) -> Self {
        let in_doubt = names(&set_aside.in_doubt);
        let missing = unsure_of
            .iter()
            .map(String::as_str)
            .filter(|id| !in_doubt.contains(id));
        self.find(
            "payments that the provider never tells of, and that are not in doubt",
            missing,
        );
        self
    }

    /// Nothing is wrong with a valid payment, and it has more attempts than faults can cost: it is
    /// never a dead letter.
    fn look_for_payments_among(&mut self, dead_letters: &HashSet<&str>, sent: &Sent) {
        self.find(
            "valid payments in the dead letters",
            dead_letters
                .iter()
                .copied()
                .filter(|id| sent.amounts(id).is_some()),
        );
    }

    /// They belong in the dead letters. One whose worker was killed while it held it may stand in
    /// doubt: that is for a person too.
    fn look_for_broken_messages(
        &mut self,
        sent: &Sent,
        in_doubt: &HashSet<&str>,
        dead_letters: &HashSet<&str>,
    ) {
        let gone: Vec<&str> = sent
            .broken()
            .filter(|name| !dead_letters.contains(name) && !in_doubt.contains(name))
            .collect();
        self.lost += gone.len() as u64;
        self.find(
            "broken messages that are not in the dead letters",
            gone.into_iter(),
        );
    }

    fn look_for_charges_that_nobody_sent(&mut self, sent: &Sent, ledger: &Ledger) {
        self.find(
            "payments charged that were never sent",
            ledger
                .charges()
                .map(|(id, _)| id)
                .filter(|id| sent.amounts(id).is_none()),
        );
        let differs = |(id, charged): &(&str, &[u64])| {
            sent.amounts(id)
                .is_some_and(|amounts| charged.iter().any(|amount| !amounts.contains(amount)))
        };
        self.find(
            "payments charged with another amount than was sent",
            ledger.charges().filter(differs).map(|(id, _)| id),
        );
    }

    fn find<'a>(&mut self, what: &str, names: impl Iterator<Item = &'a str>) {
        let mut names: Vec<&str> = names.collect();
        names.sort_unstable();
        if !names.is_empty() {
            let more = if names.len() > NAMED { ", …" } else { "" };
            self.wrong.push(format!(
                "{} {what}: {}{more}",
                names.len(),
                names[..names.len().min(NAMED)].join(", ")
            ));
        }
    }

    /// What is wrong apart from the counts, or in detail.
    pub(crate) fn wrong(&self) -> &[String] {
        &self.wrong
    }

    /// Whether every payment was charged once or stands in doubt, every broken message was set
    /// aside, and nothing else is wrong.
    pub(crate) fn is_right(&self) -> bool {
        self.charged_twice == 0 && self.lost == 0 && self.wrong.is_empty()
    }
}

fn names(letters: &[String]) -> HashSet<&str> {
    letters.iter().map(String::as_str).collect()
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let charged_twice = match self.repeats {
            Repeats::ChargeAgain => "payments, by the provider's ledger",
            Repeats::Deduplicated => "cannot be: the provider takes the id as its key",
        };
        let counted = |meaning: &str| match self.heard {
            Heard::All => meaning.to_owned(),
            Heard::WrittenDown => format!("{meaning}; as far as the workers wrote it down"),
        };
        let rows = [
            (
                "sent",
                self.sent,
                "messages, with copies and broken ones".to_owned(),
            ),
            (
                "delivered",
                self.delivered,
                counted("copies and redeliveries too"),
            ),
            (
                "charged",
                self.charged,
                "payments, by the provider's ledger".to_owned(),
            ),
            (
                "duplicates stopped",
                self.duplicates_stopped,
                counted("already handled"),
            ),
            ("retried", self.retried, counted("nothing had happened")),
            (
                "reconciled: happened",
                self.reconciled_happened,
                counted("unknown, then found at the provider"),
            ),
            (
                "reconciled: had not",
                self.reconciled_had_not,
                counted("unknown, then voided and charged anew"),
            ),
            (
                "in doubt",
                self.in_doubt,
                "by the broker; nobody can tell: for a person".to_owned(),
            ),
            (
                "dead letters",
                self.dead_letters,
                "by the broker; will never work".to_owned(),
            ),
            (
                "charged twice",
                self.charged_twice,
                charged_twice.to_owned(),
            ),
            (
                "lost",
                self.lost,
                "by the ledger and the broker; neither charged nor in doubt, broken ones: gone"
                    .to_owned(),
            ),
        ];
        let unconfirmed = (self.unconfirmed > 0).then_some((
            "unconfirmed",
            self.unconfirmed,
            "may not have arrived: not looked for".to_owned(),
        ));
        let killed = self.killed.map(|killed| {
            (
                "workers killed",
                killed,
                "while payments were sent".to_owned(),
            )
        });
        for (name, count, meaning) in rows.into_iter().chain(unconfirmed).chain(killed) {
            writeln!(f, "  {name:<21} {count:>8}   {meaning}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
