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

use crate::broker_client::BrokerClient;
use crate::check::{CheckRules, CheckScope, ClaimDurability, Ordered, TestedGuarantee, check};
use crate::consume::ATTEMPTS;
use crate::fleet::{FaultLog, Fleet, SinkProcess};
use crate::flow::{Flow, SPAN};
use crate::ledger::{Ledger, Log, What};
use crate::message::{Aborts, Kinds, Messages};
use crate::processors::Processors;
use crate::report::{Recovery, Report, ReportedRun};
use crate::schedule::{FaultKind, LEASE, Lengths, Planned, Schedule};
use crate::servers::{FaultContext, OnDataLoss, TestServers};
use crate::watch::{self, Watch};
use crate::worker::Broker;
use crate::{Error, Stopping, markers, secrets};

/// The drain timeout of a consumer.
const DRAIN: Duration = Duration::from_secs(10);
/// The maximum number of messages in flight in a consumer. After several crashes another consumer
/// runs this many messages in groups, because one of them may be the cause.
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
pub struct RunSettings {
    /// The name of the scenario.
    pub scenario: String,
    /// The guarantee of the consumers.
    pub guarantee: TestedGuarantee,
    /// The seed of messages and faults.
    pub seed: u64,
    /// Published messages per second.
    pub rate: u32,
    /// The number of consumers.
    pub consumers: usize,
    /// The kinds of faults.
    pub kinds: Vec<FaultKind>,
    /// The durations of faults.
    pub lengths: Lengths,
    /// When the run ends.
    pub until: RunEnd,
    /// How many faults are active at a time.
    pub concurrency: FaultConcurrency,
    /// Whether messages make consumers abort.
    pub aborts: Aborts,
    /// The percentage of lost replies, instead of that of the schedule.
    pub percent: Option<u8>,
    /// The Redis servers of the marker store.
    pub redis: RedisSetup,
    /// Which messages are published.
    pub messages: Kinds,
    /// Which consumers receive from a RabbitMQ queue.
    pub consumer_mode: ConsumerMode,
}

/// Which consumers receive from a RabbitMQ queue. On Kafka each consumer has its partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ConsumerMode {
    /// All consumers, without order.
    Competing,
    /// A single active consumer, which handles messages with the same key in order.
    SingleActive,
}

/// The Redis servers of the marker store of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RedisSetup {
    /// One Redis.
    Single,
    /// A Redis primary with two replicas and Sentinels.
    Sentinels {
        /// How many replicas must acknowledge a claim; with 0, a failover may lose claims.
        replicas: u32,
    },
}

impl RedisSetup {
    fn claim_durability(self) -> ClaimDurability {
        if self == (Self::Sentinels { replicas: 0 }) {
            ClaimDurability::MayBeLost
        } else {
            ClaimDurability::Kept
        }
    }
}

/// When a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunEnd {
    /// After this many different messages.
    Messages(u64),
    /// After this many faults.
    Faults(usize),
}

/// How many faults are active at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultConcurrency {
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
pub fn run(
    plan: &RunSettings,
    servers: &TestServers,
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
    let mut run = ActiveRun::start(plan, servers, folder, &queue, &runtime, stopping)?;
    let recovery = run.inject_faults()?;
    run.drain()?;
    run.record_remains()?;
    drop(run);

    let order = match (servers.broker(), plan.consumer_mode) {
        (Broker::Kafka, _) => Ordered::ByKey,
        (Broker::Rabbitmq, ConsumerMode::SingleActive) => Ordered::ByKeyOfAQueue,
        (Broker::Rabbitmq, ConsumerMode::Competing) => Ordered::Not,
    };
    let (guarantee, store) = (plan.guarantee, plan.redis.claim_durability());
    let rules = CheckRules {
        guarantee,
        order,
        lease: LEASE,
        grace: GRACE,
        aftermath: AFTERMATH,
        drain: DRAIN,
        store,
        in_flight: IN_FLIGHT,
        attempts: ATTEMPTS,
        scope: CheckScope::All,
    };
    let checked = check(&Ledger::read(folder)?, &rules);
    let (scenario, broker) = (plan.scenario.clone(), servers.broker().name().to_owned());
    let run = ReportedRun {
        scenario,
        broker,
        seed: plan.seed,
        rules,
        versions: servers.versions(),
        seconds: begun.elapsed().as_secs(),
        lost: 0,
    };
    let report = Report::of(run, checked, recovery);
    report.write(folder)?;
    Ok(report)
}

