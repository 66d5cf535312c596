//! Which message of an outbox is published next, and what is read from and written to its storage:
//! decisions without I/O.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::REQUEST_TIMEOUT;
use crate::internal::Backoff;
use crate::outbox::{NotPublished, OutboxMessage, OutboxRow, UnsentQuery};

/// The maximum number of rows in memory that can be published.
const MAX_ROWS: usize = 512;
/// The size of the rows in memory above which none are read.
const MAX_BYTES: usize = 32 * 1024 * 1024;
/// The size of the probes (see [`FailingAddress`]) in memory above which none are read.
const MAX_PROBE_BYTES: usize = MAX_BYTES / 4;
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
    Park {
        number: i64,
        error: String,
    },
    Remove(Vec<i64>),
    Read(UnsentQuery),
    /// Reads the rows with these numbers again: probes of failing addresses.
    ReadAgain(Vec<i64>),
    Level,
}

/// The exchange and the destination of messages.
type Address = (String, String);
/// An address and a key: messages of which at most one is published at a time.
type OrderedKey = (Address, Bytes);

/// Decides what the leader of an outbox does next.
#[derive(Debug)]
pub(crate) struct RelayQueue {
    rows: RelayRows,
    slots: PublishSlots,
    /// Rows to remove.
    confirmed: Vec<i64>,
    /// Rows to park, each with its error.
    refused: VecDeque<(i64, String)>,
    failing: HashMap<Address, FailingAddress>,
    schedule: RequestSchedule,
    is_stopping: bool,
}

/// The rows in memory. Every row stays in memory until the storage no longer returns it, or it is
/// dropped together with all later rows of its key, so that none overtakes an earlier one.
#[derive(Debug, Default)]
struct RelayRows {
    all: BTreeMap<i64, RelayRow>,
    bytes: usize,
    /// The rows of each key that are neither confirmed nor parked, in order. Only the first may be
    /// published.
    keys: HashMap<OrderedKey, VecDeque<i64>>,
    /// Waiting rows that are the first of their key, or have no key.
    ready: HashMap<Address, BTreeSet<i64>>,
}

#[derive(Debug)]
struct RelayRow {
    message: Arc<OutboxMessage>,
    /// Whether it is being published, or was.
    is_begun: bool,
}

/// An address at which publishing failed. One row, the probe, is read and published again when its
/// retry is due. All rows of the address are dropped from memory, and the others are not read until
/// the probe is confirmed, refused or no longer stored.
#[derive(Debug)]
struct FailingAddress {
    probe: i64,
    /// The size of the probe in bytes.
    size: usize,
    backoff: Backoff,
    retry_at: Instant,
}

/// The messages in flight: those that are being published.
#[derive(Debug)]
struct PublishSlots {
    max_in_flight: usize,
    in_flight: usize,
    in_flight_to: HashMap<Address, usize>,
}

/// When the requests to the storage are due.
#[derive(Debug)]
struct RequestSchedule {
    is_in_progress: bool,
    answered_at: Instant,
    level_at: Instant,
    read_at: Instant,
    idle: Backoff,
    /// Whether the last read was one of probes: the next one is not, so that neither waits for ever.
    has_read_probes: bool,
    /// Whether rows were dropped while a read is in progress, whose answer may contain later rows
    /// of the same keys.
    is_read_outdated: bool,
}

impl RelayQueue {
    pub(crate) fn new(max_in_flight: usize, now: Instant) -> Self {
        Self {
            rows: RelayRows::default(),
            slots: PublishSlots {
                max_in_flight,
                in_flight: 0,
                in_flight_to: HashMap::new(),
            },
            confirmed: Vec::new(),
            refused: VecDeque::new(),
            failing: HashMap::new(),
            schedule: RequestSchedule::new(now),
            is_stopping: false,
        }
    }

    /// Begins no further message, and reads no more rows.
    pub(crate) fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Whether no message is being published, and everything was removed or parked.
    pub(crate) fn is_drained(&self) -> bool {
        self.slots.in_flight == 0
            && !self.schedule.is_in_progress
            && self.confirmed.is_empty()
            && self.refused.is_empty()
    }

