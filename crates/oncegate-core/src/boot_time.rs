//! A clock for leases, which continues while the machine is suspended.

use std::ops::Add;
use std::time::Duration;

/// A time of a monotonic clock that, on Linux, includes the time in which the machine is suspended
/// (`CLOCK_BOOTTIME`), as the store's clock does. With [`Instant`](std::time::Instant), a machine
/// that resumes after an hour would trust leases that have ended.
///
/// In microseconds since boot, or since the start of this process where there is no such clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BootTime(u64);

impl BootTime {
    #[cfg(target_os = "linux")]
    pub(crate) fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        // Both parts are positive, and the sum overflows only after 500,000 years of uptime. Plus
        // 1, because a lease stores 0 as its deadline once it is lost.
        Self(time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000 + 1)
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn now() -> Self {
        static START: std::sync::LazyLock<std::time::Instant> =
            std::sync::LazyLock::new(std::time::Instant::now);
        Self(START.elapsed().as_micros() as u64 + 1)
    }

    /// The time from `now` until this time; zero if this time has passed.
    #[inline]
    pub(crate) fn remaining_at(self, now: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(now.0))
    }

    /// The time from this time until `now`; zero if this time is in the future.
    #[inline]
    pub(crate) fn elapsed_at(self, now: Self) -> Duration {
        now.remaining_at(self)
    }

    #[inline]
    pub(crate) fn as_micros(self) -> u64 {
        self.0
    }

    #[inline]
    pub(crate) fn from_micros(micros: u64) -> Self {
        Self(micros)
    }
}

impl Add<Duration> for BootTime {
    type Output = Self;

    #[inline]
    fn add(self, duration: Duration) -> Self {
        Self(
            self.0
                .saturating_add(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_advances_and_never_overflows() {
        let before = BootTime::now();
        std::thread::sleep(Duration::from_millis(2));
        let after = BootTime::now();
        assert!(after >= before + Duration::from_millis(2) && before > BootTime::from_micros(0));
        assert_eq!(before.remaining_at(after), Duration::ZERO);
        assert_eq!(
            (after + Duration::from_secs(1)).remaining_at(after),
            Duration::from_secs(1)
        );
        assert_eq!(
            after.elapsed_at(after + Duration::from_secs(1)),
            Duration::from_secs(1)
        );
        assert!(before + Duration::MAX > after);
    }
}
