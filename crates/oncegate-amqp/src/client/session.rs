//! A connection with a consuming channel: receives deliveries and sends acknowledgements.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, try_join_all};
use futures_util::{FutureExt, StreamExt};
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions, BasicRejectOptions,
};
use lapin::{Channel, Connection, Consumer, ErrorKind};
use oncegate_core::internal::fault;
use oncegate_core::source::SourceError;
use tokio::time::Instant;

use crate::client::close_delay::CloseDelay;
use crate::client::connector::{self, ConnectError, code, is_transient_refusal, reply_code};
use crate::client::context::SourceContext;
use crate::client::declare;
use crate::client::lost_consumer_probe::LostConsumerProbe;
use crate::client::stream_refusal;
use crate::protocol::channel_deliveries::{AckFrames, ChannelDeliveries, FlushMode};
use crate::protocol::close_mode::CloseMode;
use crate::protocol::queue_settings::ConsumerMode;

/// How often the status of a channel whose consumer is cancelled is checked: the consumer can no
/// longer report that the channel is lost.
const STATUS_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// How long declaring the queues and `basic.consume` may take. A node that is partitioned from its
/// cluster accepts connections and does not reply.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection and its consuming channel, from `basic.consume` until it is closed or lost.
pub(crate) struct ConsumerSession {
    pub(crate) deliveries: ChannelDeliveries,
    connection: Arc<Connection>,
    pub(super) channel: Channel,
    consumer: Option<Consumer>,
    /// Why the consumer ended, if [`take_ready`] found it out while it read the last deliveries.
    consumer_loss: Option<ChannelLoss>,
    /// The acknowledgements that are being sent.
    acknowledging: Option<BoxFuture<'static, lapin::Result<()>>>,
    lost_consumer_probe: LostConsumerProbe,
    consumers: ConsumerMode,
    close_mode: CloseMode,
    /// Whether [`stop`](Self::stop) was called.
    is_stopped: bool,
    /// How long a delivery may be unsettled.
    unsettled_timeout: Duration,
    close_delay: CloseDelay,
}

/// An event of the channel.
pub(crate) enum SessionEvent {
    /// Deliveries arrived.
    Delivered(Vec<lapin::message::Delivery>),
    /// Acknowledgements were sent, or a timer expired.
    Wake,
    /// The channel is closed or has to be replaced.
    Lost(ChannelLoss),
}

/// Why a channel is lost or replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ChannelLoss {
    /// The channel was closed, or has to be closed, for this reason.
    Broken(String),
    /// The [`LostConsumerProbe`] found ready messages in the queue, but the consumer received none.
    NoDeliveries(String),
    /// The client cannot parse a frame of the broker.
    UnparsableFrame(String),
    /// The driver replaces it, to consume with the configured prefetch again.
    ReplacedToRestorePrefetch,
}

impl From<lapin::Error> for ChannelLoss {
    fn from(error: lapin::Error) -> Self {
        match error.kind() {
            ErrorKind::ParsingError(_) => Self::UnparsableFrame(error.to_string()),
            _ => Self::Broken(error.to_string()),
        }
    }
}

impl ConsumerSession {
    /// Connects, declares or checks the queues, and consumes. `probe_interval` is the interval of the
    /// [`LostConsumerProbe`] until the first delivery.
    pub(crate) async fn open(
        context: &SourceContext,
        epoch: u64,
        prefetch: u16,
        probe_interval: Duration,
    ) -> Result<Self, ConnectError> {
        let (connection, version) = connector::connect(context, "consumes").await?;
        let close_mode = CloseMode::for_settings(context, version);
        let opening = tokio::time::timeout(
            OPEN_TIMEOUT,
            Self::consume(
                connection,
                context,
                close_mode,
                epoch,
                prefetch,
                probe_interval,
            ),
        )
        .await;
        opening
            .unwrap_or_else(|_| {
                Err(ConnectError::Transient(
                    format!(
                        "the broker did not open the channel and its queues within {OPEN_TIMEOUT:?}"
                    )
                    .into(),
                ))
            })
            .inspect_err(|_| {
                // The node accepts connections but does not serve the queue: try another one.
                context.connector.nodes.advance();
            })
    }

    async fn consume(
        connection: Connection,
        context: &SourceContext,
        close_mode: CloseMode,
        epoch: u64,
        prefetch: u16,
        probe_interval: Duration,
    ) -> Result<Self, ConnectError> {
        declare::prepare(&connection, context).await?;
        let channel = connection.create_channel().await?;
        // Before `basic.consume`: without a prefetch the broker sends the whole queue.
        channel
            .basic_qos(prefetch, BasicQosOptions::default())
            .await?;
        fault::point("amqp.consume.before");
        let consuming = channel.basic_consume(
            context.queue.clone(),
            "".into(),
            BasicConsumeOptions::default(),
            stream_refusal::consumer_arguments(),
        );
        let consumer = consuming.await.map_err(|error| classify(error, context))?;
        fault::point("amqp.consume.after");
        let connection = Arc::new(connection);
        let lost_consumer_probe = LostConsumerProbe::new(
            Arc::clone(&connection),
            context.queue.clone(),
            probe_interval,
            context.consumers == ConsumerMode::Competing,
        );
        Ok(Self {
            deliveries: ChannelDeliveries::new(epoch, prefetch),
            connection,
            channel,
            consumer: Some(consumer),
            consumer_loss: None,
            acknowledging: None,
            lost_consumer_probe,
            consumers: context.consumers,
            close_mode,
            is_stopped: false,
            unsettled_timeout: context.unsettled_timeout(),
            close_delay: CloseDelay::default(),
        })
    }

