//! The task behind the source: it keeps a channel open and executes settlements.
//!
//! It runs on a thread of its own, which no handler can block, because the connection's heartbeats
//! depend on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Delivery, FailureHistory, Settled, SourceError};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::backoff::Backoff;
use crate::client::lost_consumer_probe::{LONG_PROBE_INTERVAL, PROBE_INTERVAL};
use crate::incoming;
use crate::incoming_queue::IncomingSender;
use crate::message_copy::{MessageCopy, PublishCancellation};
use crate::open_session::{self, MAX_RECONNECT_PAUSE};
use crate::publisher::{ConfirmedCopy, CopyPublisher};
use crate::queue_settings::QueueSettings;
use crate::session::{ChannelLoss, ConsumerSession, FlushMode, SessionEvent, UnsettledDelivery};
use crate::settings::Rejects;

/// The longest delay that a released delivery waits in memory, if there are delay queues.
const MAX_IN_MEMORY_DELAY: Duration = Duration::from_secs(5);
/// The shortest delay of a release. Without it, immediate releases would redeliver in a busy loop.
const MIN_RELEASE_DELAY: Duration = Duration::from_millis(20);
/// While a delayed delivery is unacknowledged, later ones cannot be acknowledged together (`multiple`).
/// After this many single acknowledgements it moves to a delay queue. Its copy costs the broker about
/// as much as a hundred single acknowledgements.
const MAX_SINGLE_ACKS: usize = 256;
/// A channel that was open for longer than this resets the backoff. One that fails at once must not.
const STABLE_AFTER: Duration = Duration::from_secs(2);
/// A channel in [`PrefetchMode::OneByOne`] that was open for longer than this resets the backoff.
const STABLE_ONE_BY_ONE_AFTER: Duration = Duration::from_secs(10);
/// How long a channel in [`PrefetchMode::OneByOne`] is open, at least, before the prefetch is
/// restored.
const MIN_ONE_BY_ONE_TIME: Duration = Duration::from_secs(300);
/// The longest pause before reconnecting after a message that the client cannot parse.
const MAX_UNPARSABLE_PAUSE: Duration = Duration::from_secs(30);
/// How long sending the last acknowledgements may take after the deadline.
const LAST_ACK_TIMEOUT: Duration = Duration::from_millis(100);
/// How long closing a channel or a connection may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// A command from the source.
pub(crate) enum SourceCommand {
    /// Execute these settlements.
    Settle(Vec<Settled>),
    /// Accept no more deliveries.
    Stop,
    /// Finish the pending settlements, then close.
    Close {
        /// When to close even if settlements are pending.
        deadline: Instant,
        /// Receives the outcome.
        done: oneshot::Sender<Result<(), SourceError>>,
    },
}

/// The driver's ends of the channels to the source.
pub(crate) struct DriverEndpoints {
    pub(crate) incoming_queue: IncomingSender,
    pub(crate) commands: UnboundedReceiver<SourceCommand>,
    /// The epoch of the open channel ([`ConsumerSession::epoch`]); 0 while no channel is open.
    pub(crate) open_epoch: Arc<AtomicU64>,
}

/// Opens the first channel, reports the outcome, and runs until the source is closed or dropped.
pub(crate) async fn run(
    settings: Arc<QueueSettings>,
    endpoints: DriverEndpoints,
    mut opened: oneshot::Sender<Result<(), SourceError>>,
) {
    let first = tokio::select! {
        first = open_session::open_first(&settings) => first,
        () = opened.closed() => return,
    };
    let session = match first {
        Ok(session) => session,
        Err(error) => return drop(opened.send(Err(error))),
    };
    endpoints.open_epoch.store(session.epoch, Ordering::Release);
    let publisher = CopyPublisher::start(Arc::clone(&settings), Arc::clone(&endpoints.open_epoch));
    let driver = AmqpDriver {
        epoch: session.epoch,
        session: SessionState::Open(Box::new(session)),
        opened_at: Instant::now(),
        backoff: Backoff::up_to(MAX_RECONNECT_PAUSE),
        prefetch_mode: PrefetchMode::Normal,
        intake: IntakeState::Open,
        closing: None,
        settings,
        endpoints,
        publisher,
    };
    let _ = opened.send(Ok(()));
    let settings = Arc::clone(&driver.settings);
    driver.run_loop().await;
    // A closed source is not unavailable.
    settings.metrics.clear_unavailable();
}

