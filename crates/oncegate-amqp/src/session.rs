//! One channel that consumes: its deliveries, its acknowledgements and what it holds back.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, try_join_all};
use futures_util::{FutureExt, StreamExt};
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
    BasicRejectOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Channel, Connection, Consumer, ErrorKind};
use oncegate_core::fault;
use oncegate_core::source::SourceError;
use tokio::time::Instant;

use crate::acks::Acks;
use crate::held::Held;
use crate::incoming::Original;
use crate::link::{self, Trouble, code, passes, reply_code};
use crate::settings::{Consumers, Settings};
use crate::topology;

/// How long what is settled beyond a gap waits for the gap to close before it is acknowledged one
/// by one.
const GAP_PATIENCE: Duration = Duration::from_millis(100);
/// How often a channel that no longer consumes is looked at.
const LOOK: Duration = Duration::from_millis(200);
/// A quorum queue applies 32 acknowledgements of a channel at a time. RabbitMQ keeps those beyond
/// in the channel, tells nobody, and forgets them when the channel closes: they would come back as
/// redeliveries.
const APPLIED_AT_ONCE: usize = 16;
/// How long a channel stays open after more acknowledgements than that.
const APPLYING: Duration = Duration::from_millis(500);

/// The consumer's argument that says how it ranks among the others of a queue.
const PRIORITY: &str = "x-priority";
/// How long nothing comes before it looks whether something stands ready: a queue may forget its
/// consumer when it moves to another node, and nobody says so.
pub(crate) const SILENCE: Duration = Duration::from_secs(3);
/// The same on a channel that was opened because of silence, until something comes: then it was not
/// forgotten, and waits behind an active consumer, say, of which nobody told it.
pub(crate) const LONG_SILENCE: Duration = Duration::from_secs(60);
/// How long connecting and preparing the queues may take: a node without its cluster accepts, and
/// answers nothing.
const OPENING: Duration = Duration::from_secs(30);

/// What a delivery leaves here until it is settled.
pub(crate) struct Carried {
    /// What a copy would need.
    pub(crate) original: Original,
    since: Instant,
}

impl Carried {
    pub(crate) fn now(original: Original) -> Self {
        Self {
            original,
            since: Instant::now(),
        }
    }
}

/// A channel from its first delivery to its end.
pub(crate) struct Session {
    pub(crate) epoch: u64,
    /// What was delivered and is not acknowledged.
    pub(crate) acks: Acks<Carried>,
    /// Released deliveries that wait for their time.
    pub(crate) held: Held,
    /// How many copies, beside the one that moves, wait for their confirmation.
    pub(crate) publishing: usize,
    connection: Arc<Connection>,
    channel: Channel,
    consumer: Option<Consumer>,
    /// How the consumer ended, if that was read along with its last deliveries.
    ended: Option<Loss>,
    acknowledging: Option<BoxFuture<'static, lapin::Result<()>>>,
    /// Rejected for the queue's own dead-letter exchange, and not sent yet.
    rejecting: Vec<u64>,
    /// How long nothing comes before it looks whether something stands ready, and when that will
    /// be.
    silence: Duration,
    look_at: Instant,
    /// Looks whether something stands ready.
    looking: Option<BoxFuture<'static, lapin::Result<u32>>>,
    /// Whether the last look found something that had not come.
    suspicious: bool,
    queue: ShortString,
    /// Whether silence means anything: behind a single active consumer the others wait in silence,
    /// until one of them is handed something.
    listens: bool,
    consumers: Consumers,
    /// What is to become of the order when it ends.
    ending: Ending,
    /// Whether nothing more is to be taken in.
    stopped: bool,
    /// How long a delivery may stand open.
    patience: Duration,
    gap_since: Option<Instant>,
    /// The latest acknowledgements that left soon after one another: how many, and when the last
    /// one did.
    burst: Option<(usize, Instant)>,
    pub(crate) prefetch: usize,
}

/// What happened on a channel.
pub(crate) enum Happened {
    /// Deliveries came in.
    Delivered(Vec<lapin::message::Delivery>),
    /// Acknowledgements were sent, or a time has come.
    Due,
    /// The channel is gone.
    Lost(Loss),
}

/// Why a channel is gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    Broken(String),
    /// Nothing came, though something stood ready.
    Silent(String),
    /// The client cannot read what the broker sent.
    Unreadable(String),
}

impl From<lapin::Error> for Loss {
    fn from(error: lapin::Error) -> Self {
        match error.kind() {
            ErrorKind::ParsingError(_) => Self::Unreadable(error.to_string()),
            _ => Self::Broken(error.to_string()),
        }
    }
}

