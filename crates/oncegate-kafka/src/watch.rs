//! Watches the partitions with a second client: their lag, and whether the first client still reads
//! them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::TopicPartitionList;

use crate::client::connection_errors::ConnectionErrors;
use crate::client::log::LogContext;
use crate::client::lost_metadata::LostMetadata;
use crate::shared::{ReadProgress, SharedState, SourcePhase};

/// Maximum pause between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// How often it checks whether the source closes.
const TURN: Duration = Duration::from_millis(200);
/// Timeout of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a fresh client may take to log in, to find the group coordinator, to log in there, and
/// to get an answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// After how long without the group coordinator it is logged, and how often from then on.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// After this many consecutive partitions without an answer, the rest of a check is skipped: most
/// likely no broker answers, and each request would take its full timeout.
const MAX_SILENT: usize = 3;
/// How often the whole prefetch queue must have been read before a partition counts as stalled.
/// librdkafka fetches for all partitions when the queue is short. The first drain reads messages
/// that were requested before the partition had more, the second one those that were requested then,
/// and one check may fall between the arrival of a response and its reading.
const REQUIRED_DRAINS: u32 = 3;
/// How often the time limit of a partition is doubled at most: up to 64 times as long.
const MAX_DOUBLINGS: u32 = 6;

/// Checks each partition periodically with its own client, because the watched client may be the
/// one at fault. Runs on its own thread.
pub(crate) fn run(
    config: &ClientConfig,
    topic: &str,
    shared: &SharedState,
    connection_errors: &Arc<ConnectionErrors>,
    reconnect_backoff_max: Duration,
    stalled_after: Duration,
) {
    let another = || {
        config.create_with_context::<_, BaseConsumer<WatchContext>>(WatchContext(LogContext(
            connection_errors.clone(),
        )))
    };
    let mut client = match another() {
        Ok(client) => client,
        Err(error) => {
            return tracing::error!(%error, "cannot create the watching kafka client; lag is not reported and stalled partitions are not detected; check the limits of the process for memory, threads and open files, and restart it");
        }
    };
    let mut lost_metadata = LostMetadata::new(reconnect_backoff_max);
    let (mut watch, pause) = (
        PartitionWatch::default(),
        CHECK_INTERVAL.min(stalled_after / 4),
    );
    let (mut last_check, mut logged_at): (Option<Instant>, Option<Instant>) = (None, None);
    while shared.lock().phase() < SourcePhase::Closing {
        if last_check.is_none_or(|at| at.elapsed() >= pause) {
            watch.check(
                |topic, partition| {
                    Some(
                        client
                            .fetch_watermarks(topic, partition, REQUEST_TIMEOUT)
                            .ok()?
                            .1,
                    )
                },
                shared,
                stalled_after,
            );
            last_check = Some(Instant::now());
            // This client itself may have lost its broker metadata.
            if watch.all_silent()
                && let Ok(another) = another()
            {
                client = another;
            }
        }
        let without_group_since = shared.lock().without_group_since();
        if lost_metadata.check(without_group_since, Instant::now, || {
            another().is_ok_and(|client| reaches_coordinator(&client, topic))
        }) && let Some(without_group_since) = without_group_since
        {
            shared
                .lock()
                .suspect_lost_metadata(without_group_since, Instant::now());
        }
        // If fresh clients reached the coordinator, the client would already have been replaced.
        if let Some(without) = without_group_since.map(|at| at.elapsed()).filter(|it| {
            *it >= LOG_INTERVAL && logged_at.is_none_or(|at| at.elapsed() >= LOG_INTERVAL)
        }) {
            tracing::warn!(
                group = config.get("group.id"),
                seconds = without.as_secs(),
                "cannot reach the group coordinator; nothing is committed, and partitions may be assigned to other members; check that every partition of __consumer_offsets has a leader"
            );
            logged_at = Some(Instant::now());
        }
        // Polling serves the client's log.
        let _ = client.poll(TURN);
    }
    watch
        .gauges
        .keys()
        .for_each(|(topic, partition)| gauges(topic, *partition, Some(0), Duration::ZERO));
    metrics::gauge!(crate::metric::PARTITIONS).set(0.0);
}

/// Whether the group coordinator answers this client. The client need not be a member of the group.
fn reaches_coordinator(client: &BaseConsumer<WatchContext>, topic: &str) -> bool {
    let mut any = TopicPartitionList::new();
    any.add_partition(topic, 0);
    client.committed_offsets(any, PROBE_TIMEOUT).is_ok()
}

