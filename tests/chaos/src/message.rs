//! Generates the messages of a run from a seed.

use serde::{Deserialize, Serialize};

/// The header with the id.
pub const ID_HEADER: &str = "id";
/// RabbitMQ: the header with the key, or with the id if the message has no key.
pub const KEY_HEADER: &str = "key";
/// The number of keys for each 100 messages per second: enough that the sequential handlers of a
/// key keep up.
const KEYS: u32 = 40;
/// The interval of messages that make a process abort, in seconds of messages.
const ABORT_EVERY: u64 = 40;

/// A message to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutgoingMessage {
    /// The id. Its prefix selects the behavior of the handler: see [`HandlerBehavior::of`].
    pub id: String,
    /// The key, if any: a prefix of the id.
    pub key: Option<String>,
    /// [`Work`] as JSON.
    pub body: String,
}

/// The body of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// How long the handler runs, in milliseconds.
    pub ms: u64,
}

/// What the handler of a message does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandlerBehavior {
    /// It has an effect and succeeds.
    Work,
    /// It always fails.
    Fail,
    /// It always panics.
    Panic,
    /// It never returns.
    Hang,
    /// It makes the process abort.
    Abort,
}

impl HandlerBehavior {
    /// The behavior by the prefix of the id: `fail-`, `panic-`, `hang-`, `abort-`, or any other for
    /// success.
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

/// The infinite messages of a run: half of them have a key, some never succeed, some are sent
/// twice. The same seed gives the same messages.
#[derive(Clone, Debug)]
pub struct Messages {
    random: fastrand::Rng,
    next: u64,
    aborts: Aborts,
    kinds: Kinds,
    keys: u32,
    /// One in this many hundred messages is long.
    rare: u16,
    abort_every: u64,
    /// Pending copies, each with the number of the message after which it is sent.
    copies: Vec<(u64, OutgoingMessage)>,
}

/// Whether some messages make consumers abort, each several until its crashes are exhausted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aborts {
    /// None.
    Never,
    /// One every 40 seconds.
    Some,
}

/// Which messages are generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kinds {
    /// All.
    All,
    /// None whose handler never returns: its attempts would delay the end of a run.
    WithoutHanging,
}

impl Messages {
    /// Messages from this seed for this rate per second.
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

    /// The number of different messages so far.
    pub fn different(&self) -> u64 {
        self.next
    }

    /// The pending copies, to send after the last message.
    pub fn pending_copies(&mut self) -> Vec<OutgoingMessage> {
        std::mem::take(&mut self.copies)
            .into_iter()
            .map(|(_, copy)| copy)
            .collect()
    }

    /// Mostly short, some longer, a few longer than a lease; at higher rates fewer are long.
    fn milliseconds(&mut self) -> u64 {
        match self.random.u16(0..100 * self.rare) {
            0 => 2_500,
            1..10 => self.random.u64(100..400),
            _ => self.random.u64(5..30),
        }
    }
}

impl Iterator for Messages {
    type Item = OutgoingMessage;

    fn next(&mut self) -> Option<OutgoingMessage> {
        if let Some(due) = self.copies.iter().position(|(after, _)| *after < self.next) {
            return Some(self.copies.swap_remove(due).1);
        }
        let number = self.next;
        self.next += 1;
        let ms = self.milliseconds();
        let body = serde_json::to_string(&Work { ms }).expect("a number");
        let without_key = |prefix: &str| OutgoingMessage {
            id: format!("{prefix}-{number:07}"),
            key: None,
            body: body.clone(),
        };
        // Hanging messages come early: each of their attempts takes the whole handler timeout.
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
                OutgoingMessage {
                    id: format!("{key}-{number:07}"),
                    key: Some(key),
                    body,
                }
            }
        };
        if self.random.u8(0..100) < 4 {
            // The copy of a message with a key follows at once, so that it keeps its position in
            // the order of the key.
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
    fn a_seed_determines_the_messages() {
        let first = |seed| {
            Messages::new(seed, Aborts::Never, Kinds::All, 100)
                .take(500)
                .collect::<Vec<_>>()
        };
        assert_eq!(first(1), first(1));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn messages_have_all_behaviors_copies_and_keys() {
        let messages: Vec<OutgoingMessage> = Messages::new(3, Aborts::Some, Kinds::All, 100)
            .take(5_000)
            .collect();
        let different: HashSet<&str> = messages.iter().map(|it| it.id.as_str()).collect();
        assert!(
            (150..250).contains(&(messages.len() - different.len())),
            "copies: {}",
            messages.len() - different.len()
        );
        for behavior in [
            HandlerBehavior::Work,
            HandlerBehavior::Fail,
            HandlerBehavior::Panic,
            HandlerBehavior::Hang,
            HandlerBehavior::Abort,
        ] {
            assert!(
                messages
                    .iter()
                    .any(|it| HandlerBehavior::of(&it.id) == behavior),
                "{behavior:?}"
            );
        }
        let hangs =
            |message: &OutgoingMessage| HandlerBehavior::of(&message.id) == HandlerBehavior::Hang;
        assert!(
            !Messages::new(3, Aborts::Some, Kinds::WithoutHanging, 100)
                .take(5_000)
                .any(|it| hangs(&it))
        );
        let keyed = messages.iter().filter(|it| it.key.is_some()).count();
        assert!((2_200..2_800).contains(&keyed), "{keyed}");
    }

    #[test]
    fn a_copy_precedes_later_messages_of_its_key() {
        let mut latest = std::collections::HashMap::new();
        for message in Messages::new(5, Aborts::Some, Kinds::All, 100).take(5_000) {
            if let Some(key) = message.key {
                let before = latest.insert(key, message.id.clone());
                assert!(before.is_none_or(|before| before <= message.id));
            }
        }
    }
}
