//! A process by its number and by when it started, so that a number used again is never taken for the old process.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// How often to look whether something has happened that nobody reports.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(20);

/// One process of this machine. Its text is `number:start`, the start in clock ticks since the machine's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessId {
    number: u32,
    started: u64,
}

impl ProcessId {
    /// The process that has this number now, if one has and it has not ended.
    pub fn running(number: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // The second field is the program's name in brackets and may hold anything, spaces and brackets too.
        let (_, after_name) = stat.rsplit_once(')')?;
        let mut fields = after_name.split_ascii_whitespace();
        let state = fields.next()?;
        let started = fields.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(Self { number, started })
    }

    /// The process number.
    pub fn number(self) -> u32 {
        self.number
    }

    /// Whether this very process still runs.
    pub fn is_running(self) -> bool {
        Self::running(self.number) == Some(self)
    }

    /// Ends the process: SIGTERM, then, when it still runs after `patience`, SIGKILL. Returns when it is gone.
    ///
    /// A process that has ended already, or whose number belongs to another process by now, is left alone.
    pub fn stop(self, patience: Duration) {
        self.signal(Signal::CONT);
        self.signal(Signal::TERM);
        if !self.gone_within(patience) {
            self.signal(Signal::KILL);
            self.gone_within(patience);
        }
        self.kill_group();
    }

    /// Ends the process and its process group at once, and waits until it is gone.
    pub(crate) fn kill(self) {
        self.signal(Signal::KILL);
        self.kill_group();
        self.gone_within(Duration::from_secs(10));
    }

    pub(crate) fn signal(self, signal: Signal) {
        if let (true, Some(pid)) = (self.is_running(), self.pid()) {
            // It may end between the look and the signal: then there is nothing left to do.
            let _ = kill_process(pid, signal);
        }
    }

    /// Ends what the process has left behind in its group. Its number cannot have been given away while the group
    /// has a member.
    fn kill_group(self) {
        let taken_by_another = Self::running(self.number).is_some_and(|now| now != self);
        if let (false, Some(pid)) = (taken_by_another, self.pid()) {
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    fn gone_within(self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.is_running() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        true
    }

    fn pid(self) -> Option<Pid> {
        Pid::from_raw(i32::try_from(self.number).ok()?)
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.number, self.started)
    }
}

/// The text is not `number:start`.
#[derive(Debug, thiserror::Error)]
#[error("not a process as `number:start`")]
pub struct NotAProcess;

impl FromStr for ProcessId {
    type Err = NotAProcess;

    fn from_str(text: &str) -> Result<Self, NotAProcess> {
        let (number, started) = text.split_once(':').ok_or(NotAProcess)?;
        Ok(Self { number: number.parse().map_err(|_| NotAProcess)?, started: started.parse().map_err(|_| NotAProcess)? })
    }
}
