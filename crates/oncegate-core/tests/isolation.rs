//! Messages that crash their process, and the isolation of messages that may have crashed one, in
//! thousands of interleavings of crashes, drains and revocations.
//!
//! `cargo xtask model --mutants` checks that these tests find the mutants of `isolation.patch`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use oncegate_core::internal::Lock;
use oncegate_core::lifecycle::Reason;
use oncegate_core::marker::{self, Age, Change, Marker, Operation, Verdict};
use oncegate_core::source::{
    Connect, ConnectOptions, Incoming, Limit, Settled, Source, SourceError,
};
use oncegate_core::*;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinSet;

/// How many random schedules are tested.
const RUNS: u64 = 2_000;
/// The maximum number of requests to the store in one of them: far more than all need, so that one
/// that never ends is found although no time passes.
const MAX_REQUESTS: u32 = 20_000;
/// The maximum number of crashes, drains and revocations that no handler causes.
const FAULTS: u64 = 3;
/// More than a message counts that crashes no process itself: two crashes before it runs in a group
/// of at most three, one in that group, one in a group of two, and one for each fault.
const MAX_CRASHES: u32 = 4 + FAULTS as u32;
/// The body of a message whose handler crashes its process.
const CRASHES: &str = "crashes its process";

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

/// The state that the processes of one test share.
struct Fixture {
    broker: MemoryBroker,
    /// Each marker with the process that wrote it.
    markers: Lock<HashMap<Key, (Marker, u32)>>,
    ended_processes: Lock<HashSet<u32>>,
    handled: Lock<HashSet<String>>,
    started_processes: Lock<u32>,
    /// Delays requests to the store and runs, in a random schedule.
    delays: Option<Lock<Random>>,
    requests: AtomicU32,
}

impl Fixture {
    /// Lets other tasks run, or time pass.
    async fn delay(&self) {
        let Some(delays) = &self.delays else {
            return tokio::task::yield_now().await;
        };
        let delay = Delay::random(&mut delays.lock());
        delay.wait().await;
    }
}

/// The time of a request, or until a fault: tasks of the same moment that run before, or milliseconds.
enum Delay {
    Turns(u64),
    Millis(u64),
}

impl Delay {
    fn random(random: &mut Random) -> Self {
        match random.below(2) {
            0 => Self::Turns(random.below(40)),
            _ => Self::Millis(random.below(6)),
        }
    }

    async fn wait(self) {
        match self {
            Self::Turns(turns) => {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
            }
            Self::Millis(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
        }
    }
}

fn fixture() -> Arc<Fixture> {
    fixture_with(None)
}

fn fixture_with(delays: Option<Lock<Random>>) -> Arc<Fixture> {
    Arc::new(Fixture {
        delays,
        requests: AtomicU32::new(0),
        broker: MemoryBroker::new("q"),
        markers: Lock::default(),
        ended_processes: Lock::default(),
        handled: Lock::default(),
        started_processes: Lock::default(),
    })
}

/// Waits until all messages are settled.
///
/// # Panics
/// After a time by the paused clock in which all tests settle theirs.
async fn all_settled(broker: &MemoryBroker) {
    tokio::time::timeout(Duration::from_secs(10_000), broker.all_settled())
        .await
        .unwrap_or_else(|_| panic!("{} messages are not settled", broker.unsettled()));
}

/// Writes the marker of an id during whose handling this many processes crashed.
fn mark_crashed(fixture: &Fixture, id: &str, crashes: u32) {
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
    fixture.markers.lock().insert(key, (marker, 0));
}

/// The store of one process. A lease ends when its holder's process ends.
struct ProcessStore {
    fixture: Arc<Fixture>,
    process: u32,
}

#[async_trait]
impl Store for ProcessStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let requests = self.fixture.requests.fetch_add(1, Ordering::Relaxed);
        assert!(requests < MAX_REQUESTS, "requests without end");
        self.fixture.delay().await;
        let answers = self.answers(operations);
        self.fixture.delay().await;
        answers
    }
}

