//! Publishes messages at a steady rate with confirms, and records the outcome of each.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use oncegate_core::{Context, Failure, Handler};
use tokio::time::MissedTickBehavior;

/// How often a batch is published.
const TICK: Duration = Duration::from_millis(10);

/// How long confirms may be outstanding. Longer than a resource alarm in these tests.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);

/// Handles messages and records their outcomes. Of 200 messages four fail once, one fails three
/// times, and two are refused.
#[derive(Clone, Default)]
pub(crate) struct OutcomeRecorder(Arc<Mutex<MessageOutcomes>>);

#[derive(Default)]
struct MessageOutcomes {
    /// The number of effects of each message.
    effects: HashMap<u32, u32>,
    failed: HashMap<u32, u32>,
    refused: BTreeSet<u32>,
}

impl OutcomeRecorder {
    /// How many messages had their effect or were refused.
    pub(crate) fn count(&self) -> usize {
        let outcomes = self.outcomes();
        outcomes.effects.len() + outcomes.refused.len()
    }

    /// The maximum number of effects of one message.
    pub(crate) fn max_effects(&self) -> u32 {
        self.outcomes().effects.values().copied().max().unwrap_or(0)
    }

    /// The number of failed attempts.
    pub(crate) fn failures(&self) -> u32 {
        self.outcomes().failed.values().sum()
    }

    pub(crate) fn refused(&self) -> BTreeSet<u32> {
        self.outcomes().refused.clone()
    }

    fn outcomes(&self) -> MutexGuard<'_, MessageOutcomes> {
        self.0.lock().expect("no panic while it is locked")
    }
}

impl Handler for OutcomeRecorder {
    type Payload = u32;

    async fn handle(&self, number: u32, _: &Context) -> Result<(), Failure> {
        // Long enough that a handler is running when a fault occurs.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..6))).await;
        let mut outcomes = self.outcomes();
        let fails = match number % 200 {
            7 => 3,
            rest if rest % 50 == 3 => 1,
            rest if rest % 100 == 5 => {
                outcomes.refused.insert(number);
                return Err(Failure::Reject("one in a hundred".into()));
            }
            _ => 0,
        };
        let failed = outcomes.failed.entry(number).or_default();
        if *failed < fails {
            *failed += 1;
            return Err(Failure::Retry("not yet".into()));
        }
        if fails == 0 {
            outcomes.failed.remove(&number);
        }
        *outcomes.effects.entry(number).or_default() += 1;
        Ok(())
    }
}

/// A publisher that repeats each message until it is confirmed.
pub(crate) struct LoadGenerator {
    pub(crate) urls: Vec<String>,
    queue: String,
    rate: u32,
    started: Instant,
    next: AtomicU32,
    confirmed: AtomicUsize,
    /// How many messages were published again.
    republished: AtomicUsize,
    is_paused: AtomicBool,
    is_ending: AtomicBool,
}

impl LoadGenerator {
    pub(crate) fn new(urls: Vec<String>, queue: &str, rate: u32) -> Arc<Self> {
        Arc::new(Self {
            urls,
            queue: queue.to_owned(),
            rate,
            started: Instant::now(),
            next: AtomicU32::new(0),
            confirmed: AtomicUsize::new(0),
            republished: AtomicUsize::new(0),
            is_paused: AtomicBool::new(false),
            is_ending: AtomicBool::new(false),
        })
    }

    /// How many messages the broker has confirmed.
    pub(crate) fn confirmed(&self) -> usize {
        self.confirmed.load(Ordering::SeqCst)
    }

    pub(crate) fn republished(&self) -> usize {
        self.republished.load(Ordering::SeqCst)
    }

    /// How many messages were sent, confirmed or not.
    pub(crate) fn sent(&self) -> usize {
        self.next.load(Ordering::SeqCst) as usize
    }

    /// Publishes nothing new.
    pub(crate) fn pause(&self) {
        self.is_paused.store(true, Ordering::SeqCst);
    }

    pub(crate) fn resume(&self) {
        self.is_paused.store(false, Ordering::SeqCst);
    }

