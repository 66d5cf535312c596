//! How long handlers run, and what lease that asks for.

use std::time::Duration;

/// How long handlers ran of late, in steps of a quarter: enough to choose a lease by.
#[derive(Debug)]
pub(crate) struct RuntimeEstimator {
    /// How many runs took up to 1 ms, 1.25 ms, and so on; the last counts all that are longer.
    runs: [u32; STEPS],
    total: u32,
    /// Nothing is said before so many runs are known.
    lease: Option<Duration>,
}

/// Up to 1 ms times 1.25 to the 96th: some 33 minutes.
const STEPS: usize = 97;
/// How many runs are looked at together. What came before counts half.
const RUNS: u32 = 512;
/// What a lease has beyond twice the longest run: a pause of the process, a slow answer of the
/// store.
pub(crate) const SLACK: Duration = Duration::from_secs(1);

impl RuntimeEstimator {
    pub(crate) fn new() -> Self {
        Self {
            runs: [0; STEPS],
            total: 0,
            lease: None,
        }
    }

    /// A handler ran this long.
    pub(crate) fn ran(&mut self, took: Duration) {
        let steps = (took.as_secs_f64() / 0.001).max(1.0).log(1.25).ceil();
        self.runs[(steps as usize).min(STEPS - 1)] += 1;
        self.total += 1;
        if self.total >= RUNS {
            self.lease = Some(lease_for(self.longest_of_99_in_100()));
            self.total = 0;
            for count in &mut self.runs {
                *count /= 2;
                self.total += *count;
            }
            self.total = self.total.min(RUNS / 2);
        }
    }

    /// The lease that the measured runs ask for; `None` while too few are known.
    pub(crate) fn lease(&self) -> Option<Duration> {
        self.lease
    }

    fn longest_of_99_in_100(&self) -> Duration {
        let all: u32 = self.runs.iter().sum();
        let mut left = all.div_ceil(100);
        for (step, count) in self.runs.iter().enumerate().rev() {
            if *count >= left {
                return Duration::from_millis(1).mul_f64(1.25f64.powi(step as i32));
            }
            left -= count;
        }
        Duration::from_millis(1)
    }
}

/// Twice the longest run, and some slack.
pub(crate) fn lease_for(longest_run: Duration) -> Duration {
    longest_run.saturating_mul(2).saturating_add(SLACK)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(runs: impl IntoIterator<Item = u64>) -> Option<Duration> {
        let mut pace = RuntimeEstimator::new();
        runs.into_iter()
            .for_each(|ms| pace.ran(Duration::from_millis(ms)));
        pace.lease()
    }

    #[test]
    fn the_lease_is_twice_what_99_in_100_need_and_some_slack() {
        assert_eq!(after((0..500).map(|_| 100)), None, "too few");
        let steady = after((0..2000).map(|_| 100)).expect("enough");
        assert!(
            steady >= Duration::from_millis(1200) && steady <= Duration::from_millis(1250),
            "{steady:?}"
        );
        let one_in_fifty =
            after((0..2000).map(|run| if run % 50 == 0 { 4000 } else { 100 })).expect("enough");
        assert!(
            one_in_fifty >= Duration::from_millis(9000)
                && one_in_fifty <= Duration::from_millis(11_000),
            "{one_in_fifty:?}"
        );
        let one_in_a_thousand =
            after((0..2000).map(|run| if run % 1000 == 0 { 4000 } else { 100 })).expect("enough");
        assert_eq!(one_in_a_thousand, steady);
        let changed = after((0..2000).map(|_| 100).chain((0..4000).map(|_| 1000))).expect("enough");
        assert!(changed >= Duration::from_millis(3000), "{changed:?}");
        for odd in [0, u64::MAX] {
            assert!(after((0..600).map(|_| odd)).is_some());
        }
    }
}
