//! Sends operations to the store in batches.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::late::LateCompletions;
use crate::boot_time::BootTime;
use crate::breaker::{Breaker, BreakerState};
use crate::clock::now;
use crate::fault;
use crate::marker::{Operation, OperationKind, Verdict};
use crate::slots::Slot;
use crate::source::SourceProperties;
use crate::store::{Store, StoreError};

/// The queued operations, and the batches that the store has not answered.
///
/// One `apply` contains outcomes, late completions and claims, in this order. A batch is sent even
/// if it is not full. While the breaker is open, nothing is sent.
pub(super) struct StoreBatcher {
    store: Arc<dyn Store>,
    /// The maximum number of concurrent batches while the store answers.
    max_batches: usize,
    /// The maximum number of outcomes, of late completions and of claims in one batch.
    max_operations: usize,
    /// Deliveries whose claim is to be sent.
    claims: Vec<Slot>,
    /// Deliveries with an operation other than a claim that is to be sent.
    outcomes: Vec<Slot>,
    /// Completions of messages that were handled without a claim while the store was unavailable
    /// (`Outage::PassThrough`).
    pub(super) late: LateCompletions,
    pub(super) breaker: Breaker,
    /// Whether the store reported that it is misconfigured. Then no claim is sent.
    misconfigured: bool,
    /// The number of claims that were sent and are not answered. A delivery of
    /// [`Suspects`](super::suspects::Suspects) starts only when there is none.
    claims_sent: usize,
    /// The calls of [`Store::apply`] in progress.
    applies: Vec<BoxFuture<'static, AnsweredBatch>>,
    /// The empty vectors of an answered batch, whose memory is used again.
    spare: (Vec<Option<Slot>>, Vec<Operation>),
}

/// A batch that the store has answered.
pub(super) struct AnsweredBatch {
    /// The delivery of each operation; `None` for a late completion.
    pub(super) slots: Vec<Option<Slot>>,
    pub(super) operations: Vec<Operation>,
    /// The number of claims of deliveries among the operations.
    pub(super) claims: usize,
    /// When the batch was sent, by the clock of leases.
    pub(super) sent: BootTime,
    /// When the batch was sent, for its duration.
    pub(super) began: Instant,
    /// One answer for each operation, in order.
    pub(super) answers: Vec<Result<Verdict, StoreError>>,
}

impl StoreBatcher {
    pub(super) fn new(store: Arc<dyn Store>, properties: SourceProperties) -> Self {
        let max_batches = if properties.overlapping_batches {
            store.parallel_applies().max(1)
        } else {
            1
        };
        Self {
            store,
            max_batches,
            max_operations: properties.max_store_batch.max(1),
            claims: Vec::new(),
            outcomes: Vec::new(),
            late: LateCompletions::new(),
            breaker: Breaker::closed(),
            misconfigured: false,
            claims_sent: 0,
            applies: Vec::new(),
            spare: Default::default(),
        }
    }

    /// Queues the claim of a delivery.
    #[inline]
    pub(super) fn enqueue_claim(&mut self, slot: Slot) {
        self.claims.push(slot);
    }

    /// Queues an operation of a delivery other than a claim.
    #[inline]
    pub(super) fn enqueue_outcome(&mut self, slot: Slot) {
        self.outcomes.push(slot);
    }

    pub(super) fn take_claims(&mut self) -> Vec<Slot> {
        std::mem::take(&mut self.claims)
    }

    /// The number of claims that were sent and are not answered.
    #[inline]
    pub(super) fn claims_sent(&self) -> usize {
        self.claims_sent
    }

    /// Records that the store is misconfigured. Returns whether this is the first report.
    pub(super) fn set_misconfigured(&mut self) -> bool {
        !std::mem::replace(&mut self.misconfigured, true)
    }

    pub(super) fn is_misconfigured(&self) -> bool {
        self.misconfigured
    }

    /// Whether no batch is unanswered, and all late completions are recorded or, because the store
    /// is misconfigured, cannot be.
    pub(super) fn has_recorded_late_completions(&self) -> bool {
        (self.late.is_empty() || self.misconfigured) && self.applies.is_empty()
    }

    /// How many batches may be in progress now; `None` while the breaker is open.
    pub(super) fn max_batches(&self, now: Instant) -> Option<usize> {
        match self.breaker.state(now) {
            BreakerState::Closed => Some(self.max_batches),
            BreakerState::HalfOpen => Some(1),
            BreakerState::Open => None,
        }
    }

