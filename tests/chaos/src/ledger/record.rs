//! The records of the ledger.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// One event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// When, in microseconds of the machine's monotonic clock, which all processes share.
    #[serde(rename = "t")]
    pub at: u64,
    /// The same by the wall clock, in milliseconds since 1970.
    #[serde(rename = "w")]
    pub wall: u64,
    /// The process that wrote it: `harness`, `sink`, or the name of a consumer.
    pub by: String,
    /// The event.
    #[serde(flatten)]
    pub what: What,
}

/// The kinds of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case")]
pub enum What {
    /// A message was published; its confirmation is pending.
    Attempted {
        /// The id of the message.
        id: String,
    },
    /// The broker confirmed a message.
    Confirmed {
        /// The id of the message.
        id: String,
    },
    /// The sink applied an effect.
    Effect {
        /// The id of the message.
        id: String,
        /// The consumer that requested it.
        consumer: String,
        /// The attempt that the store had granted.
        attempt: u32,
        /// Whether it was the first effect of the id.
        unique: Unique,
    },
    /// The sink refused an effect: its attempt was voided before.
    Refused {
        /// The id of the message.
        id: String,
        /// The consumer that requested it.
        consumer: String,
        /// The attempt that the store had granted.
        attempt: u32,
    },
    /// `reconcile` asked the sink whether an effect happened, and voided the attempt if not.
    Reconciled {
        /// The id of the message.
        id: String,
        /// The consumer that asked.
        consumer: String,
        /// If it did not happen, attempts up to this number are void.
        attempt: u32,
        /// The reply of the sink.
        found: Lookup,
    },
    /// A source returned a delivery.
    Received {
        /// The id of the message.
        id: String,
        /// Partition and offset, or the delivery tag.
        position: String,
    },
    /// A source revoked the deliveries of an assignment or a connection: the partition was
    /// reassigned, or the connection was lost.
    Revoked {
        /// Its number, which follows the `@` in positions.
        epoch: u64,
    },
    /// The store replied to an operation.
    Answered {
        /// The id of the message.
        id: String,
        /// The operation.
        operation: StoreOperation,
        /// The verdict or error.
        verdict: String,
    },
    /// A handler was started.
    Started {
        /// The id of the message.
        id: String,
        /// The attempt that the store had granted.
        attempt: u32,
        /// The number of the run in this process.
        run: u64,
    },
    /// A handler ended.
    Ended {
        /// The id of the message.
        id: String,
        /// The number of the run in this process.
        run: u64,
        /// The kind of end.
        how: HandlerEnd,
    },
    /// A delivery was settled.
    Settled {
        /// The id of the message.
        id: String,
        /// Partition and offset, or the delivery tag.
        position: String,
        /// The kind of end.
        how: SettlementKind,
        /// The proof of an acceptance, or the reason of a rejection.
        why: String,
    },
    /// A consumer was not scheduled for this long, up to the time of the record, although it was
    /// not frozen.
    Stalled {
        /// The duration, in milliseconds.
        ms: u64,
    },
    /// A message makes a consumer abort: its process ends with SIGABRT.
    Aborting {
        /// The id of the message.
        id: String,
    },
    /// The consumer ended with this error.
    Failed {
        /// The error.
        error: String,
    },
    /// The harness started or ended a fault.
    Fault {
        /// The number of the fault in the run.
        number: u64,
        /// The kind, as schedules name it.
        kind: String,
        /// The affected consumer; none for a fault of a server.
        target: Option<String>,
        /// Whether it started or ended.
        edge: FaultEdge,
    },
    /// A consumer process has ended.
    ProcessEnded {
        /// Its name.
        consumer: String,
        /// The signal that the harness sent.
        after: SentSignal,
        /// The exit status: `exit 0`, `signal 9`.
        status: String,
        /// The time since the signal, in milliseconds.
        took_ms: u64,
    },
    /// Effects reached nine tenths of the publishing rate again.
    Recovered {
        /// The faults that had ended, as the fault log names them.
        kinds: Vec<String>,
        /// The time since the end of the faults, in milliseconds, without the measured second
        /// itself.
        took_ms: u64,
        /// The idle CPU time meanwhile, in percent.
        idle: u64,
    },
    /// A message is in the dead letters or the in-doubt queue after the run.
    Rejected {
        /// The id of the message.
        id: String,
        /// The destination.
        place: RejectedTo,
        /// The reason header.
        reason: String,
    },
    /// A marker in the store after the run that is not done.
    Marker {
        /// The id of the message.
        id: String,
        /// The marker in the format of the store.
        record: String,
    },
    /// The messages that were not settled at the end of the run.
    Unsettled {
        /// The number, as the broker reports it.
        count: u64,
    },
    /// The committed offset of a partition changed, as Kafka reported it to the harness.
    Committed {
        /// The partition.
        partition: i32,
        /// The next offset to read.
        offset: i64,
    },
    /// The topic was deleted and recreated: its offsets start again at 0.
    TopicRecreated,
    /// The memory of a consumer.
    Sampled {
        /// Its name.
        consumer: String,
        /// Resident anonymous memory, in KiB.
        resident: u64,
    },
    /// The counters in the metrics of a consumer.
    Counted {
        /// Each counter that is not 0, with its labels.
        values: BTreeMap<String, u64>,
        /// Whether these are the final values.
        last: bool,
    },
    /// A file of the run contains a secret.
    Leaked {
        /// The server whose password it is.
        secret: String,
        /// The file and line.
        place: String,
    },
    /// RabbitMQ closed a channel with 406 PRECONDITION_FAILED.
    ChannelRefused {
        /// The line in its log.
        line: String,
    },
}

