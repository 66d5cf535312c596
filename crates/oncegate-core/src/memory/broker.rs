//! A queue in this process, with a dead-letter queue and an in-doubt queue.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::internal::Lock;
use crate::lifecycle::{Reason, Settlement};
use crate::message::{HeadersBuilder, Message, Origin};
use crate::slots::{Slot, Slots};
use crate::source::{
    Connect, ConnectOptions, Delivery, FailureHistory, Incoming, Limit, Receipt, Settled, Source,
    SourceError, kept_headers,
};

/// A queue in this process. Clones share it; each [`MemoryBroker::source`] is a competing consumer.
///
/// The queue keeps a message until it is settled, and redelivers it when its source is dropped, as
/// a broker does when the connection of a consumer is lost.
#[derive(Clone, Debug)]
pub struct MemoryBroker(Arc<BrokerShared>);

/// A message that was rejected, and why.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The message, without `oncegate-*` headers.
    pub message: Message,
    /// Why it was rejected.
    pub reason: Reason,
    /// The history of its failures; `None` if the source got none with the rejection.
    pub failure_history: Option<FailureHistory>,
}

#[derive(Debug)]
struct BrokerShared {
    origin: Origin,
    queue: Lock<BrokerQueue>,
    /// Notified when a message can be received or was settled.
    changed: Notify,
}

#[derive(Debug, Default)]
struct BrokerQueue {
    /// All messages that are not settled: ready or delivered.
    messages: Slots<StoredMessage>,
    ready: VecDeque<Slot>,
    dead_letters: Vec<DeadLetter>,
    in_doubt: Vec<DeadLetter>,
    next_source: u64,
    delivered: u64,
}

#[derive(Debug)]
struct StoredMessage {
    message: Message,
    failures: u32,
    /// `None` while the message is ready.
    delivery: Option<MessageDelivery>,
}

/// The delivery of a message to a source that has not settled it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MessageDelivery {
    source: u64,
    /// The serial number of the delivery, which its receipt contains.
    tag: u64,
}

impl MemoryBroker {
    /// An empty queue of this name.
    pub fn new(name: &str) -> Self {
        let origin = Origin {
            name: Arc::from(name),
            ..Origin::default()
        };
        Self(Arc::new(BrokerShared {
            origin,
            queue: Lock::default(),
            changed: Notify::new(),
        }))
    }

    /// Appends a message. Its origin is this queue; `origin.system`, for traces, is kept.
    pub fn publish(&self, mut message: Message) {
        message.origin = Origin {
            system: message.origin.system,
            ..self.0.origin.clone()
        };
        let mut queue = self.0.queue.lock();
        let slot = queue.messages.insert(StoredMessage {
            message,
            failures: 0,
            delivery: None,
        });
        queue.ready.push_back(slot);
        drop(queue);
        self.0.changed.notify_waiters();
    }

    /// A consumer of this queue.
    pub fn source(&self) -> MemorySource {
        let mut queue = self.0.queue.lock();
        queue.next_source += 1;
        MemorySource {
            shared: self.0.clone(),
            id: queue.next_source,
            state: MemorySourceState::Open,
        }
    }

    /// The dead letters so far.
    pub fn dead_letters(&self) -> Vec<DeadLetter> {
        self.0.queue.lock().dead_letters.clone()
    }

    /// The messages in the in-doubt queue so far.
    pub fn in_doubt(&self) -> Vec<DeadLetter> {
        self.0.queue.lock().in_doubt.clone()
    }

    /// The number of unsettled messages: ready or delivered.
    pub fn unsettled(&self) -> usize {
        self.0.queue.lock().messages.len()
    }

    /// The number of deliveries so far.
    pub fn delivered(&self) -> u64 {
        self.0.queue.lock().delivered
    }

    /// Waits until all messages are settled.
    pub async fn all_settled(&self) {
        loop {
            let mut changed = std::pin::pin!(self.0.changed.notified());
            changed.as_mut().enable();
            if self.unsettled() == 0 {
                return;
            }
            changed.await;
        }
    }
}

/// One consumer of a [`MemoryBroker`].
#[derive(Debug)]
pub struct MemorySource {
    shared: Arc<BrokerShared>,
    id: u64,
    state: MemorySourceState,
}

#[derive(Debug, PartialEq, Eq)]
enum MemorySourceState {
    Open,
    Stopped,
}

#[async_trait]
impl Connect for MemorySource {
    type Source = Self;

    async fn connect(self, _: ConnectOptions) -> Result<Self, SourceError> {
        Ok(self)
    }
}

