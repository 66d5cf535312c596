//! What a network does to the commands of a consumer: a command that comes late, a reply that is
//! lost or slow. Done in the process itself, so that it happens at one moment and no other.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use oncegate::marker::{Ask, Guarantee, Operation, Verdict};
use oncegate::{Persistence, Store, StoreError, async_trait};

use crate::ledger::{Log, What};

/// When a command arrives that comes late: its asker has asked again by then, and goes on.
const LATE: Duration = Duration::from_millis(1_300);
/// How late the reply to a renewal is: less than a third of the lease of 2 s, for which it is
/// waited.
const SLOW: Duration = Duration::from_millis(600);

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Trick {
    /// Nothing.
    None,
    /// The first clear of each id is not answered, and arrives late.
    LateClear,
    /// The same of a resolve.
    LateResolve,
    /// The first claim of each id is carried out, and its reply lost.
    LostClaim,
    /// The reply to the first renewals is slow, and nothing that is asked afterwards is answered or
    /// arrives.
    SlowRenewal,
}

/// How long a store may take for an answer until that is worth a record.
const STALL: Duration = Duration::from_millis(500);

/// A store whose slowness is written down: a disk or a machine that is too busy may cost leases,
/// and then it is the cause.
pub(super) struct Timed {
    store: Arc<dyn Store>,
    log: Arc<Log>,
}

impl Timed {
    pub(super) fn new(store: Arc<dyn Store>, log: Arc<Log>) -> Self {
        Self { store, log }
    }
}

/// A question; when it is over, answered or given up, it is known how long it took.
struct Asking<'a>(&'a Log, Instant);

impl Drop for Asking<'_> {
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
impl Store for Timed {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let _asking = Asking(&self.log, Instant::now());
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

/// A store behind such a network.
pub(super) struct Tricky {
    store: Arc<dyn Store>,
    trick: Trick,
    /// To which ids it was done.
    done: Mutex<HashSet<String>>,
    dark: Arc<AtomicBool>,
}

impl Tricky {
    pub(super) fn new(store: Arc<dyn Store>, trick: Trick) -> Self {
        Self {
            store,
            trick,
            done: Mutex::default(),
            dark: Arc::default(),
        }
    }

    fn first(&self, operation: &Operation) -> bool {
        self.done
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(operation.key.as_str().to_owned())
    }

    /// Whether this operation is not answered now, and comes late.
    fn comes_late(&self, operation: &Operation) -> bool {
        let concerned = match self.trick {
            Trick::LateClear => matches!(operation.ask, Ask::Clear(_)),
            Trick::LateResolve => matches!(operation.ask, Ask::Resolve(_)),
            _ => false,
        };
        concerned && self.first(operation)
    }
}

fn unknown() -> Result<Verdict, StoreError> {
    Err(StoreError::Unknown("the network lost the reply".into()))
}

#[async_trait]
impl Store for Tricky {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.dark.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(500)).await;
            return operations.iter().map(|_| unknown()).collect();
        }
        let mut answers = Vec::with_capacity(operations.len());
        for operation in operations {
            if self.comes_late(operation) {
                let (store, late) = (Arc::clone(&self.store), operation.clone());
                tokio::spawn(async move {
                    tokio::time::sleep(LATE).await;
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
            let lost = self.trick == Trick::LostClaim
                && operation.ask == Ask::Claim
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
        if self.trick != Trick::SlowRenewal {
            return self.store.for_renewals();
        }
        let store = self
            .store
            .for_renewals()
            .unwrap_or_else(|| Arc::clone(&self.store));
        Some(Arc::new(Slow {
            store,
            dark: Arc::clone(&self.dark),
        }))
    }
}

/// What answers the first renewals slowly, and then falls silent, and with it all else that this
/// consumer asks.
struct Slow {
    store: Arc<dyn Store>,
    dark: Arc<AtomicBool>,
}

#[async_trait]
impl Store for Slow {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.dark.swap(true, Ordering::SeqCst) {
            return std::future::pending().await;
        }
        let answers = self.store.apply(operations).await;
        tokio::time::sleep(SLOW).await;
        answers
    }
}
