//! Order by key, through failures, releases and ids that are held elsewhere.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Settlement;
use oncegate_core::marker::{Ask, Operation, Terms, Token};
use oncegate_core::*;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Does what the script says, and writes down what was handled, in order.
#[derive(Clone)]
struct Scripted {
    done: Arc<Mutex<Vec<String>>>,
    runs: Arc<Mutex<HashMap<String, u32>>>,
    says: Arc<Script>,
}

/// Says what a run comes to: by the id, how often it ran before, and what was handled so far.
type Script = dyn Fn(&str, u32, &[String]) -> Says + Send + Sync;

enum Says {
    Done,
    Retry,
    Unknown,
}

impl Scripted {
    fn new(says: impl Fn(&str, u32, &[String]) -> Says + Send + Sync + 'static) -> Self {
        Self {
            done: Arc::default(),
            runs: Arc::default(),
            says: Arc::new(says),
        }
    }

    fn done(&self) -> Vec<String> {
        self.done.lock().expect("no panic inside").clone()
    }
}

#[async_trait]
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
        match (self.says)(cx.id(), run, &done) {
            Says::Done => done.push(cx.id().to_owned()),
            Says::Retry => return Err("not yet").retry(),
            Says::Unknown => return Err("no answer").in_doubt(),
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
        consumer.run_until(async move { until.drained().await }),
    )
    .await;
    ended.expect("nothing is stuck").expect("a clean end");
}

fn of(key: &str, done: &[String]) -> Vec<String> {
    done.iter()
        .filter(|id| id.starts_with(key))
        .cloned()
        .collect()
}

fn in_order(key: &str, count: u32) -> Vec<String> {
    (0..count).map(|number| format!("{key}-{number}")).collect()
}

#[tokio::test]
async fn a_released_delivery_is_not_overtaken_by_its_key_and_holds_up_no_other() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    // The first of `a` works only when all of `b` was handled, and far more of `a` waits than fits
    // in flight.
    let handler = Scripted::new(|id, _, done| {
        if id == "a-0" && of("b", done).len() < 10 {
            Says::Retry
        } else {
            Says::Done
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
        (of("a", &done), of("b", &done)),
        (in_order("a", 50), in_order("b", 10))
    );
}

#[tokio::test]
async fn an_id_that_is_held_elsewhere_is_not_overtaken_by_its_key() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let held = Key::new(&MessageId::new("a-0").expect("an id"));
    let [lease, window] = [Duration::from_millis(700), Duration::from_secs(60)];
    let terms = Terms {
        guarantee: Guarantee::EffectivelyOnce,
        lease,
        window,
        fingerprint: None,
    };
    store
        .apply(&[Operation {
            key: held,
            ask: Ask::Claim,
            token: Token(1),
            attempt: 0,
            terms,
        }])
        .await;
    let handler = Scripted::new(|_, _, _| Says::Done);
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
    assert_eq!((of("a", &done), &done[0][..]), (in_order("a", 50), "b-0"));
}

#[tokio::test]
async fn every_key_stays_in_order_whatever_fails() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, run, _| {
        let chance = id
            .bytes()
            .fold(run.wrapping_mul(2_654_435_761), |chance, byte| {
                (chance ^ u32::from(byte)).wrapping_mul(16_777_619)
            });
        match chance >> 28 {
            0..3 => Says::Retry,
            3..5 => Says::Unknown,
            _ => Says::Done,
        }
    });
    let keys: Vec<String> = (0..20).map(|key| format!("key{key}")).collect();
    for number in 0..40 {
        keys.iter().for_each(|key| publish(&broker, key, number));
    }
    // A copy of one that may be away at that time.
    keys.iter().for_each(|key| publish(&broker, key, 39));
    drain(
        &broker,
        consumer(&broker, &store, &handler).max_in_flight(16),
    )
    .await;
    let done = handler.done();
    for key in keys {
        assert_eq!(of(&format!("{key}-"), &done), in_order(&key, 40));
    }
}

/// A source that hands over what a test says, and tells it what was settled.
struct Driven {
    incoming: UnboundedReceiver<Incoming>,
    settled: UnboundedSender<Settled>,
}

