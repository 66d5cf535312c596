//! The events of a delivery in its lifecycle.

use super::DoubtCause;
use crate::marker::{Finding, Verdict};

/// An event of one delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The delivery has an id.
    Arrived,
    /// The delivery has no id.
    NoId,
    /// The id of the delivery is not usable.
    UnusableId,
    /// The store answered the last operation.
    Answer(Verdict),
    /// The store did not answer, or its answer was lost.
    Unavailable,
    /// The claim was not sent to the store, or the store replied that it did not apply it.
    ClaimNotSent,
    /// The value under the key in the store is not a marker: another program wrote it.
    UnreadableMarker,
    /// The handler may start.
    MayRun,
    /// The handler may not start: the message has to run in isolation
    /// ([`Policy::isolation`](super::Policy::isolation)), and the maximum number of isolated
    /// messages runs.
    IsolationFull,
    /// The handler ended.
    Returned(Outcome),
    /// `reconcile` ended; `None` if it did not determine the outcome.
    Reconciled(Option<Finding>),
    /// The handler has no `reconcile`.
    CannotReconcile,
    /// The lease may have ended, or the store reported that it has.
    LeaseOver,
    /// The pause of the stage is over.
    Woke,
    /// The consumer stops, or the partition of the delivery is being revoked.
    Drain,
    /// The drain timeout is over: a handler that still runs is dropped, and the store is asked to
    /// record that its outcome is unknown.
    DrainOver,
    /// The consumer stops now, with operations unanswered: the delivery is abandoned.
    StopNow,
}

/// How a run of a handler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The effect happened.
    Done,
    /// Nothing happened: run again.
    Retry,
    /// Nothing happened, and a retry does not help: dead-letter.
    Reject,
    /// The payload does not parse.
    Unreadable,
    /// The router has no route for the message.
    NoRoute,
    /// The effect may have happened.
    Unknown(DoubtCause),
    /// The inbox has a record of the id, which was not looked up with the claim, or was committed
    /// after it: claim again, which looks it up.
    Recorded,
    /// The database of the inbox began no transaction, or the reply to a commit was lost: run
    /// again. The next transaction finds out whether the last one was committed.
    Unavailable,
}