/// How a channel ends that was told to stop.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// It cancels its consumer, and hands back what was not settled.
    HandsBack,
    /// It cancels its consumer and closes: what it holds goes back in the order of the queue. For
    /// many that are handed back by one frame RabbitMQ 3 does not promise that.
    Closes,
    /// It consumes until it closes, and what still comes lies there unhandled: RabbitMQ activates
    /// the next consumer as soon as this one is cancelled, though what this one gives back comes
    /// before.
    StaysActive,
}

impl Ending {
    fn of(settings: &Settings) -> Self {
        match settings.consumers {
            _ if !settings.keeps_order() => Self::HandsBack,
            Consumers::Competing => Self::Closes,
            Consumers::SingleActive => Self::StaysActive,
        }
    }
}

/// Whether acknowledgements may wait for a gap to close.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gaps {
    Wait,
    Ignore,
}

impl Session {
    /// Connects, prepares the queues and consumes.
    pub(crate) async fn open(
        settings: &Settings,
        epoch: u64,
        prefetch: u16,
        silence: Duration,
    ) -> Result<Self, Trouble> {
        let connection = link::connect(settings, "consumes").await?;
        let opening = tokio::time::timeout(
            OPENING,
            Self::consume(connection, settings, epoch, prefetch, silence),
        )
        .await;
        opening
            .unwrap_or_else(|_| {
                Err(Trouble::Passing(
                    format!("the broker did not prepare the queues within {OPENING:?}").into(),
                ))
            })
            .inspect_err(|_| {
                // The node answers, and does not serve.
                settings.access.nodes.advance();
            })
    }

    async fn consume(
        connection: Connection,
        settings: &Settings,
        epoch: u64,
        prefetch: u16,
        silence: Duration,
    ) -> Result<Self, Trouble> {
        topology::prepare(&connection, settings).await?;
        let channel = connection.create_channel().await?;
        // Before consuming: without a prefetch the broker sends all it has.
        channel
            .basic_qos(prefetch, BasicQosOptions::default())
            .await?;
        let mut arguments = FieldTable::default();
        // The usual priority. A stream knows none and refuses it; by nothing else would it be told
        // from a queue.
        arguments.insert(PRIORITY.into(), AMQPValue::LongInt(0));
        fault::point("amqp.consume.before");
        let consuming = channel.basic_consume(
            settings.queue.clone(),
            "".into(),
            BasicConsumeOptions::default(),
            arguments,
        );
        let consumer = consuming.await.map_err(|error| refusal(error, settings))?;
        fault::point("amqp.consume.after");
        Ok(Self {
            epoch,
            acks: Acks::new(),
            held: Held::default(),
            publishing: 0,
            connection: Arc::new(connection),
            channel,
            consumer: Some(consumer),
            ended: None,
            acknowledging: None,
            rejecting: Vec::new(),
            silence,
            look_at: Instant::now() + silence,
            looking: None,
            suspicious: false,
            queue: settings.queue.clone(),
            listens: settings.consumers == Consumers::Competing,
            consumers: settings.consumers,
            ending: Ending::of(settings),
            stopped: false,
            patience: settings.patience(),
            gap_since: None,
            burst: None,
            prefetch: usize::from(prefetch),
        })
    }

