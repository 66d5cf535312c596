//! Order by key, through failures, releases and ids that are held elsewhere.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::marker::{Ask, Operation, Terms, Token};
use oncegate_core::road::Settlement;
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
        Self { done: Arc::default(), runs: Arc::default(), says: Arc::new(says) }
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
    broker.publish(Message::new("x").with_key(key.to_owned()).with_message_id(format!("{key}-{number}")));
}

fn consumer(broker: &MemoryBroker, store: &MemoryStore, handler: &Scripted) -> Builder<MemorySource, MemoryStore, Scripted, RawBytes> {
    Consumer::builder()
        .source(broker.source())
        .store(store.clone())
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .backoff(Duration::from_millis(2), Duration::from_millis(20))
        .retries(0)
        .attempts(1_000)
        .decode(RawBytes)
        .handler(handler.clone())
}

async fn drain(broker: &MemoryBroker, consumer: Builder<MemorySource, MemoryStore, Scripted, RawBytes>) {
    let until = broker.clone();
    let ended = tokio::time::timeout(Duration::from_secs(60), consumer.run_until(async move { until.drained().await })).await;
    ended.expect("nothing is stuck").expect("a clean end");
}

fn of(key: &str, done: &[String]) -> Vec<String> {
    done.iter().filter(|id| id.starts_with(key)).cloned().collect()
}

fn in_order(key: &str, count: u32) -> Vec<String> {
    (0..count).map(|number| format!("{key}-{number}")).collect()
}

#[tokio::test]
async fn a_released_delivery_is_not_overtaken_by_its_key_and_holds_up_no_other() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    // The first of `a` works only when all of `b` was handled, and far more of `a` waits than fits in flight.
    let handler = Scripted::new(|id, _, done| if id == "a-0" && of("b", done).len() < 10 { Says::Retry } else { Says::Done });
    (0..50).for_each(|number| publish(&broker, "a", number));
    (0..10).for_each(|number| publish(&broker, "b", number));
    drain(&broker, consumer(&broker, &store, &handler).in_flight(4)).await;
    let done = handler.done();
    assert_eq!((of("a", &done), of("b", &done)), (in_order("a", 50), in_order("b", 10)));
}

#[tokio::test]
async fn an_id_that_is_held_elsewhere_is_not_overtaken_by_its_key() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let held = Key::new(&MessageId::new("a-0").expect("an id"));
    let [lease, window] = [Duration::from_millis(700), Duration::from_secs(60)];
    let terms = Terms { guarantee: Guarantee::EffectivelyOnce, lease, window, fingerprint: None };
    store.apply(&[Operation { key: held, ask: Ask::Claim, token: Token(1), attempt: 0, terms }]).await;
    let handler = Scripted::new(|_, _, _| Says::Done);
    (0..50).for_each(|number| publish(&broker, "a", number));
    publish(&broker, "b", 0);
    let pause = Duration::from_millis(200);
    drain(&broker, consumer(&broker, &store, &handler).backoff(pause, pause).in_flight(4)).await;
    let done = handler.done();
    assert_eq!((of("a", &done), &done[0][..]), (in_order("a", 50), "b-0"));
}

#[tokio::test]
async fn every_key_stays_in_order_whatever_fails() {
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    let handler = Scripted::new(|id, run, _| {
        let chance = id.bytes().fold(run.wrapping_mul(2_654_435_761), |chance, byte| (chance ^ u32::from(byte)).wrapping_mul(16_777_619));
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
    drain(&broker, consumer(&broker, &store, &handler).in_flight(16)).await;
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
        settled.drain(..).for_each(|it| self.settled.send(it).expect("the test listens"));
        Ok(())
    }

    async fn close(self: Box<Self>, _: Instant) -> Result<(), SourceError> {
        Ok(())
    }

    fn returns(&self) -> Returns {
        Returns::Here
    }
}

#[tokio::test]
async fn what_was_released_and_then_revoked_is_not_waited_for() {
    let (hand_over, incoming) = unbounded_channel();
    let (tell, mut settled) = unbounded_channel();
    let delivery = |id: &str, epoch| {
        let message = Message::new("x").with_key("a").with_message_id(id.to_owned());
        Incoming::Delivery(Delivery { message, receipt: Receipt { epoch, partition: 0, position: 0 }, failures: 0 })
    };
    let handler = Scripted::new(|id, _, _| if id == "a-0" { Says::Retry } else { Says::Done });
    let consumer = consumer(&MemoryBroker::new("unused"), &MemoryStore::new(), &handler).source(Driven { incoming, settled: tell });
    let script = async move {
        hand_over.send(delivery("a-0", 1)).expect("it runs");
        let first = settled.recv().await.expect("it runs");
        assert!(matches!(first.settlement, Settlement::Release { .. }), "{first:?}");
        hand_over.send(Incoming::Revoked(1)).expect("it runs");
        hand_over.send(delivery("a-1", 2)).expect("it runs");
        let second = settled.recv().await.expect("it runs");
        assert!(matches!(second.settlement, Settlement::Accept(_)), "{second:?}");
    };
    let ended = tokio::time::timeout(Duration::from_secs(60), consumer.run_until(script)).await;
    ended.expect("nothing is stuck").expect("a clean end");
}
