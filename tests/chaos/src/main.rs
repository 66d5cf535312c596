//! `oncegate-chaos`: injects faults into real servers and checks the guarantees. `cargo xtask
//! chaos` runs it.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{Parser, Subcommand};
use oncegate_chaos::check::{TestedGuarantee, check};
use oncegate_chaos::consume;
use oncegate_chaos::ledger::Ledger;
use oncegate_chaos::matrix::consumer::TestedStore;
use oncegate_chaos::matrix::table::Matrix;
use oncegate_chaos::report::{Report, RunVerdict};
use oncegate_chaos::run::ConsumerMode;
use oncegate_chaos::scenario::{ScenarioOptions, ScenarioRunner};
use oncegate_chaos::schedule::Lengths;
use oncegate_chaos::worker::Broker;
use oncegate_chaos::{Error, Stopping, fleet, matrix, mutants, probes, servers, sink};

/// Injects faults into real servers and checks the guarantees.
///
/// NAME is a fault (kill-consumer, freeze-consumer, terminate-consumer, rolling-restart,
/// kill-redis, load-redis, freeze-redis, drop-replies, dark-redis, reset-redis, fill-redis,
/// fill-disk, demote-redis, strand-redis, flush-scripts, refuse-letters, restart-rabbit,
/// kill-rabbit, close-connections, close-channels, cancel-consumers, dark-rabbit, reset-rabbit,
/// kill-kafka, freeze-kafka, rebalance), `mixed` for all of them one after the other, or `pairs`
/// for two at a time. `fail-over-redis` uses Redis servers with Sentinels. Exit code 0 if all
/// invariants held.
#[derive(Parser)]
#[command(
    name = "cargo xtask chaos",
    bin_name = "cargo xtask chaos",
    args_conflicts_with_subcommands = true
)]
struct Arguments {
    /// The scenario.
    #[arg(default_value = "mixed")]
    name: String,
    /// Injects each kind of fault once, on both brokers, and runs the negative control: `bare` must
    /// lose messages. Under four minutes.
    #[arg(long, conflicts_with_all = ["name", "soak"])]
    smoke: bool,
    /// Aborts a process at every step of the delivery lifecycle, with each guarantee, broker and
    /// store, three times each, and at every step of the inbox and its relay, twenty times each.
    /// NAME selects steps by a prefix, such as `claim`.
    #[arg(long, conflicts_with_all = ["smoke", "soak"])]
    matrix: bool,
    /// Runs twelve mutants, each of which must violate a certain invariant. NAME selects one.
    #[arg(long, conflicts_with_all = ["smoke", "soak", "matrix"])]
    mutants: bool,
    /// Only the cells of the matrix with this store.
    #[arg(long, value_enum)]
    store: Option<TestedStore>,
    /// How many consumer groups of the matrix run in parallel.
    #[arg(long)]
    side_by_side: Option<usize>,
    /// Repeats the scenario for this many minutes with increasing seeds. `sum` adds reports.
    #[arg(long, value_name = "MINUTES")]
    soak: Option<u64>,
    /// The seed of messages and faults; by default the current time, in a smoke run 1.
    #[arg(long)]
    seed: Option<u64>,
    /// How many different messages each run sends.
    #[arg(long, default_value_t = 5_000)]
    messages: u64,
    /// Published messages per second.
    #[arg(long, default_value_t = 100)]
    rate: u32,
    /// How many consumers there are.
    #[arg(long, default_value_t = 3)]
    consumers: usize,
    /// How long faults last, and the pauses between them.
    #[arg(long, value_enum, default_value_t = Lengths::Full)]
    lengths: Lengths,
    /// How many of the two replicas must acknowledge a claim in `fail-over-redis`. With 0, at most
    /// once pauses after a failover and may have second effects; with 1 it pauses if Sentinels
    /// promote the other replica.
    #[arg(long, default_value_t = 2)]
    replicas: u32,
    /// RabbitMQ: uses a single active consumer and handles messages with the same key in order, as
    /// is always the case on Kafka.
    #[arg(long)]
    in_order: bool,
    /// The broker; by default both.
    #[arg(long, value_enum)]
    broker: Option<Broker>,
    /// The guarantee; by default at most once and effectively once alternately. A run of `bare`
    /// exits with 1, since it loses messages, or with 2 if it lost none.
    #[arg(long, value_enum)]
    guarantee: Option<TestedGuarantee>,
    /// The folder for the results; by default a new one in target/chaos.
    #[arg(long)]
    folder: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Checks the ledger of a run again, and rewrites its report.
    Check {
        /// The folder of the run, with its report.json.
        folder: PathBuf,
    },
    /// Kill probes: kills consumers of a Kafka topic while they handle messages. A message without
    /// an effect after the session timeout plus three leases is late, and a minute later lost.
    Probes {
        /// The number of probes.
        #[arg(long, default_value_t = 200)]
        count: u64,
        /// How many run in parallel.
        #[arg(long, default_value_t = 4)]
        side_by_side: usize,
        /// Messages in each probe.
        #[arg(long, default_value_t = 4_000)]
        messages: u64,
        /// SIGKILLs in each probe.
        #[arg(long, default_value_t = 5)]
        kills: u64,
        /// The seed of the times of the kills.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Adds reports.
    Sum {
        /// Files named report.json, or matrix.json of the matrix.
        reports: Vec<PathBuf>,
    },
    /// A consumer of a run.
    #[command(hide = true)]
    Consume(consume::Arguments),
    /// A consumer of a cell of the matrix.
    #[command(hide = true)]
    CellConsumer(matrix::consumer::Arguments),
    /// The process of a cell of the matrix with an inbox.
    #[command(hide = true)]
    CellService(matrix::service::Arguments),
    /// The sink of a run.
    #[command(hide = true)]
    Sink {
        /// The folder of its ledger file.
        #[arg(long)]
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("chaos: {error}");
            println!("chaos: FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut arguments: Arguments) -> Result<ExitCode, Error> {
    match arguments.command.take() {
        None => run_scenarios(&arguments),
        Some(Command::Check { folder }) => {
            let before = read(&folder.join("report.json"))?;
            let run = before
                .runs
                .into_iter()
                .next()
                .ok_or("the report contains no run")?;
            let report = Report::of(
                run.clone(),
                check(&Ledger::read(&folder)?, &run.rules),
                before.recovery,
            );
            report.write(&folder)?;
            println!("{}", report.to_markdown());
            Ok(verdict(&report, None))
        }
        Some(Command::Sum { reports })
            if reports.iter().any(|path| path.ends_with("matrix.json")) =>
        {
            let mut sum = Matrix::default();
            for path in reports {
                let text =
                    std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
                sum.add(serde_json::from_slice(&text)?);
            }
            println!("{}", sum.to_markdown());
            Ok(last_line(sum.passed(), &sum.verdict(), None))
        }
        Some(Command::Sum { reports }) => {
            let mut sum: Option<Report> = None;
            for path in reports {
                let report = read(&path)?;
                match &mut sum {
                    None => sum = Some(report),
                    Some(sum) => sum.add(report)?,
                }
            }
            let sum = sum.ok_or("no reports were named")?;
            println!("{}", sum.to_markdown());
            Ok(verdict(&sum, None))
        }
        Some(Command::Probes {
            count,
            side_by_side,
            messages,
            kills,
            seed,
        }) => {
            let stopping = Stopping::on_signals()?;
            let folder = target()
                .join("chaos")
                .join(format!("probes-{}", std::process::id()));
            let probed = probes::run(
                &probes::ProbeOptions {
                    probes: count,
                    side_by_side,
                    messages,
                    kills,
                    seed,
                },
                &folder,
                &stopping,
            )?;
            Ok(last_line(probed.passed(), &probed.line(), None))
        }
        Some(Command::Consume(consumer)) => {
            fleet::end_with_parent();
            tokio::runtime::Runtime::new()?.block_on(consume::run(consumer))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::CellConsumer(consumer)) => {
            fleet::end_with_parent();
            tokio::runtime::Runtime::new()?.block_on(matrix::consumer::run(consumer))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::CellService(service)) => {
            fleet::end_with_parent();
            tokio::runtime::Runtime::new()?.block_on(matrix::service::run(service))?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Sink { folder }) => {
            fleet::end_with_parent();
            sink::serve(&folder, |address| println!("{address}"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn run_scenarios(arguments: &Arguments) -> Result<ExitCode, Error> {
    let stopping = Stopping::on_signals()?;
    // Determines the tested commit now, since it may change during the run.
    let _ = servers::commit();
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let folder = arguments
        .folder
        .clone()
        .unwrap_or_else(|| target().join("chaos").join(now.to_string()));
    if arguments.matrix {
        let steps = if arguments.name == "mixed" {
            Vec::new()
        } else {
            vec![arguments.name.clone()]
        };
        let options = matrix::MatrixOptions {
            steps,
            broker: arguments.broker,
            store: arguments.store,
            guarantee: arguments.guarantee,
            side_by_side: arguments.side_by_side,
        };
        let (matrix, _) = matrix::run(&options, &folder, &stopping)?;
        println!("{}", matrix.to_markdown());
        return Ok(last_line(
            matrix.passed(),
            &matrix.verdict(),
            Some(&folder.join("matrix.md")),
        ));
    }
    if arguments.mutants {
        let wanted = if arguments.name == "mixed" {
            ""
        } else {
            &arguments.name
        };
        let caught = mutants::run(wanted, &folder, &stopping)?;
        println!("{}", caught.to_markdown());
        return Ok(last_line(
            caught.passed(),
            &caught.verdict(),
            Some(&folder.join("mutants.md")),
        ));
    }
    let mut runner = ScenarioRunner::new(&folder, &stopping);
    let report = if arguments.smoke {
        let begun = Instant::now();
        let seed = arguments.seed.unwrap_or(1);
        let report = runner.smoke(seed)?;
        let probe = probes::ProbeOptions {
            probes: 1,
            side_by_side: 1,
            messages: 300,
            kills: 1,
            seed,
        };
        let probed = probes::run(&probe, &folder, &stopping)?;
        if !probed.passed() {
            return Ok(last_line(false, &probed.line(), None));
        }
        println!(
            "chaos: the smoke run took {} s; the limit is 240 s on a machine with two free cores",
            begun.elapsed().as_secs()
        );
        report
    } else {
        let options = ScenarioOptions {
            name: arguments.name.clone(),
            brokers: arguments.broker.map_or_else(
                || vec![Broker::Kafka, Broker::Rabbitmq],
                |broker| vec![broker],
            ),
            guarantees: arguments.guarantee.map_or_else(
                || {
                    vec![
                        TestedGuarantee::AtMostOnce,
                        TestedGuarantee::EffectivelyOnce,
                    ]
                },
                |guarantee| vec![guarantee],
            ),
            seed: arguments.seed.unwrap_or(now),
            messages: arguments.messages,
            rate: arguments.rate.max(1),
            consumers: arguments.consumers.max(1),
            lengths: arguments.lengths,
            replicas: arguments.replicas,
            consumer_mode: if arguments.in_order {
                ConsumerMode::SingleActive
            } else {
                ConsumerMode::Competing
            },
        };
        match arguments.soak {
            Some(minutes) => runner.soak(&options, Duration::from_secs(60 * minutes))?,
            None => runner.run(&options)?,
        }
    };
    report.write(&folder)?;
    Ok(verdict(&report, Some(&folder)))
}

/// Prints the last line of the output and returns the exit code.
fn last_line(passed: bool, summary: &str, details: Option<&Path>) -> ExitCode {
    let place = details
        .map(|path| format!(" ({})", path.display()))
        .unwrap_or_default();
    println!(
        "chaos: {}: {summary}{place}",
        if passed { "PASSED" } else { "FAILED" }
    );
    if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The exit code if `bare` lost nothing: the harness may not detect losses.
const CONTROL_LOST_NOTHING: u8 = 2;

/// Prints the last line of the output and returns the exit code: 0 only if all invariants held.
fn verdict(report: &Report, folder: Option<&Path>) -> ExitCode {
    let place = folder
        .map(|folder| format!(" ({})", folder.join("report.md").display()))
        .unwrap_or_default();
    match report.verdict() {
        RunVerdict::Passed => {
            println!("chaos: PASSED: {}{place}", report.line());
            ExitCode::SUCCESS
        }
        RunVerdict::LostAsExpected => {
            println!(
                "chaos: FAILED, as expected of bare: {}{place}",
                report.line()
            );
            ExitCode::FAILURE
        }
        RunVerdict::LostNothing => {
            println!("chaos: INCONCLUSIVE: {}{place}", report.line());
            ExitCode::from(CONTROL_LOST_NOTHING)
        }
        RunVerdict::Violated => {
            println!("chaos: FAILED: {}{place}", report.line());
            ExitCode::FAILURE
        }
    }
}

fn read(path: &Path) -> Result<Report, Error> {
    let text = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(serde_json::from_slice(&text)?)
}

/// Cargo's target directory.
fn target() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from)
}