#[async_trait]
impl Open for Driven {
    type Source = Self;

    async fn open(self) -> Result<Self, SourceError> {
        Ok(self)
    }
}

#[async_trait]
impl Source for Driven {
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
            .for_each(|it| self.settled.send(it).expect("the test listens"));
        Ok(())
    }

    async fn close(self: Box<Self>, _: Instant) -> Result<(), SourceError> {
        Ok(())
    }
}

/// A consumer whose first delivery, `a-0`, fails and then rests for an hour, with `a-1` behind it.
struct Resting {
    hand_over: UnboundedSender<Incoming>,
    settled: UnboundedReceiver<Settled>,
    store: MemoryStore,
    runs: UnboundedReceiver<String>,
}

impl Resting {
    fn new() -> (Self, Builder<Driven, MemoryStore, Scripted, RawBytes>) {
        let (hand_over, incoming) = unbounded_channel();
        let (tell, settled) = unbounded_channel();
        let (ran, runs) = unbounded_channel();
        let handler = Scripted::new(move |id, _, _| {
            ran.send(id.to_owned()).expect("the test listens");
            if id == "a-0" { Says::Retry } else { Says::Done }
        });
        let (store, hour) = (MemoryStore::new(), Duration::from_secs(3600));
        let consumer = consumer(&MemoryBroker::new("unused"), &store, &handler).backoff(hour, hour);
        (
            Self {
                hand_over,
                settled,
                store,
                runs,
            },
            consumer.source(Driven {
                incoming,
                settled: tell,
            }),
        )
    }

    fn hand_over(&self, id: &str, epoch: u64) {
        let message = Message::new("x")
            .with_key("a")
            .with_message_id(id.to_owned());
        let delivery = Delivery {
            message,
            receipt: Receipt {
                epoch,
                partition: 0,
                position: 0,
            },
            failures: 0,
        };
        self.hand_over
            .send(Incoming::Delivery(delivery))
            .expect("it runs");
    }

