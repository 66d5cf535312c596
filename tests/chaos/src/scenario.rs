//! Named scenarios: single runs, soak and smoke tests.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::check::TestedGuarantee;
use crate::message::{Aborts, Kinds};
use crate::report::{Report, RunVerdict};
use crate::run::{ConsumerMode, FaultConcurrency, RedisSetup, RunEnd, RunSettings, run};
use crate::schedule::{
    COMMON_FAULTS, FaultKind, KAFKA_FAULTS, Lengths, RABBITMQ_FAULTS, SENTINEL_FAULTS,
};
use crate::servers::TestServers;
use crate::worker::Broker;
use crate::{Error, Stopping};

/// Messages per second in a smoke run: few, because CI has only two cores.
const SMOKE_RATE: u32 = 100;
/// The percentage of lost replies in a smoke run: enough that the negative control loses messages.
const SMOKE_PERCENT: u8 = 20;

/// How often the negative control is repeated until it loses messages.
const MAX_CONTROL_RUNS: u64 = 3;

/// How many consecutive runs may fail to complete until a soak test ends.
const MAX_FAILED_RUNS: u32 = 3;

/// The options of the command line.
#[derive(Clone, Debug)]
pub struct ScenarioOptions {
    /// A fault's name, `mixed` for all faults of a broker, or `pairs` for two of these at a time.
    pub name: String,
    /// The brokers.
    pub brokers: Vec<Broker>,
    /// The guarantees, one run each.
    pub guarantees: Vec<TestedGuarantee>,
    /// The seed of messages and faults.
    pub seed: u64,
    /// The number of different messages of a run.
    pub messages: u64,
    /// Published messages per second.
    pub rate: u32,
    /// The number of consumers.
    pub consumers: usize,
    /// The durations of faults.
    pub lengths: Lengths,
    /// With Sentinels: how many replicas must acknowledge a claim.
    pub replicas: u32,
    /// Which consumers receive from a RabbitMQ queue.
    pub consumer_mode: ConsumerMode,
}

/// Runs scenarios one after the other on servers that it keeps running.
pub struct ScenarioRunner<'a> {
    folder: PathBuf,
    stopping: &'a Stopping,
    servers: HashMap<(Broker, RedisServers), TestServers>,
}

/// The Redis servers of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum RedisServers {
    Single,
    Sentinels,
}

/// Which files of successful runs are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All.
    Everything,
    /// The reports.
    Reports,
}

impl ScenarioOptions {
    fn plan(&self, broker: Broker, guarantee: TestedGuarantee) -> Result<RunSettings, Error> {
        let (mut kinds, concurrency, aborts) = match self.name.as_str() {
            "mixed" => (all(broker), FaultConcurrency::One, Aborts::Some),
            "pairs" => (all(broker), FaultConcurrency::Two, Aborts::Some),
            name => (
                vec![name.parse::<FaultKind>()?],
                FaultConcurrency::One,
                Aborts::Never,
            ),
        };
        // When RabbitMQ cancels a consumer, its channel keeps its unacknowledged messages, and the
        // next consumer receives later ones at once. No client can keep the order then, so this
        // fault only runs if it is selected by name.
        if self.consumer_mode == ConsumerMode::SingleActive && kinds.len() > 1 {
            kinds.retain(|kind| *kind != FaultKind::CancelConsumers);
        }
        let sentinels = SENTINEL_FAULTS.iter().any(|kind| kinds.contains(kind));
        Ok(RunSettings {
            scenario: self.name.clone(),
            guarantee,
            seed: self.seed,
            rate: self.rate,
            consumers: self.consumers,
            kinds,
            lengths: self.lengths,
            until: RunEnd::Messages(self.messages),
            concurrency,
            aborts,
            percent: None,
            redis: if sentinels {
                RedisSetup::Sentinels {
                    replicas: self.replicas,
                }
            } else {
                RedisSetup::Single
            },
            messages: Kinds::All,
            consumer_mode: self.consumer_mode,
        })
    }

    /// Whether the scenario applies to this broker.
    fn applies_to(&self, broker: Broker) -> bool {
        let other: &[FaultKind] = if broker == Broker::Kafka {
            &RABBITMQ_FAULTS
        } else {
            &KAFKA_FAULTS
        };
        !other.iter().any(|kind| kind.name() == self.name)
    }
}

/// All faults that apply to a broker.
fn all(broker: Broker) -> Vec<FaultKind> {
    let of_the_broker: &[FaultKind] = if broker == Broker::Kafka {
        &KAFKA_FAULTS
    } else {
        &RABBITMQ_FAULTS
    };
    COMMON_FAULTS.iter().chain(of_the_broker).copied().collect()
}

