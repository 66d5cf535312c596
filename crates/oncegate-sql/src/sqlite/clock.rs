//! The wall clock, with corrections for its jumps.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_core::internal::milliseconds;

use super::metric::CLOCK_JUMPS;

/// The difference between wall clock and elapsed time, in milliseconds, above which it counts as a
/// jump of the clock.
const JUMP_THRESHOLD: i64 = 1000;

/// The clock that all processes of a machine share. It jumps when an operator sets it, when it is
/// first synchronized after a start, or when the machine was suspended. All times are in
/// milliseconds since 1970.
///
/// A jump forward would expire every lease and every marker at once. So after it each lease
/// restarts in full, and each marker expires later by the width of the jump. This correction ends
/// when the longest window in the file has elapsed since the jump; for unresolved at-most-once
/// markers it lasts as long as this process runs. After a jump back, markers appear to be written
/// in the future: their age is unknown, and the next claim lets it start at zero.
#[derive(Debug)]
pub(crate) struct WallClock {
    /// The wall-clock time of the last reading.
    wall: i64,
    /// The monotonic time just before `wall` was read.
    read_at: Instant,
    /// Jumps forward within the longest window.
    jumps: Vec<ClockJump>,
    /// The sum of the widths of all jumps forward so far.
    total_width: i64,
    /// A lease that started earlier counts from this time: the wall-clock time after the last jump
    /// forward.
    lease_start_floor: i64,
}

#[derive(Debug)]
struct ClockJump {
    width: i64,
    detected_at: Instant,
}

/// One moment, with the corrections for markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockReading {
    /// The wall-clock time, at which rows are written.
    pub(crate) wall: i64,
    /// A lease that started earlier counts from this time.
    pub(crate) lease_start_floor: i64,
    /// A marker whose expiry is at most this time is absent.
    pub(crate) expired_until: i64,
    /// The same for at-most-once markers that are in progress or in doubt (unresolved), whose expiry
    /// does not depend on the window.
    pub(crate) unresolved_expired_until: i64,
}

impl WallClock {
    pub(crate) fn new() -> Self {
        let read = Instant::now();
        Self {
            wall: wall(),
            read_at: read,
            jumps: Vec::new(),
            total_width: 0,
            lease_start_floor: i64::MIN,
        }
    }

    /// A clock that detected a jump this long ago.
    #[cfg(test)]
    pub(crate) fn jumped(width: Duration, ago: Duration) -> Self {
        let detected_at = Instant::now()
            .checked_sub(ago)
            .expect("the machine has run for longer than `ago`");
        let width = milliseconds(width);
        Self {
            jumps: vec![ClockJump { width, detected_at }],
            total_width: width,
            ..Self::new()
        }
    }

    /// Drops the jumps that are older than the longest window (in milliseconds): every marker that
    /// was written before such a jump has expired. The window must be the longest of all processes
    /// that use the file, since expired rows are deleted for all.
    pub(crate) fn drop_jumps_before(&mut self, longest_window: i64) {
        self.jumps
            .retain(|jump| milliseconds(jump.detected_at.elapsed()) <= longest_window);
    }

    /// Reads the clock, and detects a jump since the last reading.
    pub(crate) fn now(&mut self) -> ClockReading {
        let before = Instant::now();
        let wall = wall();
        self.advance(wall, before, Instant::now())
    }

    /// Processes a wall-clock time that was read between these two moments.
    fn advance(&mut self, wall: i64, before: Instant, after: Instant) -> ClockReading {
        let elapsed = milliseconds(after.saturating_duration_since(self.read_at));
        let jump_width = wall.saturating_sub(self.wall).saturating_sub(elapsed);
        if jump_width > JUMP_THRESHOLD {
            report_jump("forward", jump_width);
            self.jumps.push(ClockJump {
                width: jump_width,
                detected_at: after,
            });
            self.total_width = self.total_width.saturating_add(jump_width);
            self.lease_start_floor = wall;
        } else if wall.saturating_add(JUMP_THRESHOLD) < self.wall {
            report_jump("back", self.wall - wall);
        }
        self.lease_start_floor = self.lease_start_floor.min(wall);
        (self.wall, self.read_at) = (wall, before);
        let width = self
            .jumps
            .iter()
            .fold(0_i64, |all, jump| all.saturating_add(jump.width));
        let (expired_until, unresolved_expired_until) = (
            wall.saturating_sub(width),
            wall.saturating_sub(self.total_width),
        );
        ClockReading {
            wall,
            lease_start_floor: self.lease_start_floor,
            expired_until,
            unresolved_expired_until,
        }
    }
}

