//! The task behind the source: it keeps a channel open and executes settlements.
//!
//! The task runs on a thread of its own, together with the tasks of lapin: a handler that blocked
//! their thread would delay the heartbeats of the connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::BoxFuture;
use oncegate_core::MessageId;
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{FailureHistory, Settled, SourceError};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::client::context::SourceContext;
use crate::client::incoming_queue::IncomingSender;
use crate::client::lost_consumer_probe::{LONG_PROBE_INTERVAL, PROBE_INTERVAL};
use crate::client::one_by_one::PrefetchMode;
use crate::client::open_session::{self, MAX_RECONNECT_PAUSE};
use crate::client::publisher::{ConfirmedCopy, CopyPublisher};
use crate::client::session::{ChannelLoss, ConsumerSession, SessionEvent};
use crate::protocol::CurrentTime;
use crate::protocol::channel_deliveries::{FlushMode, IntakeState, SettleAction};
use crate::protocol::incoming;
use oncegate_core::internal::{Backoff, LogThrottle};

/// How long sending the last acknowledgements may take after the deadline.
const LAST_ACK_TIMEOUT: Duration = Duration::from_millis(100);
/// Deliveries with this `x-delivery-count` or a larger one are logged: half of the default delivery limit
/// of RabbitMQ 4.0 and newer.
const LOGGED_DELIVERY_COUNT: u32 = 10;
/// How often such a delivery is logged.
const DELIVERY_COUNT_LOG_INTERVAL: Duration = Duration::from_secs(60);
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
        /// Where to send the outcome.
        closed_sender: oneshot::Sender<Result<(), SourceError>>,
    },
}

/// The driver's ends of the queues between it and the source.
pub(crate) struct DriverEndpoints {
    pub(crate) incoming_queue: IncomingSender,
    pub(crate) commands: UnboundedReceiver<SourceCommand>,
    /// The epoch of the open channel ([`ChannelDeliveries::epoch`](crate::protocol::channel_deliveries::ChannelDeliveries::epoch)); 0 while no channel is open.
    pub(crate) open_epoch: Arc<AtomicU64>,
}

/// Opens the first channel, reports the outcome, and runs until the source is closed or dropped.
pub(crate) async fn run(
    context: Arc<SourceContext>,
    endpoints: DriverEndpoints,
    mut opened_sender: oneshot::Sender<Result<(), SourceError>>,
) {
    let first = tokio::select! {
        first = open_session::open_first(&context) => first,
        () = opened_sender.closed() => return,
    };
    let session = match first {
        Ok(session) => session,
        Err(error) => return drop(opened_sender.send(Err(error))),
    };
    endpoints
        .open_epoch
        .store(session.deliveries.epoch, Ordering::Release);
    let publisher = CopyPublisher::new(Arc::clone(&context), Arc::clone(&endpoints.open_epoch));
    let driver = AmqpDriver {
        epoch: session.deliveries.epoch,
        session: SessionState::Open(Box::new(session)),
        opened_at: Instant::now(),
        backoff: Backoff::up_to(MAX_RECONNECT_PAUSE),
        prefetch_mode: PrefetchMode::Normal,
        intake: IntakeState::Open,
        closing: None,
        delivery_count_throttle: LogThrottle::every(DELIVERY_COUNT_LOG_INTERVAL),
        context,
        endpoints,
        publisher,
    };
    let _ = opened_sender.send(Ok(()));
    let context = Arc::clone(&driver.context);
    driver.run_loop().await;
    // Ends the time without a channel in the status: a closed source is not unavailable.
    context.metrics.clear_unavailable();
}

struct AmqpDriver {
    context: Arc<SourceContext>,
    endpoints: DriverEndpoints,
    publisher: CopyPublisher,
    session: SessionState,
    /// The epoch of the last channel that was opened or is being opened.
    epoch: u64,
    /// When the last channel was opened.
    opened_at: Instant,
    /// The pauses before reconnecting.
    backoff: Backoff,
    prefetch_mode: PrefetchMode,
    intake: IntakeState,
    closing: Option<CloseRequest>,
    delivery_count_throttle: LogThrottle,
}

enum SessionState {
    Open(Box<ConsumerSession>),
    /// A channel was lost, and the next one is being opened.
    Opening(BoxFuture<'static, ConsumerSession>),
    /// The channel was lost or was not open yet when the source stopped.
    Closed,
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
    closed_sender: oneshot::Sender<Result<(), SourceError>>,
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
                    Some(confirmed) => self.confirmed(confirmed),
                    None => {
                        tracing::error!(
                            queue = &*self.context.name,
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
                self.context
                    .metrics
                    .set_unacked(session.deliveries.unacked());
            }
        };
        self.shut_down(exit).await;
    }

