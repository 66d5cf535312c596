//! A source and a store that record their operations in the ledger.

use std::sync::Arc;
use std::time::Instant;

use oncegate::lifecycle::Settlement;
use oncegate::marker::{Guarantee, Operation, OperationKind, Verdict};
use oncegate::source::Connect;
use oncegate::source::{
    ConnectOptions, Delivery, Incoming, Limit, QueueLevel, Settled, SourceProperties,
};
use oncegate::{Message, Persistence, Source, SourceError, Store, StoreError, async_trait};

use crate::ledger::{Log, SettlementKind, StoreOperation, What};
use crate::message::ID_HEADER;

/// A source or a store with a ledger file.
#[derive(Debug)]
pub struct Recorded<T> {
    inner: T,
    log: Arc<Log>,
}

impl<T> Recorded<T> {
    /// Records the operations of `inner` in this ledger file.
    pub fn new(inner: T, log: Arc<Log>) -> Self {
        Self { inner, log }
    }
}

#[async_trait]
impl<S: Connect> Connect for Recorded<S> {
    type Source = Recorded<S::Source>;

    async fn connect(self, options: ConnectOptions) -> Result<Self::Source, SourceError> {
        Ok(Recorded {
            inner: self.inner.connect(options).await?,
            log: self.log,
        })
    }
}

#[async_trait]
impl<S: Source> Source for Recorded<S> {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        let before = into.len();
        let received = self.inner.receive(limit, into).await;
        self.log.write_all(
            into.get(before..)
                .unwrap_or_default()
                .iter()
                .map(|incoming| match incoming {
                    Incoming::Delivery(delivery) => What::Received {
                        id: id(&delivery.message),
                        position: position(delivery),
                    },
                    Incoming::Revoked(epoch) => What::Revoked { epoch: *epoch },
                }),
        );
        received
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        self.log.write_all(settled.iter().map(|settled| {
            let (how, why) = match &settled.settlement {
                Settlement::Accept(proof) => (SettlementKind::Accepted, proof.as_str()),
                Settlement::Release { .. } => (SettlementKind::Released, "released"),
                Settlement::Reject(reason) => (SettlementKind::Rejected, reason.as_str()),
            };
            What::Settled {
                id: id(&settled.delivery.message),
                position: position(&settled.delivery),
                how,
                why: why.to_owned(),
            }
        }));
        self.inner.settle(settled).await
    }

    async fn stop(&mut self) {
        self.inner.stop().await;
    }

    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        Box::new(self.inner).close(deadline).await
    }

    fn queue_level(&mut self, level: QueueLevel) {
        self.inner.queue_level(level);
    }

    fn properties(&self) -> SourceProperties {
        self.inner.properties()
    }
}

#[async_trait]
impl<S: Store> Store for Recorded<S> {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let answers = self.inner.apply(operations).await;
        self.log
            .write_all(operations.iter().zip(&answers).map(|(operation, answer)| {
                let key = operation.key.as_str();
                let id = key.split_once('|').map_or(key, |(_, id)| id).to_owned();
                What::Answered {
                    id,
                    operation: recorded_operation(operation.kind),
                    verdict: verdict(answer),
                }
            }));
        answers
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.inner.preflight(guarantee).await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.inner.persistence().await
    }

    /// Renewals are not recorded.
    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        self.inner.for_renewals()
    }

    fn parallel_applies(&self) -> usize {
        self.inner.parallel_applies()
    }
}

fn id(message: &Message) -> String {
    String::from_utf8_lossy(message.headers.last(ID_HEADER).unwrap_or_default()).into_owned()
}

fn position(delivery: &Delivery) -> String {
    let receipt = &delivery.receipt;
    format!(
        "{}/{}@{}",
        receipt.partition, receipt.position, receipt.epoch
    )
}

fn recorded_operation(kind: OperationKind) -> StoreOperation {
    match kind {
        OperationKind::Claim => StoreOperation::Claim,
        OperationKind::Renew => StoreOperation::Renew,
        OperationKind::Complete => StoreOperation::Complete,
        OperationKind::Clear(_) | OperationKind::Withdraw => StoreOperation::Clear,
        OperationKind::Reject(_) => StoreOperation::Reject,
        OperationKind::Doubt => StoreOperation::Doubt,
        OperationKind::Resolve(_) => StoreOperation::Resolve,
        OperationKind::Redrive { .. } => StoreOperation::Redrive,
        OperationKind::Forget { .. } => StoreOperation::Forget,
    }
}

/// The verdict in the form that the checker parses.
fn verdict(answer: &Result<Verdict, StoreError>) -> String {
    match answer {
        Ok(Verdict::Granted(attempts)) => format!("granted {}", attempts.number),
        Ok(Verdict::InDoubt(attempts)) => format!("in-doubt {}", attempts.number),
        Ok(Verdict::Busy { .. }) => "busy".into(),
        Ok(Verdict::Duplicate) => "duplicate".into(),
        Ok(Verdict::Rejected { .. }) => "rejected".into(),
        Ok(Verdict::Conflict) => "conflict".into(),
        Ok(Verdict::Applied) => "kept".into(),
        Ok(Verdict::Done { .. }) => "done".into(),
        Ok(Verdict::Lost) => "lost".into(),
        Err(StoreError::NotApplied(_)) => "not applied".into(),
        Err(StoreError::Unknown(_)) => "unknown".into(),
        Err(StoreError::Misconfigured(_)) => "misconfigured".into(),
        Err(StoreError::UnreadableMarker(_)) => "unreadable marker".into(),
        Err(_) => "another error".into(),
    }
}
