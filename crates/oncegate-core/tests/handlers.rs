//! Handlers that hold their thread: nobody can take it back, so others have to go on without it.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use oncegate_core::marker::{Ask, Operation, Verdict};
use oncegate_core::*;

/// No step takes longer than this, however busy the machine.
const BOUND: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(1);

/// What the runs of a test have come to. Clones share it.
#[derive(Clone, Default)]
struct Seen(Arc<(Mutex<Vec<String>>, Condvar)>);

impl Seen {
    fn note(&self, what: &str) {
        self.0
            .0
            .lock()
            .expect("no panic inside")
            .push(what.to_owned());
        self.0.1.notify_all();
    }

    fn times(&self, what: &str) -> usize {
        self.0
            .0
            .lock()
            .expect("no panic inside")
            .iter()
            .filter(|it| *it == what)
            .count()
    }

    /// Holds this thread until something was noted.
    fn block_until(&self, what: &str) {
        let seen = self.0.0.lock().expect("no panic inside");
        let waited = self
            .0
            .1
            .wait_timeout_while(seen, BOUND, |seen| !seen.iter().any(|it| it == what))
            .expect("no panic inside");
        assert!(!waited.1.timed_out(), "{what} did not come");
    }

    /// The same without holding the thread.
    async fn until(&self, what: &str, times: usize) {
        while self.times(what) < times {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A store that does not renew the lease of a first attempt.
struct NeverRenewsTheFirst(MemoryStore);

#[async_trait]
impl Store for NeverRenewsTheFirst {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if operations
            .iter()
            .any(|operation| operation.ask == Ask::Renew && operation.attempt == 1)
        {
            return operations
                .iter()
                .map(|_| Err(StoreError::NotApplied("as the test says".into())))
                .collect();
        }
        self.0.apply(operations).await
    }
}

fn broker(ids: impl IntoIterator<Item = String>) -> MemoryBroker {
    let broker = MemoryBroker::new("q");
    ids.into_iter()
        .for_each(|id| broker.publish(Message::new("x").with_header("id", id)));
    broker
}

fn consumer<S: Store + 'static, H: Handler>(
    broker: &MemoryBroker,
    store: S,
    handler: H,
) -> Builder<MemorySource, S, H, RawBytes> {
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store)
        .handler(handler)
        .decode(RawBytes);
    let pause = Duration::from_millis(5);
    consumer
        .id(IdSource::header("id"))
        .lease(LEASE)
        .backoff(pause, 4 * pause)
        .drain_timeout(Duration::from_millis(300))
}

/// Holds its thread at the id `stuck` until the test lets it go.
struct Stuck(Seen);

#[async_trait]
impl Handler for Stuck {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let Self(seen) = self;
        if cx.id() == "stuck" {
            seen.note("begun");
            seen.block_until("let go");
            seen.note("over");
        } else {
            seen.note("handled");
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn one_that_never_yields_holds_up_neither_others_nor_the_drain_and_its_message_comes_back() {
    let (seen, store) = (Seen::default(), MemoryStore::new());
    let broker = broker(
        (0..50)
            .map(|n| format!("id-{n}"))
            .chain(["stuck".to_owned()]),
    );
    let all_but_one = async {
        seen.until("begun", 1).await;
        seen.until("handled", 50).await;
    };
    let ended = tokio::time::timeout(
        BOUND,
        consumer(&broker, store.clone(), Stuck(seen.clone())).run_until(all_but_one),
    )
    .await;
    ended
        .expect("a drain that waits for nobody")
        .expect("a clean end");
    assert_eq!((broker.unsettled(), seen.times("over")), (1, 0));

    seen.note("let go");
    let drained = tokio::time::timeout(
        BOUND,
        consumer(&broker, store, Stuck(seen.clone())).run_until(broker.drained()),
    )
    .await;
    drained.expect("it comes back").expect("a clean end");
    assert_eq!((seen.times("begun"), seen.times("handled")), (2, 50));
}

/// The first run holds its thread until the second one has begun, and then refuses the message; the
/// second is done after that.
struct TooLate(Seen);

#[async_trait]
impl Handler for TooLate {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let Self(seen) = self;
        if cx.attempt() == 1 {
            seen.block_until("second");
            seen.note("too late");
            return Err("nobody asks any more").reject();
        }
        seen.note("second");
        seen.until("too late", 1).await;
        // So that what the first one says comes in while this one runs; nothing tells when it has.
        tokio::time::sleep(Duration::from_millis(50)).await;
        seen.note("done");
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn what_one_says_after_its_lease_is_over_does_not_count() {
    let (seen, broker) = (Seen::default(), broker(["a".to_owned()]));
    let consumer = consumer(
        &broker,
        NeverRenewsTheFirst(MemoryStore::new()),
        TooLate(seen.clone()),
    );
    let drained = tokio::time::timeout(BOUND, consumer.run_until(broker.drained())).await;
    drained.expect("it is settled").expect("a clean end");
    assert_eq!((seen.times("too late"), seen.times("done")), (1, 1));
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
}
