//! One consumer group on shared servers, with its own queue, sink, processes and ledger.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use oncegate::internal::Lock;
use oncegate::marker::{Doubt, Marker};
use oncegate::{MessageId, Redis, Scope, Sqlite};
use rustix::process::{Pid, Signal, kill_process};

use super::consumer::TestedStore;
use super::servers::MatrixServers;
use crate::Error;
use crate::broker_client::BrokerClient;
use crate::check::{
    CheckRules, CheckScope, Checked, ClaimDurability, Ordered, TestedGuarantee, check,
};
use crate::fleet::{SinkProcess, status_text};
use crate::ledger::{FaultEdge, Ledger, Log, SentSignal, What};
use crate::message::OutgoingMessage;
use crate::run::{ConsumerMode, written};
use crate::worker::Broker;

/// The lease.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// The drain timeout.
pub(crate) const DRAIN: Duration = Duration::from_secs(8);
/// The maximum number of messages in flight.
const IN_FLIGHT: u32 = 16;
/// How long a handler may continue after it lost its lease.
pub(crate) const GRACE: Duration = Duration::from_millis(500);
/// How long after its end a fault may be the cause of an effect: Kafka's session timeout, a lease,
/// and the time to take over messages, of which some run alone.
const AFTERMATH: Duration = Duration::from_secs(10);
/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long the ledger must not grow until all messages count as settled.
const QUIET_TIME: Duration = Duration::from_millis(2_000);
/// How long after its deletion a topic may still accept messages.
const DELETION_TIME: Duration = Duration::from_secs(2);
/// The SQLite file's name.
const FILE: &str = "markers.db";
/// The time limit of each wait: an overloaded machine may be ten times as slow.
const WAIT_TIMEOUT: Duration = Duration::from_secs(300);

/// The broker, store and guarantee of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Combination {
    /// The broker.
    pub broker: Broker,
    /// Where messages are recorded.
    pub markers: TestedStore,
    /// The guarantee.
    #[serde(rename = "promise")]
    pub guarantee: TestedGuarantee,
}

impl Combination {
    /// How many processes are aborted at each step.
    pub fn runs(self) -> u64 {
        if self.markers.is_inbox() { 20 } else { 3 }
    }
}

/// A running group.
pub(crate) struct ConsumerGroup<'a> {
    servers: &'a MatrixServers,
    pub(crate) combination: Combination,
    folder: PathBuf,
    name: String,
    /// The directory of the SQLite file, if possible on a memory file system: a slow disk would
    /// cost leases, and the file survives the kill of a process.
    memory: tempfile::TempDir,
    /// The arguments of each consumer.
    arguments: Vec<String>,
    log: Arc<Log>,
    sink: SinkProcess,
    client: BrokerClient,
    faults: AtomicU64,
    ids: Lock<BTreeSet<String>>,
}

/// A consumer process of a group; dropping it kills the process.
pub(crate) struct GroupMember {
    pub(crate) name: String,
    child: Child,
    /// The process ends when this pipe closes, so that it does not outlive the harness.
    _stdin: Option<ChildStdin>,
}

impl Drop for GroupMember {
    fn drop(&mut self) {
        // Fails if it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl GroupMember {
    /// Starts this program with these arguments. Appends its log to `<name>.log` in the folder.
    pub(crate) fn start<'a>(
        folder: &Path,
        name: &str,
        arguments: impl IntoIterator<Item = &'a str>,
        environment: &[(&str, &str)],
    ) -> Result<Self, Error> {
        // Not by its path: a newer build may have replaced the file.
        let mut command = Command::new("/proc/self/exe");
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(folder.join(format!("{name}.log")))?;
        command
            .arg0("oncegate-chaos")
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            .env("RUST_BACKTRACE", "0")
            .envs(environment.iter().copied());
        let mut child = command.spawn()?;
        Ok(Self {
            name: name.to_owned(),
            _stdin: child.stdin.take(),
            child,
        })
    }

