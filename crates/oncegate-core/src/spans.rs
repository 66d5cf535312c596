//! The tracing spans of a delivery.

use std::fmt::Debug;

use tracing::field::{Empty, debug, display as as_text};
use tracing::level_filters::LevelFilter;
use tracing::{Span, debug_span};

use crate::context::{Context, SharedDelivery};
use crate::id::MessageId;
use crate::lifecycle::Settlement;
use crate::marker::OperationKind;
use crate::message::{Message, Position};
use crate::source::Delivery;

/// The W3C Trace Context header with the trace of a message. Dead letters and delayed copies
/// keep it.
const TRACEPARENT: &str = "traceparent";

/// The length of `version-trace-span-flags`: 2, 32, 16 and 2 hex digits, and three hyphens.
const TRACEPARENT_LENGTH: usize = 55;

/// A span with the attributes of OpenTelemetry's semantic conventions for messaging. The attributes
/// are evaluated only if the span is enabled.
macro_rules! message_span {
    ($name:literal, $kind:literal, $operation:literal, $message:expr, $($field:tt)*) => {
        debug_span!(
            $name,
            $($field)*,
            otel.kind = $kind,
            messaging.system = $message.origin.system,
            messaging.operation.name = operation_name($operation, $message),
            messaging.operation.r#type = $operation,
            messaging.destination.name = &*$message.origin.name,
            messaging.destination.partition.id = partition_and_offset($message).0.map(as_text),
            messaging.kafka.offset = partition_and_offset($message).1,
            traceparent = traceparent($message),
        )
    };
}

/// Creates the span if a subscriber may be interested in it. This check costs less than a disabled
/// span.
#[inline]
pub(crate) fn if_enabled(span: impl FnOnce() -> Span) -> Option<Box<Span>> {
    (LevelFilter::current() >= LevelFilter::DEBUG).then(|| boxed(span))
}

#[cold]
fn boxed(span: impl FnOnce() -> Span) -> Box<Span> {
    Box::new(span())
}

/// The span of one run of the handler.
pub(crate) fn handle(cx: &Context) -> Span {
    let span = message_span!("oncegate.handle", "consumer", "process", cx.message(), id = %cx.id(), attempt = cx.attempt(), outcome = Empty);
    let link = TraceLink::of(cx.attempt() == 1, cx.0.failures);
    join_trace(&span, cx.message(), link);
    span
}

/// The span of one run of `reconcile`.
pub(crate) fn reconcile(cx: &Context) -> Span {
    let span = message_span!("oncegate.reconcile", "consumer", "process", cx.message(), id = %cx.id(), attempt = cx.attempt(), outcome = Empty);
    join_trace(&span, cx.message(), TraceLink::Linked);
    span
}

/// The span of the settlement of a delivery.
pub(crate) fn settle(
    delivery: &Delivery,
    id: Option<&MessageId>,
    attempt: u32,
    settlement: &Settlement,
) -> Span {
    let message = &delivery.message;
    let span = message_span!(
        "oncegate.settle",
        "client",
        "settle",
        message,
        id = id.map(display),
        attempt = attempt,
        outcome = debug(settlement)
    );
    let link = TraceLink::of(attempt == 1, delivery.failures);
    join_trace(&span, message, link);
    span
}

/// How a span refers to the trace of the message's producer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TraceLink {
    /// The span is a child of the producer's span.
    Child,
    /// The span has a trace of its own, and a link to the producer's span, because the message was
    /// redelivered.
    Linked,
}

impl TraceLink {
    fn of(is_first_attempt: bool, failures: u32) -> Self {
        match is_first_attempt && failures == 0 {
            true => Self::Child,
            false => Self::Linked,
        }
    }
}

