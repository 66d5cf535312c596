//! The messages of a run: what a seed makes of them.

use serde::{Deserialize, Serialize};

/// The header that holds the id.
pub const ID_HEADER: &str = "id";
/// The header that holds the key, or the id of what has none: on RabbitMQ.
pub const KEY_HEADER: &str = "key";
/// How many keys there are for 100 messages a second: enough that a key's handlers, one after the
/// other, keep up.
const KEYS: u32 = 40;
/// After how many seconds' messages comes one that makes its process abort.
const ABORT_EVERY: u64 = 40;

/// A message to be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Its id. What it begins with says what becomes of it: see [`Fate::of`].
    pub id: String,
    /// Its key, if it has one: then the id begins with it.
    pub key: Option<String>,
    /// [`Work`] in JSON.
    pub body: String,
}

/// The body of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// How long it takes to handle it, in milliseconds.
    pub ms: u64,
}

/// What the handler of a message does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It works, and has an effect.
    Work,
    /// It always says that it failed.
    Fail,
    /// It always panics.
    Panic,
    /// It never ends.
    Hang,
    /// It makes the process abort.
    Abort,
}

impl Fate {
    /// Of a message by its id: those that never work begin with `fail-`, `panic-`, `hang-` or
    /// `abort-`.
    pub fn of(id: &str) -> Self {
        match id.split_once('-').map(|(before, _)| before) {
            Some("fail") => Self::Fail,
            Some("panic") => Self::Panic,
            Some("hang") => Self::Hang,
            Some("abort") => Self::Abort,
            _ => Self::Work,
        }
    }
}

/// The messages of a run, without end: half of them with a key, some that never work, some sent
/// twice. The same seed makes the same.
#[derive(Clone, Debug)]
pub struct Messages {
    random: fastrand::Rng,
    next: u64,
    aborts: Aborts,
    kinds: Kinds,
    keys: u32,
    /// Of how many hundred one is long.
    rare: u16,
    abort_every: u64,
    /// Copies to be sent, and after which message.
    copies: Vec<(u64, Outgoing)>,
}

/// Whether there are messages that make a consumer abort: each ends several consumers until it is
/// given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aborts {
    /// None.
    Never,
    /// One in the messages of 40 seconds.
    Some,
}

/// Which messages there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kinds {
    /// All.
    All,
    /// None that never ends, which holds up the end of a run for as long as its attempts take.
    WithoutTheStuck,
}

impl Messages {
    /// By this seed, so many a second.
    pub fn new(seed: u64, aborts: Aborts, kinds: Kinds, rate: u32) -> Self {
        Self {
            random: fastrand::Rng::with_seed(seed ^ 0x6d65_7373_6167_6573),
            next: 0,
            aborts,
            kinds,
            rare: u16::try_from(rate / 300)
                .unwrap_or(u16::MAX / 100)
                .clamp(1, 100),
            keys: KEYS * rate.div_ceil(100).max(1),
            abort_every: ABORT_EVERY * u64::from(rate.max(10)),
            copies: Vec::new(),
        }
    }

    /// How many different ones there were so far.
    pub fn different(&self) -> u64 {
        self.next
    }

    /// The copies that are still to be sent, when no more messages are.
    pub fn left(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.copies)
            .into_iter()
            .map(|(_, copy)| copy)
            .collect()
    }

    /// Mostly short, some longer, a few longer than a lease: the more come in a second, the fewer
    /// of them are long.
    fn milliseconds(&mut self) -> u64 {
        match self.random.u16(0..100 * self.rare) {
            0 => 2_500,
            1..10 => self.random.u64(100..400),
            _ => self.random.u64(5..30),
        }
    }
}

impl Iterator for Messages {
    type Item = Outgoing;

    fn next(&mut self) -> Option<Outgoing> {
        if let Some(due) = self.copies.iter().position(|(after, _)| *after < self.next) {
            return Some(self.copies.swap_remove(due).1);
        }
        let number = self.next;
        self.next += 1;
        let ms = self.milliseconds();
        let body = serde_json::to_string(&Work { ms }).expect("a number");
        let without_key = |prefix: &str| Outgoing {
            id: format!("{prefix}-{number:07}"),
            key: None,
            body: body.clone(),
        };
        // What hangs comes early: each of its attempts takes as long as a handler may.
        let message = match (number, self.random.u16(0..1_000)) {
            (50 | 150, _) if self.kinds == Kinds::All => without_key("hang"),
            (number, _) if self.aborts == Aborts::Some && number % self.abort_every == 300 => {
                without_key("abort")
            }
            (_, 0..3) => without_key("fail"),
            (_, 3..6) => without_key("panic"),
            (_, 6..500) => without_key("u"),
            _ => {
                let key = format!("k{:02}", self.random.u32(0..self.keys));
                Outgoing {
                    id: format!("{key}-{number:07}"),
                    key: Some(key),
                    body,
                }
            }
        };
        if self.random.u8(0..100) < 4 {
            // A copy of what has a key comes at once, so that it does not stand behind what was
            // sent later.
            let after = if message.key.is_some() {
                0
            } else {
                self.random.u64(0..200)
            };
            self.copies.push((number + after, message.clone()));
        }
        Some(message)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_seed_makes_the_same_messages() {
        let first = |seed| {
            Messages::new(seed, Aborts::Never, Kinds::All, 100)
                .take(500)
                .collect::<Vec<_>>()
        };
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn there_is_something_of_everything() {
        let messages: Vec<Outgoing> = Messages::new(3, Aborts::Some, Kinds::All, 100)
            .take(5_000)
            .collect();
        let different: HashSet<&str> = messages.iter().map(|it| it.id.as_str()).collect();
        assert!(
            (150..250).contains(&(messages.len() - different.len())),
            "copies: {}",
            messages.len() - different.len()
        );
        for fate in [Fate::Work, Fate::Fail, Fate::Panic, Fate::Hang, Fate::Abort] {
            assert!(
                messages.iter().any(|it| Fate::of(&it.id) == fate),
                "{fate:?}"
            );
        }
        let hangs = |message: &Outgoing| Fate::of(&message.id) == Fate::Hang;
        assert!(
            !Messages::new(3, Aborts::Some, Kinds::WithoutTheStuck, 100)
                .take(5_000)
                .any(|it| hangs(&it))
        );
        let keyed = messages.iter().filter(|it| it.key.is_some()).count();
        assert!((2_200..2_800).contains(&keyed), "{keyed}");
    }

    #[test]
    fn a_copy_stands_before_whatever_has_its_key_and_was_sent_later() {
        let mut latest = std::collections::HashMap::new();
        for message in Messages::new(5, Aborts::Some, Kinds::All, 100).take(5_000) {
            if let Some(key) = message.key {
                let before = latest.insert(key, message.id.clone());
                assert!(before.is_none_or(|before| before <= message.id));
            }
        }
    }
}
