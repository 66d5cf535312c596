//! A queue in this process, with dead letters and an in-doubt queue.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hashbrown::HashMap;
use tokio::sync::Notify;

use crate::lifecycle::{Reason, Settlement};
use crate::message::{HeadersBuilder, Message, Origin};
use crate::source::{
    Delivery, FailureHistory, Incoming, Limit, Open, Receipt, Settled, Source, SourceError,
    kept_headers,
};

/// A queue in this process. Cloning shares it; each [`MemoryBroker::source`] is one of its
/// competing consumers.
///
/// It keeps a delivery until it is settled, and hands it out again when its source is dropped, as a
/// broker does when a consumer dies.
#[derive(Clone, Debug)]
pub struct MemoryBroker(Arc<Shared>);

/// A message that was rejected, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadLetter {
    /// The message, without inbound `oncegate-*` headers.
    pub message: Message,
    /// Why it stands here.
    pub reason: Reason,
    /// What happened to it, where something did.
    pub story: Option<FailureHistory>,
}

#[derive(Debug)]
struct Shared {
    origin: Origin,
    queue: Mutex<Queue>,
    /// Something can be received, or was settled.
    changed: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    ready: VecDeque<Held>,
    /// By the time when each is due, and in the order of their releases.
    delayed: BTreeMap<(Instant, u64), Held>,
    releases: u64,
    unsettled: HashMap<u64, (u64, Held)>,
    dead_letters: Vec<DeadLetter>,
    in_doubt: Vec<DeadLetter>,
    next_tag: u64,
    next_source: u64,
    delivered: u64,
}

#[derive(Clone, Debug)]
struct Held {
    message: Message,
    failures: u32,
}

impl MemoryBroker {
    /// An empty queue of this name.
    pub fn new(name: &str) -> Self {
        let origin = Origin {
            name: Arc::from(name),
            ..Origin::default()
        };
        Self(Arc::new(Shared {
            origin,
            queue: Mutex::default(),
            changed: Notify::new(),
        }))
    }

    /// Adds a message at the end. Its origin is this queue, in the system that it names.
    pub fn publish(&self, mut message: Message) {
        message.origin = Origin {
            system: message.origin.system,
            ..self.0.origin.clone()
        };
        self.0.lock().ready.push_back(Held {
            message,
            failures: 0,
        });
        self.0.changed.notify_waiters();
    }

    /// A consumer of this queue.
    pub fn source(&self) -> MemorySource {
        let mut queue = self.0.lock();
        queue.next_source += 1;
        MemorySource {
            shared: self.0.clone(),
            name: queue.next_source,
            stopped: Intake::Open,
        }
    }

    /// What was rejected so far.
    pub fn dead_letters(&self) -> Vec<DeadLetter> {
        self.0.lock().dead_letters.clone()
    }

    /// What nobody could find out about so far.
    pub fn in_doubt(&self) -> Vec<DeadLetter> {
        self.0.lock().in_doubt.clone()
    }

    /// How many messages are not settled: waiting, delayed, or handed out.
    pub fn unsettled(&self) -> usize {
        let queue = self.0.lock();
        queue.ready.len() + queue.delayed.len() + queue.unsettled.len()
    }

    /// How many deliveries were handed out.
    pub fn delivered(&self) -> u64 {
        self.0.lock().delivered
    }

