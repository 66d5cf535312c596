//! Watches the assigned partitions with a second client: measures their lag, and detects that the
//! consumer's client does not read them or has lost its broker metadata.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_core::internal::LogThrottle;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::TopicPartitionList;

use super::connection_errors::ConnectionErrors;
use super::log::LogContext;
use super::lost_metadata::LostMetadata;
use super::missing_topics::{self, MissingTopics};
use super::stall::StallDetector;
use crate::settings::Kafka;
use crate::shared::{SharedState, SourcePhase};

/// Maximum pause between two checks of the partitions.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// How long one turn of the loop waits. Once per turn, the thread checks whether the source closes.
const TURN: Duration = Duration::from_millis(200);
/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// Timeout of a probe by a new client: to log in to a broker, to find the group coordinator, to log
/// in to the coordinator, and to receive the response.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// A warning is logged after this time without the group coordinator, and then at this interval.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// After this many consecutive requests for a log end have failed, a check sends no further ones:
/// most likely no broker answers, and each request would take its full timeout.
const MAX_CONSECUTIVE_FAILURES: usize = 3;

/// Checks each partition periodically, until the source closes. Uses a client of its own, because
/// the watched client may be defective. Runs on its own thread.
pub(crate) fn run(kafka: &Kafka, shared: &SharedState, connection_errors: &Arc<ConnectionErrors>) {
    let (config, stalled_after) = (kafka.watch_config(), kafka.stalled_after);
    let new_client = || {
        let context = WatchContext(LogContext(connection_errors.clone()));
        config.create_with_context::<_, BaseConsumer<WatchContext>>(context)
    };
    let mut client = match new_client() {
        Ok(client) => client,
        Err(error) => {
            return tracing::error!(%error, "cannot create the kafka client that measures lag; lag is not reported and stalled partitions are not detected; check the limits of the process for memory, threads and open files, and restart it");
        }
    };
    let mut missing_topics = MissingTopics::new(kafka);
    let mut lost_metadata = LostMetadata::new(kafka.reconnect_backoff_max());
    let (mut watch, pause) = (
        PartitionWatch::default(),
        CHECK_INTERVAL.min(stalled_after / 4),
    );
    let (mut last_check, mut throttle) = (None::<Instant>, LogThrottle::every(LOG_INTERVAL));
    while shared.lock().phase() < SourcePhase::Closing {
        if last_check.is_none_or(|at| at.elapsed() >= pause) {
            watch.check(
                |topic, partition| {
                    let end = client.fetch_watermarks(topic, partition, REQUEST_TIMEOUT);
                    match end.map_err(|error| error.rdkafka_error_code()) {
                        Ok((_, end)) => LogEnd::At(end),
                        Err(Some(code)) if missing_topics::is_missing(code) => LogEnd::Missing,
                        Err(_) => LogEnd::Unknown,
                    }
                },
                shared,
                stalled_after,
            );
            missing_topics.check(&client, shared);
            last_check = Some(Instant::now());
            // The second client, too, may have lost its broker metadata.
            if watch.got_no_answer()
                && let Ok(replacement) = new_client()
            {
                client = replacement;
            }
        }
        let without_coordinator_since = shared.lock().client.without_coordinator_since();
        if lost_metadata.check(without_coordinator_since, Instant::now, || {
            new_client().is_ok_and(|client| reaches_coordinator(&client, &kafka.topics[0]))
        }) && let Some(without_coordinator_since) = without_coordinator_since
        {
            shared
                .lock()
                .client
                .suspect_lost_metadata(without_coordinator_since, Instant::now());
        }
        // After this time, most likely no new client reaches the coordinator either: otherwise the
        // consumer's client would have been replaced.
        if let Some(elapsed) = without_coordinator_since
            .map(|at| at.elapsed())
            .filter(|it| *it >= LOG_INTERVAL && throttle.due(Instant::now()).is_some())
        {
            tracing::warn!(
                group = kafka.group,
                seconds = elapsed.as_secs(),
                "cannot reach the group coordinator; nothing is committed, and partitions may be assigned to other members; check that every partition of __consumer_offsets has a leader"
            );
        }
        // Polling serves the client's log.
        let _ = client.poll(TURN);
    }
    watch.gauges.iter().for_each(|(topic, partition)| {
        set_partition_gauges(topic, *partition, Some(0), Duration::ZERO)
    });
    metrics::gauge!(crate::metric::PARTITIONS).set(0.0);
}

