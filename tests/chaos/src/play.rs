//! One run: publishes messages, injects faults, waits until all messages are settled, and checks
//! the ledger.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::check::{Looked, Ordered, Promise, Remembers, Rules, check};
use crate::consume::ATTEMPTS;
use crate::fleet::{Faults, Fleet, SinkProcess};
use crate::flow::{Flow, SPAN};
use crate::ledger::{Ledger, Log, What};
use crate::message::{Aborts, Kinds, Messages};
use crate::processors::Processors;
use crate::report::{Recovery, Report, Run};
use crate::schedule::{Kind, LEASE, Lengths, Planned, Schedule};
use crate::stage::{AfterALoss, Scene, Stage};
use crate::watch::{self, Watch};
use crate::wire::Wire;
use crate::worker::Broker;
use crate::{Error, Stopping, markers, secrets};

/// The drain timeout of a consumer.
const DRAIN: Duration = Duration::from_secs(10);
/// The maximum number of messages in flight in a consumer. After a crash another consumer runs this
/// many suspected messages one by one.
const IN_FLIGHT: u32 = 64;
/// How long a handler may continue after it lost its lease.
const GRACE: Duration = Duration::from_millis(500);
/// How long after its end a fault may be the cause of an effect: Kafka's session timeout, a lease,
/// and two seconds.
const AFTERMATH: Duration = Duration::from_secs(10);
/// The interval of the publisher.
const TICK: Duration = Duration::from_millis(50);
/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// How long the ledger must not grow until all messages count as settled: longer than the handler
/// timeout.
const QUIET_TIME: Duration = Duration::from_secs(5);
/// The time limits of the first effects, of settling all messages, and of recovery after a fault.
const START_TIMEOUT: Duration = Duration::from_secs(120);
const SETTLE_TIMEOUT: Duration = Duration::from_secs(400);
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(40);

/// The settings of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The name of the scenario.
    pub scenario: String,
    /// The guarantee of the consumers.
    pub promise: Promise,
    /// The seed of messages and faults.
    pub seed: u64,
    /// Published messages per second.
    pub rate: u32,
    /// The number of consumers.
    pub consumers: usize,
    /// The kinds of faults.
    pub kinds: Vec<Kind>,
    /// The durations of faults.
    pub lengths: Lengths,
    /// When the run ends.
    pub until: Until,
    /// How many faults are active at a time.
    pub at_once: AtOnce,
    /// Whether messages make consumers abort.
    pub aborts: Aborts,
    /// The percentage of lost replies, instead of that of the schedule.
    pub percent: Option<u8>,
    /// The marker store.
    pub markers: Markers,
    /// Which messages are published.
    pub messages: Kinds,
    /// Which consumers receive from a RabbitMQ queue.
    pub taken: Taken,
}

/// Which consumers receive from a RabbitMQ queue. On Kafka each consumer has its partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Taken {
    /// All consumers, without order.
    ByAll,
    /// A single active consumer, which handles messages with the same key in order.
    ByOne,
}

/// The marker store of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Markers {
    /// One Redis.
    One,
    /// A Redis primary with two replicas and Sentinels.
    Watched {
        /// How many replicas must acknowledge a claim; with 0, a failover may lose claims.
        replicas: u32,
    },
}

impl Markers {
    fn remembers(self) -> Remembers {
        if self == (Self::Watched { replicas: 0 }) {
            Remembers::NotAll
        } else {
            Remembers::Claims
        }
    }
}

/// When a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Until {
    /// After this many different messages.
    Messages(u64),
    /// After this many faults.
    Faults(usize),
}

/// How many faults are active at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AtOnce {
    /// The next fault starts after recovery from the previous one.
    One,
    /// The faults come in pairs; the second starts during the first.
    Two,
}

