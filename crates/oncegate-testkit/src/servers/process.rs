//! A process, identified by its id and start time, so that a later process with a reused id is a
//! different one.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// The interval of polling.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A process of this machine. Its text is `number:start`, the start in clock ticks since boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessId {
    number: u32,
    started: u64,
}

#[derive(PartialEq, Eq)]
enum ProcessState {
    Running,
    /// The process has ended, and its parent has not waited for it (a zombie).
    Ended,
}

impl ProcessId {
    /// The process that has this id now, unless it has ended.
    pub fn running(number: u32) -> Option<Self> {
        let (process, state) = Self::with_number(number)?;
        (state == ProcessState::Running).then_some(process)
    }

    /// The process id.
    pub fn number(self) -> u32 {
        self.number
    }

    /// Whether this process still runs.
    pub fn is_running(self) -> bool {
        Self::running(self.number) == Some(self)
    }

    /// Ends the process: SIGTERM, then SIGKILL if it still runs after `timeout`. Returns when the
    /// process and the rest of its process group have ended.
    ///
    /// Does nothing if the process has ended or its id belongs to another process.
    pub fn stop(self, timeout: Duration) {
        self.stop_by(Signal::TERM, timeout);
    }

    /// As [`stop`](Self::stop), with another signal than SIGTERM.
    pub(crate) fn stop_by(self, signal: Signal, timeout: Duration) {
        if !self.is_running() {
            return;
        }
        self.signal(Signal::CONT);
        self.signal(signal);
        if !self.ended_within(timeout) {
            self.kill();
        }
        self.kill_group();
    }

    /// Kills the process and its process group, and waits up to ten seconds until it has ended.
    pub(crate) fn kill(self) {
        if !self.is_running() {
            return;
        }
        self.signal(Signal::KILL);
        self.kill_group();
        self.ended_within(Duration::from_secs(10));
    }

    /// Sends a signal to the children of the process.
    pub(crate) fn signal_children(self, signal: Signal) {
        // Each thread of a process lists the children that it has started.
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.number));
        for thread in threads.into_iter().flatten().flatten() {
            let children = std::fs::read_to_string(thread.path().join("children"));
            for number in children.unwrap_or_default().split_whitespace() {
                let child = number.parse().ok().and_then(Self::running);
                child.into_iter().for_each(|child| child.signal(signal));
            }
        }
    }

    pub(crate) fn signal(self, signal: Signal) {
        if let (true, Some(pid)) = (self.is_running(), self.pid()) {
            // Fails if the process ends after the check; then there is nothing to do.
            let _ = kill_process(pid, signal);
        }
    }

    /// Kills the remaining processes of its group, of which it was the leader.
    ///
    /// The kernel does not reuse an id while a process group with that id exists. So if another
    /// process has the id, this group has ended, and a group with that id is not this one: then
    /// this function kills nothing.
    fn kill_group(self) {
        let is_reused = Self::with_number(self.number).is_some_and(|(process, _)| process != self);
        if let (false, Some(pid)) = (is_reused, self.pid()) {
            // An error is normal: usually no process is left.
            let _ = kill_process_group(pid, Signal::KILL);
        }
    }

    /// The process that has this id now; an ended one keeps it until its parent has waited for it.
    fn with_number(number: u32) -> Option<(Self, ProcessState)> {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // The second field is the program's name in parentheses and may contain anything, also
        // spaces and parentheses.
        let (_, after_name) = stat.rsplit_once(')')?;
        let mut fields = after_name.split_ascii_whitespace();
        let state = if matches!(fields.next()?, "Z" | "X") {
            ProcessState::Ended
        } else {
            ProcessState::Running
        };
        let started = fields.nth(18)?.parse().ok()?;
        Some((Self { number, started }, state))
    }

    fn ended_within(self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        while self.is_running() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
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
#[error("expected a process as `number:start`")]
pub struct NotAProcess;

impl FromStr for ProcessId {
    type Err = NotAProcess;

    fn from_str(text: &str) -> Result<Self, NotAProcess> {
        let (number, started) = text.split_once(':').ok_or(NotAProcess)?;
        Ok(Self {
            number: number.parse().map_err(|_| NotAProcess)?,
            started: started.parse().map_err(|_| NotAProcess)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_reused_process_id_is_not_stopped() {
        let mut child = Command::new("sleep")
            .arg("60")
            .process_group(0)
            .spawn()
            .unwrap();
        let process = ProcessId::running(child.id()).unwrap();
        let earlier = ProcessId {
            number: process.number,
            started: process.started - 1,
        };

        earlier.stop(Duration::ZERO);
        assert!(!earlier.is_running());
        assert!(
            child.try_wait().unwrap().is_none(),
            "the process that reused the id was ended"
        );
        earlier.kill_group();
        assert!(
            !ended_soon(&mut child),
            "the group of the process that reused the id was ended"
        );

        process.stop(Duration::from_secs(5));
        assert!(!process.is_running());
        child.wait().unwrap();
    }

    /// A signal takes effect asynchronously.
    fn ended_soon(child: &mut std::process::Child) -> bool {
        std::thread::sleep(Duration::from_millis(100));
        child.try_wait().unwrap().is_some()
    }

    #[test]
    fn stopping_a_process_ends_its_process_group() {
        let script = "sleep 60 & echo $!; exec sleep 60";
        let mut leader = Command::new("sh")
            .args(["-c", script])
            .process_group(0)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(leader.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let left_behind = ProcessId::running(line.trim().parse().unwrap()).unwrap();
        let process = ProcessId::running(leader.id()).unwrap();

        let reaping = std::thread::spawn(move || leader.wait().unwrap()); // init does this for a detached process
        process.stop(Duration::from_secs(5));
        reaping.join().unwrap();
        assert!(left_behind.ended_within(Duration::from_secs(5)));
    }

    #[test]
    fn a_process_id_is_parsed_from_its_text() {
        let process = ProcessId {
            number: 7,
            started: 11,
        };
        assert_eq!(process.to_string().parse::<ProcessId>().unwrap(), process);
        assert!("7".parse::<ProcessId>().is_err());
    }
}
