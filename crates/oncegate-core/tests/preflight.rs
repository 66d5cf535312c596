//! The checks of the store at start, before any message is received.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::*;

/// A store that cannot keep at most once. It records the calls.
#[derive(Clone, Default)]
struct Limited {
    asked: Arc<Mutex<Vec<String>>>,
    store: MemoryStore,
}

impl Limited {
    fn note(&self, asked: impl Into<String>) {
        self.asked
            .lock()
            .expect("no panic inside")
            .push(asked.into());
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.asked.lock().expect("no panic inside"))
    }
}

#[async_trait]
impl Store for Limited {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.note("apply");
        self.store.apply(operations).await
    }

    async fn preflight(&self, guarantee: Guarantee) -> Result<(), StoreError> {
        self.note(format!("preflight {guarantee:?}"));
        match guarantee {
            Guarantee::AtMostOnce => Err(StoreError::Misconfigured(
                "it refuses SET: let the user run it".into(),
            )),
            _ => Ok(()),
        }
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        self.note("memory");
        self.store.persistence().await
    }
}

/// A handler that is never called.
struct Nothing;

impl Handler for Nothing {
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
            .handler(Nothing)
            .id(IdSource::key())
            .guarantee(guarantee)
    };
    let refused = consumer(Guarantee::AtMostOnce)
        .allow_volatile_store()
        .run_until(std::future::pending::<()>())
        .await;
    let line = refused.expect_err("a right is missing").to_string();
    assert!(line.contains("let the user run it"), "{line}");
    assert_eq!(store.asked(), ["preflight AtMostOnce"], "no other call");

    let gate = Gate::builder()
        .store(store.clone())
        .guarantee(Guarantee::AtMostOnce)
        .open()
        .await;
    assert!(gate.is_err_and(|error| error.to_string().contains("let the user run it")));
    store.asked();

    // It can keep the other guarantee.
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let runs = consumer(Guarantee::EffectivelyOnce).run_until(async {
        let _ = stopped.await;
    });
    let ends = async {
        while store.asked.lock().expect("no panic inside").is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let _ = stop.send(());
    };
    let (ran, ()) = tokio::join!(runs, ends);
    ran.expect("it starts");
    assert_eq!(
        store.asked(),
        ["preflight EffectivelyOnce"],
        "only at most once checks the persistence"
    );
}

/// A store without a preflight of its own is checked by a call of `persistence`.
#[tokio::test]
async fn the_default_preflight_calls_persistence() {
    struct Unreadable;

    #[async_trait]
    impl Store for Unreadable {
        async fn apply(&self, _: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
            Vec::new()
        }

        async fn persistence(&self) -> Result<Persistence, StoreError> {
            Err(StoreError::Misconfigured("it is no file of ours".into()))
        }
    }
    let gate = Gate::builder().store(Unreadable).open().await;
    assert!(gate.is_err_and(|error| error.to_string().contains("no file of ours")));
}