/// The results of earlier checks.
#[derive(Default)]
struct PartitionWatch {
    candidates: HashMap<(u64, i32), StallCandidate>,
    /// Partitions whose client was replaced and that have made no progress since.
    replaced: HashMap<(Arc<str>, i32), ReplacementBackoff>,
    /// Partitions with gauges.
    gauges: HashMap<(String, i32), ()>,
    /// Partitions whose log end no broker returned at the last check.
    silent: HashSet<(String, i32)>,
    /// Whether the last check got no answer for any partition.
    all_silent: bool,
}

/// A partition whose client was replaced and that has made no progress since. Its fetches may just
/// be slow, and each replacement starts over, so the next client gets twice the time.
#[derive(Clone, Copy, Debug)]
struct ReplacementBackoff {
    at: Option<i64>,
    times: u32,
}

/// A partition with unread messages that makes no progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StallCandidate {
    since: Instant,
    at: Option<i64>,
    /// The log end at that time.
    end: i64,
    /// How often the whole prefetch queue has been read since.
    drains: u32,
    /// The polling thread's progress when the last of these drains started.
    drain_start: ReadProgress,
}

impl StallCandidate {
    /// The candidate for a partition that was read to `at`, if its log ends at `end`.
    fn next(
        before: Option<Self>,
        at: Option<i64>,
        end: i64,
        progress: ReadProgress,
        now: Instant,
    ) -> Option<Self> {
        if at.is_some_and(|at| at >= end) {
            return None;
        }
        let start = Self {
            since: now,
            at,
            end,
            drains: 0,
            drain_start: progress,
        };
        let mut next = before.filter(|before| before.at == at).unwrap_or(start);
        if next.drain_start.is_over(progress) {
            (next.drains, next.drain_start) = (next.drains + 1, progress);
        }
        Some(next)
    }

    /// Whether the partition made no progress for this long although its log grew and the prefetch
    /// queue was read repeatedly. If the queue is not read for lack of room, the result is `false`. A
    /// log that does not grow may end with transaction markers.
    fn is_stalled(&self, end: i64, now: Instant, after: Duration) -> bool {
        end > self.end && self.drains >= REQUIRED_DRAINS && now.duration_since(self.since) >= after
    }
}

impl PartitionWatch {
    /// Fetches the log ends with `end_of`, which may fail, and requests a replacement for stalled
    /// partitions.
    fn check(
        &mut self,
        end_of: impl FnMut(&str, i32) -> Option<i64>,
        shared: &SharedState,
        stalled_after: Duration,
    ) {
        self.check_at(Instant::now, end_of, shared, stalled_after);
    }

    /// Like [`check`](Self::check), at the time that `clock` returns after all requests.
    fn check_at(
        &mut self,
        clock: impl FnOnce() -> Instant,
        end_of: impl FnMut(&str, i32) -> Option<i64>,
        shared: &SharedState,
        stalled_after: Duration,
    ) {
        let partitions = shared.lock().partitions();
        let log_ends = self.fetch_log_ends(partitions, end_of);
        log_ends.iter().for_each(|((topic, partition), end)| {
            shared.lock().set_log_end(topic, *partition, *end)
        });
        self.set_gauges(shared);
        let state = shared.lock();
        let (now, progress, partitions) = (clock(), state.read_progress(), state.read_positions());
        drop(state);
        let mut candidates = HashMap::new();
        for (epoch, topic, partition, at) in partitions {
            let Some(end) = log_ends.get(&(topic.to_string(), partition)) else {
                // Without a log end the candidate is kept as it is.
                candidates.extend(
                    self.candidates
                        .get(&(epoch, partition))
                        .map(|before| ((epoch, partition), *before)),
                );
                continue;
            };
            let before = self.candidates.get(&(epoch, partition)).copied();
            let Some(next) = StallCandidate::next(before, at, *end, progress, now) else {
                continue;
            };
            let time_limit = self.time_limit(&topic, partition, at, stalled_after);
            if !next.is_stalled(*end, now, time_limit) {
                candidates.insert((epoch, partition), next);
                continue;
            }
            // The candidate starts over until the client is replaced.
            let reason = format!(
                "no progress on {topic}/{partition} at offset {at:?} for {time_limit:?}, while its log has grown to {end}"
            );
            shared.lock().request_replacement(reason);
            shared.wake_poller();
            let times = self
                .replaced
                .get(&(topic.clone(), partition))
                .map_or(0, |before| before.times);
            self.replaced.insert(
                (topic, partition),
                ReplacementBackoff {
                    at,
                    times: (times + 1).min(MAX_DOUBLINGS),
                },
            );
        }
        self.candidates = candidates;
    }