    /// Whether the storage has not answered for so long that another process may be the leader.
    pub(crate) fn is_without_answer(&self, now: Instant) -> bool {
        now >= self.schedule.check_at() + REQUEST_TIMEOUT
    }

    /// The next message to publish now, if any. Its result goes to [`published`](Self::published).
    pub(crate) fn begin(&mut self) -> Option<(i64, Arc<OutboxMessage>)> {
        if self.is_stopping || self.slots.in_flight >= self.slots.max_in_flight {
            return None;
        }
        let ready = self.rows.ready.iter();
        let (_, number) = ready
            .filter_map(|(at, numbers)| Some((self.slots.rank(at)?, *numbers.first()?)))
            .min()?;
        let message = self.rows.begin(number)?;
        self.slots.take(address(&message));
        Some((number, message))
    }

    /// Takes the result of a message that was begun. Returns the pause after a failure.
    pub(crate) fn published(
        &mut self,
        number: i64,
        result: &Result<(), NotPublished>,
        now: Instant,
    ) -> Option<Duration> {
        let at = address(&self.rows.all.get(&number)?.message);
        self.slots.free(&at);
        match result {
            Ok(()) => {
                self.confirmed.push(number);
                self.rows.advance_key(number);
            }
            Err(NotPublished::Refused(error)) => {
                self.refused.push_back((number, error.to_string()))
            }
            Err(NotPublished::NoDestination(_) | NotPublished::NotConfirmed(_)) => {
                return Some(self.fail(number, at, now));
            }
        }
        if self.failing.get(&at).is_some_and(|it| it.probe == number) {
            self.failing.remove(&at);
        }
        None
    }

    /// A message was not confirmed: its address is failing. Returns the pause before its retry.
    fn fail(&mut self, number: i64, at: Address, now: Instant) -> Duration {
        let size = self.rows.all[&number].message.size();
        let is_new = !self.failing.contains_key(&at);
        if is_new {
            self.rows.forget_waiting(&at);
        }
        self.rows.forget(number);
        let failing = self.failing.entry(at).or_insert(FailingAddress {
            probe: number,
            size,
            backoff: Backoff::default(),
            retry_at: now,
        });
        let is_probe = failing.probe == number;
        // The rows of an address that was failing before are not read, except for the probe.
        self.schedule.is_read_outdated |= is_new || !is_probe;
        if !is_probe {
            return failing.backoff.current();
        }
        let pause = failing.backoff.advance_with_jitter();
        failing.retry_at = now + pause;
        pause
    }

    /// The next request to the storage, if one is due and none is in progress.
    pub(crate) fn next_request(&mut self, now: Instant) -> Option<OutboxRequest> {
        if self.schedule.is_in_progress {
            return None;
        }
        let request = self.due_request(now);
        self.schedule.is_in_progress = request.is_some();
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
        if now >= self.schedule.level_at.min(self.schedule.check_at()) {
            self.schedule.level_at = now + LEVEL_INTERVAL;
            return Some(OutboxRequest::Level);
        }
        let is_read_due = now >= self.schedule.read_at && self.rows.has_room();
        let probes = self.due_probes(now);
        let is_turn_of_rows = is_read_due && self.schedule.has_read_probes;
        self.schedule.has_read_probes = !probes.is_empty() && !is_turn_of_rows;
        if self.schedule.has_read_probes {
            return Some(OutboxRequest::ReadAgain(probes));
        }
        is_read_due.then(|| {
            self.schedule.is_read_outdated = false;
            OutboxRequest::Read(UnsentQuery {
                max_rows: MAX_ROWS - self.rows.all.len(),
                max_bytes: MAX_BYTES - self.rows.bytes,
                except: self.rows.all.keys().copied().collect(),
                except_destinations: self.failing.keys().cloned().collect(),
            })
        })
    }