struct AmqpDriver {
    settings: Arc<QueueSettings>,
    endpoints: DriverEndpoints,
    publisher: CopyPublisher,
    session: SessionState,
    /// The epoch of the channel that is open, or was opened last.
    epoch: u64,
    /// When that channel was opened.
    opened_at: Instant,
    /// For reconnecting.
    backoff: Backoff,
    prefetch_mode: PrefetchMode,
    intake: IntakeState,
    closing: Option<CloseRequest>,
}

enum SessionState {
    Open(Box<ConsumerSession>),
    Opening(BoxFuture<'static, ConsumerSession>),
    Closed,
}

/// The prefetch that the driver requests.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PrefetchMode {
    Normal,
    /// A prefetch of 1 after a message that the client could not parse: such a message closes the
    /// connection, and other unacknowledged deliveries would be redelivered each time.
    OneByOne,
}

impl PrefetchMode {
    fn prefetch(self, settings: &QueueSettings) -> u16 {
        match self {
            Self::Normal => settings.prefetch,
            Self::OneByOne => 1,
        }
    }
}

/// Whether deliveries of the broker are passed to the source.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IntakeState {
    Open,
    Stopped,
}

/// Why the loop of the driver ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoopExit {
    /// All settlements are finished, or the source was dropped.
    Finished,
    DeadlineExceeded,
    /// The publisher task ended, which only a bug can cause.
    PublisherEnded,
}

struct CloseRequest {
    deadline: Instant,
    done: oneshot::Sender<Result<(), SourceError>>,
}

enum DriverEvent {
    SessionOpened(Box<ConsumerSession>),
    Session(SessionEvent),
}

impl SessionState {
    async fn next(&mut self) -> DriverEvent {
        match self {
            Self::Open(session) => DriverEvent::Session(session.next_event().await),
            Self::Opening(opening) => DriverEvent::SessionOpened(Box::new(opening.await)),
            Self::Closed => std::future::pending().await,
        }
    }
}

impl AmqpDriver {
    async fn run_loop(mut self) {
        let exit = loop {
            if self.is_finished() {
                break LoopExit::Finished;
            }
            let deadline = self
                .closing
                .as_ref()
                .map_or_else(Instant::now, |closing| closing.deadline);
            tokio::select! {
                biased;
                command = self.endpoints.commands.recv(), if self.closing.is_none() => match command {
                    Some(command) => self.execute(command).await,
                    None => break LoopExit::Finished,
                },
                confirmed = self.publisher.confirmed() => match confirmed {
                    Some(confirmed) => self.confirmed(&confirmed),
                    None => {
                        tracing::error!(
                            queue = &*self.settings.name,
                            "the publisher task ended, which is a bug in oncegate; closing the source; restart the consumer and report this"
                        );
                        break LoopExit::PublisherEnded;
                    }
                },
                event = self.session.next() => self.handle_event(event),
                () = tokio::time::sleep_until(deadline), if self.closing.is_some() => break LoopExit::DeadlineExceeded,
            }
            if self.can_restore_prefetch() {
                self.prefetch_mode = PrefetchMode::Normal;
                self.channel_lost(&ChannelLoss::ReplacedToRestorePrefetch);
            }
            if let SessionState::Open(session) = &mut self.session {
                session.flush(if self.closing.is_some() {
                    FlushMode::Immediate
                } else {
                    FlushMode::Batched
                });
                self.settings.metrics.set_unacked(session.acks.unacked());
            }
            self.move_blocking_delivery();
        };
        self.shut_down(exit).await;
    }

