//! Kill probes: kills consumers of a Kafka topic while they handle messages. A message without an
//! effect after the session timeout plus three leases is late, and if it has none a minute later, lost.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::broker_client::BrokerClient;
use crate::check::TestedGuarantee;
use crate::fleet::{Fleet, SinkProcess};
use crate::ledger::{Log, Record, What};
use crate::message::{OutgoingMessage, Work};
use crate::run::{ConsumerMode, base_arguments};
use crate::schedule::LEASE;
use crate::servers::TestServers;
use crate::sink::FILE;
use crate::worker::Broker;
use crate::{Error, Stopping};

/// The number of group members; they are killed one at a time.
const CONSUMERS: usize = 2;
/// The session timeout of the group.
const SESSION: Duration = Duration::from_secs(6);
/// How long after the last effect the missing messages count as late.
const LATE_TIMEOUT: Duration = Duration::from_secs(SESSION.as_secs() + 3 * LEASE.as_secs());
/// How long after that they count as lost.
const LOSS_TIMEOUT: Duration = Duration::from_secs(60);
/// The time limits of the first effect and of each wait.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const WAIT_TIMEOUT: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The settings of the probes.
#[derive(Clone, Copy, Debug)]
pub struct ProbeOptions {
    /// The number of probes.
    pub probes: u64,
    /// The number of parallel probes.
    pub side_by_side: usize,
    /// Messages in each probe.
    pub messages: u64,
    /// SIGKILLs in each probe.
    pub kills: u64,
    /// The seed of the times of the kills.
    pub seed: u64,
}

/// The result of the probes.
#[derive(Debug, Default)]
pub struct ProbeResults {
    /// The number of probes.
    pub probes: u64,
    /// All published messages.
    pub messages: u64,
    /// All killed processes.
    pub kills: u64,
    /// Effects after the first of their id.
    pub again: u64,
    /// The longest time without a new effect, in seconds.
    pub longest_gap: f64,
    /// Messages with an effect after the time limit, as probe and id.
    pub late: Vec<String>,
    /// Lost messages, as probe and id.
    pub lost: Vec<String>,
}

/// Runs the probes on Kafka with Redis, effectively once.
///
/// # Errors
/// A probe could not be completed.
pub fn run(
    options: &ProbeOptions,
    folder: &Path,
    stopping: &Stopping,
) -> Result<ProbeResults, Error> {
    let servers = TestServers::start(Broker::Kafka)?;
    let next = AtomicU64::new(0);
    let worker = || -> Result<ProbeResults, Error> {
        let mut all = ProbeResults::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= options.probes {
                return Ok(all);
            }
            let one = probe(
                options,
                &servers,
                number,
                &folder.join(format!("probe-{number}")),
                stopping,
            )?;
            println!(
                "probe {number}: {} late, {} lost, {} effects repeated, {:.1} s longest time without an effect",
                one.late.len(),
                one.lost.len(),
                one.again,
                one.longest_gap
            );
            all.add(one);
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..options.side_by_side.max(1))
            .map(|_| scope.spawn(worker))
            .collect();
        let mut all = ProbeResults::default();
        for worker in workers {
            all.add(worker.join().map_err(|_| "a probe panicked")??);
        }
        Ok(all)
    })
}

impl ProbeResults {
    fn add(&mut self, other: Self) {
        self.probes += other.probes;
        self.messages += other.messages;
        self.kills += other.kills;
        self.again += other.again;
        self.longest_gap = self.longest_gap.max(other.longest_gap);
        self.late.extend(other.late);
        self.lost.extend(other.lost);
    }

    /// Whether every message had an effect in time.
    pub fn passed(&self) -> bool {
        self.late.is_empty() && self.lost.is_empty()
    }