    /// Sends the operations that are due, until `max_batches` batches are in progress. `operation`
    /// returns the operation of a delivery, or `None` if the delivery was settled. A claim for
    /// which `may_claim` returns false stays queued, in order.
    pub(super) fn send(
        &mut self,
        max_batches: usize,
        now: Instant,
        may_claim: impl Fn(Slot, &LateCompletions) -> bool,
        mut operation: impl FnMut(Slot) -> Option<Operation>,
    ) {
        while self.applies.len() < max_batches {
            let (mut slots, mut operations) = std::mem::take(&mut self.spare);
            let outcomes = self.outcomes.len().min(self.max_operations);
            for slot in self.outcomes.drain(..outcomes) {
                if let Some(outcome) = operation(slot) {
                    slots.push(Some(slot));
                    operations.push(outcome);
                }
            }
            if now >= self.late.due {
                operations.extend(self.late.take(self.max_operations));
                slots.resize(operations.len(), None);
            }
            let before_claims = operations.len();
            let may_claim = |slot: &mut Slot| may_claim(*slot, &self.late);
            let claims = self.claims.extract_if(.., may_claim);
            for slot in claims.take(self.max_operations) {
                if let Some(claim) = operation(slot) {
                    slots.push(Some(slot));
                    operations.push(claim);
                }
            }
            if operations.is_empty() {
                self.spare = (slots, operations);
                return;
            }
            let claims = operations.len() - before_claims;
            self.claims_sent += claims;
            self.applies.push(Box::pin(apply(
                self.store.clone(),
                slots,
                operations,
                claims,
            )));
        }
    }

    /// The next answered batch, without waiting.
    pub(super) fn try_answered(&mut self) -> Option<AnsweredBatch> {
        self.answered().now_or_never()
    }

    /// Waits for the next answered batch. Polls all of them, because they are few.
    pub(super) async fn answered(&mut self) -> AnsweredBatch {
        let (index, batch) = poll_fn(|poller| {
            let applies = self.applies.iter_mut().enumerate();
            for (index, apply) in applies {
                if let Poll::Ready(batch) = apply.as_mut().poll(poller) {
                    return Poll::Ready((index, batch));
                }
            }
            Poll::Pending
        })
        .await;
        drop(self.applies.remove(index));
        batch
    }

    /// Ends a batch whose answers were processed, and keeps its vectors.
    pub(super) fn finish_batch(&mut self, batch: AnsweredBatch) {
        let AnsweredBatch {
            mut slots,
            mut operations,
            claims,
            ..
        } = batch;
        self.claims_sent -= claims;
        slots.clear();
        operations.clear();
        self.spare = (slots, operations);
    }

    /// When to try again to send the queued operations; `None` if no operation waits for the
    /// breaker, or a batch is unanswered (its answer wakes the loop).
    pub(super) fn next_try_at(
        &self,
        may_claim: impl Fn(Slot, &LateCompletions) -> bool,
    ) -> Option<Instant> {
        if !self.applies.is_empty() {
            return None;
        }
        let next_try = self.breaker.next_try_at();
        let late = (!self.late.is_empty())
            .then(|| next_try.map_or(self.late.due, |next| next.max(self.late.due)));
        let retry = next_try.filter(|_| {
            let may_claim = |slot: &Slot| may_claim(*slot, &self.late);
            !self.outcomes.is_empty() || self.claims.iter().any(may_claim)
        });
        late.into_iter().chain(retry).min()
    }

    /// Processes the answer to an operation of a late completion: after its claim was granted, its
    /// completion is queued. The pause after an error is 1 s, or `longest_pause` if that is
    /// shorter.
    pub(super) fn on_late_answer(
        &mut self,
        operation: &Operation,
        answer: &Result<Verdict, StoreError>,
        now: Instant,
        longest_pause: Duration,
    ) {
        match answer {
            Ok(Verdict::Granted(attempts) | Verdict::InDoubt(attempts)) => {
                self.late.put_back(Operation {
                    kind: OperationKind::Complete,
                    attempt: attempts.number,
                    ..operation.clone()
                });
            }
            Ok(Verdict::Duplicate | Verdict::Done { .. }) => self.late.finish(&operation.key),
            Ok(verdict) => {
                self.late.finish(&operation.key);
                let key = operation.key.as_str();
                tracing::warn!(
                    key,
                    ?verdict,
                    "completion not recorded: message was handled without the store, and a redelivery of it may run again"
                );
            }
            Err(StoreError::UnreadableMarker(why)) => {
                self.late.finish(&operation.key);
                tracing::error!(key = operation.key.as_str(), error = %why, "completion not recorded: message was handled without the store, and its marker is unreadable");
            }
            Err(_) => {
                self.late.due = now + longest_pause.min(Duration::from_secs(1));
                self.late.put_back(operation.clone());
            }
        }
    }
}

