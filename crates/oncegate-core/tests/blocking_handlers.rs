//! Handlers that block their thread: other deliveries and renewals must not need it.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use oncegate_core::marker::{Effect, Operation, OperationKind, Verdict};
use oncegate_core::*;

/// The timeout of each step, long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
const LEASE: Duration = Duration::from_secs(1);

/// The events that handlers record. Clones share them.
#[derive(Clone, Default)]
struct Events(Arc<(Mutex<Vec<String>>, Condvar)>);

impl Events {
    fn record(&self, event: &str) {
        self.0
            .0
            .lock()
            .expect("no panic inside")
            .push(event.to_owned());
        self.0.1.notify_all();
    }

    fn count(&self, event: &str) -> usize {
        self.0
            .0
            .lock()
            .expect("no panic inside")
            .iter()
            .filter(|recorded| *recorded == event)
            .count()
    }

    /// Blocks this thread until an event was recorded.
    fn block_until(&self, event: &str) {
        let events = self.0.0.lock().expect("no panic inside");
        let waited = self
            .0
            .1
            .wait_timeout_while(events, TIMEOUT, |events| {
                !events.iter().any(|recorded| recorded == event)
            })
            .expect("no panic inside");
        assert!(!waited.1.timed_out(), "{event} was not recorded");
    }

