//! The demo in one process: the broker in memory, store and ledger in files, workers as tasks that
//! are aborted mid-charge. Killed and started again, it sends the same again, and goes on with the
//! files.

use std::sync::Arc;
use std::time::Duration;

use oncegate::{Consumer, DeadLetter, IdSource, MemoryBroker, MemoryStore, Message, Sqlite, Store};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::bank::{Bank, Pace};
use crate::charge::Charge;
use crate::cli::{Cli, Guaranteed, StoreKind};
use crate::counters::Outcomes;
use crate::faults::Faults;
use crate::folder::{Folder, STORE};
use crate::ledger::Ledger;
use crate::operate;
use crate::payment::ID_HEADER;
use crate::progress::Progress;
use crate::provider::Provider;
use crate::report::{Report, SetAside};
use crate::sent::Sent;
use crate::traffic::{self, Outgoing};

/// How long sending takes; what is sent is spread over it, so that workers can be killed meanwhile.
const SENDING: Duration = Duration::from_secs(5);
/// In how many steps it is sent at the most.
const STEPS: usize = 500;
/// So short that what a killed worker held is taken up within the demo.
const LEASE: Duration = Duration::from_secs(1);
/// So long that a run that was killed may be gone on with a year later.
const WINDOW: Duration = Duration::from_secs(DAYS * 24 * 3600);
const DAYS: u64 = 366;

/// Runs the demo and counts.
///
/// # Errors
/// If the input cannot be read, the files cannot be used, or a worker did not run.
pub(crate) async fn run(cli: &Cli, outcomes: &Outcomes) -> Result<Report, crate::Error> {
    let payments = cli.traffic.payments("pay")?;
    let unsure_of = cli.unsure_of(&payments)?;
    let sent = traffic::of(&payments, cli.traffic.seed);
    if cli.store == Some(StoreKind::Memory) {
        return run_on(
            cli,
            outcomes,
            (&sent, &unsure_of),
            Ledger::in_memory(),
            Remembers::Memory(MemoryStore::new()),
        )
        .await;
    }
    let folder = Folder::of_run(&cli.run_dir, cli.promise.guarantee, cli.traffic.seed, &sent)?;
    let ledger = Ledger::in_file(&folder.ledger())?;
    if ledger.charged() > 0 {
        let (charged, all, folder) = (ledger.charged(), payments.len(), folder.path().display());
        eprintln!(
            "payments: going on with a run that was cut off: {charged} of {all} payments are charged already; see {folder}"
        );
    }
    let store = Remembers::Sqlite(Sqlite::file(folder.store()));
    let report = run_on(cli, outcomes, (&sent, &unsure_of), ledger, store)
        .await
        .map_err(|error| {
            format!(
                "{error}; ledger and store lie in {}",
                folder.path().display()
            )
        })?;
    if cli.keep || !report.is_right() && cli.promise.guarantee != Guaranteed::Bare {
        let kept = folder.keep()?;
        eprintln!("payments: ledger and store are kept in {}", kept.display());
        operate::leave(
            &kept,
            cli.promise.guarantee,
            &format!("{DAYS}d"),
            (&operate::sqlite(&kept.join(STORE))?, ""),
        )?;
    } else {
        folder.remove()?;
    }
    Ok(report)
}

async fn run_on(
    cli: &Cli,
    outcomes: &Outcomes,
    (sent, unsure_of): (&[Outgoing], &[String]),
    ledger: Ledger,
    store: Remembers,
) -> Result<Report, crate::Error> {
    let progress = Progress::new(sent.len() as u64);
    let (pace, faults) = (Pace::default(), Faults::seeded(cli.traffic.seed));
    let bank = Bank::new(
        ledger,
        faults,
        cli.promise.repeats(),
        pace,
        unsure_of.iter().cloned(),
    );
    let broker = MemoryBroker::new("payments");
    let mut fleet = Fleet::start(cli, &broker, store, &bank);

    let sending = tokio::spawn(send(broker.clone(), sent.to_vec()));
    let mut rng = fastrand::Rng::with_seed(cli.traffic.seed);
    let begun = Instant::now();
    let mut killed = 0;
    while !sending.is_finished() || broker.unsettled() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        while killed < cli.kills
            && begun.elapsed() >= SENDING.mul_f64((killed + 1) as f64 / (cli.kills + 1) as f64)
        {
            fleet.kill_one(&mut rng).await;
            killed += 1;
        }
        fleet.all_run().await?;
        progress.at(outcomes.counts().accepted());
    }
    sending.await?;
    fleet.stop().await?;
    tokio::time::sleep(pace.late + pace.timeout).await; // what arrives late is counted too
    progress.done();

    let book = bank.ledger();
    let aside = set_aside(&broker);
    let report = Report::count(
        &Sent::all(sent),
        broker.delivered(),
        (&book, cli.promise.repeats()),
        &aside,
        &outcomes.counts(),
    );
    Ok(report
        .with_kills(killed, cli.kills)
        .with_unsure(unsure_of, &aside))
}

