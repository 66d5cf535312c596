//! One thing that happened, and all that may happen.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// When, in microseconds of the machine's monotonic clock, which all processes share.
    #[serde(rename = "t")]
    pub at: u64,
    /// The same by the wall clock, in milliseconds since 1970.
    #[serde(rename = "w")]
    pub wall: u64,
    /// Which process wrote it: `player`, `sink`, or a consumer's name.
    pub by: String,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

/// What may happen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum What {
    /// A message was handed to the broker.
    Attempted {
        /// The message's.
        id: String,
    },
    /// The broker has confirmed it.
    Confirmed {
        /// The message's.
        id: String,
    },
    /// The sink applied an effect.
    Effect {
        /// The message's.
        id: String,
        /// Who asked for it.
        consumer: String,
        /// The attempt that the store had granted.
        attempt: u32,
        /// Whether the unique table took it, or had it already.
        unique: Unique,
    },
    /// The sink refused an effect: its attempt was voided before.
    Refused {
        /// The message's.
        id: String,
        /// Who asked for it.
        consumer: String,
        /// The attempt that the store had granted.
        attempt: u32,
    },
    /// A consumer asked the sink whether an effect had happened, and to void it if not.
    Looked {
        /// The message's.
        id: String,
        /// Who asked.
        consumer: String,
        /// Attempts up to this are void now, if it had not.
        attempt: u32,
        /// What the sink said.
        found: Found,
    },
    /// A source handed a delivery over.
    Received {
        /// The message's.
        id: String,
        /// Partition and offset, or the delivery tag.
        position: String,
    },
    /// A source took back what it had handed over with this epoch: it is another's, or its
    /// connection is gone.
    Revoked {
        /// As the positions have it.
        epoch: u64,
    },
    /// The store answered.
    Answered {
        /// The message's.
        id: String,
        /// What was asked.
        ask: Asked,
        /// What it said.
        verdict: String,
    },
    /// A handler was started.
    Started {
        /// The message's.
        id: String,
        /// The attempt that the store had granted.
        attempt: u32,
        /// A number of its own among the handlers of this consumer.
        run: u64,
    },
    /// A handler ended.
    Ended {
        /// The message's.
        id: String,
        /// The handler's.
        run: u64,
        /// How.
        how: Ending,
    },
    /// A delivery was settled.
    Settled {
        /// The message's.
        id: String,
        /// Partition and offset, or the delivery tag.
        position: String,
        /// How.
        how: Settling,
        /// The proof of an acceptance, or the reason of a rejection.
        why: String,
    },
    /// A consumer noticed that it had not run for so long, though nobody had frozen it: it ended at
    /// the record's time.
    Stalled {
        /// For how long.
        ms: u64,
    },
    /// A consumer is about to abort, because a message says so: its process ends with SIGABRT.
    Aborting {
        /// The message's.
        id: String,
    },
    /// The consumer ends with this error.
    Failed {
        /// What it says.
        error: String,
    },
    /// The player began or ended a fault.
    Fault {
        /// A number of its own among the faults of the run.
        number: u64,
        /// The kind, as schedules name it.
        kind: String,
        /// The consumer that it was done to; none if a server.
        target: Option<String>,
        /// Which of the two.
        edge: Edge,
    },
    /// A consumer process has ended.
    Gone {
        /// Its name.
        consumer: String,
        /// What the player had done to it.
        after: Sent,
        /// As the system says it: `exit 0`, `signal 9`.
        status: String,
        /// How long it took from the signal, in milliseconds.
        took_ms: u64,
    },
    /// Effects came at nine tenths of the publisher's rate again.
    Recovered {
        /// After the ends of these faults, as the fault log names them.
        kinds: Vec<String>,
        /// How long that took, without the second for which they did, in milliseconds.
        took_ms: u64,
        /// How much of the processors' time nobody needed meanwhile, in percent.
        idle: u64,
    },
    /// A message stands in the dead letters or in doubt after the run.
    Aside {
        /// The message's.
        id: String,
        /// Where.
        place: Place,
        /// Why.
        reason: String,
    },
    /// A marker in the store after the run that is not done.
    Marker {
        /// The message's.
        id: String,
        /// What stands there.
        record: String,
    },
    /// How many deliveries were left when the run had to end.
    Left {
        /// By the broker's count.
        count: u64,
    },
    /// The group has committed this, as Kafka told a client of the player's; written when it has
    /// changed.
    Committed {
        /// Of the topic.
        partition: i32,
        /// The next to be read.
        offset: i64,
    },
    /// The topic is deleted and made anew: its offsets begin again.
    MadeAnew,
    /// How much memory a consumer had, as the system told the player.
    Sampled {
        /// Its name.
        consumer: String,
        /// What it had resident for itself, without pages of files, in KiB.
        resident: u64,
    },
    /// What a consumer's own metrics have counted.
    Counted {
        /// Each counter that is not 0, with its labels.
        values: BTreeMap<String, u64>,
        /// Whether it has ended well, and counts nothing any more.
        last: bool,
    },
    /// A secret that the run was given stands in one of its files.
    Leaked {
        /// Whose password it is.
        secret: String,
        /// Which file, and which line of it.
        place: String,
    },
    /// The broker closed a channel because it was told something that it refuses (406).
    ChannelRefused {
        /// The line in its log.
        line: String,
    },
}

