//! What goes on behind the source: it keeps a channel alive and carries settlements out.
//!
//! It runs on a thread of its own, which no handler can block: the connection's heartbeats depend
//! on it.

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
use crate::copy::{Copy, Withdrawal};
use crate::inbox::Writer;
use crate::incoming;
use crate::opening::{self, LONGEST_PAUSE};
use crate::publisher::{Confirmed, Publisher};
use crate::session::{Carried, Gaps, Happened, LONG_SILENCE, Loss, SILENCE, Session};
use crate::settings::{Rejects, Settings};

/// A release up to this long waits in memory.
const HOLD: Duration = Duration::from_secs(5);
/// No release is shorter: a delivery that is given back at once must not spin.
const SHORTEST: Duration = Duration::from_millis(20);
/// How many are acknowledged one by one for the sake of what waits before them, until that moves to
/// a delay queue. A copy costs the broker about as much as a hundred of them.
const MANY: usize = 256;
/// A channel that lived this long was sound. One that breaks as soon as it is open must not spin.
const SOUND: Duration = Duration::from_secs(2);
/// The same, while it reads one message at a time after one that the client could not read.
const STEADY: Duration = Duration::from_secs(10);
/// How long it reads one message at a time after one that the client could not read.
const CAREFUL: Duration = Duration::from_secs(300);
/// How seldom it looks whether a message that the client cannot read is gone.
const LONGEST_LOOK: Duration = Duration::from_secs(30);
/// How long the broker may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

/// What the source asks for.
pub(crate) enum Command {
    /// Carry these out.
    Settle(Vec<Settled>),
    /// Take nothing more in.
    Stop,
    /// Finish what was settled until the deadline, then close.
    Close {
        /// When to give up.
        deadline: Instant,
        /// Hears what came of it.
        done: oneshot::Sender<Result<(), SourceError>>,
    },
}

/// The engine's ends of its channels to the source.
pub(crate) struct Ends {
    /// Where deliveries go.
    pub(crate) out: Writer,
    /// Where commands come from.
    pub(crate) commands: UnboundedReceiver<Command>,
    /// The epoch of the channel that is open; 0 while none is.
    pub(crate) live: Arc<AtomicU64>,
}

/// Opens the first channel, says so, and works until the source closes or is dropped.
pub(crate) async fn run(
    settings: Arc<Settings>,
    ends: Ends,
    mut opened: oneshot::Sender<Result<(), SourceError>>,
) {
    let first = tokio::select! {
        first = opening::first(&settings) => first,
        () = opened.closed() => return,
    };
    let session = match first {
        Ok(session) => session,
        Err(error) => return drop(opened.send(Err(error))),
    };
    ends.live.store(session.epoch, Ordering::Release);
    let publisher = Publisher::start(Arc::clone(&settings), Arc::clone(&ends.live));
    let engine = Engine {
        epoch: session.epoch,
        link: Link::Up(Box::new(session)),
        since: Instant::now(),
        backoff: Backoff::up_to(LONGEST_PAUSE),
        pace: Pace::Usual,
        intake: Intake::Open,
        closing: None,
        settings,
        ends,
        publisher,
    };
    let _ = opened.send(Ok(()));
    let settings = Arc::clone(&engine.settings);
    engine.work().await;
    settings.meter.back();
}

struct Engine {
    settings: Arc<Settings>,
    ends: Ends,
    publisher: Publisher,
    link: Link,
    epoch: u64,
    /// When the channel was opened, and how long to wait once it is lost.
    since: Instant,
    backoff: Backoff,
    pace: Pace,
    intake: Intake,
    closing: Option<Closing>,
}

enum Link {
    Up(Box<Session>),
    Opening(BoxFuture<'static, Session>),
    Down,
}

/// How much it takes at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    Usual,
    /// One by one, so that a message that costs the connection costs no other one a delivery.
    Careful,
}

