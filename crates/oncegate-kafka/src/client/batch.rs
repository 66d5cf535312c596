//! Reads messages in batches: with its submodules, the only module of oncegate with `unsafe` code.
//!
//! The safe wrapper (rdkafka) reads one message at a time, and creates an event and changes two
//! reference counts for each. Here, several messages are read at once from a separate queue, and
//! only their bytes are copied.
//!
//! # Invariants
//! 1. A [`MessageQueue`] holds its consumer, so the client outlives the queue, as
//!    `rd_kafka_queue_destroy` requires.
//! 2. A native queue may be used from any thread, because librdkafka locks it. Hence `Send` and
//!    `Sync`.
//! 3. [`FetchedMessages`] destroys every message that `rd_kafka_consume_batch_queue` returned
//!    exactly once. No pointer into a message outlives it: all its bytes are copied first.
//! 4. The main queue is never read in batches; only the safe wrapper serves rebalances.
//! 5. librdkafka's log has a queue of its own, which only [`LogQueue`] polls. Each event is
//!    destroyed exactly once, where it was polled, after its text was copied.
//! 6. No reference to a whole native message is created: fields are read one by one, and the error code
//!    as [`error_code`] describes.

mod commit_result;
mod error_code;
mod log_queue;

use std::ffi::{CStr, CString, c_void};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use oncegate_core::Headers;
use oncegate_core::internal::Lock;
use rdkafka::bindings as native;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaRespErr;

pub(super) use self::commit_result::commit;
use self::log_queue::LogQueue;

/// Maximum number of messages per read.
pub(crate) const MAX_BATCH: usize = 256;

/// The bytes of messages are copied into shared blocks of at most this size. A larger message has a
/// block of its own.
const BLOCK_BYTES: usize = 1 << 20;

/// The message queue: librdkafka's queues of the assigned partitions are forwarded to it.
pub(crate) struct MessageQueue<C: ConsumerContext + 'static> {
    native: NonNull<native::rd_kafka_queue_t>,
    log_queue: LogQueue<C>,
    consumer: Arc<BaseConsumer<C>>,
    /// The full partitions, whose own queues are not forwarded to this queue.
    unforwarded: Lock<Vec<(Arc<str>, i32)>>,
}

// SAFETY: invariant 2; the consumer is `Send` and `Sync` by itself.
unsafe impl<C: ConsumerContext + 'static> Send for MessageQueue<C> {}
// SAFETY: as above.
unsafe impl<C: ConsumerContext + 'static> Sync for MessageQueue<C> {}

/// The result of one read.
#[derive(Debug, Default)]
pub(crate) struct RecordBatch {
    /// The messages. Those of one partition are in order.
    pub(crate) records: Vec<ConsumerRecord>,
    /// Errors of partitions.
    pub(crate) errors: Vec<PartitionError>,
}

/// One message.
#[derive(Debug)]
pub(crate) struct ConsumerRecord {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) sent_at: Option<SystemTime>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) body: Bytes,
}

/// An error in a partition's queue.
#[derive(Debug)]
pub(crate) struct PartitionError {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
    /// The offset of the error; negative if it has none.
    pub(crate) offset: i64,
    pub(crate) code: RDKafkaErrorCode,
}

