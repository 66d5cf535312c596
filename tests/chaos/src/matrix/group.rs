//! One consumer group on servers that it shares with others: its queue, its sink, its processes and
//! its ledger.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use oncegate::marker::{Doubt, Marker};
use oncegate::{MessageId, Redis, Scope, Sqlite};
use rustix::process::{Pid, Signal, kill_process};

use super::consumer::Markers;
use super::servers::Servers;
use crate::Error;
use crate::check::{Checked, Looked, Ordered, Promise, Remembers, Rules, check};
use crate::fleet::SinkProcess;
use crate::ledger::{Edge, Ledger, Log, Sent, What};
use crate::message::Outgoing;
use crate::play::Taken;
use crate::wire::Wire;
use crate::worker::Broker;

/// How long a claim holds.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// How long a drain may take.
pub(crate) const DRAIN: Duration = Duration::from_secs(8);
/// How many messages a consumer handles at once.
const IN_FLIGHT: u32 = 16;
/// How long a handler that lost its lease may run on, once its process runs.
pub(crate) const GRACE: Duration = Duration::from_millis(500);
/// How long after its end a fault may be the cause of something: Kafka's session, a lease, and what
/// takeovers one at a time take.
const AFTERMATH: Duration = Duration::from_secs(10);
/// How often it is looked how things go.
const LOOK: Duration = Duration::from_millis(20);
/// How long nothing may happen until all has drained.
const QUIET: Duration = Duration::from_millis(2_000);
/// How long after it was deleted a topic's old log may still take messages.
const MADE: Duration = Duration::from_secs(2);
/// The SQLite file's name.
const FILE: &str = "markers.db";
/// How long it may take to drain: a machine that is busy with other work may be ten times as slow.
const PATIENCE: Duration = Duration::from_secs(300);

/// What a group is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Made {
    /// Where messages come from.
    pub broker: Broker,
    /// Where markers are kept.
    pub markers: Markers,
    /// What is promised.
    pub promise: Promise,
}

/// A group that is at work.
pub(crate) struct Group<'a> {
    servers: &'a Servers,
    pub(crate) made: Made,
    folder: PathBuf,
    name: String,
    /// Where the SQLite file lies: in memory, where there is such a place. The end of a process
    /// costs it nothing there either, and a disk that is busy with other work costs no leases.
    memory: tempfile::TempDir,
    /// What each of its processes is started with.
    arguments: Vec<String>,
    log: Arc<Log>,
    sink: SinkProcess,
    wire: Wire,
    faults: AtomicU64,
    ids: Mutex<BTreeSet<String>>,
}

/// A consumer of a group; killed when it is dropped.
pub(crate) struct Consumer {
    pub(crate) name: String,
    child: Child,
    /// It ends when this does, so that it does not outlive us.
    _stdin: Option<ChildStdin>,
}

