//! A consumer process.

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How often to look.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A consumer process; killed when it is dropped.
pub(crate) struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    pub(crate) fn start(arguments: &[String], log: PathBuf) -> Self {
        let file = File::create(&log).expect("a log");
        let mut command = Command::new(env!("CARGO_BIN_EXE_consumer"));
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

    /// What it has written into its log.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Stops it where it stands: SIGSTOP. Its connections stay open.
    pub(crate) fn freeze(&self) {
        self.signal(Signal::STOP);
    }

    /// Lets it go on.
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

    /// Ends it as a crash does: SIGKILL.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it was started here");
    }

    /// Tells it to drain: SIGTERM. Returns how it ended, and how long that took.
    pub(crate) async fn terminate(mut self, patience: Duration) -> (ExitStatus, Duration) {
        let since = Instant::now();
        self.signal(Signal::TERM);
        (self.ended(patience).await, since.elapsed())
    }

    /// Drains it and expects that it ends well.
    pub(crate) async fn stop(self) {
        let log = self.log.clone();
        let (status, _) = self.terminate(Duration::from_secs(25)).await;
        assert!(
            status.success(),
            "{status}\n{}",
            std::fs::read_to_string(log).unwrap_or_default()
        );
    }

    /// Waits until it ends by itself.
    pub(crate) async fn ended(&mut self, patience: Duration) -> ExitStatus {
        let until = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().expect("it was started here") {
                return status;
            }
            assert!(
                Instant::now() < until,
                "it still runs after {patience:?}\n{}",
                self.log()
            );
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Mostly it has ended, which is an error here.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
