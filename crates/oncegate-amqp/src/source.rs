//! The source that the consumer drives.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use oncegate_core::lifecycle::Reason;
use oncegate_core::message::Origin;
use oncegate_core::source::{Incoming, Limit, Open, Order, Settled, Source, SourceError};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::engine::{self, Command, Ends};
use crate::inbox::{Reader, inbox};
use crate::settings::{RabbitMq, Rejects, Settings};

/// A queue that is consumed. Made by [`Open::open`] of a [`RabbitMq`].
///
/// Dropped without [`Source::close`], it closes its connections in the background, and what was not
/// acknowledged comes back.
pub struct RabbitMqSource {
    incoming: Reader,
    commands: UnboundedSender<Command>,
    live: Arc<AtomicU64>,
    chunk: usize,
    settings: Arc<Settings>,
}

#[async_trait]
impl Open for RabbitMq {
    type Source = RabbitMqSource;

    fn for_in_flight(self, count: usize) -> Self {
        self.in_flight(count)
    }

    fn for_order(self, order: Order) -> Self {
        self.order(order)
    }

    /// Held against the consumer timeout when it is opened; one that is too short is a warning.
    fn for_longest_open(self, open: Duration) -> Self {
        self.longest_open(open)
    }

    /// Connects, prepares the queues as [`RabbitMq::topology`] says, and consumes.
    async fn open(self) -> Result<RabbitMqSource, SourceError> {
        let settings = Arc::new(self.check()?);
        if let Some(warning) = settings.outlasts() {
            tracing::warn!(queue = &*settings.name, "{warning}");
        }
        let chunk = usize::from(settings.prefetch / 4).clamp(1, 256);
        let (out, incoming) = inbox();
        let (commands, obeyed) = unbounded_channel();
        let live = Arc::new(AtomicU64::new(0));
        let (opened, outcome) = oneshot::channel();
        let ends = Ends {
            out,
            commands: obeyed,
            live: Arc::clone(&live),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(unavailable)?;
        let engine_settings = Arc::clone(&settings);
        std::thread::Builder::new()
            .name("oncegate-amqp".into())
            .spawn(move || {
                runtime.block_on(engine::run(engine_settings, ends, opened));
                runtime.shutdown_background();
            })
            .map_err(unavailable)?;
        outcome.await.map_err(unavailable)??;
        Ok(RabbitMqSource {
            incoming,
            commands,
            live,
            chunk,
            settings,
        })
    }
}

#[async_trait]
impl Source for RabbitMqSource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        self.incoming
            .receive(limit, into)
            .await
            .map_err(|_| ended())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        if settled.is_empty() {
            return Ok(());
        }
        self.commands
            .send(Command::Settle(std::mem::take(settled)))
            .map_err(|_| ended())
    }

    fn destination(&self, _: &Origin, reason: &Reason) -> Option<String> {
        Some(match reason.is_in_doubt() {
            true => self.settings.in_doubt.to_string(),
            false if self.settings.rejects == Rejects::ByQueue => {
                "the queue's dead-letter exchange".to_owned()
            }
            false => self.settings.dead_letters.to_string(),
        })
    }

    async fn stop(&mut self) {
        self.incoming.stop();
        // If it is gone, `receive` says so.
        let _ = self.commands.send(Command::Stop);
    }

    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        let (done, finished) = oneshot::channel();
        self.commands
            .send(Command::Close {
                deadline: deadline.into(),
                done,
            })
            .map_err(|_| ended())?;
        finished.await.map_err(|_| ended())?
    }

    fn chunk(&self) -> usize {
        self.chunk
    }
}

impl fmt::Debug for RabbitMqSource {
    /// Without the messages in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let epoch = self.live.load(Ordering::Acquire);
        f.debug_struct("RabbitMqSource")
            .field("epoch", &epoch)
            .field("waiting", &self.incoming.len())
            .finish_non_exhaustive()
    }
}

fn unavailable(error: impl std::error::Error + Send + Sync + 'static) -> SourceError {
    SourceError::Unavailable(Box::new(error))
}

fn ended() -> SourceError {
    SourceError::Unavailable("the thread that serves the broker has ended".into())
}
