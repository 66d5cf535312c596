//! Messages that crash their process, in thousands of interleavings of crashes, drains and
//! revocations: no message is lost or waits for ever, and only the one that crashes processes is
//! dead-lettered for it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Reason;
use oncegate_core::marker::{self, Age, Change, Marker, Operation, Verdict};
use oncegate_core::source::{
    Connect, ConnectOptions, Incoming, Limit, Settled, Source, SourceError,
};
use oncegate_core::*;
use tokio::sync::Notify;
use tokio::task::JoinSet;

const RUNS: u64 = 3_000;
/// How many runs are concurrent; they wait most of the time.
const AT_ONCE: usize = 48;
/// The maximum number of crashes, drains and revocations that no handler causes.
const FAULTS: u64 = 3;
/// A message that crashes no process has two crashes before it runs in a group of at most three, and
/// then one for that group and one for a group of two; each fault may add one more.
const MAX_CRASHES: u32 = 4 + FAULTS as u32;
const BODY: &str = "ends its process";

/// A pseudo-random generator (xorshift): the same numbers for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

/// The state that the processes of one run share: a broker, the markers, and which processes have
/// ended.
struct World {
    broker: MemoryBroker,
    markers: Mutex<HashMap<Key, (Marker, u32)>>,
    ended: Mutex<HashSet<u32>>,
    handled: Mutex<HashSet<String>>,
    lives: Mutex<u32>,
}

fn world() -> Arc<World> {
    Arc::new(World {
        broker: MemoryBroker::new("q"),
        markers: Mutex::default(),
        ended: Mutex::default(),
        handled: Mutex::default(),
        lives: Mutex::default(),
    })
}

/// Writes the marker of an id whose processes crashed this often.
fn mark_crashed(world: &World, id: &str, crashes: u32) {
    let attempts = marker::Attempts {
        number: crashes + 1,
        base: crashes,
        crashes,
    };
    let marker = Marker::Cleared {
        attempts,
        effect: marker::Effect::Unknown,
    };
    let key = Key::new(&MessageId::new(id).expect("an id"));
    lock(&world.markers).insert(key, (marker, 0));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The store of one process. A lease ends when its holder's process ends.
struct ProcessStore {
    world: Arc<World>,
    life: u32,
}

#[async_trait]
impl Store for ProcessStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        tokio::task::yield_now().await;
        let (mut markers, ended) = (lock(&self.world.markers), lock(&self.world.ended));
        let mut answers = Vec::new();
        for operation in operations {
            let (marker, life) = markers
                .get(&operation.key)
                .copied()
                .unwrap_or((Marker::Absent, self.life));
            let age = if ended.contains(&life) {
                Duration::from_secs(1_000_000)
            } else {
                Duration::ZERO
            };
            let (change, verdict) = marker::apply(marker, Age::Of(age), operation);
            match change {
                Change::Keep => {}
                Change::Write(marker, _) => {
                    markers.insert(operation.key.clone(), (marker, self.life));
                }
                Change::Delete => drop(markers.remove(&operation.key)),
            }
            answers.push(Ok(verdict));
        }
        answers
    }
}

/// A source whose deliveries can be revoked.
struct Revocable {
    source: MemorySource,
    epoch: u64,
    revoke: Arc<Notify>,
}

#[async_trait]
impl Connect for Revocable {
    type Source = Self;

    async fn connect(self, _: ConnectOptions) -> Result<Self, SourceError> {
        Ok(self)
    }
}

#[async_trait]
impl Source for Revocable {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        let before = into.len();
        tokio::select! {
            biased;
            () = self.revoke.notified() => {
                into.push(Incoming::Revoked(self.epoch));
                self.epoch += 1;
            }
            received = self.source.receive(limit, into) => received?,
        }
        for it in &mut into[before..] {
            if let Incoming::Delivery(delivery) = it {
                delivery.receipt.epoch = self.epoch;
            }
        }
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        self.source.settle(settled).await
    }

    async fn stop(&mut self) {
        self.source.stop().await;
    }

    async fn close(self: Box<Self>, _deadline: Instant) -> Result<(), SourceError> {
        Ok(())
    }
}

/// Triggers of a crash, a stop and a revocation of one process.
#[derive(Clone, Default)]
struct Triggers {
    kill: Arc<Notify>,
    stop: Arc<Notify>,
    revoke: Arc<Notify>,
}

