//! The demo on real servers: starts the processes, kills some of them, waits until nothing moves,
//! and counts.

use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use oncegate::shutdown_signal;

use super::check::check;
use super::fleet::{Fleet, Provider};
use super::rundir::RunDir;
use super::watch::Watch;
use super::wire::{Queue, Wire};
use super::{Error, Servers};
use crate::cli::{Broker, Cli, Promise, StoreKind};
use crate::ledger::LedgerFile;
use crate::operate;
use crate::report::{Report, SetAside};
use crate::sent::Sending;
use crate::traffic::{self, Outgoing};

/// How long nothing may move, when everything is accounted for: longer than a late charge takes.
const QUIET: Duration = Duration::from_secs(3);
/// How long nothing may move, when something is missing: longer than a lease and Kafka's session
/// together.
const STUCK: Duration = Duration::from_secs(20);
/// How many messages are sent before their confirmations are waited for.
const BATCH: usize = 250;
/// How often it is looked how far it is.
const LOOK: Duration = Duration::from_millis(100);
/// How long nothing may move until the user hears what the workers say.
const SILENCE: Duration = Duration::from_secs(5);
/// How long the workers may take to settle the first of what they got: longer than it takes Kafka
/// to give it to them.
const BEGINNING: Duration = Duration::from_secs(60);
/// From sending to a kill: less than a charge takes, so that it hits some in the middle.
const MIDST: Duration = Duration::from_millis(10);

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
    /// What the provider was started with.
    #[command(flatten)]
    promise: Promise,
    /// Prints the counts as one JSON object. `charged`, `charged_twice` and `lost` come from the
    /// provider's ledger, `in_doubt` and `dead_letters` from the broker. The rest but `sent` is
    /// what the workers counted: those in processes of their own write it down five times a second,
    /// so a killed one takes its last counts along, and `delivered`, `duplicates_stopped`,
    /// `retried` and `reconciled_…` may be too low.
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
        let aside = Wire::open(*broker, &arguments.servers, &arguments.queue)
            .await?
            .set_aside()
            .await?;
        all.in_doubt.extend(aside.in_doubt);
        all.dead_letters.extend(aside.dead_letters);
    }
    count(&run_dir, arguments.promise, &all)
}

fn count(run_dir: &RunDir, promise: Promise, set_aside: &SetAside) -> Result<Report, Error> {
    let mut ledger = LedgerFile::at(run_dir.ledger());
    let counts = run_dir.counts()?;
    let report = Report::count(
        &run_dir.sent()?,
        counts.settled(),
        (ledger.refresh()?, promise.repeats()),
        set_aside,
        &counts,
    );
    Ok(report.with_counts_as_written_down())
}

