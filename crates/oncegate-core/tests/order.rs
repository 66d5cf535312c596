//! Order by key, through failures, releases and ids that are held elsewhere.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Settlement;
use oncegate_core::marker::{Operation, OperationKind, Terms, Token};
use oncegate_core::*;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Runs the script, and records the handled ids in order.
#[derive(Clone)]
struct Scripted {
    done: Arc<Mutex<Vec<String>>>,
    runs: Arc<Mutex<HashMap<String, u32>>>,
    script: Arc<Script>,
}

/// The result of a run, from its id, the number of runs before, and the ids handled so far.
type Script = dyn Fn(&str, u32, &[String]) -> ScriptedResult + Send + Sync;

enum ScriptedResult {
    Done,
    Retry,
    Unknown,
}

impl Scripted {
    fn new(
        script: impl Fn(&str, u32, &[String]) -> ScriptedResult + Send + Sync + 'static,
    ) -> Self {
        Self {
            done: Arc::default(),
            runs: Arc::default(),
            script: Arc::new(script),
        }
    }

    fn done(&self) -> Vec<String> {
        self.done.lock().expect("no panic inside").clone()
    }
}

impl Handler for Scripted {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        tokio::task::yield_now().await;
        let run = {
            let mut runs = self.runs.lock().expect("no panic inside");
            let run = runs.entry(cx.id().to_owned()).or_default();
            std::mem::replace(run, *run + 1)
        };
        let mut done = self.done.lock().expect("no panic inside");
        match (self.script)(cx.id(), run, &done) {
            ScriptedResult::Done => done.push(cx.id().to_owned()),
            ScriptedResult::Retry => return Err("not yet").retry(),
            ScriptedResult::Unknown => return Err("no answer").in_doubt(),
        }
        Ok(())
    }
}

fn publish(broker: &MemoryBroker, key: &str, number: u32) {
    broker.publish(
        Message::new("x")
            .with_key(key.to_owned())
            .with_message_id(format!("{key}-{number}")),
    );
}

fn consumer(
    broker: &MemoryBroker,
    store: &MemoryStore,
    handler: &Scripted,
) -> Builder<MemorySource, MemoryStore, Scripted, RawBytes> {
    Consumer::builder()
        .source(broker.source())
        .store(store.clone())
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .backoff(Duration::from_millis(2), Duration::from_millis(20))
        .max_inline_retries(0)
        .max_attempts(1_000)
        .decode(RawBytes)
        .handler(handler.clone())
}

async fn drain(
    broker: &MemoryBroker,
    consumer: Builder<MemorySource, MemoryStore, Scripted, RawBytes>,
) {
    let until = broker.clone();
    let ended = tokio::time::timeout(
        Duration::from_secs(60),
        consumer.run_until(async move { until.all_settled().await }),
    )
    .await;
    ended.expect("nothing is stuck").expect("a clean end");
}

fn of_key(key: &str, done: &[String]) -> Vec<String> {
    done.iter()
        .filter(|id| id.starts_with(key))
        .cloned()
        .collect()
}

fn in_order(key: &str, count: u32) -> Vec<String> {
    (0..count).map(|number| format!("{key}-{number}")).collect()
}

#[tokio::test]
async fn a_released_delivery_is_not_overtaken_by_others_of_its_key_and_does_not_delay_other_keys() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    // The first message of `a` fails until all messages of `b` are handled, and many more of `a` wait
    // than `max_in_flight`.
    let handler = Scripted::new(|id, _, done| {
        if id == "a-0" && of_key("b", done).len() < 10 {
            ScriptedResult::Retry
        } else {
            ScriptedResult::Done
        }
    });
    (0..50).for_each(|number| publish(&broker, "a", number));
    (0..10).for_each(|number| publish(&broker, "b", number));
    drain(
        &broker,
        consumer(&broker, &store, &handler).max_in_flight(4),
    )
    .await;
    let done = handler.done();
    assert_eq!(
        (of_key("a", &done), of_key("b", &done)),
        (in_order("a", 50), in_order("b", 10))
    );
}