    /// Publishes nothing new, and ends when all messages are confirmed.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
    }

    /// Publishes until [`end`](Self::end), reconnecting after every failure.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut unconfirmed = Vec::new();
        for attempt in 0.. {
            if let Ok((_connection, channel)) = connect(&self.urls[attempt % self.urls.len()]).await
                && self.publish(&channel, &mut unconfirmed).await.is_ok()
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Publishes on one channel until the end, or until the channel fails: then messages without a
    /// confirm are unconfirmed.
    async fn publish(&self, channel: &Channel, unconfirmed: &mut Vec<u32>) -> Result<(), ()> {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut confirms = FuturesUnordered::new();
        let (mut outstanding, mut last_confirm) = (BTreeSet::new(), Instant::now());
        loop {
            // A node of a cluster may accept messages and never confirm them.
            let mut broken = !outstanding.is_empty() && last_confirm.elapsed() > CONFIRM_TIMEOUT;
            tokio::select! {
                _ = ticks.tick(), if !broken => for number in self.batch(unconfirmed) {
                    if outstanding.is_empty() {
                        last_confirm = Instant::now();
                    }
                    outstanding.insert(number);
                    match send(channel, &self.queue, number).await {
                        Ok(confirm) => confirms.push(async move { (number, confirm.await) }),
                        Err(_) => broken = true,
                    }
                },
                Some((number, confirm)) = confirms.next(), if !confirms.is_empty() => match confirm {
                    Ok(Confirmation::Ack(None)) => {
                        last_confirm = Instant::now();
                        outstanding.remove(&number);
                        self.confirmed.fetch_add(1, Ordering::SeqCst);
                    }
                    // The queue was deleted and is not declared again yet: retried at the next tick.
                    Ok(_) => {
                        outstanding.remove(&number);
                        unconfirmed.push(number);
                    }
                    Err(_) => broken = true,
                },
            }
            if broken {
                unconfirmed.extend(outstanding);
                return Err(());
            }
            if self.is_ending.load(Ordering::SeqCst)
                && outstanding.is_empty()
                && unconfirmed.is_empty()
            {
                return Ok(());
            }
        }
    }

    /// The unconfirmed messages, and the new ones that are due.
    fn batch(&self, unconfirmed: &mut Vec<u32>) -> Vec<u32> {
        self.republished
            .fetch_add(unconfirmed.len(), Ordering::SeqCst);
        let mut batch = std::mem::take(unconfirmed);
        if !self.is_paused.load(Ordering::SeqCst) && !self.is_ending.load(Ordering::SeqCst) {
            // Catches up gradually after an outage.
            let due = (self.started.elapsed().as_secs_f64() * f64::from(self.rate)) as u32;
            let first = self.next.load(Ordering::SeqCst);
            let new = due.saturating_sub(first).min(self.rate / 20);
            self.next.store(first + new, Ordering::SeqCst);
            batch.extend(first..first + new);
        }
        batch
    }
}

/// Takes all messages of a queue and returns their numbers.
pub(crate) async fn take_all(url: &str, queue: &str) -> BTreeSet<u32> {
    let (_connection, channel) = connect(url).await.expect("a broker");
    let mut all = BTreeSet::new();
    while let Some(message) = channel
        .basic_get(queue.into(), BasicGetOptions { no_ack: true })
        .await
        .expect("a queue")
    {
        all.insert(
            std::str::from_utf8(&message.data)
                .ok()
                .and_then(|text| text.parse().ok())
                .expect("a number"),
        );
    }
    all
}

async fn connect(url: &str) -> lapin::Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    Ok((connection, channel))
}

async fn send(
    channel: &Channel,
    queue: &str,
    number: u32,
) -> lapin::Result<lapin::PublisherConfirm> {
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let properties = BasicProperties::default()
        .with_delivery_mode(2)
        .with_message_id(format!("n-{number}").into());
    channel
        .basic_publish(
            "".into(),
            queue.into(),
            options,
            number.to_string().as_bytes(),
            properties,
        )
        .await
}
