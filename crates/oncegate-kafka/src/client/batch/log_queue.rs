//! A queue of its own for librdkafka's log.
//!
//! # Workaround
//! - *Symptom:* rdkafka adds log lines to the main queue, where they delay rebalances: there may be
//!   more lines than are served per turn. *Version:* rdkafka 0.39.0.
//! - *Upstream:* `docs/upstream/rust-rdkafka-log-queue.md`.
//! - *Test:* `log_lines_do_not_delay_rebalances` in `start_position`.
//! - *May be removed* when the queue of the log can be chosen.
//!
//! The invariants are those of [`batch`](super).

use std::ffi::CStr;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use rdkafka::bindings as native;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};

/// Maximum number of librdkafka's log lines that one call forwards, so that it ends.
const MAX_LOG_LINES: usize = 10_000;

/// The queue of a client's log. When it is dropped, log lines go to the main queue again.
pub(super) struct LogQueue<C: ConsumerContext + 'static> {
    native: NonNull<native::rd_kafka_queue_t>,
    consumer: Arc<BaseConsumer<C>>,
}

impl<C: ConsumerContext + 'static> LogQueue<C> {
    /// Creates the queue and sends the client's log to it; `None` if librdkafka is out of memory.
    pub(super) fn new(consumer: &Arc<BaseConsumer<C>>) -> Option<Self> {
        let client = consumer.client().native_ptr();
        // SAFETY: the client lives, `consumer` holds it.
        let native = unsafe { native::rd_kafka_queue_new(client) };
        let queue = Self {
            native: NonNull::new(native)?,
            consumer: consumer.clone(),
        };
        // SAFETY: client and queue live. The only possible error is that log lines are not queued,
        // and the wrapper sets `log.queue`.
        unsafe { native::rd_kafka_set_log_queue(client, queue.native.as_ptr()) };
        Some(queue)
    }

    /// Forwards the log lines since the last call to the context, in order.
    pub(super) fn forward(&self) {
        for _ in 0..MAX_LOG_LINES {
            // SAFETY: the queue lives.
            let event = unsafe { native::rd_kafka_queue_poll(self.native.as_ptr(), 0) };
            if event.is_null() {
                return;
            }
            let (mut facility, mut line, mut level) = (ptr::null(), ptr::null(), 0);
            // SAFETY: the event lives, and the three variables are local.
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
            // SAFETY: polling passed the event to this code, which destroys it once (invariant 5).
            unsafe { native::rd_kafka_event_destroy(event) }
        }
    }
}

impl<C: ConsumerContext + 'static> Drop for LogQueue<C> {
    fn drop(&mut self) {
        self.forward();
        // SAFETY: the client lives (invariant 1), and so does its main queue, which receives the
        // log lines from now on. Both handles are owned here and destroyed once.
        unsafe {
            let client = self.consumer.client().native_ptr();
            let main = native::rd_kafka_queue_get_main(client);
            native::rd_kafka_set_log_queue(client, main);
            native::rd_kafka_queue_destroy(main);
            native::rd_kafka_queue_destroy(self.native.as_ptr());
        }
    }
}

/// The log level of a syslog severity.
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
