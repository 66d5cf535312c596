//! The processes of a run: the provider and the workers.

use std::collections::HashSet;
use std::fs::File;
use std::future::Future;
use std::pin::pin;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::Error;
use super::rundir::RunDir;

/// How often it is looked whether all run.
const LOOK: Duration = Duration::from_millis(100);
/// How long something may take until the user hears what the workers say, and how long then until
/// the next.
const SILENCE: Duration = Duration::from_secs(5);
/// How long a process may take to drain and end.
const PATIENCE: Duration = Duration::from_secs(60);

/// Processes of this program, each with a log in the run directory. Those that still run when it is
/// dropped are killed.
pub(crate) struct Fleet {
    run_dir: RunDir,
    environment: Vec<(&'static str, String)>,
    arguments: Vec<String>,
    workers: Vec<(String, Child)>,
    started: usize,
    /// Complaints that the user has heard, and when the last of them.
    complaints: HashSet<String>,
    told: Option<Instant>,
}

/// A provider that answers.
pub(crate) struct Provider {
    /// Where it answers.
    pub(crate) url: String,
    process: Child,
}

impl Provider {
    pub(crate) async fn start(run_dir: &RunDir, arguments: &[String]) -> Result<Self, Error> {
        let mut process = command(run_dir, "provider")?
            .args(["provider", "--listen", "127.0.0.1:0"])
            .arg("--run-dir")
            .arg(run_dir.path())
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = process.stdout.take().ok_or("the provider has no stdout")?;
        let url = BufReader::new(stdout).lines().next_line().await?;
        let url = url.ok_or_else(|| {
            format!(
                "the provider did not start{}",
                last_words(run_dir, "provider")
            )
        })?;
        Ok(Self { url, process })
    }

    pub(crate) async fn stop(mut self) -> Result<(), Error> {
        end("provider", &mut self.process).await
    }
}

impl Fleet {
    /// No workers yet; these are the arguments and the environment of each.
    pub(crate) fn new(
        run_dir: &RunDir,
        arguments: Vec<String>,
        environment: Vec<(&'static str, String)>,
    ) -> Self {
        Self {
            run_dir: run_dir.clone(),
            environment,
            arguments,
            workers: Vec::new(),
            started: 0,
            complaints: HashSet::new(),
            told: None,
        }
    }

    /// Starts one more.
    pub(crate) fn hire(&mut self) -> Result<(), Error> {
        self.started += 1;
        let name = format!("worker-{}", self.started);
        let process = command(&self.run_dir, &name)?
            .arg("work")
            .args(&self.arguments)
            .args(["--worker", &name, "--run-dir"])
            .arg(self.run_dir.path())
            .envs(self.environment.iter().cloned())
            .stdout(Stdio::null())
            .spawn()?;
        self.workers.push((name, process));
        Ok(())
    }

    /// SIGKILLs one, and starts another in its place.
    pub(crate) async fn kill(&mut self, victim: usize) -> Result<(), Error> {
        self.workers.swap_remove(victim).1.kill().await?;
        self.hire()
    }

    /// Which worker did the most since these counts; none if none did anything.
    pub(crate) fn busiest_since(&self, before: &[u64]) -> Option<usize> {
        let done = self
            .settled()
            .into_iter()
            .zip(before)
            .map(|(now, before)| now.saturating_sub(*before));
        done.enumerate()
            .filter(|(_, done)| *done > 0)
            .max_by_key(|(_, done)| *done)
            .map(|(worker, _)| worker)
    }

    /// How many deliveries each worker has settled, as far as they have written it down.
    pub(crate) fn settled(&self) -> Vec<u64> {
        self.workers
            .iter()
            .map(|(name, _)| self.run_dir.counts_of(name).settled())
            .collect()
    }

    /// A worker ends by itself only for a reason.
    pub(crate) fn all_run(&mut self) -> Result<(), Error> {
        for (name, process) in &mut self.workers {
            if let Some(status) = process.try_wait()? {
                return Err(format!(
                    "{name} ended with {status}{}",
                    last_words(&self.run_dir, name)
                )
                .into());
            }
        }
        Ok(())
    }

    /// Waits for this as long as all workers run, and passes on what they complain of.
    pub(crate) async fn meanwhile<T>(
        &mut self,
        awaited: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let mut awaited = pin!(awaited);
        let begun = Instant::now();
        loop {
            match tokio::time::timeout(LOOK, &mut awaited).await {
                Ok(done) => return done,
                Err(_) => self.all_run()?,
            }
            if begun.elapsed() > SILENCE {
                self.pass_on_complaints();
            }
        }
    }

    /// Tells the user what a worker complained of last, unless one was told a moment ago: they
    /// share their servers, and one speaks for all.
    pub(crate) fn pass_on_complaints(&mut self) {
        if self.told.is_some_and(|at| at.elapsed() < SILENCE) {
            return;
        }
        let mut complaints = self
            .workers
            .iter()
            .filter_map(|(name, _)| Some((name, complaint(&self.run_dir, name)?)));
        let new = complaints.find(|(_, complaint)| !self.complaints.contains(complaint));
        if let Some((name, complaint)) = new {
            eprintln!("payments: {name}: {complaint}");
            self.complaints.insert(complaint);
            self.told = Some(Instant::now());
        }
    }

    /// SIGTERMs all, and waits until they have drained.
    pub(crate) async fn stop(&mut self) -> Result<(), Error> {
        for (_, process) in &self.workers {
            terminate(process)?;
        }
        for (name, mut process) in self.workers.drain(..) {
            end(&name, &mut process).await?;
        }
        Ok(())
    }
}

/// What a process said last of why it ended, and where the rest is.
fn last_words(run_dir: &RunDir, name: &str) -> String {
    let log = run_dir.log(name);
    let text = std::fs::read_to_string(&log).unwrap_or_default();
    let said = text
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix("payments: "))
        .map(|said| format!(": {said}"));
    format!("{}; see {}", said.unwrap_or_default(), log.display())
}

/// The last warning or error in a worker's log, without its time.
fn complaint(run_dir: &RunDir, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(run_dir.log(name)).ok()?;
    let complaints = text
        .lines()
        .rev()
        .filter_map(|line| line.split_once(' ').map(|(_, said)| said.trim_start()));
    complaints
        .filter(|said| said.starts_with("WARN ") || said.starts_with("ERROR "))
        .map(str::to_owned)
        .next()
}

fn command(run_dir: &RunDir, name: &str) -> Result<Command, Error> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .stdin(Stdio::null())
        .stderr(File::create(run_dir.log(name))?)
        .kill_on_drop(true);
    Ok(command)
}

fn terminate(process: &Child) -> Result<(), Error> {
    if let Some(id) = process.id().and_then(|id| Pid::from_raw(id as i32)) {
        kill_process(id, Signal::TERM)?;
    }
    Ok(())
}

async fn end(name: &str, process: &mut Child) -> Result<(), Error> {
    terminate(process)?;
    match tokio::time::timeout(PATIENCE, process.wait()).await {
        Ok(status) if status.as_ref().is_ok_and(|status| status.success()) => Ok(()),
        Ok(status) => Err(format!("{name} ended with {}", status?).into()),
        Err(_) => Err(format!("{name} did not end within {PATIENCE:?} of SIGTERM").into()),
    }
}