/// Executes a run. Writes the plan, the ledger, the logs of all processes, and the report into the
/// folder.
///
/// # Errors
/// The run could not be completed, so it has no result.
pub fn play(
    plan: &Plan,
    stage: &Stage,
    folder: &Path,
    stopping: &Stopping,
) -> Result<Report, Error> {
    let begun = Instant::now();
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("plan.json"), serde_json::to_vec_pretty(plan)?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let queue = format!("chaos-{}-{}", std::process::id(), crate::ledger::now());
    let mut run = ActiveRun::start(plan, stage, folder, &queue, &runtime, stopping)?;
    let recovery = run.faults()?;
    run.drain()?;
    run.record_remains()?;
    drop(run);

    let order = match (stage.broker(), plan.taken) {
        (Broker::Kafka, _) => Ordered::ByKey,
        (Broker::Rabbitmq, Taken::ByOne) => Ordered::ByKeyOfAQueue,
        (Broker::Rabbitmq, Taken::ByAll) => Ordered::Not,
    };
    let (promise, store) = (plan.promise, plan.markers.remembers());
    let (lease, grace, aftermath, drain, in_flight, looked) = (
        LEASE,
        GRACE,
        AFTERMATH,
        DRAIN,
        IN_FLIGHT,
        Looked::Everywhere,
    );
    let rules = Rules {
        promise,
        order,
        lease,
        grace,
        aftermath,
        drain,
        store,
        in_flight,
        attempts: ATTEMPTS,
        looked,
    };
    let checked = check(&Ledger::read(folder)?, &rules);
    let (scenario, broker) = (plan.scenario.clone(), stage.broker().name().to_owned());
    let run = Run {
        scenario,
        broker,
        seed: plan.seed,
        rules,
        versions: stage.versions(),
        seconds: begun.elapsed().as_secs(),
        lost: 0,
    };
    let report = Report::of(run, checked, recovery);
    report.write(folder)?;
    Ok(report)
}

/// A run in progress.
struct ActiveRun<'a> {
    plan: &'a Plan,
    stage: &'a Stage,
    folder: &'a Path,
    queue: &'a str,
    runtime: &'a Runtime,
    stopping: &'a Stopping,
    log: Arc<Log>,
    fleet: Arc<Fleet>,
    /// Samples until it is dropped.
    _watch: Watch,
    sink: SinkProcess,
    wire: Arc<Wire>,
    enough: Arc<AtomicBool>,
    publisher: Option<JoinHandle<Result<(), Error>>>,
    flow: Flow,
}

impl<'a> ActiveRun<'a> {
    fn start(
        plan: &'a Plan,
        stage: &'a Stage,
        folder: &'a Path,
        queue: &'a str,
        runtime: &'a Runtime,
        stopping: &'a Stopping,
    ) -> Result<Self, Error> {
        stage.clear()?;
        let log = Arc::new(Log::open(&folder.join("player.jsonl"), "player")?);
        let sink = SinkProcess::start(folder)?;
        let wire = Arc::new(runtime.block_on(Wire::open(
            stage.broker(),
            stage.url_direct(),
            queue,
            plan.taken,
        ))?);
        let fleet = Fleet::new(
            plan.consumers,
            folder,
            arguments(plan, stage, folder, queue, &sink),
            Arc::clone(&log),
        );
        fleet.start_all()?;
        let fleet = Arc::new(fleet);
        let watch = Watch::over(&fleet, &wire, folder)?;
        let enough = Arc::new(AtomicBool::new(false));
        let publisher = runtime.spawn(publish(
            plan.clone(),
            Arc::clone(&wire),
            Arc::clone(&log),
            Arc::clone(&enough),
        ));
        let (publisher, flow) = (Some(publisher), Flow::over(folder, plan.rate));
        let mut playing = Self {
            plan,
            stage,
            folder,
            queue,
            runtime,
            stopping,
            log,
            fleet,
            _watch: watch,
            sink,
            wire,
            enough,
            publisher,
            flow,
        };
        // Faults start only after effects flow, so that a slow start is not mistaken for a loss.
        playing
            .wait_for_rate(START_TIMEOUT)?
            .ok_or("no effects after the start; see the logs of the consumers in the folder")?;
        Ok(playing)
    }

