//! Logs that this member waits for partitions. After a crash the group coordinator waits for the
//! session timeout of the crashed member, and without this module a restarted consumer would log
//! nothing until then.

use std::time::{Duration, Instant};

use oncegate_core::internal::LogThrottle;

use crate::settings::{GroupProtocol, Kafka, SessionTimeout};
use crate::shared::SourceState;

/// How long an assignment may take before the wait is logged. It takes less time in a group without
/// problems.
const LOG_AFTER: Duration = Duration::from_secs(5);
/// How often a wait that continues is logged. In a group with more members than partitions, some
/// members always wait.
const LOG_INTERVAL: Duration = Duration::from_secs(600);

/// Measures how long this member of the group has had no partition.
pub(crate) struct AssignmentWait {
    group: String,
    topics: Vec<String>,
    session_timeout: SessionTimeout,
    group_protocol: GroupProtocol,
    /// Since when the client has reached its group coordinator without having a partition.
    since: Option<Instant>,
    throttle: LogThrottle,
    /// Whether this wait was logged.
    is_logged: bool,
}

/// Further causes of a wait with this group protocol, for the log line. librdkafka 2.12.1 reports
/// none of them as an error.
fn further_cause(protocol: GroupProtocol) -> &'static str {
    match protocol {
        GroupProtocol::Classic => "",
        GroupProtocol::Consumer => {
            "; with GroupProtocol::Consumer the brokers must be Kafka 4.0 or later, and all members of the classic protocol must have left the group"
        }
    }
}

/// A log line about the wait.
#[derive(Debug, PartialEq, Eq)]
enum WaitLine {
    /// No partition has been assigned for this long.
    Waiting(Duration),
    /// Partitions were assigned after this long.
    Assigned(Duration),
}

impl AssignmentWait {
    pub(crate) fn new(kafka: &Kafka) -> Self {
        Self {
            group: kafka.group.clone(),
            topics: kafka.topics.clone(),
            session_timeout: kafka.session_timeout(),
            group_protocol: kafka.group_protocol,
            since: None,
            throttle: LogThrottle::every(LOG_INTERVAL),
            is_logged: false,
        }
    }

    /// Logs a line if one is due.
    pub(crate) fn check(&mut self, state: &SourceState) {
        let assigned = state.partitions().len();
        let line = self.line(
            assigned,
            state.client.without_coordinator_since().is_none(),
            Instant::now(),
        );
        let Self {
            group,
            topics,
            session_timeout,
            group_protocol,
            ..
        } = self;
        match line {
            Some(WaitLine::Waiting(waited)) => tracing::info!(
                group,
                ?topics,
                ?waited,
                session_timeout = ?session_timeout.value,
                "waiting for partitions to be assigned; the group coordinator assigns those of a crashed member only after its session timeout ({session_timeout}); a group with more members than partitions leaves some without one{}",
                further_cause(*group_protocol)
            ),
            Some(WaitLine::Assigned(waited)) => {
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

    /// The line that is due. None while the client does not reach its group coordinator: `watch`
    /// logs that.
    fn line(
        &mut self,
        assigned: usize,
        reaches_coordinator: bool,
        now: Instant,
    ) -> Option<WaitLine> {
        if assigned == 0 && reaches_coordinator {
            let waited = now.duration_since(*self.since.get_or_insert(now));
            if waited < LOG_AFTER || self.throttle.due(now).is_none() {
                return None;
            }
            self.is_logged = true;
            return Some(WaitLine::Waiting(waited));
        }
        let waited = now.duration_since(self.since.take()?);
        self.throttle = LogThrottle::every(LOG_INTERVAL);
        (std::mem::take(&mut self.is_logged) && assigned > 0).then_some(WaitLine::Assigned(waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_for_an_assignment_is_logged_and_so_is_its_end() {
        let (mut wait, started) = (
            AssignmentWait::new(&Kafka::topic("t").group("g")),
            Instant::now(),
        );
        let mut line = |assigned, reaches_coordinator, second| {
            wait.line(
                assigned,
                reaches_coordinator,
                started + Duration::from_secs(second),
            )
        };
        let (waiting, assigned) = (
            |second| Some(WaitLine::Waiting(Duration::from_secs(second))),
            |second| Some(WaitLine::Assigned(Duration::from_secs(second))),
        );
        // Nothing is logged while the client does not reach its group coordinator.
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
        // A short wait is not logged, and the next long one is.
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
