//! Copies on their way: dead letters, in-doubt messages and delays, on a connection of their own.
//!
//! Of its own, because a broker that is short of memory stops reading from connections that publish, and
//! acknowledgements must not wait for that.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use lapin::Connection;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::copy::Copy;
use crate::flight::{Flight, Landed, Trouble};
use crate::link;
use crate::settings::Settings;

/// How many copies may wait for their confirmation at once, for each destination.
const WINDOW: usize = 256;

/// The engine's end of the publisher.
pub(crate) struct Publisher {
    copies: UnboundedSender<Copy>,
    confirmed: UnboundedReceiver<Confirmed>,
    running: JoinHandle<()>,
}

/// A copy that stands in its queue.
pub(crate) struct Confirmed {
    pub(crate) epoch: u64,
    pub(crate) tag: u64,
}

impl Publisher {
    /// Starts it. It connects when there is something to publish. Copies of an epoch that is not `live` any more are
    /// dropped: their originals are delivered again.
    pub(crate) fn start(settings: Arc<Settings>, live: Arc<AtomicU64>) -> Self {
        let (copies, to_publish) = unbounded_channel();
        let (confirms, confirmed) = unbounded_channel();
        let work = Work {
            settings,
            live,
            copies: to_publish,
            confirms,
            lanes: BTreeMap::new(),
            flying: FuturesUnordered::new(),
            backoff: Backoff::default(),
            not_before: Instant::now(),
            connection: None,
        };
        Self { copies, confirmed, running: tokio::spawn(work.run()) }
    }

    /// Sees to it that the copy is published and confirmed, however often it takes.
    pub(crate) fn publish(&self, copy: Copy) {
        // If it has ended, `confirmed` says so.
        let _ = self.copies.send(copy);
    }

    /// The next copy that stands in its queue; `None` if the publisher has ended, which only a bug in it can do.
    pub(crate) async fn confirmed(&mut self) -> Option<Confirmed> {
        self.confirmed.recv().await
    }

    /// Ends it; what was not confirmed is given up.
    pub(crate) async fn close(self, patience: Duration) {
        drop(self.copies);
        let _ = tokio::time::timeout(patience, self.running).await;
    }
}

struct Work {
    settings: Arc<Settings>,
    live: Arc<AtomicU64>,
    copies: UnboundedReceiver<Copy>,
    confirms: UnboundedSender<Confirmed>,
    lanes: BTreeMap<Lane, Line>,
    flying: FuturesUnordered<BoxFuture<'static, (Lane, Landed)>>,
    /// For connecting.
    backoff: Backoff,
    not_before: Instant,
    connection: Option<Arc<Connection>>,
}

/// What waits in one line, and fails together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    /// The copies for one queue: while it is missing, no others wait for it.
    To(String),
    /// A copy, by its tag, that was alone when its channel was closed. It takes no others with it again.
    Alone(u64),
}

struct Line {
    waiting: VecDeque<Copy>,
    /// One after a failure: then it is clear which copy failed, and none is published twice for another's sake.
    window: usize,
    backoff: Backoff,
    not_before: Instant,
    flight: Option<Flight>,
}

impl Line {
    fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            window: WINDOW,
            backoff: Backoff::default(),
            not_before: Instant::now(),
            flight: Some(Flight::default()),
        }
    }

    /// When it may go on; `None` while it has nothing to do or waits for confirmations.
    fn due(&self) -> Option<Instant> {
        (!self.waiting.is_empty() && self.flight.is_some()).then_some(self.not_before)
    }
}