    async fn execute(&mut self, command: SourceCommand) {
        match command {
            SourceCommand::Settle(batch) => {
                let time = current_time();
                batch
                    .into_iter()
                    .for_each(|settled| self.settle(settled, time));
            }
            SourceCommand::Stop => self.stop().await,
            SourceCommand::Close {
                deadline,
                closed_sender,
            } => {
                self.stop().await;
                self.closing = Some(CloseRequest {
                    deadline,
                    closed_sender,
                });
            }
        }
    }

    fn settle(&mut self, settled: Settled, time: CurrentTime) {
        let tag = settled.delivery.receipt.position;
        let action = match &mut self.session {
            SessionState::Open(session) => {
                session
                    .deliveries
                    .settle(settled, self.intake, &self.context, time)
            }
            SessionState::Opening(_) | SessionState::Closed => SettleAction::IgnoreStale,
        };
        self.execute_action(tag, action);
    }

    fn execute_action(&mut self, tag: u64, action: SettleAction) {
        let queue = &*self.context.name;
        match action {
            SettleAction::Nothing => {}
            SettleAction::Publish(copy) => self.publisher.publish(*copy),
            SettleAction::Redeliver(delivery) => self.endpoints.incoming_queue.deliver(*delivery),
            SettleAction::IgnoreStale => {
                self.context.metrics.stale_settlement();
                tracing::debug!(
                    queue,
                    tag,
                    "settlement for a closed channel dropped; the delivery will be redelivered"
                );
            }
            SettleAction::IgnoreRepeated => tracing::debug!(
                queue,
                tag,
                "settlement ignored: the delivery is already settled"
            ),
        }
    }

    /// Settles the originals of confirmed copies.
    fn confirmed(&mut self, confirmed: Vec<ConfirmedCopy>) {
        if let SessionState::Open(session) = &mut self.session {
            for copy in confirmed {
                session.deliveries.confirmed(copy.epoch, copy.tag);
            }
        }
    }

    fn handle_event(&mut self, event: DriverEvent) {
        match event {
            DriverEvent::SessionOpened(session) => {
                self.endpoints
                    .open_epoch
                    .store(session.deliveries.epoch, Ordering::Release);
                tracing::info!(
                    queue = &*self.context.name,
                    broker = self.context.redacted_url(),
                    "reconnected; consuming again"
                );
                self.context.metrics.clear_unavailable();
                self.opened_at = Instant::now();
                self.session = SessionState::Open(session);
            }
            DriverEvent::Session(SessionEvent::Delivered(deliveries)) => {
                self.receive_deliveries(deliveries)
            }
            DriverEvent::Session(SessionEvent::Wake) => {}
            DriverEvent::Session(SessionEvent::Lost(loss)) => self.channel_lost(&loss),
        }
    }

    fn receive_deliveries(&mut self, deliveries: Vec<lapin::message::Delivery>) {
        self.context.metrics.delivered(
            deliveries.len(),
            deliveries
                .iter()
                .filter(|delivery| delivery.redelivered)
                .count(),
        );
        for delivery in deliveries {
            self.receive_delivery(delivery);
        }
    }

    fn receive_delivery(&mut self, raw: lapin::message::Delivery) {
        let SessionState::Open(session) = &mut self.session else {
            return;
        };
        let (time, tag) = (current_time(), raw.delivery_tag);
        let has_invalid_utf8 = incoming::has_invalid_utf8(&raw);
        let (delivery, original) =
            incoming::parse_delivery(raw, &self.context, session.deliveries.epoch, time.unix);
        if let Some(delivery_count) = incoming::delivery_count(&delivery.message)
            && delivery_count >= LOGGED_DELIVERY_COUNT
            && let Some(suppressed_lines) = self.delivery_count_throttle.due(time.now.into_std())
        {
            tracing::warn!(
                queue = &*self.context.name,
                delivery_count,
                message_id = delivery
                    .message
                    .message_id
                    .as_deref()
                    .map(String::from_utf8_lossy)
                    .as_deref(),
                suppressed_lines,
                "a message was redelivered many times because channels or connections ended; RabbitMQ dead-letters it above the delivery limit of the quorum queue (20 by default since 4.0), although no handler failed; find out what ends them, such as crashes while a handler runs, or raise delivery-limit by a policy"
            );
        }
        session
            .deliveries
            .delivered(tag, original, delivery.failures, time.now);
        if self.intake == IntakeState::Stopped {
            // Closing the channel requeues the delivery.
            return;
        }
        let (queue, bytes) = (&*self.context.name, delivery.message.body.len());
        let mut reject = |reason: Reason, history: Option<&FailureHistory>| {
            session
                .deliveries
                .reject(&delivery, &reason, history, &self.context, time)
        };
        let action = if bytes > self.context.body_limit {
            let id = self.context.id.as_ref();
            let id = id.and_then(|id| id.read_without_body(&delivery.message));
            tracing::warn!(
                reason = Reason::TooLarge.as_str(),
                id = id.as_ref().map(MessageId::as_str),
                origin = %delivery.message.origin,
                message_id = delivery
                    .message
                    .message_id
                    .as_deref()
                    .map(String::from_utf8_lossy)
                    .as_deref(),
                destination = self.context.dead_letters.as_str(),
                bytes,
                limit = self.context.body_limit,
                "message body exceeds body_limit; rejecting the message to the dead letters; to handle it, raise body_limit and redrive it"
            );
            reject(Reason::TooLarge, None)
        } else if has_invalid_utf8 {
            tracing::warn!(
                queue,
                "a property, header name or routing key is not UTF-8; rejecting the message to the dead letters (reason unreadable); correct the producer: AMQP short strings are UTF-8"
            );
            let error = "a property, a header's name or the routing key is not UTF-8";
            let mut history = FailureHistory::default();
            history.last_error = Some(error.into());
            reject(Reason::Unreadable, Some(&history))
        } else {
            match incoming::remaining_delay(&delivery, &self.context, time.unix) {
                Some(wait) => session
                    .deliveries
                    .delay(&delivery, wait, &self.context, time),
                None => return self.endpoints.incoming_queue.deliver(delivery),
            }
        };
        self.execute_action(tag, action);
    }