/// A run in progress.
struct ActiveRun<'a> {
    plan: &'a RunSettings,
    servers: &'a TestServers,
    folder: &'a Path,
    queue: &'a str,
    runtime: &'a Runtime,
    stopping: &'a Stopping,
    log: Arc<Log>,
    fleet: Arc<Fleet>,
    /// Samples until it is dropped.
    _watch: Watch,
    sink: SinkProcess,
    client: Arc<BrokerClient>,
    enough: Arc<AtomicBool>,
    publisher: Option<JoinHandle<Result<(), Error>>>,
    flow: Flow,
}

impl<'a> ActiveRun<'a> {
    fn start(
        plan: &'a RunSettings,
        servers: &'a TestServers,
        folder: &'a Path,
        queue: &'a str,
        runtime: &'a Runtime,
        stopping: &'a Stopping,
    ) -> Result<Self, Error> {
        servers.clear()?;
        let log = Arc::new(Log::open(&folder.join("harness.jsonl"), "harness")?);
        let sink = SinkProcess::start(folder)?;
        let client = Arc::new(runtime.block_on(BrokerClient::open(
            servers.broker(),
            servers.url_direct(),
            queue,
            plan.consumer_mode,
        ))?);
        let fleet = Fleet::new(
            plan.consumers,
            folder,
            arguments(plan, servers, folder, queue, &sink),
            Arc::clone(&log),
        );
        fleet.start_all()?;
        let fleet = Arc::new(fleet);
        let watch = Watch::over(&fleet, &client, folder)?;
        let enough = Arc::new(AtomicBool::new(false));
        let publisher = runtime.spawn(publish(
            plan.clone(),
            Arc::clone(&client),
            Arc::clone(&log),
            Arc::clone(&enough),
        ));
        let (publisher, flow) = (Some(publisher), Flow::over(folder, plan.rate));
        let mut run = Self {
            plan,
            servers,
            folder,
            queue,
            runtime,
            stopping,
            log,
            fleet,
            _watch: watch,
            sink,
            client,
            enough,
            publisher,
            flow,
        };
        // Faults start only after effects flow, so that a slow start is not mistaken for a loss.
        run.wait_for_rate(START_TIMEOUT)?
            .ok_or("no effects after the start; see the logs of the consumers in the folder")?;
        Ok(run)
    }

    /// Injects faults until the run ends, and waits for the publisher.
    fn inject_faults(&mut self) -> Result<BTreeMap<String, Recovery>, Error> {
        let faults = FaultLog::new(Arc::clone(&self.log));
        let mut recovery: BTreeMap<String, Recovery> = BTreeMap::new();
        let mut schedule = Schedule::new(&self.plan.kinds, self.plan.lengths, self.plan.seed);
        let mut injected = 0;
        while !self.is_enough(injected) {
            let mut planned = schedule.next().ok_or("a run without a fault")?;
            planned.percent = self.plan.percent.unwrap_or(planned.percent);
            if self.pause(planned.pause)? == PauseEnd::AllPublished {
                break;
            }
            match self.plan.concurrency {
                FaultConcurrency::One => {
                    let context = self.fault_context(&faults);
                    self.servers
                        .inject(&planned, self.plan.seed ^ injected as u64, &context)?;
                    self.record_recovery(vec![planned.name()], &mut recovery)?;
                    injected += 1;
                }
                FaultConcurrency::Two => {
                    let second = schedule
                        .next_beside(&planned, self.plan.consumers)
                        .ok_or("nothing can be injected beside another")?;
                    // The longer fault starts first, so that the faults overlap.
                    let (first, second) = if planned.lasts < second.lasts {
                        (second, planned)
                    } else {
                        (planned, second)
                    };
                    self.inject_two(&faults, [first, second], injected as u64)?;
                    let mut names = [first.kind.name(), second.kind.name()];
                    names.sort_unstable();
                    self.record_recovery(names.map(str::to_owned).to_vec(), &mut recovery)?;
                    injected += 2;
                }
            }
            self.check_processes()?;
        }
        self.enough.store(true, Ordering::Relaxed);
        if let Some(publisher) = self.publisher.take() {
            self.runtime.block_on(publisher)??;
        }
        Ok(recovery)
    }

