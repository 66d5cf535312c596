//! Network faults between a consumer and its store: late commands, lost or slow replies. Simulated
//! in the process, so that they occur at an exact step.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use oncegate::internal::Lock;
use oncegate::marker::{Guarantee, Operation, OperationKind, Verdict};
use oncegate::{Persistence, Store, StoreError, async_trait};

use crate::ledger::{Log, What};

/// The delay of a late command: longer than the consumer waits before it repeats the command.
const COMMAND_DELAY: Duration = Duration::from_millis(1_300);
/// The delay of the reply to a renewal: less than its timeout, a third of the lease of 2 s.
const REPLY_DELAY: Duration = Duration::from_millis(600);

/// The kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum StoreFault {
    /// Nothing.
    None,
    /// The first clear of each id gets no reply and is applied late.
    LateClear,
    /// The first resolve of each id gets no reply and is applied late.
    LateResolve,
    /// The first claim of each id is applied and its reply is lost.
    LostClaim,
    /// The reply to the first renewal is slow; later commands are lost.
    SlowRenewal,
}

/// The minimum time of a store operation that is recorded as a stall.
const STALL: Duration = Duration::from_millis(500);

/// A store that records slow operations: on an overloaded machine they may be the cause of a lost
/// lease.
pub(super) struct StallRecorder {
    store: Arc<dyn Store>,
    log: Arc<Log>,
}

impl StallRecorder {
    pub(super) fn new(store: Arc<dyn Store>, log: Arc<Log>) -> Self {
        Self { store, log }
    }
}

/// Measures an operation until it is dropped, with or without a reply.
struct OperationTimer<'a>(&'a Log, Instant);

impl Drop for OperationTimer<'_> {
    fn drop(&mut self) {
        let took = self.1.elapsed();
        if took > STALL {
            self.0.write(What::Stalled {
                ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            });
        }
    }
}

#[async_trait]
impl Store for StallRecorder {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let _timer = OperationTimer(&self.log, Instant::now());
        self.store.apply(operations).await
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.store.preflight(guarantee).await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.store.persistence().await
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        let store = self
            .store
            .for_renewals()
            .unwrap_or_else(|| Arc::clone(&self.store));
        Some(Arc::new(Self {
            store,
            log: Arc::clone(&self.log),
        }))
    }
}

/// A store with network faults.
pub(super) struct FaultyStore {
    store: Arc<dyn Store>,
    store_fault: StoreFault,
    /// The ids that had their fault.
    done: Lock<HashSet<String>>,
    unreachable: Arc<AtomicBool>,
}

impl FaultyStore {
    pub(super) fn new(store: Arc<dyn Store>, store_fault: StoreFault) -> Self {
        Self {
            store,
            store_fault,
            done: Lock::default(),
            unreachable: Arc::default(),
        }
    }

    fn first(&self, operation: &Operation) -> bool {
        self.done.lock().insert(operation.key.as_str().to_owned())
    }

    /// Whether this operation gets no reply and is applied late.
    fn is_delayed(&self, operation: &Operation) -> bool {
        let matches = match self.store_fault {
            StoreFault::LateClear => matches!(operation.kind, OperationKind::Clear(_)),
            StoreFault::LateResolve => matches!(operation.kind, OperationKind::Resolve(_)),
            _ => false,
        };
        matches && self.first(operation)
    }
}

fn unknown() -> Result<Verdict, StoreError> {
    Err(StoreError::Unknown("the network lost the reply".into()))
}

#[async_trait]
impl Store for FaultyStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.unreachable.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(500)).await;
            return operations.iter().map(|_| unknown()).collect();
        }
        let mut answers = Vec::with_capacity(operations.len());
        for operation in operations {
            if self.is_delayed(operation) {
                let (store, late) = (Arc::clone(&self.store), operation.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(COMMAND_DELAY).await;
                    store.apply(&[late]).await
                });
                answers.push(unknown());
                continue;
            }
            let answer = self
                .store
                .apply(std::slice::from_ref(operation))
                .await
                .pop();
            let lost = self.store_fault == StoreFault::LostClaim
                && operation.kind == OperationKind::Claim
                && self.first(operation);
            answers.push(if lost {
                unknown()
            } else {
                answer.unwrap_or_else(unknown)
            });
        }
        answers
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.store.preflight(guarantee).await
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.store.persistence().await
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        if self.store_fault != StoreFault::SlowRenewal {
            return self.store.for_renewals();
        }
        let store = self
            .store
            .for_renewals()
            .unwrap_or_else(|| Arc::clone(&self.store));
        Some(Arc::new(SlowRenewals {
            store,
            unreachable: Arc::clone(&self.unreachable),
        }))
    }
}

/// A store handle for renewals: the first reply is slow, then all commands of this consumer are
/// lost.
struct SlowRenewals {
    store: Arc<dyn Store>,
    unreachable: Arc<AtomicBool>,
}

#[async_trait]
impl Store for SlowRenewals {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.unreachable.swap(true, Ordering::SeqCst) {
            return std::future::pending().await;
        }
        let answers = self.store.apply(operations).await;
        tokio::time::sleep(REPLY_DELAY).await;
        answers
    }
}
