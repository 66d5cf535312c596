//! Counts messages, and reads clocks at the first and at the last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use hdrhistogram::Histogram;
use rustix::time::{ClockId, Timespec, clock_gettime};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;

/// Counts messages, and reads clocks at the first and at the last.
pub struct Meter {
    seen: AtomicUsize,
    all: usize,
    /// Messages that are still skipped.
    warm_up: AtomicUsize,
    servers: Vec<u32>,
    first: OnceLock<Reading>,
    last: OnceLock<Reading>,
    over: Notify,
    latencies: Mutex<Histogram<u64>>,
}

/// The measurements of a side.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Measurement {
    /// The number of messages after the first.
    pub messages: usize,
    /// Seconds from the first to the last message.
    pub seconds: f64,
    /// CPU time of this process meanwhile, in seconds.
    pub cpu: f64,
    /// CPU time of the servers meanwhile, in seconds.
    pub servers_cpu: f64,
    /// The maximum resident memory of this process, in KiB.
    pub peak_kib: u64,
    /// When the first and the last were handled, by the machine's monotonic clock, in seconds.
    pub between: (f64, f64),
    /// Latencies in microseconds, by percentile; empty if not measured.
    pub latencies: Vec<(f64, u64)>,
    /// The times of the thread that handled the first and the last message; none if these are two
    /// threads.
    pub thread: Option<ThreadTime>,
    /// CPU time of each thread of this process and of each server, in seconds, by name.
    #[serde(default)]
    pub by_place: BTreeMap<String, f64>,
}

/// The times of a thread, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ThreadTime {
    /// Running.
    pub ran: f64,
    /// Runnable, waiting for a core.
    pub queued: f64,
}

impl Measurement {
    /// Messages per second.
    pub fn rate(&self) -> f64 {
        self.messages as f64 / self.seconds
    }

    /// The latency at a percentile, in microseconds.
    pub fn latency(&self, percentile: f64) -> Option<u64> {
        self.latencies
            .iter()
            .find(|(at, _)| (at - percentile).abs() < 1e-9)
            .map(|(_, micros)| *micros)
    }
}

/// The stored percentiles.
const PERCENTILES: [f64; 12] = [
    10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95, 99.99, 100.0,
];

#[derive(Clone)]
struct Reading {
    at: Duration,
    cpu: Duration,
    thread: Option<ThreadReading>,
    places: Places,
}

/// CPU time so far.
#[derive(Clone, Default)]
struct Places {
    /// Of this process's threads, by their names.
    threads: BTreeMap<String, Duration>,
    servers: BTreeMap<String, Duration>,
}

impl Places {
    fn of(servers: &[u32]) -> Self {
        let mut places = Self::default();
        for thread in std::fs::read_dir("/proc/self/task")
            .into_iter()
            .flatten()
            .flatten()
        {
            let path = thread.path();
            // A thread that has ended has no file.
            let (Some(name), Some(counted)) = (name_of(&path), ThreadReading::of(&path)) else {
                continue;
            };
            *places.threads.entry(name).or_default() += counted.ran;
        }
        for number in servers {
            let Some(name) = name_of(&PathBuf::from(format!("/proc/{number}"))) else {
                continue;
            };
            *places.servers.entry(name).or_default() += cpu_of(*number).unwrap_or_default();
        }
        places
    }

    fn servers_cpu(&self) -> Duration {
        self.servers.values().sum()
    }

    fn until(&self, later: &Self) -> BTreeMap<String, f64> {
        let spent = |before: &BTreeMap<String, Duration>, name: &String, now: &Duration| {
            now.saturating_sub(before.get(name).copied().unwrap_or_default())
                .as_secs_f64()
        };
        let threads = later
            .threads
            .iter()
            .map(|(name, now)| (name.clone(), spent(&self.threads, name, now)));
        let servers = later
            .servers
            .iter()
            .map(|(name, now)| (format!("server {name}"), spent(&self.servers, name, now)));
        threads
            .chain(servers)
            .filter(|(_, seconds)| *seconds > 0.0)
            .collect()
    }
}

/// The name of a process or thread, without a number at its end.
fn name_of(path: &Path) -> Option<String> {
    let name = std::fs::read_to_string(path.join("comm")).ok()?;
    Some(
        name.trim_end()
            .trim_end_matches(|c: char| c.is_ascii_digit())
            .to_owned(),
    )
}

