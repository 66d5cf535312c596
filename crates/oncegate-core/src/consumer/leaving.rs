//! How deliveries and the consumer itself come to their end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Engine, Mode};

use crate::decode::Decode;
use crate::error::Error;
use crate::fault;
use crate::handler::Handler;
use crate::lanes::{Lane, Waited};
use crate::lease::Lease;
use crate::lifecycle::{Event, Stage};
use crate::slots::Slot;

impl<H: Handler, D: Decode> Engine<H, D> {
    /// A delivery's place is free: its lane goes on, and so does the next that runs alone.
    pub(super) fn left(
        &mut self,
        slot: Slot,
        lane: Option<Lane>,
        lease: Option<Arc<Lease>>,
        bytes: usize,
    ) {
        self.flights.remove(slot);
        self.bytes -= bytes;
        if lease.is_some() {
            self.given_up.push(slot.place);
        }
        self.end_alone(slot);
        let Some(lane) = lane else { return };
        if self.lanes.withdraw(lane, slot) == Waited::Yes {
            return;
        }
        self.turns.extend(self.lanes.leave(lane));
    }

    /// If this was the one that ran alone, the next that waits for it may claim.
    pub(super) fn end_alone(&mut self, slot: Slot) {
        if self.alone != Some(slot) {
            return;
        }
        let waits = |slot: &Slot| {
            self.flights
                .at(*slot)
                .is_some_and(|flight| matches!(flight.passage.stage(), Stage::New(_)))
        };
        self.alone = std::iter::from_fn(|| self.alone_next.pop_front()).find(waits);
        self.next_up
            .extend(self.alone.map(|slot| (slot, Event::Arrived)));
    }

    /// Deliveries of this epoch belong to someone else soon.
    pub(super) fn revoked(&mut self, epoch: u64) {
        let theirs: Vec<Slot> = self
            .flights
            .slots()
            .filter(|slot| {
                self.flights
                    .at(*slot)
                    .is_some_and(|it| it.passage.delivery().receipt.epoch == epoch)
            })
            .collect();
        for slot in theirs {
            self.leaves(slot);
        }
    }

    /// A delivery begins nothing new from here on.
    pub(super) fn leaves(&mut self, slot: Slot) {
        if let Some(flight) = self.flights.at_mut(slot) {
            flight.passage.leave();
            self.some_left = true;
            self.happens(slot, Event::Drain);
        }
    }

    /// Begins to drain: nothing new comes in, what has not started is given back.
    pub(super) async fn drain(&mut self, because: Option<Error>, bound: Duration) {
        let until = Instant::now() + bound;
        match &mut self.mode {
            Mode::Draining {
                until: earlier,
                because: first,
            } => {
                *earlier = until.min(*earlier);
                if first.is_none() {
                    *first = because;
                }
                return;
            }
            mode @ Mode::Taking => *mode = Mode::Draining { until, because },
        }
        tracing::info!(in_flight = self.flights.len(), "draining");
        self.source.stop().await;
        fault::point("drain.begun");
        let all: Vec<Slot> = self.flights.slots().collect();
        for slot in all {
            self.leaves(slot);
        }
    }

    /// Lets go of what did not finish, and closes the source.
    pub(super) async fn leave(mut self) -> Result<(), Error> {
        let left: Vec<Slot> = self.flights.slots().collect();
        if !left.is_empty() {
            tracing::warn!(
                in_flight = left.len(),
                "the drain is over; what did not finish comes back after its lease"
            );
        }
        if !self.late.is_empty() {
            let count = self.late.len();
            tracing::warn!(
                count,
                "handled without the gate, and the store could not be told: a copy may run again"
            );
        }
        for slot in left {
            self.happens(slot, Event::DrainOver);
        }
        self.settle().await;
        let bound = Instant::now()
            + self
                .settings
                .drain
                .clamp(Duration::from_secs(1), Duration::from_secs(10));
        fault::point("drain.closing");
        let closed = self.source.close(bound).await;
        fault::point("drain.closed");
        match self.mode {
            Mode::Draining {
                because: Some(error),
                ..
            } => Err(error),
            _ => Ok(closed?),
        }
    }
}
