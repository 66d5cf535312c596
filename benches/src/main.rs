//! `oncegate-bench`: the bare clients and oncegate by turns, on real servers of its own. `cargo
//! xtask bench` runs it.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use oncegate_bench::machine::Machine;
use oncegate_bench::report::Report;
use oncegate_bench::side::{SIDE, Task};
use oncegate_bench::stage::Stage;
use oncegate_bench::suites::{Extent, Suite};
use oncegate_bench::{Outcome, plot, profile};

/// Compares the bare clients with oncegate, by turns, on servers of its own; prints tables and
/// ratios, and writes target/bench/<run>.json.
///
/// A machine that does anything else makes the rates worth nothing, and the ratios worth little.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Arguments {
    /// The ratios that matter most, in two minutes.
    #[arg(long)]
    quick: bool,
    /// Only these; may be given several times.
    #[arg(long, value_enum)]
    only: Vec<Suite>,
    /// Where to write the JSON.
    #[arg(long, default_value = "target/bench")]
    into: PathBuf,
    /// Draws the plots of a run that stands in this file into the directory that `--into` names,
    /// and measures nothing.
    #[arg(long, value_name = "JSON")]
    plot: Option<PathBuf>,
    /// Handles a million messages past the memory store while `perf` watches, and says where the
    /// CPU time went.
    #[arg(long, conflicts_with_all = ["quick", "only", "plot"])]
    profile: bool,
}

fn main() -> ExitCode {
    let told: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match told.split_first() {
        Some((first, rest)) if first == SIDE => side(rest),
        _ => bench(&Arguments::parse(), told),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// One side of a comparison, told what to do by whoever compares.
fn side(told: &[String]) -> Outcome<()> {
    let task: Task = serde_json::from_str(told.first().ok_or("a side must be told what to do")?)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let took = runtime.block_on(task.run())?;
    println!("{}", serde_json::to_string(&took)?);
    // What a client still has to say to its broker is of no interest any more.
    runtime.shutdown_background();
    Ok(())
}

fn bench(arguments: &Arguments, told: Vec<String>) -> Outcome<()> {
    if let Some(run) = &arguments.plot {
        let report: Report = serde_json::from_str(&std::fs::read_to_string(run)?)?;
        return plot::draw(&report, &arguments.into);
    }
    if arguments.profile {
        std::fs::create_dir_all(&arguments.into)?;
        return profile::run(&Stage::set()?, &arguments.into);
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
    let stage = Stage::set()?;
    let mut report = Report::new(run, told, machine);
    for suite in suites {
        suite.run(&stage, extent, &mut |table| {
            println!("{table}");
            report.add(table, begun.elapsed());
            // After each: a run that is stopped keeps what it has.
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