/// The scheduler statistics of a thread.
#[derive(Clone, Copy)]
struct ThreadReading {
    thread: ThreadId,
    ran: Duration,
    queued: Duration,
}

impl ThreadReading {
    /// The times of this thread; none if the system does not count them.
    fn here() -> Option<Self> {
        Self::of(Path::new("/proc/thread-self"))
    }

    /// The times of a thread, from its directory in `/proc`.
    fn of(path: &Path) -> Option<Self> {
        let counted = std::fs::read_to_string(path.join("schedstat")).ok()?;
        let mut nanoseconds = counted
            .split_ascii_whitespace()
            .map(|it| it.parse().map(Duration::from_nanos));
        let (ran, queued) = (nanoseconds.next()?.ok()?, nanoseconds.next()?.ok()?);
        Some(Self {
            thread: std::thread::current().id(),
            ran,
            queued,
        })
    }

    fn until(self, later: Self) -> Option<ThreadTime> {
        let spent = |from: Duration, to: Duration| to.saturating_sub(from).as_secs_f64();
        let time = ThreadTime {
            ran: spent(self.ran, later.ran),
            queued: spent(self.queued, later.queued),
        };
        (self.thread == later.thread).then_some(time)
    }
}

impl Meter {
    /// A meter for this many messages.
    pub fn new(messages: usize, servers: Vec<u32>) -> Self {
        // From a microsecond to a minute, three digits.
        let latencies =
            Histogram::new_with_bounds(1, 60_000_000, 3).expect("these bounds are in order");
        Self {
            seen: AtomicUsize::new(0),
            all: messages,
            warm_up: AtomicUsize::new(0),
            servers,
            first: OnceLock::new(),
            last: OnceLock::new(),
            over: Notify::new(),
            latencies: Mutex::new(latencies),
        }
    }

    /// Skips this many messages first.
    pub fn after(self, warm_up: usize) -> Self {
        Self {
            warm_up: AtomicUsize::new(warm_up),
            ..self
        }
    }

    /// One more was handled.
    pub fn saw(&self) {
        let before = self.seen.fetch_add(1, Ordering::Relaxed);
        if before == 0 {
            // Only one call is the first. Slow values are read before the clock.
            let places = Places::of(&self.servers);
            let _ = self.first.set(Reading {
                places,
                ..Reading::now()
            });
        }
        if before + 1 == self.all {
            let reading = Reading::now();
            let _ = self.last.set(Reading {
                places: Places::of(&self.servers),
                ..reading
            });
            self.over.notify_one();
        }
    }

    /// Counts a handled message with its latency, except in the warm-up.
    pub fn saw_after(&self, latency: Duration) {
        if self
            .warm_up
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            })
            .is_ok()
        {
            return;
        }
        let micros = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        self.latencies
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .saturating_record(micros);
        self.saw();
    }

    /// Whether all were handled.
    pub fn is_over(&self) -> bool {
        self.last.get().is_some()
    }

    /// Waits until all were handled.
    pub async fn over(&self) {
        if !self.is_over() {
            self.over.notified().await;
        }
    }

    /// The measurements.
    ///
    /// # Errors
    /// Not all messages were handled.
    pub fn took(&self) -> crate::BenchResult<Measurement> {
        let (Some(first), Some(last)) = (self.first.get(), self.last.get()) else {
            return Err(format!(
                "only {} of {} messages came",
                self.seen.load(Ordering::Relaxed),
                self.all
            )
            .into());
        };
        let latencies = self
            .latencies
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let percentiles = PERCENTILES.iter().filter(|_| !latencies.is_empty());
        Ok(Measurement {
            messages: self.all - 1,
            seconds: (last.at - first.at).as_secs_f64(),
            cpu: (last.cpu - first.cpu).as_secs_f64(),
            servers_cpu: last
                .places
                .servers_cpu()
                .saturating_sub(first.places.servers_cpu())
                .as_secs_f64(),
            peak_kib: peak_kib(),
            between: (first.at.as_secs_f64(), last.at.as_secs_f64()),
            latencies: percentiles
                .map(|percentile| (*percentile, latencies.value_at_percentile(*percentile)))
                .collect(),
            thread: first
                .thread
                .zip(last.thread)
                .and_then(|(first, last)| first.until(last)),
            by_place: first.places.until(&last.places),
        })
    }
}

