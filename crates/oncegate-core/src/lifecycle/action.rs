//! The actions that follow from the events of a delivery.

use std::time::Duration;

use super::Settlement;

/// What the owner of a delivery (the engine, the gate or the model checker) does next.
#[derive(Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a claim with a new token.
    NewClaim,
    /// Send the operation that the stage waits for,
    /// [`Stage::pending_operation`](super::Stage::pending_operation), with the token and the
    /// attempt of the current claim.
    Apply,
    /// Report [`Event::MayRun`](super::Event::MayRun) when the handler may start.
    AwaitRun,
    /// Start the handler.
    Run,
    /// Start `reconcile`.
    Reconcile,
    /// Report [`Event::Woke`](super::Event::Woke) after about this long, with jitter.
    Wake(Duration),
    /// Report [`Event::Arrived`](super::Event::Arrived) when the message may run in isolation.
    AwaitIsolation,
    /// Pass this settlement to the source.
    Settle(Settlement),
    /// No action: wait for the next event.
    Wait,
    /// Drop the delivery without settling it. The broker redelivers the message, whose id can be
    /// claimed again when the lease has ended.
    Abandon,
}
