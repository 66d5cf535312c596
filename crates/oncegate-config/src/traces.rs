//! Exports spans by OTLP.

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tracing::{Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::Layer;
use tracing_subscriber::registry::LookupSpan;

use crate::error::Error;

/// The variables of OpenTelemetry for the endpoint. If none of them is set, nothing is exported.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
];

/// Exports spans by OTLP over HTTP (protobuf). Dropping it exports the remaining spans.
///
/// The variables of OpenTelemetry configure the rest: `OTEL_SERVICE_NAME`,
/// `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_BSP_…`.
#[derive(Debug)]
pub struct Traces(SdkTracerProvider);

impl Traces {
    /// Creates an exporter if `OTEL_EXPORTER_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`
    /// is set. `OTEL_SERVICE_NAME` overrides the service name.
    ///
    /// # Errors
    /// [`Error::Misconfigured`]: a variable is not valid.
    pub fn from_environment(service: &str) -> Result<Option<Self>, Error> {
        let Some(endpoint) = ENDPOINTS
            .into_iter()
            .find(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()))
        else {
            return Ok(None);
        };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .build();
        let exporter = exporter.map_err(|error| {
            Error::misconfigured(format!("{endpoint}: cannot create an exporter: {error}"))
        })?;
        let resource = Resource::builder();
        // `Resource::builder` reads this variable itself.
        let is_named = std::env::var_os("OTEL_SERVICE_NAME").is_some_and(|name| !name.is_empty());
        let resource = if is_named {
            resource
        } else {
            resource.with_service_name(service.to_owned())
        };
        Ok(Some(Self(
            SdkTracerProvider::builder()
                .with_batch_exporter(exporter)
                .with_resource(resource.build())
                .build(),
        )))
    }

    /// The layer that exports spans: the spans of oncegate, which have the level `DEBUG`, and other
    /// spans with the level `INFO` or above.
    pub fn layer<S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync>(
        &self,
    ) -> impl Layer<S> + use<S> {
        let filter = Targets::new()
            .with_default(Level::INFO)
            .with_target("oncegate", Level::DEBUG);
        tracing_opentelemetry::layer()
            .with_tracer(self.0.tracer("oncegate"))
            .with_filter(filter)
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        if let Err(error) = self.0.shutdown() {
            tracing::warn!(%error, "remaining spans not exported at shutdown; check the OTLP endpoint");
        }
    }
}
