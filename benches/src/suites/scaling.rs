//! Several processes in one consumer group.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Extent, ROUNDS};
use crate::BenchResult;
use crate::report::BenchTable;
use crate::rounds::{Side, alternate};
use crate::side::{DedupMethod, Measurement, Spawned, Task};
use crate::stage::BenchServers;

/// So many processes.
const PROCESSES: [usize; 3] = [1, 2, 4];
/// Each of them has as many.
const PARTITIONS: i32 = 4;
/// The time limit until a group has formed and assigned all partitions.
const FORMS: Duration = Duration::from_secs(6);

pub(super) fn run(
    stage: &BenchServers,
    extent: Extent,
    tell: &mut dyn FnMut(BenchTable) -> BenchResult<()>,
) -> BenchResult<()> {
    let messages = extent.pick(200_000, 400_000);
    // Messages become visible only after the group has formed, so that this time is not measured.
    let together =
        |processes: usize, method: &dyn Fn() -> DedupMethod| -> BenchResult<Measurement> {
            stage.empty_redis()?;
            let (topic, held_back) = stage.topic_held_back(PARTITIONS, messages)?;
            let one = stage.on_kafka(&topic, DedupMethod::Bare, messages / processes);
            let tasks = (0..processes).map(|_| Task {
                method: method(),
                linger: Duration::from_secs(2),
                ..one.clone()
            });
            let started = tasks
                .map(|task| task.start())
                .collect::<BenchResult<Vec<_>>>()?;
            std::thread::sleep(FORMS);
            held_back.commit()?;
            let took = started
                .into_iter()
                .map(|side| side.finish())
                .collect::<BenchResult<Vec<_>>>()?;
            Ok(sum(&took))
        };
    let mut sides = Vec::new();
    for processes in PROCESSES {
        let together = &together;
        sides.push(Side::new(format!("bare, {processes}"), move || {
            together(processes, &|| DedupMethod::Bare)
        }));
        sides.push(Side::new(format!("memory, {processes}"), move || {
            together(processes, &|| stage.memory(Spawned::No))
        }));
        sides.push(Side::new(format!("Redis, {processes}"), move || {
            together(processes, &|| stage.redis(Spawned::No))
        }));
    }
    let rows = alternate("scaling", ROUNDS, || stage.go_on(), sides)?;
    let table = BenchTable::new(
        "Kafka, 4 partitions, 100 bytes, id in a header: 1, 2 and 4 processes in a group",
        &rows,
    );
    let table = table
        .ratio("scaling_memory_2", "memory, 2", 1.0, "memory, 1")
        .ratio("scaling_memory_4", "memory, 4", 1.0, "memory, 1")
        .ratio("scaling_redis_2", "Redis, 2", 1.0, "Redis, 1")
        .ratio("scaling_redis_4", "Redis, 4", 1.0, "Redis, 1");
    tell(table)
}

/// The combined measurements: from the first message of any process to the last of any.
fn sum(took: &[Measurement]) -> Measurement {
    let begun = took
        .iter()
        .map(|took| took.between.0)
        .fold(f64::INFINITY, f64::min);
    let over = took.iter().map(|took| took.between.1).fold(0.0, f64::max);
    Measurement {
        messages: took.iter().map(|took| took.messages).sum(),
        seconds: over - begun,
        cpu: took.iter().map(|took| took.cpu).sum(),
        // Each process measures the servers while it runs; the maximum covers the longest run.
        servers_cpu: took.iter().map(|took| took.servers_cpu).fold(0.0, f64::max),
        peak_kib: took.iter().map(|took| took.peak_kib).max().unwrap_or(0),
        between: (begun, over),
        latencies: Vec::new(),
        thread: None,
        by_place: together(took),
    }
}

/// The threads of all of them; of each server what whoever saw the most of it saw, as above.
fn together(took: &[Measurement]) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::<String, f64>::new();
    for (name, seconds) in took.iter().flat_map(|took| &took.by_place) {
        let sum = all.entry(name.clone()).or_default();
        *sum = if name.starts_with("server ") {
            sum.max(*seconds)
        } else {
            *sum + seconds
        };
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parallel_processes_are_timed_from_the_first_message_to_the_last() {
        let took = |from: f64, to: f64| Measurement {
            messages: 10,
            seconds: to - from,
            cpu: 1.0,
            servers_cpu: to,
            peak_kib: 5,
            between: (from, to),
            latencies: Vec::new(),
            thread: None,
            by_place: [("loop".to_owned(), 1.0), ("server redis".to_owned(), to)].into(),
        };
        let all = sum(&[took(1.0, 3.0), took(2.0, 6.0)]);
        assert_eq!(
            (
                all.messages,
                all.seconds,
                all.cpu,
                all.servers_cpu,
                all.rate()
            ),
            (20, 5.0, 2.0, 6.0, 4.0)
        );
        assert_eq!(
            all.by_place,
            [("loop".to_owned(), 2.0), ("server redis".to_owned(), 6.0)].into()
        );
    }
}
