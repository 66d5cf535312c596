//! The checks of the store at start, before any message is received.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::*;

/// A store that cannot keep at most once, and records the calls.
#[derive(Clone, Default)]
struct Limited {
    calls: Arc<Mutex<Vec<String>>>,
    store: MemoryStore,
}

impl Limited {
    fn record(&self, call: impl Into<String>) {
        self.calls
            .lock()
            .expect("no panic inside")
            .push(call.into());
    }

    fn take_calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock().expect("no panic inside"))
    }
}

#[async_trait]
impl Store for Limited {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.record("apply");
        self.store.apply(operations).await
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.record(format!("preflight {guarantee:?}"));
        match guarantee {
            Guarantee::AtMostOnce => Err(StoreError::Misconfigured(
                "it refuses SET: let the user run it".into(),
            )),
            _ => Ok(()),
        }
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.record("persistence");
        self.store.persistence().await
    }
}

/// A handler that is never called.
struct NeverCalled;

impl Handler for NeverCalled {
    type Payload = String;

    async fn handle(&self, _: String, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

#[tokio::test]
async fn a_store_that_cannot_keep_the_guarantee_fails_the_start() {
    let store = Limited::default();
    let broker = MemoryBroker::new("q");
    let consumer = |guarantee| {
        let source = broker.source();
        Consumer::builder()
            .source(source)
            .store(store.clone())
            .handler(NeverCalled)
            .id(IdSource::key())
            .guarantee(guarantee)
    };
    let refused = consumer(Guarantee::AtMostOnce)
        .allow_volatile_store()
        .run_until(std::future::pending::<()>())
        .await;
    let error = refused.expect_err("the preflight fails").to_string();
    assert!(error.contains("let the user run it"), "{error}");
    assert_eq!(
        store.take_calls(),
        ["preflight AtMostOnce"],
        "no other call"
    );

    let gate = Gate::builder()
        .store(store.clone())
        .guarantee(Guarantee::AtMostOnce)
        .open()
        .await;
    assert!(gate.is_err_and(|error| error.to_string().contains("let the user run it")));
    store.take_calls();

    // It can keep effectively once.
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let runs = consumer(Guarantee::EffectivelyOnce).run_until(async {
        let _ = stopped.await;
    });
    let ends = async {
        while store.calls.lock().expect("no panic inside").is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let _ = stop.send(());
    };
    let (ran, ()) = tokio::join!(runs, ends);
    ran.expect("it starts");
    assert_eq!(
        store.take_calls(),
        ["preflight EffectivelyOnce"],
        "only at most once checks the persistence"
    );
}

#[tokio::test]
async fn the_default_preflight_calls_persistence() {
    struct Unreadable;

    #[async_trait]
    impl Store for Unreadable {
        async fn apply(&self, _: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
            Vec::new()
        }

        async fn persistence(&self) -> Result<Persistence, StoreError> {
            Err(StoreError::Misconfigured(
                "the file has another format".into(),
            ))
        }
    }
    let gate = Gate::builder().store(Unreadable).open().await;
    assert!(gate.is_err_and(|error| error.to_string().contains("another format")));
}
