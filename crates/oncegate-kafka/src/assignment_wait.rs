//! Logs that no partition is assigned for long. After a crash the group waits for the member that
//! is gone, and the log would be silent.

use std::time::{Duration, Instant};

use oncegate_core::LogThrottle;

use crate::kafka::Kafka;
use crate::shared::State;

/// How long an assignment may take before it is logged: longer than a group without trouble needs.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is logged meanwhile. A group with more members than partitions leaves some without
/// for good.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// How long this member of the group has been without a partition.
pub(crate) struct AssignmentWait {
    group: String,
    topics: Vec<String>,
    session_timeout: Duration,
    /// Since when the client is with its group and has no partition.
    since: Option<Instant>,
    throttle: LogThrottle,
    is_logged: bool,
}

/// What is to be logged.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// No partition is assigned for so long.
    Waiting(Duration),
    /// There is one, after so long.
    Assigned(Duration),
}

impl AssignmentWait {
    pub(crate) fn new(kafka: &Kafka) -> Self {
        Self {
            group: kafka.group.clone(),
            topics: kafka.topics.clone(),
            session_timeout: kafka.session_timeout(),
            since: None,
            throttle: LogThrottle::every(LOG_INTERVAL),
            is_logged: false,
        }
    }

    /// Logs what there is to say now.
    pub(crate) fn look(&mut self, state: &State) {
        let assigned = state.partitions().len();
        let line = self.line(assigned, state.alone().is_none(), Instant::now());
        let Self {
            group,
            topics,
            session_timeout,
            ..
        } = self;
        match line {
            Some(Line::Waiting(waited)) => tracing::info!(
                group,
                ?topics,
                ?waited,
                ?session_timeout,
                "waiting for partitions to be assigned; after a member of the group has crashed, the group coordinator waits for it until its session timeout (session.timeout.ms). A group with more members than partitions leaves some without"
            ),
            Some(Line::Assigned(waited)) => {
                tracing::info!(
                    group,
                    ?topics,
                    ?waited,
                    partitions = assigned,
                    "partitions assigned after waiting"
                )
            }
            None => {}
        }
    }

    /// A client that is without its group has other troubles, which are logged elsewhere.
    fn line(&mut self, assigned: usize, is_with_group: bool, now: Instant) -> Option<Line> {
        if assigned == 0 && is_with_group {
            let waited = now.duration_since(*self.since.get_or_insert(now));
            if waited < PATIENCE || self.throttle.due(now).is_none() {
                return None;
            }
            self.is_logged = true;
            return Some(Line::Waiting(waited));
        }
        let waited = now.duration_since(self.since.take()?);
        self.throttle = LogThrottle::every(LOG_INTERVAL);
        (std::mem::take(&mut self.is_logged) && assigned > 0).then_some(Line::Assigned(waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_assignment_that_takes_long_is_logged_once_in_a_while_and_so_is_its_end() {
        let (mut wait, begun) = (
            AssignmentWait::new(&Kafka::topic("t").group("g")),
            Instant::now(),
        );
        let mut line = |assigned, is_with_group, second| {
            wait.line(assigned, is_with_group, begun + Duration::from_secs(second))
        };
        let (waiting, assigned) = (
            |second| Some(Line::Waiting(Duration::from_secs(second))),
            |second| Some(Line::Assigned(Duration::from_secs(second))),
        );
        // Without its group it waits for that.
        assert_eq!([line(0, false, 0), line(0, false, 90)], [None, None]);
        assert_eq!(
            [
                line(0, true, 100),
                line(0, true, 104),
                line(0, true, 105),
                line(0, true, 106)
            ],
            [None, None, waiting(5), None]
        );
        assert_eq!(
            [line(0, true, 704), line(0, true, 705)],
            [None, waiting(605)]
        );
        assert_eq!(
            [line(3, true, 710), line(3, true, 800)],
            [assigned(610), None]
        );
        // A short wait is nothing to speak of, and a long one is a new one.
        assert_eq!([line(0, true, 801), line(1, true, 805)], [None, None]);
        assert_eq!(
            [
                line(0, true, 806),
                line(0, true, 811),
                line(0, false, 812),
                line(1, true, 820)
            ],
            [None, waiting(5), None, None]
        );
    }
}
