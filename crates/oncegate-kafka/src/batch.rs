//! Reads many messages in one call: the only module of oncegate with `unsafe` code.
//!
//! librdkafka's safe wrapper reads message by message, at an event and two reference counts each.
//! Read in batches from a queue of our own, a message costs a copy of its bytes.
//!
//! # Invariants
//! 1. A [`Queue`] holds its consumer, so the client outlives the queue, as `rd_kafka_queue_destroy`
//!    asks.
//! 2. A native queue may be used from any thread: librdkafka locks it. Hence `Send` and `Sync`.
//! 3. Every message that `rd_kafka_consume_batch_queue` has returned is destroyed exactly once, by
//!    [`Fetched`], and no pointer into it outlives that: all its bytes are copied first.
//! 4. The main queue is never read in batches: rebalances are served by the safe wrapper alone.
//! 5. What librdkafka logs stands in a queue of its own, which only [`Queue`] reads: an event of it
//!    is destroyed exactly once, where it was polled, and its text is copied before. In the main
//!    queue lines overtake rebalances, and there may be more of them than are served.
//! 6. A message's error code may come from the broker, which may know codes that the enum of the
//!    bindings does not. It is read as the number it is, and no reference is made to a whole native
//!    message: fields are read one by one.

use std::ffi::{CStr, CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use oncegate_core::Headers;
use rdkafka::bindings as native;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaRespErr;

/// The most messages of one read.
pub(crate) const MOST: usize = 256;

/// The most lines of librdkafka's log that are heard in one turn.
const LINES: usize = 10_000;

/// Messages share blocks of about this many bytes. A larger message has a block of its own.
const BLOCK: usize = 1 << 20;

/// A queue of our own, which partitions are forwarded to.
pub(crate) struct Queue<C: ConsumerContext + 'static> {
    native: NonNull<native::rd_kafka_queue_t>,
    /// What librdkafka logs.
    lines: NonNull<native::rd_kafka_queue_t>,
    consumer: Arc<BaseConsumer<C>>,
    /// Partitions that are not forwarded to this queue for now.
    apart: Mutex<Vec<(Arc<str>, i32)>>,
}

// SAFETY: invariant 2; the consumer is `Send` and `Sync` by itself.
unsafe impl<C: ConsumerContext + 'static> Send for Queue<C> {}
// SAFETY: as above.
unsafe impl<C: ConsumerContext + 'static> Sync for Queue<C> {}

/// What one read has found.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    /// The messages, in the order of their partitions.
    pub(crate) records: Vec<Record>,
    /// What librdkafka says about partitions.
    pub(crate) faults: Vec<Fault>,
}

/// One message.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) sent_at: Option<SystemTime>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) body: Bytes,
}

/// An error that stands in a partition's queue.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    /// Where it stands, or a negative number.
    pub(crate) offset: i64,
    pub(crate) code: RDKafkaErrorCode,
}

