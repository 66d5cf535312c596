//! One run: messages, consumers, faults; then everything drains, and the ledger is checked.

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

/// How long a drain of one consumer may take.
const DRAIN: Duration = Duration::from_secs(10);
/// How many messages a consumer handles at once. After it was killed, another runs as many of them
/// one by one.
const IN_FLIGHT: u32 = 64;
/// How long a handler that lost its lease may run on, once its process runs.
const GRACE: Duration = Duration::from_millis(500);
/// How long after its end a fault may be the cause of something: Kafka's session, a lease, and two
/// seconds.
const AFTERMATH: Duration = Duration::from_secs(10);
/// How often the publisher sends.
const TICK: Duration = Duration::from_millis(50);
/// How often it is looked how things go.
const LOOK: Duration = Duration::from_millis(50);
/// How long nothing may happen until all has drained: longer than a handler may run.
const QUIET: Duration = Duration::from_secs(5);
/// How long it may take until all is up, to drain, and how long for effects to come again after a
/// fault.
const PATIENCE: Duration = Duration::from_secs(120);
const DRAINED: Duration = Duration::from_secs(400);
const RECOVERY: Duration = Duration::from_secs(40);

/// What is to be run.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Its name.
    pub scenario: String,
    /// What the consumers promise.
    pub promise: Promise,
    /// Of messages and faults.
    pub seed: u64,
    /// Messages a second.
    pub rate: u32,
    /// How many consumers.
    pub consumers: usize,
    /// Which faults.
    pub kinds: Vec<Kind>,
    /// How long they last.
    pub lengths: Lengths,
    /// When it is enough.
    pub until: Until,
    /// How many faults there are at a time.
    pub at_once: AtOnce,
    /// Whether messages make consumers abort.
    pub aborts: Aborts,
    /// How many replies in 100 are lost, if not as the schedule has it.
    pub percent: Option<u8>,
    /// In what the markers lie.
    pub markers: Markers,
    /// Which messages.
    pub messages: Kinds,
    /// Who takes messages out of a queue.
    pub taken: Taken,
}

/// Who takes messages out of a queue of RabbitMQ; of a topic each consumer has its partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Taken {
    /// All consumers, in no order.
    ByAll,
    /// One, until it goes; what has the same key is handled in its order.
    ByOne,
}

/// In what the markers of a run lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Markers {
    /// One Redis.
    One,
    /// A Redis that Sentinels watch; so many of its two replicas have to know of a claim.
    Watched {
        /// None: a failover may lose claims.
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

/// When a run is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Until {
    /// When so many different messages are sent.
    Messages(u64),
    /// When so many faults are over.
    Faults(usize),
}

/// How many faults there are at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AtOnce {
    /// The next begins when all has recovered from the last.
    One,
    /// The next begins while the last lasts.
    Two,
}

/// Plays it. The folder then holds the plan, the ledger, the logs of all processes, and the report.
///
/// # Errors
/// If the run could not be played: then nothing is known.
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
    let mut run = Playing::start(plan, stage, folder, &queue, &runtime, stopping)?;
    let recovery = run.faults()?;
    run.drain()?;
    run.look_around()?;
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

/// A run that goes on.
struct Playing<'a> {
    plan: &'a Plan,
    stage: &'a Stage,
    folder: &'a Path,
    queue: &'a str,
    runtime: &'a Runtime,
    stopping: &'a Stopping,
    log: Arc<Log>,
    fleet: Arc<Fleet>,
    /// Ends when this is dropped.
    _watch: Watch,
    sink: SinkProcess,
    wire: Arc<Wire>,
    enough: Arc<AtomicBool>,
    publisher: Option<JoinHandle<Result<(), Error>>>,
    flow: Flow,
}

