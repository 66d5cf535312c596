//! Which message of an outbox is published next, and what is read from and written to its storage:
//! decisions without I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use crate::internal::Backoff;
use crate::outbox::{NotPublished, OutboxMessage, OutboxRow, UnsentQuery};

/// The maximum number of rows in memory that can be published.
const MAX_ROWS: usize = 512;
/// The size of the rows in memory above which none are read.
const MAX_BYTES: usize = 32 * 1024 * 1024;
/// The pauses between reads that find nothing.
const FIRST_IDLE_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_IDLE_PAUSE: Duration = Duration::from_millis(250);
/// The interval of level requests, which update the metrics.
const LEVEL_INTERVAL: Duration = Duration::from_secs(5);
/// After this time without an answer of the storage, a level request checks that this process is
/// still the leader.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A request to the storage. One at a time is in progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OutboxRequest {
    Park { number: i64, error: String },
    Remove(Vec<i64>),
    Read(UnsentQuery),
    Level,
}

/// The exchange and the destination of messages.
type Address = (String, String);
/// An address and a key: messages of which at most one is published at a time.
type OrderedKey = (Address, Bytes);

/// The rows in memory. Every row stays in memory until the storage no longer returns it, or it is
/// dropped together with all later rows of its key, so that none overtakes an earlier one.
#[derive(Debug)]
pub(crate) struct RelayQueue {
    max_in_flight: usize,
    rows: BTreeMap<i64, RelayRow>,
    bytes: usize,
    /// The rows of each key that are neither confirmed nor parked, in order. Only the first may be
    /// published.
    keys: HashMap<OrderedKey, VecDeque<i64>>,
    /// Waiting rows that are the first of their key, or have no key.
    ready: BTreeSet<i64>,
    in_flight: usize,
    confirmed: Vec<i64>,
    refused: VecDeque<(i64, String)>,
    /// Addresses at which publishing failed.
    failing: HashMap<Address, FailingAddress>,
    /// Whether rows were dropped while a read is in progress, whose answer may contain later rows
    /// of the same keys.
    read_is_outdated: bool,
    is_stopping: bool,
    request_in_progress: bool,
    idle: Backoff,
    read_at: Instant,
    level_at: Instant,
    answered_at: Instant,
}

#[derive(Debug)]
struct RelayRow {
    message: Arc<OutboxMessage>,
    state: RowState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowState {
    Waiting,
    Publishing,
    /// Confirmed or refused: to be removed or parked.
    Ended,
}

/// An address at which publishing failed. One row, the probe, is published again; the others are
/// dropped from memory and not read until the probe is confirmed or refused.
#[derive(Debug)]
struct FailingAddress {
    probe: i64,
    backoff: Backoff,
    retry_at: Instant,
}

impl RelayQueue {
    pub(crate) fn new(max_in_flight: usize, now: Instant) -> Self {
        Self {
            max_in_flight,
            rows: BTreeMap::new(),
            bytes: 0,
            keys: HashMap::new(),
            ready: BTreeSet::new(),
            in_flight: 0,
            confirmed: Vec::new(),
            refused: VecDeque::new(),
            failing: HashMap::new(),
            read_is_outdated: false,
            is_stopping: false,
            request_in_progress: false,
            idle: Backoff::between(FIRST_IDLE_PAUSE, LONGEST_IDLE_PAUSE),
            read_at: now,
            level_at: now,
            answered_at: now,
        }
    }

    /// Begins no further message, and reads no more rows.
    pub(crate) fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Whether no message is being published, and everything was removed or parked.
    pub(crate) fn is_drained(&self) -> bool {
        self.in_flight == 0
            && !self.request_in_progress
            && self.confirmed.is_empty()
            && self.refused.is_empty()
    }

