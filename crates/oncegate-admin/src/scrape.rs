//! What Prometheus reads.

use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use oncegate::metric::Kind;

/// The bounds of the histograms' buckets, in seconds: from a claim in memory to a handler that runs
/// for minutes.
const BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0,
];

/// All metrics of the process, as Prometheus reads them. Clones share it.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

/// Another recorder keeps the metrics of this process already.
#[derive(Debug, thiserror::Error)]
#[error(
    "another metrics recorder is installed: hand its Prometheus handle to Metrics::of, or install none before"
)]
pub struct InstallError;

impl Metrics {
    /// Keeps the metrics of this process from now on. Called once, before the first consumer is
    /// built: what was looked up before goes nowhere.
    ///
    /// Durations are kept as histograms with buckets, so that those of several processes add up.
    /// Counters without labels stand at 0 from the beginning: the first increment of a counter that
    /// was not there before is no increase to Prometheus.
    ///
    /// # Errors
    /// If a recorder is installed already.
    pub fn install() -> Result<Self, InstallError> {
        let (metrics, recorder) = Self::recorder();
        metrics::set_global_recorder(recorder).map_err(|_| InstallError)?;
        Self::begin();
        Ok(metrics)
    }

    /// The same, for a recorder of your own that passes on to this one what it is told. Call
    /// [`Metrics::begin`] once yours is installed.
    pub fn recorder() -> (Self, PrometheusRecorder) {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Prefix("oncegate_".to_owned()), BUCKETS)
            .expect("the list of buckets is not empty")
            .build_recorder();
        (Self(recorder.handle()), recorder)
    }

    /// Says what each metric means, and lets counters without labels begin at 0.
    pub fn begin() {
        oncegate::metrics::describe();
        for it in
            oncegate::metrics::all().filter(|it| it.kind == Kind::Counter && it.labels.is_empty())
        {
            metrics::counter!(it.name).increment(0);
        }
    }

    /// Of an exporter that you have installed yourself.
    pub fn of(handle: PrometheusHandle) -> Self {
        Self(handle)
    }

    /// The text that Prometheus reads.
    pub(crate) fn text(&self) -> String {
        self.0.render()
    }

    /// What was measured since the last time moves into its histograms; without it memory would
    /// grow until somebody asks.
    pub(crate) fn tidy(&self) {
        self.0.run_upkeep();
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}