impl Drop for Consumer {
    fn drop(&mut self) {
        // Mostly it has ended, which is an error here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Consumer {
    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<(), Error> {
        // One that has ended and was not waited for still has its number, so no other process can
        // have it.
        let number = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(number.map_or(Ok(()), |number| kill_process(number, signal))?)
    }
}

impl<'a> Group<'a> {
    /// With a topic or queue of its own; everything that is known of it lies in the folder
    /// afterwards.
    pub(crate) fn open(servers: &'a Servers, made: Made, folder: &Path) -> Result<Self, Error> {
        std::fs::create_dir_all(folder)?;
        // Numbers, since a folder's name may be long, and two groups must never share a queue.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!(
            "cell-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let log = Arc::new(Log::open(&folder.join("player.jsonl"), "player")?);
        let sink = SinkProcess::start(folder)?;
        let wire = servers.runtime.block_on(Wire::open(
            made.broker,
            &servers.url(made.broker),
            &name,
            Taken::ByAll,
        ))?;
        let memory = crate::in_memory()?;
        let store = match made.markers {
            Markers::Redis => servers.redis(),
            Markers::Sqlite => memory.path().join(FILE).display().to_string(),
        };
        let promise = serde_json::to_value(made.promise)?
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let arguments = [
            ("folder", folder.display().to_string()),
            ("broker", made.broker.name().to_owned()),
            ("url", servers.url(made.broker)),
            ("from", name.clone()),
            ("markers", made.markers.name().to_owned()),
            ("store", store),
            ("guarantee", promise),
            ("sink", sink.address().to_string()),
            ("lease-ms", LEASE.as_millis().to_string()),
            ("drain-ms", DRAIN.as_millis().to_string()),
            ("in-flight", IN_FLIGHT.to_string()),
        ];
        let arguments = arguments
            .into_iter()
            .map(|(name, value)| format!("--{name}={value}"))
            .collect();
        let (faults, ids) = (AtomicU64::new(1), Mutex::default());
        let group = Self {
            servers,
            made,
            folder: folder.to_owned(),
            name,
            memory,
            arguments,
            log,
            sink,
            wire,
            faults,
            ids,
        };
        // Kafka has said that the topic is made before it tells everybody.
        let until = Instant::now() + PATIENCE;
        while made.broker == Broker::Kafka && group.left().is_none() {
            if Instant::now() > until {
                return Err(
                    format!("Kafka does not know {} within {PATIENCE:?}", group.name).into(),
                );
            }
            std::thread::sleep(5 * LOOK);
        }
        Ok(group)
    }

    /// Starts each consumer with this, from now on.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        let begins = format!("--{name}=");
        self.arguments
            .retain(|argument| !argument.starts_with(&begins));
        self.arguments.push(format!("{begins}{value}"));
    }