    /// The probes to read now. In memory are at most as many as may use a quarter of the slots, and
    /// at most one that is large.
    fn due_probes(&self, now: Instant) -> Vec<i64> {
        let Some((mut room, mut bytes)) = self.probe_room() else {
            return Vec::new();
        };
        let mut due: Vec<&FailingAddress> = self
            .unread_probes()
            .filter(|failing| failing.retry_at <= now)
            .collect();
        due.sort_unstable_by_key(|failing| failing.retry_at);
        due.retain(|failing| {
            let fits = room > 0 && bytes > 0;
            if fits {
                (room, bytes) = (room - 1, bytes.saturating_sub(failing.size));
            }
            fits
        });
        due.iter().map(|failing| failing.probe).collect()
    }

    /// How many probes, and bytes of them, may be read in addition to those in memory.
    fn probe_room(&self) -> Option<(usize, usize)> {
        let in_memory = self
            .failing
            .values()
            .filter(|failing| self.rows.all.contains_key(&failing.probe));
        let (rows, bytes) = in_memory.fold((0, 0), |(rows, bytes), failing| {
            (rows + 1, bytes + failing.size)
        });
        let max_rows = (self.slots.max_in_flight / 4).max(1);
        let room = (
            max_rows - rows.min(max_rows),
            MAX_PROBE_BYTES.saturating_sub(bytes),
        );
        (room.0 > 0 && room.1 > 0 && self.rows.bytes < MAX_BYTES).then_some(room)
    }

    /// The failing addresses whose probe is not in memory.
    fn unread_probes(&self) -> impl Iterator<Item = &FailingAddress> {
        let failing = self.failing.values();
        failing.filter(|failing| !self.rows.all.contains_key(&failing.probe))
    }

    /// The storage has executed a request.
    pub(crate) fn answered(&mut self, request: &OutboxRequest, now: Instant) {
        (self.schedule.is_in_progress, self.schedule.answered_at) = (false, now);
        match request {
            OutboxRequest::Remove(numbers) => numbers.iter().for_each(|it| self.rows.forget(*it)),
            OutboxRequest::Park { number, .. } => self.rows.forget_key(*number),
            OutboxRequest::Read(_) | OutboxRequest::ReadAgain(_) | OutboxRequest::Level => {}
        }
    }

    /// Adds the rows that a read returned.
    pub(crate) fn add(&mut self, rows: Vec<OutboxRow>, now: Instant) {
        if self.schedule.accept_read(rows.is_empty(), now) {
            rows.into_iter().for_each(|row| self.rows.insert(row));
        }
    }

    /// Adds the probes that were read again. An operator has dropped those of the requested ones
    /// that are missing: their addresses are read again.
    pub(crate) fn add_probes(&mut self, requested: &[i64], rows: Vec<OutboxRow>, now: Instant) {
        for row in rows {
            let failing = self.failing.get(&address(&row.message));
            if failing.is_some_and(|failing| failing.probe == row.number) {
                self.rows.insert(row);
            }
        }
        let before = self.failing.len();
        self.failing.retain(|_, failing| {
            !requested.contains(&failing.probe) || self.rows.all.contains_key(&failing.probe)
        });
        if self.failing.len() < before {
            self.schedule.read_at = now;
        }
    }

    /// When [`next_request`](Self::next_request) has to be called again without another event.
    pub(crate) fn wakes_at(&self) -> Option<Instant> {
        if self.is_stopping || self.schedule.is_in_progress {
            return None;
        }
        let retries = self
            .probe_room()
            .into_iter()
            .flat_map(|_| self.unread_probes());
        let read_at = self.rows.has_room().then_some(self.schedule.read_at);
        retries
            .map(|failing| failing.retry_at)
            .chain(read_at)
            .chain([self.schedule.level_at, self.schedule.check_at()])
            .min()
    }
}

impl RelayRows {
    fn has_room(&self) -> bool {
        self.all.len() <= MAX_ROWS / 2 && self.bytes < MAX_BYTES
    }

    fn insert(&mut self, row: OutboxRow) {
        let number = row.number;
        let is_first = ordered_key(&row.message).is_none_or(|key| {
            let numbers = self.keys.entry(key).or_default();
            numbers.push_back(number);
            numbers.len() == 1
        });
        if is_first {
            self.make_ready(address(&row.message), number);
        }
        self.bytes += row.message.size();
        let row = RelayRow {
            message: Arc::new(row.message),
            is_begun: false,
        };
        self.all.insert(number, row);
    }

