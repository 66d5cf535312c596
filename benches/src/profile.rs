//! Samples the CPU time of one side with `perf`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::BenchResult;
use crate::side::{Id, Spawned};
use crate::stage::BenchServers;

const MESSAGES: usize = 1_000_000;
/// Samples per second.
const FREQUENCY: &str = "2500";
/// The minimum share to print, in percent.
const MIN_SHARE: f64 = 0.5;

/// Components by substrings of function names; the first match wins.
const PLACES: &[(&str, &[&str])] = &[
    (
        "malloc and free",
        &[
            "malloc",
            "_int_free",
            "cfree",
            "__libc_free",
            "calloc",
            "realloc",
            "unlink_chunk",
            "operator new",
            "operator delete",
            "rdl_alloc",
            "rdl_dealloc",
        ],
    ),
    ("memmove", &["memcpy", "memmove"]),
    (
        "clocks",
        &[
            "clock_gettime",
            "gettimeofday",
            "Timespec",
            "vdso",
            "Instant::now",
            "Instant::elapsed",
            "Moment::now",
        ],
    ),
    (
        "MemoryStore",
        &["oncegate_core::memory", "<oncegate_core::memory"],
    ),
    (
        "advance and LifecycleDriver::handle",
        &[
            "engine::dispatch",
            "LifecycleDriver::handle",
            "lifecycle::transition",
        ],
    ),
    (
        "asking the store, reading its answers",
        &["engine::answers", "engine::store_batcher"],
    ),
    ("the rest of oncegate", &["oncegate_"]),
];

/// Handles a million Kafka messages with the memory store and inline handlers, and prints the
/// shares of the CPU time by thread, component and function. Keeps the recording.
///
/// # Errors
/// `perf` cannot be run, or the broker failed.
pub fn run(stage: &BenchServers, into: &Path) -> BenchResult<()> {
    if !Command::new("perf")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
    {
        return Err(
            "perf does not work on this machine; install it (Debian's package is linux-perf)"
                .into(),
        );
    }
    let topic = stage.topic(4, MESSAGES, 100, Id::Header)?;
    let recorded = into.join("perf.data");
    let side = stage.on_kafka(&topic, stage.memory(Spawned::No), MESSAGES);
    let file = recorded.display().to_string();
    let took = side.run_under("perf", &["record", "-F", FREQUENCY, "-o", &file, "--"])?;
    let report = Command::new("perf")
        .args([
            "report",
            "--stdio",
            "--no-children",
            "-F",
            "overhead,comm,sym",
            "-t",
            ";",
            "-i",
            &file,
        ])
        .output()?;
    if !report.status.success() {
        return Err(format!("perf report: {}", String::from_utf8_lossy(&report.stderr)).into());
    }
    let rate = MESSAGES as f64 / took.seconds;
    println!(
        "Kafka, memory, inline: {rate:.0} messages per second under perf; shares of the process's CPU time"
    );
    let report = String::from_utf8_lossy(&report.stdout);
    print!("{}", shares(&report));
    if !report.contains("[k]") {
        println!(
            "\nwithout kernel samples, so shares exclude the kernel; set kernel.perf_event_paranoid to 1 or less to include it"
        );
    }
    println!("recorded in {file}, for `perf report` and `perf annotate`");
    Ok(())
}

/// The shares by thread, component and function, from the output of `perf report`.
fn shares(report: &str) -> String {
    let (mut threads, mut places, mut functions) =
        (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for line in report.lines() {
        let mut fields = line.splitn(3, ';').map(str::trim);
        let Some(share) = fields
            .next()
            .and_then(|share| share.strip_suffix('%'))
            .and_then(|share| share.parse::<f64>().ok())
        else {
            continue;
        };
        let [thread, function] = [(); 2].map(|()| fields.next().unwrap_or_default().to_owned());
        *places.entry(place(&function).to_owned()).or_insert(0.0) += share;
        *threads.entry(thread).or_insert(0.0) += share;
        *functions.entry(function).or_insert(0.0) += share;
    }
    [
        ("thread", threads),
        ("place", places),
        ("function", functions),
    ]
    .map(|(what, shares)| table(what, shares))
    .concat()
}

fn place(function: &str) -> &'static str {
    if function.starts_with("[k]") {
        return "the kernel";
    }
    let known = PLACES
        .iter()
        .find(|(_, parts)| parts.iter().any(|part| function.contains(part)));
    known.map_or(
        "librdkafka, tokio, the C library and others",
        |(place, _)| place,
    )
}

/// The most first.
fn table(what: &str, shares: BTreeMap<String, f64>) -> String {
    let mut shares: Vec<_> = shares
        .into_iter()
        .filter(|(_, share)| *share >= MIN_SHARE)
        .collect();
    shares.sort_by(|one, other| other.1.total_cmp(&one.1));
    let lines = shares
        .iter()
        .map(|(name, share)| format!("{share:>6.1} %  {name}\n"));
    format!("\nby {what}\n{}", lines.collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_added_up_by_thread_place_and_function() {
        let report = "# Overhead;Command;Symbol\n#\n 30.10%;loop            ;[.] _int_malloc\n 20.00%;poller;[.] cfree@GLIBC_2.2.5\n\
                      10.00%;loop;[k] copy_from_user\n 9.00%;loop;[.] <oncegate_core::memory::store::Tables>::apply\n\
                      0.40%;loop;[.] rd_kafka_poll\n";
        let shown = shares(report);
        let lines: Vec<&str> = shown
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
            .collect();
        assert_eq!(
            lines,
            [
                "by thread",
                "49.5 %  loop",
                "20.0 %  poller",
                "by place",
                "50.1 %  malloc and free",
                "10.0 %  the kernel",
                "9.0 %  MemoryStore",
                "by function",
                "30.1 %  [.] _int_malloc",
                "20.0 %  [.] cfree@GLIBC_2.2.5",
                "10.0 %  [k] copy_from_user",
                "9.0 %  [.] <oncegate_core::memory::store::Tables>::apply",
            ]
        );
    }
}
