//! The connections to RabbitMQ through the AMQP client (lapin), and workarounds for defects of
//! RabbitMQ and of lapin.
//!
//! The `driver` owns one `session` (a consuming channel, opened by `open_session`) and the
//! `publisher` of copies, which has a `destination_publisher` for each queue. The driver passes
//! deliveries to the source through the `incoming_queue`. `node` parses the URLs, `connector`
//! connects, `outbox_publisher` publishes for a relay, `declare` declares the queues.
//!
//! # Workarounds
//!
//! `docs/upstream/README.md` lists all workarounds with their upstream issues or reports. The
//! module of a workaround describes it; the symptoms were seen with lapin 4.12.3 and RabbitMQ
//! 3.10.8 unless it names other versions. Remove a workaround only if its test passes without it on
//! the oldest supported release.

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
pub(crate) mod outbox_publisher;
pub(crate) mod problem_throttle;
pub(crate) mod publisher;
pub(crate) mod quiet_executor;
pub(crate) mod refusing_channel;
pub(crate) mod requeue;
pub(crate) mod sanitized_stream;
pub(crate) mod session;
pub(crate) mod stream_refusal;
pub(crate) mod tls;
pub(crate) mod url_parameters;