impl<C: ConsumerContext + 'static> Queue<C> {
    /// New queues of this client; `None` if librdkafka has no memory for them.
    pub(crate) fn new(consumer: &Arc<BaseConsumer<C>>) -> Option<Self> {
        let client = consumer.client().native_ptr();
        // SAFETY: the client lives, `consumer` holds it.
        let (queue, lines) = unsafe {
            (
                native::rd_kafka_queue_new(client),
                native::rd_kafka_queue_new(client),
            )
        };
        let queue = Self {
            native: NonNull::new(queue)?,
            lines: NonNull::new(lines)?,
            consumer: consumer.clone(),
            apart: Mutex::default(),
        };
        // SAFETY: client and queue live. The only error is that lines do not come by a queue, and
        // they do: the wrapper asks so.
        unsafe { native::rd_kafka_set_log_queue(client, queue.lines.as_ptr()) };
        Some(queue)
    }

    /// Hands what librdkafka has logged since the last call to the context, in its order. Serves
    /// nothing else, so it may be called inside a rebalance.
    pub(crate) fn hear(&self) {
        for _ in 0..LINES {
            // SAFETY: the queue lives.
            let event = unsafe { native::rd_kafka_queue_poll(self.lines.as_ptr(), 0) };
            if event.is_null() {
                return;
            }
            let (mut facility, mut line, mut level) = (ptr::null(), ptr::null(), 0);
            // SAFETY: the event lives, and the three are ours.
            if unsafe { native::rd_kafka_event_log(event, &mut facility, &mut line, &mut level) }
                == 0
            {
                // SAFETY: both end in NUL, and live as long as the event.
                let (facility, line) = unsafe { (CStr::from_ptr(facility), CStr::from_ptr(line)) };
                self.consumer.context().log(
                    level_of(level),
                    facility.to_string_lossy().trim(),
                    line.to_string_lossy().trim(),
                );
            }
            // SAFETY: ours since it was polled, and given back once (invariant 5).
            unsafe { native::rd_kafka_event_destroy(event) }
        }
    }

    /// How much librdkafka has fetched that was not read yet: messages, and what it has to say
    /// between them.
    pub(crate) fn waiting(&self) -> u64 {
        // SAFETY: the queue lives.
        let waiting = unsafe { native::rd_kafka_queue_length(self.native.as_ptr()) };
        waiting as u64
    }

    /// Lets the messages of a partition come through this queue. To be called before the partition
    /// is assigned, or its first messages come through the main queue.
    pub(crate) fn adopt(&self, topic: &str, partition: i32) -> Adoption {
        self.forward(topic, partition, self.native.as_ptr())
    }

    /// Leaves what librdkafka fetches of these partitions from now on in queues of their own, which
    /// it fills as far as `queued.min.messages` says, and lets what came of all others meanwhile,
    /// and will come, through this one.
    pub(crate) fn set_apart(&self, partitions: Vec<(Arc<str>, i32)>) {
        let mut apart = self.apart.lock().unwrap_or_else(PoisonError::into_inner);
        for (topic, partition) in partitions.iter().filter(|it| !apart.contains(it)) {
            self.forward(topic, *partition, ptr::null_mut());
        }
        // One that is not assigned any more fetches nothing, and is forwarded again before it is
        // assigned.
        for (topic, partition) in apart.iter().filter(|it| !partitions.contains(it)) {
            self.adopt(topic, *partition);
        }
        *apart = partitions;
    }

    fn forward(&self, topic: &str, partition: i32, to: *mut native::rd_kafka_queue_t) -> Adoption {
        let Ok(topic) = CString::new(topic) else {
            return Adoption::NoSuchPartition;
        };
        // SAFETY: the client lives (invariant 1) and `topic` ends in NUL and outlives the call. The
        // handle that comes back is ours: it is forwarded and given back once. The partition's
        // queue lives on without the handle. `to` is our queue, which lives, or null, which ends
        // the forwarding.
        unsafe {
            let handle = native::rd_kafka_queue_get_partition(
                self.consumer.client().native_ptr(),
                topic.as_ptr(),
                partition,
            );
            if handle.is_null() {
                return Adoption::NoSuchPartition;
            }
            native::rd_kafka_queue_forward(handle, to);
            native::rd_kafka_queue_destroy(handle);
        }
        Adoption::Forwarded
    }

    /// The client.
    pub(crate) fn consumer(&self) -> &BaseConsumer<C> {
        &self.consumer
    }

    /// The first offset that a partition's log still has, as the broker's last answer to a fetch
    /// said.
    pub(crate) fn first_offset(&self, topic: &str, partition: i32) -> Option<i64> {
        let topic = CString::new(topic).ok()?;
        let (mut low, mut high) = (-1, -1);
        // SAFETY: the client lives (invariant 1), `topic` ends in NUL and outlives the call, and
        // both numbers are ours.
        let code = unsafe {
            native::rd_kafka_get_watermark_offsets(
                self.consumer.client().native_ptr(),
                topic.as_ptr(),
                partition,
                &mut low,
                &mut high,
            )
        };
        (code == RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR && low >= 0).then_some(low)
    }

    /// Reads what is there, at most `limit` messages and [`MOST`]; if there is nothing, waits for
    /// the first.
    pub(crate) fn read(&self, limit: usize, wait: Duration) -> Batch {
        let mut fetched = Fetched::default();
        let limit = limit.min(MOST);
        self.fetch(&mut fetched, limit, Duration::ZERO);
        if fetched.count == 0 {
            // A batch read waits until the batch is full: wait for one, then take the rest.
            self.fetch(&mut fetched, limit.min(1), wait);
            self.fetch(&mut fetched, limit, Duration::ZERO);
        }
        fetched.copy()
    }

    /// Fills up to `limit` messages in all.
    fn fetch(&self, fetched: &mut Fetched, limit: usize, wait: Duration) {
        let free = &mut fetched.messages[fetched.count..limit.max(fetched.count)];
        if free.is_empty() {
            return;
        }
        let wait = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the queue lives, and `free` has room for as many pointers as it says.
        let count = unsafe {
            native::rd_kafka_consume_batch_queue(
                self.native.as_ptr(),
                wait,
                free.as_mut_ptr(),
                free.len(),
            )
        };
        fetched.count += usize::try_from(count).unwrap_or(0);
    }
}