impl ProcessStore {
    fn answers(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let (mut markers, ended) = (
            self.fixture.markers.lock(),
            self.fixture.ended_processes.lock(),
        );
        let mut answers = Vec::new();
        for operation in operations {
            let (marker, writer) = markers
                .get(&operation.key)
                .copied()
                .unwrap_or((Marker::Absent, self.process));
            let age = if ended.contains(&writer) {
                Duration::from_secs(1_000_000)
            } else {
                Duration::ZERO
            };
            let (change, verdict) = marker::apply(marker, Age::Of(age), operation);
            match change {
                Change::Keep => {}
                Change::Write(marker, _) => {
                    markers.insert(operation.key.clone(), (marker, self.process));
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

/// Cause a crash, a drain and a revocation in one process.
#[derive(Clone, Default)]
struct Triggers {
    crash: Arc<Notify>,
    drain: Arc<Notify>,
    revoke: Arc<Notify>,
}

/// Fails every third run, and crashes its process for the body [`CRASHES`].
struct Work {
    fixture: Arc<Fixture>,
    triggers: Triggers,
    runs: AtomicU32,
}

impl Handler for Work {
    type Payload = Raw;

    async fn handle(&self, payload: Raw, cx: &Context) -> Result<(), Failure> {
        // An inline retry, too, may crash the process.
        if self.runs.fetch_add(1, Ordering::Relaxed).is_multiple_of(3) {
            return Err("not yet").retry();
        }
        if payload.0 == CRASHES.as_bytes() {
            self.triggers.crash.notify_one();
            std::future::pending::<()>().await;
        }
        self.fixture.delay().await;
        self.fixture.handled.lock().insert(cx.id().to_string());
        Ok(())
    }
}

/// Runs one process after the other, until everything is settled.
async fn processes(fixture: Arc<Fixture>, triggers: Triggers, in_flight: usize, order: Order) {
    loop {
        let process = {
            let mut started = fixture.started_processes.lock();
            *started += 1;
            *started
        };
        let source = Revocable {
            source: fixture.broker.source(),
            epoch: 0,
            revoke: triggers.revoke.clone(),
        };
        let handler = Work {
            fixture: fixture.clone(),
            triggers: triggers.clone(),
            runs: AtomicU32::new(process),
        };
        let consumer = Consumer::builder()
            .source(source)
            .store(ProcessStore {
                fixture: fixture.clone(),
                process,
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
            .jitter_seed(process.into())
            .backoff(Duration::from_millis(1), Duration::from_millis(2));
        let drain = triggers.drain.clone();
        tokio::select! {
            biased;
            ended = consumer.run_until(async move { drain.notified().await }) => ended.expect("a clean end"),
            () = triggers.crash.notified() => {}
        }
        fixture.ended_processes.lock().insert(process);
    }
}

/// What a schedule did: ids with the reasons of their dead letters, and how many processes and
/// requests there were.
#[derive(Debug, PartialEq, Eq)]
struct Course {
    dead_letters: Vec<(String, Reason)>,
    handled: Vec<String>,
    processes: u32,
    requests: u32,
}

/// Runs the schedule of this seed, on one thread with paused time.
fn run_schedule(seed: u64) -> Course {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(schedule(seed))
}

async fn schedule(seed: u64) -> Course {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let delays = Random(seed.wrapping_mul(0xD6E8_FEB8_6659_FD93) | 1);
    let fixture = fixture_with(Some(Lock::new(delays)));
    let messages = 2 + random.below(9);
    let crashing = random.below(messages + 2); // in some schedules there is none
    for number in 0..messages {
        let body = if number == crashing { CRASHES } else { "works" };
        fixture.broker.publish(
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
    let in_flight = 1 + random.below(9) as usize;
    let triggers: Vec<Triggers> = (0..=random.below(2)).map(|_| Triggers::default()).collect();
    let mut tasks = JoinSet::new();
    for triggers in &triggers {
        let (fixture, triggers) = (fixture.clone(), triggers.clone());
        tasks.spawn(processes(fixture, triggers, in_flight, order));
    }
    let faults = async {
        for _ in 0..FAULTS {
            Delay::random(&mut random).wait().await;
            let triggers = &triggers[random.below(triggers.len() as u64) as usize];
            [&triggers.crash, &triggers.drain, &triggers.revoke][random.below(3) as usize]
                .notify_one();
        }
    };
    let all = async { tokio::join!(biased; faults, fixture.broker.all_settled()) };
    let settled = tokio::time::timeout(Duration::from_secs(60), async {
        tokio::select! {
            biased;
            _ = all => {}
            Some(ended) = tasks.join_next() => panic!("seed {seed}: a process ended: {ended:?}"),
        }
    })
    .await;
    assert!(
        settled.is_ok(),
        "seed {seed}: {} messages are not settled",
        fixture.broker.unsettled()
    );
    let dead_letters: Vec<(String, Reason)> = fixture
        .broker
        .dead_letters()
        .into_iter()
        .map(|dead_letter| (text(&dead_letter.message), dead_letter.reason))
        .collect();
    let expected = if crashing < messages {
        vec![(format!("m{crashing}"), Reason::CrashesSpent)]
    } else {
        vec![]
    };
    assert_eq!(dead_letters, expected, "seed {seed}");
    let mut handled: Vec<String> = fixture.handled.lock().iter().cloned().collect();
    handled.sort();
    assert_eq!(
        handled.len() as u64,
        messages - expected.len() as u64,
        "seed {seed}"
    );
    Course {
        dead_letters,
        handled,
        processes: *fixture.started_processes.lock(),
        requests: fixture.requests.load(Ordering::Relaxed),
    }
}

fn text(message: &Message) -> String {
    String::from_utf8_lossy(message.headers.last("id").unwrap_or_default()).into_owned()
}

/// `ONCEGATE_SEED=<seed>` runs one schedule.
#[test]
fn of_random_schedules_only_the_message_that_crashes_processes_is_dead_lettered() {
    let seeds = match std::env::var("ONCEGATE_SEED") {
        Ok(seed) => seed.parse().map(|seed| seed..seed + 1).expect("a number"),
        Err(_) => 0..RUNS,
    };
    for seed in seeds {
        run_schedule(seed);
    }
}

#[test]
fn a_seed_repeats_its_schedule() {
    for seed in 0..100 {
        assert_eq!(run_schedule(seed), run_schedule(seed), "seed {seed}");
    }
}

/// For the id `isolated`, publishes another message, and checks that it is not claimed before this run
/// ends.
struct ChecksNoOtherClaim(Arc<Fixture>);

impl Handler for ChecksNoOtherClaim {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        if cx.id() == "isolated" {
            self.0
                .broker
                .publish(Message::new("works").with_header("id", "other"));
            while self.0.broker.delivered() < 2 {
                tokio::task::yield_now().await;
            }
            // The consumer runs on the same thread: it would send a claim in this time.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(
                self.0.markers.lock().len(),
                1,
                "the other message was claimed"
            );
        }
        self.0.handled.lock().insert(cx.id().to_string());
        Ok(())
    }
}

/// The duration of one run in milliseconds, much longer than the pauses of a consumer that waits for
/// claims.
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

/// Runs 32 messages, at most 16 at a time, that count these numbers of crashes in turn. Returns the
/// maximum number of concurrent handlers, and the time that all took, in units of one run.
async fn run_after_crashes(crashes: &[u32]) -> (u32, u128) {
    let fixture = fixture();
    for (number, crashes) in (0..32).zip(crashes.iter().cycle()) {
        let id = format!("{crashes}-crashes-{number}");
        mark_crashed(&fixture, &id, *crashes);
        let message = Message::new("works").with_header("id", id);
        fixture.broker.publish(message);
    }
    let handler = Concurrency::default();
    let store = ProcessStore {
        fixture: fixture.clone(),
        process: 1,
    };
    let consumer = Consumer::builder()
        .source(fixture.broker.source())
        .store(store)
        .handler(handler.clone())
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .max_in_flight(16);
    let all = fixture.broker.clone();
    let began = tokio::time::Instant::now();
    consumer
        .run_until(async move { all_settled(&all).await })
        .await
        .expect("a clean end");
    assert!(fixture.broker.dead_letters().is_empty());
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

#[tokio::test(start_paused = true)]
async fn nothing_else_is_claimed_while_a_message_runs_alone() {
    let fixture = fixture();
    mark_crashed(&fixture, "isolated", 2);
    fixture
        .broker
        .publish(Message::new("works").with_header("id", "isolated"));
    let consumer = Consumer::builder()
        .source(fixture.broker.source())
        .store(ProcessStore {
            fixture: fixture.clone(),
            process: 1,
        });
    let consumer = consumer
        .handler(ChecksNoOtherClaim(fixture.clone()))
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .max_attempts(2);
    let all = fixture.broker.clone();
    consumer
        .run_until(async move { all_settled(&all).await })
        .await
        .expect("a clean end");
    assert!(
        fixture.broker.dead_letters().is_empty(),
        "{:?}",
        fixture.broker.dead_letters()
    );
    assert_eq!(fixture.handled.lock().len(), 2);
}

/// Runs until there is a permit.
struct AwaitsPermit(Arc<Semaphore>);

impl Handler for AwaitsPermit {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        self.0.acquire().await.retry()?.forget();
        Ok(())
    }
}

/// The changes of the gauge since the last call.
fn isolated(snapshotter: &Snapshotter) -> f64 {
    let all = snapshotter.snapshot().into_vec();
    let isolated = all
        .iter()
        .find(|(key, ..)| key.key().name() == "oncegate_isolated");
    match isolated {
        Some((.., DebugValue::Gauge(value))) => value.into_inner(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_possible_crash_loop_is_in_the_metrics_and_the_status() {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _here = metrics::set_default_local_recorder(&recorder);
    let (fixture, status, permits) = (
        fixture(),
        ConsumerStatus::new(),
        Arc::new(Semaphore::new(0)),
    );
    for id in ["a", "b", "c"] {
        mark_crashed(&fixture, id, 3);
    }
    for id in ["a", "b", "c", "another"] {
        let message = Message::new("works").with_header("id", id);
        fixture.broker.publish(message);
    }
    let store = ProcessStore {
        fixture: fixture.clone(),
        process: 1,
    };
    let consumer = Consumer::builder()
        .source(fixture.broker.source())
        .store(store)
        .handler(AwaitsPermit(permits.clone()))
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .status(status.clone());
    let published = || tokio::time::sleep(Duration::from_secs(2));
    let mut seen = Vec::new();
    let shutdown = async {
        for permit in [0, 2, 1, 1] {
            permits.add_permits(permit);
            published().await;
            seen.push((isolated(&snapshotter), status.snapshot().isolated));
        }
        all_settled(&fixture.broker).await;
    };
    consumer.run_until(shutdown).await.expect("a clean end");
    // One runs alone, and two wait; then these two run. The metrics are the changes.
    assert_eq!(seen, [(3.0, 3), (-1.0, 2), (-1.0, 1), (-1.0, 0)]);
}

/// Runs for six seconds, and counts the runs that ended.
struct SixSeconds(Arc<AtomicU32>);

impl Handler for SixSeconds {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        tokio::time::sleep(Duration::from_secs(6)).await;
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Sixty messages whose handler takes 6 s. So many processes are killed after 4 s, then one runs to
/// the end.
struct KilledFromOutside {
    dead_letters: Vec<DeadLetter>,
    handled: u32,
    /// [`crashes`] after the last kill.
    crashes: BTreeMap<u32, usize>,
}

impl KilledFromOutside {
    async fn run(kills: u32) -> Self {
        let fixture = fixture();
        for number in 0..60 {
            let message = Message::new("works").with_header("id", format!("m{number}"));
            fixture.broker.publish(message);
        }
        let (ended, mut counted) = (Arc::<AtomicU32>::default(), BTreeMap::new());
        for process in 0..=kills {
            let consumer = Consumer::builder()
                .source(fixture.broker.source())
                .store(ProcessStore {
                    fixture: fixture.clone(),
                    process,
                })
                .handler(SixSeconds(ended.clone()))
                .id(IdSource::header("id"))
                .decode(RawBytes);
            let all = fixture.broker.clone();
            let run = consumer.run_until(async move { all_settled(&all).await });
            if process < kills {
                let killed = tokio::time::timeout(Duration::from_secs(4), run).await;
                assert!(killed.is_err(), "it is killed before it ends: {killed:?}");
                fixture.ended_processes.lock().insert(process);
                counted = crashes(&fixture);
            } else {
                run.await.expect("a clean end");
            }
        }
        Self {
            dead_letters: fixture.broker.dead_letters(),
            handled: ended.load(Ordering::Relaxed),
            crashes: counted,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn processes_killed_from_outside_dead_letter_no_message() {
    let result = KilledFromOutside::run(7).await;
    assert_eq!((result.dead_letters, result.handled), (vec![], 60));
    // A kill is counted by the next claim: the first two for all messages, the third for a group, the
    // others for the one that runs alone.
    assert_eq!(result.crashes, BTreeMap::from([(2, 38), (3, 21), (6, 1)]));
}

/// A message that ran alone in nine crashes looks like their cause.
#[tokio::test(start_paused = true)]
async fn more_kills_than_max_crashes_dead_letter_only_messages_that_ran_alone() {
    for (kills, dead_letters) in [(11, 1), (18, 1), (19, 2), (30, 3)] {
        let result = KilledFromOutside::run(kills).await;
        let reasons: Vec<_> = result.dead_letters.iter().map(|it| it.reason).collect();
        assert_eq!(
            reasons.len(),
            dead_letters,
            "{kills} kills: {:?}",
            result.crashes
        );
        assert!(reasons.iter().all(|it| *it == Reason::CrashesSpent));
        assert_eq!(result.handled as usize, 60 - dead_letters, "{kills} kills");
    }
}

/// How many unfinished markers count how many crashes.
fn crashes(fixture: &Fixture) -> BTreeMap<u32, usize> {
    let mut counted = BTreeMap::new();
    for (marker, _) in fixture.markers.lock().values() {
        let attempts = match marker {
            Marker::Cleared { attempts, .. } => attempts,
            Marker::InProgress(hold) | Marker::InDoubt(hold, _) => &hold.attempts,
            _ => continue,
        };
        *counted.entry(attempts.crashes).or_default() += 1;
    }
    counted
}
