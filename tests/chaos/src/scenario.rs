//! Named scenarios: single runs, soak and smoke tests.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::check::Promise;
use crate::message::{Aborts, Kinds};
use crate::play::{AtOnce, Markers, Plan, Taken, Until, play};
use crate::report::{Report, Verdict};
use crate::schedule::{ANYWHERE, KAFKA, Kind, Lengths, RABBITMQ, WATCHED};
use crate::stage::Stage;
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
pub struct Wish {
    /// A fault's name, `mixed` for all that a broker knows, or `pairs` for two of these at a time.
    pub name: String,
    /// The brokers.
    pub brokers: Vec<Broker>,
    /// The guarantees, one run each.
    pub promises: Vec<Promise>,
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
    pub taken: Taken,
}

/// Runs scenarios one after the other on servers that it keeps running.
pub struct Director<'a> {
    folder: PathBuf,
    stopping: &'a Stopping,
    stages: HashMap<(Broker, Redis), Stage>,
}

/// The Redis servers of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Redis {
    One,
    Watched,
}

/// Which files of successful runs are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All.
    Everything,
    /// The reports.
    Reports,
}

impl Wish {
    fn plan(&self, broker: Broker, promise: Promise) -> Result<Plan, Error> {
        let (mut kinds, at_once, aborts) = match self.name.as_str() {
            "mixed" => (all(broker), AtOnce::One, Aborts::Some),
            "pairs" => (all(broker), AtOnce::Two, Aborts::Some),
            name => (vec![name.parse::<Kind>()?], AtOnce::One, Aborts::Never),
        };
        // When RabbitMQ cancels a consumer, its channel keeps its unacknowledged messages, and the
        // next consumer receives later ones at once. No client can keep the order then, so this
        // fault only runs if it is selected by name.
        if self.taken == Taken::ByOne && kinds.len() > 1 {
            kinds.retain(|kind| *kind != Kind::CancelConsumers);
        }
        let watched = WATCHED.iter().any(|kind| kinds.contains(kind));
        Ok(Plan {
            scenario: self.name.clone(),
            promise,
            seed: self.seed,
            rate: self.rate,
            consumers: self.consumers,
            kinds,
            lengths: self.lengths,
            until: Until::Messages(self.messages),
            at_once,
            aborts,
            percent: None,
            markers: if watched {
                Markers::Watched {
                    replicas: self.replicas,
                }
            } else {
                Markers::One
            },
            messages: Kinds::All,
            taken: self.taken,
        })
    }

    /// Whether the scenario applies to this broker.
    fn is_of(&self, broker: Broker) -> bool {
        let other: &[Kind] = if broker == Broker::Kafka {
            &RABBITMQ
        } else {
            &KAFKA
        };
        !other.iter().any(|kind| kind.name() == self.name)
    }
}

/// All faults that apply to a broker.
fn all(broker: Broker) -> Vec<Kind> {
    let of_its_own: &[Kind] = if broker == Broker::Kafka {
        &KAFKA
    } else {
        &RABBITMQ
    };
    ANYWHERE.iter().chain(of_its_own).copied().collect()
}

impl<'a> Director<'a> {
    /// Writes the results of runs below this folder.
    pub fn new(folder: &Path, stopping: &'a Stopping) -> Self {
        Self {
            folder: folder.to_owned(),
            stopping,
            stages: HashMap::new(),
        }
    }

    /// Runs the scenario with each broker and guarantee, and prints each result.
    ///
    /// # Errors
    /// A run could not be completed.
    pub fn run(&mut self, wish: &Wish) -> Result<Report, Error> {
        let runs: Vec<(Broker, Promise)> = wish
            .brokers
            .iter()
            .flat_map(|broker| wish.promises.iter().map(|it| (*broker, *it)))
            .collect();
        let mut sum = None;
        for (broker, promise) in runs.into_iter().filter(|(broker, _)| wish.is_of(*broker)) {
            add(
                &mut sum,
                self.play(broker, &wish.plan(broker, promise)?, Keep::Everything)?,
            )?;
        }
        sum.ok_or_else(|| {
            "nothing to run: this fault applies to the other broker; select it with --broker".into()
        })
    }

    /// Plays what was wished with one seed after the other, until the time is over; a run that has
    /// begun is played to its end. What is kept are the reports, and all of runs that were not
    /// right.
    ///
    /// # Errors
    /// If a run could not be played.
    pub fn soak(&mut self, wish: &Wish, time: Duration) -> Result<Report, Error> {
        let (until, mut sum, mut wish) = (Instant::now() + time, None, wish.clone());
        let mut unplayed = 0;
        loop {
            for broker in wish
                .brokers
                .clone()
                .into_iter()
                .filter(|broker| wish.is_of(*broker))
            {
                // One guarantee per round, for more seeds in the given time.
                let promise = wish.promises[usize::try_from(wish.seed)? % wish.promises.len()];
                match self.play(broker, &wish.plan(broker, promise)?, Keep::Reports) {
                    Ok(report) => {
                        add(&mut sum, report)?;
                        // The result so far, in case the process is killed.
                        sum.iter().try_for_each(|sum| sum.write(&self.folder))?;
                        unplayed = 0;
                    }
                    // On an overloaded machine a server may not start in time; the run then has no
                    // result.
                    Err(error) => {
                        self.stopping.go_on()?;
                        unplayed += 1;
                        if unplayed == MAX_FAILED_RUNS {
                            return Err(error);
                        }
                        println!("chaos: a run could not be completed and is not counted: {error}");
                        self.stages.retain(|(of, _), _| *of != broker);
                    }
                }
                if let (Some(sum), true) = (sum.as_ref(), Instant::now() >= until) {
                    return Ok(Report::clone(sum));
                }
            }
            if sum.is_none() && unplayed == 0 {
                return Err("nothing to run: this fault applies to the other broker; select it with --broker".into());
            }
            wish.seed += 1;
        }
    }