/// Runs the demo and counts.
///
/// # Errors
/// If a server is not there, a process does not do its part, or SIGTERM or Ctrl-C comes. No process
/// is left then; the run directory is kept.
pub(crate) async fn run(cli: &Cli) -> Result<Report, Error> {
    let payments = cli.traffic.payments("pay")?;
    let unsure_of = cli.unsure_of(&payments)?;
    let messages = traffic::of(&payments, cli.traffic.seed);
    if messages.len() < 2 * (cli.kills + 1) && cli.kills > 0 {
        return Err(format!(
            "--kills: {} are too many for {} messages; send more, or kill fewer",
            cli.kills,
            messages.len()
        )
        .into());
    }
    let store = cli.store.unwrap_or(StoreKind::Redis);
    // From before the first process starts: who ends here must take them along.
    let mut terminated = pin!(shutdown_signal());
    tokio::select! {
        checked = check(&cli.servers, cli.broker, store, cli.promise.guarantee) => checked?,
        () = &mut terminated => return Err("stopped by a signal".into()),
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis();
    let name = format!("payments-{now}-{}", std::process::id());
    // A directory for temporary files may lie in memory, where at most once has no file.
    let above = if store == StoreKind::Sqlite {
        cli.run_dir.clone()
    } else {
        std::env::temp_dir()
    };
    let directory = above.join(&name);
    let ran = tokio::select! {
        ran = run_in(cli, (payments.len(), &messages, &unsure_of), name, &directory) => ran,
        () = terminated => Err("stopped by a signal".into()),
    };
    ran.map_err(|error| format!("{error}; what was written lies in {}", directory.display()).into())
}

/// The number of payments, the messages made of them, and the ids that the provider is unsure of.
type Input<'a> = (usize, &'a [Outgoing], &'a [String]);

async fn run_in(
    cli: &Cli,
    (payments, messages, unsure_of): Input<'_>,
    name: String,
    directory: &Path,
) -> Result<Report, Error> {
    let queue = Queue {
        name,
        group: "ledger".to_owned(),
    };
    let mut run = Run::start(cli, queue, RunDir::at(directory)?, (payments, unsure_of)).await?;
    run.send(messages, cli.kills).await?;
    run.settle().await?;
    let aside = run.wire.set_aside().await?;
    let report = count(&run.run_dir, cli.promise, &aside)?
        .with_kills(run.watch.killed(), cli.kills)
        .with_unsure(unsure_of, &aside);
    let keep = cli.keep || !report.is_right();
    let name = run.name.clone();
    run.finish(keep, directory).await?;
    if keep {
        operate::leave(
            directory,
            cli.promise.guarantee,
            "24h",
            (&store(cli, &name, directory)?, &broker(cli, &name)?),
        )?;
    }
    Ok(report)
}

/// The store, as the operator's tool is told of it.
fn store(cli: &Cli, name: &str, directory: &Path) -> Result<String, Error> {
    let url = match cli.store.unwrap_or(StoreKind::Redis) {
        StoreKind::Sqlite => operate::sqlite(&RunDir::at(directory)?.store())?,
        StoreKind::Redis | StoreKind::Memory => operate::line("url", cli.servers.redis()?),
    };
    Ok(url + &operate::line("scope", name))
}

/// The broker. Nobody has set a policy on the demo's, so that looking into its queues harms
/// nothing.
fn broker(cli: &Cli, name: &str) -> Result<String, Error> {
    use operate::line;
    match cli.broker {
        #[cfg(feature = "kafka")]
        Broker::Kafka => Ok(format!(
            "[kafka]\n{}{}",
            line("brokers", cli.servers.kafka()?),
            line("topic", name)
        )),
        #[cfg(feature = "rabbitmq")]
        Broker::Rabbitmq => {
            let accepts = line("delivery-counts", "accepted");
            Ok(format!(
                "[rabbitmq]\n{}{}{accepts}",
                line("url", cli.servers.rabbitmq()?),
                line("queue", name)
            ))
        }
        #[allow(unreachable_patterns)]
        broker => Err(super::wire::not_in_this_build(broker)),
    }
}

struct Run {
    /// Of its topic or queue.
    name: String,
    run_dir: RunDir,
    provider: Provider,
    fleet: Fleet,
    wire: Wire,
    watch: Watch,
    payments: usize,
    /// How many of them have to come to stand in doubt.
    unsure: usize,
    workers: usize,
}

impl Run {
    async fn start(
        cli: &Cli,
        queue: Queue,
        run_dir: RunDir,
        (payments, unsure_of): (usize, &[String]),
    ) -> Result<Self, Error> {
        let mut arguments = promise(cli.promise);
        arguments.extend(["--seed".to_owned(), cli.traffic.seed.to_string()]);
        arguments.extend(
            unsure_of
                .iter()
                .flat_map(|id| ["--unsure-of".to_owned(), id.clone()]),
        );
        let provider = Provider::start(&run_dir, &arguments).await?;
        let attempts = cli.attempts().to_string();
        let store = cli.store.unwrap_or(StoreKind::Redis);
        let store_name = store
            .to_possible_value()
            .ok_or("a store without a name")?
            .get_name()
            .to_owned();
        let broker = cli
            .broker
            .to_possible_value()
            .ok_or("a broker without a name")?
            .get_name()
            .to_owned();
        let mut arguments = promise(cli.promise);
        for (flag, value) in [
            ("--broker", &broker),
            ("--store", &store_name),
            ("--name", &queue.name),
            ("--group", &queue.group),
            ("--provider", &provider.url),
            ("--attempts", &attempts),
        ] {
            arguments.extend([flag.to_owned(), value.clone()]);
        }
        let mut fleet = Fleet::new(&run_dir, arguments, cli.servers.environment().collect());
        let workers = cli.workers.max(1);
        for _ in 0..workers {
            fleet.hire()?;
        }
        let wire = fleet
            .meanwhile(Wire::open(cli.broker, &cli.servers, &queue))
            .await?;
        let watch = Watch::over(&run_dir, payments);
        Ok(Self {
            name: queue.name,
            run_dir,
            provider,
            fleet,
            wire,
            watch,
            payments,
            unsure: unsure_of.len(),
            workers,
        })
    }

    /// Sends all, in one portion more than workers are to be killed: one is killed in the middle of
    /// each but the last, and the rest waits for it. So no kill comes too late, however fast the
    /// machine is.
    async fn send(&mut self, messages: &[Outgoing], kills: usize) -> Result<(), Error> {
        let bound = |portion: usize| messages.len() * portion / (kills + 1);
        for portion in 0..kills {
            let (begin, end) = (bound(portion), bound(portion + 1));
            let middle = begin.midpoint(end);
            let midst = end.min(middle + BATCH);
            let before = self.fleet.settled();
            self.send_batches(&messages[begin..middle]).await?;
            let Some(victim) = self.busiest_since(&before).await? else {
                return self.send_batches(&messages[middle..]).await; // the report says that kills are missing
            };
            self.send_batches(&messages[middle..midst]).await?;
            tokio::time::sleep(MIDST).await;
            self.fleet.kill(victim).await?;
            self.watch.note_kill();
            self.send_batches(&messages[midst..end]).await?;
        }
        self.send_batches(&messages[bound(kills)..]).await
    }

    /// Looks how far it is. When nothing moves, what the workers say of it is for the user too.
    fn look(&mut self) -> Result<(), Error> {
        self.fleet.all_run()?;
        self.watch.look()?;
        if self.watch.quiet() > SILENCE {
            self.fleet.pass_on_complaints();
        }
        Ok(())
    }

    async fn send_batches(&mut self, messages: &[Outgoing]) -> Result<(), Error> {
        for batch in messages.chunks(BATCH) {
            self.run_dir.note_sent(Sending::Attempted, batch)?;
            self.wire.send(batch).await?;
            self.run_dir.note_sent(Sending::Confirmed, batch)?;
            self.look()?;
        }
        Ok(())
    }

    /// Waits until a worker has done something since, as none does in the middle of a rebalance:
    /// which did the most. None if none does anything at all.
    async fn busiest_since(&mut self, before: &[u64]) -> Result<Option<usize>, Error> {
        self.watch.begin_again();
        while self.watch.quiet() < BEGINNING {
            tokio::time::sleep(LOOK).await;
            self.look()?;
            if let Some(busiest) = self.fleet.busiest_since(before) {
                return Ok(Some(busiest));
            }
        }
        Ok(None)
    }

    /// Waits until nothing moves, and stops the workers.
    async fn settle(&mut self) -> Result<(), Error> {
        let mut rounds = 0;
        loop {
            tokio::time::sleep(LOOK).await;
            self.look()?;
            let accounted = self.watch.charged() >= self.payments
                && self.watch.in_doubt() >= self.unsure as u64;
            let long_enough = if accounted { QUIET } else { STUCK };
            if self.watch.quiet() < long_enough
                || (self.watch.quiet() < STUCK && self.wire.backlog().await? > 0)
            {
                continue;
            }
            // What a worker holds is seen only when it is gone.
            self.fleet.stop().await?;
            if self.wire.backlog().await? == 0 || rounds > 0 {
                return Ok(());
            }
            rounds += 1;
            self.watch.begin_again();
            for _ in 0..self.workers {
                self.fleet.hire()?;
            }
        }
    }

    async fn finish(self, keep: bool, directory: &Path) -> Result<(), Error> {
        drop(self.watch); // the bar goes first
        self.provider.stop().await?;
        if keep {
            eprintln!(
                "payments: ledger, counts and logs lie in {}",
                directory.display()
            );
        } else {
            self.wire.remove().await?;
            std::fs::remove_dir_all(directory)?;
        }
        Ok(())
    }
}

fn promise(promise: Promise) -> Vec<String> {
    let guarantee = promise
        .guarantee
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default();
    let mut arguments = vec!["--guarantee".to_owned(), guarantee];
    if promise.provider_deduplicates {
        arguments.push("--provider-deduplicates".to_owned());
    }
    arguments
}
