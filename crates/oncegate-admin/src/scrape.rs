//! Metrics for Prometheus.

use std::sync::OnceLock;

use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use oncegate::metric::Kind;

/// The bucket bounds of histograms, in seconds: from an in-memory claim to a handler that runs for
/// minutes.
const BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0,
];

/// A handle to the metrics of the process, in the Prometheus text format. Clones refer to the same
/// recorder.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

/// The metrics whose recorder [`Metrics::install`] has installed.
static INSTALLED: OnceLock<Metrics> = OnceLock::new();

/// Another metrics recorder is installed in this process.
#[derive(Debug, thiserror::Error)]
#[error(
    "another metrics recorder is installed: pass its Prometheus handle to Metrics::of, or do not install it"
)]
pub struct InstallError;

impl Metrics {
    /// Installs the recorder of this process. Call it once, before the first consumer is built:
    /// earlier metrics are lost.
    ///
    /// Exports durations as histograms with buckets, which can be aggregated over processes.
    /// Exports counters without labels from the start, with 0, because Prometheus does not count
    /// the first value of a new counter as an increase.
    ///
    /// # Errors
    /// A recorder is already installed.
    pub fn install() -> Result<Self, InstallError> {
        let (metrics, recorder) = Self::recorder();
        metrics::set_global_recorder(recorder).map_err(|_| InstallError)?;
        Self::begin();
        Ok(INSTALLED.get_or_init(|| metrics).clone())
    }

    /// The metrics of this process, if [`Metrics::install`] has installed the recorder.
    pub fn installed() -> Option<Self> {
        INSTALLED.get().cloned()
    }

    /// Returns the metrics and their recorder, to which your own recorder forwards. Call
    /// [`Metrics::begin`] once your recorder is installed.
    pub fn recorder() -> (Self, PrometheusRecorder) {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Prefix("oncegate_".to_owned()), BUCKETS)
            .expect("the list of buckets is not empty")
            .build_recorder();
        (Self(recorder.handle()), recorder)
    }

    /// Describes each metric and initializes counters without labels to 0.
    pub fn begin() {
        oncegate::metrics::describe();
        for metric in oncegate::metrics::all()
            .filter(|metric| metric.kind == Kind::Counter && metric.labels.is_empty())
        {
            metrics::counter!(metric.name).increment(0);
        }
    }

    /// The metrics of an exporter that you have installed.
    pub fn of(handle: PrometheusHandle) -> Self {
        Self(handle)
    }

    /// The metrics in the Prometheus text format.
    pub fn text(&self) -> String {
        self.0.render()
    }

    /// Moves samples into their histograms. Without this, their memory grows until the next scrape.
    pub(crate) fn run_upkeep(&self) {
        self.0.run_upkeep();
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}
