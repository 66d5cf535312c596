//! Messages at a steady rate, confirmed one by one, and what became of each.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use oncegate_core::{Context, Failure, Handler, async_trait};
use tokio::time::MissedTickBehavior;

/// How often a batch leaves.
const TICK: Duration = Duration::from_millis(10);

/// How long the broker may leave all that was sent unanswered. An alarm is over before that.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// What became of each message. One in fifty fails at first, one in two hundred thrice, and one in
/// a hundred is refused.
#[derive(Clone, Default)]
pub(crate) struct Effects(Arc<Mutex<Became>>);

#[derive(Default)]
struct Became {
    /// How often it had its effect.
    effects: HashMap<u32, u32>,
    failed: HashMap<u32, u32>,
    refused: BTreeSet<u32>,
}

impl Effects {
    /// How many had their effect or were refused.
    pub(crate) fn count(&self) -> usize {
        let became = self.became();
        became.effects.len() + became.refused.len()
    }

    /// The most effects that one message had.
    pub(crate) fn most(&self) -> u32 {
        self.became().effects.values().copied().max().unwrap_or(0)
    }

    /// How often one failed.
    pub(crate) fn failures(&self) -> u32 {
        self.became().failed.values().sum()
    }

    pub(crate) fn refused(&self) -> BTreeSet<u32> {
        self.became().refused.clone()
    }

    fn became(&self) -> MutexGuard<'_, Became> {
        self.0.lock().expect("nobody panics with it")
    }
}

#[async_trait]
impl Handler for Effects {
    type Payload = u32;

    async fn handle(&self, number: u32, _: &Context) -> Result<(), Failure> {
        // So that some handler always runs when something breaks.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(..6))).await;
        let mut became = self.became();
        let fails = match number % 200 {
            7 => 3,
            rest if rest % 50 == 3 => 1,
            rest if rest % 100 == 5 => {
                became.refused.insert(number);
                return Err(Failure::Reject("one in a hundred".into()));
            }
            _ => 0,
        };
        let failed = became.failed.entry(number).or_default();
        if *failed < fails {
            *failed += 1;
            return Err(Failure::Retry("not yet".into()));
        }
        if fails == 0 {
            became.failed.remove(&number);
        }
        *became.effects.entry(number).or_default() += 1;
        Ok(())
    }
}

/// A publisher that knows of each message whether the broker has it.
pub(crate) struct Load {
    pub(crate) urls: Vec<String>,
    queue: String,
    rate: u32,
    begun: Instant,
    next: AtomicU32,
    confirmed: AtomicUsize,
    /// Published again, because it was not known whether the broker had it.
    again: AtomicUsize,
    paused: AtomicBool,
    over: AtomicBool,
}

impl Load {
    pub(crate) fn new(urls: Vec<String>, queue: &str, rate: u32) -> Arc<Self> {
        Arc::new(Self {
            urls,
            queue: queue.to_owned(),
            rate,
            begun: Instant::now(),
            next: AtomicU32::new(0),
            confirmed: AtomicUsize::new(0),
            again: AtomicUsize::new(0),
            paused: AtomicBool::new(false),
            over: AtomicBool::new(false),
        })
    }

    /// How many messages the broker has confirmed.
    pub(crate) fn confirmed(&self) -> usize {
        self.confirmed.load(Ordering::SeqCst)
    }

    pub(crate) fn again(&self) -> usize {
        self.again.load(Ordering::SeqCst)
    }

    /// How many were sent, confirmed or not.
    pub(crate) fn sent(&self) -> usize {
        self.next.load(Ordering::SeqCst) as usize
    }

    /// Publishes nothing new.
    pub(crate) fn pause(&self) {
        self.paused.store(true, Ordering::SeqCst);
    }

    pub(crate) fn go_on(&self) {
        self.paused.store(false, Ordering::SeqCst);
    }

    /// Publishes nothing new, and ends when all is confirmed.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    /// Publishes until it is told to end, whatever the broker does.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut unsure = Vec::new();
        for attempt in 0.. {
            if let Ok((_connection, channel)) = connect(&self.urls[attempt % self.urls.len()]).await
                && self.publish(&channel, &mut unsure).await.is_ok()
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Publishes on one channel until the end, or until the channel breaks: then what has no answer
    /// is unsure.
    async fn publish(&self, channel: &Channel, unsure: &mut Vec<u32>) -> Result<(), ()> {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut answers = FuturesUnordered::new();
        let (mut open, mut answered) = (BTreeSet::new(), Instant::now());
        loop {
            // A node of a cluster may take all that comes and never answer.
            let mut broken = !open.is_empty() && answered.elapsed() > ANSWER_PATIENCE;
            tokio::select! {
                _ = ticks.tick(), if !broken => for number in self.batch(unsure) {
                    if open.is_empty() {
                        answered = Instant::now();
                    }
                    open.insert(number);
                    match send(channel, &self.queue, number).await {
                        Ok(confirm) => answers.push(async move { (number, confirm.await) }),
                        Err(_) => broken = true,
                    }
                },
                Some((number, answer)) = answers.next(), if !answers.is_empty() => match answer {
                    Ok(Confirmation::Ack(None)) => {
                        answered = Instant::now();
                        open.remove(&number);
                        self.confirmed.fetch_add(1, Ordering::SeqCst);
                    }
                    // There is no queue at this moment: the next tick tries again.
                    Ok(_) => {
                        open.remove(&number);
                        unsure.push(number);
                    }
                    Err(_) => broken = true,
                },
            }
            if broken {
                unsure.extend(open);
                return Err(());
            }
            if self.over.load(Ordering::SeqCst) && open.is_empty() && unsure.is_empty() {
                return Ok(());
            }
        }
    }

    /// What is unsure, and what is due.
    fn batch(&self, unsure: &mut Vec<u32>) -> Vec<u32> {
        self.again.fetch_add(unsure.len(), Ordering::SeqCst);
        let mut batch = std::mem::take(unsure);
        if !self.paused.load(Ordering::SeqCst) && !self.over.load(Ordering::SeqCst) {
            // What was missed while the broker was away is made up for, a little at a time.
            let due = (self.begun.elapsed().as_secs_f64() * f64::from(self.rate)) as u32;
            let first = self.next.load(Ordering::SeqCst);
            let new = due.saturating_sub(first).min(self.rate / 20);
            self.next.store(first + new, Ordering::SeqCst);
            batch.extend(first..first + new);
        }
        batch
    }
}

/// The numbers that stand in a queue, which is empty then.
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
