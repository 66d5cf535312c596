//! The queue of deliveries and revocations from the driver to the source.

use std::collections::VecDeque;
use std::sync::Arc;

use oncegate_core::internal::Lock;
use oncegate_core::source::{Delivery, Incoming, Limit};
use tokio::sync::Notify;

/// The driver's end. Dropping it closes the queue.
pub(crate) struct IncomingSender(Arc<IncomingQueue>);

/// The source's end.
pub(crate) struct IncomingReceiver(Arc<IncomingQueue>);

/// The driver has stopped, and the queue is empty.
#[derive(Debug)]
pub(crate) struct IncomingClosed;

/// Bounded by the prefetch: deliveries of a lost channel are removed before the next one opens.
#[derive(Default)]
struct IncomingQueue {
    state: Lock<IncomingQueueState>,
    wake: Notify,
}

#[derive(Default)]
struct IncomingQueueState {
    /// Closed channels, by their epoch (`Receipt::epoch`), that the source has not reported yet.
    revoked: Vec<u64>,
    deliveries: VecDeque<Delivery>,
    phase: IncomingQueuePhase,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum IncomingQueuePhase {
    #[default]
    Open,
    /// No more deliveries are accepted or returned; revocations are.
    Stopped,
    /// The driver has stopped.
    Closed,
}

/// An empty queue.
pub(crate) fn incoming_queue() -> (IncomingSender, IncomingReceiver) {
    let queue = Arc::new(IncomingQueue::default());
    (IncomingSender(Arc::clone(&queue)), IncomingReceiver(queue))
}

impl IncomingSender {
    /// Adds a delivery. Drops it if the queue is stopped: closing the channel requeues its message.
    pub(crate) fn deliver(&self, delivery: Delivery) {
        let mut state = self.0.state.lock();
        if state.phase == IncomingQueuePhase::Open {
            state.deliveries.push_back(delivery);
            self.0.wake.notify_one();
        }
    }

    /// Removes all deliveries and reports the channel with this epoch as revoked: the channel is
    /// lost, and the broker redelivers its messages.
    pub(crate) fn revoke(&self, epoch: u64) {
        let mut state = self.0.state.lock();
        state.deliveries.clear();
        state.revoked.push(epoch);
        self.0.wake.notify_one();
    }
}

impl Drop for IncomingSender {
    fn drop(&mut self) {
        self.0.state.lock().phase = IncomingQueuePhase::Closed;
        self.0.wake.notify_one();
    }
}

impl IncomingReceiver {
    /// Waits for deliveries within the limit or for revocations, and moves them to `into`. Cancel-safe.
    pub(crate) async fn receive(
        &mut self,
        limit: Limit,
        into: &mut Vec<Incoming>,
    ) -> Result<(), IncomingClosed> {
        loop {
            if self.take(limit, into)? {
                return Ok(());
            }
            self.0.wake.notified().await;
        }
    }

    /// Moves all revocations and the deliveries within the limit to `into`; `false` if there are none.
    fn take(&self, limit: Limit, into: &mut Vec<Incoming>) -> Result<bool, IncomingClosed> {
        let mut state = self.0.state.lock();
        let before = into.len();
        into.extend(state.revoked.drain(..).map(Incoming::Revoked));
        let (mut count, mut bytes) = (0, 0);
        while count < limit.count
            && let Some(next) = state.deliveries.pop_front()
        {
            bytes += next.message.size();
            if count > 0 && bytes > limit.bytes {
                state.deliveries.push_front(next);
                break;
            }
            count += 1;
            into.push(Incoming::Delivery(next));
        }
        let has_taken = into.len() > before;
        if state.phase == IncomingQueuePhase::Closed && !has_taken {
            Err(IncomingClosed)
        } else {
            Ok(has_taken)
        }
    }

    /// Removes all deliveries and accepts no more.
    pub(crate) fn stop(&self) {
        let mut state = self.0.state.lock();
        state.deliveries.clear();
        if state.phase == IncomingQueuePhase::Open {
            state.phase = IncomingQueuePhase::Stopped;
        }
    }

    /// How many deliveries wait to be received.
    pub(crate) fn len(&self) -> usize {
        self.0.state.lock().deliveries.len()
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::message::Message;
    use oncegate_core::source::Receipt;

    use super::*;

    fn delivery(epoch: u64, position: u64) -> Delivery {
        Delivery::new(Message::new("12345"), Receipt::new(epoch, position))
    }

    fn summarize(incoming: &[Incoming]) -> Vec<(u64, Option<u64>)> {
        let show = |incoming: &Incoming| match incoming {
            Incoming::Revoked(epoch) => (*epoch, None),
            Incoming::Delivery(delivery) => {
                (delivery.receipt.epoch, Some(delivery.receipt.position))
            }
        };
        incoming.iter().map(show).collect()
    }

    async fn receive(
        receiver: &mut IncomingReceiver,
        count: usize,
        bytes: usize,
    ) -> Option<Vec<(u64, Option<u64>)>> {
        let mut into = Vec::new();
        let receiving = receiver.receive(Limit::new(count, bytes), &mut into);
        match tokio::time::timeout(std::time::Duration::from_millis(20), receiving).await {
            Ok(outcome) => outcome.ok().map(|()| summarize(&into)),
            Err(_) => Some(Vec::new()),
        }
    }

    #[tokio::test]
    async fn revoked_deliveries_are_removed_and_every_epoch_is_reported() {
        let (sender, mut receiver) = incoming_queue();
        for epoch in 1..=50 {
            (1..=100).for_each(|tag| sender.deliver(delivery(epoch, tag)));
            assert_eq!(receiver.len(), 100);
            sender.revoke(epoch);
        }
        sender.deliver(delivery(51, 1));
        let revoked: Vec<_> = (1..=50).map(|epoch| (epoch, None)).collect();
        assert_eq!(receive(&mut receiver, 0, 0).await, Some(revoked));
        assert_eq!(
            receive(&mut receiver, 9, 999).await,
            Some(vec![(51, Some(1))])
        );
    }

    #[tokio::test]
    async fn the_limits_hold_and_the_first_delivery_may_exceed_the_bytes() {
        let (sender, mut receiver) = incoming_queue();
        (1..=5).for_each(|tag| sender.deliver(delivery(1, tag)));
        assert_eq!(receive(&mut receiver, 0, 0).await, Some(vec![]));
        assert_eq!(
            receive(&mut receiver, 2, 999).await,
            Some(vec![(1, Some(1)), (1, Some(2))])
        );
        assert_eq!(receive(&mut receiver, 9, 1).await, Some(vec![(1, Some(3))]));
        let others = vec![(1, Some(4)), (1, Some(5))];
        assert_eq!(receive(&mut receiver, 9, 999).await, Some(others));
        receiver.stop();
        sender.deliver(delivery(1, 6));
        assert_eq!(receive(&mut receiver, 9, 999).await, Some(vec![]));
        sender.revoke(1);
        drop(sender);
        assert_eq!(receive(&mut receiver, 0, 0).await, Some(vec![(1, None)]));
        assert_eq!(receive(&mut receiver, 0, 0).await, None);
    }
}
