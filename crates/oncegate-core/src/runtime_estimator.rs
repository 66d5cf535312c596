//! Estimates the duration of handlers, and derives a lease from it.

use std::time::Duration;

/// A histogram of recent handler durations, with buckets that grow by 25 %.
#[derive(Debug)]
pub(crate) struct RuntimeEstimator {
    /// The number of runs of up to 1 ms, 1.25 ms, and so on. The last bucket also has all longer
    /// runs.
    runs: [u32; BUCKETS],
    /// The number of runs since the last estimate, plus half of those before.
    total: u32,
    /// `None` until [`RUNS_PER_ESTIMATE`] runs were measured.
    lease: Option<Duration>,
}

/// The number of buckets: up to 1 ms × 1.25^96, about 23 days.
const BUCKETS: usize = 97;
/// The number of runs at which the lease is computed. Each computation halves the counts, so that
/// recent runs have more weight.
const RUNS_PER_ESTIMATE: u32 = 512;
/// Added to twice the duration of a run, to allow for a pause of the process or a slow store.
pub(crate) const SLACK: Duration = Duration::from_secs(1);

impl RuntimeEstimator {
    pub(crate) fn new() -> Self {
        Self {
            runs: [0; BUCKETS],
            total: 0,
            lease: None,
        }
    }

    pub(crate) fn record(&mut self, took: Duration) {
        let bucket = (took.as_secs_f64() / 0.001).max(1.0).log(1.25).ceil();
        self.runs[(bucket as usize).min(BUCKETS - 1)] += 1;
        self.total += 1;
        if self.total >= RUNS_PER_ESTIMATE {
            self.lease = Some(lease_for(self.percentile_99()));
            self.total = 0;
            for count in &mut self.runs {
                *count /= 2;
                self.total += *count;
            }
            self.total = self.total.min(RUNS_PER_ESTIMATE / 2);
        }
    }

    /// The lease for the 99th percentile of the measured runs, by [`lease_for`]; `None` while there
    /// are too few runs.
    pub(crate) fn lease(&self) -> Option<Duration> {
        self.lease
    }

    /// The upper bound of the bucket that contains the 99th percentile.
    fn percentile_99(&self) -> Duration {
        let all: u32 = self.runs.iter().sum();
        let mut longest_runs = all.div_ceil(100);
        for (bucket, count) in self.runs.iter().enumerate().rev() {
            if *count >= longest_runs {
                return Duration::from_millis(1).mul_f64(1.25f64.powi(bucket as i32));
            }
            longest_runs -= count;
        }
        Duration::from_millis(1)
    }
}

/// The lease for runs of up to this duration: twice as long, plus [`SLACK`].
pub(crate) fn lease_for(longest_run: Duration) -> Duration {
    longest_run.saturating_mul(2).saturating_add(SLACK)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(runs: impl IntoIterator<Item = u64>) -> Option<Duration> {
        let mut estimator = RuntimeEstimator::new();
        runs.into_iter()
            .for_each(|ms| estimator.record(Duration::from_millis(ms)));
        estimator.lease()
    }

    #[test]
    fn the_lease_is_twice_the_99th_percentile_plus_slack() {
        assert_eq!(after((0..500).map(|_| 100)), None, "too few");
        let steady = after((0..2000).map(|_| 100)).expect("there are enough runs for a lease");
        assert!(
            steady >= Duration::from_millis(1200) && steady <= Duration::from_millis(1250),
            "{steady:?}"
        );
        let one_in_fifty = after((0..2000).map(|run| if run % 50 == 0 { 4000 } else { 100 }))
            .expect("there are enough runs for a lease");
        assert!(
            one_in_fifty >= Duration::from_millis(9000)
                && one_in_fifty <= Duration::from_millis(11_000),
            "{one_in_fifty:?}"
        );
        let one_in_a_thousand =
            after((0..2000).map(|run| if run % 1000 == 0 { 4000 } else { 100 }))
                .expect("there are enough runs for a lease");
        assert_eq!(one_in_a_thousand, steady);
        let changed = after((0..2000).map(|_| 100).chain((0..4000).map(|_| 1000)))
            .expect("there are enough runs for a lease");
        assert!(changed >= Duration::from_millis(3000), "{changed:?}");
        for extreme in [0, u64::MAX] {
            assert!(after((0..600).map(|_| extreme)).is_some());
        }
    }
}