    /// Waits until effects reach nine tenths of their rate, and records how long that took.
    fn record_recovery(
        &mut self,
        kinds: Vec<String>,
        recovery: &mut BTreeMap<String, Recovery>,
    ) -> Result<(), Error> {
        let before = Processors::now();
        let took = self
            .wait_for_rate(RECOVERY_TIMEOUT)?
            .unwrap_or(RECOVERY_TIMEOUT);
        let entry = recovery.entry(kinds.join(" + ")).or_default();
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        *entry = Recovery {
            times: entry.times + 1,
            longest_ms: entry.longest_ms.max(took_ms),
        };
        // After the last message the rate proves nothing.
        if !self.is_all_sent()
            && let (Some(before), Some(now)) = (before, Processors::now())
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
    fn inject_two(
        &self,
        faults: &FaultLog,
        planned: [Planned; 2],
        injected: u64,
    ) -> Result<(), Error> {
        let context = self.fault_context(faults);
        let inject = |planned: Planned, seed: u64| self.servers.inject(&planned, seed, &context);
        std::thread::scope(|scope: &Scope<'_, '_>| {
            let first = scope.spawn(|| inject(planned[0], self.plan.seed ^ injected));
            std::thread::sleep(planned[1].pause.min(planned[0].lasts / 2));
            let second = inject(planned[1], self.plan.seed ^ (injected + 1));
            first.join().map_err(|_| "a fault panicked")??;
            second
        })
    }

    fn fault_context<'b>(&'b self, faults: &'b FaultLog) -> FaultContext<'b> {
        let pauses = self.plan.guarantee == TestedGuarantee::AtMostOnce
            && self.plan.redis.claim_durability() == ClaimDurability::MayBeLost;
        let on_data_loss = if pauses {
            OnDataLoss::Restart
        } else {
            OnDataLoss::KeepRunning
        };
        FaultContext {
            fleet: &self.fleet,
            faults,
            folder: self.folder,
            log: &self.log,
            queue: self.queue,
            on_data_loss,
        }
    }

    fn is_enough(&self, injected: usize) -> bool {
        let sent = self.is_all_sent();
        match self.plan.until {
            RunEnd::Faults(faults) => injected >= faults || sent,
            RunEnd::Messages(_) => sent,
        }
    }

    /// Waits between two faults; ends early when all messages are published.
    fn pause(&mut self, pause: Duration) -> Result<PauseEnd, Error> {
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if self.is_all_sent() {
                return Ok(PauseEnd::AllPublished);
            }
            std::thread::sleep(POLL_INTERVAL.min(until.saturating_duration_since(Instant::now())));
            self.check_processes()?;
        }
        Ok(PauseEnd::Elapsed)
    }

