//! The connections to RabbitMQ with the AMQP client (lapin), and workarounds for defects of both.
//!
//! The `driver` owns one `session` (a consuming channel, opened by `open_session`) and the `publisher`
//! of copies, which has a `destination_publisher` for each queue. It passes deliveries to the source
//! through the `incoming_queue`. `node` parses the URLs, `connector` connects, `declare` declares the
//! queues.
//!
//! # Workarounds
//!
//! `docs/upstream/README.md` lists all of them with their upstream issues or reports. Each module
//! describes its own, with lapin 4.12.3 and RabbitMQ 3.10.8 unless it names other versions. Remove a
//! workaround only if its test passes without it on the oldest supported release.
//!
//! The following ones depend on the state of the source. Their
//! tests are in `tests/amqp`:
//!
//! - *Symptom:* lapin attaches a returned message to the next confirm on the channel, not to its own.
//!   *Code:* `ConfirmWindow` in `protocol`: no outstanding confirm counts. *Upstream:* nothing to report:
//!   `basic.return` has no delivery tag. *Test:*
//!   `copies::a_missing_dead_letter_queue_affects_no_copy_to_another_queue`. Stays.
//! - *Symptom:* requeuing many messages by one `basic.nack` loses their order. *Code:*
//!   `CloseMode::CloseOnly` in `protocol`. *Upstream:* `docs/upstream/rabbitmq-nack-order.md`. *Test:*
//!   `releases::deliveries_to_a_stopping_ordered_consumer_are_requeued_in_order`. *May be removed*
//!   when the oldest supported release keeps the order.
//! - *Symptom:* when a single active consumer is cancelled, the next one becomes active before the
//!   messages of the first are requeued. *Code:* `CloseMode::StayActive` in `protocol`. *Upstream:*
//!   nothing to report: `basic.cancel` leaves unacknowledged messages with the channel. *Test:*
//!   `nodes::with_a_single_active_consumer_order_by_key_holds_across_a_fleet`. Stays.

pub(crate) mod backoff;
pub(crate) mod close_delay;
pub(crate) mod confirm_timeout;
pub(crate) mod connector;
pub(crate) mod context;
pub(crate) mod declare;
pub(crate) mod destination_publisher;
pub(crate) mod driver;
pub(crate) mod frame_sanitizer;
pub(crate) mod handshake;
pub(crate) mod incoming_queue;
pub(crate) mod ipv6_url;
pub(crate) mod lost_consumer_probe;
pub(crate) mod next_ready;
pub(crate) mod node;
pub(crate) mod one_by_one;
pub(crate) mod open_session;
pub(crate) mod problem_throttle;
pub(crate) mod publisher;
pub(crate) mod quiet_executor;
pub(crate) mod refusing_channel;
pub(crate) mod requeue;
pub(crate) mod sanitized_stream;
pub(crate) mod session;
pub(crate) mod stream_refusal;
pub(crate) mod tls;
