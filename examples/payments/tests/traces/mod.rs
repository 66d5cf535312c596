//! Tests that a trace leads from the producer to the worker, with a collector that receives OTLP
//! over HTTP.

use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::extract::State;
use axum::routing::post;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value::StringValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;

use crate::{remove_queues, until};

/// The exported spans, each with its service name.
type Exported = Arc<Mutex<Vec<(String, Span)>>>;

/// Starts a collector. Returns its URL.
async fn collect(exported: Exported) -> String {
    async fn receive(State(exported): State<Exported>, body: Bytes) -> Vec<u8> {
        let request = ExportTraceServiceRequest::decode(body).expect("OTLP");
        let mut exported = exported.lock().expect("the lock is not poisoned");
        for resource in request.resource_spans {
            let attributes = resource.resource.expect("a resource").attributes;
            let service = attributes
                .into_iter()
                .find(|it| it.key == "service.name")
                .and_then(|it| it.value?.value);
            let Some(StringValue(service)) = service else {
                panic!("a service without a name")
            };
            let spans = resource
                .scope_spans
                .into_iter()
                .flat_map(|scope| scope.spans);
            exported.extend(spans.map(|span| (service.clone(), span)));
        }
        Vec::new()
    }
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let address = listener.local_addr().expect("an address");
    let router = axum::Router::new()
        .route("/v1/traces", post(receive))
        .with_state(exported);
    tokio::spawn(async move { axum::serve(listener, router).await });
    format!("http://{address}")
}

fn attribute(span: &Span, key: &str) -> Option<String> {
    match span
        .attributes
        .iter()
        .find(|it| it.key == key)?
        .value
        .as_ref()?
        .value
        .as_ref()?
    {
        StringValue(text) => Some(text.clone()),
        _ => None,
    }
}

/// Checks that the trace of a message has the spans from sending to settlement.
fn check_trace(spans: &[(String, Span)], sent: &Span) -> Result<(), String> {
    let child = |parent: &Span, service: &str, name: &str, kind: SpanKind| {
        let found = spans.iter().find(|(of, span)| {
            (of.as_str(), span.name.as_str(), span.kind) == (service, name, kind as i32)
                && (&span.trace_id, &span.parent_span_id) == (&parent.trace_id, &parent.span_id)
        });
        found
            .map(|(_, span)| span.clone())
            .ok_or_else(|| format!("no {name} of {service}"))
    };
    child(
        sent,
        "payments-worker",
        "oncegate.claim",
        SpanKind::Internal,
    )?;
    let handled = child(
        sent,
        "payments-worker",
        "oncegate.handle",
        SpanKind::Consumer,
    )?;
    if attribute(&handled, "id") != attribute(sent, "id") {
        return Err("the span `oncegate.handle` has the id of another message".to_owned());
    }
    child(sent, "payments-worker", "oncegate.settle", SpanKind::Client)?;
    Ok(())
}

/// Checks that a duplicate has its own trace with a link to the span of the sender.
fn check_duplicate_link(spans: &[(String, Span)]) -> Result<(), String> {
    let sent: Vec<&Span> = spans
        .iter()
        .map(|(_, span)| span)
        .filter(|span| span.name == "payments.send")
        .collect();
    let links_to_sender = |span: &Span| {
        let [link] = &span.links[..] else {
            return false;
        };
        sent.iter().any(|it| {
            it.span_id == link.span_id
                && it.trace_id == link.trace_id
                && it.trace_id != span.trace_id
        })
    };
    let linked = spans.iter().any(|(of, span)| {
        of == "payments-worker" && span.name == "oncegate.settle" && links_to_sender(span)
    });
    if linked {
        Ok(())
    } else {
        Err("no settlement of a duplicate is linked to its sender".to_owned())
    }
}

async fn a_trace_spans_producer_and_worker(broker: &'static str) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let (run_dir, name) = (
        directory.path(),
        format!("traces-{broker}-{}", std::process::id()),
    );
    let exported = Exported::default();
    let collector = collect(Arc::clone(&exported)).await;
    let (kafka, rabbitmq) = (
        oncegate_testkit::kafka_brokers().expect("set"),
        oncegate_testkit::rabbitmq_url().expect("set"),
    );
    let redis = oncegate_testkit::redis_url().expect("set");
    let mut variables = crate::variables(&name, broker, [&kafka, &rabbitmq, &redis]);
    // The variables of OpenTelemetry: the endpoint, and a short delay of batches.
    variables.push(("OTEL_EXPORTER_OTLP_ENDPOINT", &collector));
    variables.push(("OTEL_BSP_SCHEDULE_DELAY", "200"));
    let arguments = ["produce", "--broker", broker, "--payments", "60"];
    let producer_variables = variables.clone();
    variables.push(("ONCEGATE_ADMIN_LISTEN", "127.0.0.1:0"));
    variables.push(("OTEL_SERVICE_NAME", "payments-worker"));
    let worker_arguments = ["work", "--guarantee", "effectively-once"];
    let (_worker, _) = crate::demo(&worker_arguments, &variables, run_dir, "admin port http://");
    // The producer starts after the worker, which declares the queue of RabbitMQ.
    let (mut producer, _) = crate::demo(&arguments, &producer_variables, run_dir, "sending ");
    until("the producer ends after its last export", async || {
        producer
            .0
            .try_wait()
            .expect("its status")
            .map(drop)
            .ok_or_else(|| "the producer still runs".to_owned())
    })
    .await;
    until(
        "a trace is complete, and a duplicate is linked",
        async || {
            let spans = exported.lock().expect("the lock is not poisoned").clone();
            // A client of a broker may write spans of its own.
            let is_sent = |of: &str, span: &Span| {
                (of, span.name.as_str(), span.kind)
                    == (
                        "payments-producer",
                        "payments.send",
                        SpanKind::Producer as i32,
                    )
            };
            let sent: Vec<&Span> = spans
                .iter()
                .filter(|(of, span)| is_sent(of, span))
                .map(|(_, span)| span)
                .collect();
            if sent.len() < 60 {
                return Err(format!(
                    "{} of {} spans are `payments.send`",
                    sent.len(),
                    spans.len()
                ));
            }
            let traces: Vec<Result<(), String>> =
                sent.iter().map(|sent| check_trace(&spans, sent)).collect();
            if !traces.contains(&Ok(())) {
                return Err(format!("{} spans, and {traces:?}", spans.len()));
            }
            check_duplicate_link(&spans)
        },
    )
    .await;
    if broker == "rabbitmq" {
        remove_queues(&rabbitmq, &name).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_spans_producer_and_worker_on_kafka() {
    a_trace_spans_producer_and_worker("kafka").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trace_spans_producer_and_worker_on_rabbitmq() {
    a_trace_spans_producer_and_worker("rabbitmq").await;
}