    /// Waits until something happens. Cancel-safe.
    pub(crate) async fn happens(&mut self) -> Happened {
        let wake = self.wake();
        let Self {
            acknowledging,
            consumer,
            ended,
            looking,
            ..
        } = self;
        if let Some(problem) = ended.take() {
            return Happened::Lost(problem);
        }
        tokio::select! {
            biased;
            sent = async { acknowledging.as_mut().expect("the branch is guarded").await }, if acknowledging.is_some() => {
                *acknowledging = None;
                match sent {
                    Ok(()) => Happened::Due,
                    Err(error) => Happened::Lost(last_word(consumer.as_mut()).unwrap_or_else(|| error.into())),
                }
            }
            item = async { consumer.as_mut().expect("the branch is guarded").next().await }, if consumer.is_some() => match item {
                Some(Ok(first)) => {
                    let (all, end) = drain(first, consumer.as_mut().expect("the branch is guarded"));
                    *ended = end;
                    (self.silence, self.listens) = (SILENCE, true);
                    (self.look_at, self.suspicious) = (Instant::now() + SILENCE, false);
                    Happened::Delivered(all)
                }
                Some(Err(error)) => Happened::Lost(error.into()),
                None => Happened::Lost(cancelled()),
            },
            found = async { looking.as_mut().expect("the branch is guarded").await }, if looking.is_some() => {
                *looking = None;
                match found {
                    Ok(ready @ 1..) if self.has_room() && self.suspicious => {
                        Happened::Lost(Loss::Silent(format!("nothing comes, though {ready} messages stand ready")))
                    }
                    // It may be on its way: one more look, soon.
                    Ok(1..) => {
                        self.suspicious = true;
                        self.look_at = Instant::now() + LOOK;
                        Happened::Due
                    }
                    _ => Happened::Due,
                }
            }
            () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                if !self.channel.status().connected() {
                    Happened::Lost(Loss::Broken("the channel is closed".into()))
                } else if self.timeout().is_some_and(|timeout| timeout <= Instant::now()) {
                    let problem = format!("a delivery was not settled within {:?}, and the broker would soon close the channel for it", self.patience);
                    Happened::Lost(Loss::Broken(problem))
                } else {
                    self.look();
                    Happened::Due
                }
            }
        }
    }

    /// Sends the acknowledgements that are due: the settled prefix at once; what lies beyond a gap
    /// when it is much, or when the gap has stood open for a while. One flush at a time, so that
    /// they leave in order.
    pub(crate) fn flush(&mut self, gaps: Gaps) {
        if self.acknowledging.is_some() || (self.acks.settled() == 0 && self.rejecting.is_empty()) {
            return;
        }
        let prefix = self.acks.take_prefix();
        if prefix.is_some() {
            self.gap_since = None;
        }
        let beyond = self.acks.settled();
        let overdue = gaps == Gaps::Ignore
            || beyond > self.prefetch / 4
            || self
                .gap_since
                .is_some_and(|since| since.elapsed() >= GAP_PATIENCE);
        let singles = if beyond > 0 && overdue {
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
        let now = Instant::now();
        let before = self
            .burst
            .filter(|(_, last)| now < *last + APPLYING)
            .map_or(0, |(count, _)| count);
        self.burst = Some((
            before + rejected.len() + usize::from(prefix.is_some()) + singles.len(),
            now,
        ));
        let channel = self.channel.clone();
        self.acknowledging = Some(Box::pin(async move {
            fault::point("amqp.ack.before");
            // First, and one after the other: the prefix covers their tags.
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

    /// Leaves a delivery to the queue's own dead-letter exchange; `false` if it was not open.
    pub(crate) fn reject(&mut self, tag: u64) -> bool {
        let is_open = self.acks.reject(tag).is_some();
        if is_open {
            self.rejecting.push(tag);
        }
        is_open
    }

    /// The most bytes of a frame, as was agreed on; 0 if there is no limit.
    pub(crate) fn frame_max(&self) -> u32 {
        self.connection.configuration().frame_max()
    }

    /// Tells the broker to send no more, unless that would cost the order. What came in before may
    /// still be settled.
    pub(crate) async fn stop(&mut self) {
        self.stopped = true;
        if self.ending != Ending::StaysActive {
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
            tracing::debug!("the broker did not confirm that it sends no more");
        }
        fault::point("amqp.cancel.after");
    }

    /// Whether acknowledgements are on their way.
    pub(crate) fn acknowledges(&self) -> bool {
        self.acknowledging.is_some()
    }

    /// Whether nothing that was settled is still on its way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.publishing == 0
            && self.acknowledging.is_none()
            && self.rejecting.is_empty()
            && self.acks.settled() == 0
    }

    /// Whether it holds no delivery.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_quiet() && self.held.is_empty() && self.acks.is_empty()
    }

    /// Closes the channel and the connection: the broker takes back what was not acknowledged.
    pub(crate) async fn close(mut self, patience: Duration) {
        self.acknowledging = None;
        if let Some((_, last)) = self.burst.filter(|(count, _)| *count > APPLIED_AT_ONCE)
            && self.channel.status().connected()
        {
            tokio::time::sleep_until(last + APPLYING).await;
        }
        // Behind a single active consumer that was not stopped, what follows would overtake what is
        // handed back.
        let hands_back = self.ending == Ending::HandsBack
            && (self.stopped || self.consumers == Consumers::Competing);
        if hands_back && !self.acks.is_empty() && self.channel.status().connected() {
            let _ = tokio::time::timeout(patience, self.hand_back()).await;
        }
        let _ = tokio::time::timeout(patience, self.channel.close(200, "OK".into())).await;
        link::close(&self.connection, patience).await;
    }

    /// Gives back what was not settled, in a way that a broker which counts failed deliveries
    /// understands (RabbitMQ does from 4.3 on): what failed and waits is rejected, the rest was
    /// only handed over. Closing the channel would count for all.
    async fn hand_back(&mut self) -> lapin::Result<()> {
        // Where it was not stopped: what is given back would come again, and count when the channel
        // closes.
        self.cancel().await;
        fault::point("amqp.back.before");
        let mut rejected = 0;
        for (_, tag) in self.held.take_all().0.into_keys() {
            if self.acks.reject(tag).is_some() {
                rejected += 1;
                self.channel
                    .basic_reject(tag, BasicRejectOptions { requeue: true })
                    .await?;
                fault::point("amqp.back.rejected");
            }
        }
        // 0 is all that is left.
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
        if rejected > APPLIED_AT_ONCE {
            tokio::time::sleep(APPLYING).await;
        }
        Ok(())
    }

    /// Looks whether something stands ready, if nothing came for long though it could.
    fn look(&mut self) {
        if self.silent().is_none_or(|silent| silent > Instant::now()) {
            return;
        }
        self.look_at = Instant::now() + self.silence;
        let (connection, queue) = (Arc::clone(&self.connection), self.queue.clone());
        self.looking = Some(Box::pin(async move {
            let channel = connection.create_channel().await?;
            let options = QueueDeclareOptions {
                passive: true,
                ..QueueDeclareOptions::default()
            };
            let found = channel
                .queue_declare(queue, options, FieldTable::default())
                .await?;
            channel.close(200, "OK".into()).await?;
            Ok(found.message_count())
        }));
    }

    /// When nothing will have come for long, though nothing that it holds keeps the broker from
    /// sending more.
    fn silent(&self) -> Option<Instant> {
        (self.listens
            && !self.stopped
            && self.consumer.is_some()
            && self.looking.is_none()
            && self.has_room())
        .then_some(self.look_at)
    }

    /// Whether the broker may send more.
    fn has_room(&self) -> bool {
        self.acks.unacked() < self.prefetch
    }

    /// When the channel is given up for the delivery that has stood open for longest.
    fn timeout(&self) -> Option<Instant> {
        self.acks.oldest()?.since.checked_add(self.patience)
    }

    fn wake(&self) -> Option<Instant> {
        let gap = self
            .gap_since
            .filter(|_| self.acknowledging.is_none())
            .map(|since| since + GAP_PATIENCE);
        let look = self.consumer.is_none().then(|| Instant::now() + LOOK);
        [
            self.held.next_due(),
            gap,
            look,
            self.timeout(),
            self.silent(),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

/// All that is there without waiting, and the end if it comes right behind: the stream says it
/// once.
fn drain(
    first: lapin::message::Delivery,
    consumer: &mut Consumer,
) -> (Vec<lapin::message::Delivery>, Option<Loss>) {
    let mut all = vec![first];
    loop {
        match consumer.next().now_or_never() {
            None => return (all, None),
            Some(Some(Ok(more))) => all.push(more),
            Some(Some(Err(error))) => return (all, Some(error.into())),
            Some(None) => return (all, Some(cancelled())),
        }
    }
}

/// Why the consumer ended, if it did: an acknowledgement only says that the connection is gone.
fn last_word(consumer: Option<&mut Consumer>) -> Option<Loss> {
    let consumer = consumer?;
    loop {
        match consumer.next().now_or_never()?? {
            Ok(_) => {}
            Err(error) => return Some(error.into()),
        }
    }
}

fn cancelled() -> Loss {
    Loss::Broken("the broker cancelled the consumer; was its queue deleted?".into())
}

fn refusal(error: lapin::Error, settings: &Settings) -> Trouble {
    let wrong = |problem: &str, remedy| {
        Trouble::Wrong(SourceError::misconfigured(
            "queue",
            format!("`{}` {problem} ({error})", settings.name),
            remedy,
        ))
    };
    match reply_code(&error) {
        Some(code::NOT_FOUND) if !passes(&error) => wrong(
            "does not exist",
            "create it, or let `Topology::Declare` do so",
        ),
        Some(code::PRECONDITION_FAILED) if error.to_string().contains(PRIORITY) => {
            Trouble::Mismatch(SourceError::misconfigured(
                "queue",
                format!("`{}` is a stream ({error})", settings.name),
                "consume a quorum or a classic queue: a stream keeps its messages whatever is acknowledged, and hands none of them out twice",
            ))
        }
        Some(code::ACCESS_REFUSED) => wrong(
            "may not be read",
            "give the user the right to read it, or end its exclusive consumer",
        ),
        _ => error.into(),
    }
}
