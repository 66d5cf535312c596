//! The processes of a run: consumers, each in a slot in which it is replaced when it ends, and the
//! sink.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;
use crate::ledger::{FaultEdge, Log, SentSignal, What};

/// The polling interval.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// How long a consumer may take to end after SIGTERM before it is killed. Longer than the invariant
/// allows, so that a violation is measured.
const STOP_TIMEOUT: Duration = Duration::from_secs(45);

/// The consumer processes. Dropping it kills those that still run.
#[derive(Debug)]
pub struct Fleet {
    folder: PathBuf,
    arguments: Vec<String>,
    log: Arc<Log>,
    slots: Vec<Mutex<ConsumerSlot>>,
}

/// The slot of a consumer.
#[derive(Debug, Default)]
pub struct ConsumerSlot {
    number: usize,
    started: u32,
    process: Option<WorkerProcess>,
}

#[derive(Debug)]
struct WorkerProcess {
    name: String,
    child: Child,
    /// A process ends when this pipe closes, so that it does not outlive the harness.
    _stdin: Option<ChildStdin>,
}

impl Fleet {
    /// Creates empty slots. Each consumer gets its name and these arguments.
    pub fn new(slots: usize, folder: &Path, arguments: Vec<String>, log: Arc<Log>) -> Self {
        let slots = (0..slots)
            .map(|number| {
                Mutex::new(ConsumerSlot {
                    number,
                    ..ConsumerSlot::default()
                })
            })
            .collect();
        Self {
            folder: folder.to_owned(),
            arguments,
            log,
            slots,
        }
    }

    /// How many slots there are.
    pub fn size(&self) -> usize {
        self.slots.len()
    }

    /// Locks a slot.
    pub fn slot(&self, number: usize) -> MutexGuard<'_, ConsumerSlot> {
        self.slots[number % self.slots.len()]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a consumer in the slot, if it is empty.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn start(&self, slot: &mut ConsumerSlot) -> Result<(), Error> {
        if slot.process.is_none() {
            slot.started += 1;
            let name = format!("c{}.{}", slot.number, slot.started);
            let mut command = this_program(&self.folder.join(format!("{name}.log")))?;
            command
                .args(["consume", "--name", &name])
                .args(&self.arguments);
            let mut child = command.spawn()?;
            slot.process = Some(WorkerProcess {
                name,
                _stdin: child.stdin.take(),
                child,
            });
        }
        Ok(())
    }