/// Whether an effect was the first of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unique {
    /// It was the first.
    First,
    /// The id had an effect before.
    Repeated,
}

/// The reply of the sink to `reconcile`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lookup {
    /// It happened.
    Happened,
    /// It did not happen, and the attempt is voided.
    Voided,
}

/// The operations of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StoreOperation {
    /// [`OperationKind::Claim`](oncegate::marker::OperationKind::Claim).
    Claim,
    /// [`OperationKind::Renew`](oncegate::marker::OperationKind::Renew).
    Renew,
    /// [`OperationKind::Complete`](oncegate::marker::OperationKind::Complete).
    Complete,
    /// [`OperationKind::Clear`](oncegate::marker::OperationKind::Clear) or `Withdraw`.
    Clear,
    /// [`OperationKind::Reject`](oncegate::marker::OperationKind::Reject).
    Reject,
    /// [`OperationKind::Doubt`](oncegate::marker::OperationKind::Doubt).
    Doubt,
    /// [`OperationKind::Resolve`](oncegate::marker::OperationKind::Resolve).
    Resolve,
    /// [`OperationKind::Forget`](oncegate::marker::OperationKind::Forget).
    Forget,
    /// [`OperationKind::Redrive`](oncegate::marker::OperationKind::Redrive).
    Redrive,
}

/// How a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HandlerEnd {
    /// It returned success.
    Ok,
    /// It returned a failure.
    Failed,
    /// It panicked.
    Panicked,
    /// It was dropped before it returned.
    Dropped,
}

/// How a delivery was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SettlementKind {
    /// Acknowledged.
    Accepted,
    /// Returned for redelivery.
    Released,
    /// Sent to the dead letters or the in-doubt queue.
    Rejected,
}

/// The start or the end of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultEdge {
    /// The start.
    Begin,
    /// The end.
    End,
}

/// The signal that a consumer received before it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SentSignal {
    /// SIGKILL.
    Kill,
    /// SIGTERM.
    Terminate,
    /// None.
    Nothing,
}

/// The destination of a rejected message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RejectedTo {
    /// The dead letters.
    DeadLetters,
    /// The in-doubt queue.
    InDoubt,
}

impl What {
    /// The id that it concerns, if any.
    pub fn id(&self) -> Option<&str> {
        match self {
            Self::Attempted { id }
            | Self::Confirmed { id }
            | Self::Effect { id, .. }
            | Self::Refused { id, .. }
            | Self::Reconciled { id, .. }
            | Self::Received { id, .. }
            | Self::Answered { id, .. }
            | Self::Started { id, .. }
            | Self::Ended { id, .. }
            | Self::Settled { id, .. }
            | Self::Aborting { id }
            | Self::Rejected { id, .. }
            | Self::Marker { id, .. } => Some(id),
            Self::TopicRecreated
            | Self::Revoked { .. }
            | Self::Stalled { .. }
            | Self::Recovered { .. }
            | Self::Fault { .. }
            | Self::ProcessEnded { .. }
            | Self::Failed { .. }
            | Self::Unsettled { .. }
            | Self::Committed { .. }
            | Self::Sampled { .. }
            | Self::Counted { .. }
            | Self::Leaked { .. }
            | Self::ChannelRefused { .. } => None,
        }
    }
}

/// A line of a history: seconds since boot, process, event and its fields.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}.{:06} {:<8} ",
            self.at / 1_000_000,
            self.at % 1_000_000,
            self.by
        )?;
        let fields = serde_json::to_value(&self.what).map_err(|_| fmt::Error)?;
        let what = fields
            .get("what")
            .and_then(|what| what.as_str())
            .unwrap_or_default();
        write!(f, "{what}")?;
        for (name, value) in fields
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
    fn a_record_is_formatted_as_one_line() {
        let effect = What::Effect {
            id: "a".into(),
            consumer: "c0.1".into(),
            attempt: 2,
            unique: Unique::First,
        };
        let record = Record {
            at: 12_000_345,
            wall: 0,
            by: "sink".into(),
            what: effect,
        };
        assert_eq!(
            record.to_string(),
            "12.000345 sink     effect attempt=2 consumer=c0.1 unique=first"
        );
    }
}
