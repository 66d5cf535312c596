//! The order in which a consumer handles messages.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::{
    Consumer, Context, Failure, FailureExt, Handler, IdSource, MemoryStore, Order, Raw, RawBytes,
};
use rdkafka::message::OwnedHeaders;
use tokio::sync::watch;

use crate::fixture::*;

/// Handled messages: partition and offset, in order.
type HandledMessages = Vec<(i32, i64)>;

/// Handles a message once `may_handle` allows it, given its partition, its offset and the messages
/// handled before.
#[derive(Clone)]
struct Scripted {
    done: watch::Sender<HandledMessages>,
    /// Messages that have failed once.
    failed: Arc<Mutex<HandledMessages>>,
    fails_first: (i32, i64),
    may_handle: fn(i32, i64, &HandledMessages) -> bool,
}

impl Scripted {
    fn new(fails_first: (i32, i64), may_handle: fn(i32, i64, &HandledMessages) -> bool) -> Self {
        Self {
            done: watch::channel(HandledMessages::new()).0,
            failed: Arc::default(),
            fails_first,
            may_handle,
        }
    }
}

impl Handler for Scripted {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let mut position = cx.id().rsplit('/');
        let offset: i64 = position
            .next()
            .and_then(|it| it.parse().ok())
            .expect("a position");
        let partition: i32 = position
            .next()
            .and_then(|it| it.parse().ok())
            .expect("a position");
        if (partition, offset) == self.fails_first {
            let mut failed = self.failed.lock().expect("not poisoned");
            if !failed.contains(&(partition, offset)) {
                failed.push((partition, offset));
                return Err("not yet").retry();
            }
        }
        // `self` holds the sender, so the channel is open.
        let _ = self
            .done
            .subscribe()
            .wait_for(|done| (self.may_handle)(partition, offset, done))
            .await;
        self.done.send_modify(|done| done.push((partition, offset)));
        Ok(())
    }
}

/// Consumes in this order until this many messages are handled.
async fn consume(topic: &Topic, order: Order, handler: &Scripted, count: usize) -> HandledMessages {
    let mut done = handler.done.subscribe();
    let all = async move { drop(done.wait_for(|done| done.len() == count).await) };
    let consumer = Consumer::builder()
        .source(topic.source())
        .store(MemoryStore::new())
        .id(IdSource::position())
        .order(order)
        .max_inline_retries(0)
        .backoff(Duration::from_millis(10), Duration::from_millis(10))
        .decode(RawBytes)
        .handler(handler.clone());
    let run = tokio::time::timeout(BOUND, consumer.run_until(all)).await;
    let done = handler.done.borrow().clone();
    run.unwrap_or_else(|_| panic!("no progress after {done:?}"))
        .expect("a clean end");
    done
}

#[tokio::test(flavor = "multi_thread")]
async fn ordered_by_partition_a_failure_does_not_change_the_order() {
    const EACH: usize = 20;
    let topic = Topic::new(2).await;
    topic.send_numbers(0, EACH).await;
    topic.send_numbers(1, EACH).await;
    // Partition 0 continues after its middle once all of partition 1 is handled.
    let may_handle = |partition, offset, done: &HandledMessages| {
        partition == 1
            || offset < 10
            || done.iter().filter(|(partition, _)| *partition == 1).count() == EACH
    };
    let done = consume(
        &topic,
        Order::ByPartition,
        &Scripted::new((0, 3), may_handle),
        EACH * 2,
    )
    .await;
    for partition in 0..2 {
        let offsets: Vec<i64> = done
            .iter()
            .filter(|it| it.0 == partition)
            .map(|it| it.1)
            .collect();
        assert_eq!(
            offsets,
            (0..EACH as i64).collect::<Vec<_>>(),
            "of partition {partition}"
        );
    }
    topic.await_commit(0, EACH as i64).await;
    topic.await_commit(1, EACH as i64).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unordered_messages_do_not_wait_for_their_key() {
    const ALL: usize = 10;
    let topic = Topic::new(1).await;
    for _ in 0..ALL {
        topic
            .send(Some(b"key"), Some(b"body"), OwnedHeaders::new())
            .await;
    }
    let may_handle = |_, offset, done: &HandledMessages| offset != 0 || done.len() == ALL - 1;
    let done = consume(
        &topic,
        Order::Unordered,
        &Scripted::new((0, 1), may_handle),
        ALL,
    )
    .await;
    assert_eq!(done.last(), Some(&(0, 0)));
    topic.await_commit(0, ALL as i64).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ordered_by_key_a_message_waits_only_for_those_of_its_key() {
    const ALL: usize = 20;
    let topic = Topic::new(1).await;
    for number in 0..ALL {
        topic
            .send(
                Some(if number % 2 == 0 { b"even" } else { b"odd!" }),
                Some(b"body"),
                OwnedHeaders::new(),
            )
            .await;
    }
    // The first message of one key ends once all of the other key are handled.
    let may_handle = |_, offset, done: &HandledMessages| offset != 0 || done.len() == ALL / 2;
    let done = consume(
        &topic,
        Order::ByKey,
        &Scripted::new((0, 5), may_handle),
        ALL,
    )
    .await;
    let odd: Vec<i64> = (0..ALL as i64).filter(|it| it % 2 == 1).collect();
    let even: Vec<i64> = (0..ALL as i64).filter(|it| it % 2 == 0).collect();
    assert_eq!(
        done.iter().map(|it| it.1).collect::<Vec<_>>(),
        [odd, even].concat()
    );
    topic.await_commit(0, ALL as i64).await;
}

/// Fails all messages of partition 0, and counts the messages of each partition.
#[derive(Clone)]
struct FailsOnPartitionZero(watch::Sender<[usize; 2]>);

impl Handler for FailsOnPartitionZero {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let partition = usize::from(cx.id().contains("/1/"));
        self.0.send_modify(|seen| seen[partition] += 1);
        match partition {
            0 => Err("not now").retry(),
            _ => Ok(()),
        }
    }
}

/// More messages of one partition wait for a retry than the queue holds.
#[tokio::test(flavor = "multi_thread")]
async fn retries_of_one_partition_do_not_stop_another() {
    const QUEUED: usize = 200;
    let topic = Topic::new(2).await;
    topic.send_numbers(0, 50 * QUEUED).await;
    let handler = FailsOnPartitionZero(watch::channel([0, 0]).0);
    let mut seen = handler.0.subscribe();
    let pause = Duration::from_secs(3600);
    let consumer = Consumer::builder()
        .source(topic.source())
        .store(MemoryStore::new())
        .id(IdSource::position())
        .max_in_flight(32)
        .max_queued(QUEUED)
        .max_inline_retries(0)
        .backoff(pause, pause)
        .decode(RawBytes)
        .handler(handler.clone());
    let script = async {
        drop(seen.wait_for(|seen| seen[0] >= QUEUED / 2).await);
        // Until no more messages of partition 0 are read.
        let mut before = 0;
        while std::mem::replace(&mut before, seen.borrow_and_update()[0]) != before {
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        topic.send_numbers(1, 500).await;
        drop(seen.wait_for(|seen| seen[1] == 500).await);
    };
    let run = tokio::time::timeout(BOUND, consumer.run_until(script)).await;
    run.unwrap_or_else(|_| panic!("{:?} messages were handled", *handler.0.borrow()))
        .expect("a clean end");
}