    /// Waits until everything is settled.
    pub async fn drained(&self) {
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

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One consumer of a [`MemoryBroker`].
#[derive(Debug)]
pub struct MemorySource {
    shared: Arc<Shared>,
    name: u64,
    stopped: Intake,
}

#[derive(Debug, PartialEq, Eq)]
enum Intake {
    Open,
    Stopped,
}

#[async_trait]
impl Open for MemorySource {
    type Source = Self;

    async fn open(self) -> Result<Self, SourceError> {
        Ok(self)
    }
}

#[async_trait]
impl Source for MemorySource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        if self.stopped == Intake::Stopped {
            return std::future::pending().await;
        }
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            let wake = {
                let mut queue = self.shared.lock();
                queue.wake(Instant::now());
                if queue.hand_out(self.name, limit, into) {
                    return Ok(());
                }
                queue.delayed.first_key_value().map(|((at, _), _)| *at)
            };
            match wake {
                Some(at) => {
                    let _ = tokio::time::timeout(
                        at.saturating_duration_since(Instant::now()) + Duration::from_millis(1),
                        changed,
                    )
                    .await;
                }
                None => changed.await,
            }
        }
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        let mut queue = self.shared.lock();
        for Settled {
            delivery,
            settlement,
            story,
        } in settled.drain(..)
        {
            let Some((_, held)) = queue.unsettled.remove(&delivery.receipt.position) else {
                continue;
            };
            match settlement {
                Settlement::Accept(_) => {}
                Settlement::Release { after, failures } => {
                    queue.releases += 1;
                    let place = (Instant::now() + after, queue.releases);
                    queue.delayed.insert(place, Held { failures, ..held });
                }
                Settlement::Reject(reason) => {
                    let letter = DeadLetter {
                        message: without_reserved(held.message),
                        reason,
                        story: story.map(|story| *story),
                    };
                    if reason.is_in_doubt() {
                        queue.in_doubt.push(letter)
                    } else {
                        queue.dead_letters.push(letter)
                    }
                }
            }
        }
        drop(queue);
        self.shared.changed.notify_waiters();
        Ok(())
    }

    async fn stop(&mut self) {
        self.stopped = Intake::Stopped;
    }

    async fn close(self: Box<Self>, _deadline: Instant) -> Result<(), SourceError> {
        Ok(()) // what is not settled goes back when this is dropped
    }
}

fn without_reserved(message: Message) -> Message {
    let mut kept = HeadersBuilder::default();
    kept_headers(&message).for_each(|(name, value)| kept.push(name, value));
    Message {
        headers: kept.finish(),
        ..message
    }
}

impl Queue {
    /// Moves what has waited long enough to the end of the queue.
    fn wake(&mut self, now: Instant) {
        while let Some(due) = self
            .delayed
            .first_entry()
            .filter(|entry| entry.key().0 <= now)
        {
            self.ready.push_back(due.remove());
        }
    }

    /// Hands out what is ready; whether there was anything.
    fn hand_out(&mut self, source: u64, limit: Limit, into: &mut Vec<Incoming>) -> bool {
        let mut bytes = 0;
        let before = into.len();
        while into.len() - before < limit.count {
            let Some(size) = self.ready.front().map(|held| held.message.size()) else {
                break;
            };
            if into.len() > before && bytes + size > limit.bytes {
                break;
            }
            let Some(held) = self.ready.pop_front() else {
                break;
            };
            bytes += size;
            self.next_tag += 1;
            self.delivered += 1;
            let receipt = Receipt {
                epoch: source,
                partition: 0,
                position: self.next_tag,
            };
            into.push(Incoming::Delivery(Delivery {
                message: held.message.clone(),
                receipt,
                failures: held.failures,
            }));
            self.unsettled.insert(self.next_tag, (source, held));
        }
        into.len() > before
    }
}

impl Drop for MemorySource {
    /// What this consumer had and did not settle goes to the front of the queue, as a broker does
    /// it.
    fn drop(&mut self) {
        let mut queue = self.shared.lock();
        let mut tags: Vec<u64> = queue
            .unsettled
            .iter()
            .filter(|(_, (owner, _))| *owner == self.name)
            .map(|(tag, _)| *tag)
            .collect();
        tags.sort_unstable_by(|a, b| b.cmp(a));
        for tag in tags {
            if let Some((_, held)) = queue.unsettled.remove(&tag) {
                queue.ready.push_front(held);
            }
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
            .expect("messages");
        let reasons = [
            Reason::MissingId,
            Reason::InDoubt(crate::lifecycle::DoubtCause::Said),
        ];
        let settled = incoming
            .into_iter()
            .zip(reasons)
            .map(|(incoming, reason)| match incoming {
                Incoming::Delivery(delivery) => Settled {
                    delivery,
                    settlement: Settlement::Reject(reason),
                    story: None,
                },
                Incoming::Revoked(epoch) => panic!("{epoch}"),
            });
        source
            .settle(&mut settled.collect())
            .await
            .expect("settled");
        let letters = [broker.dead_letters(), broker.in_doubt()].concat();
        let headers: Vec<_> = letters
            .iter()
            .flat_map(|letter| letter.message.headers.iter())
            .collect();
        assert_eq!(
            headers,
            [(&b"id"[..], Some(&b"1"[..])), (b"id", Some(b"2"))]
        );
    }
}