    async fn execute(&mut self, command: SourceCommand) {
        match command {
            SourceCommand::Settle(batch) => {
                batch.into_iter().for_each(|settled| self.settle(settled))
            }
            SourceCommand::Stop => self.stop().await,
            SourceCommand::Close { deadline, done } => {
                self.stop().await;
                self.closing = Some(CloseRequest { deadline, done });
            }
        }
    }

    fn settle(&mut self, settled: Settled) {
        let Settled {
            mut delivery,
            settlement,
            failure_history,
        } = settled;
        let tag = delivery.receipt.position;
        let session = match &mut self.session {
            SessionState::Open(session) if session.epoch == delivery.receipt.epoch => session,
            _ => return drop_stale_settlement(&self.settings, tag),
        };
        if let Settlement::Accept(_) = settlement {
            if session.acks.settle(tag).is_none() {
                ignore_repeated_settlement(&self.settings, tag);
            }
            return;
        }
        match settlement {
            Settlement::Accept(_) => {}
            Settlement::Reject(reason) => {
                self.reject(delivery, &reason, failure_history.as_deref())
            }
            // Released while the source stops: closing the channel requeues the delivery.
            Settlement::Release { after, .. }
                if after.is_zero() && self.intake == IntakeState::Stopped => {}
            Settlement::Release { after, failures } => {
                delivery.failures = failures;
                self.delay(delivery, after);
            }
        }
    }

    /// Sends a delivery to the dead letters or the in-doubt queue.
    fn reject(
        &mut self,
        delivery: Delivery,
        reason: &Reason,
        failure_history: Option<&FailureHistory>,
    ) {
        let SessionState::Open(session) = &mut self.session else {
            return;
        };
        let tag = delivery.receipt.position;
        if self.settings.rejects == Rejects::ByQueue && !reason.is_in_doubt() {
            if !session.reject(tag) {
                ignore_repeated_settlement(&self.settings, tag);
            }
            return;
        }
        let Some(unsettled) = session.acks.context(tag) else {
            return ignore_repeated_settlement(&self.settings, tag);
        };
        self.publisher.publish(MessageCopy::rejected(
            &delivery,
            reason,
            failure_history,
            &unsettled.original,
            &self.settings,
        ));
        session.publishing += 1;
    }

    /// Delays a delivery in memory, for at most half of the consumer timeout; or in a delay queue, if
    /// there are delay queues and the delay is long, half of the prefetch is already delayed in memory,
    /// or the source stops.
    fn delay(&mut self, delivery: Delivery, after: Duration) {
        let SessionState::Open(session) = &mut self.session else {
            return;
        };
        let tag = delivery.receipt.position;
        let Some(unsettled) = session.acks.context(tag) else {
            return ignore_repeated_settlement(&self.settings, tag);
        };
        let has_delay_queues = self.settings.uses_delay_queues();
        let fills_prefetch = session.delayed.len() >= session.prefetch / 2;
        if has_delay_queues
            && (after > MAX_IN_MEMORY_DELAY
                || fills_prefetch
                || self.intake == IntakeState::Stopped)
        {
            self.publisher.publish(MessageCopy::delayed(
                &delivery,
                after,
                &unsettled.original,
                &self.settings,
            ));
            session.publishing += 1;
        } else {
            // The broker closes a channel if a delivery exceeds the consumer timeout.
            let after = after
                .min(self.settings.consumer_timeout / 2)
                .max(MIN_RELEASE_DELAY);
            session.delayed.insert(Instant::now() + after, delivery);
        }
    }

    /// Moves a delayed delivery from memory to a delay queue if [`MAX_SINGLE_ACKS`] later ones were
    /// acknowledged one by one because of it. A single acknowledgement costs the broker several times
    /// as much as one of many together. The original waits in memory until the copy is confirmed.
    fn move_blocking_delivery(&mut self) {
        let SessionState::Open(session) = &mut self.session else {
            return;
        };
        let Some((tag, _)) = session
            .acks
            .blocking_tag()
            .filter(|(_, acked_singly)| *acked_singly >= MAX_SINGLE_ACKS)
        else {
            return;
        };
        if !self.settings.uses_delay_queues() || self.settings.metrics.is_publishing_blocked() {
            return;
        }
        let now = Instant::now();
        let (Some((due, delivery)), Some(unsettled)) =
            (session.delayed.movable(tag, now), session.acks.context(tag))
        else {
            return;
        };
        let copy = MessageCopy::delayed(
            delivery,
            due.saturating_duration_since(now),
            &unsettled.original,
            &self.settings,
        );
        if copy.is_lossless(&unsettled.original, session.frame_max()) {
            let cancellation = Some(session.delayed.start_move(tag, due, now));
            self.publisher.publish(MessageCopy {
                cancellation,
                ..copy
            });
        } else {
            session.delayed.mark_unmovable(tag);
        }
    }

