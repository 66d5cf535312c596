//! A consuming channel: its deliveries, its acknowledgements and its delayed deliveries.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, try_join_all};
use futures_util::{FutureExt, StreamExt};
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
    BasicRejectOptions,
};
use lapin::{Channel, Connection, Consumer, ErrorKind};
use oncegate_core::fault;
use oncegate_core::source::SourceError;
use tokio::time::Instant;

use crate::ack_ledger::AckLedger;
use crate::client::close_delay::CloseDelay;
use crate::client::lost_consumer_probe::LostConsumerProbe;
use crate::client::stream_refusal;
use crate::connector::{self, ConnectError, code, is_transient_refusal, reply_code};
use crate::delay_buffer::DelayBuffer;
use crate::incoming::OriginalProperties;
use crate::queue_settings::{ConsumerMode, QueueSettings};
use crate::topology;

/// How long settled deliveries behind an unsettled one (the gap) wait to be acknowledged together with
/// it. Then they are acknowledged one by one.
const GAP_TIMEOUT: Duration = Duration::from_millis(100);
/// How often the status of a channel without a consumer is checked.
const STATUS_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// How long declaring the queues and consuming may take. A node that has lost its cluster accepts
/// connections and does not answer.
const OPEN_TIMEOUT: Duration = Duration::from_secs(30);

/// The data that the session keeps for an unsettled delivery.
pub(crate) struct UnsettledDelivery {
    /// The parts that a copy needs.
    pub(crate) original: OriginalProperties,
    since: Instant,
}

impl UnsettledDelivery {
    pub(crate) fn new(original: OriginalProperties) -> Self {
        Self {
            original,
            since: Instant::now(),
        }
    }
}

/// A connection and its consuming channel, from `basic.consume` until it is closed or lost.
pub(crate) struct ConsumerSession {
    /// The number of the channel: 1 for the first one of a source. Delivery tags of another channel
    /// mean other deliveries.
    pub(crate) epoch: u64,
    pub(crate) acks: AckLedger<UnsettledDelivery>,
    pub(crate) delayed: DelayBuffer,
    /// How many copies wait for their confirms, without a delivery that moves to a delay queue.
    pub(crate) publishing: usize,
    connection: Arc<Connection>,
    channel: Channel,
    consumer: Option<Consumer>,
    /// Why the consumer ended, if that was found while its last deliveries were read.
    consumer_loss: Option<ChannelLoss>,
    /// The acknowledgements that are being sent.
    acknowledging: Option<BoxFuture<'static, lapin::Result<()>>>,
    /// Tags to reject to the queue's own dead-letter exchange.
    rejecting: Vec<u64>,
    lost_consumer_probe: LostConsumerProbe,
    consumers: ConsumerMode,
    close_mode: CloseMode,
    /// Whether [`stop`](Self::stop) was called.
    is_stopped: bool,
    /// How long a delivery may be unsettled.
    unsettled_timeout: Duration,
    /// Since when there are settled deliveries behind an unsettled one.
    gap_since: Option<Instant>,
    close_delay: CloseDelay,
    pub(crate) prefetch: usize,
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
    /// It was closed, or has to be closed.
    Broken(String),
    /// The [`LostConsumerProbe`] found ready messages in the queue, but the consumer received none.
    NoDeliveries(String),
    /// The client cannot parse a frame of the broker.
    UnparsableFrame(String),
    /// The driver replaces it by a channel with the configured prefetch.
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

/// How the session is closed, which decides where unacknowledged messages are requeued.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CloseMode {
    /// Cancels the consumer and requeues unsettled deliveries by `basic.nack`.
    Requeue,
    /// Cancels the consumer and closes the channel: RabbitMQ requeues its messages in the order of
    /// the queue, which it does not guarantee for one `basic.nack` of many; see `client`.
    CloseOnly,
    /// Consumes until the channel closes, and handles no more deliveries. RabbitMQ activates the
    /// next consumer as soon as the active one is cancelled, before it requeues its messages.
    StayActive,
}

impl CloseMode {
    fn for_settings(settings: &QueueSettings) -> Self {
        match settings.consumers {
            _ if !settings.preserves_order() => Self::Requeue,
            ConsumerMode::Competing => Self::CloseOnly,
            ConsumerMode::SingleActive => Self::StayActive,
        }
    }
}

/// When settled deliveries behind an unsettled one are acknowledged.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FlushMode {
    /// Together with the unsettled one, if that is settled soon; otherwise one by one.
    Batched,
    /// At once, one by one.
    Immediate,
}

