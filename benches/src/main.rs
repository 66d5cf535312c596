//! `oncegate-bench`: compares oncegate with the plain clients on its own servers. `cargo xtask
//! bench` runs it.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use oncegate_bench::machine::Machine;
use oncegate_bench::report::BenchReport;
use oncegate_bench::side::{SIDE, Task};
use oncegate_bench::stage::BenchServers;
use oncegate_bench::suites::{Extent, Suite};
use oncegate_bench::{BenchResult, plot, profile};

/// Compares oncegate with the plain clients in alternating runs on its own servers; prints tables
/// and ratios, and writes target/bench/<run>.json.
///
/// Run it on an idle machine: other load makes the rates useless and the ratios inexact.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Arguments {
    /// Measure only the most important ratios, in two minutes.
    #[arg(long)]
    quick: bool,
    /// Only these suites; may be repeated.
    #[arg(long, value_enum)]
    only: Vec<Suite>,
    /// The directory for the JSON file.
    #[arg(long, default_value = "target/bench")]
    into: PathBuf,
    /// Only draw the plots of this run into the directory of `--into`.
    #[arg(long, value_name = "JSON")]
    plot: Option<PathBuf>,
    /// Handle a million messages with the memory store under `perf`, and print the shares of the
    /// CPU time.
    #[arg(long, conflicts_with_all = ["quick", "only", "plot"])]
    profile: bool,
}

fn main() -> ExitCode {
    let arguments_text: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments_text.split_first() {
        Some((first, rest)) if first == SIDE => side(rest),
        _ => bench(&Arguments::parse(), arguments_text),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one side of a comparison; the argument is its task as JSON.
fn side(arguments_text: &[String]) -> BenchResult<()> {
    let task: Task = serde_json::from_str(
        arguments_text
            .first()
            .ok_or("the task of the side is missing")?,
    )?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let took = runtime.block_on(task.run())?;
    println!("{}", serde_json::to_string(&took)?);
    // Does not wait for clients that are closing their connections.
    runtime.shutdown_background();
    Ok(())
}

fn bench(arguments: &Arguments, arguments_text: Vec<String>) -> BenchResult<()> {
    if let Some(run) = &arguments.plot {
        let report: BenchReport = serde_json::from_str(&std::fs::read_to_string(run)?)?;
        return plot::draw(&report, &arguments.into);
    }
    if arguments.profile {
        std::fs::create_dir_all(&arguments.into)?;
        return profile::run(&BenchServers::set()?, &arguments.into);
    }
    let extent = if arguments.quick {
        Extent::Quick
    } else {
        Extent::Full
    };
    let suites = if arguments.only.is_empty() {
        Suite::usual(extent)
    } else {
        arguments.only.clone()
    };
    let (begun, machine) = (Instant::now(), Machine::here());
    println!("{}, load {}", machine.processor, machine.load);
    let run = format!(
        "{}",
        SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs()
    );
    let path = arguments.into.join(format!("{run}.json"));
    std::fs::create_dir_all(&arguments.into)?;
    let stage = BenchServers::set()?;
    let mut report = BenchReport::new(run, arguments_text, machine);
    for suite in suites {
        suite.run(&stage, extent, &mut |table| {
            println!("{table}");
            report.add(table, begun.elapsed());
            // After each table, so that an interrupted run keeps its results.
            Ok(std::fs::write(
                &path,
                serde_json::to_string_pretty(&report)?,
            )?)
        })?;
    }
    drop(stage);
    println!("{}", report.summary());
    println!("{:.0} s; written to {}", report.seconds, path.display());
    Ok(())
}
