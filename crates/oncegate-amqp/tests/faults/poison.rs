//! A message that always fails, among many that do not.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeleteOptions};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate_amqp::RabbitMq;
use oncegate_core::source::{Open, Source, headers};
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, async_trait};
use oncegate_testkit::servers::RabbitServer;

const QUEUE: &str = "orders";
const POISON: u32 = 0;
/// How often the poisoned one is handed over before it is set aside, and how often each time its handler runs.
const ATTEMPTS: u32 = 3;
const RUNS: u32 = 2;
/// How much longer the others may take beside a poisoned one.
const SLOWER: f64 = 1.10;

#[derive(Clone, Default)]
struct Counts {
    handled: Arc<AtomicU32>,
    poisoned: Arc<AtomicU32>,
}

#[async_trait]
impl Handler for Counts {
    type Payload = u32;

    async fn handle(&self, number: u32, _: &Context) -> Result<(), Failure> {
        if number == POISON {
            self.poisoned.fetch_add(1, Ordering::SeqCst);
            return Err(Failure::Retry("always".into()));
        }
        self.handled.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// Publishes so many messages, and confirms them.
async fn publish(channel: &Channel, numbers: impl Iterator<Item = u32>) {
    let mut sent = Vec::new();
    for number in numbers {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let properties = BasicProperties::default().with_delivery_mode(2).with_message_id(format!("n-{number}").into());
        sent.push(channel.basic_publish("".into(), QUEUE.into(), options, number.to_string().as_bytes(), properties).await.expect("sent"));
    }
    for confirm in sent {
        assert!(confirm.await.expect("confirmed").take_message().is_none());
    }
}

/// Handles so many sound messages behind a poisoned one or none; how long that took from the first of them to the last, and
/// the dead letter if there is one.
async fn handle(url: &str, channel: &Channel, sound: u32, first: u32) -> (Duration, Option<lapin::message::Delivery>) {
    let source: Box<dyn Source> = Box::new(RabbitMq::queue(QUEUE).url(url).open().await.expect("opened"));
    source.close(Instant::now() + Duration::from_secs(10)).await.expect("closed");
    publish(channel, first..=sound).await;
    let counts = Counts::default();
    let consumer = Consumer::builder()
        .source(RabbitMq::queue(QUEUE).url(url))
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .attempts(ATTEMPTS)
        .retries(RUNS - 1)
        .backoff(Duration::from_millis(20), Duration::from_millis(100))
        .handler(counts.clone());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let until = Instant::now() + Duration::from_secs(60);
    let reaches = async |count| {
        while counts.handled.load(Ordering::SeqCst) < count {
            assert!(Instant::now() < until, "{} of {count}", counts.handled.load(Ordering::SeqCst));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Instant::now()
    };
    let (first_handled, last_handled) = (reaches(1).await, reaches(sound).await);
    let took = last_handled - first_handled;
    let mut dead = None;
    while first == POISON && dead.is_none() {
        assert!(Instant::now() < until, "no dead letter");
        let name = format!("{QUEUE}.dead-letters");
        dead = channel.basic_get(name.into(), BasicGetOptions { no_ack: true }).await.expect("the queue");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stop.send(()).expect("it runs");
    running.await.expect("no panic").expect("a clean end");
    assert_eq!(counts.handled.load(Ordering::SeqCst), sound, "one was handled twice");
    let poisoned = if first == POISON { ATTEMPTS * RUNS } else { 0 };
    assert_eq!(counts.poisoned.load(Ordering::SeqCst), poisoned, "the poisoned one ran more or less often than it may");
    channel.queue_delete(QUEUE.into(), QueueDeleteOptions::default()).await.expect("deleted");
    (took, dead.map(|message| message.delivery))
}

/// Rounds in turn without a poisoned message and with one; how long the sound ones took in each.
async fn poison_among(sound: u32, rounds: usize) -> [Vec<Duration>; 2] {
    let server = tokio::task::spawn_blocking(RabbitServer::start).await.expect("no panic").expect("a server");
    let connection = Connection::connect(&server.url(), ConnectionProperties::default()).await.expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    channel.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    let [mut without, mut with] = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        // Whichever comes second finds the server warmer.
        let turns = if round % 2 == 0 { [POISON + 1, POISON] } else { [POISON, POISON + 1] };
        for first in turns {
            let (took, dead) = handle(&server.url(), &channel, sound, first).await;
            if first != POISON {
                without.push(took);
                continue;
            }
            with.push(took);
            let dead = dead.expect("a dead letter");
            let table = dead.properties.headers().clone().unwrap_or_default();
            let header = |name: &str| table.inner().get(name).cloned();
            assert_eq!(dead.data, POISON.to_string().as_bytes());
            assert_eq!(header(headers::REASON), Some(AMQPValue::LongString("attempts-spent".into())));
        }
    }
    crate::no_refusals(&server);
    [without, with]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poisoned_message_is_set_aside_after_its_attempts_and_the_others_go_on() {
    poison_among(1_000, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; cargo xtask faults runs it"]
async fn a_poisoned_message_among_ten_thousand() {
    const SOUND: u32 = 10_000;
    let rounds = crate::Length::from_env().rounds.max(5);
    let [without, with] = poison_among(SOUND, rounds).await;
    // Round by round: what else the machine does meets both halves of one.
    let mut ratios: Vec<f64> = with.iter().zip(&without).map(|(with, without)| with.as_secs_f64() / without.as_secs_f64()).collect();
    for (what, took) in [("without", &without), ("with", &with)] {
        let mut took: Vec<f64> = took.iter().map(|took| took.as_secs_f64() * 1_000.0).collect();
        let [least, median, most] = spread(&mut took);
        println!("{SOUND} sound messages {what} a poisoned one: median {median:.0} ms, {least:.0} to {most:.0}, {rounds} rounds");
    }
    let [least, median, most] = spread(&mut ratios);
    println!("with to without in each round: median {median:.3}, {least:.3} to {most:.3}; {SLOWER} is allowed");
    assert!(median <= SLOWER, "{without:?} without a poisoned one, {with:?} with one");
}

/// The least, the median and the most.
fn spread(figures: &mut [f64]) -> [f64; 3] {
    figures.sort_by(f64::total_cmp);
    [0, figures.len() / 2, figures.len() - 1].map(|at| figures[at])
}