    /// Settles the original of a confirmed copy.
    fn confirmed(&mut self, confirmed: &ConfirmedCopy) {
        let SessionState::Open(session) = &mut self.session else {
            return;
        };
        // If the copy was cancelled, the original was redelivered from memory, and its own settlement
        // acknowledges it.
        if session.epoch != confirmed.epoch
            || confirmed
                .cancellation
                .as_ref()
                .is_some_and(PublishCancellation::is_cancelled)
        {
            return;
        }
        if !session.delayed.finish_move(confirmed.tag) {
            session.publishing = session.publishing.saturating_sub(1);
        }
        session.acks.settle(confirmed.tag);
    }

    fn handle_event(&mut self, event: DriverEvent) {
        match event {
            DriverEvent::SessionOpened(session) => {
                self.endpoints
                    .open_epoch
                    .store(session.epoch, Ordering::Release);
                tracing::info!(
                    queue = &*self.settings.name,
                    broker = self.settings.redacted_url(),
                    "reconnected; consuming again"
                );
                self.settings.metrics.clear_unavailable();
                self.opened_at = Instant::now();
                self.session = SessionState::Open(session);
            }
            DriverEvent::Session(SessionEvent::Delivered(deliveries)) => {
                self.receive_deliveries(deliveries)
            }
            DriverEvent::Session(SessionEvent::Wake) => self.redeliver_due(),
            DriverEvent::Session(SessionEvent::Lost(loss)) => self.channel_lost(&loss),
        }
    }

    fn receive_deliveries(&mut self, deliveries: Vec<lapin::message::Delivery>) {
        self.settings.metrics.delivered(
            deliveries.len(),
            deliveries
                .iter()
                .filter(|delivery| delivery.redelivered)
                .count(),
        );
        for delivery in deliveries {
            let SessionState::Open(session) = &mut self.session else {
                return;
            };
            let (tag, invalid_utf8) =
                (delivery.delivery_tag, incoming::has_invalid_utf8(&delivery));
            let (delivery, original) =
                incoming::parse_delivery(delivery, &self.settings, session.epoch);
            session
                .acks
                .delivered(tag, UnsettledDelivery::new(original));
            if self.intake == IntakeState::Stopped {
                // Closing the channel requeues the delivery.
                continue;
            }
            let size = delivery.message.body.len();
            if size > self.settings.body_limit {
                tracing::warn!(
                    queue = &*self.settings.name,
                    bytes = size,
                    limit = self.settings.body_limit,
                    "message body exceeds body_limit; rejecting the message to the dead letters (reason too-large); to handle it, raise body_limit and redrive it"
                );
                self.reject(delivery, &Reason::TooLarge, None);
                continue;
            }
            if invalid_utf8 {
                let error = "a property, a header's name or the routing key is not UTF-8";
                tracing::warn!(
                    queue = &*self.settings.name,
                    "a property, header name or routing key is not UTF-8; rejecting the message to the dead letters (reason unreadable); correct the producer: AMQP short strings are UTF-8"
                );
                self.reject(
                    delivery,
                    &Reason::Unreadable,
                    Some(&FailureHistory {
                        last_error: Some(error.into()),
                        ..FailureHistory::default()
                    }),
                );
                continue;
            }
            match incoming::remaining_delay(&delivery, &self.settings) {
                Some(wait) => self.delay(delivery, wait),
                None => self.endpoints.incoming_queue.deliver(delivery),
            }
        }
    }