    /// Waits until an event was recorded this often, without blocking the thread.
    async fn until(&self, event: &str, times: usize) {
        while self.count(event) < times {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// A store that does not renew the lease of a first attempt.
struct NoRenewalOfTheFirst(MemoryStore);

#[async_trait]
impl Store for NoRenewalOfTheFirst {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if operations
            .iter()
            .any(|operation| operation.kind == OperationKind::Renew && operation.attempt == 1)
        {
            return operations
                .iter()
                .map(|_| Err(StoreError::NotApplied("renewal refused by the test".into())))
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

/// Blocks its thread for the id `stuck` until the event `continue`.
struct Blocking(Events);

impl Handler for Blocking {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let Self(events) = self;
        if cx.id() == "stuck" {
            events.record("started");
            events.block_until("continue");
            events.record("returned");
        } else {
            events.record("handled");
        }
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_blocking_handler_delays_neither_other_handlers_nor_the_drain_and_its_message_is_redelivered()
 {
    let (events, store) = (Events::default(), MemoryStore::new());
    let broker = broker(
        (0..50)
            .map(|n| format!("id-{n}"))
            .chain(["stuck".to_owned()]),
    );
    let all_but_one = async {
        events.until("started", 1).await;
        events.until("handled", 50).await;
    };
    let ended = tokio::time::timeout(
        TIMEOUT,
        consumer(&broker, store.clone(), Blocking(events.clone())).run_until(all_but_one),
    )
    .await;
    ended
        .expect("the drain does not wait for the handler")
        .expect("a clean end");
    assert_eq!((broker.unsettled(), events.count("returned")), (1, 0));

    events.record("continue");
    let drained = tokio::time::timeout(
        TIMEOUT,
        consumer(&broker, store, Blocking(events.clone())).run_until(broker.all_settled()),
    )
    .await;
    drained
        .expect("the message is redelivered")
        .expect("a clean end");
    assert_eq!((events.count("started"), events.count("handled")), (2, 50));
}

/// The first run blocks its thread until the second one has started, and then rejects the message.
/// The second one returns after that.
struct BlocksFirstRun(Events);

impl Handler for BlocksFirstRun {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let Self(events) = self;
        if cx.attempt() == 1 {
            events.block_until("second");
            events.record("first returns");
            return Err("after the end of the lease").reject();
        }
        events.record("second");
        events.until("first returns", 1).await;
        // The result of the first run has to arrive while this one runs. No event reports that.
        tokio::time::sleep(Duration::from_millis(50)).await;
        events.record("done");
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_result_after_the_end_of_the_lease_is_ignored() {
    let (events, broker) = (Events::default(), broker(["a".to_owned()]));
    let consumer = consumer(
        &broker,
        NoRenewalOfTheFirst(MemoryStore::new()),
        BlocksFirstRun(events.clone()),
    );
    let drained = tokio::time::timeout(TIMEOUT, consumer.run_until(broker.all_settled())).await;
    drained.expect("it is settled").expect("a clean end");
    assert_eq!(
        (events.count("first returns"), events.count("done")),
        (1, 1)
    );
    assert!(broker.dead_letters().is_empty() && broker.in_doubt().is_empty());
}

/// Records a run that starts after the end of its lease.
fn record_late_start(events: &Events, cx: &Context) {
    if cx.lease_remaining().is_zero() {
        events.record("late start");
    }
}

/// A store whose answers to renewals are lost, except those of the id `blocks`.
struct RenewsOnlyBlocks(MemoryStore);

#[async_trait]
impl Store for RenewsOnlyBlocks {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut answers = self.0.apply(operations).await;
        for (operation, answer) in operations.iter().zip(&mut answers) {
            if operation.kind == OperationKind::Renew && operation.key.as_str() != "blocks" {
                *answer = Err(StoreError::Unknown("lost by the test".into()));
            }
        }
        answers
    }
}

/// The id `blocks` blocks its thread until the other leases of its batch have ended, and then waits.
struct BlocksThenWaits(Events);

impl Handler for BlocksThenWaits {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let Self(events) = self;
        record_late_start(events, cx);
        if cx.id() == "blocks" {
            std::thread::sleep(LEASE * 5 / 4);
            events.record("blocked");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_handler_does_not_start_if_its_lease_ended_while_another_blocked_before_its_first_wait() {
    let (events, broker) = (
        Events::default(),
        broker(["blocks".to_owned(), "late".to_owned()]),
    );
    let consumer = consumer(
        &broker,
        RenewsOnlyBlocks(MemoryStore::new()),
        BlocksThenWaits(events.clone()),
    )
    .execution(Execution::Inline);
    let drained = tokio::time::timeout(TIMEOUT, consumer.run_until(broker.all_settled())).await;
    drained.expect("all are settled").expect("a clean end");
    let counts = ["blocked", "late start"].map(|event| events.count(event));
    assert_eq!(counts, [1, 0]);
}

/// Loses the claim of the id `first` once, when it is to be completed.
struct LosesFirstClaim(NoRenewalOfTheFirst, Events);

#[async_trait]
impl Store for LosesFirstClaim {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let Self(store, events) = self;
        let (mut operations, mut lost) = (operations.to_vec(), None);
        for (index, operation) in operations.iter_mut().enumerate() {
            match operation.kind {
                OperationKind::Claim if operation.key.as_str() == "first" => {
                    events.record("claimed")
                }
                OperationKind::Complete
                    if operation.key.as_str() == "first" && events.count("lost") == 0 =>
                {
                    events.record("lost");
                    operation.kind = OperationKind::Clear(Effect::Nothing);
                    lost = Some(index);
                }
                _ => {}
            }
        }
        let mut answers = store.apply(&operations).await;
        if let Some(index) = lost {
            answers[index] = Ok(Verdict::Lost);
        }
        answers
    }
}

/// The id `second` runs until `first` waits for its end with a new claim, and leaves a task that
/// blocks the thread until the lease of that claim has ended.
struct LeavesBlockingTask(Events);

impl Handler for LeavesBlockingTask {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let Self(events) = self;
        record_late_start(events, cx);
        events.record(cx.id());
        if cx.id() == "second" && events.count("second") == 1 {
            events.until("claimed", 2).await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            tokio::spawn(async { std::thread::sleep(LEASE * 5 / 4) });
        }
        Ok(())
    }
}

#[tokio::test]
async fn a_handler_that_waited_for_another_does_not_start_after_the_end_of_its_lease() {
    let events = Events::default();
    let broker = broker(["first".to_owned(), "second".to_owned()]);
    let store = NoRenewalOfTheFirst(MemoryStore::new());
    let consumer = consumer(
        &broker,
        LosesFirstClaim(store, events.clone()),
        LeavesBlockingTask(events.clone()),
    )
    .execution(Execution::Inline)
    .max_in_flight(1);
    let drained = tokio::time::timeout(TIMEOUT, consumer.run_until(broker.all_settled())).await;
    drained.expect("all are settled").expect("a clean end");
    let counts = ["lost", "first", "late start"].map(|event| events.count(event));
    assert_eq!(counts, [1, 2, 0]);
}
