//! The source with oncegate's consumer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMqStatus};
use oncegate_core::source::{Order, headers};
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore};

use crate::fixture::{ConnectionProxy, QueueFixture, close, header, open};

#[derive(Clone, Default)]
struct EffectCounter(Arc<Mutex<BTreeMap<u32, u32>>>);

impl Handler for EffectCounter {
    type Payload = u32;

    async fn handle(&self, number: u32, cx: &Context) -> Result<(), Failure> {
        assert_eq!(cx.id(), format!("n-{number}"));
        if number == 13 {
            return Err(Failure::Reject("thirteen".into()));
        }
        if number.is_multiple_of(7) && cx.attempt() == 1 && fastrand::bool() {
            return Err(Failure::Retry("not yet".into()));
        }
        *self
            .0
            .lock()
            .expect("no handler panics")
            .entry(number)
            .or_default() += 1;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_id_is_handled_once_with_duplicates_and_cut_connections() {
    let (fixture, proxy) = (QueueFixture::new().await, ConnectionProxy::start().await);
    let effects = EffectCounter::default();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(
            fixture
                .source(QueueKind::Quorum)
                .url(&proxy.url)
                .prefetch(64),
        )
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .handler(effects.clone());
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let id = |number: u32| {
        BasicProperties::default().with_message_id(format!("n-{number}").as_str().into())
    };
    let deadline = Instant::now() + Duration::from_secs(40);
    while !fixture.try_publish("0", id(0)).await {
        assert!(Instant::now() < deadline, "the consumer declared no queue");
    }
    for number in 0..300 {
        fixture.publish_with(&number.to_string(), id(number)).await;
        if number % 3 == 0 {
            fixture.publish_with(&number.to_string(), id(number)).await;
        }
        if number % 100 == 50 {
            proxy.cut();
        }
    }
    while effects.0.lock().expect("no handler panics").len() < 299 {
        assert!(
            Instant::now() < deadline,
            "{} handled",
            effects.0.lock().expect("no handler panics").len()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let dead = fixture.take(&fixture.dead_letters()).await.delivery;
    assert_eq!(
        (&dead.data[..], header(&dead, headers::ID).as_deref()),
        (&b"13"[..], Some("n-13"))
    );
    assert_eq!(header(&dead, headers::REASON).as_deref(), Some("refused"));
    assert!(header(&dead, headers::LAST_ERROR).is_some_and(|error| error.contains("thirteen")));
    stop.send(()).expect("the consumer runs");
    running.await.expect("no panic").expect("a clean end");
    let effects = effects.0.lock().expect("no handler panics").clone();
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
    fixture.delete_queues().await;
}

/// Fails each message, and counts the runs and the messages.
#[derive(Clone, Default)]
struct Failing(Arc<Mutex<BTreeMap<String, u32>>>);

impl Failing {
    fn messages(&self) -> usize {
        self.0.lock().expect("no handler panics").len()
    }
}

impl Handler for Failing {
    type Payload = u32;

    async fn handle(&self, _: u32, cx: &Context) -> Result<(), Failure> {
        let mut runs = self.0.lock().expect("no handler panics");
        *runs.entry(cx.id().to_owned()).or_default() += 1;
        Err(Failure::Retry("not yet".into()))
    }
}

/// More messages fail than the prefetch allows, and wait for their next attempt: half of the prefetch in
/// the consumer, the others in a delay queue. A shutdown moves those of the consumer there, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_that_wait_for_a_retry_take_half_of_the_prefetch_and_keep_their_failures() {
    const MESSAGES: u32 = 20;
    let (fixture, handler) = (QueueFixture::new().await, Failing::default());
    let pause = Duration::from_secs(4);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    for number in 0..MESSAGES {
        let id = format!("n-{number}");
        let properties = BasicProperties::default().with_message_id(id.as_str().into());
        fixture.publish_with(&number.to_string(), properties).await;
    }
    let consumer = Consumer::builder()
        .source(fixture.source(QueueKind::Quorum).prefetch(8))
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .max_inline_retries(0)
        .backoff(pause, pause)
        .handler(handler.clone());
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let begun = Instant::now();
    while handler.messages() < MESSAGES as usize {
        assert!(
            begun.elapsed() < pause,
            "waiting messages filled the prefetch: {} of {MESSAGES} were handled",
            handler.messages()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.send(()).expect("the consumer runs");
    running.await.expect("no panic").expect("a clean end");
    let queues = ["", ".delay.1000", ".delay.5000"].map(|suffix| fixture.queue.clone() + suffix);
    let (mut found, deadline) = (0, Instant::now() + Duration::from_secs(20));
    while found < MESSAGES {
        assert!(Instant::now() < deadline, "{found} of {MESSAGES}");
        for queue in &queues {
            while let Some(copy) = fixture.try_take(queue).await {
                found += 1;
                let failures = header(&copy.delivery, headers::FAILURES);
                assert_eq!(failures.as_deref(), Some("1"), "in {queue}");
            }
        }
    }
    fixture.delete_queues().await;
}

/// Records the order of each key.
#[derive(Clone, Default)]
struct OrderRecorder(Arc<Mutex<HandledByKey>>);

#[derive(Clone, Default)]
struct HandledByKey {
    order: BTreeMap<String, Vec<u32>>,
    running: usize,
    /// The maximum of `running`.
    max_running: usize,
}

impl Handler for OrderRecorder {
    type Payload = u32;

    async fn handle(&self, number: u32, cx: &Context) -> Result<(), Failure> {
        {
            let mut seen = self.0.lock().expect("no handler panics");
            seen.running += 1;
            seen.max_running = seen.max_running.max(seen.running);
        }
        // Without an order, later messages would often be handled earlier.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..10))).await;
        let customer = cx
            .id()
            .split('-')
            .next()
            .expect("customer-number")
            .to_owned();
        let mut seen = self.0.lock().expect("no handler panics");
        seen.running -= 1;
        seen.order.entry(customer).or_default().push(number);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_from_the_default_exchange_are_ordered_by_a_key_header() {
    const EACH: u32 = 30;
    let (fixture, recorder) = (QueueFixture::new().await, OrderRecorder::default());
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    for number in 0..EACH {
        for customer in ["a", "b", "c"] {
            let mut table = FieldTable::default();
            table.insert("customer".into(), AMQPValue::LongString(customer.into()));
            let id = format!("{customer}-{number}");
            fixture
                .publish_with(
                    &number.to_string(),
                    BasicProperties::default()
                        .with_message_id(id.into())
                        .with_headers(table),
                )
                .await;
        }
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(fixture.source(QueueKind::Quorum).key_header("customer"))
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .handler(recorder.clone());
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let deadline = Instant::now() + Duration::from_secs(40);
    let handled = || {
        recorder
            .0
            .lock()
            .expect("no handler panics")
            .order
            .values()
            .map(Vec::len)
            .sum::<usize>()
    };
    while handled() < 3 * EACH as usize {
        assert!(Instant::now() < deadline, "{} messages handled", handled());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.send(()).expect("the consumer runs");
    running.await.expect("no panic").expect("a clean end");
    let HandledByKey {
        order, max_running, ..
    } = recorder.0.lock().expect("no handler panics").clone();
    assert!(
        order
            .values()
            .all(|numbers| *numbers == (0..EACH).collect::<Vec<_>>()),
        "{order:?}"
    );
    assert!(
        (2..=3).contains(&max_running),
        "{max_running} handlers ran at once"
    );
    fixture.delete_queues().await;
}

/// Notifies `started`, then fails, while `fails` is set.
#[derive(Clone, Default)]
struct FailingHandler {
    fails: Arc<std::sync::atomic::AtomicBool>,
    started: Arc<tokio::sync::Notify>,
    handled: Arc<Mutex<Vec<u32>>>,
}

impl Handler for FailingHandler {
    type Payload = u32;

    async fn handle(&self, number: u32, _: &Context) -> Result<(), Failure> {
        if self.fails.load(std::sync::atomic::Ordering::SeqCst) {
            self.started.notify_one();
            tokio::time::sleep(Duration::from_millis(500)).await;
            return Err(Failure::Retry("not now".into()));
        }
        self.handled.lock().expect("no handler panics").push(number);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_by_key_holds_over_a_restart_during_a_failure() {
    let (fixture, handler, store) = (
        QueueFixture::new().await,
        FailingHandler::default(),
        MemoryStore::new(),
    );
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    const ALL: u32 = 100;
    for number in 0..ALL {
        fixture
            .publish_with(
                &number.to_string(),
                BasicProperties::default().with_message_id(format!("n-{number}").into()),
            )
            .await;
    }
    for fails in [true, false] {
        handler
            .fails
            .store(fails, std::sync::atomic::Ordering::SeqCst);
        let consumer = Consumer::builder()
            .source(fixture.source(QueueKind::Quorum))
            .store(store.clone())
            .id(IdSource::message_id())
            .order(Order::ByKey)
            .max_inline_retries(0)
            .handler(handler.clone());
        let enough = async {
            if fails {
                return handler.started.notified().await;
            }
            while handler.handled.lock().expect("no handler panics").len() < ALL as usize {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let running =
            tokio::time::timeout(Duration::from_secs(60), consumer.run_until(enough)).await;
        running.expect("in time").expect("a clean end");
    }
    assert_eq!(
        *handler.handled.lock().expect("no handler panics"),
        (0..ALL).collect::<Vec<_>>()
    );
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

/// Delays the first message, and records the numbers of customer `a`.
#[derive(Clone, Default)]
struct SlowFirstHandler(Arc<Mutex<Vec<u32>>>);

impl Handler for SlowFirstHandler {
    type Payload = u32;

    async fn handle(&self, number: u32, cx: &Context) -> Result<(), Failure> {
        if cx.id() == "a-0" {
            tokio::time::sleep(Duration::from_secs(4)).await;
        }
        if cx.id().starts_with('a') {
            self.0.lock().expect("no handler panics").push(number);
        }
        Ok(())
    }
}

/// The old channel stays open until its acknowledgements are applied. Until then it has unacknowledged
/// messages that precede those of the next channel.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn order_by_key_holds_when_a_channel_is_closed_for_an_unsettled_delivery() {
    let (fixture, handler, status) = (
        QueueFixture::new().await,
        SlowFirstHandler::default(),
        RabbitMqStatus::new(),
    );
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(
            fixture
                .source(QueueKind::Quorum)
                .key_header("customer")
                .consumer_timeout(Duration::from_secs(3))
                .status(status.clone()),
        )
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .handler(handler.clone());
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let (started, mut all) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_secs(5) {
        // So that there are single acknowledgements all the time. An odd number of messages, because
        // RabbitMQ delivers to two consumers in turn.
        for customer in ["a", "b", "c", "d", "e"] {
            let mut table = FieldTable::default();
            table.insert("customer".into(), AMQPValue::LongString(customer.into()));
            let id = format!("{customer}-{all}");
            fixture
                .publish_with(
                    &all.to_string(),
                    BasicProperties::default()
                        .with_message_id(id.into())
                        .with_headers(table),
                )
                .await;
        }
        all += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let handled = || handler.0.lock().expect("no handler panics").len();
    while handled() < all as usize {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "{} of {all} handled",
            handled()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.send(()).expect("the consumer runs");
    running.await.expect("no panic").expect("a clean end");
    assert!(
        status.snapshot().channels_lost >= 1,
        "no channel was replaced"
    );
    assert_eq!(
        *handler.0.lock().expect("no handler panics"),
        (0..all).collect::<Vec<_>>()
    );
    fixture.delete_queues().await;
}