#[tokio::test]
async fn a_delivery_that_waits_for_another_holder_is_not_overtaken_by_others_of_its_key() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let held = Key::new(&MessageId::new("a-0").expect("an id"));
    let (lease, window) = (Duration::from_millis(700), Duration::from_secs(60));
    let terms = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        lease,
        window,
        fingerprint: None,
    };
    store
        .apply(&[Operation {
            key: held,
            kind: OperationKind::Claim,
            token: Token(1),
            attempt: 0,
            terms,
        }])
        .await;
    let handler = Scripted::new(|_, _, _| ScriptedResult::Done);
    (0..50).for_each(|number| publish(&broker, "a", number));
    publish(&broker, "b", 0);
    let pause = Duration::from_millis(200);
    drain(
        &broker,
        consumer(&broker, &store, &handler)
            .backoff(pause, pause)
            .max_in_flight(4),
    )
    .await;
    let done = handler.done();
    assert_eq!(
        (of_key("a", &done), &done[0][..]),
        (in_order("a", 50), "b-0")
    );
}

#[tokio::test]
async fn each_key_stays_in_order_through_retries_and_unknown_outcomes() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, run, _| {
        let chance = id
            .bytes()
            .fold(run.wrapping_mul(2_654_435_761), |chance, byte| {
                (chance ^ u32::from(byte)).wrapping_mul(16_777_619)
            });
        match chance >> 28 {
            0..3 => ScriptedResult::Retry,
            3..5 => ScriptedResult::Unknown,
            _ => ScriptedResult::Done,
        }
    });
    let keys: Vec<String> = (0..20).map(|key| format!("key{key}")).collect();
    for number in 0..40 {
        keys.iter().for_each(|key| publish(&broker, key, number));
    }
    // A duplicate of the last message of each key, which may be backing off at that time.
    keys.iter().for_each(|key| publish(&broker, key, 39));
    drain(
        &broker,
        consumer(&broker, &store, &handler).max_in_flight(16),
    )
    .await;
    let done = handler.done();
    for key in keys {
        assert_eq!(of_key(&format!("{key}-"), &done), in_order(&key, 40));
    }
}

/// A source with two channels: deliveries from the test, and settlements to it.
struct ChannelSource {
    incoming: UnboundedReceiver<Incoming>,
    settled: UnboundedSender<Settled>,
}

#[async_trait]
impl Connect for ChannelSource {
    type Source = Self;

    async fn connect(self, _: ConnectOptions) -> Result<Self, SourceError> {
        Ok(self)
    }
}

#[async_trait]
impl Source for ChannelSource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        match self.incoming.recv().await {
            Some(incoming) if limit.count > 0 => into.push(incoming),
            _ => std::future::pending().await,
        }
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        settled
            .drain(..)
            .for_each(|settled| self.settled.send(settled).expect("the test listens"));
        Ok(())
    }

    async fn close(self: Box<Self>, _: Instant) -> Result<(), SourceError> {
        Ok(())
    }
}

/// A consumer whose first delivery, `a-0`, fails and backs off for an hour, with `a-1` behind it.
struct BackingOff {
    deliver: UnboundedSender<Incoming>,
    settled: UnboundedReceiver<Settled>,
    store: MemoryStore,
    runs: UnboundedReceiver<String>,
}

impl BackingOff {
    fn new() -> (
        Self,
        Builder<ChannelSource, MemoryStore, Scripted, RawBytes>,
    ) {
        let (deliver, incoming) = unbounded_channel();
        let (settled_sender, settled) = unbounded_channel();
        let (ran, runs) = unbounded_channel();
        let handler = Scripted::new(move |id, _, _| {
            ran.send(id.to_owned()).expect("the test listens");
            if id == "a-0" {
                ScriptedResult::Retry
            } else {
                ScriptedResult::Done
            }
        });
        let (store, hour) = (MemoryStore::new(), Duration::from_secs(3600));
        let consumer = consumer(&MemoryBroker::new("unused"), &store, &handler).backoff(hour, hour);
        (
            Self {
                deliver,
                settled,
                store,
                runs,
            },
            consumer.source(ChannelSource {
                incoming,
                settled: settled_sender,
            }),
        )
    }

    fn deliver(&self, id: &str, epoch: u64) {
        let message = Message::new("x")
            .with_key("a")
            .with_message_id(id.to_owned());
        let delivery = Delivery::new(message, Receipt::new(epoch, 0));
        self.deliver
            .send(Incoming::Delivery(delivery))
            .expect("it runs");
    }