impl<'a> ScenarioRunner<'a> {
    /// Writes the results of runs below this folder.
    pub fn new(folder: &Path, stopping: &'a Stopping) -> Self {
        Self {
            folder: folder.to_owned(),
            stopping,
            servers: HashMap::new(),
        }
    }

    /// Runs the scenario with each broker and guarantee, and prints each result.
    ///
    /// # Errors
    /// A run could not be completed.
    pub fn run(&mut self, options: &ScenarioOptions) -> Result<Report, Error> {
        let runs: Vec<(Broker, TestedGuarantee)> = options
            .brokers
            .iter()
            .flat_map(|broker| options.guarantees.iter().map(|it| (*broker, *it)))
            .collect();
        let mut sum = None;
        for (broker, guarantee) in runs
            .into_iter()
            .filter(|(broker, _)| options.applies_to(*broker))
        {
            add(
                &mut sum,
                self.run_plan(broker, &options.plan(broker, guarantee)?, Keep::Everything)?,
            )?;
        }
        sum.ok_or_else(|| {
            "nothing to run: this fault applies to the other broker; select it with --broker".into()
        })
    }

    /// Repeats the scenario with increasing seeds until the time is over, and completes the last
    /// run. Keeps the reports, and all files of runs that did not pass.
    ///
    /// # Errors
    /// Several runs in succession could not be completed.
    pub fn soak(&mut self, options: &ScenarioOptions, time: Duration) -> Result<Report, Error> {
        let (until, mut sum, mut options) = (Instant::now() + time, None, options.clone());
        let mut failed_runs = 0;
        loop {
            for broker in options
                .brokers
                .clone()
                .into_iter()
                .filter(|broker| options.applies_to(*broker))
            {
                // One guarantee per round, for more seeds in the given time.
                let guarantee =
                    options.guarantees[usize::try_from(options.seed)? % options.guarantees.len()];
                match self.run_plan(broker, &options.plan(broker, guarantee)?, Keep::Reports) {
                    Ok(report) => {
                        add(&mut sum, report)?;
                        // The result so far, in case the process is killed.
                        sum.iter().try_for_each(|sum| sum.write(&self.folder))?;
                        failed_runs = 0;
                    }
                    // On an overloaded machine a server may not start in time; the run then has no
                    // result.
                    Err(error) => {
                        self.stopping.check()?;
                        failed_runs += 1;
                        if failed_runs == MAX_FAILED_RUNS {
                            return Err(error);
                        }
                        println!("chaos: a run could not be completed and is not counted: {error}");
                        self.servers.retain(|(of, _), _| *of != broker);
                    }
                }
                if let (Some(sum), true) = (sum.as_ref(), Instant::now() >= until) {
                    return Ok(Report::clone(sum));
                }
            }
            if sum.is_none() && failed_runs == 0 {
                return Err("nothing to run: this fault applies to the other broker; select it with --broker".into());
            }
            options.seed += 1;
        }
    }

    /// Each kind of fault once, on both brokers side by side, and the negative control on each:
    /// under four minutes.
    ///
    /// # Errors
    /// A run could not be completed, or the control lost no message.
    pub fn smoke(&self, seed: u64) -> Result<Report, Error> {
        use FaultKind::*;
        let on_kafka = [
            KillConsumer,
            FreezeConsumer,
            KillRedis,
            LoadRedis,
            FillRedis,
            FillDisk,
            DemoteRedis,
            StrandRedis,
            FlushScripts,
        ];
        let on_kafka: Vec<FaultKind> = on_kafka.into_iter().chain(KAFKA_FAULTS).collect();
        let on_rabbit = [
            KillConsumer,
            TerminateConsumer,
            RollingRestart,
            FreezeRedis,
            LoadRedis,
            DropReplies,
            DarkRedis,
            ResetRedis,
            RefuseLetters,
        ];
        let on_rabbit: Vec<FaultKind> = on_rabbit.into_iter().chain(RABBITMQ_FAULTS).collect();
        // Alternates with the seed, so that each broker is tested with each guarantee.
        let mut guarantees = [
            TestedGuarantee::AtMostOnce,
            TestedGuarantee::EffectivelyOnce,
        ];
        guarantees.rotate_left(usize::from(seed.is_multiple_of(2)));
        let run = |broker, guarantee, kinds: Vec<FaultKind>| -> Result<Report, Error> {
            let mut runner = ScenarioRunner::new(&self.folder, self.stopping);
            let until = RunEnd::Faults(kinds.len());
            let mut report = runner.run_plan(
                broker,
                &short(guarantee, seed, kinds, until),
                Keep::Everything,
            )?;
            if broker == Broker::Rabbitmq {
                let redis = RedisSetup::Sentinels { replicas: 2 };
                let plan = RunSettings {
                    redis,
                    messages: Kinds::WithoutHanging,
                    ..short(
                        guarantees[0],
                        seed,
                        SENTINEL_FAULTS.to_vec(),
                        RunEnd::Faults(1),
                    )
                };
                report.add(runner.run_plan(
                    broker,
                    &RunSettings {
                        scenario: "smoke-sentinels".into(),
                        ..plan
                    },
                    Keep::Everything,
                )?)?;
            }
            runner.control(broker, seed)?;
            Ok(report)
        };
        std::thread::scope(|scope| {
            let kafka = scope.spawn(|| run(Broker::Kafka, guarantees[0], on_kafka));
            let rabbit = run(Broker::Rabbitmq, guarantees[1], on_rabbit);
            let mut sum: Report = kafka
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            sum.add(rabbit?)?;
            Ok(sum)
        })
    }