    /// Waits for the next event; reads the consumer, sends acknowledgements and runs the timers
    /// meanwhile. Cancel-safe.
    pub(crate) async fn next_event(&mut self) -> SessionEvent {
        let wake = self.next_wake();
        let Self {
            acknowledging,
            consumer,
            consumer_loss,
            lost_consumer_probe,
            ..
        } = self;
        if let Some(loss) = consumer_loss.take() {
            return SessionEvent::Lost(loss);
        }
        tokio::select! {
            biased;
            sent = async { acknowledging.as_mut().expect("this branch runs only while acknowledgements are sent").await }, if acknowledging.is_some() => {
                *acknowledging = None;
                match sent {
                    Ok(()) => SessionEvent::Wake,
                    Err(error) => SessionEvent::Lost(consumer_error(consumer.as_mut()).unwrap_or_else(|| error.into())),
                }
            }
            item = async { consumer.as_mut().expect("this branch runs only while there is a consumer").next().await }, if consumer.is_some() => match item {
                Some(Ok(first)) => {
                    let (deliveries, loss) = take_ready(first, consumer.as_mut().expect("the delivery came from this consumer"));
                    *consumer_loss = loss;
                    lost_consumer_probe.delivered();
                    SessionEvent::Delivered(deliveries)
                }
                Some(Err(error)) => SessionEvent::Lost(error.into()),
                None => SessionEvent::Lost(consumer_cancelled()),
            },
            ready = lost_consumer_probe.ready_messages(), if lost_consumer_probe.is_checking() => {
                let has_room = self.deliveries.has_room();
                if self.lost_consumer_probe.is_consumer_lost(ready, has_room) {
                    let problem = format!("the consumer receives nothing although {ready} messages are ready");
                    SessionEvent::Lost(ChannelLoss::NoDeliveries(problem))
                } else {
                    SessionEvent::Wake
                }
            }
            () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                if !self.channel.status().connected() {
                    SessionEvent::Lost(ChannelLoss::Broken("the channel is closed".into()))
                } else if self.unsettled_deadline().is_some_and(|deadline| deadline <= Instant::now()) {
                    let problem = format!("a delivery was not settled within {:?} (nine tenths of the consumer timeout, after which the broker would close the channel); shorten the handler, or raise consumer_timeout in rabbitmq.conf and in .consumer_timeout(…)", self.unsettled_timeout);
                    SessionEvent::Lost(ChannelLoss::Broken(problem))
                } else {
                    if self.can_receive() {
                        self.lost_consumer_probe.check_if_due();
                    }
                    SessionEvent::Wake
                }
            }
        }
    }

    /// Sends the acknowledgements that are due. One flush runs at a time, so that they are sent in
    /// order.
    pub(crate) fn flush(&mut self, mode: FlushMode) {
        if self.acknowledging.is_some() {
            return;
        }
        let Some(frames) = self.deliveries.flush(mode, Instant::now()) else {
            return;
        };
        self.close_delay.acks_sent(frames.count());
        self.acknowledging = Some(Box::pin(send_acks(self.channel.clone(), frames)));
    }

    /// Cancels the consumer, unless [`CloseMode::StayActive`]. Deliveries may still be settled.
    pub(crate) async fn stop(&mut self) {
        self.is_stopped = true;
        if self.close_mode.cancels_at_stop() {
            self.cancel().await;
        }
    }

    /// Cancels the consumer, if there still is one; waits for the broker's reply for at most two
    /// seconds.
    pub(super) async fn cancel(&mut self) {
        let Some(consumer) = self.consumer.take() else {
            return;
        };
        fault::point("amqp.cancel.before");
        let cancelling = self
            .channel
            .basic_cancel(consumer.tag(), BasicCancelOptions::default());
        if !matches!(
            tokio::time::timeout(Duration::from_secs(2), cancelling).await,
            Ok(Ok(()))
        ) {
            tracing::debug!(
                "basic.cancel was not confirmed; closing the channel ends the consumer"
            );
        }
        fault::point("amqp.cancel.after");
    }

    /// Whether acknowledgements are being sent.
    pub(crate) fn is_acknowledging(&self) -> bool {
        self.acknowledging.is_some()
    }

    /// Whether no settlement is pending: all copies are confirmed, and all acknowledgements sent.
    pub(crate) fn is_flushed(&self) -> bool {
        self.acknowledging.is_none() && self.deliveries.is_flushed()
    }

    /// Whether no delivery is unacknowledged.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_flushed() && self.deliveries.unacked() == 0
    }

    /// Closes the channel and the connection. The broker requeues unacknowledged messages.
    pub(crate) async fn close(mut self, timeout: Duration) {
        self.acknowledging = None;
        if self.channel.status().connected() {
            self.close_delay.wait().await;
        }
        let requeues = self
            .close_mode
            .requeues_before_close(self.consumers, self.is_stopped);
        if requeues && self.deliveries.unacked() > 0 && self.channel.status().connected() {
            let _ = tokio::time::timeout(timeout, self.requeue_unsettled()).await;
        }
        let _ = tokio::time::timeout(timeout, self.channel.close(200, "OK".into())).await;
        connector::close(&self.connection, timeout).await;
    }

    /// Whether the consumer would receive a ready message: it is consuming, and the prefetch has room.
    fn can_receive(&self) -> bool {
        !self.is_stopped && self.consumer.is_some() && self.deliveries.has_room()
    }

    /// When the channel is closed because of the delivery that has been unsettled for longest.
    fn unsettled_deadline(&self) -> Option<Instant> {
        self.deliveries
            .unsettled_since()?
            .checked_add(self.unsettled_timeout)
    }

    /// When the next timer of [`next_event`](Self::next_event) expires.
    fn next_wake(&self) -> Option<Instant> {
        let gap_due = self.deliveries.gap_due();
        let status_check = self
            .consumer
            .is_none()
            .then(|| Instant::now() + STATUS_CHECK_INTERVAL);
        let probe_due = self
            .lost_consumer_probe
            .next_check()
            .filter(|_| self.can_receive());
        [
            gap_due.filter(|_| self.acknowledging.is_none()),
            status_check,
            self.unsettled_deadline(),
            probe_due,
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

async fn send_acks(channel: Channel, frames: AckFrames) -> lapin::Result<()> {
    fault::point("amqp.ack.before");
    // Before the acknowledgement with `multiple`, which may cover their tags.
    for tag in frames.rejected {
        channel
            .basic_reject(tag, BasicRejectOptions { requeue: false })
            .await?;
        fault::point("amqp.ack.rejected");
    }
    let prefix = frames.prefix.into_iter().map(|tag| (tag, true));
    let singles = frames.singles.into_iter().map(|tag| (tag, false));
    let sent = try_join_all(
        prefix
            .chain(singles)
            .map(|(tag, multiple)| channel.basic_ack(tag, BasicAckOptions { multiple })),
    )
    .await;
    fault::point("amqp.ack.after");
    sent.map(drop)
}

/// All deliveries that are available without waiting, and why the consumer's stream ended, if it did:
/// the stream returns that only once.
fn take_ready(
    first: lapin::message::Delivery,
    consumer: &mut Consumer,
) -> (Vec<lapin::message::Delivery>, Option<ChannelLoss>) {
    let mut deliveries = vec![first];
    loop {
        match consumer.next().now_or_never() {
            None => return (deliveries, None),
            Some(Some(Ok(more))) => deliveries.push(more),
            Some(Some(Err(error))) => return (deliveries, Some(error.into())),
            Some(None) => return (deliveries, Some(consumer_cancelled())),
        }
    }
}

/// Why the consumer ended; `None` if it has not. Its stream has the cause, while a failed
/// acknowledgement reports only that the connection is closed.
fn consumer_error(consumer: Option<&mut Consumer>) -> Option<ChannelLoss> {
    let consumer = consumer?;
    loop {
        match consumer.next().now_or_never()?? {
            Ok(_) => {}
            Err(error) => return Some(error.into()),
        }
    }
}

fn consumer_cancelled() -> ChannelLoss {
    ChannelLoss::Broken("the broker cancelled the consumer (basic.cancel), for example because the queue was deleted or its leader moved to another node".into())
}

fn classify(error: lapin::Error, context: &SourceContext) -> ConnectError {
    let misconfigured = |problem: &str, remedy| {
        ConnectError::Misconfigured(SourceError::misconfigured(
            "queue",
            format!("`{}` {problem} ({error})", context.name),
            remedy,
        ))
    };
    match reply_code(&error) {
        Some(code::NOT_FOUND) if !is_transient_refusal(&error) => {
            misconfigured("does not exist", "create it, or choose `Topology::Declare`")
        }
        Some(code::PRECONDITION_FAILED) if stream_refusal::is_refusal(&error) => {
            ConnectError::QueueMismatch(SourceError::misconfigured(
                "queue",
                format!("`{}` is a stream ({error})", context.name),
                "consume a quorum or classic queue: a stream does not remove acknowledged messages and does not redeliver",
            ))
        }
        Some(code::ACCESS_REFUSED) => misconfigured(
            "cannot be consumed",
            "grant the user the read permission, or stop the queue's exclusive consumer",
        ),
        _ => error.into(),
    }
}
