//! The health of the Kafka client: whether it reaches its group coordinator, how far the polling
//! thread has read its message queue, and whether another client is to replace it.

use std::time::Instant;

use crate::client::statistics;

/// The health of the current Kafka client. A replacement of the client resets what does not apply
/// to the next one.
#[derive(Default)]
pub(crate) struct ClientHealth {
    /// Why the client is to be replaced, once that is requested.
    replacement_reason: Option<String>,
    /// How often the client was replaced.
    replacements: u64,
    /// Since when the client has reported that it does not reach its group coordinator.
    without_coordinator_since: Option<Instant>,
    /// Since when the client is suspected to have lost its broker metadata: new clients reach the
    /// coordinator, and this client does not.
    suspected_since: Option<Instant>,
    /// When the client last reported whether it reaches its group coordinator.
    reported_at: Option<Instant>,
    /// Whether an error said that a topic or partition does not exist.
    topic_may_be_missing: bool,
    progress: ReadProgress,
}

/// The polling thread's progress with the message queue, which all partitions share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReadProgress {
    /// How many messages were read from the queue.
    read: u64,
    /// The length of the queue when it was last checked.
    queued: u64,
    /// How often the length was checked.
    length_checks: u64,
}

impl ReadProgress {
    /// Whether everything that was in the queue at the time of `self` has been read at the time of
    /// `now`. An empty queue means yes, whatever the number of messages, because librdkafka does
    /// not return every operation in the queue as a message.
    pub(crate) fn is_queue_read_at(self, now: Self) -> bool {
        now.length_checks > self.length_checks
            && (now.queued == 0 || now.read >= self.read + self.queued)
    }
}

impl ClientHealth {
    /// Records the length of the message queue.
    pub(crate) fn set_queue_length(&mut self, queued: u64) {
        self.progress.queued = queued;
        self.progress.length_checks += 1;
    }

    /// Counts messages that were read from the message queue.
    pub(crate) fn count_read(&mut self, count: u64) {
        self.progress.read += count;
    }

    pub(crate) fn read_progress(&self) -> ReadProgress {
        self.progress
    }

    /// Records whether a topic of the group may not exist any more.
    pub(crate) fn suspect_missing_topic(&mut self, may_be_missing: bool) {
        self.topic_may_be_missing = may_be_missing;
    }

    pub(crate) fn topic_may_be_missing(&self) -> bool {
        self.topic_may_be_missing
    }

    /// Requests that another client replaces this one. If called again, keeps the first reason.
    pub(crate) fn request_replacement(&mut self, reason: String) {
        self.replacement_reason.get_or_insert(reason);
    }

    /// Whether a replacement was requested.
    pub(crate) fn needs_replacement(&self) -> bool {
        self.replacement_reason.is_some()
    }

    /// Records whether the client reports a connection to its group coordinator. Requests a
    /// replacement if the client has been suspected for a statistics interval and still reports
    /// none.
    pub(crate) fn record_coordinator_state(&mut self, is_coordinator_up: bool, now: Instant) {
        let is_late = self
            .reported_at
            .replace(now)
            .is_some_and(|before| now.duration_since(before) > 2 * statistics::INTERVAL);
        if is_coordinator_up {
            (self.without_coordinator_since, self.suspected_since) = (None, None);
            return;
        }
        // This report was delayed. The client may have reconnected after it, so the replacement
        // waits for a report that comes at least one statistics interval later.
        if is_late && self.suspected_since.is_some() {
            self.suspected_since = Some(now);
        }
        self.without_coordinator_since.get_or_insert(now);
        let suspected_for = self.suspected_since.map(|since| now.duration_since(since));
        if suspected_for >= Some(statistics::INTERVAL) {
            self.request_replacement(
                "it cannot reach the group coordinator, although new clients can".into(),
            );
        }
    }

    /// Since when the client has not reached its group coordinator.
    pub(crate) fn without_coordinator_since(&self) -> Option<Instant> {
        self.without_coordinator_since
    }

    /// Records the suspicion that the client has lost its broker metadata: new clients have reached
    /// the group coordinator for longer than this client needs to reconnect.
    /// `without_coordinator_since` identifies the outage that the suspicion refers to.
    pub(crate) fn suspect_lost_metadata(
        &mut self,
        without_coordinator_since: Instant,
        now: Instant,
    ) {
        // The client may have reconnected or been replaced since the probe.
        if self.without_coordinator_since == Some(without_coordinator_since) {
            self.suspected_since.get_or_insert(now);
        }
    }

    /// Whether the client does not reach its group coordinator although new clients do.
    pub(crate) fn may_have_lost_metadata(&self) -> bool {
        self.suspected_since.is_some()
    }

    /// Returns the reason of a requested replacement, and counts it.
    pub(crate) fn take_replacement(&mut self) -> Option<String> {
        let reason = self.replacement_reason.take()?;
        self.replacements += 1;
        (self.without_coordinator_since, self.suspected_since) = (None, None);
        Some(reason)
    }

    /// How often the client was replaced.
    pub(crate) fn replacements(&self) -> u64 {
        self.replacements
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reports_from_before_a_suspicion_do_not_replace_the_client() {
        let (mut client, started) = (ClientHealth::default(), Instant::now());
        let at = |seconds| started + Duration::from_secs(seconds);
        client.record_coordinator_state(false, at(0));
        client.suspect_lost_metadata(at(1), at(1));
        client.record_coordinator_state(false, at(3));
        assert!(
            !client.needs_replacement(),
            "the suspicion refers to an earlier time without the coordinator"
        );
        client.suspect_lost_metadata(started, at(3));
        // This report may have been sent before the suspicion.
        client.record_coordinator_state(false, at(4));
        // So may the next report, which is late.
        client.record_coordinator_state(false, at(9));
        client.record_coordinator_state(false, at(9));
        assert!(!client.needs_replacement());
        client.record_coordinator_state(true, at(9));
        client.record_coordinator_state(false, at(10));
        assert_eq!(
            (
                client.needs_replacement(),
                client.without_coordinator_since()
            ),
            (false, Some(at(10)))
        );
        client.suspect_lost_metadata(at(10), at(11));
        client.record_coordinator_state(false, at(13));
        assert!(client.needs_replacement());
        // The next client starts without a suspicion.
        client.take_replacement().expect("it is replaced");
        client.record_coordinator_state(false, at(50));
        assert_eq!(
            (
                client.needs_replacement(),
                client.without_coordinator_since()
            ),
            (false, Some(at(50)))
        );
    }
}