#[async_trait]
impl Source for MemorySource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        if self.state == MemorySourceState::Stopped {
            return std::future::pending().await;
        }
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            if self.shared.queue.lock().deliver(self.id, limit, into) {
                return Ok(());
            }
            changed.await;
        }
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        let mut queue = self.shared.queue.lock();
        for settled in &mut *settled {
            let Some(slot) = queue.delivered_slot(&settled.delivery.receipt) else {
                continue;
            };
            match settled.settlement {
                Settlement::Accept(_) => queue.messages.discard(slot),
                Settlement::Release { failures, .. } => {
                    queue.ready.push_back(slot);
                    if let Some(stored) = queue.messages.at_mut(slot) {
                        (stored.failures, stored.delivery) = (failures, None);
                    }
                }
                Settlement::Reject(reason) => {
                    let Some(stored) = queue.messages.remove(slot) else {
                        continue;
                    };
                    let dead_letter = DeadLetter {
                        message: without_reserved(stored.message),
                        reason,
                        failure_history: settled.failure_history.take().map(|history| *history),
                    };
                    if reason.is_in_doubt() {
                        queue.in_doubt.push(dead_letter)
                    } else {
                        queue.dead_letters.push(dead_letter)
                    }
                }
            }
        }
        settled.clear();
        drop(queue);
        self.shared.changed.notify_waiters();
        Ok(())
    }

    async fn stop(&mut self) {
        self.state = MemorySourceState::Stopped;
    }

    async fn close(self: Box<Self>, _deadline: Instant) -> Result<(), SourceError> {
        Ok(()) // dropping the source requeues unsettled messages
    }
}

/// A message without `oncegate-*` headers.
fn without_reserved(message: Message) -> Message {
    let mut kept = HeadersBuilder::default();
    kept_headers(&message).for_each(|(name, value)| kept.push(name, value));
    Message {
        headers: kept.finish(),
        ..message
    }
}

impl BrokerQueue {
    /// Delivers ready messages within the limit. Returns whether it delivered one.
    fn deliver(&mut self, source: u64, limit: Limit, into: &mut Vec<Incoming>) -> bool {
        let mut bytes = 0;
        let before = into.len();
        while into.len() - before < limit.count {
            let next = self.ready.front().copied();
            let Some((slot, stored)) =
                next.and_then(|slot| Some((slot, self.messages.at_mut(slot)?)))
            else {
                break;
            };
            let size = stored.message.size();
            if into.len() > before && bytes + size > limit.bytes {
                break;
            }
            self.ready.pop_front();
            bytes += size;
            self.delivered += 1;
            let tag = self.delivered;
            stored.delivery = Some(MessageDelivery { source, tag });
            into.push(Incoming::Delivery(Delivery {
                message: stored.message.clone(),
                receipt: Receipt {
                    epoch: source,
                    partition: slot.index as u32,
                    position: tag,
                },
                failures: stored.failures,
            }));
        }
        into.len() > before
    }

    /// The message of a delivery; `None` if it was requeued or settled since.
    fn delivered_slot(&self, receipt: &Receipt) -> Option<Slot> {
        let slot = self.messages.slot(receipt.partition as usize)?;
        let delivery = self.messages.at(slot)?.delivery?;
        (delivery.tag == receipt.position).then_some(slot)
    }
}

impl Drop for MemorySource {
    /// Requeues unsettled messages at the front, as a broker does.
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        let delivered = |slot: Slot| {
            let delivery = queue.messages.at(slot)?.delivery?;
            (delivery.source == self.id).then_some((delivery.tag, slot))
        };
        let mut own: Vec<_> = queue.messages.slots().filter_map(delivered).collect();
        own.sort_unstable();
        for (_, slot) in own.into_iter().rev() {
            if let Some(stored) = queue.messages.at_mut(slot) {
                stored.delivery = None;
            }
            queue.ready.push_front(slot);
        }
        drop(queue);
        self.shared.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::headers;

    #[tokio::test]
    async fn forged_headers_are_stripped_from_dead_letters() {
        let broker = MemoryBroker::new("payments");
        for id in ["1", "2"] {
            broker.publish(
                Message::new("x")
                    .with_header("id", id)
                    .with_header(headers::ID, "victim")
                    .with_header(headers::REASON, "refused"),
            );
        }
        let (mut source, mut incoming) = (broker.source(), Vec::new());
        source
            .receive(
                Limit {
                    count: 2,
                    bytes: 1_000,
                },
                &mut incoming,
            )
            .await
            .expect("two messages are ready");
        let reasons = [
            Reason::MissingId,
            Reason::InDoubt(crate::lifecycle::DoubtCause::HandlerReported),
        ];
        let settled = incoming
            .into_iter()
            .zip(reasons)
            .map(|(incoming, reason)| match incoming {
                Incoming::Delivery(delivery) => Settled {
                    delivery,
                    settlement: Settlement::Reject(reason),
                    failure_history: None,
                },
                Incoming::Revoked(epoch) => panic!("{epoch}"),
            });
        source
            .settle(&mut settled.collect())
            .await
            .expect("a memory source accepts settlements");
        let rejected = [broker.dead_letters(), broker.in_doubt()].concat();
        let headers: Vec<_> = rejected
            .iter()
            .flat_map(|dead_letter| dead_letter.message.headers.iter())
            .collect();
        assert_eq!(
            headers,
            [(&b"id"[..], Some(&b"1"[..])), (b"id", Some(b"2"))]
        );
    }
}