async fn apply(
    store: Arc<dyn Store>,
    slots: Vec<Option<Slot>>,
    operations: Vec<Operation>,
    claims: usize,
) -> AnsweredBatch {
    let (sent, began) = (BootTime::now(), now());
    fault::before(&operations);
    let mut answers = store.apply(&operations).await;
    fault::after(&operations);
    if answers.len() != operations.len() {
        answers.clear();
        answers.resize_with(operations.len(), || {
            Err(StoreError::Unknown(
                "the store returned a different number of verdicts than operations; correct its `apply`".into(),
            ))
        });
    }
    AnsweredBatch {
        slots,
        operations,
        claims,
        sent,
        began,
        answers,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{Key, MessageId};
    use crate::marker::{Guarantee, Terms, Token};
    use crate::memory::MemoryStore;
    use crate::slots::Slots;

    fn operation(id: usize, kind: OperationKind) -> Operation {
        Operation {
            key: Key::new(&MessageId::new(id.to_string()).expect("an id")),
            kind,
            token: Token(id as u128 + 1),
            attempt: u32::from(kind != OperationKind::Claim),
            terms: Terms {
                guarantee: Guarantee::EffectivelyOnce,
                lease: Duration::from_secs(30),
                window: Duration::from_secs(60),
                fingerprint: None,
            },
        }
    }

    fn batcher(max_store_batch: usize) -> StoreBatcher {
        let properties = SourceProperties {
            max_store_batch,
            ..SourceProperties::default()
        };
        StoreBatcher::new(Arc::new(MemoryStore::new()), properties)
    }

    async fn sent(
        batcher: &mut StoreBatcher,
        may_claim: impl Fn(Slot) -> bool,
        kinds: &[OperationKind],
    ) -> Vec<(usize, OperationKind)> {
        let operation = |slot: Slot| Some(operation(slot.index, kinds[slot.index]));
        batcher.send(1, Instant::now(), |slot, _| may_claim(slot), operation);
        let Some(batch) = batcher.try_answered() else {
            return Vec::new();
        };
        let sent = batch.slots.iter().zip(&batch.operations);
        let sent = sent.map(|(slot, it)| (slot.map_or(usize::MAX, |slot| slot.index), it.kind));
        let sent = sent.collect();
        batcher.finish_batch(batch);
        assert_eq!(batcher.claims_sent(), 0);
        sent
    }

    #[tokio::test]
    async fn outcomes_are_sent_before_claims_and_claims_keep_their_order() {
        let (mut batcher, mut slots) = (batcher(2), Slots::new(6));
        let kinds = [
            OperationKind::Claim,
            OperationKind::Claim,
            OperationKind::Complete,
            OperationKind::Claim,
            OperationKind::Complete,
            OperationKind::Complete,
        ];
        for kind in kinds {
            let slot = slots.insert(());
            match kind {
                OperationKind::Claim => batcher.enqueue_claim(slot),
                _ => batcher.enqueue_outcome(slot),
            }
        }
        let first = sent(&mut batcher, |slot| slot.index != 0, &kinds).await;
        assert_eq!(
            first,
            [
                (2, OperationKind::Complete),
                (4, OperationKind::Complete),
                (1, OperationKind::Claim),
                (3, OperationKind::Claim)
            ]
        );
        let second = sent(&mut batcher, |_| false, &kinds).await;
        assert_eq!(second, [(5, OperationKind::Complete)]);
        assert_eq!(
            sent(&mut batcher, |_| true, &kinds).await,
            [(0, OperationKind::Claim)]
        );
        assert_eq!(sent(&mut batcher, |_| true, &kinds).await, []);
    }

    #[tokio::test]
    async fn a_late_completion_claims_completes_and_holds_back_claims_of_its_id() {
        let mut batcher = batcher(10);
        let claim = operation(7, OperationKind::Claim);
        assert!(batcher.late.add(claim.clone()).is_ok());
        for expected in [OperationKind::Claim, OperationKind::Complete] {
            assert!(batcher.late.must_wait(&claim.key) && !batcher.has_recorded_late_completions());
            batcher.send(1, Instant::now(), |_, _| true, |_| None);
            let batch = batcher.try_answered().expect("the memory store answers");
            assert_eq!((batch.operations[0].kind, batch.slots[0]), (expected, None));
            for (operation, answer) in batch.operations.iter().zip(&batch.answers) {
                batcher.on_late_answer(operation, answer, Instant::now(), Duration::ZERO);
            }
            batcher.finish_batch(batch);
        }
        assert!(batcher.late.all_confirmed() && batcher.has_recorded_late_completions());
    }

    #[test]
    fn an_open_breaker_sends_nothing_until_its_next_try() {
        let (mut batcher, mut slots) = (batcher(10), Slots::new(1));
        let now = Instant::now();
        assert_eq!(batcher.max_batches(now), Some(1));
        batcher.enqueue_claim(slots.insert(()));
        batcher.breaker.not_answered(now);
        assert_eq!(batcher.max_batches(now), None);
        let next_try = batcher.next_try_at(|_, _| true).expect("a claim waits");
        assert!(next_try > now && batcher.max_batches(next_try) == Some(1));
        assert_eq!(batcher.next_try_at(|_, _| false), None);
    }
}