struct Work {
    world: Arc<World>,
    triggers: Triggers,
    takes: Duration,
    fails: AtomicU32,
}

impl Handler for Work {
    type Payload = Raw;

    async fn handle(&self, payload: Raw, cx: &Context) -> Result<(), Failure> {
        // An inline retry, too, may crash the process.
        if self.fails.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
            return Err("not yet").retry();
        }
        if payload.0 == BODY.as_bytes() {
            self.triggers.kill.notify_one();
            std::future::pending::<()>().await;
        }
        tokio::time::sleep(self.takes).await;
        lock(&self.world.handled).insert(cx.id().to_string());
        Ok(())
    }
}

/// Runs one process after the other, until everything is settled.
async fn processes(
    world: Arc<World>,
    triggers: Triggers,
    in_flight: usize,
    order: Order,
    takes: Duration,
) {
    loop {
        let life = {
            let mut lives = lock(&world.lives);
            *lives += 1;
            *lives
        };
        let source = Revocable {
            source: world.broker.source(),
            epoch: 0,
            revoke: triggers.revoke.clone(),
        };
        let handler = Work {
            world: world.clone(),
            triggers: triggers.clone(),
            takes,
            fails: AtomicU32::new(life),
        };
        let consumer = Consumer::builder()
            .source(source)
            .store(ProcessStore {
                world: world.clone(),
                life,
            })
            .handler(handler);
        let consumer = consumer
            .id(IdSource::header("id"))
            .decode(RawBytes)
            .order(order)
            .max_in_flight(in_flight);
        let consumer = consumer
            .max_crashes(MAX_CRASHES)
            .max_attempts(100)
            .backoff(Duration::from_millis(1), Duration::from_millis(2));
        let stop = triggers.stop.clone();
        tokio::select! {
            ended = consumer.run_until(async move { stop.notified().await }) => ended.expect("a clean end"),
            () = triggers.kill.notified() => {}
        }
        lock(&world.ended).insert(life);
    }
}

async fn run(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let world = world();
    let messages = 2 + random.below(9);
    let deadly = random.below(messages + 2); // in some runs there is none
    for number in 0..messages {
        let body = if number == deadly { BODY } else { "works" };
        world.broker.publish(
            Message::new(body)
                .with_header("id", format!("m{number}"))
                .with_key(format!("k{}", number % 3)),
        );
    }
    let order = if random.below(3) == 0 {
        Order::ByKey
    } else {
        Order::Unordered
    };
    let (in_flight, takes) = (
        1 + random.below(9) as usize,
        Duration::from_millis(random.below(4)),
    );
    let triggers: Vec<Triggers> = (0..=random.below(2)).map(|_| Triggers::default()).collect();
    let mut tasks = JoinSet::new();
    for triggers in &triggers {
        tasks.spawn(processes(
            world.clone(),
            triggers.clone(),
            in_flight,
            order,
            takes,
        ));
    }
    let faults = async {
        for _ in 0..FAULTS {
            tokio::time::sleep(Duration::from_micros(random.below(9_000))).await;
            let triggers = &triggers[random.below(triggers.len() as u64) as usize];
            [&triggers.kill, &triggers.stop, &triggers.revoke][random.below(3) as usize]
                .notify_one();
        }
    };
    let all = async { tokio::join!(faults, world.broker.drained()) };
    let settled = tokio::time::timeout(Duration::from_secs(60), async {
        tokio::select! {
            _ = all => {}
            Some(ended) = tasks.join_next() => panic!("seed {seed}: a process ended: {ended:?}"),
        }
    })
    .await;
    assert!(
        settled.is_ok(),
        "seed {seed}: {} messages are not settled",
        world.broker.unsettled()
    );
    let letters: Vec<(String, Reason)> = world
        .broker
        .dead_letters()
        .into_iter()
        .map(|it| (text(&it.message), it.reason))
        .collect();
    let expected = if deadly < messages {
        vec![(format!("m{deadly}"), Reason::CrashesSpent)]
    } else {
        vec![]
    };
    assert_eq!(letters, expected, "seed {seed}");
    let handled = lock(&world.handled).len() as u64;
    assert_eq!(handled, messages - expected.len() as u64, "seed {seed}");
}

