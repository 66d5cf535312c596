//! Counts the instructions of a message's way in memory: they repeat where seconds do not.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::setup;

/// How many messages the short run has, and the long one. What both share (the start, the end)
/// falls out of the difference.
const MESSAGES: [u64; 2] = [2_000, 12_000];
/// Where handlers run.
const HANDLERS: [&str; 2] = ["in-place", "spawned"];
/// So much more than was recorded fails, in hundredths; so much less asks to be recorded.
const TOLERANCE: f64 = 10.0;

/// What becomes of what was counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Counted {
    IsCompared,
    IsRecorded,
}

/// What a run, or a message, cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cost {
    instructions: f64,
    allocations: f64,
}

pub(super) fn run(counted: Counted) -> Result<(), Error> {
    let program = build()?;
    let mut lines = String::new();
    let mut dearer = Vec::new();
    let recorded = std::fs::read_to_string(baseline()).unwrap_or_default();
    for handlers in HANDLERS {
        let cost = a_message(&program, handlers)?;
        let Cost {
            instructions,
            allocations,
        } = cost;
        lines += &format!("{handlers} {instructions:.0}\n");
        let before = read(&recorded, handlers);
        let change = before.map(|before| (instructions / before - 1.0) * 100.0);
        let beside = change.map_or_else(
            || "nothing is recorded".to_owned(),
            |change| format!("{change:+.1} % of what is recorded"),
        );
        println!(
            "guard: {handlers}: {instructions:.0} instructions and {allocations:.1} allocations a message; {beside}"
        );
        match change {
            _ if counted == Counted::IsRecorded => {}
            Some(change) if change <= TOLERANCE => {
                if change < -TOLERANCE {
                    println!(
                        "guard: {handlers}: that is much less: keep it with `cargo xtask bench --guard --record`"
                    );
                }
            }
            _ => dearer.push(handlers),
        }
    }
    if counted == Counted::IsRecorded {
        return std::fs::write(baseline(), lines).map_err(|source| Error::File {
            path: baseline(),
            source,
        });
    }
    if dearer.is_empty() {
        return Ok(());
    }
    let both = dearer.join(", ");
    Err(Error::ByHand(format!(
        "a message has become dearer by more than {TOLERANCE} % ({both}): see where with callgrind_annotate on {}, and if it is \
         worth it, record it: cargo xtask bench --guard --record",
        output(dearer[0], MESSAGES[1]).display()
    )))
}

/// The difference of a long run and a short one, by message.
fn a_message(program: &Path, handlers: &str) -> Result<Cost, Error> {
    // Both at once: on two cores that takes half the time, and changes no count.
    let [few, many] = std::thread::scope(|scope| {
        MESSAGES
            .map(|messages| scope.spawn(move || count(program, handlers, messages)))
            .map(|run| run.join().expect("it reports failures"))
    });
    let (few, many) = (few?, many?);
    let messages = (MESSAGES[1] - MESSAGES[0]) as f64;
    Ok(Cost {
        instructions: (many.instructions - few.instructions) / messages,
        allocations: (many.allocations - few.allocations) / messages,
    })
}

/// With a target directory of its own, because of the flag: callgrind cannot follow rustix into the
/// kernel's own code.
fn build() -> Result<PathBuf, Error> {
    let directory = setup::target_directory().join("road");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "oncegate-road",
        ])
        .current_dir(setup::root());
    cargo
        .env("CARGO_TARGET_DIR", &directory)
        .env("RUSTFLAGS", "--cfg=rustix_use_libc");
    cargo.env("CARGO_PROFILE_RELEASE_DEBUG", "line-tables-only");
    setup::call(&mut cargo)?;
    Ok(directory.join("release/oncegate-road"))
}

fn count(program: &Path, handlers: &str, messages: u64) -> Result<Cost, Error> {
    let path = output(handlers, messages);
    let mut valgrind = Command::new("valgrind");
    valgrind
        .args(["--quiet", "--tool=callgrind"])
        .arg(format!("--callgrind-out-file={}", path.display()));
    setup::call(
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
        return Err(Error::ByHand(format!(
            "{} holds no total: is this another version of callgrind?",
            path.display()
        )));
    }
    Ok(cost)
}

fn output(handlers: &str, messages: u64) -> PathBuf {
    setup::target_directory()
        .join("road")
        .join(format!("callgrind.{handlers}.{messages}"))
}

fn baseline() -> PathBuf {
    setup::root().join("benches/road/baseline.txt")
}

/// What was recorded: a line a kind of handlers.
fn read(recorded: &str, handlers: &str) -> Option<f64> {
    recorded
        .lines()
        .find_map(|line| line.strip_prefix(handlers)?.trim().parse().ok())
}

/// All instructions of a run, and all calls of the allocator.
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
            // A name stands only where its number is used for the first time.
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
    fn a_run_is_read_as_callgrind_writes_it() {
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
    fn what_was_recorded_is_read_by_the_kind_of_handlers() {
        let recorded = "in-place 9000\nspawned 12000\n";
        assert_eq!(
            (
                read(recorded, "in-place"),
                read(recorded, "spawned"),
                read("", "spawned")
            ),
            (Some(9000.0), Some(12000.0), None)
        );
    }
}
