//! The life of a server, the same for each kind: start, stop, kill, freeze, start again, detach.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use super::ServerError;
use super::process::{LOOK_EVERY, ProcessId};

/// How long a server may take to end after SIGTERM before SIGKILL.
const STOP_PATIENCE: Duration = Duration::from_secs(15);

/// What differs between the servers.
pub trait Kind {
    /// The server's name.
    const NAME: &'static str;
    /// What to do when it does not start.
    const ADVICE: &'static str;
    /// How long a start may take.
    const START_PATIENCE: Duration;

    /// The programs that make up the server, in the order in which they start; the server itself is
    /// the last.
    fn commands(&self, directory: &Path) -> Vec<Command>;

    /// Whether the server that runs as process `number` and has printed `log` since its start
    /// answers a client.
    fn answers(&self, number: u32, log: &str) -> bool;
}

/// A running server, or one that was stopped and can be started again.
pub struct Server<K: Kind> {
    kind: K,
    /// `None` once detached.
    directory: Option<TempDir>,
    /// The children in the order in which they started; the server itself is the last.
    children: Vec<Child>,
}

/// A server that lives on after the program that started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detached {
    /// Its processes, to be stopped in this order.
    pub processes: Vec<ProcessId>,
    /// Its data and its log, to be removed when the processes have ended.
    pub directory: PathBuf,
}

impl<K: Kind> Server<K> {
    pub(crate) fn launch(kind: K, directory: TempDir) -> Result<Self, ServerError> {
        let mut server = Self {
            kind,
            directory: Some(directory),
            children: Vec::new(),
        };
        server.start_again()?;
        Ok(server)
    }

    pub(crate) fn kind(&self) -> &K {
        &self.kind
    }

    pub(crate) fn kind_mut(&mut self) -> &mut K {
        &mut self.kind
    }

    /// Where the server keeps its data and its log.
    pub fn directory(&self) -> &Path {
        self.directory
            .as_ref()
            .expect("taken only by detach, which consumes self")
            .path()
    }

    /// The number of the server's process.
    ///
    /// # Panics
    /// When the server is stopped.
    pub fn pid(&self) -> u32 {
        self.children.last().expect("the server runs").id()
    }

    /// Starts a stopped server again: the same ports, the same data. Returns when it answers. Does
    /// nothing when the server runs.
    ///
    /// # Errors
    /// [`ServerError::DidNotStart`] with the end of the server's log; then nothing is left running.
    pub fn start_again(&mut self) -> Result<(), ServerError> {
        if !self.children.is_empty() {
            return Ok(());
        }
        let outcome = self.spawn().and_then(|()| self.wait_until_it_answers());
        if outcome.is_err() {
            self.kill();
        }
        outcome
    }

    /// Ends the server in good order: SIGTERM, after 15 s SIGKILL. Returns when it is gone. Does
    /// nothing when the server is stopped.
    pub fn stop(&mut self) {
        self.end(|process| process.stop(STOP_PATIENCE));
    }

    /// Ends the server at once, as a crash would: SIGKILL. What it had not written to disk is lost.
    pub fn kill(&mut self) {
        self.end(ProcessId::kill);
    }

    /// Suspends the server: its connections stay open and nobody answers on them.
    pub fn freeze(&mut self) {
        self.signal(Signal::STOP);
    }

    /// Lets a frozen server go on.
    pub fn thaw(&mut self) {
        self.signal(Signal::CONT);
    }

    /// Lets the server live on after this program; who has the answer can stop it.
    pub fn detach(mut self) -> Detached {
        let children = std::mem::take(&mut self.children);
        let processes = children
            .iter()
            .rev()
            .filter_map(|child| ProcessId::running(child.id()))
            .collect();
        let directory = self
            .directory
            .take()
            .expect("taken only here, which consumes self")
            .keep();
        Detached {
            processes,
            directory,
        }
    }

    fn spawn(&mut self) -> Result<(), ServerError> {
        let directory = self.directory().to_path_buf();
        let path = self.log_path();
        // Anew at each start, so that what `answers` reads was printed by this process.
        let log = File::create(&path)
            .map_err(|source| self.io(format!("create {}", path.display()), source))?;
        for command in self.kind.commands(&directory) {
            let mut in_session = in_a_session_of_its_own(&command);
            let shown = format!("run {:?}", command.get_program());
            let output = log
                .try_clone()
                .map_err(|source| self.io("share the log".into(), source))?;
            let errors = log
                .try_clone()
                .map_err(|source| self.io("share the log".into(), source))?;
            in_session
                .current_dir(&directory)
                .stdin(Stdio::null())
                .stdout(output)
                .stderr(errors);
            let child = in_session
                .spawn()
                .map_err(|source| self.io(shown, source))?;
            self.children.push(child);
        }
        Ok(())
    }

    fn wait_until_it_answers(&mut self) -> Result<(), ServerError> {
        let deadline = Instant::now() + K::START_PATIENCE;
        loop {
            let log = self.log();
            let number = self.pid();
            let child = self.children.last_mut().expect("spawned just before");
            let reason = match child.try_wait() {
                Ok(Some(status)) => format!("its process ended ({status})"),
                _ if self.kind.answers(number, &log) => return Ok(()),
                _ if Instant::now() >= deadline => {
                    format!("no answer within {:?}", K::START_PATIENCE)
                }
                _ => {
                    std::thread::sleep(LOOK_EVERY);
                    continue;
                }
            };
            let lines: Vec<&str> = log.lines().collect();
            let log = lines[lines.len().saturating_sub(20)..].join("\n");
            return Err(ServerError::DidNotStart {
                server: K::NAME,
                reason,
                log,
                advice: K::ADVICE,
            });
        }
    }

    fn end(&mut self, end: impl Fn(ProcessId)) {
        while let Some(mut child) = self.children.pop() {
            if let Some(process) = ProcessId::running(child.id()) {
                end(process);
            }
            // Only fails when it was waited for already.
            let _ = child.wait();
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(process) = self
            .children
            .last()
            .and_then(|child| ProcessId::running(child.id()))
        {
            process.signal(signal);
        }
    }

    fn log_path(&self) -> PathBuf {
        self.directory().join("server.log")
    }

    fn log(&self) -> String {
        let bytes = std::fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn io(&self, action: String, source: std::io::Error) -> ServerError {
        ServerError::Io {
            server: K::NAME,
            action,
            source,
        }
    }
}

impl<K: Kind> Drop for Server<K> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// `setsid` becomes the program it is given, under the same process number, as the leader of a new
/// session: signals of the terminal do not reach it, and it may outlive who started it.
fn in_a_session_of_its_own(command: &Command) -> Command {
    let mut in_session = Command::new("setsid");
    in_session
        .arg(command.get_program())
        .args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => in_session.env(name, value),
            None => in_session.env_remove(name),
        };
    }
    in_session
}

pub(crate) fn temporary_directory(server: &'static str) -> Result<TempDir, ServerError> {
    tempfile::Builder::new()
        .prefix("oncegate-")
        .tempdir()
        .map_err(|source| ServerError::Io {
            server,
            action: "create a temporary directory".into(),
            source,
        })
}

/// Writes a file that a server reads.
pub(crate) fn write(server: &'static str, path: &Path, contents: &str) -> Result<(), ServerError> {
    std::fs::write(path, contents).map_err(|source| ServerError::Io {
        server,
        action: format!("write {}", path.display()),
        source,
    })
}
