//! Deliveries on their way from the engine to the source.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oncegate_core::source::{Delivery, Incoming, Limit};
use tokio::sync::Notify;

/// The engine's end. Dropped, it ends the inbox.
pub(crate) struct Writer(Arc<Inbox>);

/// The source's end.
pub(crate) struct Reader(Arc<Inbox>);

/// The engine has ended.
#[derive(Debug)]
pub(crate) struct Ended;

/// Bounded by the prefetch: what one channel left here goes before the next one opens.
#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    wake: Notify,
}

#[derive(Default)]
struct State {
    revoked: Vec<u64>,
    deliveries: VecDeque<Delivery>,
    life: Life,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Life {
    #[default]
    Open,
    /// Nothing more is handed out.
    Stopped,
    Ended,
}

/// An empty inbox.
pub(crate) fn inbox() -> (Writer, Reader) {
    let inbox = Arc::new(Inbox::default());
    (Writer(Arc::clone(&inbox)), Reader(inbox))
}

impl Inbox {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writer {
    pub(crate) fn deliver(&self, delivery: Delivery) {
        let mut state = self.0.state();
        if state.life == Life::Open {
            state.deliveries.push_back(delivery);
            self.0.wake.notify_one();
        }
    }

    /// In this order, before all that came in meanwhile.
    pub(crate) fn deliver_first(&self, deliveries: Vec<Delivery>) {
        let mut state = self.0.state();
        if state.life == Life::Open && !deliveries.is_empty() {
            deliveries
                .into_iter()
                .rev()
                .for_each(|delivery| state.deliveries.push_front(delivery));
            self.0.wake.notify_one();
        }
    }

    /// The channel of this epoch is gone: what came by it and still lies here is delivered again.
    pub(crate) fn revoke(&self, epoch: u64) {
        let mut state = self.0.state();
        state.deliveries.clear();
        state.revoked.push(epoch);
        self.0.wake.notify_one();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.0.state().life = Life::Ended;
        self.0.wake.notify_one();
    }
}

impl Reader {
    /// Waits until there is something that the limit allows, and takes it. Cancel-safe.
    pub(crate) async fn receive(
        &mut self,
        limit: Limit,
        into: &mut Vec<Incoming>,
    ) -> Result<(), Ended> {
        loop {
            if self.take(limit, into)? {
                return Ok(());
            }
            self.0.wake.notified().await;
        }
    }

    /// Whether there was something.
    fn take(&self, limit: Limit, into: &mut Vec<Incoming>) -> Result<bool, Ended> {
        let mut state = self.0.state();
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
        let found = into.len() > before;
        if state.life == Life::Ended && !found {
            Err(Ended)
        } else {
            Ok(found)
        }
    }

    /// Hands nothing more out.
    pub(crate) fn stop(&self) {
        let mut state = self.0.state();
        state.deliveries.clear();
        if state.life == Life::Open {
            state.life = Life::Stopped;
        }
    }

    /// How many deliveries lie here.
    pub(crate) fn len(&self) -> usize {
        self.0.state().deliveries.len()
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::message::Message;
    use oncegate_core::source::Receipt;

    use super::*;

    fn delivery(epoch: u64, position: u64) -> Delivery {
        Delivery {
            message: Message::new("12345"),
            receipt: Receipt {
                epoch,
                partition: 0,
                position,
            },
            failures: 0,
        }
    }

    fn shown(incoming: &[Incoming]) -> Vec<(u64, Option<u64>)> {
        let show = |incoming: &Incoming| match incoming {
            Incoming::Revoked(epoch) => (*epoch, None),
            Incoming::Delivery(delivery) => {
                (delivery.receipt.epoch, Some(delivery.receipt.position))
            }
        };
        incoming.iter().map(show).collect()
    }

    async fn received(
        reader: &mut Reader,
        count: usize,
        bytes: usize,
    ) -> Option<Vec<(u64, Option<u64>)>> {
        let mut into = Vec::new();
        let receiving = reader.receive(Limit { count, bytes }, &mut into);
        match tokio::time::timeout(std::time::Duration::from_millis(20), receiving).await {
            Ok(outcome) => outcome.ok().map(|()| shown(&into)),
            Err(_) => Some(Vec::new()),
        }
    }

    #[tokio::test]
    async fn a_lost_channel_leaves_nothing_behind_however_often() {
        let (writer, mut reader) = inbox();
        for epoch in 1..=50 {
            (1..=100).for_each(|tag| writer.deliver(delivery(epoch, tag)));
            assert_eq!(reader.len(), 100);
            writer.revoke(epoch);
        }
        writer.deliver(delivery(51, 1));
        let revoked: Vec<_> = (1..=50).map(|epoch| (epoch, None)).collect();
        assert_eq!(received(&mut reader, 0, 0).await, Some(revoked));
        assert_eq!(
            received(&mut reader, 9, 999).await,
            Some(vec![(51, Some(1))])
        );
    }

    #[tokio::test]
    async fn the_limits_hold_and_the_first_delivery_comes_however_large() {
        let (writer, mut reader) = inbox();
        (1..=5).for_each(|tag| writer.deliver(delivery(1, tag)));
        assert_eq!(received(&mut reader, 0, 0).await, Some(vec![]));
        assert_eq!(
            received(&mut reader, 2, 999).await,
            Some(vec![(1, Some(1)), (1, Some(2))])
        );
        assert_eq!(received(&mut reader, 9, 1).await, Some(vec![(1, Some(3))]));
        writer.deliver_first(vec![delivery(1, 8), delivery(1, 9)]);
        let first = vec![(1, Some(8)), (1, Some(9)), (1, Some(4)), (1, Some(5))];
        assert_eq!(received(&mut reader, 9, 999).await, Some(first));
        reader.stop();
        writer.deliver(delivery(1, 6));
        writer.deliver_first(vec![delivery(1, 7)]);
        assert_eq!(received(&mut reader, 9, 999).await, Some(vec![]));
        writer.revoke(1);
        drop(writer);
        assert_eq!(received(&mut reader, 0, 0).await, Some(vec![(1, None)]));
        assert_eq!(received(&mut reader, 0, 0).await, None);
    }
}