fn text(message: &Message) -> String {
    String::from_utf8_lossy(message.headers.last("id").unwrap_or_default()).into_owned()
}

#[test]
fn only_the_message_that_crashes_processes_is_dead_lettered_and_no_other_is_lost() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let runs = match std::env::var("ONCEGATE_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..seed + 1).expect("a number"),
        Err(_) => 0..RUNS,
    };
    runtime.block_on(async {
        let mut running = JoinSet::new();
        for seed in runs {
            if running.len() >= AT_ONCE {
                running
                    .join_next()
                    .await
                    .expect("one of them")
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
            }
            running.spawn(run(seed));
        }
        while let Some(over) = running.join_next().await {
            over.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        }
    });
}

/// Publishes another message while it runs, and checks that the other one is not claimed before
/// this run ends.
struct Alone(Arc<World>);

impl Handler for Alone {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        if cx.id() == "suspect" {
            self.0
                .broker
                .publish(Message::new("works").with_header("id", "other"));
            while self.0.broker.delivered() < 2 {
                tokio::task::yield_now().await;
            }
            // The consumer is on the same thread: by then it would have sent a claim.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(
                lock(&self.0.markers).len(),
                1,
                "another message was claimed meanwhile"
            );
        }
        lock(&self.0.handled).insert(cx.id().to_string());
        Ok(())
    }
}

/// The time of one run, much longer than the pauses of a consumer that waits for claims.
const RUN_MS: u128 = 10_000;

/// Records the maximum number of handlers that ran at the same time.
#[derive(Clone, Default)]
struct Concurrency {
    now: Arc<AtomicU32>,
    most: Arc<AtomicU32>,
}

impl Handler for Concurrency {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(now, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(RUN_MS as u64)).await;
        self.now.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Runs 32 messages, 16 at a time, whose processes crashed this often. Returns the maximum number of
/// handlers that ran at the same time, and the time that all took, in units of one run.
async fn run_after_crashes(crashes: &[u32]) -> (u32, u128) {
    let world = world();
    for (number, crashes) in (0..32).zip(crashes.iter().cycle()) {
        let id = format!("{crashes}-crashes-{number}");
        mark_crashed(&world, &id, *crashes);
        let message = Message::new("works").with_header("id", id);
        world.broker.publish(message);
    }
    let handler = Concurrency::default();
    let store = ProcessStore {
        world: world.clone(),
        life: 1,
    };
    let consumer = Consumer::builder()
        .source(world.broker.source())
        .store(store)
        .handler(handler.clone())
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .max_in_flight(16);
    let all = world.broker.clone();
    let began = tokio::time::Instant::now();
    consumer
        .run_until(async move { all.drained().await })
        .await
        .expect("a clean end");
    assert!(world.broker.dead_letters().is_empty());
    (
        handler.most.load(Ordering::Relaxed),
        began.elapsed().as_millis() / RUN_MS,
    )
}

#[tokio::test(start_paused = true)]
async fn after_two_crashes_messages_run_in_groups_and_after_three_in_groups_that_grow() {
    let mut all = Vec::new();
    for crashes in [&[1][..], &[2], &[3], &[10], &[2, 2, 2, 3], &[10, 2, 2]] {
        all.push(run_after_crashes(crashes).await);
    }
    assert_eq!(all, [(16, 2), (16, 4), (16, 6), (1, 32), (16, 4), (11, 17)]);
}

#[tokio::test]
async fn nothing_else_is_claimed_while_a_message_runs_alone() {
    let world = world();
    mark_crashed(&world, "suspect", 2);
    world
        .broker
        .publish(Message::new("works").with_header("id", "suspect"));
    let consumer = Consumer::builder()
        .source(world.broker.source())
        .store(ProcessStore {
            world: world.clone(),
            life: 1,
        });
    let consumer = consumer
        .handler(Alone(world.clone()))
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .max_attempts(2);
    let all = world.broker.clone();
    consumer
        .run_until(async move { all.drained().await })
        .await
        .expect("a clean end");
    assert!(
        world.broker.dead_letters().is_empty(),
        "{:?}",
        world.broker.dead_letters()
    );
    assert_eq!(lock(&world.handled).len(), 2);
}
