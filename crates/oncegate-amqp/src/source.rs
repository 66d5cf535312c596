//! The source that the consumer drives.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use oncegate_core::source::{Delivery, Incoming, Limit, Open, Settled, Source, SourceError};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::engine::{self, Command, Ends};
use crate::settings::RabbitMq;

/// A queue that is consumed. Made by [`Open::open`] of a [`RabbitMq`].
///
/// Dropped without [`Source::close`], it closes its connections in the background, and what was not acknowledged
/// comes back.
pub struct RabbitMqSource {
    /// Bounded by the prefetch.
    incoming: UnboundedReceiver<Incoming>,
    /// What did not fit into the last limit.
    kept: Option<Delivery>,
    commands: UnboundedSender<Command>,
    live: Arc<AtomicU64>,
    intake: Intake,
    chunk: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Intake {
    Open,
    Stopped,
}

#[async_trait]
impl Open for RabbitMq {
    type Source = RabbitMqSource;

    /// Connects, prepares the queues as [`RabbitMq::topology`] says, and consumes.
    async fn open(self) -> Result<RabbitMqSource, SourceError> {
        let settings = Arc::new(self.check()?);
        let chunk = usize::from(settings.prefetch / 4).clamp(1, 256);
        let (out, incoming) = unbounded_channel();
        let (commands, obeyed) = unbounded_channel();
        let live = Arc::new(AtomicU64::new(0));
        let (opened, outcome) = oneshot::channel();
        let ends = Ends { out, commands: obeyed, live: Arc::clone(&live) };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(unavailable)?;
        std::thread::Builder::new()
            .name("oncegate-amqp".into())
            .spawn(move || {
                runtime.block_on(engine::run(settings, ends, opened));
                runtime.shutdown_background();
            })
            .map_err(unavailable)?;
        outcome.await.map_err(unavailable)??;
        Ok(RabbitMqSource { incoming, kept: None, commands, live, intake: Intake::Open, chunk })
    }
}

#[async_trait]
impl Source for RabbitMqSource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        let mut next = match self.kept.take() {
            Some(delivery) => Some(Incoming::Delivery(delivery)),
            None => Some(self.incoming.recv().await.ok_or_else(ended)?),
        };
        let (mut count, mut bytes) = (0, 0);
        while let Some(incoming) = next.take() {
            match incoming {
                Incoming::Revoked(epoch) => into.push(Incoming::Revoked(epoch)),
                // Its channel is gone, or it came too late: it is delivered again.
                Incoming::Delivery(delivery) if self.is_stale(&delivery) => {}
                Incoming::Delivery(delivery) => {
                    bytes += delivery.message.size();
                    if count > 0 && bytes > limit.bytes {
                        self.kept = Some(delivery);
                        break;
                    }
                    count += 1;
                    into.push(Incoming::Delivery(delivery));
                }
            }
            if count < limit.count {
                next = self.incoming.try_recv().ok();
            }
        }
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        if settled.is_empty() {
            return Ok(());
        }
        self.commands.send(Command::Settle(std::mem::take(settled))).map_err(|_| ended())
    }

    async fn stop(&mut self) {
        self.intake = Intake::Stopped;
        // If it is gone, `receive` says so.
        let _ = self.commands.send(Command::Stop);
    }

    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        let (done, finished) = oneshot::channel();
        self.commands.send(Command::Close { deadline: deadline.into(), done }).map_err(|_| ended())?;
        finished.await.map_err(|_| ended())?
    }

    fn chunk(&self) -> usize {
        self.chunk
    }
}

impl RabbitMqSource {
    fn is_stale(&self, delivery: &Delivery) -> bool {
        self.intake == Intake::Stopped || delivery.receipt.epoch != self.live.load(Ordering::Acquire)
    }
}

impl fmt::Debug for RabbitMqSource {
    /// Without the messages in it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let epoch = self.live.load(Ordering::Acquire);
        f.debug_struct("RabbitMqSource").field("epoch", &epoch).field("waiting", &self.incoming.len()).finish_non_exhaustive()
    }
}

fn unavailable(error: impl std::error::Error + Send + Sync + 'static) -> SourceError {
    SourceError::Unavailable(Box::new(error))
}

fn ended() -> SourceError {
    SourceError::Unavailable("the thread that serves the broker has ended".into())
}