    /// Waits until it has ended; none if it does not in time.
    pub(crate) fn ended_within(&mut self, timeout: Duration) -> Result<Option<ExitStatus>, Error> {
        let until = Instant::now() + timeout;
        loop {
            let status = self.child.try_wait()?;
            if status.is_some() || Instant::now() > until {
                return Ok(status);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Whether its log says that it aborted at this armed step.
    pub(crate) fn aborted_at(&self, folder: &Path, armed: &str) -> Result<bool, Error> {
        let log = std::fs::read_to_string(folder.join(format!("{}.log", self.name)))?;
        let end = format!("oncegate-failpoint {armed}");
        Ok(log.lines().any(|line| line.ends_with(&end)))
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Error> {
        // The process id cannot be reused before the child is waited for.
        let number = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(number.map_or(Ok(()), |number| kill_process(number, signal))?)
    }
}

impl<'a> ConsumerGroup<'a> {
    /// Creates a group with its own topic or queue; its files are in the folder.
    pub(crate) fn open(
        servers: &'a MatrixServers,
        combination: Combination,
        folder: &Path,
    ) -> Result<Self, Error> {
        std::fs::create_dir_all(folder)?;
        // A number, since folder names may be too long; unique, since groups must not share a
        // queue.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "cell-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let log = Arc::new(Log::open(&folder.join("harness.jsonl"), "harness")?);
        let sink = SinkProcess::start(folder)?;
        let client = servers.runtime.block_on(BrokerClient::open(
            combination.broker,
            &servers.url(combination.broker),
            &name,
            ConsumerMode::Competing,
        ))?;
        let memory = crate::in_memory()?;
        let store = match combination.markers {
            TestedStore::Redis => servers.redis(),
            _ => memory.path().join(FILE).display().to_string(),
        };
        let guarantee = serde_json::to_value(combination.guarantee)?
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let arguments = [
            ("folder", folder.display().to_string()),
            ("broker", combination.broker.name().to_owned()),
            ("url", servers.url(combination.broker)),
            ("from", name.clone()),
            ("markers", combination.markers.name().to_owned()),
            ("store", store),
            ("guarantee", guarantee),
            ("sink", sink.address().to_string()),
            ("lease-ms", LEASE.as_millis().to_string()),
            ("drain-ms", DRAIN.as_millis().to_string()),
            ("in-flight", IN_FLIGHT.to_string()),
        ];
        let arguments = arguments
            .into_iter()
            .map(|(name, value)| format!("--{name}={value}"))
            .collect();
        let (faults, ids) = (AtomicU64::new(1), Lock::default());
        let group = Self {
            servers,
            combination,
            folder: folder.to_owned(),
            name,
            memory,
            arguments,
            log,
            sink,
            client,
            faults,
            ids,
        };
        // Kafka confirms the creation of a topic before its metadata is available.
        let until = Instant::now() + WAIT_TIMEOUT;
        while combination.broker == Broker::Kafka && group.unsettled().is_none() {
            if Instant::now() > until {
                return Err(format!(
                    "Kafka has no metadata of the topic {} after {WAIT_TIMEOUT:?}",
                    group.name
                )
                .into());
            }
            std::thread::sleep(5 * POLL_INTERVAL);
        }
        Ok(group)
    }

    /// Sets an argument of the consumers that are started from now on.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        let begins = format!("--{name}=");
        self.arguments
            .retain(|argument| !argument.starts_with(&begins));
        self.arguments.push(format!("{begins}{value}"));
    }

    /// Starts a consumer with additional environment variables and arguments.
    pub(crate) fn start(
        &self,
        name: &str,
        environment: &[(&str, &str)],
        more: &[&str],
    ) -> Result<GroupMember, Error> {
        let arguments = ["cell-consumer", "--name", name]
            .into_iter()
            .chain(self.arguments.iter().map(String::as_str))
            .chain(more.iter().copied());
        GroupMember::start(&self.folder, name, arguments, environment)
    }

    /// Publishes messages, and returns when all are confirmed.
    pub(crate) fn publish(&self, messages: Vec<OutgoingMessage>) -> Result<(), Error> {
        self.ids
            .lock()
            .extend(messages.iter().map(|message| message.id.clone()));
        self.servers.runtime.block_on(async {
            self.client.publish(messages, &self.log).await?;
            self.client.flush().await;
            Ok(())
        })
    }

    /// The ledger so far.
    pub(crate) fn ledger(&self) -> Result<Ledger, Error> {
        Ok(Ledger::read(&self.folder)?)
    }

    /// Waits until the ledger satisfies the condition. Returns whether it did in time.
    pub(crate) fn until(
        &mut self,
        timeout: Duration,
        shows: impl Fn(&Ledger) -> bool,
    ) -> Result<bool, Error> {
        let until = Instant::now() + timeout;
        while !shows(&self.ledger()?) {
            if Instant::now() > until {
                return Ok(false);
            }
            self.sink.check_running()?;
            std::thread::sleep(2 * POLL_INTERVAL);
        }
        Ok(true)
    }

    /// Waits until a consumer has ended; none if it does not in time.
    pub(crate) fn ended(
        &mut self,
        consumer: &mut GroupMember,
        timeout: Duration,
    ) -> Result<Option<ExitStatus>, Error> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(status) = consumer.child.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() > until {
                return Ok(None);
            }
            self.sink.check_running()?;
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Records the forced end of a consumer as a fault.
    pub(crate) fn was_ended(&self, consumer: &GroupMember, kind: &str, status: ExitStatus) {
        let number = self.faults.fetch_add(1, Ordering::Relaxed);
        let fault = |edge| What::Fault {
            number,
            kind: kind.to_owned(),
            target: Some(consumer.name.clone()),
            edge,
        };
        let gone = What::ProcessEnded {
            consumer: consumer.name.clone(),
            after: SentSignal::Kill,
            status: status_text(status),
            took_ms: 0,
        };
        self.log
            .write_all([fault(FaultEdge::Begin), gone, fault(FaultEdge::End)]);
        self.note_commits();
    }

    /// Records the committed offsets. Ignores errors, since they are recorded again at the end.
    fn note_commits(&self) {
        let committed = self
            .client
            .group()
            .and_then(|group| group.committed().ok())
            .unwrap_or_default();
        self.log.write_all(
            committed
                .into_iter()
                .map(|(partition, offset)| What::Committed { partition, offset }),
        );
    }

    /// Kills a consumer (SIGKILL).
    pub(crate) fn kill(&self, mut consumer: GroupMember, kind: &str) -> Result<(), Error> {
        consumer.child.kill()?;
        let status = consumer.child.wait()?;
        self.was_ended(&consumer, kind, status);
        Ok(())
    }

    /// Waits until all messages are settled.
    pub(crate) fn until_done(&self, timeout: Duration) -> Result<(), Error> {
        let until = Instant::now() + timeout;
        while self.unsettled() != Some(0) {
            if Instant::now() > until {
                return Err(format!(
                    "{} still has unsettled messages after {timeout:?}",
                    self.name
                )
                .into());
            }
            std::thread::sleep(10 * POLL_INTERVAL);
        }
        Ok(())
    }

    /// Deletes the topic and creates it again.
    pub(crate) fn recreate_topic(&self) -> Result<(), Error> {
        self.note_commits();
        self.log.write(What::TopicRecreated);
        self.servers
            .runtime
            .block_on(self.client.recreate_topic())?;
        std::thread::sleep(DELETION_TIME);
        Ok(())
    }

    /// Waits until a consumer has declared its queue, and ends the consumer.
    pub(crate) fn declared(&mut self, mut consumer: GroupMember) -> Result<(), Error> {
        let until = Instant::now() + WAIT_TIMEOUT;
        while self.unsettled().is_none() {
            if Instant::now() > until {
                return Err(format!(
                    "the queue {} was not declared within {WAIT_TIMEOUT:?}",
                    self.name
                )
                .into());
            }
            std::thread::sleep(5 * POLL_INTERVAL);
        }
        self.wait_until_ready(&consumer)?;
        consumer.signal(Signal::TERM)?;
        let since = Instant::now();
        let status = self
            .ended(&mut consumer, WAIT_TIMEOUT)?
            .ok_or("the consumer did not end after SIGTERM")?;
        let took_ms = u64::try_from(since.elapsed().as_millis())?;
        self.log.write(What::ProcessEnded {
            consumer: consumer.name.clone(),
            after: SentSignal::Terminate,
            status: status_text(status),
            took_ms,
        });
        Ok(())
    }

    /// Waits until all messages are settled and the ledger no longer grows, and drains the
    /// consumers. Starts another consumer for messages that they returned.
    pub(crate) fn drain(
        &mut self,
        mut consumers: Vec<GroupMember>,
        environment: &[(&str, &str)],
    ) -> Result<(), Error> {
        let until = Instant::now() + WAIT_TIMEOUT;
        for next in 1.. {
            self.until_quiet(&mut consumers, until)?;
            for consumer in &consumers {
                self.wait_until_ready(consumer)?;
                consumer.signal(Signal::TERM)?;
            }
            let since = Instant::now();
            for mut consumer in consumers.drain(..) {
                let Some(status) = self.ended(&mut consumer, 2 * DRAIN)? else {
                    return Err(format!("{} did not end after SIGTERM", consumer.name).into());
                };
                let took_ms = u64::try_from(since.elapsed().as_millis())?;
                self.log.write(What::ProcessEnded {
                    consumer: consumer.name.clone(),
                    after: SentSignal::Terminate,
                    status: status_text(status),
                    took_ms,
                });
            }
            let left = self.unsettled_at_end();
            if left == Some(0) || Instant::now() > until {
                // Without a reply of the broker the count is unknown, not 0.
                self.log.write(What::Unsettled {
                    count: left.unwrap_or(u64::MAX),
                });
                break;
            }
            consumers.push(self.start(&format!("z{next}"), environment, &[])?);
        }
        self.note_commits();
        self.record_remains()
    }

    /// Waits until the consumer handles SIGTERM, which would otherwise end it without a drain.
    pub(crate) fn wait_until_ready(&self, consumer: &GroupMember) -> Result<(), Error> {
        let (file, until) = (
            self.folder.join(format!("{}.jsonl", consumer.name)),
            Instant::now() + WAIT_TIMEOUT,
        );
        while !file.exists() && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn unsettled(&self) -> Option<u64> {
        self.servers.runtime.block_on(self.client.unsettled()).ok()
    }

    /// The number of unsettled messages; polls, because queues update their counts with a delay.
    fn unsettled_at_end(&self) -> Option<u64> {
        let mut left = None;
        for _ in 0..8 {
            left = self.unsettled();
            if left == Some(0) {
                break;
            }
            std::thread::sleep(10 * POLL_INTERVAL);
        }
        left
    }

    fn until_quiet(&mut self, consumers: &mut [GroupMember], until: Instant) -> Result<(), Error> {
        let (mut seen, mut since) = (0, Instant::now());
        while Instant::now() < until {
            self.sink.check_running()?;
            for consumer in consumers.iter_mut() {
                if let Some(status) = consumer.child.try_wait()? {
                    return Err(format!(
                        "{} ended by itself: {}",
                        consumer.name,
                        status_text(status)
                    )
                    .into());
                }
            }
            let written = written(&self.folder)?;
            if written != seen {
                (seen, since) = (written, Instant::now());
            }
            if since.elapsed() > QUIET_TIME {
                if self.unsettled() == Some(0) {
                    return Ok(());
                }
                since = Instant::now();
            }
            std::thread::sleep(5 * POLL_INTERVAL);
        }
        Ok(())
    }

    /// Records dead letters, in-doubt messages and markers that remain in progress.
    fn record_remains(&self) -> Result<(), Error> {
        let rejected = self
            .servers
            .runtime
            .block_on(self.client.rejected_messages())?;
        let record = |message: crate::broker_client::RejectedMessage| What::Rejected {
            id: message.id,
            place: message.place,
            reason: message.reason,
        };
        self.log.write_all(rejected.into_iter().map(record));
        if !self.held()?.is_empty() {
            // A lease may still be valid; after this pause none is.
            std::thread::sleep(LEASE + Duration::from_secs(1));
            self.log.write_all(
                self.held()?
                    .into_iter()
                    .map(|(id, record)| What::Marker { id, record }),
            );
        }
        Ok(())
    }

    /// The ids whose marker is in progress or being reconciled, in the format of the Redis store.
    fn held(&self) -> Result<Vec<(String, String)>, Error> {
        let scope = Scope::named(&self.name)?;
        let (redis, file) = (
            Redis::at(self.servers.redis()).timeout(WAIT_TIMEOUT),
            Sqlite::file(self.memory.path().join(FILE)),
        );
        let ids = self.ids.lock().clone();
        let mut held = Vec::new();
        self.servers.runtime.block_on(async {
            for id in ids {
                let key = scope.key(&MessageId::new(&id).ok_or("an id")?);
                let marker = match self.combination.markers {
                    TestedStore::Redis => redis.read_marker(&key).await?,
                    _ => file.read_marker(&key).await?,
                };
                match marker {
                    Marker::InProgress(hold) => {
                        held.push((id, format!("v1 p attempt {}", hold.attempts.number)))
                    }
                    Marker::InDoubt(hold, Doubt::Reconciling) => {
                        held.push((id, format!("v1 r attempt {}", hold.attempts.number)))
                    }
                    _ => {}
                }
            }
            Ok(held)
        })
    }

    /// The rules by which the group is checked.
    pub(crate) fn rules(&self) -> CheckRules {
        let order = if self.combination.broker == Broker::Kafka {
            Ordered::ByKey
        } else {
            Ordered::Not
        };
        CheckRules {
            guarantee: self.combination.guarantee,
            order,
            lease: LEASE,
            grace: GRACE,
            aftermath: AFTERMATH,
            drain: DRAIN,
            store: ClaimDurability::Kept,
            in_flight: IN_FLIGHT,
            attempts: 0,
            scope: CheckScope::LedgerOnly,
        }
    }

    /// Checks the ledger.
    pub(crate) fn check(&self, rules: &CheckRules) -> Result<Checked, Error> {
        Ok(check(&self.ledger()?, rules))
    }
}