    /// Starts a consumer, with more in its environment and its arguments.
    pub(crate) fn start(
        &self,
        name: &str,
        environment: &[(&str, &str)],
        more: &[&str],
    ) -> Result<Consumer, Error> {
        // Not by its path: what lies there may be a newer build by now.
        let mut command = Command::new("/proc/self/exe");
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(self.folder.join(format!("{name}.log")))?;
        command
            .arg0("oncegate-chaos")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log);
        command
            .args(["cell-consumer", "--name", name])
            .args(&self.arguments)
            .args(more);
        command
            .env("RUST_BACKTRACE", "0")
            .envs(environment.iter().copied());
        let mut child = command.spawn()?;
        Ok(Consumer {
            name: name.to_owned(),
            _stdin: child.stdin.take(),
            child,
        })
    }

    /// Hands messages to the broker, and returns when all are confirmed.
    pub(crate) fn publish(&self, messages: Vec<Outgoing>) -> Result<(), Error> {
        self.ids
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(messages.iter().map(|message| message.id.clone()));
        self.servers.runtime.block_on(async {
            self.wire.publish(messages, &self.log).await?;
            self.wire.flush().await;
            Ok(())
        })
    }

    /// What was written down so far.
    pub(crate) fn ledger(&self) -> Result<Ledger, Error> {
        Ok(Ledger::read(&self.folder)?)
    }

    /// Waits until the ledger shows it; says whether it did in time.
    pub(crate) fn until(
        &mut self,
        patience: Duration,
        shows: impl Fn(&Ledger) -> bool,
    ) -> Result<bool, Error> {
        let until = Instant::now() + patience;
        while !shows(&self.ledger()?) {
            if Instant::now() > until {
                return Ok(false);
            }
            self.sink.look()?;
            std::thread::sleep(2 * LOOK);
        }
        Ok(true)
    }

    /// Waits until a consumer has ended; none if it has not in time.
    pub(crate) fn ended(
        &mut self,
        consumer: &mut Consumer,
        patience: Duration,
    ) -> Result<Option<ExitStatus>, Error> {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = consumer.child.try_wait()? {
                return Ok(Some(status));
            }
            if Instant::now() > until {
                return Ok(None);
            }
            self.sink.look()?;
            std::thread::sleep(LOOK);
        }
    }

    /// Writes down how a consumer ended that was made to: its end is the fault.
    pub(crate) fn was_ended(&self, consumer: &Consumer, kind: &str, status: ExitStatus) {
        let number = self.faults.fetch_add(1, Ordering::Relaxed);
        let fault = |edge| What::Fault {
            number,
            kind: kind.to_owned(),
            target: Some(consumer.name.clone()),
            edge,
        };
        let gone = What::Gone {
            consumer: consumer.name.clone(),
            after: Sent::Kill,
            status: said(status),
            took_ms: 0,
        };
        self.log
            .write_all([fault(Edge::Begin), gone, fault(Edge::End)]);
        self.note_commits();
    }

    /// Writes down what Kafka says that the group has committed. What it does not say now it says
    /// at the end.
    fn note_commits(&self) {
        let committed = self
            .wire
            .group()
            .and_then(|group| group.committed().ok())
            .unwrap_or_default();
        self.log.write_all(
            committed
                .into_iter()
                .map(|(partition, offset)| What::Committed { partition, offset }),
        );
    }

    /// SIGKILL.
    pub(crate) fn kill(&self, mut consumer: Consumer, kind: &str) -> Result<(), Error> {
        consumer.child.kill()?;
        let status = consumer.child.wait()?;
        self.was_ended(&consumer, kind, status);
        Ok(())
    }

    /// Waits until nothing is left.
    pub(crate) fn until_done(&self, patience: Duration) -> Result<(), Error> {
        let until = Instant::now() + patience;
        while self.left() != Some(0) {
            if Instant::now() > until {
                return Err(format!("{} is not done within {patience:?}", self.name).into());
            }
            std::thread::sleep(10 * LOOK);
        }
        Ok(())
    }

    /// Deletes the topic, and makes another of its name.
    pub(crate) fn make_anew(&self) -> Result<(), Error> {
        self.note_commits();
        self.log.write(What::MadeAnew);
        self.servers.runtime.block_on(self.wire.make_anew())?;
        std::thread::sleep(MADE);
        Ok(())
    }

    /// Waits until a consumer has declared what it reads from, and ends it.
    pub(crate) fn declared(&mut self, mut consumer: Consumer) -> Result<(), Error> {
        let until = Instant::now() + PATIENCE;
        while self.left().is_none() {
            if Instant::now() > until {
                return Err(format!("{} is not declared within {PATIENCE:?}", self.name).into());
            }
            std::thread::sleep(5 * LOOK);
        }
        self.until_it_listens(&consumer)?;
        consumer.signal(Signal::TERM)?;
        let since = Instant::now();
        let status = self
            .ended(&mut consumer, PATIENCE)?
            .ok_or("it does not end")?;
        let took_ms = u64::try_from(since.elapsed().as_millis())?;
        self.log.write(What::Gone {
            consumer: consumer.name.clone(),
            after: Sent::Terminate,
            status: said(status),
            took_ms,
        });
        Ok(())
    }

    /// Waits until nothing is left and nothing moves, and tells the consumers to drain; what they
    /// still held goes to another.
    pub(crate) fn drain(
        &mut self,
        mut consumers: Vec<Consumer>,
        environment: &[(&str, &str)],
    ) -> Result<(), Error> {
        let until = Instant::now() + PATIENCE;
        for next in 1.. {
            self.until_quiet(&mut consumers, until)?;
            for consumer in &consumers {
                self.until_it_listens(consumer)?;
                consumer.signal(Signal::TERM)?;
            }
            let since = Instant::now();
            for mut consumer in consumers.drain(..) {
                let Some(status) = self.ended(&mut consumer, 2 * DRAIN)? else {
                    return Err(
                        format!("{} was told to drain, and has not ended", consumer.name).into(),
                    );
                };
                let took_ms = u64::try_from(since.elapsed().as_millis())?;
                self.log.write(What::Gone {
                    consumer: consumer.name.clone(),
                    after: Sent::Terminate,
                    status: said(status),
                    took_ms,
                });
            }
            let left = self.left_for_good();
            if left == Some(0) || Instant::now() > until {
                // What the broker does not say is not nothing.
                self.log.write(What::Left {
                    count: left.unwrap_or(u64::MAX),
                });
                break;
            }
            consumers.push(self.start(&format!("z{next}"), environment, &[])?);
        }
        self.note_commits();
        self.look_around()
    }

    /// A process that was just started would be ended by a signal that tells it to drain.
    pub(crate) fn until_it_listens(&self, consumer: &Consumer) -> Result<(), Error> {
        let (file, until) = (
            self.folder.join(format!("{}.jsonl", consumer.name)),
            Instant::now() + PATIENCE,
        );
        while !file.exists() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn left(&self) -> Option<u64> {
        self.servers.runtime.block_on(self.wire.left()).ok()
    }

    /// The queues say how much is ready a moment late.
    fn left_for_good(&self) -> Option<u64> {
        let mut left = None;
        for _ in 0..8 {
            left = self.left();
            if left == Some(0) {
                break;
            }
            std::thread::sleep(10 * LOOK);
        }
        left
    }

    fn until_quiet(&mut self, consumers: &mut [Consumer], until: Instant) -> Result<(), Error> {
        let (mut seen, mut since) = (0, Instant::now());
        while Instant::now() < until {
            self.sink.look()?;
            for consumer in consumers.iter_mut() {
                if let Some(status) = consumer.child.try_wait()? {
                    return Err(
                        format!("{} ended by itself: {}", consumer.name, said(status)).into(),
                    );
                }
            }
            let written = written(&self.folder)?;
            if written != seen {
                (seen, since) = (written, Instant::now());
            }
            if since.elapsed() > QUIET {
                if self.left() == Some(0) {
                    return Ok(());
                }
                since = Instant::now();
            }
            std::thread::sleep(5 * LOOK);
        }
        Ok(())
    }

    /// Writes down what was set aside, and which markers are held by nobody.
    fn look_around(&self) -> Result<(), Error> {
        let letters = self.servers.runtime.block_on(self.wire.aside())?;
        let aside = |letter: crate::wire::Letter| What::Aside {
            id: letter.id,
            place: letter.place,
            reason: letter.reason,
        };
        self.log.write_all(letters.into_iter().map(aside));
        if !self.held()?.is_empty() {
            // Who holds it may have a lease yet; a second later nobody has.
            std::thread::sleep(LEASE + Duration::from_secs(1));
            self.log.write_all(
                self.held()?
                    .into_iter()
                    .map(|(id, record)| What::Marker { id, record }),
            );
        }
        Ok(())
    }

    /// The ids whose marker is in progress, or that somebody finds out about; as Redis would show
    /// them.
    fn held(&self) -> Result<Vec<(String, String)>, Error> {
        let scope = Scope::named(&self.name)?;
        let (redis, file) = (
            Redis::at(self.servers.redis()).timeout(PATIENCE),
            Sqlite::file(self.memory.path().join(FILE)),
        );
        let ids = self
            .ids
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut held = Vec::new();
        self.servers.runtime.block_on(async {
            for id in ids {
                let key = scope.key(&MessageId::new(&id).ok_or("an id")?);
                let marker = match self.made.markers {
                    Markers::Redis => redis.look(&key).await?,
                    Markers::Sqlite => file.look(&key).await?,
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

    /// What it is held to.
    pub(crate) fn rules(&self) -> Rules {
        let order = if self.made.broker == Broker::Kafka {
            Ordered::ByKey
        } else {
            Ordered::Not
        };
        Rules {
            promise: self.made.promise,
            order,
            lease: LEASE,
            grace: GRACE,
            aftermath: AFTERMATH,
            drain: DRAIN,
            store: Remembers::Claims,
            in_flight: IN_FLIGHT,
            attempts: 0,
            looked: Looked::InTheLedger,
        }
    }

    /// What the checker says.
    pub(crate) fn check(&self, rules: &Rules) -> Result<Checked, Error> {
        Ok(check(&self.ledger()?, rules))
    }
}

/// As the system says it.
pub(crate) fn said(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// How many bytes of the ledger there are.
fn written(folder: &Path) -> Result<u64, Error> {
    let mut size = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry
            .path()
            .extension()
            .is_some_and(|extension| extension == "jsonl")
        {
            size += entry.metadata()?.len();
        }
    }
    Ok(size)
}