/// Counts and logs a jump of the clock by this many milliseconds.
fn report_jump(direction: &'static str, width: i64) {
    metrics::counter!(CLOCK_JUMPS, "direction" => direction).increment(1);
    let by = Duration::from_millis(width.unsigned_abs());
    tracing::warn!(
        direction,
        ?by,
        "the system clock jumped; leases and markers may last longer, never shorter; slew the clock with NTP"
    );
}

/// The wall-clock time in milliseconds since 1970.
fn wall() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, milliseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: i64 = 1_000_000_000;

    /// A clock at START, and a function that reads `START + wall` after `elapsed` milliseconds.
    fn clock() -> (WallClock, impl Fn(&mut WallClock, i64, u64) -> ClockReading) {
        let started = Instant::now();
        let clock = WallClock {
            wall: START,
            read_at: started,
            jumps: Vec::new(),
            total_width: 0,
            lease_start_floor: i64::MIN,
        };
        let read_clock = move |clock: &mut WallClock, wall: i64, elapsed: u64| {
            let at = started + Duration::from_millis(elapsed);
            clock.advance(START + wall, at, at)
        };
        (clock, read_clock)
    }

    #[test]
    fn elapsed_time_is_not_a_jump() {
        let (mut clock, read_clock) = clock();
        for (wall, elapsed) in [(0, 0), (500, 400), (90_000, 90_100), (90_900, 90_200)] {
            let now = read_clock(&mut clock, wall, elapsed);
            let wall = START + wall;
            assert_eq!(
                now,
                ClockReading {
                    wall,
                    lease_start_floor: i64::MIN,
                    expired_until: wall,
                    unresolved_expired_until: wall
                }
            );
        }
    }

    #[test]
    fn a_jump_forward_restarts_leases_and_expires_nothing_early() {
        let (mut clock, read_clock) = clock();
        let now = read_clock(&mut clock, 3_600_000, 0);
        let jumped = START + 3_600_000;
        assert_eq!(
            now,
            ClockReading {
                wall: jumped,
                lease_start_floor: jumped,
                expired_until: START,
                unresolved_expired_until: START
            }
        );
        let now = read_clock(&mut clock, 3_600_000 + 60_000, 60_000);
        assert_eq!(
            (
                now.lease_start_floor,
                now.expired_until,
                now.unresolved_expired_until
            ),
            (jumped, START + 60_000, START + 60_000)
        );
    }

    #[test]
    fn a_jump_is_dropped_after_the_longest_window_except_for_unresolved_markers() {
        let width = Duration::from_secs(3600);
        let mut clock = WallClock::jumped(width, Duration::from_secs(10));
        clock.drop_jumps_before(milliseconds(width));
        let now = clock.now();
        assert_eq!(
            (
                now.wall - now.expired_until,
                now.wall - now.unresolved_expired_until
            ),
            (milliseconds(width), milliseconds(width))
        );
        clock.drop_jumps_before(9_000);
        let now = clock.now();
        assert_eq!(
            (
                now.wall - now.expired_until,
                now.wall - now.unresolved_expired_until
            ),
            (0, milliseconds(width))
        );
    }

    #[test]
    fn a_reverted_jump_extends_no_lease() {
        let (mut clock, read_clock) = clock();
        read_clock(&mut clock, 3_600_000, 0);
        let now = read_clock(&mut clock, 10, 10);
        assert_eq!(
            (now.lease_start_floor, now.expired_until),
            (now.wall, now.wall - 3_600_000)
        );
        let now = read_clock(&mut clock, 5_010, 5_010);
        assert_eq!(now.wall - now.lease_start_floor, 5_000);
    }

    #[test]
    fn long_times_do_not_overflow() {
        let longest = milliseconds(Duration::MAX);
        assert!(longest.checked_mul(1000).is_some());
        assert_eq!(
            (
                milliseconds(Duration::from_nanos(1)),
                milliseconds(Duration::ZERO)
            ),
            (1, 0)
        );
    }
}
