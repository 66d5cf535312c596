//! What was sent: all that has to be accounted for.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::traffic::{Kind, Outgoing};

/// How far a message came on its way to the broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Sending {
    /// It is about to be sent: from now on it may be charged.
    Attempted,
    /// The broker has it: from now on it must not be lost.
    Confirmed,
}

/// What was sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sent {
    attempted: u64,
    confirmed: u64,
    /// The payments that may have reached the broker, with the amounts to charge: more than one
    /// only if the input says so.
    amounts: HashMap<String, HashSet<u64>>,
    /// The payments that the broker has confirmed.
    payments: HashSet<String>,
    /// The names of the broken messages that the broker has confirmed.
    broken: HashSet<String>,
}

impl Sent {
    /// All of these, confirmed.
    pub(crate) fn all(messages: &[Outgoing]) -> Self {
        let mut sent = Self::default();
        for message in messages {
            for sending in [Sending::Attempted, Sending::Confirmed] {
                sent.note(sending, message.name(), message.kind);
            }
        }
        sent
    }

    /// Adds a message that came so far; first that it was attempted, then that it was confirmed.
    /// A payment's name is its id.
    pub(crate) fn note(&mut self, sending: Sending, name: String, kind: Kind) {
        match sending {
            Sending::Attempted => self.attempted += 1,
            Sending::Confirmed => self.confirmed += 1,
        }
        match (sending, kind) {
            (Sending::Attempted, Kind::Valid { amount }) => {
                self.amounts.entry(name).or_default().insert(amount);
            }
            (Sending::Attempted, Kind::Malformed) => {}
            (Sending::Confirmed, Kind::Valid { .. }) => {
                self.payments.insert(name);
            }
            (Sending::Confirmed, Kind::Malformed) => {
                self.broken.insert(name);
            }
        }
    }

    /// How many messages the broker has confirmed, copies and broken ones too.
    pub(crate) fn confirmed(&self) -> u64 {
        self.confirmed
    }

    /// How many messages may have reached the broker or not: it never said.
    pub(crate) fn unconfirmed(&self) -> u64 {
        self.attempted.saturating_sub(self.confirmed)
    }

    /// The payments that the broker has confirmed.
    pub(crate) fn payments(&self) -> impl Iterator<Item = &str> {
        self.payments.iter().map(String::as_str)
    }

    /// The amounts to charge under this id; none if no valid payment was sent under it, not even
    /// without confirmation.
    pub(crate) fn amounts(&self, id: &str) -> Option<&HashSet<u64>> {
        self.amounts.get(id)
    }

    /// The names of the broken messages that the broker has confirmed.
    pub(crate) fn broken(&self) -> impl Iterator<Item = &str> {
        self.broken.iter().map(String::as_str)
    }
}
