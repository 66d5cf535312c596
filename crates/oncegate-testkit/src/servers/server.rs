//! The operations that all kinds of servers share: start, stop, kill, freeze, start again, detach.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use super::process::{POLL_INTERVAL, ProcessId};
use super::server_set::{ServerSet, prefixed};
use super::{ServerError, certificates, io_error};

/// How long a server may take to end after its stop signal; then it gets SIGKILL.
const STOP_TIMEOUT: Duration = Duration::from_secs(15);

/// The parts of a server that depend on its kind.
pub trait ServerKind {
    /// The server's name.
    const NAME: &'static str;
    /// The advice in the error if the server does not start.
    const ADVICE: &'static str;
    /// The time limit of a start.
    const START_TIMEOUT: Duration;

    /// Whether the programs come from the current [`ServerSet`]; otherwise they are the host's.
    const IN_SERVER_SET: bool;

    /// Whether the server serves its clients in child processes, which are frozen with it.
    const SERVES_IN_CHILDREN: bool = false;

    /// The signal that stops the server.
    const STOP_SIGNAL: Signal = Signal::TERM;

    /// The programs of the server in the order of their start; the server itself is the last.
    fn commands(&self, directory: &Path) -> Vec<Command>;

    /// Whether the server with this process id, which has printed `log` since its start, answers a
    /// client.
    fn answers(&self, process_id: u32, log: &str) -> bool;
}

/// A running or stopped server.
pub struct Server<K: ServerKind> {
    kind: K,
    /// `None` after [`detach`](Self::detach).
    directory: Option<TempDir>,
    /// The children in the order in which they started; the server itself is the last.
    children: Vec<Child>,
}

/// A server that outlives the program that started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detached {
    /// Its processes, in the order in which to stop them.
    pub processes: Vec<ProcessId>,
    /// Its data and its log, to be removed when the processes have ended.
    pub directory: PathBuf,
}

impl<K: ServerKind> Server<K> {
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

    /// The directory with the server's data and log.
    pub fn directory(&self) -> &Path {
        self.directory
            .as_ref()
            .expect("taken only by detach, which consumes self")
            .path()
    }

    /// The file (PEM) of the authority that signed the certificate of a server started with TLS.
    pub fn certificate_authority(&self) -> PathBuf {
        self.directory().join(certificates::AUTHORITY)
    }

    /// The files (PEM) of a client certificate of the same authority, and of its key.
    pub fn client_certificate(&self) -> (PathBuf, PathBuf) {
        (
            self.directory().join(certificates::CLIENT_CERTIFICATE),
            self.directory().join(certificates::CLIENT_KEY),
        )
    }

    /// The process id of the server.
    ///
    /// # Panics
    /// If the server is stopped.
    pub fn pid(&self) -> u32 {
        self.children.last().expect("the server runs").id()
    }

    /// Starts a stopped server again with the same ports and data, and returns when it answers.
    /// Does nothing if the server runs.
    ///
    /// # Errors
    /// [`ServerError::DidNotStart`] with the end of the server's log, or [`ServerError::Io`] if a
    /// program cannot be run. No process of the server is left.
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

    /// Stops the server with the stop signal of its kind (SIGTERM by default), and after 15 s with
    /// SIGKILL. Returns when the server has ended. Does nothing if it is stopped.
    pub fn stop(&mut self) {
        self.end(|process| process.stop_by(K::STOP_SIGNAL, STOP_TIMEOUT));
    }

    /// Kills the server with SIGKILL, as in a crash of the process. Data that it has not yet
    /// written is lost.
    pub fn kill(&mut self) {
        self.end(ProcessId::kill);
    }

    /// Suspends the server (SIGSTOP): its connections stay open, without replies.
    pub fn freeze(&mut self) {
        self.signal(Signal::STOP);
    }

    /// Resumes a frozen server (SIGCONT).
    pub fn thaw(&mut self) {
        self.signal(Signal::CONT);
    }