impl ConsumerSession {
    /// Connects, declares or checks the queues, and consumes. `probe_interval` is the interval of the
    /// [`LostConsumerProbe`] until the first delivery.
    pub(crate) async fn open(
        settings: &QueueSettings,
        epoch: u64,
        prefetch: u16,
        probe_interval: Duration,
    ) -> Result<Self, ConnectError> {
        let connection = connector::connect(settings, "consumes").await?;
        let opening = tokio::time::timeout(
            OPEN_TIMEOUT,
            Self::consume(connection, settings, epoch, prefetch, probe_interval),
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
                settings.connector.nodes.advance();
            })
    }

    async fn consume(
        connection: Connection,
        settings: &QueueSettings,
        epoch: u64,
        prefetch: u16,
        probe_interval: Duration,
    ) -> Result<Self, ConnectError> {
        topology::prepare(&connection, settings).await?;
        let channel = connection.create_channel().await?;
        // Before `basic.consume`: without a prefetch the broker sends the whole queue.
        channel
            .basic_qos(prefetch, BasicQosOptions::default())
            .await?;
        fault::point("amqp.consume.before");
        let consuming = channel.basic_consume(
            settings.queue.clone(),
            "".into(),
            BasicConsumeOptions::default(),
            stream_refusal::consumer_arguments(),
        );
        let consumer = consuming.await.map_err(|error| classify(error, settings))?;
        fault::point("amqp.consume.after");
        let connection = Arc::new(connection);
        let lost_consumer_probe = LostConsumerProbe::new(
            Arc::clone(&connection),
            settings.queue.clone(),
            probe_interval,
            settings.consumers == ConsumerMode::Competing,
        );
        Ok(Self {
            epoch,
            acks: AckLedger::new(),
            delayed: DelayBuffer::default(),
            publishing: 0,
            connection,
            channel,
            consumer: Some(consumer),
            consumer_loss: None,
            acknowledging: None,
            rejecting: Vec::new(),
            lost_consumer_probe,
            consumers: settings.consumers,
            close_mode: CloseMode::for_settings(settings),
            is_stopped: false,
            unsettled_timeout: settings.unsettled_timeout(),
            gap_since: None,
            close_delay: CloseDelay::default(),
            prefetch: usize::from(prefetch),
        })
    }

    /// Waits for the next event. Cancel-safe.
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
                    let (deliveries, loss) = drain_ready(first, consumer.as_mut().expect("the delivery came from this consumer"));
                    *consumer_loss = loss;
                    lost_consumer_probe.delivered();
                    SessionEvent::Delivered(deliveries)
                }
                Some(Err(error)) => SessionEvent::Lost(error.into()),
                None => SessionEvent::Lost(consumer_cancelled()),
            },
            ready = lost_consumer_probe.ready_messages(), if lost_consumer_probe.is_checking() => {
                let has_room = self.has_room();
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

    /// Sends the acknowledgements that are due. The settled prefix is due at once; settled deliveries
    /// behind an unsettled one are due with [`FlushMode::Immediate`], after [`GAP_TIMEOUT`], or if they
    /// exceed a quarter of the prefetch. One flush runs at a time, so that they are sent in order.
    pub(crate) fn flush(&mut self, mode: FlushMode) {
        if self.acknowledging.is_some() || (self.acks.settled() == 0 && self.rejecting.is_empty()) {
            return;
        }
        let prefix = self.acks.take_prefix();
        if prefix.is_some() {
            self.gap_since = None;
        }
        let behind_gap = self.acks.settled();
        let is_overdue = mode == FlushMode::Immediate
            || behind_gap > self.prefetch / 4
            || self
                .gap_since
                .is_some_and(|since| since.elapsed() >= GAP_TIMEOUT);
        let singles = if behind_gap > 0 && is_overdue {
            self.acks.take_singles()
        } else {
            Vec::new()
        };
        self.gap_since =
            (self.acks.settled() > 0).then(|| self.gap_since.unwrap_or_else(Instant::now));
        if prefix.is_none() && singles.is_empty() && self.rejecting.is_empty() {
            return;
        }
        let rejected = std::mem::take(&mut self.rejecting);
        self.close_delay
            .acks_sent(rejected.len() + usize::from(prefix.is_some()) + singles.len());
        let channel = self.channel.clone();
        self.acknowledging = Some(Box::pin(async move {
            fault::point("amqp.ack.before");
            // Rejected before the prefix is acknowledged, because the prefix may cover their tags.
            for tag in rejected {
                channel
                    .basic_reject(tag, BasicRejectOptions { requeue: false })
                    .await?;
                fault::point("amqp.ack.rejected");
            }
            let frames = prefix
                .into_iter()
                .map(|tag| (tag, true))
                .chain(singles.into_iter().map(|tag| (tag, false)));
            let sent = try_join_all(
                frames.map(|(tag, multiple)| channel.basic_ack(tag, BasicAckOptions { multiple })),
            )
            .await;
            fault::point("amqp.ack.after");
            sent.map(drop)
        }));
    }

    /// Rejects a delivery to the queue's own dead-letter exchange; `false` if it is not unsettled.
    pub(crate) fn reject(&mut self, tag: u64) -> bool {
        let is_unsettled = self.acks.reject(tag).is_some();
        if is_unsettled {
            self.rejecting.push(tag);
        }
        is_unsettled
    }

    /// The negotiated maximum size of a frame in bytes; 0 if unlimited.
    pub(crate) fn frame_max(&self) -> u32 {
        self.connection.configuration().frame_max()
    }

    /// Cancels the consumer, unless [`CloseMode::StayActive`]. Deliveries may still be settled.
    pub(crate) async fn stop(&mut self) {
        self.is_stopped = true;
        if self.close_mode != CloseMode::StayActive {
            self.cancel().await;
        }
    }

    async fn cancel(&mut self) {
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
        self.publishing == 0
            && self.acknowledging.is_none()
            && self.rejecting.is_empty()
            && self.acks.settled() == 0
    }

    /// Whether no delivery is unacknowledged.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_flushed() && self.delayed.is_empty() && self.acks.is_empty()
    }

    /// Closes the channel and the connection. The broker requeues unacknowledged messages.
    pub(crate) async fn close(mut self, timeout: Duration) {
        self.acknowledging = None;
        if self.channel.status().connected() {
            self.close_delay.wait().await;
        }
        // A single active consumer that was not stopped must not be cancelled: the next consumer would
        // receive later messages before the requeued ones.
        let requeues = self.close_mode == CloseMode::Requeue
            && (self.is_stopped || self.consumers == ConsumerMode::Competing);
        if requeues && !self.acks.is_empty() && self.channel.status().connected() {
            let _ = tokio::time::timeout(timeout, self.requeue_unsettled()).await;
        }
        let _ = tokio::time::timeout(timeout, self.channel.close(200, "OK".into())).await;
        connector::close(&self.connection, timeout).await;
    }

    /// Requeues unsettled deliveries: released ones, which failed, by `basic.reject`, and all others by
    /// `basic.nack`. Since RabbitMQ 4.3 the former count towards the delivery limit and the latter do
    /// not; closing the channel would count for all.
    async fn requeue_unsettled(&mut self) -> lapin::Result<()> {
        // First, because requeued messages would be delivered to this consumer again, and closing the
        // channel would count them.
        self.cancel().await;
        fault::point("amqp.back.before");
        let mut rejected = 0;
        for (_, tag) in self.delayed.take_all().0.into_keys() {
            if self.acks.reject(tag).is_some() {
                rejected += 1;
                self.channel
                    .basic_reject(tag, BasicRejectOptions { requeue: true })
                    .await?;
                fault::point("amqp.back.rejected");
            }
        }
        // Tag 0 with `multiple` means all unacknowledged deliveries.
        self.channel
            .basic_nack(
                0,
                BasicNackOptions {
                    multiple: true,
                    requeue: true,
                },
            )
            .await?;
        fault::point("amqp.back.after");
        let mut close_delay = CloseDelay::default();
        close_delay.acks_sent(rejected);
        close_delay.wait().await;
        Ok(())
    }

    /// Whether the consumer would receive a ready message: it is consuming, and the prefetch has room.
    fn can_receive(&self) -> bool {
        !self.is_stopped && self.consumer.is_some() && self.has_room()
    }

    /// Whether the prefetch has room.
    fn has_room(&self) -> bool {
        self.acks.unacked() < self.prefetch
    }

    /// When the channel is closed because of the delivery that has been unsettled for longest.
    fn unsettled_deadline(&self) -> Option<Instant> {
        self.acks
            .oldest_unsettled()?
            .since
            .checked_add(self.unsettled_timeout)
    }

    /// When the next timer of [`next_event`](Self::next_event) expires.
    fn next_wake(&self) -> Option<Instant> {
        let gap = self
            .gap_since
            .filter(|_| self.acknowledging.is_none())
            .map(|since| since + GAP_TIMEOUT);
        let status_check = self
            .consumer
            .is_none()
            .then(|| Instant::now() + STATUS_CHECK_INTERVAL);
        let probe_due = self
            .lost_consumer_probe
            .next_check()
            .filter(|_| self.can_receive());
        [
            self.delayed.next_due(),
            gap,
            status_check,
            self.unsettled_deadline(),
            probe_due,
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

/// All deliveries that are available without waiting, and why the consumer's stream ended, if it did:
/// the stream returns that only once.
fn drain_ready(
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

fn classify(error: lapin::Error, settings: &QueueSettings) -> ConnectError {
    let misconfigured = |problem: &str, remedy| {
        ConnectError::Misconfigured(SourceError::misconfigured(
            "queue",
            format!("`{}` {problem} ({error})", settings.name),
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
                format!("`{}` is a stream ({error})", settings.name),
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
