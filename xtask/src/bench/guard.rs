//! Counts instructions per message with a memory broker and store. Unlike times, instruction counts
//! are reproducible. The cost of creating and publishing a message is subtracted.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::setup;

/// The numbers of messages of the short and the long run. The difference of their costs does not
/// contain the cost of the start and the end of the process.
const MESSAGES: [u64; 2] = [2_000, 12_000];
/// The execution modes of handlers.
const EXECUTIONS: [&str; 2] = ["inline", "spawned"];
/// The mode that only creates and publishes the messages.
const FIXTURE: &str = "fixture";
/// The tolerated change in percent: a larger increase fails, a larger decrease prints a hint to
/// record it.
const TOLERANCE_PERCENT: f64 = 10.0;

/// What to do with the counts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum BaselineMode {
    Compare,
    Record,
}

/// The cost of a run, or of one message.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cost {
    instructions: f64,
    allocations: f64,
}

pub(super) fn run(mode: BaselineMode) -> Result<(), Error> {
    let program = build()?;
    let mut lines = String::new();
    let mut regressed = Vec::new();
    let recorded = std::fs::read_to_string(baseline()).unwrap_or_default();
    let fixture = cost_per_message(&program, FIXTURE)?;
    for handlers in EXECUTIONS {
        let cost = cost_per_message(&program, handlers)?;
        let instructions = cost.instructions - fixture.instructions;
        let allocations = cost.allocations - fixture.allocations;
        lines += &format!("{handlers} {instructions:.0}\n");
        let before = read(&recorded, handlers);
        let change = before.map(|before| (instructions / before - 1.0) * 100.0);
        let comparison = change.map_or_else(
            || "no baseline".to_owned(),
            |change| format!("{change:+.1} % against the baseline"),
        );
        println!(
            "guard: {handlers}: {instructions:.0} instructions and {allocations:.2} allocations per message; {comparison}"
        );
        match change {
            _ if mode == BaselineMode::Record => {}
            Some(change) if change <= TOLERANCE_PERCENT => {
                if change < -TOLERANCE_PERCENT {
                    println!(
                        "guard: {handlers}: more than {TOLERANCE_PERCENT} % below the baseline; record the new one with `cargo xtask bench --guard --record`"
                    );
                }
            }
            _ => regressed.push(handlers),
        }
    }
    if mode == BaselineMode::Record {
        return std::fs::write(baseline(), lines).map_err(|source| Error::File {
            path: baseline(),
            source,
        });
    }
    if regressed.is_empty() {
        return Ok(());
    }
    let executions = regressed.join(", ");
    Err(Error::ActionRequired(format!(
        "instructions per message grew by more than {TOLERANCE_PERCENT} % ({executions}): find the cause with callgrind_annotate on {}; if it is \
         intended, record the new baseline: cargo xtask bench --guard --record",
        output(regressed[0], MESSAGES[1]).display()
    )))
}

/// The cost per message: the difference of a long and a short run, divided by the number of
/// messages.
fn cost_per_message(program: &Path, handlers: &str) -> Result<Cost, Error> {
    // The runs are parallel, which halves the time on two cores and does not change the counts.
    let [few, many] = std::thread::scope(|scope| {
        MESSAGES
            .map(|messages| scope.spawn(move || count(program, handlers, messages)))
            .map(|run| run.join().expect("the counting thread does not panic"))
    });
    let (few, many) = (few?, many?);
    let messages = (MESSAGES[1] - MESSAGES[0]) as f64;
    Ok(Cost {
        instructions: (many.instructions - few.instructions) / messages,
        allocations: (many.allocations - few.allocations) / messages,
    })
}

/// Builds the program with `rustix_use_libc`, because callgrind cannot follow direct system calls.
/// The flag needs a separate target directory; otherwise cargo would rebuild the whole workspace.
fn build() -> Result<PathBuf, Error> {
    let directory = setup::target_directory().join("instructions");
    let mut cargo = setup::cargo();
    cargo
        .args(["build", "--quiet", "--release"])
        .args(["--package", "oncegate-bench-instructions"])
        .env("CARGO_TARGET_DIR", &directory)
        .env("RUSTFLAGS", "--cfg=rustix_use_libc");
    cargo.env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only");
    setup::run_program(&mut cargo)?;
    Ok(directory.join("release/oncegate-bench-instructions"))
}

/// Runs the program under callgrind and returns the cost of the whole run.
fn count(program: &Path, handlers: &str, messages: u64) -> Result<Cost, Error> {
    let path = output(handlers, messages);
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", path.display()));
    setup::run_program(
        valgrind
            .arg(program)
            .args([&messages.to_string(), handlers]),
    )?;
    let text = std::fs::read_to_string(&path).map_err(|source| Error::File {
        path: path.clone(),
        source,
    })?;
    let cost = total(&text);
    if cost.instructions == 0.0 {
        return Err(Error::ActionRequired(format!(
            "{} has no `totals:` line; check the version of callgrind",
            path.display()
        )));
    }
    Ok(cost)
}

/// The file that callgrind writes.
fn output(handlers: &str, messages: u64) -> PathBuf {
    setup::target_directory()
        .join("instructions")
        .join(format!("callgrind.{handlers}.{messages}"))
}

fn baseline() -> PathBuf {
    setup::root().join("benches/instructions/baseline.txt")
}

/// The recorded instructions of an execution mode; the file has one line for each.
fn read(recorded: &str, handlers: &str) -> Option<f64> {
    recorded
        .lines()
        .find_map(|line| line.strip_prefix(handlers)?.trim().parse().ok())
}

/// The instructions and allocator calls of a whole run, from callgrind's output.
fn total(callgrind: &str) -> Cost {
    let mut names: HashMap<&str, &str> = HashMap::new();
    let mut called = "";
    let mut cost = Cost::default();
    for line in callgrind.lines() {
        if let Some(total) = line.strip_prefix("totals: ") {
            cost.instructions = total.trim().parse().unwrap_or(0.0);
        } else if let Some(function) = line
            .strip_prefix("cfn=")
            .or_else(|| line.strip_prefix("fn="))
        {
            // Callgrind writes a function's name only with the first use of its number.
            let (number, name) = function.split_once(' ').unwrap_or((function, ""));
            if !name.is_empty() {
                names.insert(number, name);
            }
            called = names.get(number).copied().unwrap_or_default();
        } else if let Some(calls) = line.strip_prefix("calls=")
            && [
                "malloc",
                "calloc",
                "realloc",
                "aligned_alloc",
                "posix_memalign",
            ]
            .contains(&called)
        {
            let calls = calls
                .split(' ')
                .next()
                .and_then(|calls| calls.parse::<f64>().ok());
            cost.allocations += calls.unwrap_or(0.0);
        }
    }
    cost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_callgrind_output() {
        let text = "fn=(1) main\n1 5\ncfn=(2) malloc\ncalls=3 10\n1 30\ncfn=(3) free\ncalls=9 10\n1 9\nfn=(4) grow\ncfn=(2)\ncalls=4 10\n\
                    1 40\ncfn=(5) realloc\ncalls=1 10\n2 2\n\ntotals: 1234\n";
        assert_eq!(
            total(text),
            Cost {
                instructions: 1234.0,
                allocations: 8.0
            }
        );
        assert_eq!(total(""), Cost::default());
    }

    #[test]
    fn reads_the_baseline_of_each_execution_mode() {
        let recorded = "inline 9000\nspawned 12000\n";
        assert_eq!(
            (
                read(recorded, "inline"),
                read(recorded, "spawned"),
                read("", "spawned")
            ),
            (Some(9000.0), Some(12000.0), None)
        );
    }
}
