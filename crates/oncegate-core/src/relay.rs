//! The relay: publishes the messages of an outbox.

mod queue;

use std::collections::HashMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::StreamExt;
use futures_util::future::FusedFuture;
use futures_util::stream::FuturesUnordered;
use metrics::{counter, gauge};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::error::Error;
use crate::fault;
use crate::internal::{Backoff, LogThrottle};
use crate::metric;
use crate::outbox::{
    NotPublished, Outbox, OutboxLevel, OutboxMessage, OutboxRow, OutboxSession, Publisher,
};
use crate::store::StoreError;
use queue::{OutboxRequest, RelayQueue};

/// How many messages are published at a time by default.
const MAX_IN_FLIGHT: usize = 64;
/// How long a drain waits for confirms. Messages without one are published again.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout of a request to the storage. While one takes longer, another process may be the
/// leader, so no further message is begun.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a read, which may pass over many rows that it does not return.
const READ_TIMEOUT: Duration = Duration::from_secs(35);
/// The pause between attempts to become the leader while another process is.
const LEAD_INTERVAL: Duration = Duration::from_secs(1);
/// How often a failure is logged per destination.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// How many destinations have a log throttle of their own. The others share one.
const MAX_THROTTLES: usize = 1_000;

/// Publishes the messages of an outbox, in the order of each key and destination.
///
/// # What it guarantees
/// - A message is published at least once: its row is deleted after the broker has confirmed it.
///   After a crash in between it is published again, with the same id, by which the next consumer
///   recognizes it.
/// - Messages with the same destination and key are published one after the other, in the order of
///   their rows, so the first copies arrive in this order.
/// - Of several processes, one publishes: the leader. Another one continues about a second after the
///   database has ended the session of the leader.
///
/// A message that the broker refuses for good is [parked](crate::outbox): later messages of its key
/// wait, and others continue. While a destination is missing or unavailable, its messages wait, and
/// other destinations continue.
#[derive(Debug)]
#[must_use = "it publishes nothing until `run_until` is awaited"]
pub struct Relay<O, P = ()> {
    outbox: O,
    publisher: P,
    max_in_flight: usize,
}

impl<O: Outbox> Relay<O> {
    /// A relay that reads this outbox.
    pub fn from(outbox: O) -> Self {
        Self {
            outbox,
            publisher: (),
            max_in_flight: MAX_IN_FLIGHT,
        }
    }
}

impl<O, P> Relay<O, P> {
    /// Publishes with this publisher.
    pub fn to<Q: Publisher>(self, publisher: Q) -> Relay<O, Q> {
        Relay {
            outbox: self.outbox,
            publisher,
            max_in_flight: self.max_in_flight,
        }
    }

    /// How many messages are published at a time, at least 1; 64 by default.
    pub fn max_in_flight(mut self, messages: usize) -> Self {
        self.max_in_flight = messages.max(1);
        self
    }
}

impl<O: Outbox, P: Publisher> Relay<O, P> {
    /// Publishes until `shutdown` completes. Then it begins no further message, waits up to 10 s for
    /// confirms, and lets another process lead.
    ///
    /// # Errors
    /// At the start: wrong settings of the outbox or the publisher. Later failures are logged and
    /// retried.
    pub async fn run_until(self, shutdown: impl Future<Output = ()> + Send) -> Result<(), Error> {
        self.publisher.preflight().await?;
        drop(LevelGauges); // registers them, which are exported as 0
        for counter in [
            metric::OUTBOX_PUBLISHED,
            metric::OUTBOX_FAILED,
            metric::OUTBOX_REFUSED,
        ] {
            counter!(counter).increment(0); // registers it, which is exported as 0
        }
        let mut shutdown = pin!(shutdown.fuse());
        let mut throttle = LogThrottle::every(LOG_INTERVAL);
        let mut backoff = Backoff::default();
        let mut is_checked = false;
        loop {
            let leading = async {
                if !is_checked {
                    self.outbox.preflight().await?;
                    is_checked = true;
                }
                self.become_leader().await
            };
            let error = tokio::select! {
                biased;
                () = &mut shutdown => return Ok(()),
                session = leading => match session {
                    Ok(session) => {
                        match self.lead(&session, shutdown.as_mut(), &mut backoff).await {
                            Ok(()) => {
                                // The lock ends with the connection in any case.
                                let _ = timeout(REQUEST_TIMEOUT, session.close()).await;
                                return Ok(());
                            }
                            // `lead` has received the shutdown: messages without a confirm are
                            // published again.
                            Err(_) if shutdown.is_terminated() => return Ok(()),
                            Err(error) => error,
                        }
                    }
                    Err(error) if !is_checked && matches!(error, StoreError::Misconfigured(_)) => {
                        return Err(error.into());
                    }
                    Err(error) => error,
                },
            };
            let pause = backoff.advance_with_jitter();
            if let Some(suppressed_lines) = throttle.due(std::time::Instant::now()) {
                tracing::warn!(
                    outbox = self.outbox.described(), %error, ?pause, suppressed_lines,
                    "outbox unavailable, this process publishes nothing until it is the leader again; messages whose rows were not removed are published again, with the same ids; check that the database can be reached and written, and for transactions that lock rows of the outbox"
                );
            }
            tokio::select! {
                biased;
                () = &mut shutdown => return Ok(()),
                () = sleep(pause) => {}
            }
        }
    }

