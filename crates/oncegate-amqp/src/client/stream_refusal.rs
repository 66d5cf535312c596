//! Makes the broker refuse a consumer on a stream.
//!
//! # Workaround
//! - *Symptom:* a stream accepts consumers like a queue, but does not remove acknowledged messages and
//!   does not redeliver. *Versions:* all with streams (RabbitMQ 3.9 and later).
//! - *Upstream:* nothing to report: AMQP 0-9-1 has no field for the type of a queue.
//! - *Test:* `limits::a_stream_is_refused_with_the_reason` in `tests/amqp`.
//! - *May be removed* when `queue.declare-ok` has the type of the queue.

use lapin::types::{AMQPValue, FieldTable};

/// The consumer argument for the priority, which a stream refuses.
const PRIORITY_ARGUMENT: &str = "x-priority";

/// The arguments of `basic.consume`: the default priority, which changes nothing for other queues.
pub(crate) fn consumer_arguments() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert(PRIORITY_ARGUMENT.into(), AMQPValue::LongInt(0));
    arguments
}

/// Whether a channel error with the code 406 is a stream's refusal of the priority argument.
pub(crate) fn is_refusal(error: &lapin::Error) -> bool {
    error.to_string().contains(PRIORITY_ARGUMENT)
}