    /// Injects faults until the run ends, and waits for the publisher.
    fn faults(&mut self) -> Result<BTreeMap<String, Recovery>, Error> {
        let faults = Faults::new(Arc::clone(&self.log));
        let mut recovery: BTreeMap<String, Recovery> = BTreeMap::new();
        let mut schedule = Schedule::new(&self.plan.kinds, self.plan.lengths, self.plan.seed);
        let mut played = 0;
        while !self.is_enough(played) {
            let mut planned = schedule.next().ok_or("a run without a fault")?;
            planned.percent = self.plan.percent.unwrap_or(planned.percent);
            if self.rest(planned.pause)? == Rested::Over {
                break;
            }
            match self.plan.at_once {
                AtOnce::One => {
                    let scene = self.scene(&faults);
                    self.stage
                        .inflict(&planned, self.plan.seed ^ played as u64, &scene)?;
                    self.recovers(vec![planned.name()], &mut recovery)?;
                    played += 1;
                }
                AtOnce::Two => {
                    let second = schedule
                        .next_beside(&planned, self.plan.consumers)
                        .ok_or("nothing can be played beside another")?;
                    // The longer fault starts first, so that the faults overlap.
                    let (first, second) = if planned.lasts < second.lasts {
                        (second, planned)
                    } else {
                        (planned, second)
                    };
                    self.two(&faults, [first, second], played as u64)?;
                    let mut names = [first.kind.name(), second.kind.name()];
                    names.sort_unstable();
                    self.recovers(names.map(str::to_owned).to_vec(), &mut recovery)?;
                    played += 2;
                }
            }
            self.look()?;
        }
        self.enough.store(true, Ordering::Relaxed);
        if let Some(publisher) = self.publisher.take() {
            self.runtime.block_on(publisher)??;
        }
        Ok(recovery)
    }

    /// Waits until effects reach nine tenths of their rate, and records how long that took.
    fn recovers(
        &mut self,
        kinds: Vec<String>,
        recovery: &mut BTreeMap<String, Recovery>,
    ) -> Result<(), Error> {
        let before = Processors::until_now();
        let took = self
            .wait_for_rate(RECOVERY_TIMEOUT)?
            .unwrap_or(RECOVERY_TIMEOUT);
        let of_it = recovery.entry(kinds.join(" + ")).or_default();
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        *of_it = Recovery {
            times: of_it.times + 1,
            longest_ms: of_it.longest_ms.max(took_ms),
        };
        // After the last message the rate proves nothing.
        if !self.is_all_sent()
            && let (Some(before), Some(now)) = (before, Processors::until_now())
        {
            self.log.write(What::Recovered {
                kinds,
                took_ms,
                idle: now.idle_since(before),
            });
        }
        Ok(())
    }

    fn is_all_sent(&self) -> bool {
        self.publisher.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Injects two faults; the second starts during the first.
    fn two(&self, faults: &Faults, planned: [Planned; 2], played: u64) -> Result<(), Error> {
        let scene = self.scene(faults);
        let inflict = |planned: Planned, seed: u64| self.stage.inflict(&planned, seed, &scene);
        std::thread::scope(|scope: &Scope<'_, '_>| {
            let first = scope.spawn(|| inflict(planned[0], self.plan.seed ^ played));
            std::thread::sleep(planned[1].pause.min(planned[0].lasts / 2));
            let second = inflict(planned[1], self.plan.seed ^ (played + 1));
            first.join().map_err(|_| "a fault panicked")??;
            second
        })
    }

    fn scene<'b>(&'b self, faults: &'b Faults) -> Scene<'b> {
        let pauses = self.plan.promise == Promise::AtMostOnce
            && self.plan.markers.remembers() == Remembers::NotAll;
        let after_a_loss = if pauses {
            AfterALoss::StartAgain
        } else {
            AfterALoss::GoOn
        };
        Scene {
            fleet: &self.fleet,
            faults,
            folder: self.folder,
            log: &self.log,
            queue: self.queue,
            after_a_loss,
        }
    }

    fn is_enough(&self, played: usize) -> bool {
        let sent = self.is_all_sent();
        match self.plan.until {
            Until::Faults(faults) => played >= faults || sent,
            Until::Messages(_) => sent,
        }
    }

    /// Waits between two faults; ends early when all messages are published.
    fn rest(&mut self, pause: Duration) -> Result<Rested, Error> {
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if self.is_all_sent() {
                return Ok(Rested::Over);
            }
            std::thread::sleep(POLL_INTERVAL.min(until.saturating_duration_since(Instant::now())));
            self.look()?;
        }
        Ok(Rested::Well)
    }