impl<'a> Playing<'a> {
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
        // The first effects tell that all is up; what is lost from here on is lost for a reason.
        playing
            .until_it_flows(PATIENCE)?
            .ok_or("no effects: see the consumers' logs in the folder")?;
        Ok(playing)
    }

    /// Plays faults until it is enough; then the publisher has ended, too.
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
                    // What lasts longer begins, so that the other one happens while it lasts.
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

    /// Waits until effects come as they did before, and notes how long that took.
    fn recovers(
        &mut self,
        kinds: Vec<String>,
        recovery: &mut BTreeMap<String, Recovery>,
    ) -> Result<(), Error> {
        let before = Processors::until_now();
        let took = self.until_it_flows(RECOVERY)?.unwrap_or(RECOVERY);
        let of_it = recovery.entry(kinds.join(" + ")).or_default();
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        *of_it = Recovery {
            times: of_it.times + 1,
            longest_ms: of_it.longest_ms.max(took_ms),
        };
        // Who waits for messages that are not sent any more learns nothing.
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

    /// The second begins while the first lasts.
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

    /// Between two faults; over sooner when all messages are sent.
    fn rest(&mut self, pause: Duration) -> Result<Rested, Error> {
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if self.is_all_sent() {
                return Ok(Rested::Over);
            }
            std::thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
            self.look()?;
        }
        Ok(Rested::Well)
    }

    /// Waits until effects come at the rate of the publisher, and says how long that took; none if
    /// it took longer.
    fn until_it_flows(&mut self, patience: Duration) -> Result<Option<Duration>, Error> {
        let (since, begun) = (Instant::now(), crate::ledger::now());
        while since.elapsed() < patience {
            self.look()?;
            if self.flow.flows_since(begun)? || self.is_all_sent() {
                // The second for which it flowed is no part of the wait for it.
                return Ok(Some(since.elapsed().saturating_sub(SPAN)));
            }
            std::thread::sleep(LOOK);
        }
        Ok(None)
    }

    fn look(&mut self) -> Result<(), Error> {
        self.stopping.go_on()?;
        self.sink.look()?;
        self.fleet.look()
    }

    /// Waits until nothing is left and nothing moves, ends the consumers, and sees whether that is
    /// so without them. What they still held goes to another one.
    fn drain(&mut self) -> Result<(), Error> {
        let until = Instant::now() + DRAINED;
        loop {
            self.until_quiet(until)?;
            self.fleet.terminate_all()?;
            let left = self.left_for_good();
            if left == Some(0) || Instant::now() > until {
                // What the broker does not say is not nothing.
                self.log.write(What::Left {
                    count: left.unwrap_or(u64::MAX),
                });
                return Ok(());
            }
            self.fleet.start(&mut self.fleet.slot(0))?;
        }
    }

    /// The queues say how much is ready a moment late.
    fn left_for_good(&self) -> Option<u64> {
        let mut left = None;
        for _ in 0..10 {
            left = self.runtime.block_on(self.wire.left()).ok();
            if left == Some(0) {
                break;
            }
            std::thread::sleep(4 * LOOK);
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
            if since.elapsed() > QUIET {
                if self
                    .runtime
                    .block_on(self.wire.left())
                    .is_ok_and(|left| left == 0)
                {
                    return Ok(());
                }
                // Kafka's consumers commit once a second; a delayed copy may wait for longer than
                // all is quiet.
                since = Instant::now();
            }
            std::thread::sleep(2 * LOOK);
        }
        Ok(())
    }

    /// Writes down what was set aside, which markers are left, and what the servers said.
    fn look_around(&mut self) -> Result<(), Error> {
        let letters = self.runtime.block_on(self.wire.aside())?;
        let aside = |letter: crate::wire::Letter| What::Aside {
            id: letter.id,
            place: letter.place,
            reason: letter.reason,
        };
        self.log.write_all(letters.into_iter().map(aside));
        std::thread::sleep(LEASE + Duration::from_secs(1));
        let markers = self
            .runtime
            .block_on(markers::unfinished(&self.stage.redis_direct(), self.queue))?;
        self.log.write_all(
            markers
                .into_iter()
                .map(|(id, record)| What::Marker { id, record }),
        );
        self.stage.keep_logs(self.folder, &self.log)?;
        let leaks = secrets::find(self.folder, self.stage.secrets())?;
        self.log.write_all(leaks);
        Ok(())
    }
}

impl Drop for Playing<'_> {
    fn drop(&mut self) {
        if let Some(publisher) = &self.publisher {
            publisher.abort();
        }
    }
}

/// How a rest between faults ended.
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
    // What could not be sent while the broker was away is not made up for in a burst.
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

/// What each consumer is started with.
/// The arguments of each consumer beside its name.
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

/// How many bytes of the ledger there are, without what grows while nothing happens.
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
