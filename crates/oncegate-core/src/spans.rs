//! The spans along the road.

use std::fmt::Debug;

use tracing::field::{Empty, debug, display as as_text};
use tracing::{Span, debug_span};

use crate::context::Context;
use crate::id::MessageId;
use crate::lifecycle::Settlement;
use crate::marker::Ask;
use crate::message::{Message, Position};
use crate::source::Delivery;

/// The header in which W3C's Trace Context says to which trace a message belongs. It goes along
/// with dead letters and copies, as all of a message's headers do.
const TRACEPARENT: &str = "traceparent";

/// A span for what is done with a message, with the attributes that OpenTelemetry's conventions for
/// messaging name. They are looked up only where somebody listens.
macro_rules! of_message {
    ($name:literal, $kind:literal, $operation:literal, $message:expr, $($field:tt)*) => {
        debug_span!(
            $name,
            $($field)*,
            otel.kind = $kind,
            messaging.system = $message.origin.system,
            messaging.operation.name = operation_name($operation, $message),
            messaging.operation.r#type = $operation,
            messaging.destination.name = &*$message.origin.name,
            messaging.destination.partition.id = place($message).0.map(as_text),
            messaging.kafka.offset = place($message).1,
            traceparent = traceparent($message),
        )
    };
}

/// One run of the handler.
pub(crate) fn handles(cx: &Context) -> Span {
    let span = of_message!("oncegate.handle", "consumer", "process", &cx.message, id = %cx.id, attempt = cx.attempt, outcome = Empty);
    joins(
        &span,
        &cx.message,
        if cx.attempt == 1 && cx.failures == 0 {
            Joins::Below
        } else {
            Joins::Beside
        },
    );
    span
}

/// One run of `reconcile`: about an attempt before it.
pub(crate) fn reconciles(cx: &Context) -> Span {
    let span = of_message!("oncegate.reconcile", "consumer", "process", &cx.message, id = %cx.id, attempt = cx.attempt, outcome = Empty);
    joins(&span, &cx.message, Joins::Beside);
    span
}

/// A delivery leaves the road.
pub(crate) fn settles(
    delivery: &Delivery,
    id: Option<&MessageId>,
    attempt: u32,
    settlement: &Settlement,
) -> Span {
    let message = &delivery.message;
    let span = of_message!(
        "oncegate.settle",
        "client",
        "settle",
        message,
        id = id.map(display),
        attempt = attempt,
        outcome = debug(settlement)
    );
    joins(
        &span,
        message,
        if attempt == 1 && delivery.failures == 0 {
            Joins::Below
        } else {
            Joins::Beside
        },
    );
    span
}

/// How a span joins the trace of its message's sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Joins {
    /// As a child: what sending the message led to.
    Below,
    /// With a link: a redelivery or a duplicate, whose message has led to something before.
    Beside,
}

/// What the system itself calls an operation.
fn operation_name(operation: &'static str, message: &Message) -> &'static str {
    match (operation, message.origin.system) {
        ("settle", Some("kafka")) => "commit",
        ("settle", Some("rabbitmq")) => "ack",
        _ => operation,
    }
}

/// Where a message lies.
fn place(message: &Message) -> (Option<i32>, Option<i64>) {
    match message.origin.position {
        Position::Offset { partition, offset } => (Some(partition), Some(offset)),
        Position::Queue => (None, None),
    }
}

/// The `traceparent` of a message; `None` where it is none by W3C's rules: version, trace, span and
/// flags in lower-case hex, neither trace nor span all zero. A version that is not known yet may
/// have more behind it.
fn traceparent(message: &Message) -> Option<&str> {
    let text = std::str::from_utf8(message.headers.last(TRACEPARENT)?).ok()?;
    let is_hex = |part: &str, length| {
        part.len() == length
            && part
                .bytes()
                .all(|it| matches!(it, b'0'..=b'9' | b'a'..=b'f'))
    };
    let is_id = |part: &str, length| is_hex(part, length) && part.bytes().any(|it| it != b'0');
    let mut parts = text.split('-');
    let (version, trace, span, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let ends = version != "00" || parts.next().is_none();
    let is_one = is_hex(version, 2)
        && version != "ff"
        && is_id(trace, 32)
        && is_id(span, 16)
        && is_hex(flags, 2)
        && ends;
    // Of what a later version adds, nothing is known, nor how long it is.
    is_one.then(|| &text[..55])
}

#[cfg(not(feature = "opentelemetry"))]
fn joins(_: &Span, _: &Message, _: Joins) {}

/// Puts a span into the trace of its message's sender, or links it; nothing where no OpenTelemetry
/// layer listens.
#[cfg(feature = "opentelemetry")]
fn joins(span: &Span, message: &Message, joins: Joins) {
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
    let (Ok(trace), Ok(sender), Ok(flags)) = parts else {
        return;
    };
    let state = message
        .headers
        .last("tracestate")
        .and_then(|it| std::str::from_utf8(it).ok()?.parse::<TraceState>().ok());
    let sender = SpanContext::new(
        trace,
        sender,
        TraceFlags::new(flags),
        true,
        state.unwrap_or_default(),
    );
    match joins {
        // It fails where no OpenTelemetry layer listens: nobody wants to know.
        Joins::Below => {
            drop(span.set_parent(opentelemetry::Context::new().with_remote_span_context(sender)))
        }
        Joins::Beside => span.add_link(sender),
    }
}

/// What is asked of the store, from the question to its answer: `oncegate.claim`, `.complete`, and
/// one for each other.
///
/// Of a delivery, it joins the sender's trace as its run does; that it is a duplicate is not known
/// before the answer.
pub(crate) fn asked(
    ask: &Ask,
    id: Option<&MessageId>,
    attempt: u32,
    delivery: Option<&Delivery>,
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
    let span = match ask {
        Ask::Claim => span!("oncegate.claim"),
        Ask::Renew => span!("oncegate.renew"),
        Ask::Complete => span!("oncegate.complete"),
        Ask::Clear(_) => span!("oncegate.clear"),
        Ask::Withdraw => span!("oncegate.withdraw"),
        Ask::Reject(_) => span!("oncegate.reject"),
        Ask::Doubt => span!("oncegate.doubt"),
        Ask::Resolve(_) => span!("oncegate.resolve"),
        Ask::SendBack { .. } => span!("oncegate.send_back"),
        Ask::Forget { .. } => span!("oncegate.forget"),
    };
    if let Some(delivery) = delivery {
        joins(
            &span,
            &delivery.message,
            if attempt <= 1 && delivery.failures == 0 {
                Joins::Below
            } else {
                Joins::Beside
            },
        );
    }
    span
}

/// What was answered; the span ends here.
pub(crate) fn answered(span: Span, outcome: &dyn Debug, attempt: Option<u32>) {
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