    /// Waits until this process is the leader.
    async fn become_leader(&self) -> Result<O::Session, StoreError> {
        let mut is_logged = false;
        loop {
            if let Some(session) = self.outbox.try_lead().await? {
                tracing::info!(
                    outbox = self.outbox.described(),
                    publisher = self.publisher.described(),
                    "the relay publishes"
                );
                return Ok(session);
            }
            if !is_logged {
                tracing::info!(
                    outbox = self.outbox.described(),
                    "another process publishes; the relay waits to take over"
                );
                is_logged = true;
            }
            sleep(LEAD_INTERVAL).await;
        }
    }

    /// Publishes until shutdown, or until a request of the session fails. At shutdown it begins no
    /// further message, and waits for those in progress. If a request fails, it drops those in
    /// progress, because another process may be the leader. Resets the backoff once rows were
    /// removed or parked, or there were none.
    async fn lead(
        &self,
        session: &O::Session,
        mut shutdown: Pin<&mut (impl FusedFuture<Output = ()> + Send)>,
        backoff: &mut Backoff,
    ) -> Result<(), StoreError> {
        let mut queue = RelayQueue::new(self.max_in_flight, Instant::now());
        let mut failures = FailureLog::default();
        let gauges = LevelGauges;
        gauge!(metric::OUTBOX_LEADING).set(1.0);
        let mut publishing = FuturesUnordered::new();
        let request = futures_util::future::Fuse::terminated();
        let mut request = pin!(request);
        let mut drain_until = None;
        loop {
            let now = Instant::now();
            while !queue.is_without_answer(now)
                && let Some((number, message)) = queue.begin()
            {
                publishing.push(async move {
                    fault::point("relay.publish.before");
                    let result = self.publisher.publish(&message).await;
                    (number, message, result)
                });
            }
            if let Some(next) = queue.next_request(now) {
                request.set(execute(session, next).fuse());
            }
            if drain_until.is_some() && queue.is_drained() {
                break;
            }
            let wakes_at = queue.wakes_at();
            tokio::select! {
                biased;
                () = shutdown.as_mut(), if drain_until.is_none() => {
                    queue.stop();
                    drain_until = Some(now + DRAIN_TIMEOUT);
                }
                answer = request.as_mut() => {
                    let (request, answer) = answer?;
                    let now = Instant::now();
                    queue.answered(&request, now);
                    match answer {
                        // Not after a read with rows: if they cannot be removed, each session would
                        // publish them again.
                        Answer::Done => backoff.reset(),
                        Answer::Rows(rows) => match &request {
                            OutboxRequest::ReadAgain(probes) => queue.add_probes(probes, rows, now),
                            _ => {
                                if rows.is_empty() {
                                    backoff.reset();
                                } else {
                                    fault::point("relay.read");
                                }
                                queue.add(rows, now);
                            }
                        },
                        Answer::Level(level) => gauges.set(level),
                    }
                }
                Some((number, message, result)) = publishing.next() => {
                    let pause = queue.published(number, &result, Instant::now());
                    self.report(number, &message, result, pause, &mut failures);
                }
                () = sleep_until(wakes_at.unwrap_or(now)), if wakes_at.is_some() => {}
                () = sleep_until(drain_until.unwrap_or(now)), if drain_until.is_some() => {
                    tracing::warn!(
                        outbox = self.outbox.described(),
                        "drain timeout of the relay over; messages without a confirm are published again, with the same ids; check the broker"
                    );
                    break;
                }
            }
        }
        Ok(())
    }