    /// Waits until effects reach nine tenths of the publishing rate. Returns how long that took;
    /// none after the timeout.
    fn wait_for_rate(&mut self, timeout: Duration) -> Result<Option<Duration>, Error> {
        let (since, begun) = (Instant::now(), crate::ledger::now());
        while since.elapsed() < timeout {
            self.look()?;
            if self.flow.flows_since(begun)? || self.is_all_sent() {
                // The measured second itself is not part of the recovery time.
                return Ok(Some(since.elapsed().saturating_sub(SPAN)));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(None)
    }

    fn look(&mut self) -> Result<(), Error> {
        self.stopping.go_on()?;
        self.sink.check_running()?;
        self.fleet.replace_ended()
    }

    /// Waits until all messages are settled and the ledger no longer grows, and drains the
    /// consumers. Starts a consumer again for messages that they returned.
    fn drain(&mut self) -> Result<(), Error> {
        let until = Instant::now() + SETTLE_TIMEOUT;
        loop {
            self.until_quiet(until)?;
            self.fleet.terminate_all()?;
            let left = self.settled_left();
            if left == Some(0) || Instant::now() > until {
                // Without a reply of the broker the count is unknown, not 0.
                self.log.write(What::Left {
                    count: left.unwrap_or(u64::MAX),
                });
                return Ok(());
            }
            self.fleet.start(&mut self.fleet.slot(0))?;
        }
    }

    /// The number of unsettled messages; polls, because queues update their counts with a delay.
    fn settled_left(&self) -> Option<u64> {
        let mut left = None;
        for _ in 0..10 {
            left = self.runtime.block_on(self.wire.left()).ok();
            if left == Some(0) {
                break;
            }
            std::thread::sleep(4 * POLL_INTERVAL);
        }
        left
    }

    fn until_quiet(&mut self, until: Instant) -> Result<(), Error> {
        let (mut size, mut since) = (0, Instant::now());
        while Instant::now() < until {
            self.look()?;
            let now = written(self.folder)?;
            if now != size {
                (size, since) = (now, Instant::now());
            }
            if since.elapsed() > QUIET_TIME {
                if self
                    .runtime
                    .block_on(self.wire.left())
                    .is_ok_and(|left| left == 0)
                {
                    return Ok(());
                }
                // Consumers commit once a second, and a delayed message may wait longer than
                // QUIET_TIME.
                since = Instant::now();
            }
            std::thread::sleep(2 * POLL_INTERVAL);
        }
        Ok(())
    }

    /// Records dead letters, in-doubt messages, unfinished markers, server logs and found secrets.
    fn record_remains(&mut self) -> Result<(), Error> {
        let rejected = self.runtime.block_on(self.wire.rejected_messages())?;
        let record = |message: crate::wire::RejectedMessage| What::Aside {
            id: message.id,
            place: message.place,
            reason: message.reason,
        };
        self.log.write_all(rejected.into_iter().map(record));
        std::thread::sleep(LEASE + Duration::from_secs(1));
        let markers = self
            .runtime
            .block_on(markers::unfinished(&self.stage.redis_direct(), self.queue))?;
        self.log.write_all(
            markers
                .into_iter()
                .map(|(id, record)| What::Marker { id, record }),
        );
        self.stage.save_logs(self.folder, &self.log)?;
        let leaks = secrets::find(self.folder, self.stage.secrets())?;
        self.log.write_all(leaks);
        Ok(())
    }
}

impl Drop for ActiveRun<'_> {
    fn drop(&mut self) {
        if let Some(publisher) = &self.publisher {
            publisher.abort();
        }
    }
}

/// How a pause between faults ended.
#[derive(PartialEq, Eq)]
enum Rested {
    Well,
    Over,
}

async fn publish(
    plan: Plan,
    wire: Arc<Wire>,
    log: Arc<Log>,
    enough: Arc<AtomicBool>,
) -> Result<(), Error> {
    let mut messages = Messages::new(plan.seed, plan.aborts, plan.messages, plan.rate);
    let (begun, mut sent) = (Instant::now(), 0_u64);
    let mut ticks = tokio::time::interval(TICK);
    // After an outage of the broker the missed messages are not published in a burst.
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut behind = 0_u64;
    while !enough.load(Ordering::Relaxed) {
        ticks.tick().await;
        let due = (begun.elapsed().as_secs_f64() * f64::from(plan.rate)) as u64;
        let batch = due.saturating_sub(sent + behind);
        let most = u64::from(plan.rate / 5).max(1);
        behind += batch.saturating_sub(most);
        let mut now: Vec<_> = messages
            .by_ref()
            .take(usize::try_from(batch.min(most))?)
            .collect();
        sent += now.len() as u64;
        let over = match plan.until {
            Until::Messages(count) => messages.different() >= count,
            Until::Faults(_) => false,
        };
        if over {
            now.extend(messages.left());
        }
        wire.publish(now, &log).await?;
        if over {
            break;
        }
    }
    wire.flush().await;
    Ok(())
}

/// The arguments of each consumer except its name.
pub(crate) fn base_arguments(
    promise: Promise,
    stage: &Stage,
    folder: &Path,
    queue: &str,
    sink: &SinkProcess,
) -> Vec<String> {
    let promise = match promise {
        Promise::AtMostOnce => "at-most-once",
        Promise::EffectivelyOnce => "effectively-once",
        Promise::Bare => "bare",
    };
    let arguments = [
        ("folder", folder.display().to_string()),
        ("broker", stage.broker().name().to_owned()),
        ("url", stage.url()),
        ("from", queue.to_owned()),
        ("redis", stage.redis().join(",")),
        ("guarantee", promise.to_owned()),
        ("sink", sink.address().to_string()),
        ("lease-ms", LEASE.as_millis().to_string()),
        ("drain-ms", DRAIN.as_millis().to_string()),
        ("in-flight", IN_FLIGHT.to_string()),
    ];
    let mut arguments: Vec<String> = arguments
        .into_iter()
        .map(|(name, value)| format!("--{name}={value}"))
        .collect();
    if let Some(login) = stage.login() {
        arguments.push("--login".to_owned());
        arguments.extend(login);
    }
    arguments
}

fn arguments(
    plan: &Plan,
    stage: &Stage,
    folder: &Path,
    queue: &str,
    sink: &SinkProcess,
) -> Vec<String> {
    let mut arguments = base_arguments(plan.promise, stage, folder, queue, sink);
    if let Markers::Watched { replicas } = plan.markers {
        arguments.push(format!("--replicas={replicas}"));
    }
    if (stage.broker(), plan.taken) == (Broker::Rabbitmq, Taken::ByOne) {
        arguments.push("--one-at-a-time".to_owned());
    }
    arguments
}

/// The size of the ledger in bytes, without the samples, which grow all the time.
fn written(folder: &Path) -> Result<u64, Error> {
    let mut size = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_name() != watch::FILE
            && entry
                .path()
                .extension()
                .is_some_and(|extension| extension == "jsonl")
        {
            size += entry.metadata()?.len();
        }
    }
    Ok(size)
}