impl Reading {
    /// All measurements except the CPU times by thread.
    fn now() -> Self {
        let (at, cpu) = (clock(ClockId::Monotonic), clock(ClockId::ProcessCPUTime));
        Self {
            at,
            cpu,
            thread: ThreadReading::here(),
            places: Places::default(),
        }
    }
}

fn clock(id: ClockId) -> Duration {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(id);
    Duration::new(tv_sec.cast_unsigned(), u32::try_from(tv_nsec).unwrap_or(0))
}

/// The CPU time of a process, which Linux reports in clock ticks of 10 ms.
pub fn cpu_of(number: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The second field is the name in parentheses and may contain any character.
    let after_name = &stat[stat.rfind(')')? + 2..];
    let fields: Vec<&str> = after_name.split(' ').collect();
    let (user, system): (u64, u64) = (fields.get(11)?.parse().ok()?, fields.get(12)?.parse().ok()?);
    Some(Duration::from_millis(10 * (user + system)))
}

fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    peak.and_then(|peak| peak.trim().trim_end_matches(" kB").parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_measures_from_the_first_message_to_the_last() {
        let meter = Meter::new(3, vec![std::process::id()]);
        meter.saw();
        meter.saw();
        assert!(!meter.is_over() && meter.took().is_err());
        meter.saw_after(Duration::from_micros(1500));
        meter.over().await;

        let took = meter.took().unwrap();

        assert_eq!(took.messages, 2);
        assert!(took.seconds > 0.0 && took.peak_kib > 0 && took.between.0 < took.between.1);
        assert!(
            took.latency(50.0)
                .is_some_and(|micros| (1499..=1501).contains(&micros))
        );
    }

    #[test]
    fn the_warm_up_is_not_measured() {
        let meter = Meter::new(1, Vec::new()).after(2);
        [30, 20]
            .into_iter()
            .for_each(|millis| meter.saw_after(Duration::from_millis(millis)));
        assert!(!meter.is_over());
        meter.saw_after(Duration::from_millis(10));
        assert_eq!(
            meter
                .took()
                .unwrap()
                .latency(100.0)
                .map(|micros| micros / 100),
            Some(100)
        );
    }

    #[test]
    fn the_thread_that_handled_first_and_last_message_is_identified() {
        let handled_by_two = |two: bool| {
            let meter = Meter::new(2, Vec::new());
            meter.saw();
            std::thread::sleep(Duration::from_millis(20));
            std::thread::scope(|scope| {
                if two {
                    drop(scope.spawn(|| meter.saw()).join())
                } else {
                    meter.saw()
                }
            });
            meter.took().unwrap()
        };
        let took = handled_by_two(false);
        assert!(
            took.thread
                .is_some_and(|it| it.ran > 0.0 && it.ran + it.queued <= took.seconds),
            "{took:?}"
        );
        assert_eq!(handled_by_two(true).thread, None);
    }

    #[test]
    fn cpu_time_is_reported_by_thread_and_by_server() {
        let meter = Meter::new(2, vec![std::process::id()]);
        let busy = std::thread::Builder::new()
            .name("busy-7".into())
            .spawn(move || {
                meter.saw();
                let begun = clock(ClockId::ProcessCPUTime);
                while clock(ClockId::ProcessCPUTime) < begun + Duration::from_millis(50) {
                    std::hint::spin_loop();
                }
                meter.saw();
                meter.took().unwrap()
            });
        let took = busy.unwrap().join().unwrap();
        assert!(took.by_place["busy-"] > 0.0, "{took:?}");
        let servers: f64 = took
            .by_place
            .iter()
            .filter(|(name, _)| name.starts_with("server "))
            .map(|(_, seconds)| seconds)
            .sum();
        assert!(
            servers > 0.0 && (servers - took.servers_cpu).abs() < 1e-9,
            "{took:?}"
        );
    }

    #[test]
    fn cpu_time_is_read_from_proc() {
        assert!(cpu_of(std::process::id()).is_some());
        assert!(cpu_of(u32::MAX).is_none());
    }
}