    /// Counts and logs the result of publishing a message.
    fn report(
        &self,
        number: i64,
        message: &OutboxMessage,
        result: Result<(), NotPublished>,
        pause: Option<Duration>,
        failures: &mut FailureLog,
    ) {
        let (publisher, id) = (self.publisher.described(), &message.id);
        let destination = message.described_destination();
        match result {
            Ok(()) => {
                fault::point("relay.publish.confirmed");
                counter!(metric::OUTBOX_PUBLISHED).increment(1);
            }
            Err(NotPublished::Refused(error)) => {
                counter!(metric::OUTBOX_REFUSED).increment(1);
                tracing::error!(
                    destination, id, number, publisher, %error,
                    "message of the outbox cannot be published; it is parked, and later messages of its key wait; change what the error names, then `oncegate outbox retry --number` or `drop --number`"
                );
            }
            Err(NotPublished::NoDestination(error) | NotPublished::NotConfirmed(error)) => {
                counter!(metric::OUTBOX_FAILED).increment(1);
                if let Some(suppressed_lines) = failures.due(&destination) {
                    tracing::warn!(
                        destination, id, publisher, %error, ?pause, suppressed_lines,
                        "cannot publish a message of the outbox, retrying; messages for this destination wait, others continue; check that the destination exists and that the broker is available"
                    );
                }
            }
        }
    }
}

enum Answer {
    Done,
    Rows(Vec<OutboxRow>),
    Level(OutboxLevel),
}

/// Executes a request, within its timeout.
async fn execute(
    session: &impl OutboxSession,
    request: OutboxRequest,
) -> Result<(OutboxRequest, Answer), StoreError> {
    let executing = async {
        Ok(match &request {
            OutboxRequest::Read(query) => Answer::Rows(session.read(query).await?),
            OutboxRequest::ReadAgain(numbers) => Answer::Rows(session.read_again(numbers).await?),
            OutboxRequest::Level => Answer::Level(session.level().await?),
            OutboxRequest::Remove(numbers) => {
                fault::point("relay.remove.before");
                session.remove(numbers).await?;
                fault::point("relay.remove.after");
                Answer::Done
            }
            OutboxRequest::Park { number, error } => {
                fault::point("relay.park.before");
                session.park(*number, error).await?;
                fault::point("relay.park.after");
                Answer::Done
            }
        })
    };
    let limit = match &request {
        OutboxRequest::Read(_) | OutboxRequest::ReadAgain(_) | OutboxRequest::Level => READ_TIMEOUT,
        _ => REQUEST_TIMEOUT,
    };
    let answer = timeout(limit, executing).await;
    let answer = answer.unwrap_or_else(|_| {
        let text = format!("no answer of the outbox within {limit:?}");
        Err(StoreError::Unknown(text.into()))
    })?;
    Ok((request, answer))
}

/// The gauges of the leader; 0 once it is dropped, because the next leader sets its own.
struct LevelGauges;

impl LevelGauges {
    fn set(&self, level: OutboxLevel) {
        gauge!(metric::OUTBOX_OLDEST_AGE_SECONDS).set(level.oldest_age.as_secs_f64());
        gauge!(metric::OUTBOX_UNSENT).set(level.unsent as f64);
        gauge!(metric::OUTBOX_PARKED).set(level.parked as f64);
    }
}

impl Drop for LevelGauges {
    fn drop(&mut self) {
        self.set(OutboxLevel::default());
        gauge!(metric::OUTBOX_LEADING).set(0.0);
    }
}

/// The throttles of log lines about failures, by destination.
#[derive(Default)]
struct FailureLog(HashMap<Arc<str>, LogThrottle>);

impl FailureLog {
    /// The number of suppressed lines for this destination, if a line is due.
    fn due(&mut self, destination: &str) -> Option<u64> {
        let has_own = self.0.contains_key(destination) || self.0.len() < MAX_THROTTLES;
        let destination = if has_own { destination } else { "" };
        let throttle = self.0.entry(destination.into());
        throttle
            .or_insert_with(|| LogThrottle::every(LOG_INTERVAL))
            .due(std::time::Instant::now())
    }
}

#[cfg(test)]
mod tests;
