//! The CPU load of the machine.

/// The idle and the total time of all processors since boot, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processors {
    idle: u64,
    all: u64,
}

impl Processors {
    /// The current values; none if the system has no `/proc/stat`.
    pub fn now() -> Option<Self> {
        Self::read(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    /// Parses the first line: user, nice, system, idle, iowait, and so on.
    fn read(stat: &str) -> Option<Self> {
        let times: Option<Vec<u64>> = stat
            .lines()
            .next()?
            .strip_prefix("cpu ")?
            .split_whitespace()
            .map(|it| it.parse().ok())
            .collect();
        let times = times?;
        Some(Self {
            idle: times.get(3)? + times.get(4)?,
            all: times.iter().take(8).sum(),
        })
    }

    /// The idle time since then, in percent.
    pub fn idle_since(self, before: Self) -> u64 {
        let all = self.all.saturating_sub(before.all);
        (100 * self.idle.saturating_sub(before.idle))
            .checked_div(all)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_in_percent() {
        let before = Processors::read("cpu  100 5 20 300 10 0 3 2 90 0\ncpu0 1 2 3 4 5\n").unwrap();
        assert_eq!(
            before,
            Processors {
                idle: 310,
                all: 440
            }
        );
        let after = Processors::read("cpu  150 5 30 330 10 0 13 2 90 0\n").unwrap();
        assert_eq!(
            (after.idle_since(before), before.idle_since(before)),
            (30, 0)
        );
        assert_eq!(Processors::read("intr 7"), None);
    }
}
