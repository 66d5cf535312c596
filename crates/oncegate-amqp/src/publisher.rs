//! Copies on their way: dead letters, in-doubt messages and delays, on a connection of their own.
//!
//! Of its own, because a broker that is short of memory stops reading from connections that
//! publish, and acknowledgements must not wait for that.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{BoxStream, FuturesUnordered};
use lapin::{Connection, Event};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::copy::{Copy, Withdrawal};
use crate::flight::{Flight, Landed, Trouble};
use crate::link;
use crate::settings::Settings;
use crate::telling::Telling;

/// How many copies may wait for their confirmation at once, for each destination.
const WINDOW: usize = 256;

/// How many copies may have a line of their own. Where all of them fail, for want of a permission,
/// say, each would close channels at its own pace.
const MOST_ALONE: usize = 8;

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
    pub(crate) withdrawal: Option<Withdrawal>,
}

impl Publisher {
    /// Starts it. It connects when there is something to publish. Copies of an epoch that is not
    /// `live` any more are dropped: their originals are delivered again.
    pub(crate) fn start(settings: Arc<Settings>, live: Arc<AtomicU64>) -> Self {
        let (copies, to_publish) = unbounded_channel();
        let (confirms, confirmed) = unbounded_channel();
        let work = Work::new(settings, live, to_publish, confirms);
        Self {
            copies,
            confirmed,
            running: tokio::spawn(work.run()),
        }
    }

    /// Sees to it that the copy is published and confirmed, however often it takes.
    pub(crate) fn publish(&self, copy: Copy) {
        // If it has ended, `confirmed` says so.
        let _ = self.copies.send(copy);
    }

    /// The next copy that stands in its queue; `None` if the publisher has ended, which only a bug
    /// in it can do.
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
    /// What the broker says about the connection; ends with it.
    events: BoxStream<'static, Event>,
    telling: Telling,
}

/// What waits in one line, and fails together.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    /// The copies for one queue: while it is missing, no others wait for it.
    To(String),
    /// A copy, by its tag, that was alone when its channel was closed. It takes no others with it
    /// again.
    Alone(u64),
}

struct Line {
    waiting: VecDeque<Copy>,
    /// One after a failure: then it is clear which copy failed, and none is published twice for
    /// another's sake.
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

    /// What goes off together.
    fn take_batch(&mut self) -> Vec<Copy> {
        self.waiting
            .drain(..self.window.min(self.waiting.len()))
            .collect()
    }

    /// When it may go on; `None` while it has nothing to do or waits for confirmations.
    fn due(&self) -> Option<Instant> {
        (!self.waiting.is_empty() && self.flight.is_some()).then_some(self.not_before)
    }
}

impl Work {
    fn new(
        settings: Arc<Settings>,
        live: Arc<AtomicU64>,
        copies: UnboundedReceiver<Copy>,
        confirms: UnboundedSender<Confirmed>,
    ) -> Self {
        Self {
            settings,
            live,
            copies,
            confirms,
            lanes: BTreeMap::new(),
            flying: FuturesUnordered::new(),
            backoff: Backoff::default(),
            not_before: Instant::now(),
            connection: None,
            events: Box::pin(futures_util::stream::pending()),
            telling: Telling::default(),
        }
    }

    async fn run(mut self) {
        loop {
            self.fill().await;
            let due = self
                .lanes
                .values()
                .filter_map(Line::due)
                .min()
                .map(|due| due.max(self.not_before));
            tokio::select! {
                copy = self.copies.recv() => match copy {
                    Some(copy) => self.take(copy),
                    None => break,
                },
                Some((lane, landed)) = self.flying.next(), if !self.flying.is_empty() => self.landed(lane, landed),
                event = self.events.next() => self.told(event),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
            }
        }
        self.settings.meter.unblocked();
        if let Some(connection) = self.connection.take() {
            link::close(&connection, Duration::from_secs(1)).await;
        }
    }

    /// Whether the broker reads what is published.
    fn told(&mut self, event: Option<Event>) {
        let queue = &*self.settings.name;
        match event {
            Some(Event::ConnectionBlocked(reason)) => {
                tracing::warn!(
                    queue,
                    reason,
                    "the broker takes nothing that is published; dead letters and delayed messages are held"
                );
                self.settings.meter.blocked();
            }
            Some(Event::ConnectionUnblocked) => {
                tracing::info!(queue, "the broker takes what is published again");
                self.settings.meter.unblocked();
            }
            Some(_) => {}
            None => {
                self.settings.meter.unblocked();
                self.events = Box::pin(futures_util::stream::pending());
            }
        }
    }

    fn take(&mut self, copy: Copy) {
        self.lanes
            .entry(Lane::To(copy.to.to_string()))
            .or_insert_with(Line::new)
            .waiting
            .push_back(copy);
    }