    fn all_silent(&self) -> bool {
        self.all_silent
    }

    /// How long a partition that was read to `at` may make no progress. Progress since its client
    /// was replaced resets the limit.
    fn time_limit(
        &mut self,
        topic: &Arc<str>,
        partition: i32,
        at: Option<i64>,
        stalled_after: Duration,
    ) -> Duration {
        let key = (topic.clone(), partition);
        match self.replaced.get(&key) {
            None => stalled_after,
            Some(before) if at <= before.at => stalled_after.saturating_mul(1 << before.times),
            Some(_) => {
                self.replaced.remove(&key);
                stalled_after
            }
        }
    }

    /// Fetches the log ends. A partition without a leader, whose request takes the full timeout, is
    /// logged once and requested last, so that it delays no other partition.
    fn fetch_log_ends(
        &mut self,
        mut partitions: Vec<(String, i32)>,
        mut end_of: impl FnMut(&str, i32) -> Option<i64>,
    ) -> HashMap<(String, i32), i64> {
        self.silent.retain(|it| partitions.contains(it));
        let has_partitions = !partitions.is_empty();
        partitions.sort_by_key(|it| self.silent.contains(it));
        let (mut log_ends, mut failures) = (HashMap::new(), 0);
        for it in partitions {
            if failures == MAX_SILENT {
                break;
            }
            match end_of(&it.0, it.1) {
                Some(end) => {
                    failures = 0;
                    self.silent.remove(&it);
                    log_ends.insert(it, end);
                }
                None => {
                    failures += 1;
                    if !self.silent.contains(&it) {
                        metrics::counter!(crate::metric::LOG_ENDS_UNKNOWN).increment(1);
                        tracing::warn!(
                            topic = it.0,
                            partition = it.1,
                            "cannot fetch the log end of the partition; its lag is not updated; check that the partition has a leader"
                        );
                        self.silent.insert(it);
                    }
                }
            }
        }
        self.all_silent = has_partitions && log_ends.is_empty();
        log_ends
    }

    /// Sets the gauges, and those of revoked partitions to 0. The lag gauge of a partition appears
    /// once the lag is known.
    fn set_gauges(&mut self, shared: &SharedState) {
        let status = shared.lock().status();
        metrics::gauge!(crate::metric::PARTITIONS).set(status.len() as f64);
        metrics::gauge!(crate::metric::PARTITIONS_SILENT).set(self.silent.len() as f64);
        let mut revoked = std::mem::take(&mut self.gauges);
        for it in status {
            revoked.remove(&(it.topic.to_string(), it.partition));
            gauges(
                &it.topic,
                it.partition,
                it.lag,
                it.blocker.map_or(Duration::ZERO, |blocker| blocker.since),
            );
            self.gauges.insert((it.topic.to_string(), it.partition), ());
        }
        revoked
            .keys()
            .for_each(|(topic, partition)| gauges(topic, *partition, Some(0), Duration::ZERO));
    }
}

fn gauges(topic: &str, partition: i32, lag: Option<u64>, age: Duration) {
    let labels = [
        ("topic", topic.to_owned()),
        ("partition", partition.to_string()),
    ];
    if let Some(lag) = lag {
        metrics::gauge!(crate::metric::LAG, &labels).set(lag as f64);
    }
    metrics::gauge!(crate::metric::WATERMARK_AGE, &labels).set(age.as_secs_f64());
}

