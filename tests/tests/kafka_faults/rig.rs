//! A topic, its consumer processes, their diary, and their committed offsets.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_tests::diary::{self, DiaryRun, Entry};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{
    BaseRecord, DefaultProducerContext, Producer, PurgeConfig, ThreadedProducer,
};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// The lease of the consumers.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// The timeout of a request to the broker.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Rig {
    brokers: String,
    pub(crate) name: String,
    partitions: i32,
    directory: TempDir,
    started: AtomicU32,
}

impl Rig {
    /// Creates a topic with this number of partitions and replicas.
    pub(crate) async fn new(brokers: String, partitions: i32, replicas: i32) -> Self {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .expect("a clock after 1970")
            .as_nanos();
        let name = format!("faults-{now}");
        let admin: AdminClient<DefaultClientContext> =
            client(&brokers).create().expect("an admin client");
        let options = AdminOptions::new().operation_timeout(Some(REQUEST_TIMEOUT * 3));
        let kept = |name| {
            NewTopic::new(name, 1, TopicReplication::Fixed(replicas))
                .set("retention.ms", "-1")
                .set("retention.bytes", "-1")
        };
        let (dead, doubt) = (format!("{name}.dead-letters"), format!("{name}.in-doubt"));
        let topic = NewTopic::new(&name, partitions, TopicReplication::Fixed(replicas));
        let created = admin
            .create_topics(&[topic, kept(&dead), kept(&doubt)], &options)
            .await
            .expect("an answer");
        assert!(created.iter().all(Result::is_ok), "{created:?}");
        Self {
            brokers,
            name,
            partitions,
            directory: tempfile::tempdir().expect("a directory"),
            started: AtomicU32::new(0),
        }
    }

    /// Publishes messages with these numbers for each of `keys` keys, in order; their handlers take
    /// `takes`. If not all are confirmed within forty seconds, publishes them again with a new
    /// client; the gate deduplicates them.
    pub(crate) fn publish(&self, keys: usize, numbers: Range<usize>, takes: Duration) {
        let mut config = client(&self.brokers);
        config
            .set("acks", "all")
            .set("linger.ms", "5")
            .set("queue.buffering.max.messages", "500000");
        let body = format!(r#"{{"do":"slow","ms":{}}}"#, takes.as_millis());
        for attempt in 1..=8 {
            let producer: ThreadedProducer<DefaultProducerContext> =
                config.create().expect("a producer");
            for number in numbers.clone() {
                for key in 0..keys {
                    let (key, id) = (format!("k{key}"), id(key, number));
                    let headers = OwnedHeaders::new().insert(Header {
                        key: "id",
                        value: Some(&id),
                    });
                    let mut record = BaseRecord::to(&self.name)
                        .key(&key)
                        .payload(&body)
                        .headers(headers);
                    while let Err((error, again)) = producer.send(record) {
                        assert_eq!(
                            error,
                            KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull)
                        );
                        record = again;
                        std::thread::sleep(Duration::from_millis(10));
                    }
                }
            }
            let Err(error) = producer.flush(REQUEST_TIMEOUT * 4) else {
                return;
            };
            let unconfirmed = producer.in_flight_count();
            let metadata = producer
                .client()
                .fetch_metadata(Some(&self.name), REQUEST_TIMEOUT);
            let leaders = metadata.map(|it| {
                it.topics()[0]
                    .partitions()
                    .iter()
                    .map(|it| it.leader())
                    .collect::<Vec<_>>()
            });
            eprintln!(
                "publisher {attempt}: {unconfirmed} not confirmed: {error}; leaders {leaders:?}"
            );
            producer.purge(PurgeConfig::default().queue().inflight());
        }
        panic!("no publisher was confirmed all it sent\n{}", self.logs());
    }

    /// Starts a consumer with the guarantee `at-most-once` or `effectively-once`.
    pub(crate) fn consumer(&self, guarantee: &str, more: &[&str]) -> Member {
        self.consumer_of(&self.name, guarantee, more)
    }