    /// Lets the server outlive this program. Returns its processes and directory, with which
    /// another program can stop it and remove its data.
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
        // A new file at each start, so that `answers` reads only lines of this process.
        let log = File::create(&path)
            .map_err(|source| io_error(K::NAME, format!("create {}", path.display()), source))?;
        let set = ServerSet::current()?;
        for command in self.kind.commands(&directory) {
            let shown = format!("run {:?}", command.get_program());
            let mut in_session = in_new_session(&if K::IN_SERVER_SET {
                set.command(&command)
            } else {
                command
            });
            let output = log
                .try_clone()
                .map_err(|source| io_error(K::NAME, "share the log", source))?;
            let errors = log
                .try_clone()
                .map_err(|source| io_error(K::NAME, "share the log", source))?;
            in_session
                .current_dir(&directory)
                .stdin(Stdio::null())
                .stdout(output)
                .stderr(errors);
            let child = in_session
                .spawn()
                .map_err(|source| io_error(K::NAME, shown, source))?;
            self.children.push(child);
        }
        Ok(())
    }

    fn wait_until_it_answers(&mut self) -> Result<(), ServerError> {
        let deadline = Instant::now() + K::START_TIMEOUT;
        loop {
            let log = self.log();
            let number = self.pid();
            let child = self.children.last_mut().expect("spawned just before");
            let reason = match child.try_wait() {
                Ok(Some(status)) => format!("its process ended ({status})"),
                _ if self.kind.answers(number, &log) => return Ok(()),
                _ if Instant::now() >= deadline => {
                    format!("no answer within {:?}", K::START_TIMEOUT)
                }
                _ => {
                    std::thread::sleep(POLL_INTERVAL);
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
            // Fails only if the child was waited for already.
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
            if K::SERVES_IN_CHILDREN {
                process.signal_children(signal);
            }
        }
    }

    fn log_path(&self) -> PathBuf {
        self.directory().join("server.log")
    }

    fn log(&self) -> String {
        let bytes = std::fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

impl<K: ServerKind> Drop for Server<K> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The command run by `setsid`, which replaces itself by the program with the same process id, as
/// the leader of a new session: signals of the terminal do not reach it, and it may outlive its
/// parent.
fn in_new_session(command: &Command) -> Command {
    prefixed(&["setsid".into()], command)
}

pub(crate) fn temporary_directory(server: &'static str) -> Result<TempDir, ServerError> {
    tempfile::Builder::new()
        .prefix("oncegate-")
        .tempdir()
        .map_err(|source| io_error(server, "create a temporary directory", source))
}

/// Writes a file that a server reads.
pub(crate) fn write(server: &'static str, path: &Path, contents: &str) -> Result<(), ServerError> {
    std::fs::write(path, contents)
        .map_err(|source| io_error(server, format!("write {}", path.display()), source))
}

/// Runs a program to its end and returns its standard output. Errors name the program as `shown`.
///
/// # Errors
/// [`ServerError::Io`] if the program cannot be run, [`ServerError::ProgramFailed`] with its output
/// if it fails.
pub(crate) fn run_program(
    server: &'static str,
    command: &mut Command,
    shown: &str,
    advice: &'static str,
) -> Result<String, ServerError> {
    let output = command
        .output()
        .map_err(|source| io_error(server, format!("run {shown}"), source))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    Err(ServerError::ProgramFailed {
        server,
        program: shown.to_owned(),
        output: printed + &String::from_utf8_lossy(&output.stderr),
        advice,
    })
}

/// Polls until `done` returns true.
///
/// # Errors
/// [`ServerError::DidNotStart`] with `what` after the timeout.
pub(crate) fn wait_until(
    server: &'static str,
    what: &str,
    timeout: Duration,
    advice: &'static str,
    done: impl Fn() -> bool,
) -> Result<(), ServerError> {
    let deadline = Instant::now() + timeout;
    while !done() {
        if Instant::now() >= deadline {
            return Err(ServerError::DidNotStart {
                server,
                reason: format!("waited for {what} for {timeout:?}"),
                log: String::new(),
                advice,
            });
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}