    /// Publishes what waits, as far as the windows go.
    async fn fill(&mut self) {
        while let Ok(copy) = self.copies.try_recv() {
            self.take(copy);
        }
        let live = self.live.load(Ordering::Acquire);
        self.lanes.values_mut().for_each(|line| {
            line.waiting
                .retain(|copy| copy.epoch == live && !copy.is_withdrawn())
        });
        self.lanes.retain(|lane, line| {
            matches!(lane, Lane::To(_)) || line.flight.is_none() || !line.waiting.is_empty()
        });
        let now = Instant::now();
        if now < self.not_before
            || !self
                .lanes
                .values()
                .filter_map(Line::due)
                .any(|due| due <= now)
        {
            return;
        }
        let Some(connection) = self.connection().await else {
            return;
        };
        for (lane, line) in self
            .lanes
            .iter_mut()
            .filter(|(_, line)| line.due().is_some_and(|due| due <= now))
        {
            let Some(flight) = line.flight.take() else {
                continue;
            };
            let batch = line.take_batch();
            let (lane, connection, settings) = (
                lane.clone(),
                Arc::clone(&connection),
                Arc::clone(&self.settings),
            );
            self.flying.push(Box::pin(async move {
                (lane, flight.fly(&connection, &settings, batch).await)
            }));
        }
    }