/// Whether a partition's queue was there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Adoption {
    Forwarded,
    NoSuchPartition,
}

impl<C: ConsumerContext + 'static> Drop for Queue<C> {
    fn drop(&mut self) {
        self.hear();
        // SAFETY: the client lives (invariant 1), and its main queue, which takes the lines from
        // here on, as long as it. All three handles are ours and given back once.
        unsafe {
            let client = self.consumer.client().native_ptr();
            let main = native::rd_kafka_queue_get_main(client);
            native::rd_kafka_set_log_queue(client, main);
            native::rd_kafka_queue_destroy(main);
            native::rd_kafka_queue_destroy(self.lines.as_ptr());
            native::rd_kafka_queue_destroy(self.native.as_ptr());
        }
    }
}

/// The level of a line, as syslog counts them.
fn level_of(level: i32) -> RDKafkaLogLevel {
    use RDKafkaLogLevel as L;
    match level {
        ..=0 => L::Emerg,
        1 => L::Alert,
        2 => L::Critical,
        3 => L::Error,
        4 => L::Warning,
        5 => L::Notice,
        6 => L::Info,
        7.. => L::Debug,
    }
}

/// Copies a message that came through the main queue.
pub(crate) fn copy(message: &BorrowedMessage<'_>) -> Batch {
    let mut copier = Copier::default();
    // SAFETY: a borrowed message points to a live native one.
    unsafe { copier.take(message.ptr()) }
    copier.finish()
}

/// Messages that librdkafka has handed over and wants back (invariant 3).
struct Fetched {
    messages: [*mut native::rd_kafka_message_t; MOST],
    count: usize,
}

impl Default for Fetched {
    fn default() -> Self {
        Self {
            messages: [ptr::null_mut(); MOST],
            count: 0,
        }
    }
}

impl Fetched {
    fn copy(self) -> Batch {
        let mut copier = Copier::default();
        for message in &self.messages[..self.count] {
            // SAFETY: librdkafka has handed it over, and it is destroyed only when `self` is
            // dropped.
            unsafe { copier.take(*message) }
        }
        copier.finish()
    }
}

impl Drop for Fetched {
    fn drop(&mut self) {
        for message in &self.messages[..self.count] {
            // SAFETY: each was handed over once and is given back once.
            unsafe { native::rd_kafka_message_destroy(*message) }
        }
    }
}

/// Copies messages into blocks.
#[derive(Default)]
struct Copier {
    block: Vec<u8>,
    /// Those whose bytes stand in the block.
    pending: Vec<Pending>,
    topic: Option<Arc<str>>,
    batch: Batch,
}

/// A message whose block is not finished. Its bytes stand one after the other: headers, key, body.
struct Pending {
    topic: Arc<str>,
    partition: i32,
    offset: i64,
    sent_at: Option<SystemTime>,
    start: usize,
    headers_end: usize,
    key_end: Option<usize>,
    end: usize,
}

impl Copier {
    /// # Safety
    /// `message` points to a message of librdkafka that lives until the call returns.
    unsafe fn take(&mut self, message: *mut native::rd_kafka_message_t) {
        // SAFETY: the caller's promise; librdkafka fills every field that is read here. An enum of
        // the bindings is as large as an `i32`, and any number is an `i32` (invariant 6).
        let (code, rkt, partition, offset, key, key_len, payload, len) = unsafe {
            (
                (&raw const (*message).err).cast::<i32>().read(),
                (*message).rkt,
                (*message).partition,
                (*message).offset,
                (*message).key,
                (*message).key_len,
                (*message).payload,
                (*message).len,
            )
        };
        // SAFETY: a message's topic lives as long as the message.
        let topic = unsafe { self.topic(rkt) };
        if code != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR as i32 {
            self.batch.faults.push(Fault {
                topic,
                partition,
                offset,
                code: known(code),
            });
            return;
        }
        if !self.block.is_empty() && self.block.len() + key_len + len > BLOCK {
            self.close_block();
        }
        let start = self.block.len();
        // SAFETY: the message lives.
        unsafe { self.copy_headers(message) };
        let headers_end = self.block.len();
        // SAFETY: key and payload point to as many bytes as the message says, or are null.
        let (key, body) = unsafe { (bytes(key, key_len), bytes(payload, len)) };
        self.block.extend_from_slice(key.unwrap_or_default());
        let key_end = key.map(|_| self.block.len());
        self.block.extend_from_slice(body.unwrap_or_default());
        // SAFETY: the message lives; the kind of its timestamp is of no interest.
        let sent_at = unsafe { native::rd_kafka_message_timestamp(message, ptr::null_mut()) };
        self.pending.push(Pending {
            topic,
            partition,
            offset,
            sent_at: u64::try_from(sent_at)
                .ok()
                .map(|sent_at| UNIX_EPOCH + Duration::from_millis(sent_at)),
            start,
            headers_end,
            key_end,
            end: self.block.len(),
        });
    }