    /// In one line.
    pub fn line(&self) -> String {
        let Self {
            probes,
            messages,
            kills,
            again,
            longest_gap,
            late,
            lost,
        } = self;
        let mut line = format!(
            "{probes} probes, {messages} messages, {kills} SIGKILLs, {} late, {} lost, {again} effects repeated, {longest_gap:.1} s longest time without an effect",
            late.len(),
            lost.len()
        );
        for (what, messages) in [("late", late), ("lost", lost)] {
            if !messages.is_empty() {
                line.push_str(&format!("; {what}: {}", messages.join(", ")));
            }
        }
        line
    }
}

fn probe(
    options: &ProbeOptions,
    servers: &TestServers,
    number: u64,
    folder: &Path,
    stopping: &Stopping,
) -> Result<ProbeResults, Error> {
    std::fs::create_dir_all(folder)?;
    let mut random = fastrand::Rng::with_seed(options.seed ^ (number << 16));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let log = Arc::new(Log::open(&folder.join("harness.jsonl"), "harness")?);
    let queue = format!("probe-{}-{number}", std::process::id());
    let sink = SinkProcess::start(folder)?;
    let client = runtime.block_on(BrokerClient::open(
        Broker::Kafka,
        servers.url_direct(),
        &queue,
        ConsumerMode::Competing,
    ))?;
    let ids: Vec<String> = (0..options.messages)
        .map(|number| format!("u-{number}"))
        .collect();
    let body = |random: &mut fastrand::Rng| {
        serde_json::to_string(&Work {
            ms: random.u64(5..60),
        })
    };
    let messages: Result<Vec<OutgoingMessage>, _> = ids
        .iter()
        .map(|id| {
            Ok::<_, serde_json::Error>(OutgoingMessage {
                id: id.clone(),
                key: None,
                body: body(&mut random)?,
            })
        })
        .collect();
    runtime.block_on(client.publish(messages?, &log))?;
    runtime.block_on(client.flush());
    let fleet = Fleet::new(
        CONSUMERS,
        folder,
        base_arguments(
            TestedGuarantee::EffectivelyOnce,
            servers,
            folder,
            &queue,
            &sink,
        ),
        Arc::clone(&log),
    );
    fleet.start_all()?;
    let mut effects = ProbeEffects::of(folder)?;
    effects.until(1, START_TIMEOUT, stopping)?;
    for kill in 1..=options.kills {
        // Spread over the messages, at random moments.
        let share = options.messages * kill / (options.kills + 2);
        effects.until(share, LATE_TIMEOUT, stopping)?;
        std::thread::sleep(Duration::from_millis(random.u64(0..300)));
        let mut slot = fleet.slot(random.usize(0..CONSUMERS));
        fleet.kill(&mut slot)?;
        fleet.start(&mut slot)?;
    }
    let (late, lost) = effects.until_all(&ids, [LATE_TIMEOUT, LOSS_TIMEOUT], stopping)?;
    let named = |ids: Vec<String>| -> Vec<String> {
        let ids = ids.into_iter();
        ids.map(|id| format!("probe {number}: {id}")).collect()
    };
    let (late, lost) = (named(late), named(lost));
    fleet.terminate_all()?;
    let ProbeEffects {
        all,
        unique,
        longest,
        ..
    } = effects;
    let again = all - unique.len() as u64;
    let longest_gap = longest.as_secs_f64();
    let results = ProbeResults {
        probes: 1,
        messages: options.messages,
        kills: options.kills,
        again,
        longest_gap,
        late,
        lost,
    };
    if results.passed() {
        std::fs::remove_dir_all(folder)?; // no evidence is needed
    }
    Ok(results)
}

/// The effects of a probe so far.
struct ProbeEffects {
    file: File,
    /// An incomplete last line.
    incomplete_line: Vec<u8>,
    all: u64,
    unique: HashSet<String>,
    /// The time of the last new effect, or of the start, and the longest time without one.
    last: Instant,
    longest: Duration,
}