    /// Whether [`PrefetchMode::OneByOne`] may end. No delivery may be unacknowledged, because the
    /// replacement of the channel would redeliver it.
    fn can_restore_prefetch(&self) -> bool {
        self.prefetch_mode.may_end(self.opened_at)
            && self.intake == IntakeState::Open
            && matches!(&self.session, SessionState::Open(session) if session.is_idle())
    }

    /// Closes the session, reports its deliveries as revoked, and opens another session unless the
    /// source stops.
    fn channel_lost(&mut self, loss: &ChannelLoss) {
        let SessionState::Open(session) =
            std::mem::replace(&mut self.session, SessionState::Closed)
        else {
            return;
        };
        self.endpoints.open_epoch.store(0, Ordering::Release);
        self.endpoints
            .incoming_queue
            .revoke(session.deliveries.epoch);
        self.context.metrics.channel_lost();
        self.context.metrics.set_unacked(0);
        let (queue, broker) = (&*self.context.name, self.context.redacted_url());
        match loss {
            ChannelLoss::Broken(error) | ChannelLoss::NoDeliveries(error) => {
                tracing::warn!(
                    queue,
                    broker,
                    error,
                    "channel lost; reconnecting unless the source stops; unacknowledged messages will be redelivered; if it recurs, see the log of RabbitMQ"
                );
            }
            ChannelLoss::ReplacedToRestorePrefetch => tracing::info!(
                queue,
                broker,
                prefetch = self.context.prefetch,
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
            let is_unparsable = matches!(loss, ChannelLoss::UnparsableFrame(_));
            let backoff = std::mem::take(&mut self.backoff);
            (self.prefetch_mode, self.backoff) =
                self.prefetch_mode
                    .after_loss(is_unparsable, self.opened_at, backoff);
            let prefetch = self.prefetch_mode.prefetch(self.context.prefetch);
            let probe_interval = if let ChannelLoss::NoDeliveries(_) = loss {
                LONG_PROBE_INTERVAL
            } else {
                PROBE_INTERVAL
            };
            let opening = open_session::reopen(
                Arc::clone(&self.context),
                self.epoch,
                prefetch,
                probe_interval,
                self.backoff.advance_with_jitter(),
            );
            let old_session_closed = self.context.preserves_order().then_some(closed);
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

    /// Accepts no more deliveries.
    async fn stop(&mut self) {
        self.intake = IntakeState::Stopped;
        match &mut self.session {
            SessionState::Open(session) => session.stop().await,
            opening @ SessionState::Opening(_) => *opening = SessionState::Closed,
            SessionState::Closed => {}
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
        self.context.metrics.set_unacked(0);
        self.endpoints.open_epoch.store(0, Ordering::Release);
        match self.session {
            SessionState::Open(mut session) => {
                session.flush(FlushMode::Immediate);
                if !finished {
                    // Wait until the last acknowledgements are sent: `close` drops them.
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
                    queue = &*self.context.name,
                    "closed while not connected; deliveries that were settled but not acknowledged will be redelivered"
                );
            }
        }
        self.publisher.close(CLOSE_TIMEOUT).await;
        if let Some(closing) = self.closing.take() {
            // The receiver is dropped if the caller no longer waits for the close.
            let _ = closing.closed_sender.send(if finished {
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

/// Reads the clocks.
fn current_time() -> CurrentTime {
    CurrentTime {
        now: Instant::now(),
        unix: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default(),
    }
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
