//! The wall clock, and what its jumps may not do.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::metric::CLOCK_JUMPS;

/// More than this between the wall clock and the time that passed is a jump, not a correction.
const JUMP: i64 = 1000;

/// The clock that all processes of a machine share. It may jump: set by hand, by the network's time
/// after a start, or because the machine slept. All times are in milliseconds since 1970.
///
/// A jump forward would end every lease and every window at once. So from the moment when it is
/// noticed, a holder has a whole lease more to renew; and what was remembered is remembered as much
/// longer as the jump was wide, until the longest window of all who use the file has passed, and
/// what is unresolved in at most once for as long as this process runs. After a jump back, markers
/// seem to have been written in the future: their age is unknown, and the next claim starts it
/// anew.
#[derive(Debug)]
pub(crate) struct Clock {
    wall: i64,
    /// Not after `wall` was read.
    read: Instant,
    /// Those that a window may still reach back over.
    jumps: Vec<Jump>,
    /// The width of all that ever were.
    wide: i64,
    held_since: i64,
}

#[derive(Debug)]
struct Jump {
    wide: i64,
    noticed: Instant,
}

/// One moment, as the markers see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Now {
    /// What is written now is written at this time.
    pub(crate) wall: i64,
    /// No lease began before this time.
    pub(crate) held_since: i64,
    /// What expired up to this time is forgotten.
    pub(crate) forgotten: i64,
    /// The same for what is unresolved in at most once, which outlives every window.
    pub(crate) unresolved_forgotten: i64,
}

impl Clock {
    pub(crate) fn new() -> Self {
        let read = Instant::now();
        Self {
            wall: wall(),
            read,
            jumps: Vec::new(),
            wide: 0,
            held_since: i64::MIN,
        }
    }

    /// A clock that noticed a jump so long ago.
    #[cfg(test)]
    pub(crate) fn jumped(wide: Duration, ago: Duration) -> Self {
        let noticed = Instant::now()
            .checked_sub(ago)
            .expect("the machine runs for longer");
        let wide = milliseconds(wide);
        Self {
            jumps: vec![Jump { wide, noticed }],
            wide,
            ..Self::new()
        }
    }

    /// Lets go of the jumps since which the longest window (in milliseconds) has passed: what was
    /// written before them has had its own. It has to be the longest of all who write to the file,
    /// since what one forgets is cleared out for all.
    pub(crate) fn let_go(&mut self, longest_window: i64) {
        self.jumps
            .retain(|jump| milliseconds(jump.noticed.elapsed()) <= longest_window);
    }

    pub(crate) fn now(&mut self) -> Now {
        let before = Instant::now();
        let wall = wall();
        self.at(wall, before, Instant::now())
    }

    /// The wall clock said this, between these two moments.
    fn at(&mut self, wall: i64, before: Instant, after: Instant) -> Now {
        let passed = milliseconds(after.saturating_duration_since(self.read));
        let ahead = wall.saturating_sub(self.wall).saturating_sub(passed);
        if ahead > JUMP {
            noticed("forward", ahead);
            self.jumps.push(Jump {
                wide: ahead,
                noticed: after,
            });
            self.wide = self.wide.saturating_add(ahead);
            self.held_since = wall;
        } else if wall.saturating_add(JUMP) < self.wall {
            noticed("back", self.wall - wall);
        }
        self.held_since = self.held_since.min(wall);
        (self.wall, self.read) = (wall, before);
        let wide = self
            .jumps
            .iter()
            .fold(0_i64, |all, jump| all.saturating_add(jump.wide));
        let (forgotten, unresolved_forgotten) =
            (wall.saturating_sub(wide), wall.saturating_sub(self.wide));
        Now {
            wall,
            held_since: self.held_since,
            forgotten,
            unresolved_forgotten,
        }
    }
}

fn noticed(direction: &'static str, wide: i64) {
    metrics::counter!(CLOCK_JUMPS, "direction" => direction).increment(1);
    let by = Duration::from_millis(wide.unsigned_abs());
    tracing::warn!(
        direction,
        ?by,
        "the clock jumped: leases run for as long as they would have, and nothing is forgotten for it"
    );
}

fn wall() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, milliseconds)
}

/// Rounded up, and such that sums stay far from the end of the numbers: three thousand years.
pub(crate) fn milliseconds(duration: Duration) -> i64 {
    const LONGEST: u128 = 100_000_000_000_000;
    i64::try_from(duration.as_nanos().div_ceil(1_000_000).min(LONGEST)).expect("at most LONGEST")
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: i64 = 1_000_000_000;

    /// A clock that read START, and what it says when it reads `wall` after `passed` milliseconds.
    fn clock() -> (Clock, impl Fn(&mut Clock, i64, u64) -> Now) {
        let begun = Instant::now();
        let clock = Clock {
            wall: START,
            read: begun,
            jumps: Vec::new(),
            wide: 0,
            held_since: i64::MIN,
        };
        let look = move |clock: &mut Clock, wall: i64, passed: u64| {
            let at = begun + Duration::from_millis(passed);
            clock.at(START + wall, at, at)
        };
        (clock, look)
    }

    #[test]
    fn time_that_passes_is_no_jump() {
        let (mut clock, look) = clock();
        for (wall, passed) in [(0, 0), (500, 400), (90_000, 90_100), (90_900, 90_200)] {
            let now = look(&mut clock, wall, passed);
            let wall = START + wall;
            assert_eq!(
                now,
                Now {
                    wall,
                    held_since: i64::MIN,
                    forgotten: wall,
                    unresolved_forgotten: wall
                }
            );
        }
    }

    #[test]
    fn after_a_jump_forward_leases_begin_anew_and_nothing_is_forgotten_early() {
        let (mut clock, look) = clock();
        let now = look(&mut clock, 3_600_000, 0);
        let jumped = START + 3_600_000;
        assert_eq!(
            now,
            Now {
                wall: jumped,
                held_since: jumped,
                forgotten: START,
                unresolved_forgotten: START
            }
        );
        let now = look(&mut clock, 3_600_000 + 60_000, 60_000);
        assert_eq!(
            (now.held_since, now.forgotten, now.unresolved_forgotten),
            (jumped, START + 60_000, START + 60_000)
        );
    }

    #[test]
    fn a_jump_counts_until_the_longest_window_has_passed_and_for_what_is_unresolved_for_good() {
        let wide = Duration::from_secs(3600);
        let mut clock = Clock::jumped(wide, Duration::from_secs(10));
        clock.let_go(milliseconds(wide));
        let now = clock.now();
        assert_eq!(
            (
                now.wall - now.forgotten,
                now.wall - now.unresolved_forgotten
            ),
            (milliseconds(wide), milliseconds(wide))
        );
        clock.let_go(9_000);
        let now = clock.now();
        assert_eq!(
            (
                now.wall - now.forgotten,
                now.wall - now.unresolved_forgotten
            ),
            (0, milliseconds(wide))
        );
    }

    #[test]
    fn a_jump_that_is_taken_back_holds_no_lease_for_longer() {
        let (mut clock, look) = clock();
        look(&mut clock, 3_600_000, 0);
        let now = look(&mut clock, 10, 10);
        assert_eq!(
            (now.held_since, now.forgotten),
            (now.wall, now.wall - 3_600_000)
        );
        let now = look(&mut clock, 5_010, 5_010);
        assert_eq!(now.wall - now.held_since, 5_000);
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