/// The name of an operation in the terms of its broker.
fn operation_name(operation: &'static str, message: &Message) -> &'static str {
    match (operation, message.origin.system) {
        ("settle", Some("kafka")) => "commit",
        ("settle", Some("rabbitmq")) => "ack",
        _ => operation,
    }
}

/// The partition and the offset of a message.
fn partition_and_offset(message: &Message) -> (Option<i32>, Option<i64>) {
    match message.origin.position {
        Position::Offset { partition, offset } => (Some(partition), Some(offset)),
        Position::Queue => (None, None),
    }
}

/// The `traceparent` of a message; `None` if it is not valid by W3C's rules: version, trace, span
/// and flags in lower-case hex, neither trace nor span all zero. A later version of the format may
/// append more fields.
fn traceparent(message: &Message) -> Option<&str> {
    let text = std::str::from_utf8(message.headers.last(TRACEPARENT)?).ok()?;
    let is_hex = |part: &str, length| {
        part.len() == length
            && part
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_id = |part: &str, length| is_hex(part, length) && part.bytes().any(|byte| byte != b'0');
    let mut parts = text.split('-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let has_valid_end = version != "00" || parts.next().is_none();
    let is_valid = is_hex(version, 2)
        && version != "ff"
        && is_id(trace, 32)
        && is_id(span, 16)
        && is_hex(flags, 2)
        && has_valid_end;
    // Cuts off the fields that a later version appends, which may have any length.
    is_valid.then(|| &text[..TRACEPARENT_LENGTH])
}

#[cfg(not(feature = "opentelemetry"))]
fn join_trace(_: &Span, _: &Message, _: TraceLink) {}

/// Puts a span into the trace of its message's producer, or links it to that trace. Has no effect
/// without an OpenTelemetry layer.
#[cfg(feature = "opentelemetry")]
fn join_trace(span: &Span, message: &Message, link: TraceLink) {
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
    };
    use tracing_opentelemetry::OpenTelemetrySpanExt;
    if span.is_disabled() {
        return;
    }
    let Some(parent) = traceparent(message) else {
        return;
    };
    let parts = (
        TraceId::from_hex(&parent[3..35]),
        SpanId::from_hex(&parent[36..52]),
        u8::from_str_radix(&parent[53..55], 16),
    );
    let (Ok(trace), Ok(producer), Ok(flags)) = parts else {
        return;
    };
    let state = message
        .headers
        .last("tracestate")
        .and_then(|value| std::str::from_utf8(value).ok()?.parse::<TraceState>().ok());
    let producer = SpanContext::new(
        trace,
        producer,
        TraceFlags::new(flags),
        true,
        state.unwrap_or_default(),
    );
    match link {
        // Fails only without an OpenTelemetry layer.
        TraceLink::Child => {
            drop(span.set_parent(opentelemetry::Context::new().with_remote_span_context(producer)))
        }
        TraceLink::Linked => span.add_link(producer),
    }
}

/// The span of an operation, from the request to the store to its answer: `oncegate.claim`,
/// `oncegate.complete` and so on.
///
/// With a delivery, the span refers to the producer's trace as the span of a run does, even for a
/// duplicate, which is known only after the answer.
pub(crate) fn operation(
    kind: &OperationKind,
    id: Option<&MessageId>,
    attempt: u32,
    delivery: Option<&SharedDelivery>,
) -> Span {
    macro_rules! span {
        ($name:literal) => {
            debug_span!(
                $name,
                id = id.map(display),
                attempt = (attempt > 0).then_some(attempt),
                outcome = Empty
            )
        };
    }
    let span = match kind {
        OperationKind::Claim => span!("oncegate.claim"),
        OperationKind::Renew => span!("oncegate.renew"),
        OperationKind::Complete => span!("oncegate.complete"),
        OperationKind::Clear(_) => span!("oncegate.clear"),
        OperationKind::Withdraw => span!("oncegate.withdraw"),
        OperationKind::Reject(_) => span!("oncegate.reject"),
        OperationKind::Doubt => span!("oncegate.doubt"),
        OperationKind::Resolve(_) => span!("oncegate.resolve"),
        OperationKind::Redrive { .. } => span!("oncegate.redrive"),
        OperationKind::Forget { .. } => span!("oncegate.forget"),
    };
    if let Some(delivery) = delivery {
        let link = TraceLink::of(attempt <= 1, delivery.failures);
        join_trace(&span, delivery.message(), link);
    }
    span
}

/// Records the answer and ends the span of an operation.
pub(crate) fn end_operation(span: Span, outcome: &dyn Debug, attempt: Option<u32>) {
    span.record("outcome", debug(outcome));
    if let Some(attempt) = attempt {
        span.record("attempt", attempt);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(header: &str) -> Option<String> {
        traceparent(&Message::new("").with_header(TRACEPARENT, header)).map(str::to_owned)
    }

    #[test]
    fn a_traceparent_is_read_by_w3cs_rules() {
        let right = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        assert_eq!(read(right).as_deref(), Some(right));
        assert_eq!(
            read(&format!("cc{}-what-comes", &right[2..])),
            Some(format!("cc{}", &right[2..]))
        );
        let wrong = [
            "",
            "secret",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
            "00-4bf92f3577b34da6a3ce929d0e0e47\u{fc}-00f067aa0ba902b7-01",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ];
        for header in wrong {
            assert_eq!(read(header), None, "{header}");
        }
        assert_eq!(traceparent(&Message::new("")), None);
    }
}