/// Whether the group coordinator answers this client. The client need not be a member of the group.
fn reaches_coordinator(client: &BaseConsumer<WatchContext>, topic: &str) -> bool {
    // The partition does not matter: any offset request goes to the coordinator.
    let mut partitions = TopicPartitionList::new();
    partitions.add_partition(topic, 0);
    client.committed_offsets(partitions, PROBE_TIMEOUT).is_ok()
}

/// The log end of a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LogEnd {
    At(i64),
    /// The brokers do not have the partition.
    Missing,
    /// No answer, or another error.
    Unknown,
}

impl From<Option<i64>> for LogEnd {
    fn from(end: Option<i64>) -> Self {
        end.map_or(Self::Unknown, Self::At)
    }
}

/// Checks the partitions, and keeps the results of earlier checks.
#[derive(Default)]
struct PartitionWatch {
    stalls: StallDetector,
    /// Partitions whose gauges were set at the last check.
    gauges: HashSet<(String, i32)>,
    /// Partitions whose log end no broker returned when it was last requested.
    without_log_end: HashSet<(String, i32)>,
    /// Whether the last check had partitions, and no broker returned a log end or replied that a
    /// partition is missing.
    got_no_answer: bool,
}

impl PartitionWatch {
    /// Fetches the log ends with `end_of`, updates the gauges, and requests a replacement of the
    /// client if a partition is stalled.
    fn check<E: Into<LogEnd>>(
        &mut self,
        end_of: impl FnMut(&str, i32) -> E,
        shared: &SharedState,
        stalled_after: Duration,
    ) {
        self.check_at(Instant::now, end_of, shared, stalled_after);
    }

    /// Like [`check`](Self::check). `clock` returns the current time, and is called after all
    /// requests.
    fn check_at<E: Into<LogEnd>>(
        &mut self,
        clock: impl FnOnce() -> Instant,
        end_of: impl FnMut(&str, i32) -> E,
        shared: &SharedState,
        stalled_after: Duration,
    ) {
        let partitions = shared.lock().partitions();
        let log_ends = self.fetch_log_ends(partitions, end_of, shared);
        log_ends.iter().for_each(|((topic, partition), end)| {
            shared.lock().set_log_end(topic, *partition, *end)
        });
        self.set_gauges(shared);
        let state = shared.lock();
        let (progress, partitions) = (state.client.read_progress(), state.read_positions());
        drop(state);
        let stalls = &mut self.stalls;
        for reason in stalls.check(partitions, &log_ends, progress, clock(), stalled_after) {
            shared.lock().client.request_replacement(reason);
            shared.wake_poller();
        }
    }

    /// Whether the last check had partitions, and no broker returned a log end or replied that a
    /// partition is missing.
    fn got_no_answer(&self) -> bool {
        self.got_no_answer
    }

    /// Fetches the log ends. The request for a partition without a leader takes its full timeout,
    /// so it is logged once, and from the next check on sent last, to delay no other partition.
    fn fetch_log_ends<E: Into<LogEnd>>(
        &mut self,
        mut partitions: Vec<(String, i32)>,
        mut end_of: impl FnMut(&str, i32) -> E,
        shared: &SharedState,
    ) -> HashMap<(String, i32), i64> {
        self.without_log_end.retain(|it| partitions.contains(it));
        let has_partitions = !partitions.is_empty();
        partitions.sort_by_key(|it| self.without_log_end.contains(it));
        let (mut log_ends, mut failures, mut missing) = (HashMap::new(), 0, false);
        for it in partitions {
            if failures == MAX_CONSECUTIVE_FAILURES {
                break;
            }
            match end_of(&it.0, it.1).into() {
                LogEnd::At(end) => {
                    failures = 0;
                    self.without_log_end.remove(&it);
                    log_ends.insert(it, end);
                }
                // A broker answered. `missing_topics` logs the topic, with the remedy.
                LogEnd::Missing => {
                    (failures, missing) = (0, true);
                    shared.lock().client.suspect_missing_topic(true);
                    self.without_log_end.insert(it);
                }
                LogEnd::Unknown => {
                    failures += 1;
                    if !self.without_log_end.contains(&it) {
                        metrics::counter!(crate::metric::LOG_ENDS_UNKNOWN).increment(1);
                        tracing::warn!(
                            topic = it.0,
                            partition = it.1,
                            "cannot fetch the last stable offset of the partition; its lag is not updated; check that the partition has a leader"
                        );
                        self.without_log_end.insert(it);
                    }
                }
            }
        }
        self.got_no_answer = has_partitions && log_ends.is_empty() && !missing;
        log_ends
    }