/// Whether an effect was the first of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unique {
    /// The unique table took it.
    Accepted,
    /// It was there already.
    Known,
}

/// What the sink says when it is asked for an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    /// It happened.
    Happened,
    /// It did not, and is void now.
    Voided,
}

/// What a store may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Asked {
    /// May I handle this id now?
    Claim,
    /// I still hold it.
    Renew,
    /// It happened.
    Complete,
    /// Free it for another attempt.
    Clear,
    /// Keep it from running.
    Reject,
    /// Nobody knows.
    Doubt,
    /// It is known now.
    Resolve,
    /// An operator frees it.
    Forget,
    /// [`Ask::SendBack`](oncegate::marker::Ask::SendBack).
    SendBack,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ending {
    /// It said that it happened.
    Ok,
    /// It said that it failed.
    Failed,
    /// It panicked.
    Panicked,
    /// It was dropped before it ended.
    Dropped,
}

/// How a delivery was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Settling {
    /// It is done with.
    Accepted,
    /// It comes back.
    Released,
    /// It goes to the dead letters or in doubt.
    Rejected,
}

/// One end of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Edge {
    /// It begins.
    Begin,
    /// It is over.
    End,
}

/// What a consumer was told before it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sent {
    /// SIGKILL.
    Kill,
    /// SIGTERM.
    Terminate,
    /// Nothing: it ended by itself.
    Nothing,
}

/// Where a message stands that was set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// The dead letters.
    DeadLetters,
    /// The in-doubt queue.
    InDoubt,
}

impl What {
    /// The id that it is about, if it is about one.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Attempted { id }
            | Self::Confirmed { id }
            | Self::Effect { id, .. }
            | Self::Refused { id, .. }
            | Self::Looked { id, .. }
            | Self::Received { id, .. }
            | Self::Answered { id, .. }
            | Self::Started { id, .. }
            | Self::Ended { id, .. }
            | Self::Settled { id, .. }
            | Self::Aborting { id }
            | Self::Aside { id, .. }
            | Self::Marker { id, .. } => Some(id),
            Self::MadeAnew
            | Self::Revoked { .. }
            | Self::Stalled { .. }
            | Self::Recovered { .. }
            | Self::Fault { .. }
            | Self::Gone { .. }
            | Self::Failed { .. }
            | Self::Left { .. }
            | Self::Committed { .. }
            | Self::Sampled { .. }
            | Self::Counted { .. }
            | Self::Leaked { .. }
            | Self::ChannelRefused { .. } => None,
        }
    }
}

/// As a history tells it: seconds since the machine began, who, what.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}.{:06} {:<8} ",
            self.at / 1_000_000,
            self.at % 1_000_000,
            self.by
        )?;
        let said = serde_json::to_value(&self.what).map_err(|_| fmt::Error)?;
        let what = said
            .get("what")
            .and_then(|what| what.as_str())
            .unwrap_or_default();
        write!(f, "{what}")?;
        for (name, value) in said
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(name, _)| *name != "what" && *name != "id")
        {
            match value.as_str() {
                Some(text) => write!(f, " {name}={text}")?,
                None => write!(f, " {name}={value}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_as_a_line_of_a_history() {
        let effect = What::Effect {
            id: "a".into(),
            consumer: "c0.1".into(),
            attempt: 2,
            unique: Unique::Accepted,
        };
        let record = Record {
            at: 12_000_345,
            wall: 0,
            by: "sink".into(),
            what: effect,
        };
        assert_eq!(
            record.to_string(),
            "12.000345 sink     effect attempt=2 consumer=c0.1 unique=accepted"
        );
    }
}