impl<C: ConsumerContext + 'static> MessageQueue<C> {
    /// Creates the queues of this client; `None` if librdkafka is out of memory.
    pub(crate) fn new(consumer: &Arc<BaseConsumer<C>>) -> Option<Self> {
        // SAFETY: the client lives, `consumer` holds it.
        let queue = unsafe { native::rd_kafka_queue_new(consumer.client().native_ptr()) };
        Some(Self {
            native: NonNull::new(queue)?,
            log_queue: LogQueue::new(consumer)?,
            consumer: consumer.clone(),
            unforwarded: Lock::default(),
        })
    }

    /// Passes librdkafka's log lines since the last call to `ClientContext::log`, in order. Serves
    /// no other events, so it may be called inside a rebalance.
    pub(crate) fn forward_log(&self) {
        self.log_queue.forward();
    }

    /// Number of operations in the queue that are not read yet: messages and errors.
    pub(crate) fn length(&self) -> u64 {
        // SAFETY: the queue lives.
        let length = unsafe { native::rd_kafka_queue_length(self.native.as_ptr()) };
        length as u64
    }

    /// Forwards a partition's own queue to this one. Must be called before the partition is
    /// assigned; otherwise its first messages arrive in the main queue. Returns false if librdkafka
    /// has no such partition.
    pub(crate) fn forward_partition(&self, topic: &str, partition: i32) -> bool {
        self.forward(topic, partition, self.native.as_ptr())
    }

    /// Stops forwarding these partitions, whose own queues then fill up to `queued.min.messages`,
    /// and forwards all others again, including the messages fetched in between.
    pub(crate) fn forward_all_except(&self, partitions: Vec<(Arc<str>, i32)>) {
        let mut unforwarded = self.unforwarded.lock();
        for (topic, partition) in partitions.iter().filter(|it| !unforwarded.contains(it)) {
            self.forward(topic, *partition, ptr::null_mut());
        }
        // A partition that is no longer assigned fetches nothing, and is forwarded again before its
        // next assignment.
        for (topic, partition) in unforwarded.iter().filter(|it| !partitions.contains(it)) {
            self.forward_partition(topic, *partition);
        }
        *unforwarded = partitions;
    }

    /// Forwards a partition's own queue to `to`, or ends the forwarding if `to` is null. Returns
    /// false if librdkafka has no such partition.
    fn forward(&self, topic: &str, partition: i32, to: *mut native::rd_kafka_queue_t) -> bool {
        let Ok(topic) = CString::new(topic) else {
            return false;
        };
        // SAFETY: the client lives (invariant 1) and `topic` ends in NUL and outlives the call. The
        // returned handle is owned here and is destroyed once; the partition's queue outlives it.
        // `to` is our queue, which lives, or null, which ends the forwarding.
        unsafe {
            let handle = native::rd_kafka_queue_get_partition(
                self.consumer.client().native_ptr(),
                topic.as_ptr(),
                partition,
            );
            if handle.is_null() {
                return false;
            }
            native::rd_kafka_queue_forward(handle, to);
            native::rd_kafka_queue_destroy(handle);
        }
        true
    }

    pub(crate) fn consumer(&self) -> &BaseConsumer<C> {
        &self.consumer
    }

    /// The log start offset of a partition, from the last fetch response; `None` if it is unknown.
    pub(crate) fn log_start_offset(&self, topic: &str, partition: i32) -> Option<i64> {
        let topic = CString::new(topic).ok()?;
        let (mut low, mut high) = (-1, -1);
        // SAFETY: the client lives (invariant 1), `topic` ends in NUL and outlives the call, and
        // both numbers are local.
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

    /// Reads at most `limit` and at most [`MAX_BATCH`] messages. If the queue is empty, waits for
    /// the first message, at most for `wait`.
    pub(crate) fn read(&self, limit: usize, wait: Duration) -> RecordBatch {
        let mut fetched = FetchedMessages::default();
        let limit = limit.min(MAX_BATCH);
        self.fetch(&mut fetched, limit, Duration::ZERO);
        if fetched.count == 0 {
            // A read of a whole batch would wait until the batch is full. So this waits for one
            // message, and then reads the available messages without waiting.
            self.fetch(&mut fetched, limit.min(1), wait);
            self.fetch(&mut fetched, limit, Duration::ZERO);
        }
        fetched.copy()
    }

    /// Adds messages to `fetched` until it has `limit` messages, or `wait` has passed.
    fn fetch(&self, fetched: &mut FetchedMessages, limit: usize, wait: Duration) {
        let free = &mut fetched.messages[fetched.count..limit.max(fetched.count)];
        if free.is_empty() {
            return;
        }
        let wait = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the queue lives, and `free` has room for as many pointers as its length says.
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

impl<C: ConsumerContext + 'static> Drop for MessageQueue<C> {
    fn drop(&mut self) {
        // SAFETY: the client lives (invariant 1). The queue is owned here and destroyed once.
        unsafe { native::rd_kafka_queue_destroy(self.native.as_ptr()) }
    }
}

/// Copies a message that arrived in librdkafka's main queue.
pub(crate) fn copy(message: &BorrowedMessage<'_>) -> RecordBatch {
    let mut copier = MessageCopier::default();
    // SAFETY: a borrowed message points to a live native one.
    unsafe { copier.take(message.ptr()) }
    copier.finish()
}

/// Native messages that librdkafka returned, destroyed on drop (invariant 3).
struct FetchedMessages {
    messages: [*mut native::rd_kafka_message_t; MAX_BATCH],
    count: usize,
}

impl Default for FetchedMessages {
    fn default() -> Self {
        Self {
            messages: [ptr::null_mut(); MAX_BATCH],
            count: 0,
        }
    }
}

impl FetchedMessages {
    fn copy(self) -> RecordBatch {
        let mut copier = MessageCopier::default();
        for message in &self.messages[..self.count] {
            // SAFETY: librdkafka returned the message, and it is destroyed only when `self` is
            // dropped.
            unsafe { copier.take(*message) }
        }
        copier.finish()
    }
}

impl Drop for FetchedMessages {
    fn drop(&mut self) {
        for message in &self.messages[..self.count] {
            // SAFETY: each message was returned once and is destroyed once.
            unsafe { native::rd_kafka_message_destroy(*message) }
        }
    }
}

/// Copies messages into blocks of memory that several messages share.
#[derive(Default)]
struct MessageCopier {
    block: Vec<u8>,
    /// Messages whose bytes are in the current block.
    pending: Vec<PendingRecord>,
    topic: Option<Arc<str>>,
    batch: RecordBatch,
}

/// A message in an unfinished block. Its bytes are consecutive: headers, key, body.
struct PendingRecord {
    topic: Arc<str>,
    partition: i32,
    offset: i64,
    sent_at: Option<SystemTime>,
    start: usize,
    headers_end: usize,
    key_end: Option<usize>,
    end: usize,
}

impl MessageCopier {
    /// Copies a message into the current block, or adds its error to the batch.
    ///
    /// # Safety
    /// `message` points to a message of librdkafka that lives until the call returns.
    unsafe fn take(&mut self, message: *mut native::rd_kafka_message_t) {
        // SAFETY: the caller's promise; librdkafka sets every field that is read here.
        let (error, rkt, partition, offset, key, key_len, payload, len) = unsafe {
            (
                error_code::of(message),
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
        if let Some(code) = error {
            self.batch.errors.push(PartitionError {
                topic,
                partition,
                offset,
                code,
            });
            return;
        }
        if !self.block.is_empty() && self.block.len() + key_len + len > BLOCK_BYTES {
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
        // SAFETY: the message lives; the type of its timestamp is not needed.
        let sent_at = unsafe { native::rd_kafka_message_timestamp(message, ptr::null_mut()) };
        self.pending.push(PendingRecord {
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

    /// The topic's name; the same allocation as for the previous message if that has the same
    /// topic.
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

    /// Copies the headers. A name need not be UTF-8; a value may be null. librdkafka truncates a
    /// name at a NUL byte.
    ///
    /// # Safety
    /// `message` points to a message of librdkafka that lives until the call returns.
    unsafe fn copy_headers(&mut self, message: *const native::rd_kafka_message_t) {
        let mut headers = ptr::null_mut();
        // SAFETY: the message lives and owns the headers that are returned.
        let code = unsafe { native::rd_kafka_message_headers(message, &mut headers) };
        if code != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR || headers.is_null() {
            return;
        }
        let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
        for index in 0.. {
            // SAFETY: the headers live as long as their message; an index past the end returns an
            // error.
            let code = unsafe {
                native::rd_kafka_header_get_all(headers, index, &mut name, &mut value, &mut size)
            };
            if code != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR || name.is_null() {
                return;
            }
            // SAFETY: the name ends in NUL, and the value has `size` bytes or is null; both live
            // with the message.
            let (name, value) = unsafe { (CStr::from_ptr(name).to_bytes(), bytes(value, size)) };
            Headers::encode(&mut self.block, name, value);
        }
    }

    /// Converts the pending messages, which share the bytes of the block, and starts a new block.
    fn close_block(&mut self) {
        let block = Bytes::from(std::mem::take(&mut self.block));
        self.batch
            .records
            .extend(self.pending.drain(..).map(|it| ConsumerRecord {
                topic: it.topic,
                partition: it.partition,
                offset: it.offset,
                sent_at: it.sent_at,
                headers: Headers::from_block(block.slice(it.start..it.headers_end)),
                key: it.key_end.map(|end| block.slice(it.headers_end..end)),
                body: block.slice(it.key_end.unwrap_or(it.headers_end)..it.end),
            }));
    }

    fn finish(mut self) -> RecordBatch {
        self.close_block();
        self.batch
    }
}

/// The bytes at `start`; `None` if it is null.
///
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
    fn a_message_with_an_unknown_error_code_is_an_error() {
        // SAFETY: a message of nulls and zeros is a valid one; its code is written as a number, and
        // never read as an enum.
        let batch = unsafe {
            let mut message = std::mem::MaybeUninit::<native::rd_kafka_message_t>::zeroed();
            (&raw mut (*message.as_mut_ptr()).err)
                .cast::<i32>()
                .write(12_345);
            let mut copier = MessageCopier::default();
            copier.take(message.as_mut_ptr());
            copier.finish()
        };
        assert_eq!(batch.records.len(), 0);
        assert_eq!(batch.errors[0].code, RDKafkaErrorCode::Unknown);
    }
}