    fn redeliver_due(&mut self) {
        let SessionState::Open(session) = &mut self.session else {
            return;
        };
        self.endpoints
            .incoming_queue
            .deliver_at_front(session.delayed.take_due(Instant::now()));
    }

    /// Whether [`PrefetchMode::OneByOne`] may end. No delivery may be unacknowledged, because the
    /// replacement of the channel would redeliver it.
    fn can_restore_prefetch(&self) -> bool {
        self.prefetch_mode == PrefetchMode::OneByOne
            && self.intake == IntakeState::Open
            && self.opened_at.elapsed() > MIN_ONE_BY_ONE_TIME
            && matches!(&self.session, SessionState::Open(session) if session.is_idle())
    }

    /// Closes the session, reports its deliveries as revoked, and opens another session unless the
    /// source stops.
    fn channel_lost(&mut self, loss: &ChannelLoss) {
        let SessionState::Open(mut session) =
            std::mem::replace(&mut self.session, SessionState::Closed)
        else {
            return;
        };
        session.delayed.cancel_move();
        self.endpoints.open_epoch.store(0, Ordering::Release);
        self.endpoints.incoming_queue.revoke(session.epoch);
        self.settings.metrics.channel_lost();
        self.settings.metrics.set_unacked(0);
        let (queue, broker) = (&*self.settings.name, self.settings.redacted_url());
        match loss {
            ChannelLoss::Broken(error) | ChannelLoss::NoDeliveries(error) => {
                tracing::warn!(
                    queue,
                    broker,
                    error,
                    "channel lost; reconnecting; unacknowledged messages will be redelivered; if it recurs, see the log of RabbitMQ"
                );
            }
            ChannelLoss::ReplacedToRestorePrefetch => tracing::info!(
                queue,
                broker,
                prefetch = self.settings.prefetch,
                "reconnecting to restore the prefetch that was lowered to 1 because of an unparsable message"
            ),
            ChannelLoss::UnparsableFrame(error) => tracing::error!(
                queue,
                broker,
                error,
                "the client cannot parse a message at the head of the queue, which blocks the messages behind it; reconnecting with a prefetch of 1; remove the message with the management interface or another client"
            ),
        }
        let closed = tokio::spawn(session.close(CLOSE_TIMEOUT));
        if self.intake == IntakeState::Open {
            self.epoch += 1;
            match (loss, self.prefetch_mode) {
                (ChannelLoss::UnparsableFrame(_), PrefetchMode::Normal) => {
                    (self.prefetch_mode, self.backoff) =
                        (PrefetchMode::OneByOne, Backoff::up_to(MAX_UNPARSABLE_PAUSE))
                }
                (_, PrefetchMode::Normal) if self.opened_at.elapsed() > STABLE_AFTER => {
                    self.backoff = Backoff::up_to(MAX_RECONNECT_PAUSE)
                }
                (_, PrefetchMode::OneByOne)
                    if self.opened_at.elapsed() > STABLE_ONE_BY_ONE_AFTER =>
                {
                    self.backoff.reset()
                }
                _ => {}
            }
            let prefetch = self.prefetch_mode.prefetch(&self.settings);
            // Ready messages without a delivery do not prove a lost consumer: another consumer may be
            // the queue's single active one. The probe of the new channel runs rarely until its first
            // delivery.
            let probe_interval = if let ChannelLoss::NoDeliveries(_) = loss {
                LONG_PROBE_INTERVAL
            } else {
                PROBE_INTERVAL
            };
            let opening = open_session::reopen(
                Arc::clone(&self.settings),
                self.epoch,
                prefetch,
                probe_interval,
                self.backoff.pause(),
            );
            let old_session_closed = self.settings.preserves_order().then_some(closed);
            self.session = SessionState::Opening(Box::pin(async move {
                if let Some(closed) = old_session_closed {
                    // The result does not matter: closing has a timeout, and after a panic the dropped
                    // channel is closed.
                    let _ = closed.await;
                }
                opening.await
            }));
        }
    }