    /// Waits until the first delivery has failed, its claim is cleared, and the consumer has had time
    /// to process that.
    async fn wait_until_backing_off(&mut self) {
        self.deliver("a-0", 1);
        self.deliver("a-1", 1);
        assert_eq!(self.runs.recv().await.as_deref(), Some("a-0"));
        while !self.store.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    /// The released deliveries: the id and the number of failures of each.
    async fn released(&mut self, count: usize) -> Vec<(String, u32)> {
        let mut all = Vec::new();
        while all.len() < count {
            let Settled {
                delivery,
                settlement,
                ..
            } = self.settled.recv().await.expect("it runs");
            let Settlement::Release { failures, .. } = settlement else {
                panic!("{settlement:?}")
            };
            all.push((
                String::from_utf8(delivery.message.message_id.expect("an id").to_vec())
                    .expect("text"),
                failures,
            ));
        }
        all.sort();
        all
    }
}

#[tokio::test]
async fn a_revoked_delivery_that_backs_off_is_released_at_once() {
    let (mut backing_off, consumer) = BackingOff::new();
    let script = async {
        backing_off.wait_until_backing_off().await;
        backing_off
            .deliver
            .send(Incoming::Revoked(1))
            .expect("it runs");
        backing_off.deliver("a-2", 2);
        assert_eq!(
            backing_off.released(2).await,
            [("a-0".to_owned(), 1), ("a-1".to_owned(), 0)]
        );
        let next = backing_off.settled.recv().await.expect("it runs");
        assert!(matches!(next.settlement, Settlement::Accept(_)), "{next:?}");
    };
    let ended = tokio::time::timeout(Duration::from_secs(60), consumer.run_until(script)).await;
    ended.expect("nothing is stuck").expect("a clean end");
}

#[tokio::test]
async fn a_shutdown_releases_a_delivery_that_backs_off_with_its_failures() {
    let (mut backing_off, consumer) = BackingOff::new();
    let ended = tokio::time::timeout(
        Duration::from_secs(60),
        consumer.run_until(backing_off.wait_until_backing_off()),
    )
    .await;
    ended.expect("nothing is stuck").expect("a clean end");
    assert_eq!(
        backing_off.released(2).await,
        [("a-0".to_owned(), 1), ("a-1".to_owned(), 0)]
    );
}

#[tokio::test]
async fn messages_queued_behind_a_failed_one_of_their_key_are_delivered_once() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, run, _| {
        if id == "a-0" && run < 3 {
            ScriptedResult::Retry
        } else {
            ScriptedResult::Done
        }
    });
    (0..9_999).for_each(|number| publish(&broker, "a", number));
    drain(&broker, consumer(&broker, &store, &handler)).await;
    assert_eq!(handler.done(), in_order("a", 9_999));
    assert_eq!(broker.delivered(), 9_999);
}

#[tokio::test]
async fn max_queued_limits_queued_deliveries() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let (watched, most) = (broker.clone(), Arc::new(Mutex::new(0)));
    let seen = most.clone();
    let handler = Scripted::new(move |id, run, done| {
        let open = watched.delivered() - done.len() as u64;
        let mut most = seen.lock().expect("no panic inside");
        *most = open.max(*most);
        if id == "a-0" && run < 20 {
            ScriptedResult::Retry
        } else {
            ScriptedResult::Done
        }
    });
    (0..500).for_each(|number| publish(&broker, "a", number));
    drain(
        &broker,
        consumer(&broker, &store, &handler)
            .max_in_flight(4)
            .max_queued(20),
    )
    .await;
    assert_eq!(handler.done(), in_order("a", 500));
    let most = *most.lock().expect("no panic inside");
    assert!(
        (20..=20 + 4 + 4).contains(&most),
        "{most} were open at once"
    );
}

/// `max_queued` alone would allow all of them.
#[tokio::test]
async fn max_queued_bytes_limits_queued_deliveries() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let (watched, most) = (broker.clone(), Arc::new(Mutex::new(0)));
    let seen = most.clone();
    let handler = Scripted::new(move |id, run, done| {
        let open = watched.delivered() - done.len() as u64;
        let mut most = seen.lock().expect("no panic inside");
        *most = open.max(*most);
        if id == "a-0" && run < 20 {
            ScriptedResult::Retry
        } else {
            ScriptedResult::Done
        }
    });
    for number in 0..300 {
        let message = Message::new(vec![b'x'; BODY_BYTES])
            .with_key("a")
            .with_message_id(format!("a-{number}"));
        broker.publish(message);
    }
    drain(
        &broker,
        consumer(&broker, &store, &handler)
            .max_in_flight(4)
            .max_queued_bytes(20 * BODY_BYTES),
    )
    .await;
    assert_eq!(handler.done(), in_order("a", 300));
    let most = *most.lock().expect("no panic inside");
    assert!(
        (20..=20 + 4 + 4).contains(&most),
        "{most} were open at once"
    );
}

