//! Saying what stays wrong, and not with each attempt.

use std::time::Duration;

use tokio::time::Instant;

/// How seldom the same is said again.
const SELDOM: Duration = Duration::from_secs(10);

/// What was told last, and when.
#[derive(Debug, Default)]
pub(crate) struct Telling(Option<(Instant, String)>);

impl Telling {
    /// Whether to tell this: not if just this was told a moment ago. It counts as told then.
    pub(crate) fn is_due(&mut self, problem: &str, now: Instant) -> bool {
        let is_old = self
            .0
            .as_ref()
            .is_some_and(|(at, told)| told == problem && now < *at + SELDOM);
        if !is_old {
            self.0 = Some((now, problem.to_owned()));
        }
        !is_old
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_is_told_once_in_a_while_and_something_else_at_once() {
        let (mut telling, begun) = (Telling::default(), Instant::now());
        assert!(telling.is_due("a", begun) && !telling.is_due("a", begun + SELDOM / 2));
        assert!(telling.is_due("b", begun + SELDOM / 2) && !telling.is_due("b", begun + SELDOM));
        assert!(telling.is_due("b", begun + SELDOM * 2));
    }
}