    /// Starts one in each empty slot.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn start_all(&self) -> Result<(), Error> {
        (0..self.size()).try_for_each(|number| self.start(&mut self.slot(number)))
    }

    /// The name and process id of each running consumer, except those in locked slots.
    pub fn running(&self) -> Vec<(String, u32)> {
        let name_and_number = |slot: &Mutex<ConsumerSlot>| {
            let slot = slot.try_lock().ok()?;
            slot.process
                .as_ref()
                .map(|process| (process.name.clone(), process.child.id()))
        };
        self.slots.iter().filter_map(name_and_number).collect()
    }

    /// Records and replaces consumers that ended without a signal; skips locked slots.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn replace_ended(&self) -> Result<(), Error> {
        for slot in &self.slots {
            let Ok(mut slot) = slot.try_lock() else {
                continue;
            };
            let Some(status) = slot
                .process
                .as_mut()
                .map(|process| process.child.try_wait())
                .transpose()?
                .flatten()
            else {
                continue;
            };
            if let Some(process) = slot.process.take() {
                self.record_end(&process.name, SentSignal::Nothing, status, Duration::ZERO);
            }
            self.start(&mut slot)?;
        }
        Ok(())
    }

    /// Kills the consumer in the slot (SIGKILL). Does nothing if the slot is empty.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn kill(&self, slot: &mut ConsumerSlot) -> Result<(), Error> {
        let Some(mut process) = slot.process.take() else {
            return Ok(());
        };
        let since = Instant::now();
        process.child.kill()?;
        self.record_end(
            &process.name,
            SentSignal::Kill,
            process.child.wait()?,
            since.elapsed(),
        );
        Ok(())
    }

    /// Sends SIGTERM to the consumer in the slot, and waits until it has ended.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn terminate(&self, slot: &mut ConsumerSlot) -> Result<(), Error> {
        self.wait_until_ready(slot)?;
        slot.signal(Signal::TERM)?;
        self.ended(slot, Instant::now())
    }

    /// Sends SIGTERM to all consumers, and waits until they have ended.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn terminate_all(&self) -> Result<(), Error> {
        let mut slots: Vec<_> = (0..self.size()).map(|number| self.slot(number)).collect();
        slots
            .iter_mut()
            .try_for_each(|slot| self.wait_until_ready(slot))?;
        slots
            .iter()
            .try_for_each(|slot| slot.signal(Signal::TERM))?;
        let since = Instant::now();
        slots
            .iter_mut()
            .try_for_each(|slot| self.ended(slot, since))
    }

    /// Waits until the consumer handles SIGTERM: it installs the handler before it creates its
    /// ledger file; see [`Worker::begin`](crate::worker::Worker::begin).
    fn wait_until_ready(&self, slot: &mut ConsumerSlot) -> Result<(), Error> {
        let Some(process) = &mut slot.process else {
            return Ok(());
        };
        let (file, since) = (
            self.folder.join(format!("{}.jsonl", process.name)),
            Instant::now(),
        );
        while !file.exists()
            && process.child.try_wait()?.is_none()
            && since.elapsed() < STOP_TIMEOUT
        {
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    fn ended(&self, slot: &mut ConsumerSlot, since: Instant) -> Result<(), Error> {
        let Some(mut process) = slot.process.take() else {
            return Ok(());
        };
        let status = loop {
            match process.child.try_wait()? {
                Some(status) => break status,
                None if since.elapsed() > STOP_TIMEOUT => {
                    process.child.kill()?;
                    break process.child.wait()?;
                }
                None => std::thread::sleep(POLL_INTERVAL),
            }
        };
        self.record_end(
            &process.name,
            SentSignal::Terminate,
            status,
            since.elapsed(),
        );
        Ok(())
    }

    fn record_end(&self, name: &str, after: SentSignal, status: ExitStatus, took: Duration) {
        let status = status_text(status);
        let took_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.log.write(What::ProcessEnded {
            consumer: name.to_owned(),
            after,
            status,
            took_ms,
        });
    }
}

impl ConsumerSlot {
    /// The name of the consumer in it.
    pub fn name(&self) -> Option<String> {
        self.process.as_ref().map(|process| process.name.clone())
    }

    /// Sends a signal to the consumer in it, if there is one.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn signal(&self, signal: Signal) -> Result<(), Error> {
        // The process id cannot be reused before the child is waited for.
        let number = self
            .process
            .as_ref()
            .and_then(|process| i32::try_from(process.child.id()).ok())
            .and_then(Pid::from_raw);
        Ok(number.map_or(Ok(()), |number| kill_process(number, signal))?)
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        // Fails if it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The exit status as text.
pub(crate) fn status_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Writes the fault log.
#[derive(Debug)]
pub struct FaultLog {
    log: Arc<Log>,
    next: AtomicU64,
}

impl FaultLog {
    /// Writes to this ledger file.
    pub fn new(log: Arc<Log>) -> Self {
        Self {
            log,
            next: AtomicU64::new(1),
        }
    }

    /// Records the start, runs `inject`, and records the end.
    ///
    /// # Errors
    /// The error of `inject`.
    pub fn record<T>(
        &self,
        kind: &str,
        target: Option<String>,
        inject: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let fault = |edge| What::Fault {
            number,
            kind: kind.to_owned(),
            target: target.clone(),
            edge,
        };
        self.log.write(fault(FaultEdge::Begin));
        let result = inject();
        self.log.write(fault(FaultEdge::End));
        result
    }
}

/// The sink's process; killed when it is dropped.
#[derive(Debug)]
pub struct SinkProcess {
    process: WorkerProcess,
    address: SocketAddr,
}

impl SinkProcess {
    /// Starts the process, and returns when it listens.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn start(folder: &Path) -> Result<Self, Error> {
        let mut command = this_program(&folder.join("sink.log"))?;
        command
            .arg("sink")
            .arg("--folder")
            .arg(folder)
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        let process = WorkerProcess {
            name: "sink".into(),
            _stdin: child.stdin.take(),
            child,
        };
        Ok(Self {
            process,
            address: line.trim().parse().map_err(|_| "the sink did not start")?,
        })
    }

    /// Its address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Checks that the process still runs.
    ///
    /// # Errors
    /// It has ended, so the run has no valid result.
    pub fn check_running(&mut self) -> Result<(), Error> {
        match self.process.child.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("the {} ended: {status}", self.process.name).into()),
        }
    }
}

/// A command that starts this program again, with its standard error in a file and a pipe as its
/// standard input.
fn this_program(log: &Path) -> Result<Command, Error> {
    // Not by its path: a newer build may have replaced the file.
    let mut command = Command::new("/proc/self/exe");
    command.arg0("oncegate-chaos");
    let log: File = OpenOptions::new().append(true).create(true).open(log)?;
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(log);
    // Handlers panic on purpose. The first backtrace would load all debug information, which takes
    // 50 MB and blocks the process.
    command.env("RUST_BACKTRACE", "0");
    Ok(command)
}

/// Ends this process when its standard input ends, since its parent process has ended.
pub fn end_with_parent() {
    std::thread::spawn(|| {
        let mut nothing = String::new();
        while std::io::stdin()
            .read_line(&mut nothing)
            .is_ok_and(|read| read > 0)
        {}
        std::process::exit(3);
    });
}