    /// Waits until effects reach nine tenths of the publishing rate. Returns how long that took;
    /// none after the timeout.
    fn wait_for_rate(&mut self, timeout: Duration) -> Result<Option<Duration>, Error> {
        let (since, begun) = (Instant::now(), crate::ledger::now());
        while since.elapsed() < timeout {
            self.check_processes()?;
            if self.flow.flows_since(begun)? || self.is_all_sent() {
                // The measured second itself is not part of the recovery time.
                return Ok(Some(since.elapsed().saturating_sub(SPAN)));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(None)
    }

    fn check_processes(&mut self) -> Result<(), Error> {
        self.stopping.check()?;
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
            let left = self.unsettled_at_end();
            if left == Some(0) || Instant::now() > until {
                // Without a reply of the broker the count is unknown, not 0.
                self.log.write(What::Unsettled {
                    count: left.unwrap_or(u64::MAX),
                });
                return Ok(());
            }
            self.fleet.start(&mut self.fleet.slot(0))?;
        }
    }

    /// The number of unsettled messages; polls, because queues update their counts with a delay.
    fn unsettled_at_end(&self) -> Option<u64> {
        let mut left = None;
        for _ in 0..10 {
            left = self.runtime.block_on(self.client.unsettled()).ok();
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
            self.check_processes()?;
            let now = written(self.folder)?;
            if now != size {
                (size, since) = (now, Instant::now());
            }
            if since.elapsed() > QUIET_TIME {
                if self
                    .runtime
                    .block_on(self.client.unsettled())
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
        let rejected = self.runtime.block_on(self.client.rejected_messages())?;
        let record = |message: crate::broker_client::RejectedMessage| What::Rejected {
            id: message.id,
            place: message.place,
            reason: message.reason,
        };
        self.log.write_all(rejected.into_iter().map(record));
        std::thread::sleep(LEASE + Duration::from_secs(1));
        let markers = self.runtime.block_on(markers::unfinished(
            &self.servers.redis_direct(),
            self.queue,
        ))?;
        self.log.write_all(
            markers
                .into_iter()
                .map(|(id, record)| What::Marker { id, record }),
        );
        self.servers.save_logs(self.folder, &self.log)?;
        let leaks = secrets::find(self.folder, self.servers.secrets())?;
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
enum PauseEnd {
    Elapsed,
    AllPublished,
}

async fn publish(
    plan: RunSettings,
    client: Arc<BrokerClient>,
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
            RunEnd::Messages(count) => messages.different() >= count,
            RunEnd::Faults(_) => false,
        };
        if over {
            now.extend(messages.pending_copies());
        }
        client.publish(now, &log).await?;
        if over {
            break;
        }
    }
    client.flush().await;
    Ok(())
}

/// The arguments of each consumer except its name.
pub(crate) fn base_arguments(
    guarantee: TestedGuarantee,
    servers: &TestServers,
    folder: &Path,
    queue: &str,
    sink: &SinkProcess,
) -> Vec<String> {
    let guarantee = match guarantee {
        TestedGuarantee::AtMostOnce => "at-most-once",
        TestedGuarantee::EffectivelyOnce => "effectively-once",
        TestedGuarantee::Bare => "bare",
    };
    let arguments = [
        ("folder", folder.display().to_string()),
        ("broker", servers.broker().name().to_owned()),
        ("url", servers.url()),
        ("from", queue.to_owned()),
        ("redis", servers.redis().join(",")),
        ("guarantee", guarantee.to_owned()),
        ("sink", sink.address().to_string()),
        ("lease-ms", LEASE.as_millis().to_string()),
        ("drain-ms", DRAIN.as_millis().to_string()),
        ("in-flight", IN_FLIGHT.to_string()),
    ];
    let mut arguments: Vec<String> = arguments
        .into_iter()
        .map(|(name, value)| format!("--{name}={value}"))
        .collect();
    if let Some(login) = servers.login() {
        arguments.push("--login".to_owned());
        arguments.extend(login);
    }
    arguments
}

fn arguments(
    plan: &RunSettings,
    servers: &TestServers,
    folder: &Path,
    queue: &str,
    sink: &SinkProcess,
) -> Vec<String> {
    let mut arguments = base_arguments(plan.guarantee, servers, folder, queue, sink);
    if let RedisSetup::Sentinels { replicas } = plan.redis {
        arguments.push(format!("--replicas={replicas}"));
    }
    if (servers.broker(), plan.consumer_mode) == (Broker::Rabbitmq, ConsumerMode::SingleActive) {
        arguments.push("--one-at-a-time".to_owned());
    }
    arguments
}

/// The size of the ledger in bytes, without the samples, which grow all the time.
pub(crate) fn written(folder: &Path) -> Result<u64, Error> {
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