    /// The same in another group and scope, which reads from the start.
    pub(crate) fn consumer_of(&self, group: &str, guarantee: &str, more: &[&str]) -> Member {
        let redis = oncegate_testkit::redis_url().unwrap_or_else(|missing| panic!("{missing}"));
        let number = self.started.fetch_add(1, Ordering::Relaxed);
        let log = self.directory.path().join(format!("{number}.log"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_consumer"));
        command.args([
            "--broker=kafka",
            "--url",
            &self.brokers,
            "--from",
            &self.name,
            "--group",
            group,
            "--scope",
            group,
        ]);
        if !more.iter().any(|it| it.starts_with("--lease-ms")) {
            command.args(["--lease-ms", &LEASE.as_millis().to_string()]);
        }
        command.args(["--redis", &redis, "--guarantee", guarantee, "--diary"]);
        command
            .arg(self.directory.path().join("diary"))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let process = command
            .stderr(File::create(&log).expect("a log"))
            .spawn()
            .expect("the consumer's program");
        Member { process, log }
    }

    fn entries(&self) -> Vec<Entry> {
        diary::read(&self.directory.path().join("diary"))
    }

    pub(crate) fn starts(&self) -> Vec<DiaryRun> {
        self.entries()
            .into_iter()
            .filter_map(|entry| {
                if let Entry::Start(run) = entry {
                    Some(run)
                } else {
                    None
                }
            })
            .collect()
    }

    pub(crate) fn effects(&self) -> Vec<DiaryRun> {
        self.entries()
            .into_iter()
            .filter_map(|entry| {
                if let Entry::Effect(run) = entry {
                    Some(run)
                } else {
                    None
                }
            })
            .collect()
    }

    /// Waits until this many ids have an effect or are in doubt. Returns how long that took.
    pub(crate) async fn until_ids_with_outcome(&self, count: usize, timeout: Duration) -> Duration {
        self.until(
            &format!("{count} ids have an effect or are in doubt"),
            timeout,
            || self.with_outcome().len() >= count,
        )
        .await
    }

    pub(crate) async fn until_effects(&self, count: usize, timeout: Duration) -> Duration {
        self.until(&format!("{count} effects"), timeout, || {
            self.effects().len() >= count
        })
        .await
    }

    /// Waits until a further message of each key has started. Returns how long that took.
    pub(crate) async fn until_each_key_starts_again(
        &self,
        keys: usize,
        timeout: Duration,
    ) -> Duration {
        let begun = self.starts().len();
        let again = || {
            self.starts()
                .iter()
                .skip(begun)
                .filter_map(|run| Some(run.id.split_once('-')?.0.to_owned()))
                .collect::<BTreeSet<_>>()
        };
        self.until(
            &format!("{keys} keys start a further message"),
            timeout,
            || again().len() == keys,
        )
        .await
    }

    /// Waits until the consumer with this number, counted from 0, has this many partitions.
    pub(crate) async fn until_assigned(
        &self,
        consumer: u32,
        partitions: usize,
        timeout: Duration,
    ) -> Duration {
        let has = || {
            let log = self.log(consumer);
            log.matches("partition assigned")
                .count()
                .saturating_sub(log.matches("partition revoked").count())
        };
        self.until(
            &format!("consumer {consumer} has {partitions} partitions"),
            timeout,
            || has() == partitions,
        )
        .await
    }

    pub(crate) async fn until_logged(&self, what: &str, timeout: Duration) -> Duration {
        self.until(&format!("a log has {what}"), timeout, || {
            self.logged(what) > 0
        })
        .await
    }

    async fn until(&self, what: &str, timeout: Duration, is_so: impl Fn() -> bool) -> Duration {
        let begun = Instant::now();
        while !is_so() {
            assert!(
                begun.elapsed() < timeout,
                "not within {timeout:?}: {what}; {} effects\n{}",
                self.effects().len(),
                self.logs()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        begun.elapsed()
    }

    /// The ids that have an effect or are in the in-doubt topic.
    fn with_outcome(&self) -> BTreeSet<String> {
        let effects = self.effects().into_iter().map(|run| run.id);
        effects.chain(self.in_doubt()).collect()
    }

    /// The ids in the in-doubt topic.
    pub(crate) fn in_doubt(&self) -> BTreeSet<String> {
        use rdkafka::message::{Headers, Message};
        let topic = format!("{}.in-doubt", self.name);
        let reader: BaseConsumer = client(&self.brokers)
            .set("group.id", "faults-reader")
            .create()
            .expect("a consumer");
        // Retries while the broker does not reply.
        let Ok((low, high)) = reader.fetch_watermarks(&topic, 0, REQUEST_TIMEOUT) else {
            return BTreeSet::new();
        };
        let mut all = TopicPartitionList::new();
        all.add_partition_offset(&topic, 0, Offset::Beginning)
            .expect("an offset");
        reader.assign(&all).expect("an assignment");
        let letters = (low..high).filter_map(|_| {
            reader
                .poll(REQUEST_TIMEOUT)?
                .ok()
                .map(|letter| letter.detach())
        });
        let id = |headers: Option<&OwnedHeaders>| {
            let found = headers?
                .iter()
                .find(|header| header.key == "id")?
                .value?
                .to_vec();
            String::from_utf8(found).ok()
        };
        letters.filter_map(|letter| id(letter.headers())).collect()
    }

    /// Counts lost, repeated and out-of-order messages.
    pub(crate) fn count_violations(&self, keys: usize, each: usize) -> Violations {
        let all: BTreeSet<String> = (0..keys)
            .flat_map(|key| (0..each).map(move |number| id(key, number)))
            .collect();
        let (effects, starts, doubted) = (self.effects(), self.starts(), self.in_doubt());
        let twice = |runs: &[DiaryRun]| {
            let mut seen = BTreeMap::<&str, usize>::new();
            runs.iter()
                .for_each(|run| *seen.entry(&run.id).or_default() += 1);
            seen.into_values().filter(|count| *count > 1).count()
        };
        let with_outcome: BTreeSet<String> = effects
            .iter()
            .map(|run| run.id.clone())
            .chain(doubted.iter().cloned())
            .collect();
        let mut last = BTreeMap::<&str, &str>::new();
        let out_of_order = effects
            .iter()
            .filter(|run| {
                let (key, number) = run.id.split_once('-').expect("an id of ours");
                last.insert(key, number)
                    .is_some_and(|before| before > number)
            })
            .count();
        Violations {
            lost: all.difference(&with_outcome).count(),
            effects_twice: twice(&effects),
            starts_twice: twice(&starts),
            out_of_order,
            logs_cut: self.logged("log truncated"),
            in_doubt: doubted.len(),
            fenced: self.counted("fenced"),
        }
    }

    /// The sum of this outcome in the counters of all consumers.
    pub(crate) fn counted(&self, outcome: &str) -> usize {
        self.entries()
            .iter()
            .filter(|entry| matches!(entry, Entry::Counted(it) if it == outcome))
            .count()
    }

    /// Waits until the group has committed the end of every partition.
    pub(crate) async fn until_committed(&self, timeout: Duration) {
        let begun = Instant::now();
        loop {
            // A new client each time: a client may lose the metadata of a frozen broker.
            let asker: BaseConsumer = client(&self.brokers)
                .set("group.id", &self.name)
                .create()
                .expect("a consumer");
            let committed = committed(&asker, &self.name, self.partitions);
            let ends = (0..self.partitions).map(|it| {
                asker
                    .fetch_watermarks(&self.name, it, REQUEST_TIMEOUT)
                    .map(|(_, end)| end)
            });
            let ends: Result<Vec<i64>, _> = ends.collect();
            // An empty partition need not be committed.
            if let (Some(committed), Ok(ends)) = (committed, ends)
                && ends.iter().enumerate().all(|(partition, end)| {
                    committed.get(&(partition as i32)).copied().unwrap_or(0) == *end
                })
            {
                return;
            }
            assert!(
                begun.elapsed() < timeout,
                "not all was committed\n{}",
                self.logs()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Polls the committed offsets of the group until the watch ends.
    pub(crate) fn watch_offsets(&self) -> OffsetWatch {
        let (brokers, name, partitions) =
            (self.brokers.clone(), self.name.clone(), self.partitions);
        let (stop, seen) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(Mutex::new(Seen::default())),
        );
        let (stopping, into) = (stop.clone(), seen.clone());
        let thread = std::thread::spawn(move || {
            let asker: BaseConsumer = client(&brokers)
                .set("group.id", &name)
                .create()
                .expect("a consumer");
            while !stopping.load(Ordering::Relaxed) {
                if let Some(now) = committed(&asker, &name, partitions) {
                    let mut seen = into
                        .lock()
                        .expect("no thread panics while it holds the lock");
                    seen.samples += 1;
                    for (partition, offset) in now {
                        let before = seen.offsets.insert(partition, offset);
                        seen.regressions +=
                            usize::from(before.is_some_and(|before| offset < before));
                    }
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        OffsetWatch {
            stop,
            seen,
            thread: Some(thread),
        }
    }

    /// The last lines and the errors of the logs of the consumers.
    pub(crate) fn logs(&self) -> String {
        let log = |number: u32| format!("consumer {number}:\n{}", last_lines(&self.log(number)));
        (0..self.started.load(Ordering::Relaxed))
            .map(log)
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// The number of log lines of all consumers that contain this text.
    pub(crate) fn logged(&self, what: &str) -> usize {
        (0..self.started.load(Ordering::Relaxed))
            .map(|number| self.log(number).matches(what).count())
            .sum()
    }

    fn log(&self, number: u32) -> String {
        std::fs::read_to_string(self.directory.path().join(format!("{number}.log")))
            .unwrap_or_default()
    }
}

/// The result of all messages.
#[derive(Debug)]
pub(crate) struct Violations {
    pub(crate) lost: usize,
    pub(crate) effects_twice: usize,
    pub(crate) starts_twice: usize,
    pub(crate) out_of_order: usize,
    /// Log lines about a truncated log.
    pub(crate) logs_cut: usize,
    pub(crate) in_doubt: usize,
    /// Lost leases, by the counters of the consumers.
    pub(crate) fenced: usize,
}

/// Watches committed offsets.
pub(crate) struct OffsetWatch {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Seen>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) samples: usize,
    pub(crate) regressions: usize,
    offsets: BTreeMap<i32, i64>,
}

impl OffsetWatch {
    pub(crate) fn end(mut self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        self.thread
            .take()
            .expect("ended once")
            .join()
            .expect("no panic");
        self.seen
            .lock()
            .expect("no thread panics while it holds the lock")
            .clone()
    }
}

/// A consumer process. Dropping it kills the process.
pub(crate) struct Member {
    process: Child,
    log: PathBuf,
}

impl Member {
    pub(crate) fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.process.id())
            .ok()
            .and_then(Pid::from_raw)
            .expect("a process number");
        kill_process(pid, signal).expect("it is not waited for yet");
    }

    /// Waits until it has partitions again after it lost all.
    pub(crate) async fn until_assigned(&self) {
        let end = Instant::now() + REQUEST_TIMEOUT * 12;
        loop {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            let lost = log.rfind("lost=true").max(log.rfind("client replaced"));
            if lost <= log.rfind("partition assigned") {
                return;
            }
            assert!(
                Instant::now() < end,
                "it has no partition again: {}",
                last_lines(&log)
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Sends SIGTERM and expects success.
    pub(crate) async fn leave(mut self) {
        self.signal(Signal::TERM);
        let end = Instant::now() + Duration::from_secs(120);
        while self
            .process
            .try_wait()
            .expect("it was started here")
            .is_none()
        {
            assert!(Instant::now() < end, "it does not end");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let status = self.process.wait().expect("it was started here");
        assert!(
            status.success(),
            "{status}: {}",
            last_lines(&std::fs::read_to_string(&self.log).unwrap_or_default())
        );
    }

    /// Its resident memory, in KiB.
    pub(crate) fn memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))
            .unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmRSS:"));
        line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok())
            .unwrap_or(0)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Fails if it has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The last lines of a log.
fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

fn id(key: usize, number: usize) -> String {
    format!("k{key}-{number:07}")
}

fn committed(asker: &BaseConsumer, topic: &str, partitions: i32) -> Option<BTreeMap<i32, i64>> {
    let mut all = TopicPartitionList::new();
    for partition in 0..partitions {
        all.add_partition(topic, partition);
    }
    let answer = asker.committed_offsets(all, Duration::from_secs(2)).ok()?;
    let elements = answer.elements();
    Some(
        elements
            .iter()
            .filter_map(|it| {
                Some((
                    it.partition(),
                    it.offset().to_raw().filter(|offset| *offset >= 0)?,
                ))
            })
            .collect(),
    )
}

fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config
}
