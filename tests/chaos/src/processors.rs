//! How busy the machine is.

/// The time of all processors since the machine started: how much of it nobody needed, and all of
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Processors {
    idle: u64,
    all: u64,
}

impl Processors {
    /// Until now; none where the system does not say.
    pub fn until_now() -> Option<Self> {
        Self::read(&std::fs::read_to_string("/proc/stat").ok()?)
    }

    /// The first line counts what all of them did: for users, nice ones, the system, nobody, nobody
    /// who waits for a disk, and so on.
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

    /// How much of the time since then nobody needed, in percent.
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
    fn what_nobody_needed_is_told_in_percent() {
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
