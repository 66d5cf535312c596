//! The public source: sends commands to the driver, the task that owns the connections, and
//! receives deliveries from it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use oncegate_core::IdSource;
use oncegate_core::lifecycle::Reason;
use oncegate_core::message::Origin;
use oncegate_core::source::{
    Connect, ConnectOptions, Incoming, Limit, Settled, Source, SourceError, SourceProperties,
};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::client::context::SourceContext;
use crate::client::driver::{self, DriverEndpoints, SourceCommand};
use crate::client::incoming_queue::{IncomingReceiver, incoming_queue};
use crate::settings::{RabbitMq, Rejects};

/// A source that consumes a RabbitMQ queue. Created by [`Connect::connect`] of a [`RabbitMq`].
///
/// If it is dropped without [`Source::close`], its connections are closed in the background, and
/// unacknowledged messages are redelivered.
pub struct RabbitMqSource {
    incoming: IncomingReceiver,
    commands: UnboundedSender<SourceCommand>,
    /// The epoch of the open channel: channels are numbered from 1. 0 while no channel is open.
    open_epoch: Arc<AtomicU64>,
    max_store_batch: usize,
    context: Arc<SourceContext>,
}

#[async_trait]
impl Connect for RabbitMq {
    type Source = RabbitMqSource;

    /// Refuses [`IdSource::position`]: messages of a queue have no position.
    fn check_id(&self, id: &IdSource) -> Result<(), SourceError> {
        if !id.reads_position() {
            return Ok(());
        }
        Err(SourceError::misconfigured(
            "id",
            "IdSource::position() reads topic, partition and offset, which messages of a RabbitMQ queue do not have, so every message would be a dead letter",
            "use IdSource::message_id(), IdSource::header(\"…\"), IdSource::json_pointer(\"/…\") or IdSource::body_hash()",
        ))
    }

    /// Connects, declares or checks the queues according to [`RabbitMq::topology`], and consumes.
    /// Logs a warning if a delivery may stay unacknowledged for longer than nine tenths of
    /// `consumer_timeout`, after which the source closes the channel.
    async fn connect(self, options: ConnectOptions) -> Result<RabbitMqSource, SourceError> {
        let context = Arc::new(self.with_options(options).check()?);
        if let Some(warning) = context.consumer_timeout_warning() {
            tracing::warn!(queue = &*context.name, "{warning}");
        }
        // A quarter of the prefetch, so that the broker can deliver more messages while the store
        // processes a batch.
        let max_store_batch = usize::from(context.prefetch / 4).clamp(1, 256);
        let (incoming_queue, incoming) = incoming_queue();
        let (commands, command_receiver) = unbounded_channel();
        let open_epoch = Arc::new(AtomicU64::new(0));
        let (opened_sender, opened_receiver) = oneshot::channel();
        let endpoints = DriverEndpoints {
            incoming_queue,
            commands: command_receiver,
            open_epoch: Arc::clone(&open_epoch),
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(unavailable)?;
        let driver_context = Arc::clone(&context);
        std::thread::Builder::new()
            .name("oncegate-amqp".into())
            .spawn(move || {
                runtime.block_on(driver::run(driver_context, endpoints, opened_sender));
                runtime.shutdown_background();
            })
            .map_err(unavailable)?;
        opened_receiver.await.map_err(unavailable)??;
        Ok(RabbitMqSource {
            incoming,
            commands,
            open_epoch,
            max_store_batch,
            context,
        })
    }
}

#[async_trait]
impl Source for RabbitMqSource {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        self.incoming
            .receive(limit, into)
            .await
            .map_err(|_| driver_stopped())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        if settled.is_empty() {
            return Ok(());
        }
        self.commands
            .send(SourceCommand::Settle(std::mem::take(settled)))
            .map_err(|_| driver_stopped())
    }

    fn destination(&self, _: &Origin, reason: &Reason) -> Option<String> {
        Some(match reason.is_in_doubt() {
            true => self.context.in_doubt.to_string(),
            false if self.context.rejects == Rejects::ByQueue => {
                "the queue's dead-letter exchange".to_owned()
            }
            false => self.context.dead_letters.to_string(),
        })
    }

    async fn stop(&mut self) {
        self.incoming.stop();
        // Sending fails only if the driver has stopped; then `receive` returns an error.
        let _ = self.commands.send(SourceCommand::Stop);
    }

    async fn close(self: Box<Self>, deadline: Instant) -> Result<(), SourceError> {
        let (closed_sender, closed_receiver) = oneshot::channel();
        self.commands
            .send(SourceCommand::Close {
                deadline: deadline.into(),
                closed_sender,
            })
            .map_err(|_| driver_stopped())?;
        closed_receiver.await.map_err(|_| driver_stopped())?
    }

    fn properties(&self) -> SourceProperties {
        let mut properties = SourceProperties::default();
        properties.max_store_batch = self.max_store_batch;
        properties.retry_delays = self.context.retry_delays();
        properties
    }
}

impl fmt::Debug for RabbitMqSource {
    /// Omits the messages, which may contain personal data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let epoch = self.open_epoch.load(Ordering::Acquire);
        f.debug_struct("RabbitMqSource")
            .field("epoch", &epoch)
            .field("queued", &self.incoming.len())
            .finish_non_exhaustive()
    }
}

fn unavailable(error: impl std::error::Error + Send + Sync + 'static) -> SourceError {
    SourceError::Unavailable(Box::new(error))
}

fn driver_stopped() -> SourceError {
    SourceError::Unavailable(
        "the driver thread has stopped; see the log for the reason, and restart the consumer"
            .into(),
    )
}