impl Pace {
    fn prefetch(self, settings: &Settings) -> u16 {
        match self {
            Self::Usual => settings.prefetch,
            Self::Careful => 1,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Intake {
    Open,
    Stopped,
}

struct Closing {
    deadline: Instant,
    done: oneshot::Sender<Result<(), SourceError>>,
}

enum Next {
    Opened(Box<Session>),
    Happened(Happened),
}

impl Link {
    async fn next(&mut self) -> Next {
        match self {
            Self::Up(session) => Next::Happened(session.happens().await),
            Self::Opening(opening) => Next::Opened(Box::new(opening.await)),
            Self::Down => std::future::pending().await,
        }
    }
}

impl Engine {
    async fn work(mut self) {
        while !self.is_finished() {
            let deadline = self
                .closing
                .as_ref()
                .map_or_else(Instant::now, |closing| closing.deadline);
            tokio::select! {
                biased;
                command = self.ends.commands.recv(), if self.closing.is_none() => match command {
                    Some(command) => self.obey(command).await,
                    None => break,
                },
                confirmed = self.publisher.confirmed() => match confirmed {
                    Some(confirmed) => self.confirmed(&confirmed),
                    None => {
                        tracing::error!(queue = &*self.settings.name, "the publisher of copies has ended, which is a defect of oncegate; the source ends");
                        break;
                    }
                },
                next = self.link.next() => self.go_on(next),
                () = tokio::time::sleep_until(deadline), if self.closing.is_some() => break,
            }
            if self.may_hurry() {
                self.pace = Pace::Usual;
                self.lost(&Loss::Broken(
                    "not lost: it is opened anew to take more than one message at a time again"
                        .into(),
                ));
            }
            if let Link::Up(session) = &mut self.link {
                session.flush(if self.closing.is_some() {
                    Gaps::Ignore
                } else {
                    Gaps::Wait
                });
                self.settings.meter.holds(session.acks.unacked());
            }
            self.clear_the_way();
        }
        self.leave().await;
    }

    async fn obey(&mut self, command: Command) {
        match command {
            Command::Settle(batch) => batch.into_iter().for_each(|settled| self.settle(settled)),
            Command::Stop => self.stop().await,
            Command::Close { deadline, done } => {
                self.stop().await;
                self.closing = Some(Closing { deadline, done });
            }
        }
    }

    fn settle(&mut self, settled: Settled) {
        let Settled {
            mut delivery,
            settlement,
            story,
        } = settled;
        let tag = delivery.receipt.position;
        oncegate_core::wrong_version!("settle-on-another-channel", {
            if let Link::Up(session) = &self.link {
                delivery.receipt.epoch = session.epoch;
            }
        });
        let session = match &mut self.link {
            Link::Up(session) if session.epoch == delivery.receipt.epoch => session,
            _ => return stale(&self.settings, tag),
        };
        if let Settlement::Accept(_) = settlement {
            if session.acks.settle(tag).is_none() {
                stale(&self.settings, tag);
            }
            return;
        }
        match settlement {
            Settlement::Accept(_) => {}
            Settlement::Reject(reason) => self.reject(delivery, &reason, story.as_deref()),
            // Handed back while draining: closing the channel returns it to the queue.
            Settlement::Release { after, .. }
                if after.is_zero() && self.intake == Intake::Stopped => {}
            Settlement::Release { after, failures } => {
                delivery.failures = failures;
                self.hold_back(delivery, after);
            }
        }
    }

    /// Sees to it that a delivery reaches the dead letters, or a person.
    fn reject(&mut self, delivery: Delivery, reason: &Reason, story: Option<&FailureHistory>) {
        let Link::Up(session) = &mut self.link else {
            return;
        };
        let tag = delivery.receipt.position;
        if self.settings.rejects == Rejects::ByQueue && !reason.is_in_doubt() {
            if !session.reject(tag) {
                stale(&self.settings, tag);
            }
            return;
        }
        let Some(carried) = session.acks.carried(tag) else {
            return stale(&self.settings, tag);
        };
        self.publisher.publish(Copy::rejected(
            &delivery,
            reason,
            story,
            &carried.original,
            &self.settings,
        ));
        session.publishing += 1;
    }

    /// Keeps a delivery back: for a short while in memory, else in a delay queue, where there are
    /// some.
    fn hold_back(&mut self, delivery: Delivery, after: Duration) {
        let Link::Up(session) = &mut self.link else {
            return;
        };
        let tag = delivery.receipt.position;
        let Some(carried) = session.acks.carried(tag) else {
            return stale(&self.settings, tag);
        };
        let has_queues = self.settings.delays_by_queue();
        let crowded = session.held.len() >= session.prefetch / 2;
        if has_queues && (after > HOLD || crowded || self.intake == Intake::Stopped) {
            self.publisher.publish(Copy::delayed(
                &delivery,
                after,
                &carried.original,
                &self.settings,
            ));
            session.publishing += 1;
        } else {
            // What waits beyond the broker's timeout would cost the channel.
            let after = after.min(self.settings.consumer_timeout / 2).max(SHORTEST);
            session.held.insert(Instant::now() + after, delivery);
        }
    }

    /// Lets what waits in memory, and keeps many behind it from being acknowledged together, move
    /// to a delay queue: to be told of each of those alone costs the broker several times as much.
    /// Until the copy is confirmed its original waits where it is.
    fn clear_the_way(&mut self) {
        let Link::Up(session) = &mut self.link else {
            return;
        };
        let Some((tag, _)) = session.acks.obstacle().filter(|(_, alone)| *alone >= MANY) else {
            return;
        };
        if !self.settings.delays_by_queue() || self.settings.meter.is_blocked() {
            return;
        }
        let now = Instant::now();
        let (Some((due, delivery)), Some(carried)) =
            (session.held.movable(tag, now), session.acks.carried(tag))
        else {
            return;
        };
        let copy = Copy::delayed(
            delivery,
            due.saturating_duration_since(now),
            &carried.original,
            &self.settings,
        );
        if copy.is_whole(&carried.original, session.frame_max()) {
            let withdrawal = Some(session.held.begin_to_move(tag, due, now));
            self.publisher.publish(Copy { withdrawal, ..copy });
        } else {
            session.held.stays(tag);
        }
    }

    fn confirmed(&mut self, confirmed: &Confirmed) {
        let Link::Up(session) = &mut self.link else {
            return;
        };
        // Of one that was withdrawn the original was handed over again, and says itself what
        // becomes of it.
        if session.epoch != confirmed.epoch
            || confirmed
                .withdrawal
                .as_ref()
                .is_some_and(Withdrawal::is_withdrawn)
        {
            return;
        }
        if !session.held.moved(confirmed.tag) {
            session.publishing = session.publishing.saturating_sub(1);
        }
        session.acks.settle(confirmed.tag);
    }

    fn go_on(&mut self, next: Next) {
        match next {
            Next::Opened(session) => {
                self.ends.live.store(session.epoch, Ordering::Release);
                tracing::info!(
                    queue = &*self.settings.name,
                    broker = self.settings.shown(),
                    "consuming again"
                );
                self.settings.meter.back();
                self.since = Instant::now();
                self.link = Link::Up(session);
            }
            Next::Happened(Happened::Delivered(deliveries)) => self.take_in(deliveries),
            Next::Happened(Happened::Due) => self.hand_over_again(),
            Next::Happened(Happened::Lost(problem)) => self.lost(&problem),
        }
    }

    fn take_in(&mut self, deliveries: Vec<lapin::message::Delivery>) {
        self.settings.meter.delivered(
            deliveries.len(),
            deliveries
                .iter()
                .filter(|delivery| delivery.redelivered)
                .count(),
        );
        for delivery in deliveries {
            let Link::Up(session) = &mut self.link else {
                return;
            };
            let (tag, spoilt) = (delivery.delivery_tag, incoming::is_spoilt(&delivery));
            let (delivery, original) = incoming::read(delivery, &self.settings, session.epoch);
            session.acks.delivered(tag, Carried::now(original));
            if self.intake == Intake::Stopped {
                // It goes back with the channel.
                continue;
            }
            let size = delivery.message.body.len();
            if size > self.settings.body_limit {
                tracing::warn!(
                    queue = &*self.settings.name,
                    size,
                    limit = self.settings.body_limit,
                    "a body is over the limit: to the dead letters"
                );
                self.reject(delivery, &Reason::TooLarge, None);
                continue;
            }
            if spoilt {
                let problem = "a property, a header's name or the routing key is not UTF-8";
                tracing::warn!(
                    queue = &*self.settings.name,
                    problem,
                    "a message cannot be read: to the dead letters"
                );
                self.reject(
                    delivery,
                    &Reason::Unreadable,
                    Some(&FailureHistory {
                        last_error: Some(problem.into()),
                        ..FailureHistory::default()
                    }),
                );
                continue;
            }
            match incoming::wait(&delivery, &self.settings) {
                Some(wait) => self.hold_back(delivery, wait),
                None => self.ends.out.deliver(delivery),
            }
        }
    }

    fn hand_over_again(&mut self) {
        let Link::Up(session) = &mut self.link else {
            return;
        };
        self.ends
            .out
            .deliver_first(session.held.take_due(Instant::now()));
    }

    /// Whether it read one by one for long enough. Asked while it holds no delivery, so that none
    /// comes back for it.
    fn may_hurry(&self) -> bool {
        self.pace == Pace::Careful
            && self.intake == Intake::Open
            && self.since.elapsed() > CAREFUL
            && matches!(&self.link, Link::Up(session) if session.is_idle())
    }

    fn lost(&mut self, loss: &Loss) {
        let Link::Up(mut session) = std::mem::replace(&mut self.link, Link::Down) else {
            return;
        };
        session.held.withdraw();
        self.ends.live.store(0, Ordering::Release);
        self.ends.out.revoke(session.epoch);
        self.settings.meter.lost();
        self.settings.meter.holds(0);
        let (queue, broker) = (&*self.settings.name, self.settings.shown());
        match loss {
            Loss::Broken(problem) | Loss::Silent(problem) => {
                tracing::warn!(
                    queue,
                    broker,
                    problem,
                    "the channel is lost; connecting again"
                );
            }
            Loss::Unreadable(problem) => tracing::error!(
                queue,
                broker,
                problem,
                "a message at the head of the queue cannot be read: a property, a header's name or the routing key is not UTF-8. It stops what is behind it; take it out of the queue with the management interface or another client"
            ),
        }
        let closed = tokio::spawn(session.close(GOODBYE));
        if self.intake == Intake::Open {
            self.epoch += 1;
            match (loss, self.pace) {
                (Loss::Unreadable(_), Pace::Usual) => {
                    (self.pace, self.backoff) = (Pace::Careful, Backoff::up_to(LONGEST_LOOK))
                }
                (Loss::Broken(_) | Loss::Silent(_), Pace::Usual)
                    if self.since.elapsed() > SOUND =>
                {
                    self.backoff = Backoff::up_to(LONGEST_PAUSE)
                }
                (_, Pace::Careful) if self.since.elapsed() > STEADY => self.backoff.reset(),
                _ => {}
            }
            let prefetch = self.pace.prefetch(&self.settings);
            let silence = if let Loss::Silent(_) = loss {
                LONG_SILENCE
            } else {
                SILENCE
            };
            let opening = opening::again(
                Arc::clone(&self.settings),
                self.epoch,
                prefetch,
                silence,
                self.backoff.pause(),
            );
            let before = self.settings.keeps_order().then_some(closed);
            self.link = Link::Opening(Box::pin(async move {
                if let Some(closed) = before {
                    // It ends in time, and a panic in there has closed the channel too.
                    let _ = closed.await;
                }
                opening.await
            }));
        }
    }

    /// Takes nothing more in. What is held back moves to the delay queues, where there are some.
    async fn stop(&mut self) {
        self.intake = Intake::Stopped;
        let held = match &mut self.link {
            Link::Up(session) => {
                session.stop().await;
                let (held, moves) = session.held.take_all();
                session.publishing += usize::from(moves);
                held
            }
            link @ Link::Opening(_) => {
                *link = Link::Down;
                return;
            }
            Link::Down => return,
        };
        for ((due, _), delivery) in held {
            self.hold_back(delivery, due.saturating_duration_since(Instant::now()));
        }
    }

    /// Whether it was asked to close and nothing is left to do.
    fn is_finished(&self) -> bool {
        self.closing.is_some()
            && match &self.link {
                Link::Up(session) => session.is_quiet(),
                Link::Opening(_) | Link::Down => true,
            }
    }

    async fn leave(mut self) {
        let finished = self.is_finished();
        self.settings.meter.holds(0);
        self.ends.live.store(0, Ordering::Release);
        match self.link {
            Link::Up(mut session) => {
                session.flush(Gaps::Ignore);
                if !finished {
                    // So that the last acknowledgements leave before the channel closes.
                    let acknowledged = async {
                        while session.acknowledges() {
                            session.happens().await;
                        }
                    };
                    let _ = tokio::time::timeout(Duration::from_millis(100), acknowledged).await;
                }
                session.close(GOODBYE).await;
            }
            Link::Opening(_) | Link::Down => {
                tracing::info!(
                    queue = &*self.settings.name,
                    "it closed without a channel; what was settled last and not acknowledged comes back"
                );
            }
        }
        self.publisher.close(GOODBYE).await;
        if let Some(closing) = self.closing.take() {
            let unfinished =
                "not all settlements were carried out in time; their deliveries come back";
            let _ = closing.done.send(if finished {
                Ok(())
            } else {
                Err(SourceError::Unavailable(unfinished.into()))
            });
        }
    }
}

/// A settlement whose channel is gone. Sending it would close the new channel.
fn stale(settings: &Settings, tag: u64) {
    settings.meter.stale();
    tracing::debug!(
        queue = &*settings.name,
        tag,
        "a settlement came after its channel had gone; the delivery comes back"
    );
}