impl Work {
    async fn run(mut self) {
        loop {
            self.fill().await;
            let due = self.lanes.values().filter_map(Line::due).min().map(|due| due.max(self.not_before));
            tokio::select! {
                copy = self.copies.recv() => match copy {
                    Some(copy) => self.take(copy),
                    None => break,
                },
                Some((lane, landed)) = self.flying.next(), if !self.flying.is_empty() => self.landed(lane, landed),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
        }
        if let Some(connection) = self.connection.take() {
            link::close(&connection, Duration::from_secs(1)).await;
        }
    }

    fn take(&mut self, copy: Copy) {
        self.lanes.entry(Lane::To(copy.to.to_string())).or_insert_with(Line::new).waiting.push_back(copy);
    }

    /// Publishes what waits, as far as the windows go.
    async fn fill(&mut self) {
        while let Ok(copy) = self.copies.try_recv() {
            self.take(copy);
        }
        let live = self.live.load(Ordering::Acquire);
        self.lanes.values_mut().for_each(|line| line.waiting.retain(|copy| copy.epoch == live));
        self.lanes.retain(|lane, line| matches!(lane, Lane::To(_)) || line.flight.is_none() || !line.waiting.is_empty());
        let now = Instant::now();
        if now < self.not_before || !self.lanes.values().filter_map(Line::due).any(|due| due <= now) {
            return;
        }
        let Some(connection) = self.connection().await else { return };
        for (lane, line) in self.lanes.iter_mut().filter(|(_, line)| line.due().is_some_and(|due| due <= now)) {
            let Some(flight) = line.flight.take() else { continue };
            let batch: Vec<Copy> = line.waiting.drain(..line.window.min(line.waiting.len())).collect();
            let (lane, connection, settings) = (lane.clone(), Arc::clone(&connection), Arc::clone(&self.settings));
            self.flying.push(Box::pin(async move { (lane, flight.fly(&connection, &settings, batch).await) }));
        }
    }

    async fn connection(&mut self) -> Option<Arc<Connection>> {
        if let Some(connection) = self.connection.as_ref().filter(|connection| connection.status().connected()) {
            return Some(Arc::clone(connection));
        }
        self.connection = None;
        match link::connect(&self.settings, "publishes").await {
            Ok(connection) => {
                self.backoff.reset();
                Some(Arc::clone(self.connection.insert(Arc::new(connection))))
            }
            Err(trouble) => {
                let pause = self.backoff.pause();
                self.not_before = Instant::now() + pause;
                self.warn(&trouble.to_string(), pause);
                None
            }
        }
    }

    fn landed(&mut self, lane: Lane, landed: Landed) {
        let Landed { flight, confirmed, mut unsure, trouble } = landed;
        let was_alone = confirmed.is_empty() && unsure.len() == 1;
        for copy in confirmed {
            let _ = self.confirms.send(Confirmed { epoch: copy.epoch, tag: copy.tag });
        }
        let line = self.lanes.entry(lane.clone()).or_insert_with(Line::new);
        line.flight = Some(flight);
        let Some(trouble) = trouble else {
            line.window = (line.window * 2).min(WINDOW);
            line.backoff.reset();
            return;
        };
        metrics::counter!("oncegate_amqp_publish_retries_total", "queue" => self.settings.name.to_string()).increment(unsure.len() as u64);
        let pause = line.backoff.pause();
        line.not_before = Instant::now() + pause;
        line.window = 1;
        let alone = if was_alone && matches!((&trouble, &lane), (Trouble::Lost(_), Lane::To(_))) { unsure.pop() } else { None };
        unsure.into_iter().rev().for_each(|copy| line.waiting.push_front(copy));
        if let Some(copy) = alone {
            let alone = self.lanes.entry(Lane::Alone(copy.tag)).or_insert_with(Line::new);
            alone.window = 1;
            alone.not_before = Instant::now() + alone.backoff.pause();
            alone.waiting.push_back(copy);
        }
        self.warn(&trouble.to_string(), pause);
    }

    fn warn(&self, problem: &str, pause: Duration) {
        tracing::warn!(
            queue = &*self.settings.name,
            broker = self.settings.shown,
            problem,
            ?pause,
            "a rejected or delayed message could not be published; it is held and tried again"
        );
    }
}
