//! Workarounds for defects of the AMQP client (lapin) and of RabbitMQ.
//!
//! Each entry has the symptom, the code, the test, and the condition under which it may be removed.
//! The versions are lapin 4.12.3 and RabbitMQ 3.10.8 unless an entry names another. Tests are those
//! of `tests/amqp` unless an entry names a file. Remove a workaround only if its test passes without
//! it on the oldest supported release.
//!
//! # lapin
//!
//! - **Nested headers overflow the stack.** Field tables are parsed by recursion. Code:
//!   [`frame_sanitizer`]. Test: `bad_input::deeply_nested_headers_crash_nothing`. Until lapin limits
//!   the depth.
//! - **A short string that is not UTF-8 closes the connection**, at each redelivery. Code:
//!   [`frame_sanitizer`]. Test:
//!   `bad_input::a_short_string_that_is_not_utf8_is_dead_lettered_and_blocks_nothing`. Until lapin
//!   accepts any bytes.
//! - **A returned message is logged with headers and body.** Code: [`frame_sanitizer`]. Test:
//!   `tests/secrets.rs`. Until lapin logs neither.
//! - **The handshake has no timeout**, and an abandoned attempt leaks a thread and a socket. Code:
//!   [`handshake`]. Test: `recovery::a_broker_that_accepts_and_does_not_answer_leaks_no_threads`.
//!   Until lapin ends its thread when the connecting future is dropped.
//! - **Errors that oncegate reports are logged by lapin, too**, in several lines without a remedy: a
//!   refused login, a lost connection, a closed channel. Code: [`quiet_executor`]. Test:
//!   `tests/startup_log.rs`. Until lapin leaves the reporting of errors that it returns to its caller.
//! - **The URL is traced with its password.** Code: [`handshake`], which connects the socket itself.
//!   Test: `tests/secrets.rs`. Until amq-protocol-tcp redacts it.
//! - **The URL parser ignores an IPv6 host** and connects to `localhost`. Code: `node`. Test:
//!   `nodes::a_broker_is_reached_by_its_ipv6_address`. Until amq-protocol-uri parses brackets.
//! - **A returned message is attached to the next confirm on the channel**, not to its own. Code:
//!   `publish_channel`, one batch at a time on a channel. Test:
//!   `copies::a_missing_dead_letter_queue_affects_no_copy_to_another_queue`. Stays: `basic.return`
//!   has no delivery tag.
//! - **A frame that lapin cannot parse closes the connection** without the delivery tag. Code: the
//!   prefetch of 1 (`PrefetchMode::OneByOne`) in `driver`. Test:
//!   `recovery::an_unparsable_message_blocks_later_messages_and_not_earlier_ones`. Until lapin
//!   reports such a message as a delivery.
//!
//! # RabbitMQ
//!
//! - **Acknowledgements are lost when the channel closes soon after many of them** (quorum queues).
//!   Code: [`ack_drain`]. Test: `deliveries_settled_just_before_closing_are_not_redelivered`. Until
//!   RabbitMQ applies them before it closes the channel.
//! - **A queue forgets its consumer** when its leader moves, without `basic.cancel`. Code:
//!   [`silence_probe`]. Tests: `RabbitMqFault::ConsumerForgotten` in `tests/faults`, and
//!   `a_forgotten_single_active_consumer_consumes_again_with_unsettled_deliveries` there. Until
//!   RabbitMQ cancels such a consumer.
//! - **A full quorum queue keeps refusing a channel that it has refused**, even if its limit was
//!   raised, until a message leaves the queue. Code: `publish_channel` closes such a channel. Test:
//!   `limits::refused_dead_letters_are_published_once_the_queue_has_room`. Until RabbitMQ
//!   re-evaluates the limit for each message.
//! - **A resource alarm is reported only to connections that publish**, after the first content
//!   header. Code: `confirm_probe` in `publish_channel`. Test: `blocked_acks::`
//!   `it_is_redelivered_from_memory_if_its_copy_is_not_confirmed_in_time`. Until RabbitMQ reports
//!   alarms to every connection.
//! - **Published messages are never confirmed** after the queue's leader moved. Code:
//!   `CONFIRM_TIMEOUT` in `publish_channel`. Test:
//!   `a_dead_letter_that_is_never_confirmed_is_published_again` in `tests/faults`. Until RabbitMQ
//!   nacks them.
//! - **Requeuing loses the order**: one `basic.nack` of many on RabbitMQ 3, and the cancellation of
//!   a single active consumer before its messages are requeued. Code: `CloseMode` in `session`.
//!   Tests: `releases::deliveries_to_a_stopping_ordered_consumer_are_requeued_in_order`,
//!   `nodes::with_a_single_active_consumer_order_by_key_holds_across_a_fleet`. Until RabbitMQ
//!   requeues in order first.
//! - **Closing a channel counts towards the delivery limit** for every message that it holds
//!   (RabbitMQ 4.3; `basic.nack` does not count there). Code: `requeue_unsettled` in `session`.
//!   Test: `releases::closing_rejects_failed_deliveries_and_nacks_the_others`. Until closing does
//!   not count.
//! - **A stream accepts consumers like a queue.** Code: the `x-priority` argument in `session`,
//!   which a stream refuses. Test: `limits::a_stream_is_refused_with_the_reason`. Until
//!   `queue.declare-ok` has the queue's type.

pub(crate) mod ack_drain;
pub(crate) mod frame_sanitizer;
pub(crate) mod handshake;
pub(crate) mod quiet_executor;
pub(crate) mod sanitized_stream;
pub(crate) mod silence_probe;
