//! A consumer process.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The polling interval.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A consumer process. Dropping it kills the process.
pub(crate) struct ConsumerProcess {
    child: Child,
    log: PathBuf,
}

impl ConsumerProcess {
    pub(crate) fn start(program: &str, arguments: &[String], log: PathBuf) -> Self {
        let file = File::create(&log).expect("a log");
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(file);
        Self {
            child: command.spawn().expect("the consumer's program"),
            log,
        }
    }

    /// The contents of its log.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Suspends it (SIGSTOP). Its connections stay open.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Resumes it (SIGCONT).
    pub(crate) fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .expect("a process number");
        kill_process(pid, signal).expect("it is not waited for yet");
    }

    /// Kills it (SIGKILL), like a crash.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started here");
    }

    /// Sends SIGTERM. Returns the exit status and the time until it ended.
    pub(crate) async fn terminate(mut self, timeout: Duration) -> (ExitStatus, Duration) {
        let since = Instant::now();
        self.signal(Signal::TERM);
        (self.ended(timeout).await, since.elapsed())
    }

    /// Sends SIGTERM and expects success.
    pub(crate) async fn stop(self) {
        let log = self.log.clone();
        let (status, _) = self.terminate(Duration::from_secs(25)).await;
        assert!(
            status.success(),
            "{status}\n{}",
            std::fs::read_to_string(log).unwrap_or_default()
        );
    }

    /// Waits until it ends.
    pub(crate) async fn ended(&mut self, timeout: Duration) -> ExitStatus {
        let until = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait().expect("it was started here") {
                return status;
            }
            assert!(
                Instant::now() < until,
                "it still runs after {timeout:?}\n{}",
                self.log()
            );
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

impl Drop for ConsumerProcess {
    fn drop(&mut self) {
        // Fails if it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