    /// The negative control: `bare` must lose messages. Repeated if it loses none, since on an
    /// overloaded machine few claims may be in flight while replies are lost.
    ///
    /// # Errors
    /// It lost no message in any run.
    fn control(&mut self, broker: Broker, seed: u64) -> Result<(), Error> {
        let mut text = String::new();
        for seed in seed..seed + MAX_CONTROL_RUNS {
            // Hanging messages would only extend the run.
            let plan = RunSettings {
                messages: Kinds::WithoutHanging,
                ..short(
                    TestedGuarantee::Bare,
                    seed,
                    vec![FaultKind::DropReplies],
                    RunEnd::Faults(1),
                )
            };
            let control = self.run_plan(broker, &plan, Keep::Everything)?;
            if control.verdict() == RunVerdict::LostAsExpected {
                return Ok(());
            }
            text = control.line();
        }
        Err(format!(
            "the negative control lost no message, so the harness may not detect losses: {text}"
        )
        .into())
    }

    fn run_plan(
        &mut self,
        broker: Broker,
        plan: &RunSettings,
        keep: Keep,
    ) -> Result<Report, Error> {
        self.stopping.check()?;
        let begun = Instant::now();
        let redis = if plan.redis == RedisSetup::Single {
            RedisServers::Single
        } else {
            RedisServers::Sentinels
        };
        let servers = match self.servers.remove(&(broker, redis)) {
            Some(servers) => servers,
            None => {
                // Both servers share the broker.
                let other = self
                    .servers
                    .iter()
                    .find(|((other, _), _)| *other == broker)
                    .map(|(_, servers)| servers);
                match (other, redis) {
                    (Some(servers), RedisServers::Sentinels) => servers.with_sentinels()?,
                    (_, RedisServers::Single) => TestServers::start(broker)?,
                    (None, RedisServers::Sentinels) => {
                        TestServers::start(broker)?.with_sentinels()?
                    }
                }
            }
        };
        let servers = &*self.servers.entry((broker, redis)).or_insert(servers);
        let guarantee = serde_json::to_value(plan.guarantee)?
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let folder = self.folder.join(format!(
            "{}-{}-{guarantee}-{}",
            plan.scenario,
            broker.name(),
            plan.seed
        ));
        println!(
            "chaos: {} on {}, {guarantee}, seed {}: {}",
            plan.scenario,
            broker.name(),
            plan.seed,
            folder.display()
        );
        let report = run(plan, servers, &folder, self.stopping).map_err(|error| {
            format!("{error}; the files of the run are in {}", folder.display())
        })?;
        println!("chaos: {} ({} s)", report.line(), begun.elapsed().as_secs());
        // The losses of `bare` are expected.
        let text = if plan.guarantee == TestedGuarantee::Bare {
            &[]
        } else {
            report.violations.as_slice()
        };
        for violation in text {
            println!(
                "chaos:   {} {}: {}",
                violation.invariant,
                violation.id.as_deref().unwrap_or("-"),
                violation.why
            );
        }
        if keep == Keep::Reports && report.verdict() == RunVerdict::Passed {
            std::fs::remove_dir_all(&folder)?;
            std::fs::create_dir(&folder)?;
            report.write(&folder)?;
        }
        Ok(report)
    }
}

fn short(
    guarantee: TestedGuarantee,
    seed: u64,
    kinds: Vec<FaultKind>,
    until: RunEnd,
) -> RunSettings {
    RunSettings {
        scenario: "smoke".into(),
        guarantee,
        seed,
        rate: SMOKE_RATE,
        consumers: 2,
        kinds,
        lengths: Lengths::Short,
        until,
        concurrency: FaultConcurrency::One,
        aborts: Aborts::Never,
        percent: Some(SMOKE_PERCENT),
        redis: RedisSetup::Single,
        messages: Kinds::All,
        consumer_mode: ConsumerMode::Competing,
    }
}

fn add(sum: &mut Option<Report>, report: Report) -> Result<(), Error> {
    match sum {
        Some(sum) => Ok(sum.add(report)?),
        None => {
            *sum = Some(report);
            Ok(())
        }
    }
}