    /// The topic's name, shared with the messages before this one.
    ///
    /// # Safety
    /// `topic` is null or points to a topic of librdkafka that lives until the call returns.
    unsafe fn topic(&mut self, topic: *mut native::rd_kafka_topic_t) -> Arc<str> {
        let name = match topic.is_null() {
            true => c"",
            // SAFETY: the caller's promise; a topic's name ends in NUL and lives as long as the
            // topic.
            false => unsafe { CStr::from_ptr(native::rd_kafka_topic_name(topic)) },
        };
        match &self.topic {
            Some(last) if last.as_bytes() == name.to_bytes() => last.clone(),
            _ => self.topic.insert(Arc::from(name.to_string_lossy())).clone(),
        }
    }

    /// Copies the headers. A name need not be UTF-8; a value may be null. librdkafka ends a name at
    /// a NUL inside it.
    ///
    /// # Safety
    /// `message` points to a message of librdkafka that lives until the call returns.
    unsafe fn copy_headers(&mut self, message: *const native::rd_kafka_message_t) {
        let mut headers = ptr::null_mut();
        // SAFETY: the message lives, and owns what `headers` is made to point to.
        let found = unsafe { native::rd_kafka_message_headers(message, &mut headers) };
        if found != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR || headers.is_null() {
            return;
        }
        let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
        for index in 0.. {
            // SAFETY: the headers live as long as their message; an index past the end is answered
            // with an error.
            let got = unsafe {
                native::rd_kafka_header_get_all(headers, index, &mut name, &mut value, &mut size)
            };
            if got != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR || name.is_null() {
                return;
            }
            // SAFETY: the name ends in NUL, and the value has `size` bytes or is null; both live
            // with the message.
            let (name, value) = unsafe { (CStr::from_ptr(name).to_bytes(), bytes(value, size)) };
            Headers::encode(&mut self.block, name, value);
        }
    }

    fn close_block(&mut self) {
        let block = Bytes::from(std::mem::take(&mut self.block));
        self.batch
            .records
            .extend(self.pending.drain(..).map(|it| Record {
                topic: it.topic,
                partition: it.partition,
                offset: it.offset,
                sent_at: it.sent_at,
                headers: Headers::from_block(block.slice(it.start..it.headers_end)),
                key: it.key_end.map(|end| block.slice(it.headers_end..end)),
                body: block.slice(it.key_end.unwrap_or(it.headers_end)..it.end),
            }));
    }

    fn finish(mut self) -> Batch {
        self.close_block();
        self.batch
    }
}

/// The code of this number, or `Unknown` for one that the bindings do not know.
fn known(code: i32) -> RDKafkaErrorCode {
    RDKafkaRespErr::try_from(code).map_or(RDKafkaErrorCode::Unknown, Into::into)
}

/// # Safety
/// `start` is null or points to `length` bytes that live and do not change for as long as the slice
/// is used.
unsafe fn bytes<'a>(start: *const c_void, length: usize) -> Option<&'a [u8]> {
    // SAFETY: the caller's promise.
    (!start.is_null()).then(|| unsafe { std::slice::from_raw_parts(start.cast(), length) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_that_only_the_broker_knows_is_unknown() {
        assert_eq!(known(-185), RDKafkaErrorCode::OperationTimedOut);
        assert_eq!(known(2), RDKafkaErrorCode::InvalidMessage);
        for code in [i32::MIN, -200_000, 9_999, i32::from(i16::MAX)] {
            assert_eq!(known(code), RDKafkaErrorCode::Unknown);
        }
    }

    #[test]
    fn a_message_with_such_a_code_is_a_fault() {
        // SAFETY: a message of nulls and zeros is a valid one; its code is written as a number, and
        // never read as an enum.
        let batch = unsafe {
            let mut message = std::mem::MaybeUninit::<native::rd_kafka_message_t>::zeroed();
            (&raw mut (*message.as_mut_ptr()).err)
                .cast::<i32>()
                .write(12_345);
            let mut copier = Copier::default();
            copier.take(message.as_mut_ptr());
            copier.finish()
        };
        assert_eq!(batch.records.len(), 0);
        assert_eq!(batch.faults[0].code, RDKafkaErrorCode::Unknown);
    }
}