    /// The next message to publish now, if any. Its result goes to [`published`](Self::published).
    pub(crate) fn begin(&mut self, now: Instant) -> Option<(i64, Arc<OutboxMessage>)> {
        if self.is_stopping || self.in_flight >= self.max_in_flight {
            return None;
        }
        let number = self.ready.iter().copied().find(|number| {
            let failing = self.failing.get(&address(&self.rows[number].message));
            failing.is_none_or(|failing| failing.retry_at <= now)
        })?;
        self.ready.remove(&number);
        self.in_flight += 1;
        let row = self.rows.get_mut(&number)?;
        row.state = RowState::Publishing;
        Some((number, Arc::clone(&row.message)))
    }

    /// Takes the result of a message that was begun. Returns the pause after a failure.
    pub(crate) fn published(
        &mut self,
        number: i64,
        result: &Result<(), NotPublished>,
        now: Instant,
    ) -> Option<Duration> {
        let row = self.rows.get_mut(&number)?;
        self.in_flight -= 1;
        let at = address(&row.message);
        let is_probe = self.failing.get(&at).is_some_and(|it| it.probe == number);
        row.state = RowState::Ended;
        match result {
            Ok(()) => {
                self.confirmed.push(number);
                self.advance_key(number);
            }
            Err(NotPublished::Refused(error)) => {
                self.refused.push_back((number, error.to_string()))
            }
            Err(NotPublished::NotConfirmed(_)) => return Some(self.fail(number, at, now)),
        }
        if is_probe {
            self.failing.remove(&at);
        }
        None
    }

    /// Makes the row after a confirmed one of the same key ready.
    fn advance_key(&mut self, number: i64) {
        let Some(key) = ordered_key(&self.rows[&number].message) else {
            return;
        };
        let Some(numbers) = self.keys.get_mut(&key) else {
            return;
        };
        numbers.pop_front();
        match numbers.front() {
            Some(next) => drop(self.ready.insert(*next)),
            None => drop(self.keys.remove(&key)),
        }
    }

    /// A message was not confirmed: its address is failing.
    fn fail(&mut self, number: i64, at: Address, now: Instant) -> Duration {
        if let Some(failing) = self.failing.get_mut(&at) {
            let pause = failing.backoff.current();
            if failing.probe != number {
                self.drop_rows(&[number]);
                return pause;
            }
            let pause = failing.backoff.advance_with_jitter();
            failing.retry_at = now + pause;
            self.wait(number);
            return pause;
        }
        let waiting: Vec<i64> = self
            .rows
            .iter()
            .filter(|(_, row)| row.state == RowState::Waiting && address(&row.message) == at)
            .map(|(number, _)| *number)
            .collect();
        self.drop_rows(&waiting);
        self.wait(number);
        let mut backoff = Backoff::default();
        let pause = backoff.advance_with_jitter();
        let failing = FailingAddress {
            probe: number,
            backoff,
            retry_at: now + pause,
        };
        self.failing.insert(at, failing);
        self.read_is_outdated = true;
        pause
    }

    fn wait(&mut self, number: i64) {
        if let Some(row) = self.rows.get_mut(&number) {
            row.state = RowState::Waiting;
            self.ready.insert(number);
        }
    }

    /// Removes rows from memory, which are read again later.
    fn drop_rows(&mut self, numbers: &[i64]) {
        self.read_is_outdated = true;
        for number in numbers {
            self.forget(*number);
        }
    }

    fn forget(&mut self, number: i64) {
        let Some(row) = self.rows.remove(&number) else {
            return;
        };
        self.bytes -= row.message.size();
        self.ready.remove(&number);
        let Some(key) = ordered_key(&row.message) else {
            return;
        };
        if let Some(numbers) = self.keys.get_mut(&key) {
            numbers.retain(|other| *other != number);
            if numbers.is_empty() {
                self.keys.remove(&key);
            }
        }
    }

    /// The next request to the storage, if one is due and none is in progress.
    pub(crate) fn next_request(&mut self, now: Instant) -> Option<OutboxRequest> {
        if self.request_in_progress {
            return None;
        }
        let request = self.due_request(now);
        self.request_in_progress = request.is_some();
        request
    }