    /// Sets the gauges of assigned partitions, and sets the gauges of revoked partitions to 0. The
    /// lag gauge of a partition is set once the lag is known.
    fn set_gauges(&mut self, shared: &SharedState) {
        let status = shared.lock().status();
        metrics::gauge!(crate::metric::PARTITIONS).set(status.len() as f64);
        metrics::gauge!(crate::metric::PARTITIONS_WITHOUT_LOG_END)
            .set(self.without_log_end.len() as f64);
        let mut revoked = std::mem::take(&mut self.gauges);
        for it in status {
            revoked.remove(&(it.topic.to_string(), it.partition));
            set_partition_gauges(
                &it.topic,
                it.partition,
                it.lag,
                it.blocker
                    .map_or(Duration::ZERO, |blocker| blocker.blocked_for),
            );
            self.gauges.insert((it.topic.to_string(), it.partition));
        }
        revoked.iter().for_each(|(topic, partition)| {
            set_partition_gauges(topic, *partition, Some(0), Duration::ZERO)
        });
    }
}

fn set_partition_gauges(topic: &str, partition: i32, lag: Option<u64>, age: Duration) {
    let labels = [
        ("topic", topic.to_owned()),
        ("partition", partition.to_string()),
    ];
    if let Some(lag) = lag {
        metrics::gauge!(crate::metric::LAG, &labels).set(lag as f64);
    }
    metrics::gauge!(crate::metric::COMMIT_BLOCKED, &labels).set(age.as_secs_f64());
}

/// The context of the second client.
struct WatchContext(LogContext);

impl rdkafka::ClientContext for WatchContext {
    fn log(&self, level: rdkafka::config::RDKafkaLogLevel, facility: &str, line: &str) {
        self.0.log(level, facility, line);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: rdkafka::error::KafkaError, reason: &str) {
        self.0.error(error, reason);
    }
}

impl rdkafka::consumer::ConsumerContext for WatchContext {}

#[cfg(test)]
mod tests {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    use rdkafka::mocking::MockCluster;

    use super::*;
    use crate::partition::StartPosition;
    use crate::shared::tests::{assign, record};

    /// The state of a source with this many partitions, each read to offset 5.
    fn shared(partitions: i32) -> SharedState {
        let shared: SharedState = SharedState::default();
        for partition in 0..partitions {
            assign(&mut shared.lock(), partition, StartPosition::Committed(4));
            shared.add_records(vec![record(partition, 4)]);
        }
        shared
    }

    const AFTER: Duration = Duration::from_secs(1);

    /// Sets the length of the message queue, as the polling thread does.
    fn queue_length(shared: &SharedState, queued: u64) {
        shared.lock().client.set_queue_length(queued);
    }