    async fn connection(&mut self) -> Option<Arc<Connection>> {
        if let Some(connection) = self
            .connection
            .as_ref()
            .filter(|connection| connection.status().connected())
        {
            return Some(Arc::clone(connection));
        }
        self.connection = None;
        self.settings.meter.unblocked();
        match link::connect(&self.settings, "publishes").await {
            Ok(connection) => {
                self.backoff.reset();
                self.events = Box::pin(connection.events_listener());
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
        let Landed {
            flight,
            confirmed,
            mut unsure,
            trouble,
        } = landed;
        let was_alone = confirmed.is_empty() && unsure.len() == 1;
        self.settings.meter.copied(confirmed.len());
        for copy in confirmed {
            let _ = self.confirms.send(Confirmed {
                epoch: copy.epoch,
                tag: copy.tag,
                withdrawal: copy.withdrawal,
            });
        }
        let line = self.lanes.entry(lane.clone()).or_insert_with(Line::new);
        line.flight = Some(flight);
        let Some(trouble) = trouble else {
            line.window = (line.window * 2).min(WINDOW);
            line.backoff.reset();
            return;
        };
        self.settings.meter.copies_again(unsure.len());
        let pause = line.backoff.pause();
        line.not_before = Instant::now() + pause;
        line.window = 1;
        let cost_the_channel =
            was_alone && matches!((&trouble, &lane), (Trouble::Lost(_), Lane::To(_)));
        let alone = if cost_the_channel { unsure.pop() } else { None };
        unsure
            .into_iter()
            .rev()
            .for_each(|copy| line.waiting.push_front(copy));
        if let Some(copy) = alone {
            self.set_apart(copy, lane);
        }
        self.warn(&trouble.to_string(), pause);
    }

    /// Gives a copy that was alone when its channel was closed a line of its own, or the last place
    /// in the line.
    fn set_apart(&mut self, copy: Copy, lane: Lane) {
        let apart = self
            .lanes
            .keys()
            .filter(|lane| matches!(lane, Lane::Alone(_)))
            .count();
        let is_free = apart < MOST_ALONE;
        let line = self
            .lanes
            .entry(if is_free { Lane::Alone(copy.tag) } else { lane })
            .or_insert_with(Line::new);
        if is_free {
            line.window = 1;
            line.not_before = Instant::now() + line.backoff.pause();
        }
        line.waiting.push_back(copy);
    }

    fn warn(&mut self, problem: &str, pause: Duration) {
        let (queue, broker) = (&*self.settings.name, self.settings.shown());
        if self.telling.is_due(problem, Instant::now()) {
            tracing::warn!(
                queue,
                broker,
                problem,
                ?pause,
                "a rejected or delayed message could not be published; it is held and tried again"
            );
        } else {
            tracing::debug!(queue, broker, problem, ?pause, "still not published");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RabbitMq;

    fn work() -> Work {
        let settings = Arc::new(RabbitMq::queue("orders").check().expect("settings"));
        Work::new(
            settings,
            Arc::default(),
            unbounded_channel().1,
            unbounded_channel().0,
        )
    }

    fn copy(tag: u64, to: &str) -> Copy {
        Copy {
            epoch: 1,
            tag,
            to: to.into(),
            properties: lapin::BasicProperties::default(),
            body: "".into(),
            withdrawal: None,
        }
    }

    fn to(name: &str) -> Lane {
        Lane::To(name.to_owned())
    }

    fn landed(confirmed: Vec<Copy>, unsure: Vec<Copy>, trouble: Option<Trouble>) -> Landed {
        Landed {
            flight: Flight::default(),
            confirmed,
            unsure,
            trouble,
        }
    }

    fn lost() -> Option<Trouble> {
        Some(Trouble::Lost("closed".into()))
    }

    #[tokio::test]
    async fn a_copy_that_costs_the_channel_alone_is_kept_from_the_others_and_has_its_own_backoff() {
        let mut work = work();
        work.landed(
            to("a"),
            landed(vec![], vec![copy(1, "a"), copy(2, "a")], lost()),
        );
        let line = &work.lanes[&to("a")];
        assert_eq!(
            (line.window, line.waiting.len()),
            (1, 2),
            "which of them it was is not known"
        );
        work.lanes
            .get_mut(&to("a"))
            .expect("the lane")
            .waiting
            .clear();
        work.landed(to("a"), landed(vec![], vec![copy(1, "a")], lost()));
        assert!(work.lanes[&to("a")].waiting.is_empty());
        assert_eq!(work.lanes[&Lane::Alone(1)].waiting.len(), 1);
        for _ in 0..8 {
            work.lanes
                .get_mut(&Lane::Alone(1))
                .expect("the lane")
                .waiting
                .clear();
            work.landed(Lane::Alone(1), landed(vec![], vec![copy(1, "a")], lost()));
            work.landed(to("a"), landed(vec![copy(2, "a")], vec![], None));
        }
        assert!(work.lanes[&Lane::Alone(1)].not_before > Instant::now() + Duration::from_secs(2));
        assert!(work.lanes[&to("a")].not_before < Instant::now() + Duration::from_secs(1));
        assert!(work.lanes[&to("a")].window > 1);
    }

    #[tokio::test]
    async fn where_each_copy_costs_the_channel_few_have_a_line_of_their_own_and_all_are_kept() {
        let mut work = work();
        (1..=500).for_each(|tag| work.take(copy(tag, "a")));
        for _ in 0..2_000 {
            let line = work.lanes.get_mut(&to("a")).expect("the lane");
            let Some(first) = line.waiting.pop_front() else {
                break;
            };
            work.landed(to("a"), landed(vec![], vec![first], lost()));
        }
        assert_eq!(work.lanes.len(), 1 + MOST_ALONE);
        let mut kept: Vec<u64> = work
            .lanes
            .values()
            .flat_map(|line| &line.waiting)
            .map(|copy| copy.tag)
            .collect();
        kept.sort();
        assert_eq!(kept, (1..=500).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn what_one_queue_refuses_waits_longer_and_longer_whatever_another_takes() {
        let mut work = work();
        for _ in 0..8 {
            work.lanes
                .entry(to("a"))
                .or_insert_with(Line::new)
                .waiting
                .clear();
            work.landed(
                to("a"),
                landed(
                    vec![],
                    vec![copy(1, "a"), copy(2, "a")],
                    Some(Trouble::Refused("NO_ROUTE".into())),
                ),
            );
            work.landed(to("b"), landed(vec![copy(3, "b")], vec![], None));
        }
        let line = &work.lanes[&to("a")];
        assert!(line.not_before > Instant::now() + Duration::from_secs(2));
        assert_eq!(
            line.waiting.iter().map(|copy| copy.tag).collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(work.lanes[&to("b")].window, WINDOW);
    }

    #[tokio::test]
    async fn copies_go_off_by_the_window_and_one_by_one_after_a_failure() {
        let mut work = work();
        (0..259).for_each(|tag| work.take(copy(tag, "a")));
        let line = work.lanes.get_mut(&to("a")).expect("the lane");
        assert_eq!(
            [
                line.take_batch().len(),
                line.take_batch().len(),
                line.take_batch().len()
            ],
            [256, 3, 0]
        );
        work.landed(
            to("a"),
            landed(vec![], vec![copy(1, "a"), copy(2, "a")], lost()),
        );
        assert_eq!(
            work.lanes
                .get_mut(&to("a"))
                .expect("the lane")
                .take_batch()
                .len(),
            1
        );
    }

    #[tokio::test]
    async fn a_copy_that_was_withdrawn_is_published_no_more() {
        let mut work = work();
        let withdrawal = Withdrawal::default();
        work.live.store(1, Ordering::Release);
        work.not_before = Instant::now() + Duration::from_secs(3_600);
        work.take(Copy {
            withdrawal: Some(withdrawal.clone()),
            ..copy(1, "a")
        });
        work.take(copy(2, "a"));
        work.fill().await;
        assert_eq!(work.lanes[&to("a")].waiting.len(), 2);
        withdrawal.withdraw();
        work.fill().await;
        assert_eq!(
            work.lanes[&to("a")]
                .waiting
                .iter()
                .map(|copy| copy.tag)
                .collect::<Vec<_>>(),
            [2]
        );
    }

    #[tokio::test]
    async fn the_end_of_the_publisher_is_noticed() {
        let settings = Arc::new(RabbitMq::queue("orders").check().expect("settings"));
        let mut publisher = Publisher::start(settings, Arc::default());
        publisher.running.abort();
        let noticed = tokio::time::timeout(Duration::from_secs(5), publisher.confirmed()).await;
        assert!(noticed.expect("in time").is_none());
    }
}