/// Sends, evenly over [`SENDING`]: the last message at its end, so that something runs whenever a
/// worker is killed.
async fn send(broker: MemoryBroker, messages: Vec<Outgoing>) {
    let chunks = messages.chunks(messages.len().div_ceil(STEPS).max(1));
    let step =
        SENDING / u32::try_from(chunks.len().saturating_sub(1).max(1)).expect("at most STEPS");
    let mut ticks = tokio::time::interval(step);
    for chunk in chunks {
        ticks.tick().await;
        for message in chunk {
            let body = Message::new(message.body.clone());
            broker.publish(match &message.id {
                Some(id) => body.with_header(ID_HEADER, id),
                None => body,
            });
        }
    }
}

fn set_aside(broker: &MemoryBroker) -> SetAside {
    let id = |letter: &DeadLetter| {
        letter
            .message
            .headers
            .last(ID_HEADER)
            .map(|id| String::from_utf8_lossy(id).into_owned())
    };
    let names = |letters: Vec<DeadLetter>| {
        letters
            .iter()
            .map(|letter| traffic::name(id(letter), &letter.message.body))
            .collect()
    };
    SetAside {
        in_doubt: names(broker.in_doubt()),
        dead_letters: names(broker.dead_letters()),
    }
}

/// What the workers share.
enum Remembers {
    Memory(MemoryStore),
    Sqlite(Sqlite),
}

type Worker = JoinHandle<Result<(), oncegate::Error>>;

/// The workers.
struct Fleet {
    workers: Vec<Worker>,
    broker: MemoryBroker,
    store: Remembers,
    bank: Arc<Bank>,
    guarantee: Guaranteed,
    attempts: u32,
    shutdown: watch::Sender<()>,
}

impl Fleet {
    fn start(cli: &Cli, broker: &MemoryBroker, store: Remembers, bank: &Arc<Bank>) -> Self {
        let mut fleet = Self {
            workers: Vec::new(),
            broker: broker.clone(),
            store,
            bank: Arc::clone(bank),
            guarantee: cli.promise.guarantee,
            attempts: cli.attempts(),
            shutdown: watch::Sender::new(()),
        };
        fleet.workers = (0..cli.workers.max(1)).map(|_| fleet.hire()).collect();
        fleet
    }

    fn hire(&self) -> Worker {
        match &self.store {
            Remembers::Memory(store) => self.hire_with(store.clone()),
            Remembers::Sqlite(store) => self.hire_with(store.clone()),
        }
    }

    fn hire_with(&self, store: impl Store + 'static) -> Worker {
        let mut shutdown = self.shutdown.subscribe();
        let consumer = Consumer::builder()
            .source(self.broker.source())
            .store(store)
            .guarantee(self.guarantee.guarantee())
            .allow_volatile_store() // in memory it ends with the broker; a file there survives what is shown here
            .id(IdSource::header(ID_HEADER))
            .lease(LEASE)
            .dedup_window(WINDOW)
            .backoff(Duration::from_millis(20), LEASE / 4)
            .max_attempts(self.attempts)
            .max_crashes(self.attempts)
            .max_in_flight(256)
            .handler(Charge {
                provider: Provider::Memory(Arc::clone(&self.bank)),
            });
        tokio::spawn(consumer.run_until(async move {
            let _ = shutdown.changed().await; // an error is the end of the demo: also a reason to stop
        }))
    }

    /// Drops a worker where it stands, mid-charge or not, and starts another.
    async fn kill_one(&mut self, rng: &mut fastrand::Rng) {
        let victim = rng.usize(0..self.workers.len());
        let replacement = self.hire();
        let worker = std::mem::replace(&mut self.workers[victim], replacement);
        worker.abort();
        let _ = worker.await; // it was aborted: that is what it says
    }

    /// A worker ends on its own only for an error.
    async fn all_run(&mut self) -> Result<(), crate::Error> {
        match self.workers.iter_mut().find(|worker| worker.is_finished()) {
            Some(worker) => Ok(worker.await??),
            None => Ok(()),
        }
    }

    async fn stop(self) -> Result<(), crate::Error> {
        self.shutdown.send_replace(());
        for worker in self.workers {
            worker.await??;
        }
        Ok(())
    }
}