impl ProbeEffects {
    fn of(folder: &Path) -> Result<Self, Error> {
        let file = File::open(folder.join(FILE))?;
        Ok(Self {
            file,
            incomplete_line: Vec::new(),
            all: 0,
            unique: HashSet::new(),
            last: Instant::now(),
            longest: Duration::ZERO,
        })
    }

    /// Reads new lines of the sink's ledger file.
    fn read(&mut self) -> Result<(), Error> {
        self.file.read_to_end(&mut self.incomplete_line)?;
        let Some(end) = self.incomplete_line.iter().rposition(|byte| *byte == b'\n') else {
            return Ok(());
        };
        let lines: Vec<u8> = self.incomplete_line.drain(..=end).collect();
        for line in lines
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
        {
            if let What::Effect { id, .. } = serde_json::from_slice::<Record>(line)?.what {
                self.all += 1;
                self.unique.insert(id);
            }
        }
        Ok(())
    }

    /// Waits until all messages have had an effect, or none had its first effect for the first of two
    /// timeouts; for those that are missing then, also for the second one. Returns those whose effect
    /// came in that time, and those that have none.
    fn until_all(
        &mut self,
        ids: &[String],
        timeouts: [Duration; 2],
        stopping: &Stopping,
    ) -> Result<(Vec<String>, Vec<String>), Error> {
        let [late_after, lost_after] = timeouts;
        self.until(ids.len() as u64, late_after, stopping)?;
        let missing: Vec<String> = ids
            .iter()
            .filter(|id| !self.unique.contains(*id))
            .cloned()
            .collect();
        if !missing.is_empty() {
            self.until(ids.len() as u64, lost_after, stopping)?;
        }
        Ok(missing.into_iter().partition(|id| self.unique.contains(id)))
    }

    /// Waits until this many messages have had an effect, or none had its first effect for
    /// `max_gap`.
    fn until(&mut self, count: u64, max_gap: Duration, stopping: &Stopping) -> Result<(), Error> {
        let mut since = Instant::now();
        let begun = since;
        while (self.unique.len() as u64) < count
            && since.elapsed() < max_gap
            && begun.elapsed() < WAIT_TIMEOUT
        {
            std::thread::sleep(POLL_INTERVAL);
            stopping.check()?;
            let known = self.unique.len();
            self.read()?;
            if self.unique.len() > known {
                // Also the time before the first of this call, in which a consumer was killed.
                self.longest = self.longest.max(self.last.elapsed());
                (self.last, since) = (Instant::now(), Instant::now());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Unique;

    const SHORT: Duration = Duration::from_millis(300);

    /// Writes an effect of each id to the file of the sink, after these pauses.
    fn write_effects(folder: &Path, effects: [(Duration, &'static str); 3]) {
        let sink = Log::open(&folder.join(FILE), "sink").expect("a file");
        std::thread::spawn(move || {
            for (pause, id) in effects {
                std::thread::sleep(pause);
                let effect = What::Effect {
                    id: id.into(),
                    consumer: "c0.1".into(),
                    attempt: 1,
                    unique: Unique::First,
                };
                sink.write(effect);
            }
        });
    }

    #[test]
    fn a_late_effect_is_not_lost_and_the_time_before_the_first_counts() {
        let folder = tempfile::tempdir().expect("a directory");
        write_effects(
            folder.path(),
            [(4 * SHORT, "a"), (SHORT, "b"), (3 * SHORT, "late")],
        );
        let stopping = Stopping::on_signals().expect("signals");
        let ids = ["a", "b", "late", "lost"].map(str::to_owned);
        let mut effects = ProbeEffects::of(folder.path()).expect("the file");
        effects.until(2, 10 * SHORT, &stopping).expect("it runs");
        assert!(effects.longest >= 3 * SHORT, "{:?}", effects.longest);
        let timeouts = [SHORT, 10 * SHORT];
        let (late, lost) = effects
            .until_all(&ids, timeouts, &stopping)
            .expect("it runs");
        assert_eq!((late, lost), (vec!["late".to_owned()], vec!["lost".into()]));
    }
}
