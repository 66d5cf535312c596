//! The demo on real servers: starts the processes, kills some of them, waits until nothing moves, and counts.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use tokio::time::Instant;

use super::fleet::{Fleet, Killed, Provider};
use super::rundir::{RunDir, Sent};
use super::wire::{Queue, Wire};
use super::{Error, Servers};
use crate::cli::{Broker, Cli, Promise};
use crate::ledger::LedgerFile;
use crate::progress::Progress;
use crate::report::{Report, SetAside};
use crate::traffic;

/// How long nothing may move, when everything is accounted for: longer than a late charge takes.
const QUIET: Duration = Duration::from_secs(3);
/// How long nothing may move, when something is missing: longer than a lease and Kafka's session together.
const STUCK: Duration = Duration::from_secs(20);
/// How many messages are sent before their confirmations are waited for.
const BATCH: usize = 250;

/// Whose payments to count.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Where dead letters are looked for; may be given twice.
    #[arg(long, value_enum, required = true)]
    broker: Vec<Broker>,
    #[command(flatten)]
    servers: Servers,
    #[command(flatten)]
    queue: Queue,
    /// What the other processes have written.
    #[arg(long, default_value = "payments-run")]
    run_dir: PathBuf,
    /// Prints the counts as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Counts what became of the payments so far.
///
/// # Errors
/// If the run directory or a broker cannot be read.
pub(crate) async fn report(arguments: &Arguments) -> Result<Report, Error> {
    let run_dir = RunDir::at(&arguments.run_dir)?;
    let mut all = SetAside::default();
    for broker in &arguments.broker {
        let aside = Wire::open(*broker, &arguments.servers, &arguments.queue).await?.set_aside().await?;
        all.in_doubt += aside.in_doubt;
        all.dead_letters += aside.dead_letters;
        all.ids.extend(aside.ids);
    }
    count(&run_dir, &run_dir.sent()?, &all)
}

fn count(run_dir: &RunDir, sent: &Sent, set_aside: &SetAside) -> Result<Report, Error> {
    let mut ledger = LedgerFile::at(run_dir.ledger());
    let counts = run_dir.counts()?;
    let ids = sent.payments.iter().map(String::as_str);
    Ok(Report::count((sent.messages, counts.settled()), ids, ledger.refresh()?, set_aside, &counts))
}

/// Runs the demo and counts.
///
/// # Errors
/// If a server is not there, or a process does not do its part. The run directory is kept then.
pub(crate) async fn run(cli: &Cli) -> Result<Report, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let name = format!("payments-{now}-{}", std::process::id());
    let directory = std::env::temp_dir().join(&name);
    let run_dir = RunDir::at(&directory)?;
    let mut run = Run::start(cli, Queue { name, group: "ledger".to_owned() }, run_dir).await?;
    let report = run.see_through(cli).await.map_err(|error| format!("{error}; what was written lies in {}", directory.display()))?;
    run.finish(cli.keep || !report.is_right(), &directory).await?;
    Ok(report)
}

struct Run {
    run_dir: RunDir,
    provider: Provider,
    fleet: Fleet,
    wire: Wire,
    workers: usize,
}

impl Run {
    async fn start(cli: &Cli, queue: Queue, run_dir: RunDir) -> Result<Self, Error> {
        let mut arguments = promise(cli.promise);
        arguments.extend(["--seed".to_owned(), cli.traffic.seed.to_string()]);
        let provider = Provider::start(&run_dir, &arguments).await?;
        let broker = cli.broker.to_possible_value().ok_or("a broker without a name")?.get_name().to_owned();
        let mut arguments = promise(cli.promise);
        for (flag, value) in [("--broker", &broker), ("--name", &queue.name), ("--group", &queue.group), ("--provider", &provider.url)] {
            arguments.extend([flag.to_owned(), value.clone()]);
        }
        cli.servers.redis()?; // better said here than in a worker's log
        let mut fleet = Fleet::new(&run_dir, arguments, cli.servers.environment().collect());
        let workers = cli.workers.max(1);
        for _ in 0..workers {
            fleet.hire()?;
        }
        let wire = Wire::open(cli.broker, &cli.servers, &queue).await?;
        Ok(Self { run_dir, provider, fleet, wire, workers })
    }

    async fn see_through(&mut self, cli: &Cli) -> Result<Report, Error> {
        let payments = cli.traffic.payments("pay")?;
        let messages = traffic::of(&payments, cli.traffic.seed);
        let progress = Progress::new(payments.len() as u64);
        let mut ledger = LedgerFile::at(self.run_dir.ledger());
        let (mut batches, mut killed) = (messages.chunks(BATCH), 0);
        let mut quiet = Quiet::begin();
        loop {
            let batch = batches.next();
            if let Some(batch) = batch {
                self.wire.send(batch).await?;
                self.run_dir.note_sent(batch)?;
            } else {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            self.fleet.all_run()?;
            let charged = ledger.refresh()?.charged();
            progress.at(charged as u64);
            progress.says(format!("charged, {killed} workers killed"));
            if killed < cli.kills && charged > payments.len() * (killed + 1) / (cli.kills + 2) {
                killed += usize::from(self.fleet.kill_busiest().await? == Killed::One);
            }
            quiet.look(ledger.lines(), &self.run_dir)?;
            let long_enough = if charged >= payments.len() { QUIET } else { STUCK };
            if batch.is_some() || quiet.lasts() < long_enough || (quiet.lasts() < STUCK && self.wire.backlog().await? > 0) {
                continue;
            }
            // What a worker holds is seen only when it is gone.
            self.fleet.stop().await?;
            if self.wire.backlog().await? == 0 || quiet.rounds > 0 {
                break;
            }
            quiet = Quiet { rounds: quiet.rounds + 1, ..Quiet::begin() };
            for _ in 0..self.workers {
                self.fleet.hire()?;
            }
        }
        progress.done();
        count(&self.run_dir, &self.run_dir.sent()?, &self.wire.set_aside().await?)
    }

    async fn finish(self, keep: bool, directory: &Path) -> Result<(), Error> {
        self.provider.stop().await?;
        if keep {
            eprintln!("payments: ledger, counts and logs lie in {}", directory.display());
        } else {
            self.wire.remove().await?;
            std::fs::remove_dir_all(directory)?;
        }
        Ok(())
    }
}

fn promise(promise: Promise) -> Vec<String> {
    let guarantee = promise.guarantee.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    let mut arguments = vec!["--guarantee".to_owned(), guarantee];
    if promise.provider_deduplicates {
        arguments.push("--provider-deduplicates".to_owned());
    }
    arguments
}

/// For how long nothing has moved: neither the ledger nor what the workers count.
struct Quiet {
    since: Instant,
    seen: (usize, u64),
    rounds: usize,
}

impl Quiet {
    fn begin() -> Self {
        Self { since: Instant::now(), seen: (0, 0), rounds: 0 }
    }

    fn look(&mut self, lines: usize, run_dir: &RunDir) -> Result<(), Error> {
        let now = (lines, run_dir.counts()?.settled());
        if now != self.seen {
            (self.seen, self.since) = (now, Instant::now());
        }
        Ok(())
    }

    fn lasts(&self) -> Duration {
        self.since.elapsed()
    }
}