    /// Until the first has failed, its claim is cleared, and the consumer has had time to hear of
    /// it.
    async fn begin(&mut self) {
        self.hand_over("a-0", 1);
        self.hand_over("a-1", 1);
        assert_eq!(self.runs.recv().await.as_deref(), Some("a-0"));
        while !self.store.is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    /// What is given back: by id, how often it has failed.
    async fn given_back(&mut self, count: usize) -> Vec<(String, u32)> {
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
async fn what_rests_and_is_revoked_is_given_back_and_not_waited_for() {
    let (mut resting, consumer) = Resting::new();
    let script = async {
        resting.begin().await;
        resting
            .hand_over
            .send(Incoming::Revoked(1))
            .expect("it runs");
        resting.hand_over("a-2", 2);
        assert_eq!(
            resting.given_back(2).await,
            [("a-0".to_owned(), 1), ("a-1".to_owned(), 0)]
        );
        let next = resting.settled.recv().await.expect("it runs");
        assert!(matches!(next.settlement, Settlement::Accept(_)), "{next:?}");
    };
    let ended = tokio::time::timeout(Duration::from_secs(60), consumer.run_until(script)).await;
    ended.expect("nothing is stuck").expect("a clean end");
}

#[tokio::test]
async fn a_shutdown_gives_back_what_rests_with_its_count() {
    let (mut resting, consumer) = Resting::new();
    let ended =
        tokio::time::timeout(Duration::from_secs(60), consumer.run_until(resting.begin())).await;
    ended.expect("nothing is stuck").expect("a clean end");
    assert_eq!(
        resting.given_back(2).await,
        [("a-0".to_owned(), 1), ("a-1".to_owned(), 0)]
    );
}

#[tokio::test]
async fn ten_thousand_behind_one_failure_are_handed_over_once() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, run, _| {
        if id == "a-0" && run < 3 {
            Says::Retry
        } else {
            Says::Done
        }
    });
    (0..9_999).for_each(|number| publish(&broker, "a", number));
    drain(&broker, consumer(&broker, &store, &handler)).await;
    assert_eq!(handler.done(), in_order("a", 9_999));
    assert_eq!(broker.delivered(), 9_999);
}

#[tokio::test]
async fn what_waits_is_bounded() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let (watched, most) = (broker.clone(), Arc::new(Mutex::new(0)));
    let seen = most.clone();
    let handler = Scripted::new(move |id, run, done| {
        let open = watched.delivered() - done.len() as u64;
        let mut most = seen.lock().expect("no panic inside");
        *most = open.max(*most);
        if id == "a-0" && run < 20 {
            Says::Retry
        } else {
            Says::Done
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

/// By size where the count would allow all of them.
#[tokio::test]
async fn what_waits_is_bounded_in_bytes() {
    const BODY: usize = 1_000;
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let (watched, most) = (broker.clone(), Arc::new(Mutex::new(0)));
    let seen = most.clone();
    let handler = Scripted::new(move |id, run, done| {
        let open = watched.delivered() - done.len() as u64;
        let mut most = seen.lock().expect("no panic inside");
        *most = open.max(*most);
        if id == "a-0" && run < 20 {
            Says::Retry
        } else {
            Says::Done
        }
    });
    for number in 0..300 {
        let message = Message::new(vec![b'x'; BODY])
            .with_key("a")
            .with_message_id(format!("a-{number}"));
        broker.publish(message);
    }
    drain(
        &broker,
        consumer(&broker, &store, &handler)
            .max_in_flight(4)
            .max_queued_bytes(20 * BODY),
    )
    .await;
    assert_eq!(handler.done(), in_order("a", 300));
    let most = *most.lock().expect("no panic inside");
    assert!(
        (20..=20 + 4 + 4).contains(&most),
        "{most} were open at once"
    );
}

/// Where there are no partitions all of a queue is one: what fails is not overtaken, whatever the
/// keys are.
#[tokio::test]
async fn by_partition_nothing_of_a_queue_overtakes_what_fails() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, run, _| {
        if id == "a-3" && run < 5 {
            Says::Retry
        } else {
            Says::Done
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

/// Nothing waits for another of its key.
#[tokio::test]
async fn unordered_what_fails_is_overtaken_by_its_key() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, _, done| {
        if id == "a-0" && done.len() < 19 {
            Says::Retry
        } else {
            Says::Done
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

/// Of the crowd below, and of the bytes of a message in it.
const MOST: usize = 4;
const CROWD_BODY: usize = 1_000;

#[tokio::test]
async fn no_more_handlers_run_than_may_be_in_flight() {
    crowd(|consumer| consumer.max_in_flight(MOST)).await;
}

#[tokio::test]
async fn no_more_bytes_are_handled_than_may_be_in_flight() {
    crowd(|consumer| {
        consumer
            .max_in_flight(1_000)
            .max_in_flight_bytes(MOST * CROWD_BODY)
    })
    .await;
}

/// Many that fail together and rest for about as long, under a limit that lets four of them run.
async fn crowd(limited: impl FnOnce(Builder<(), (), (), Json>) -> Builder<(), (), (), Json>) {
    /// Fails first, and then takes its time; counts how many run at once.
    #[derive(Clone, Default)]
    struct Crowd {
        failed: Arc<Mutex<std::collections::HashSet<String>>>,
        running: Arc<Mutex<(usize, usize)>>,
    }

    #[async_trait]
    impl Handler for Crowd {
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

    let (broker, crowd) = (MemoryBroker::new("q"), Crowd::default());
    // Those of a key follow each other; all of the first ones fail, and rest for about as long.
    for (key, number) in (0..60).flat_map(|key| (0..3).map(move |number| (key, number))) {
        let message = Message::new(vec![b'x'; CROWD_BODY]).with_key(format!("k{key}"));
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
        .handler(crowd.clone());
    let run = consumer.run_until(async move { all.drained().await });
    tokio::time::timeout(Duration::from_secs(60), run)
        .await
        .expect("nothing is stuck")
        .expect("a clean end");
    assert!(broker.dead_letters().is_empty());
    let (now, most) = *crowd.running.lock().expect("no panic inside");
    assert!(now == 0 && (2..=MOST).contains(&most), "{most} ran at once");
}