/// The context of the watching client.
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
    use crate::Kafka;
    use crate::client::batch::ConsumerRecord;
    use crate::shared::{LogIdentity, StartPosition};

    fn record(partition: i32, offset: i64) -> ConsumerRecord {
        let (topic, headers) = (Arc::from("t"), oncegate_core::Headers::default());
        ConsumerRecord {
            topic,
            partition,
            offset,
            sent_at: None,
            key: None,
            headers,
            body: "x".into(),
        }
    }

    /// A topic with this many partitions, each read to offset 5.
    fn shared(partitions: i32) -> SharedState {
        let shared: SharedState = SharedState::default();
        for partition in 0..partitions {
            shared.assign(
                "t",
                partition,
                StartPosition::Committed(4),
                LogIdentity::default(),
            );
            shared.add_records(vec![record(partition, 4)]);
        }
        shared
    }

    const AFTER: Duration = Duration::from_secs(1);

    /// The polling thread finds this many operations in the queue.
    fn queue_length(shared: &SharedState, waiting: u64) {
        shared.lock().set_queue_length(waiting);
    }

    #[test]
    fn a_client_that_reports_no_coordinator_is_replaced_while_others_reach_it() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let (config, connection_errors) = (
            Kafka::topic("t")
                .brokers(&brokers)
                .group("g")
                .watch_config(),
            Arc::new(ConnectionErrors::new(&brokers)),
        );
        let fresh = || {
            config
                .create_with_context(WatchContext(LogContext(connection_errors.clone())))
                .expect("a client")
        };
        cluster.broker_down(1).expect("down");
        assert!(!reaches_coordinator(&fresh(), "t"));
        cluster.broker_up(1).expect("up");
        let (shared, end) = (
            SharedState::default(),
            Instant::now() + Duration::from_secs(60),
        );
        std::thread::scope(|scope| {
            scope.spawn(|| {
                run(
                    &config,
                    "t",
                    &shared,
                    &connection_errors,
                    Duration::from_secs(1),
                    Duration::from_secs(60),
                )
            });
            while !shared.lock().needs_replacement() && Instant::now() < end {
                shared.lock().record_group_state(false, Instant::now());
                std::thread::sleep(Duration::from_millis(200));
            }
            shared.enter(SourcePhase::Closing);
        });
        assert!(shared.lock().needs_replacement());
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
        let (recorder, shared, mut watch) = (
            DebuggingRecorder::new(),
            shared(1),
            PartitionWatch::default(),
        );
        let snapshotter = recorder.snapshotter();
        let value = |name| {
            snapshotter
                .snapshot()
                .into_vec()
                .into_iter()
                .find(|it| it.0.key().name() == name)
                .map(|it| it.3)
        };
        metrics::with_local_recorder(&recorder, || {
            watch.check(|_, _| None, &shared, AFTER);
            assert!(
                value(crate::metric::WATERMARK_AGE).is_some()
                    && value(crate::metric::LAG).is_none()
            );
            watch.check(|_, _| Some(9), &shared, AFTER);
            assert_eq!(
                value(crate::metric::LAG),
                Some(DebugValue::Gauge(5.0.into()))
            );
            watch.check(|_, _| None, &shared, AFTER);
            assert_eq!(
                value(crate::metric::LAG),
                Some(DebugValue::Gauge(5.0.into())),
                "it is not updated"
            );
            let epochs = shared.revoke(&[("t".to_owned(), 0)]);
            shared.lock().forget(&epochs);
            watch.check(|_, _| None, &shared, AFTER);
            assert_eq!(
                value(crate::metric::LAG),
                Some(DebugValue::Gauge(0.0.into())),
                "another member's now"
            );
        });
    }

    #[test]
    fn all_silent_if_no_partition_gets_an_answer() {
        let (shared, mut watch) = (shared(10), PartitionWatch::default());
        assert!(!watch.all_silent());
        watch.check(|_, _| None, &shared, AFTER);
        assert!(watch.all_silent());
        // Some partitions have no leader. Each is detected once, and requested after the others
        // from then on.
        for _ in 0..4 {
            watch.check(|_, partition| (partition > 3).then_some(9), &shared, AFTER);
        }
        assert!(!watch.all_silent());
    }

    #[test]
    fn a_stall_is_detected_beside_a_partition_without_a_leader() {
        let (shared, mut watch) = (shared(2), PartitionWatch::default());
        for end in 9..=12 {
            assert!(!shared.lock().needs_replacement());
            queue_length(&shared, 0);
            watch.check(
                |_, partition| (partition == 1).then_some(end),
                &shared,
                Duration::ZERO,
            );
        }
        assert!(
            shared.lock().needs_replacement(),
            "it grows, and is not read"
        );
    }

    #[test]
    fn a_stall_is_detected_although_a_check_in_between_failed() {
        let (shared, mut watch) = (shared(1), PartitionWatch::default());
        for end in [Some(9), Some(9), None, Some(9), None, Some(12)] {
            assert!(!shared.lock().needs_replacement());
            queue_length(&shared, 0);
            watch.check(|_, _| end, &shared, Duration::ZERO);
        }
        assert!(shared.lock().needs_replacement(), "no progress");
    }

    /// Two partitions. The second one is not fetched any more, while the source is full of the
    /// first one and takes one message at a time: at each check the queue has `waiting` operations,
    /// of which `is_read` are read before the next one.
    fn beside_a_backlog(waiting: u64, is_read: u64, looks: i64) -> bool {
        let (shared, mut watch) = (shared(2), PartitionWatch::default());
        let full = 5_000;
        shared.add_records((5..full).map(|offset| record(0, offset)).collect());
        for check in 0..looks {
            assert_eq!(shared.lock().room(), 0);
            queue_length(&shared, waiting);
            watch.check(
                |_, partition| Some(if partition == 1 { 9 + check } else { 1_000_000 }),
                &shared,
                Duration::ZERO,
            );
            // The first partition makes progress at each check.
            shared.add_records(vec![record(0, full + check)]);
            shared.lock().count_read(is_read);
        }
        shared.lock().needs_replacement()
    }

    #[test]
    fn a_stall_beside_a_backlog_is_detected_after_three_drains_of_the_queue() {
        assert!(!beside_a_backlog(1_000, 1_000, 3));
        assert!(beside_a_backlog(1_000, 1_000, 4));
        assert!(
            !beside_a_backlog(1_000, 100, 30),
            "messages fetched for it may still be in the queue"
        );
        assert!(beside_a_backlog(1_000, 100, 31));
    }

    #[test]
    fn without_room_to_read_no_stall_is_detected_and_the_time_is_kept() {
        let (shared, mut watch) = (shared(1), PartitionWatch::default());
        let mut end = 9;
        let mut check = |waiting| {
            queue_length(&shared, waiting);
            end += 1;
            watch.check(|_, _| Some(end), &shared, Duration::ZERO);
            shared.lock().needs_replacement()
        };
        assert!(!check(0) && !check(0));
        // The queue may contain a message of the partition.
        assert!((0..100).all(|_| !check(1)));
        shared.lock().count_read(1);
        assert!(check(1), "that was none of it");
    }

    #[test]
    fn each_replacement_without_progress_doubles_the_time_limit() {
        let (shared, mut watch, started) = (shared(1), PartitionWatch::default(), Instant::now());
        let (mut replaced, mut last) = (Vec::new(), 0);
        for second in 0..16_000 {
            queue_length(&shared, 0);
            let end = 9 + i64::try_from(second).expect("few");
            watch.check_at(
                || started + Duration::from_secs(second),
                |_, _| Some(end),
                &shared,
                Duration::from_secs(60),
            );
            if shared.lock().take_replacement().is_none() {
                continue;
            }
            replaced.push(second - last);
            last = second;
            // The next client starts at the committed offset and gets no further than the one
            // before; the ninth one does.
            let epochs = shared.revoke(&[("t".to_owned(), 0)]);
            shared.lock().forget(&epochs);
            shared.assign("t", 0, StartPosition::Committed(4), LogIdentity::default());
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
    fn a_blocked_polling_thread_is_no_stall() {
        let (shared, mut watch) = (shared(1), PartitionWatch::default());
        queue_length(&shared, 0);
        (9..100).for_each(|end| watch.check(|_, _| Some(end), &shared, Duration::ZERO));
        assert!(!shared.lock().needs_replacement());
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
        assert_eq!(requested.len(), MAX_SILENT);
        // Half of the partitions have no leader: all others are checked, whichever were requested
        // in vain before.
        for _ in 0..3 {
            watch.check(
                |_, partition| (partition % 2 == 0).then_some(7),
                &shared,
                AFTER,
            );
        }
        let known = shared
            .lock()
            .status()
            .iter()
            .filter(|it| it.log_end == Some(7))
            .count();
        assert_eq!(known, 4);
        assert_eq!(watch.silent.len(), 4, "{:?}", watch.silent);
    }

    #[test]
    fn only_a_position_without_progress_in_a_growing_log_is_stalled() {
        let (started, after, progress) = (
            Instant::now(),
            Duration::from_secs(60),
            ReadProgress::default(),
        );
        let at = |seconds| started + Duration::from_secs(seconds);
        let next = |before, at, end, now| {
            let next = StallCandidate::next(before, at, end, progress, now)?;
            Some(StallCandidate {
                drains: REQUIRED_DRAINS,
                ..next
            })
        };
        assert_eq!(next(None, Some(7), 7, started), None, "all was read");
        let first = next(None, Some(5), 7, started).expect("behind");
        let later = next(Some(first), Some(5), 9, at(70)).expect("behind");
        assert_eq!(later, first);
        assert!(later.is_stalled(9, at(70), after));
        assert!(!later.is_stalled(9, at(59), after), "not for long enough");
        assert!(
            !later.is_stalled(7, at(70), after),
            "the remaining offsets may be transaction markers"
        );
        let moved = next(Some(first), Some(6), 9, at(70)).expect("behind");
        assert!(!moved.is_stalled(12, at(80), after), "it was read on");
        let unread = next(None, None, 3, started).expect("nothing was read of it");
        assert!(
            next(Some(unread), None, 4, at(60))
                .expect("behind")
                .is_stalled(4, at(60), after)
        );
    }
}