    /// Each kind of fault once, on both brokers side by side, and the negative control on each:
    /// under four minutes.
    ///
    /// # Errors
    /// If a run could not be played, or the control could not be seen to lose.
    pub fn smoke(&self, seed: u64) -> Result<Report, Error> {
        use Kind::*;
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
        let on_kafka: Vec<Kind> = on_kafka.into_iter().chain(KAFKA).collect();
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
        let on_rabbit: Vec<Kind> = on_rabbit.into_iter().chain(RABBITMQ).collect();
        // Alternates with the seed, so that each broker is tested with each guarantee.
        let mut promises = [Promise::AtMostOnce, Promise::EffectivelyOnce];
        promises.rotate_left(usize::from(seed.is_multiple_of(2)));
        let run = |broker, promise, kinds: Vec<Kind>| -> Result<Report, Error> {
            let mut director = Director::new(&self.folder, self.stopping);
            let until = Until::Faults(kinds.len());
            let mut report = director.play(
                broker,
                &short(promise, seed, kinds, until),
                Keep::Everything,
            )?;
            if broker == Broker::Rabbitmq {
                let markers = Markers::Watched { replicas: 2 };
                let plan = Plan {
                    markers,
                    messages: Kinds::WithoutHanging,
                    ..short(promises[0], seed, WATCHED.to_vec(), Until::Faults(1))
                };
                report.add(director.play(
                    broker,
                    &Plan {
                        scenario: "smoke-sentinels".into(),
                        ..plan
                    },
                    Keep::Everything,
                )?)?;
            }
            director.control(broker, seed)?;
            Ok(report)
        };
        std::thread::scope(|scope| {
            let kafka = scope.spawn(|| run(Broker::Kafka, promises[0], on_kafka));
            let rabbit = run(Broker::Rabbitmq, promises[1], on_rabbit);
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
        let mut told = String::new();
        for seed in seed..seed + MAX_CONTROL_RUNS {
            // Hanging messages would only extend the run.
            let plan = Plan {
                messages: Kinds::WithoutHanging,
                ..short(
                    Promise::Bare,
                    seed,
                    vec![Kind::DropReplies],
                    Until::Faults(1),
                )
            };
            let control = self.play(broker, &plan, Keep::Everything)?;
            if control.verdict() == Verdict::SeenToLose {
                return Ok(());
            }
            told = control.line();
        }
        Err(format!(
            "the negative control lost no message, so the harness may not detect losses: {told}"
        )
        .into())
    }

    fn play(&mut self, broker: Broker, plan: &Plan, keep: Keep) -> Result<Report, Error> {
        self.stopping.go_on()?;
        let begun = Instant::now();
        let redis = if plan.markers == Markers::One {
            Redis::One
        } else {
            Redis::Watched
        };
        let stage = match self.stages.remove(&(broker, redis)) {
            Some(stage) => stage,
            None => {
                // Both stages share the broker.
                let other = self
                    .stages
                    .iter()
                    .find(|((other, _), _)| *other == broker)
                    .map(|(_, stage)| stage);
                match (other, redis) {
                    (Some(stage), Redis::Watched) => stage.with_sentinels()?,
                    (_, Redis::One) => Stage::start(broker)?,
                    (None, Redis::Watched) => Stage::start(broker)?.with_sentinels()?,
                }
            }
        };
        let stage = &*self.stages.entry((broker, redis)).or_insert(stage);
        let promise = serde_json::to_value(plan.promise)?
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let folder = self.folder.join(format!(
            "{}-{}-{promise}-{}",
            plan.scenario,
            broker.name(),
            plan.seed
        ));
        println!(
            "chaos: {} on {}, {promise}, seed {}: {}",
            plan.scenario,
            broker.name(),
            plan.seed,
            folder.display()
        );
        let report = play(plan, stage, &folder, self.stopping).map_err(|error| {
            format!("{error}; the files of the run are in {}", folder.display())
        })?;
        println!("chaos: {} ({} s)", report.line(), begun.elapsed().as_secs());
        // The losses of `bare` are expected.
        let told = if plan.promise == Promise::Bare {
            &[]
        } else {
            report.violations.as_slice()
        };
        for violation in told {
            println!(
                "chaos:   {} {}: {}",
                violation.invariant,
                violation.id.as_deref().unwrap_or("-"),
                violation.why
            );
        }
        if keep == Keep::Reports && report.verdict() == Verdict::Held {
            std::fs::remove_dir_all(&folder)?;
            std::fs::create_dir(&folder)?;
            report.write(&folder)?;
        }
        Ok(report)
    }
}

fn short(promise: Promise, seed: u64, kinds: Vec<Kind>, until: Until) -> Plan {
    Plan {
        scenario: "smoke".into(),
        promise,
        seed,
        rate: SMOKE_RATE,
        consumers: 2,
        kinds,
        lengths: Lengths::Short,
        until,
        at_once: AtOnce::One,
        aborts: Aborts::Never,
        percent: Some(SMOKE_PERCENT),
        markers: Markers::One,
        messages: Kinds::All,
        taken: Taken::ByAll,
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