    fn due_request(&mut self, now: Instant) -> Option<OutboxRequest> {
        if let Some((number, error)) = self.refused.pop_front() {
            return Some(OutboxRequest::Park { number, error });
        }
        if !self.confirmed.is_empty() {
            return Some(OutboxRequest::Remove(std::mem::take(&mut self.confirmed)));
        }
        if self.is_stopping {
            return None;
        }
        if now >= self.level_at || now >= self.answered_at + CHECK_INTERVAL {
            self.level_at = now + LEVEL_INTERVAL;
            return Some(OutboxRequest::Level);
        }
        (now >= self.read_at && self.has_room()).then(|| {
            self.read_is_outdated = false;
            OutboxRequest::Read(UnsentQuery {
                max_rows: MAX_ROWS - self.active(),
                max_bytes: MAX_BYTES - self.bytes,
                except: self.rows.keys().copied().collect(),
                except_destinations: self.failing.keys().cloned().collect(),
            })
        })
    }

    /// The rows that do not wait for a failing address.
    fn active(&self) -> usize {
        self.rows.len().saturating_sub(self.failing.len())
    }

    fn has_room(&self) -> bool {
        self.active() <= MAX_ROWS / 2 && self.bytes < MAX_BYTES
    }

    /// The storage has executed a request.
    pub(crate) fn answered(&mut self, request: &OutboxRequest, now: Instant) {
        (self.request_in_progress, self.answered_at) = (false, now);
        match request {
            OutboxRequest::Remove(numbers) => numbers.iter().for_each(|it| self.forget(*it)),
            OutboxRequest::Park { number, .. } => self.forget_key(*number),
            OutboxRequest::Read(_) | OutboxRequest::Level => {}
        }
    }

    /// Removes a parked row, and the rows that wait behind it.
    fn forget_key(&mut self, number: i64) {
        let row = self.rows.get(&number);
        let behind = row
            .and_then(|row| self.keys.remove(&ordered_key(&row.message)?))
            .unwrap_or_default();
        self.forget(number);
        behind.iter().for_each(|it| self.forget(*it));
    }

    /// Adds the rows that a read returned.
    pub(crate) fn add(&mut self, rows: Vec<OutboxRow>, now: Instant) {
        if std::mem::take(&mut self.read_is_outdated) {
            self.read_at = now;
            return;
        }
        if rows.is_empty() {
            self.read_at = now + self.idle.advance();
            return;
        }
        self.idle.reset();
        self.read_at = now;
        for row in rows {
            let number = row.number;
            match ordered_key(&row.message) {
                Some(key) => {
                    let numbers = self.keys.entry(key).or_default();
                    numbers.push_back(number);
                    if numbers.len() == 1 {
                        self.ready.insert(number);
                    }
                }
                None => drop(self.ready.insert(number)),
            }
            self.bytes += row.message.size();
            let row = RelayRow {
                message: Arc::new(row.message),
                state: RowState::Waiting,
            };
            self.rows.insert(number, row);
        }
    }

    /// When [`begin`](Self::begin) or [`next_request`](Self::next_request) has to be called again
    /// without another event.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        if self.is_stopping {
            return None;
        }
        let retries = self.failing.values().filter(|failing| {
            let probe = self.rows.get(&failing.probe);
            self.in_flight < self.max_in_flight
                && probe.is_some_and(|row| row.state == RowState::Waiting)
        });
        let read_at = self.has_room().then_some(self.read_at);
        let requests = read_at
            .into_iter()
            .chain([self.level_at, self.answered_at + CHECK_INTERVAL])
            .filter(|_| !self.request_in_progress);
        retries
            .map(|failing| failing.retry_at)
            .chain(requests)
            .min()
    }
}

fn address(message: &OutboxMessage) -> Address {
    (message.exchange.clone(), message.destination.clone())
}

fn ordered_key(message: &OutboxMessage) -> Option<OrderedKey> {
    Some((address(message), message.key.clone()?))
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
