//! Copies on their way: dead letters, in-doubt messages and delays, on a connection of their own.
//!
//! Of its own, because a broker that is short of memory stops reading from connections that publish, and
//! acknowledgements must not wait for that.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{Channel, Confirmation, Connection};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::copy::Copy;
use crate::link::{self, Trouble};
use crate::settings::Settings;
use crate::topology;

/// How many copies may wait for their confirmation at once.
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
            waiting: VecDeque::new(),
            flying: FuturesUnordered::new(),
            window: WINDOW,
            backoff: Backoff::default(),
            not_before: Instant::now(),
            open: None,
        };
        Self { copies, confirmed, running: tokio::spawn(work.run()) }
    }

    /// Sees to it that the copy is published and confirmed, however often it takes.
    pub(crate) fn publish(&self, copy: Copy) {
        // It ends only when this end does.
        let _ = self.copies.send(copy);
    }

    /// The next copy that stands in its queue.
    pub(crate) async fn confirmed(&mut self) -> Confirmed {
        match self.confirmed.recv().await {
            Some(confirmed) => confirmed,
            None => std::future::pending().await,
        }
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
    waiting: VecDeque<Copy>,
    flying: FuturesUnordered<BoxFuture<'static, (Copy, Outcome)>>,
    /// One after an error, so that a copy that the broker answers by closing the channel takes no other with it.
    window: usize,
    backoff: Backoff,
    not_before: Instant,
    open: Option<(Connection, Channel)>,
}

enum Outcome {
    Confirmed,
    /// The broker did not take this copy.
    Refused(String),
    /// The channel is gone.
    Lost(String),
}

impl Work {
    async fn run(mut self) {
        loop {
            self.fill().await;
            let blocked = !self.waiting.is_empty() && self.flying.len() < self.window;
            tokio::select! {
                copy = self.copies.recv() => match copy {
                    Some(copy) => self.waiting.push_back(copy),
                    None => break,
                },
                Some((copy, outcome)) = self.flying.next(), if !self.flying.is_empty() => self.landed(copy, outcome).await,
                () = tokio::time::sleep_until(self.not_before), if blocked => {}
            }
        }
        if let Some((connection, _)) = self.open.take() {
            link::close(connection, Duration::from_secs(1)).await;
        }
    }

    /// Publishes what waits, as far as the window goes.
    async fn fill(&mut self) {
        while let Ok(copy) = self.copies.try_recv() {
            self.waiting.push_back(copy);
        }
        let live = self.live.load(Ordering::Acquire);
        self.waiting.retain(|copy| copy.epoch == live);
        if self.waiting.is_empty() || self.flying.len() >= self.window || Instant::now() < self.not_before {
            return;
        }
        let channel = match self.channel().await {
            Ok(channel) => channel,
            Err(trouble) => return self.pause(&trouble.to_string()),
        };
        while self.flying.len() < self.window {
            let Some(copy) = self.waiting.pop_front() else { break };
            self.flying.push(Box::pin(publish(channel.clone(), copy)));
        }
    }

    async fn channel(&mut self) -> Result<Channel, Trouble> {
        if let Some((_, channel)) = self.open.as_ref().filter(|(_, channel)| channel.status().connected()) {
            return Ok(channel.clone());
        }
        self.open = None;
        let connection = link::connect(&self.settings, "publishes").await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        self.open = Some((connection, channel.clone()));
        Ok(channel)
    }

    async fn landed(&mut self, copy: Copy, outcome: Outcome) {
        match outcome {
            Outcome::Confirmed => {
                self.window = (self.window * 2).min(WINDOW);
                self.backoff.reset();
                let _ = self.confirms.send(Confirmed { epoch: copy.epoch, tag: copy.tag });
            }
            Outcome::Refused(problem) => {
                self.pause(&format!("`{}` did not take the copy: {problem}", copy.to));
                self.waiting.push_back(copy);
                if let Some((connection, _)) = &self.open
                    && let Err(trouble) = topology::prepare(connection, &self.settings).await
                {
                    tracing::warn!(queue = &*self.settings.name, %trouble, "the queues could not be prepared");
                }
            }
            Outcome::Lost(problem) => {
                self.window = 1;
                self.pause(&problem);
                self.waiting.push_back(copy);
            }
        }
    }

    /// Waits a while before trying again. What fails together counts as one failure.
    fn pause(&mut self, problem: &str) {
        metrics::counter!("oncegate_amqp_publish_retries_total", "queue" => self.settings.name.to_string()).increment(1);
        if Instant::now() < self.not_before {
            return;
        }
        let pause = self.backoff.pause();
        self.not_before = Instant::now() + pause;
        tracing::warn!(
            queue = &*self.settings.name,
            broker = self.settings.shown,
            problem,
            ?pause,
            "a rejected or delayed message could not be published; it is held and tried again"
        );
    }
}

async fn publish(channel: Channel, copy: Copy) -> (Copy, Outcome) {
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let publishing = channel.basic_publish("".into(), copy.to.clone(), options, &copy.body, copy.properties.clone());
    let confirmation = match publishing.await {
        Ok(confirm) => confirm.await,
        Err(error) => Err(error),
    };
    let outcome = match confirmation {
        Ok(Confirmation::Ack(None)) => Outcome::Confirmed,
        Ok(Confirmation::Ack(Some(returned)) | Confirmation::Nack(Some(returned))) => Outcome::Refused(returned.reply_text.to_string()),
        Ok(Confirmation::Nack(None)) => Outcome::Refused("the broker refused it".into()),
        Ok(Confirmation::NotRequested) => Outcome::Lost("the broker confirms nothing".into()),
        Err(error) => Outcome::Lost(error.to_string()),
    };
    (copy, outcome)
}
