//! The spans of a message join the trace of its sender, as OpenTelemetry exports them. A test binary
//! of its own, because the subscriber is global.

use std::time::Duration;

use oncegate_core::*;
use opentelemetry::trace::{SpanKind, TraceId, TracerProvider};
use opentelemetry::{KeyValue, SpanId};
use opentelemetry_sdk::trace::{InMemorySpanExporter, SdkTracerProvider, SpanData};
use tracing_subscriber::layer::SubscriberExt;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SENDER: &str = "00f067aa0ba902b7";

/// Fails for one id, and rejects another.
struct Scripted;

impl Handler for Scripted {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        match cx.id() {
            "refused" => Err("no").reject(),
            "fails" => Err("not yet").retry(),
            _ => {
                tracing::info_span!("charge").in_scope(|| ());
                Ok(())
            }
        }
    }
}

fn message(id: &str) -> Message {
    Message::new("secret-canary")
        .with_message_id(id.to_owned())
        .with_header("traceparent", format!("00-{TRACE}-{SENDER}-01"))
}

#[tokio::test]
async fn a_message_joins_the_trace_of_its_sender_and_a_redelivery_links_to_it() {
    let exporter = InMemorySpanExporter::default();
    let provider = SdkTracerProvider::builder()
        .with_simple_exporter(exporter.clone())
        .build();
    let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer("oncegate"));
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer))
        .expect("the first");

    let broker = MemoryBroker::new("payments");
    for id in ["once", "once", "fails", "refused"] {
        broker.publish(message(id));
    }
    broker.publish(Message::new("x").with_message_id("untraced"));
    for (id, system) in [("on-kafka", "kafka"), ("on-rabbitmq", "rabbitmq")] {
        let mut message = message(id);
        message.origin.system = Some(system);
        broker.publish(message);
    }
    let all = broker.clone();
    Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .decode(RawBytes)
        .max_inline_retries(0)
        .backoff(Duration::from_millis(1), Duration::from_millis(1))
        .max_attempts(3)
        .handler(Scripted)
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");

    let spans = exporter.get_finished_spans().expect("kept");
    let text = |span: &SpanData, key: &str| {
        let found = span
            .attributes
            .iter()
            .find(|KeyValue { key: name, .. }| name.as_str() == key);
        found.map(|attribute| attribute.value.to_string())
    };
    let of = |name: &str, id: &str| -> Vec<&SpanData> {
        spans
            .iter()
            .filter(|span| span.name == name && text(span, "id").as_deref() == Some(id))
            .collect()
    };
    let (trace, sender) = (
        TraceId::from_hex(TRACE).expect("hex"),
        SpanId::from_hex(SENDER).expect("hex"),
    );
    let is_child = |span: &SpanData| {
        span.span_context.trace_id() == trace
            && span.parent_span_id == sender
            && span.links.is_empty()
    };
    let is_linked = |span: &SpanData| {
        let links: Vec<_> = span
            .links
            .iter()
            .map(|link| (link.span_context.trace_id(), link.span_context.span_id()))
            .collect();
        span.span_context.trace_id() != trace && links == [(trace, sender)]
    };

    let [handled] = of("oncegate.handle", "once")[..] else {
        panic!("{spans:#?}")
    };
    assert!(is_child(handled), "{handled:#?}");
    assert_eq!(handled.span_kind, SpanKind::Consumer);
    let named = [
        ("messaging.operation.type", "process"),
        ("messaging.operation.name", "process"),
        ("messaging.destination.name", "payments"),
    ];
    for (key, value) in named {
        assert_eq!(text(handled, key).as_deref(), Some(value), "{key}");
    }
    // The memory broker has no name as a messaging system.
    assert_eq!(text(handled, "messaging.system"), None);
    for (id, system, settles) in [
        ("on-kafka", "kafka", "commit"),
        ("on-rabbitmq", "rabbitmq", "ack"),
    ] {
        for (span, operation) in [("oncegate.handle", "process"), ("oncegate.settle", settles)] {
            let [span] = of(span, id)[..] else {
                panic!("{spans:#?}")
            };
            let attributes =
                ["messaging.system", "messaging.operation.name"].map(|key| text(span, key));
            assert_eq!(
                attributes,
                [Some(system.to_owned()), Some(operation.to_owned())],
                "{span:#?}"
            );
        }
    }
    // A span that the handler opens is a child of its run's span.
    let inside = |span: &&SpanData| {
        span.name == "charge" && span.parent_span_id == handled.span_context.span_id()
    };
    let charge = spans.iter().find(inside).expect("the handler's own span");
    assert_eq!(charge.span_context.trace_id(), trace);

    let (claims, completed) = (
        of("oncegate.claim", "once"),
        of("oncegate.complete", "once"),
    );
    assert!(
        claims.len() >= 2 && claims.iter().all(|span| is_child(span)),
        "{claims:#?}"
    );
    assert!(
        !completed.is_empty() && completed.iter().all(|span| is_child(span)),
        "{completed:#?}"
    );
    // The settlement of the duplicate links to the sender's span; that of the first delivery is its
    // child.
    let settled = of("oncegate.settle", "once");
    assert_eq!(settled.len(), 2);
    assert_eq!(
        (
            settled.iter().filter(|span| is_child(span)).count(),
            settled.iter().filter(|span| is_linked(span)).count()
        ),
        (1, 1),
        "{settled:#?}"
    );
    // A run after a failure links to the sender's span, too.
    let attempts = of("oncegate.handle", "fails");
    assert_eq!(attempts.len(), 3);
    assert_eq!(
        (
            attempts.iter().filter(|span| is_child(span)).count(),
            attempts.iter().filter(|span| is_linked(span)).count()
        ),
        (1, 2),
        "{attempts:#?}"
    );
    // A message without a trace starts one.
    let [untraced] = of("oncegate.handle", "untraced")[..] else {
        panic!("{spans:#?}")
    };
    assert!(
        untraced.span_context.trace_id() != trace && untraced.links.is_empty(),
        "{untraced:#?}"
    );

    let dead_letters = broker.dead_letters();
    assert_eq!(dead_letters.len(), 2);
    for dead_letter in dead_letters {
        assert_eq!(
            dead_letter.message.headers.last("traceparent"),
            message("x").headers.last("traceparent"),
            "the header is kept"
        );
    }
    assert!(!format!("{spans:?}").contains("canary"));
}