/// A queue without partitions counts as one partition: a failed delivery is not overtaken, whatever
/// its key.
#[tokio::test]
async fn ordered_by_partition_no_delivery_of_a_queue_overtakes_a_failed_one() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, run, _| {
        if id == "a-3" && run < 5 {
            ScriptedResult::Retry
        } else {
            ScriptedResult::Done
        }
    });
    let publish_all = || {
        (0..20).for_each(|number| publish(&broker, if number % 2 == 0 { "b" } else { "a" }, number))
    };
    publish_all();
    drain(
        &broker,
        consumer(&broker, &store, &handler).order(Order::ByPartition),
    )
    .await;
    let all: Vec<String> = (0..20)
        .map(|number| format!("{}-{number}", if number % 2 == 0 { "b" } else { "a" }))
        .collect();
    assert_eq!(handler.done(), all);
}

#[tokio::test]
async fn unordered_a_failed_delivery_is_overtaken_by_others_of_its_key() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, _, done| {
        if id == "a-0" && done.len() < 19 {
            ScriptedResult::Retry
        } else {
            ScriptedResult::Done
        }
    });
    (0..20).for_each(|number| publish(&broker, "a", number));
    drain(
        &broker,
        consumer(&broker, &store, &handler).order(Order::Unordered),
    )
    .await;
    assert_eq!(handler.done().last().map(String::as_str), Some("a-0"));
}

/// The limit of concurrent handlers.
const MAX_RUNNING: usize = 4;
/// The size of a message body, in bytes.
const BODY_BYTES: usize = 1_000;

#[tokio::test]
async fn max_in_flight_limits_concurrent_handlers() {
    check_limit(|consumer| consumer.max_in_flight(MAX_RUNNING)).await;
}

#[tokio::test]
async fn max_in_flight_bytes_limits_concurrent_handlers() {
    check_limit(|consumer| {
        consumer
            .max_in_flight(1_000)
            .max_in_flight_bytes(MAX_RUNNING * BODY_BYTES)
    })
    .await;
}

/// Many messages fail together and back off for about as long. At most [`MAX_RUNNING`] of them may run
/// at the same time.
async fn check_limit(limited: impl FnOnce(Builder<(), (), (), Json>) -> Builder<(), (), (), Json>) {
    /// Fails in its first run, and sleeps in the second; counts concurrent runs.
    #[derive(Clone, Default)]
    struct FailsOnce {
        failed: Arc<Mutex<std::collections::HashSet<String>>>,
        running: Arc<Mutex<(usize, usize)>>,
    }

    impl Handler for FailsOnce {
        type Payload = Raw;

        async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
            {
                let (now, most) = &mut *self.running.lock().expect("no panic inside");
                *now += 1;
                *most = (*most).max(*now);
            }
            let first = self
                .failed
                .lock()
                .expect("no panic inside")
                .insert(cx.id().to_owned());
            if !first {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            self.running.lock().expect("no panic inside").0 -= 1;
            if first {
                Err("not yet").retry()
            } else {
                Ok(())
            }
        }
    }

    let (broker, handler) = (MemoryBroker::new("q"), FailsOnce::default());
    for (key, number) in (0..60).flat_map(|key| (0..3).map(move |number| (key, number))) {
        let message = Message::new(vec![b'x'; BODY_BYTES]).with_key(format!("k{key}"));
        broker.publish(message.with_message_id(format!("k{key}-{number}")));
    }
    let all = broker.clone();
    let consumer = limited(Consumer::builder())
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .backoff(Duration::from_millis(50), Duration::from_millis(50))
        .max_inline_retries(0)
        .decode(RawBytes)
        .handler(handler.clone());
    let run = consumer.run_until(async move { all.all_settled().await });
    tokio::time::timeout(Duration::from_secs(60), run)
        .await
        .expect("nothing is stuck")
        .expect("a clean end");
    assert!(broker.dead_letters().is_empty());
    let (now, most) = *handler.running.lock().expect("no panic inside");
    assert!(
        now == 0 && (2..=MAX_RUNNING).contains(&most),
        "{most} ran at once"
    );
}