    /// Accepts no more deliveries. Delayed ones move to delay queues, if these are used.
    async fn stop(&mut self) {
        self.intake = IntakeState::Stopped;
        let delayed = match &mut self.session {
            SessionState::Open(session) => {
                session.stop().await;
                let (delayed, has_pending_move) = session.delayed.take_all();
                session.publishing += usize::from(has_pending_move);
                delayed
            }
            opening @ SessionState::Opening(_) => {
                *opening = SessionState::Closed;
                return;
            }
            SessionState::Closed => return,
        };
        for ((due, _), delivery) in delayed {
            self.delay(delivery, due.saturating_duration_since(Instant::now()));
        }
    }

    /// Whether the source requested the close and no settlement is pending. Without a channel, no
    /// settlement is pending: the broker redelivers all unacknowledged deliveries.
    fn is_finished(&self) -> bool {
        self.closing.is_some()
            && match &self.session {
                SessionState::Open(session) => session.is_flushed(),
                SessionState::Opening(_) | SessionState::Closed => true,
            }
    }

    /// Sends the remaining acknowledgements, closes the connections, and reports the outcome.
    async fn shut_down(mut self, exit: LoopExit) {
        let finished = self.is_finished();
        self.settings.metrics.set_unacked(0);
        self.endpoints.open_epoch.store(0, Ordering::Release);
        match self.session {
            SessionState::Open(mut session) => {
                session.flush(FlushMode::Immediate);
                if !finished {
                    // Time to send the last acknowledgements before the channel closes.
                    let acknowledged = async {
                        while session.is_acknowledging() {
                            session.next_event().await;
                        }
                    };
                    let _ = tokio::time::timeout(LAST_ACK_TIMEOUT, acknowledged).await;
                }
                session.close(CLOSE_TIMEOUT).await;
            }
            SessionState::Opening(_) | SessionState::Closed => {
                tracing::info!(
                    queue = &*self.settings.name,
                    "closed while not connected; deliveries that were settled but not acknowledged will be redelivered"
                );
            }
        }
        self.publisher.close(CLOSE_TIMEOUT).await;
        if let Some(closing) = self.closing.take() {
            // The receiver is dropped if the caller no longer waits for the close.
            let _ = closing.done.send(if finished {
                Ok(())
            } else {
                Err(unfinished_close(exit))
            });
        }
    }
}

/// The error of a close with unfinished settlements.
fn unfinished_close(exit: LoopExit) -> SourceError {
    let problem = match exit {
        LoopExit::PublisherEnded => {
            "the publisher task ended, which is a bug in oncegate; unsettled deliveries will be redelivered; report this"
        }
        LoopExit::Finished | LoopExit::DeadlineExceeded => {
            "some settlements did not finish before the deadline; their deliveries will be redelivered; check that RabbitMQ confirms dead letters, or raise .drain_timeout(…)"
        }
    };
    SourceError::Unavailable(problem.into())
}

/// Counts and drops a settlement for a closed channel. The broker would close the new channel for an
/// acknowledgement whose delivery tag is not from that channel.
fn drop_stale_settlement(settings: &QueueSettings, tag: u64) {
    settings.metrics.stale_settlement();
    tracing::debug!(
        queue = &*settings.name,
        tag,
        "settlement for a closed channel dropped; the delivery will be redelivered"
    );
}

/// Ignores a settlement for a delivery of the open channel that is settled already. The broker would
/// close the channel for a second acknowledgement.
fn ignore_repeated_settlement(settings: &QueueSettings, tag: u64) {
    tracing::debug!(
        queue = &*settings.name,
        tag,
        "settlement ignored: the delivery is already settled"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_close_after_the_end_of_the_publisher_reports_no_missed_deadline() {
        let problem = |exit| unfinished_close(exit).to_string();
        assert!(problem(LoopExit::DeadlineExceeded).contains("before the deadline"));
        let ended = problem(LoopExit::PublisherEnded);
        assert!(
            ended.contains("publisher task ended") && !ended.contains("deadline"),
            "{ended}"
        );
    }
}