    #[test]
    fn a_client_that_reports_no_coordinator_is_replaced_while_others_reach_it() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let kafka = Kafka::topic("t").brokers(&brokers).group("g");
        let connection_errors = Arc::new(ConnectionErrors::new(&brokers));
        let fresh_client = || {
            kafka
                .watch_config()
                .create_with_context(WatchContext(LogContext(connection_errors.clone())))
                .expect("a client")
        };
        cluster.broker_down(1).expect("the broker stops");
        assert!(!reaches_coordinator(&fresh_client(), "t"));
        cluster.broker_up(1).expect("the broker starts");
        let (shared, end) = (
            SharedState::default(),
            Instant::now() + Duration::from_secs(60),
        );
        std::thread::scope(|scope| {
            scope.spawn(|| run(&kafka, &shared, &connection_errors));
            while !shared.lock().client.needs_replacement() && Instant::now() < end {
                shared
                    .lock()
                    .client
                    .record_coordinator_state(false, Instant::now());
                std::thread::sleep(Duration::from_millis(200));
            }
            shared.enter(SourcePhase::Closing);
        });
        assert!(shared.lock().client.needs_replacement());
    }

    #[test]
    fn a_partition_without_a_leader_does_not_hide_others() {
        let (shared, mut watch) = (shared(3), PartitionWatch::default());
        for round in 0..2 {
            for without in 0..3 {
                let end = |_: &str, partition| (partition != without).then_some(10 + round);
                watch.check(end, &shared, Duration::from_secs(60));
                let updated: Vec<i32> = shared
                    .lock()
                    .status()
                    .iter()
                    .filter(|it| it.log_end == Some(10 + round))
                    .map(|it| it.partition)
                    .collect();
                assert!(
                    (0..3)
                        .filter(|it| *it != without)
                        .all(|it| updated.contains(&it)),
                    "without {without}: {updated:?}"
                );
            }
        }
    }

    #[test]
    fn an_unknown_lag_is_not_reported() {
        let (recorder, shared) = (DebuggingRecorder::new(), shared(1));
        let (snapshotter, mut watch) = (recorder.snapshotter(), PartitionWatch::default());
        let value = |name| {
            let mut all = snapshotter.snapshot().into_vec().into_iter();
            all.find(|it| it.0.key().name() == name).map(|it| it.3)
        };
        let mut lag_after = |log_end| {
            watch.check(|_, _| log_end, &shared, AFTER);
            value(crate::metric::LAG)
        };
        let lag = |lag: f64| Some(DebugValue::Gauge(lag.into()));
        metrics::with_local_recorder(&recorder, || {
            assert_eq!(lag_after(None), None);
            assert!(value(crate::metric::COMMIT_BLOCKED).is_some());
            assert_eq!(lag_after(Some(9)), lag(5.0));
            assert_eq!(lag_after(None), lag(5.0), "the lag is not updated");
            let epochs = shared.revoke(&[("t".to_owned(), 0)]);
            shared.lock().remove_assignments(&epochs);
            assert_eq!(lag_after(None), lag(0.0), "the partition was revoked");
        });
    }

    #[test]
    fn no_broker_answers_if_no_log_end_is_returned() {
        let (shared, mut watch) = (shared(10), PartitionWatch::default());
        assert!(!watch.got_no_answer());
        watch.check(|_, _| None, &shared, AFTER);
        assert!(watch.got_no_answer());
        // Some partitions have no leader. Each is detected once, and requested after the others
        // from then on.
        for _ in 0..4 {
            watch.check(|_, partition| (partition > 3).then_some(9), &shared, AFTER);
        }
        assert!(!watch.got_no_answer());
    }

    #[test]
    fn a_stall_is_detected_beside_a_partition_without_a_leader() {
        let (shared, mut watch) = (shared(2), PartitionWatch::default());
        for end in 9..=12 {
            assert!(!shared.lock().client.needs_replacement());
            queue_length(&shared, 0);
            watch.check(
                |_, partition| (partition == 1).then_some(end),
                &shared,
                Duration::ZERO,
            );
        }
        assert!(
            shared.lock().client.needs_replacement(),
            "the log grows and is not read"
        );
    }

    #[test]
    fn a_stall_is_detected_although_a_check_in_between_failed() {
        let (shared, mut watch) = (shared(1), PartitionWatch::default());
        for end in [Some(9), Some(9), None, Some(9), None, Some(12)] {
            assert!(!shared.lock().client.needs_replacement());
            queue_length(&shared, 0);
            watch.check(|_, _| end, &shared, Duration::ZERO);
        }
        assert!(shared.lock().client.needs_replacement(), "no progress");
    }

    /// Whether a stall of partition 1 is detected within `checks` checks, while the source has no
    /// room because of messages of partition 0. At each check the message queue has `queued`
    /// operations, of which `read` are read before the next check.
    fn is_detected_beside_a_backlog(queued: u64, read: u64, checks: i64) -> bool {
        let (shared, mut watch) = (shared(2), PartitionWatch::default());
        let full = 5_000;
        shared.add_records((5..full).map(|offset| record(0, offset)).collect());
        for check in 0..checks {
            assert_eq!(shared.lock().room(), 0);
            queue_length(&shared, queued);
            watch.check(
                |_, partition| Some(if partition == 1 { 9 + check } else { 1_000_000 }),
                &shared,
                Duration::ZERO,
            );
            // The first partition makes progress at each check.
            shared.add_records(vec![record(0, full + check)]);
            shared.lock().client.count_read(read);
        }
        shared.lock().client.needs_replacement()
    }

    #[test]
    fn a_stall_beside_a_backlog_is_detected_after_the_queue_was_read_three_times() {
        assert!(!is_detected_beside_a_backlog(1_000, 1_000, 3));
        assert!(is_detected_beside_a_backlog(1_000, 1_000, 4));
        assert!(
            !is_detected_beside_a_backlog(1_000, 100, 30),
            "messages fetched for partition 1 may still be in the queue"
        );
        assert!(is_detected_beside_a_backlog(1_000, 100, 31));
    }

    #[test]
    fn without_room_to_read_no_stall_is_detected_and_the_time_is_kept() {
        let (shared, mut watch) = (shared(1), PartitionWatch::default());
        let mut end = 9;
        let mut check = |queued| {
            queue_length(&shared, queued);
            end += 1;
            watch.check(|_, _| Some(end), &shared, Duration::ZERO);
            shared.lock().client.needs_replacement()
        };
        assert!(!check(0) && !check(0));
        // The queue may contain a message of the partition.
        assert!((0..100).all(|_| !check(1)));
        shared.lock().client.count_read(1);
        assert!(check(1), "the queue contained no message of the partition");
    }

    #[test]
    fn each_replacement_without_progress_doubles_the_time_limit() {
        let (shared, mut watch, started) = (shared(1), PartitionWatch::default(), Instant::now());
        let (mut replaced, mut last) = (Vec::new(), 0);
        for second in 0..16_000 {
            queue_length(&shared, 0);
            let end = 9 + i64::try_from(second).expect("the number of seconds fits an i64");
            watch.check_at(
                || started + Duration::from_secs(second),
                |_, _| Some(end),
                &shared,
                Duration::from_secs(60),
            );
            if shared.lock().client.take_replacement().is_none() {
                continue;
            }
            replaced.push(second - last);
            last = second;
            // Each client starts at the committed offset and reads one message; those after the
            // ninth replacement read two, which is progress once.
            let epochs = shared.revoke(&[("t".to_owned(), 0)]);
            shared.lock().remove_assignments(&epochs);
            assign(&mut shared.lock(), 0, StartPosition::Committed(4));
            shared.add_records(
                (4..if replaced.len() < 9 { 5 } else { 6 })
                    .map(|offset| record(0, offset))
                    .collect(),
            );
        }
        // The check that requests a replacement is the last one of a client; the next client is
        // checked a second later.
        let expected = [
            60, 121, 241, 481, 961, 1_921, 3_841, 3_841, 3_841, 61, 121, 241,
        ];
        assert_eq!(replaced[..expected.len()], expected);
    }

    #[test]
    fn no_stall_is_detected_while_the_polling_thread_is_blocked() {
        let (shared, mut watch) = (shared(1), PartitionWatch::default());
        queue_length(&shared, 0);
        (9..100).for_each(|end| watch.check(|_, _| Some(end), &shared, Duration::ZERO));
        assert!(!shared.lock().client.needs_replacement());
    }

    #[test]
    fn a_check_stops_early_without_a_broker_and_skips_no_partition_for_good() {
        let (shared, mut watch) = (shared(8), PartitionWatch::default());
        let mut requested = Vec::new();
        watch.check(
            |_, partition| {
                requested.push(partition);
                None
            },
            &shared,
            AFTER,
        );
        assert_eq!(requested.len(), MAX_CONSECUTIVE_FAILURES);
        // Half of the partitions have no leader. The others are checked, also those whose request
        // failed before.
        for _ in 0..3 {
            watch.check(
                |_, partition| (partition % 2 == 0).then_some(7),
                &shared,
                AFTER,
            );
        }
        let with_log_end = shared
            .lock()
            .status()
            .iter()
            .filter(|it| it.log_end == Some(7))
            .count();
        assert_eq!(with_log_end, 4);
        assert_eq!(
            watch.without_log_end.len(),
            4,
            "{:?}",
            watch.without_log_end
        );
    }
}