    /// Begins a ready row.
    fn begin(&mut self, number: i64) -> Option<Arc<OutboxMessage>> {
        let row = self.all.get_mut(&number)?;
        row.is_begun = true;
        let message = Arc::clone(&row.message);
        self.unready(&address(&message), number);
        Some(message)
    }

    fn make_ready(&mut self, at: Address, number: i64) {
        self.ready.entry(at).or_default().insert(number);
    }

    fn unready(&mut self, at: &Address, number: i64) {
        if let Some(numbers) = self.ready.get_mut(at) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.ready.remove(at);
            }
        }
    }

    /// Makes the row after a confirmed one of the same key ready.
    fn advance_key(&mut self, number: i64) {
        let Some(key) = ordered_key(&self.all[&number].message) else {
            return;
        };
        let Some(numbers) = self.keys.get_mut(&key) else {
            return;
        };
        numbers.pop_front();
        match numbers.front().copied() {
            Some(next) => self.make_ready(key.0, next),
            None => drop(self.keys.remove(&key)),
        }
    }

    /// Removes the rows of an address that were not begun.
    fn forget_waiting(&mut self, at: &Address) {
        let is_waiting = |row: &RelayRow| !row.is_begun && address(&row.message) == *at;
        let rows = self.all.iter();
        let waiting: Vec<i64> = rows
            .filter_map(|(number, row)| is_waiting(row).then_some(*number))
            .collect();
        waiting.iter().for_each(|it| self.forget(*it));
    }

    /// Removes a parked row, and the rows that wait behind it.
    fn forget_key(&mut self, number: i64) {
        let row = self.all.get(&number);
        let behind = row
            .and_then(|row| self.keys.remove(&ordered_key(&row.message)?))
            .unwrap_or_default();
        self.forget(number);
        behind.iter().for_each(|it| self.forget(*it));
    }

    /// Removes a row, which a later read returns again if the storage still has it.
    fn forget(&mut self, number: i64) {
        let Some(row) = self.all.remove(&number) else {
            return;
        };
        self.bytes -= row.message.size();
        self.unready(&address(&row.message), number);
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
}

impl PublishSlots {
    /// The order of addresses: first those with less than half of the slots, then those that leave
    /// an eighth of the slots to others, because a broker may not answer for one of them. `None` for
    /// an address that has more.
    fn rank(&self, at: &Address) -> Option<bool> {
        let half = (self.max_in_flight / 2).max(1);
        let most = self.max_in_flight - self.max_in_flight / 8;
        let in_flight = self.in_flight_to.get(at).copied().unwrap_or(0);
        (in_flight < most).then_some(in_flight >= half)
    }

    fn take(&mut self, at: Address) {
        self.in_flight += 1;
        *self.in_flight_to.entry(at).or_default() += 1;
    }

    fn free(&mut self, at: &Address) {
        self.in_flight -= 1;
        if let Some(in_flight) = self.in_flight_to.get_mut(at) {
            *in_flight -= 1;
            if *in_flight == 0 {
                self.in_flight_to.remove(at);
            }
        }
    }
}

impl RequestSchedule {
    fn new(now: Instant) -> Self {
        Self {
            is_in_progress: false,
            answered_at: now,
            level_at: now,
            read_at: now,
            idle: Backoff::between(FIRST_IDLE_PAUSE, LONGEST_IDLE_PAUSE),
            has_read_probes: false,
            is_read_outdated: false,
        }
    }

    /// When to check that this process is still the leader.
    fn check_at(&self) -> Instant {
        self.answered_at + CHECK_INTERVAL
    }

    /// A read has returned rows, or none. Returns whether the rows may be added.
    fn accept_read(&mut self, is_empty: bool, now: Instant) -> bool {
        self.read_at = now;
        if std::mem::take(&mut self.is_read_outdated) {
            return false;
        }
        if is_empty {
            self.read_at = now + self.idle.advance();
        } else {
            self.idle.reset();
        }
        true
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
