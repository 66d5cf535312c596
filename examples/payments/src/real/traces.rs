//! One trace from the producer through the worker to the provider: the demo's own spans, and the
//! header that joins them.
//!
//! Where this was left out of the build, or no `OTEL_EXPORTER_OTLP_ENDPOINT` says where to export
//! to, there are no headers.

use std::future::Future;

/// The header in which W3C's Trace Context says to which span something belongs.
pub(crate) const TRACEPARENT: &str = "traceparent";

#[cfg(not(feature = "otlp"))]
mod none {
    use super::*;

    /// No span.
    pub(crate) struct Sending;

    impl Sending {
        pub(crate) fn begin(_: (&'static str, &'static str), _: &str, _: Option<&str>) -> Self {
            Self
        }

        pub(crate) fn header(&self) -> Option<String> {
            None
        }
    }

    /// Nothing is exported.
    pub(crate) struct Traces;

    impl Traces {
        pub(crate) fn begin(_: &str) -> Result<Self, crate::Error> {
            Ok(Self)
        }
    }

    pub(crate) async fn asked<T, A: Future<Output = T>>(
        _: &str,
        ask: impl FnOnce(Option<String>) -> A,
    ) -> T {
        ask(None).await
    }

    pub(crate) async fn answered<T>(
        _: &str,
        _: Option<&str>,
        answer: impl Future<Output = T>,
    ) -> T {
        answer.await
    }
}

#[cfg(feature = "otlp")]
mod some {
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
    };
    use tracing::{Instrument, Span, info_span};
    use tracing_opentelemetry::OpenTelemetrySpanExt;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::util::SubscriberInitExt;

    use super::*;

    /// What a span is to whom it is told: `None` where nobody exports it.
    fn header_of(span: &Span) -> Option<String> {
        let context = span.context();
        let span = context.span().span_context().clone();
        let flags = span.trace_flags().to_u8();
        span.is_valid()
            .then(|| format!("00-{}-{}-{flags:02x}", span.trace_id(), span.span_id()))
    }

    /// A message is sent, from here until its confirmation.
    pub(crate) struct Sending(Span);

    impl Sending {
        /// By this system, which calls it so.
        pub(crate) fn begin(
            (system, operation): (&'static str, &'static str),
            queue: &str,
            id: Option<&str>,
        ) -> Self {
            // A trace of its own: what it leads to is all that belongs to it.
            Self(info_span!(
                parent: None,
                "payments.send",
                id,
                otel.kind = "producer",
                messaging.system = system,
                messaging.operation.name = operation,
                messaging.operation.r#type = "send",
                messaging.destination.name = queue
            ))
        }

        pub(crate) fn header(&self) -> Option<String> {
            header_of(&self.0)
        }
    }

    /// Exports while it lives, if it is said where to.
    pub(crate) struct Traces(Option<oncegate_config::Traces>);

    impl Traces {
        /// For a process that writes nothing else through `tracing`.
        pub(crate) fn begin(service: &str) -> Result<Self, crate::Error> {
            let traces = oncegate_config::Traces::from_environment(service)?;
            if let Some(traces) = &traces {
                tracing_subscriber::registry().with(traces.layer()).init();
            }
            Ok(Self(traces))
        }

        /// For a process that adds it to what it writes.
        pub(crate) fn beside(service: &str) -> Result<Self, crate::Error> {
            Ok(Self(oncegate_config::Traces::from_environment(service)?))
        }

        pub(crate) fn exporter(&self) -> Option<&oncegate_config::Traces> {
            self.0.as_ref()
        }
    }

    /// A question to the provider, below whatever asks it.
    pub(crate) async fn asked<T, A: Future<Output = T>>(
        path: &str,
        ask: impl FnOnce(Option<String>) -> A,
    ) -> T {
        let span = info_span!("payments.ask", otel.kind = "client", url.path = path);
        let header = header_of(&span);
        ask(header).instrument(span).await
    }

    /// The provider's answer, below who asked.
    pub(crate) async fn answered<T>(
        path: &str,
        asker: Option<&str>,
        answer: impl Future<Output = T>,
    ) -> T {
        let span =
            info_span!(parent: None, "payments.answer", otel.kind = "server", url.path = path);
        if let Some(asker) = asker.and_then(read) {
            // It fails where nothing is exported.
            let _ = span.set_parent(opentelemetry::Context::new().with_remote_span_context(asker));
        }
        answer.instrument(span).await
    }

    /// `00-<trace>-<span>-<flags>`, as the demo's own client writes it.
    fn read(header: &str) -> Option<SpanContext> {
        let mut parts = header.split('-').skip(1);
        let (trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?);
        let (trace, span) = (TraceId::from_hex(trace).ok()?, SpanId::from_hex(span).ok()?);
        let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?);
        Some(SpanContext::new(
            trace,
            span,
            flags,
            true,
            TraceState::default(),
        ))
    }
}

#[cfg(not(feature = "otlp"))]
pub(crate) use none::*;
#[cfg(feature = "otlp")]
pub(crate) use some::*;
