//! Watches from beside: how far behind the group is, and whether the client still reads at all.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::topic_partition_list::TopicPartitionList;

use crate::forgotten::Forgotten;
use crate::log::Log;
use crate::outage::Outage;
use crate::shared::{Phase, Reading, Shared};

/// How often it looks, at the most seldom.
const LOOK: Duration = Duration::from_secs(10);
/// How often it looks whether the source closes.
const TURN: Duration = Duration::from_millis(200);
/// How long a question to the broker may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a client has to log in, to find the broker that coordinates the group, to log in there,
/// and to be answered.
const ASKED: Duration = Duration::from_secs(10);
/// How long the client may be without its group until that is told, and how often it is while it
/// lasts.
const TOLD: Duration = Duration::from_secs(60);
/// After how many partitions in a row of which no broker says anything the others are not asked
/// about in this round: most likely no broker answers at all, and each would cost its time.
const IN_VAIN: usize = 3;
/// How often all that librdkafka had fetched has to be read meanwhile, before a partition is taken
/// for stalled: it fetches while little stands there, for all partitions at once. The first time
/// over, what was asked for before the partition had more is read; the second time, what was asked
/// for then; and one look may fall between an answer and its being seen.
const TURNS: u32 = 3;
/// How often in a row the patience with a partition doubles, at the most: to 64 times as long.
const DOUBLINGS: u32 = 6;

/// Looks at each partition from time to time, with a client of its own: what the watched one says
/// of itself is what is in question. Runs on a thread of its own.
pub(crate) fn run(
    config: &ClientConfig,
    topic: &str,
    shared: &Shared,
    outage: &Arc<Outage>,
    tries_again: Duration,
    stalled_after: Duration,
) {
    let another =
        || config.create_with_context::<_, BaseConsumer<OwnLog>>(OwnLog(Log(outage.clone())));
    let mut client = match another() {
        Ok(client) => client,
        Err(error) => {
            return tracing::error!(%error, "nobody watches the Kafka client: there is no second one");
        }
    };
    let mut forgotten = Forgotten::new(tries_again);
    let (mut watch, pause) = (Watch::default(), LOOK.min(stalled_after / 4));
    let (mut looked, mut told): (Option<Instant>, Option<Instant>) = (None, None);
    while shared.lock().phase() < Phase::Closing {
        if looked.is_none_or(|at| at.elapsed() >= pause) {
            watch.look(
                |topic, partition| {
                    Some(client.fetch_watermarks(topic, partition, PATIENCE).ok()?.1)
                },
                shared,
                stalled_after,
            );
            looked = Some(Instant::now());
            // It may be this one that knows of no broker any more.
            if watch.hears_nothing()
                && let Ok(another) = another()
            {
                client = another;
            }
        }
        let alone = shared.lock().alone();
        if forgotten.look(alone, Instant::now, || {
            another().is_ok_and(|client| gets_to_the_group(&client, topic))
        }) && let Some(alone) = alone
        {
            shared.lock().suspect(alone, Instant::now());
        }
        // One that others get to would have been replaced by now.
        if let Some(without) = alone
            .map(|at| at.elapsed())
            .filter(|it| *it >= TOLD && told.is_none_or(|at| at.elapsed() >= TOLD))
        {
            tracing::warn!(
                seconds = without.as_secs(),
                "without its group: no client gets to the broker that coordinates it; have all partitions of __consumer_offsets a leader?"
            );
            told = Some(Instant::now());
        }
        // Serves its log.
        let _ = client.poll(TURN);
    }
    watch
        .gauges
        .keys()
        .for_each(|(topic, partition)| gauges(topic, *partition, Some(0), Duration::ZERO));
    metrics::gauge!(crate::metric::PARTITIONS).set(0.0);
}

/// Whether the broker that coordinates the group answers this client. It need not have joined it
/// for that.
fn gets_to_the_group(client: &BaseConsumer<OwnLog>, topic: &str) -> bool {
    let mut any = TopicPartitionList::new();
    any.add_partition(topic, 0);
    client.committed_offsets(any, ASKED).is_ok()
}

/// What was seen before.
#[derive(Default)]
struct Watch {
    standing: HashMap<(u64, i32), Standing>,
    /// The partitions for which the client was replaced, until they are read on.
    in_vain: HashMap<(Arc<str>, i32), InVain>,
    /// Of which partitions something was told.
    gauges: HashMap<(String, i32), ()>,
    /// The partitions of which no broker said where their log ends, when it was asked last.
    silent: HashSet<(String, i32)>,
    /// Whether partitions were asked about last, and none of them was answered.
    hears_nothing: bool,
}

/// A partition for which the client was replaced, and that was not read on since. It may be that
/// what is fetched takes so long to come, and each client that is replaced begins with it again: so
/// the next one has twice the time.
#[derive(Clone, Copy, Debug)]
struct InVain {
    at: Option<i64>,
    times: u32,
}

/// A partition whose log has more than was read, and that is not read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    since: Instant,
    at: Option<i64>,
    /// Where the log ended then.
    end: i64,
    /// How often all that was fetched has been read since then.
    turns: u32,
    /// How far the polling thread was when the last of these turns began.
    turn: Reading,
}

impl Standing {
    /// What is to be remembered of a partition that was read to `at` of a log that ends at `end`.
    fn next(
        before: Option<Self>,
        at: Option<i64>,
        end: i64,
        reading: Reading,
        now: Instant,
    ) -> Option<Self> {
        if at.is_some_and(|at| at >= end) {
            return None;
        }
        let begins = Self {
            since: now,
            at,
            end,
            turns: 0,
            turn: reading,
        };
        let mut next = before.filter(|before| before.at == at).unwrap_or(begins);
        if next.turn.is_over(reading) {
            (next.turns, next.turn) = (next.turns + 1, reading);
        }
        Some(next)
    }

    /// Whether it has stood for so long while its log grew, and while what librdkafka fetches was
    /// read over and over: whoever reads nothing for lack of room learns nothing of it. A log that
    /// does not grow may end in what nobody is handed.
    fn is_stalled(&self, end: i64, now: Instant, after: Duration) -> bool {
        end > self.end && self.turns >= TURNS && now.duration_since(self.since) >= after
    }
}

impl Watch {
    /// Asks `end_of` each partition's log; of some it may say nothing.
    fn look(
        &mut self,
        end_of: impl FnMut(&str, i32) -> Option<i64>,
        shared: &Shared,
        stalled_after: Duration,
    ) {
        self.look_at(Instant::now, end_of, shared, stalled_after);
    }

    /// The same, at the time that `clock` says once all was asked.
    fn look_at(
        &mut self,
        clock: impl FnOnce() -> Instant,
        end_of: impl FnMut(&str, i32) -> Option<i64>,
        shared: &Shared,
        stalled_after: Duration,
    ) {
        let partitions = shared.lock().partitions();
        let seen = self.ends_of(partitions, end_of);
        seen.iter()
            .for_each(|((topic, partition), end)| shared.lock().log_ends(topic, *partition, *end));
        self.tell(shared);
        let state = shared.lock();
        let (now, reading, partitions) = (clock(), state.reading(), state.read_to());
        drop(state);
        let mut standing = HashMap::new();
        for (epoch, topic, partition, at) in partitions {
            let Some(end) = seen.get(&(topic.to_string(), partition)) else {
                // For as long as nobody says where it ends, it stands as it stood.
                standing.extend(
                    self.standing
                        .get(&(epoch, partition))
                        .map(|before| ((epoch, partition), *before)),
                );
                continue;
            };
            let before = self.standing.get(&(epoch, partition)).copied();
            let Some(next) = Standing::next(before, at, *end, reading, now) else {
                continue;
            };
            let patience = self.patience(&topic, partition, at, stalled_after);
            if !next.is_stalled(*end, now, patience) {
                standing.insert((epoch, partition), next);
                continue;
            }
            // Until it is replaced it stands as if it had begun to.
            let why = format!(
                "{topic}/{partition} was read to {at:?} for {patience:?}, though its log has grown to {end}"
            );
            shared.lock().ask_for_another(why);
            shared.wake_poller();
            let times = self
                .in_vain
                .get(&(topic.clone(), partition))
                .map_or(0, |before| before.times);
            self.in_vain.insert(
                (topic, partition),
                InVain {
                    at,
                    times: (times + 1).min(DOUBLINGS),
                },
            );
        }
        self.standing = standing;
    }

    /// Whether no broker said anything of any partition when they were asked last.
    fn hears_nothing(&self) -> bool {
        self.hears_nothing
    }

    /// How long a partition that was read to `at` may stand. One that was read beyond where it
    /// stood when its client was replaced is as any other again.
    fn patience(
        &mut self,
        topic: &Arc<str>,
        partition: i32,
        at: Option<i64>,
        stalled_after: Duration,
    ) -> Duration {
        let key = (topic.clone(), partition);
        match self.in_vain.get(&key) {
            None => stalled_after,
            Some(before) if at <= before.at => stalled_after.saturating_mul(1 << before.times),
            Some(_) => {
                self.in_vain.remove(&key);
                stalled_after
            }
        }
    }

    /// Where these logs end, as far as a broker says. A partition without a leader, which costs the
    /// whole patience, takes nothing from the others: it is said once, and it is asked about after
    /// them.
    fn ends_of(
        &mut self,
        mut partitions: Vec<(String, i32)>,
        mut end_of: impl FnMut(&str, i32) -> Option<i64>,
    ) -> HashMap<(String, i32), i64> {
        self.silent.retain(|it| partitions.contains(it));
        let asks = !partitions.is_empty();
        partitions.sort_by_key(|it| self.silent.contains(it));
        let (mut seen, mut in_vain) = (HashMap::new(), 0);
        for it in partitions {
            if in_vain == IN_VAIN {
                break;
            }
            match end_of(&it.0, it.1) {
                Some(end) => {
                    in_vain = 0;
                    self.silent.remove(&it);
                    seen.insert(it, end);
                }
                None => {
                    in_vain += 1;
                    if !self.silent.contains(&it) {
                        metrics::counter!(crate::metric::LOG_ENDS_UNKNOWN).increment(1);
                        tracing::warn!(
                            topic = it.0,
                            partition = it.1,
                            "no broker says where the log ends; its lag stands still meanwhile"
                        );
                        self.silent.insert(it);
                    }
                }
            }
        }
        self.hears_nothing = asks && seen.is_empty();
        seen
    }

    /// Sets the gauges, those of partitions that have left to 0. A lag that is not known is not
    /// told: none is there before it is.
    fn tell(&mut self, shared: &Shared) {
        let status = shared.lock().status();
        metrics::gauge!(crate::metric::PARTITIONS).set(status.len() as f64);
        metrics::gauge!(crate::metric::PARTITIONS_SILENT).set(self.silent.len() as f64);
        let mut gone = std::mem::take(&mut self.gauges);
        for it in status {
            gone.remove(&(it.topic.to_string(), it.partition));
            gauges(
                &it.topic,
                it.partition,
                it.lag,
                it.lowest.map_or(Duration::ZERO, |lowest| lowest.since),
            );
            self.gauges.insert((it.topic.to_string(), it.partition), ());
        }
        gone.keys()
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

/// The log of the client that watches.
struct OwnLog(Log);

impl rdkafka::ClientContext for OwnLog {
    fn log(&self, level: rdkafka::config::RDKafkaLogLevel, facility: &str, line: &str) {
        self.0.log(level, facility, line);
    }

    fn stats_raw(&self, _: &[u8]) {}

    fn error(&self, error: rdkafka::error::KafkaError, reason: &str) {
        self.0.error(error, reason);
    }
}

impl rdkafka::consumer::ConsumerContext for OwnLog {}

#[cfg(test)]
mod tests {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    use rdkafka::mocking::MockCluster;

    use super::*;
    use crate::Kafka;
    use crate::batch::Record;
    use crate::shared::{Begins, Log};

    fn record(partition: i32, offset: i64) -> Record {
        let (topic, headers) = (Arc::from("t"), oncegate_core::Headers::default());
        Record {
            topic,
            partition,
            offset,
            sent_at: None,
            key: None,
            headers,
            body: "x".into(),
        }
    }

    /// A topic of so many partitions, each read to its offset 5.
    fn shared(partitions: i32) -> Shared {
        let shared: Shared = Shared::default();
        for partition in 0..partitions {
            shared.assign("t", partition, Begins::At(4), Log::default());
            shared.take_in(vec![record(partition, 4)]);
        }
        shared
    }

    const AFTER: Duration = Duration::from_secs(1);

    /// The polling thread looks, and finds so much.
    fn waits(shared: &Shared, waiting: u64) {
        shared.lock().waits(waiting);
    }

    #[test]
    fn a_client_that_says_it_is_without_its_group_is_replaced_while_others_get_there() {
        let cluster = MockCluster::new(1).expect("a broker");
        cluster.create_topic("t", 1, 1).expect("a topic");
        let brokers = cluster.bootstrap_servers();
        let (config, outage) = (
            Kafka::topic("t")
                .brokers(&brokers)
                .group("g")
                .watch_config(),
            Arc::new(Outage::of(&brokers)),
        );
        let fresh = || {
            config
                .create_with_context(OwnLog(Log(outage.clone())))
                .expect("a client")
        };
        cluster.broker_down(1).expect("down");
        assert!(!gets_to_the_group(&fresh(), "t"));
        cluster.broker_up(1).expect("up");
        let (shared, end) = (Shared::default(), Instant::now() + Duration::from_secs(60));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                run(
                    &config,
                    "t",
                    &shared,
                    &outage,
                    Duration::from_secs(1),
                    Duration::from_secs(60),
                )
            });
            while !shared.lock().wants_another() && Instant::now() < end {
                shared.lock().hears_of_the_group(false, Instant::now());
                std::thread::sleep(Duration::from_millis(200));
            }
            shared.enter(Phase::Closing);
        });
        assert!(shared.lock().wants_another());
    }

    #[test]
    fn a_partition_without_a_leader_hides_no_other() {
        let (shared, mut watch) = (shared(3), Watch::default());
        for round in 0..2 {
            for without in 0..3 {
                let end = |_: &str, partition| (partition != without).then_some(10 + round);
                watch.look(end, &shared, Duration::from_secs(60));
                let told: Vec<i32> = shared
                    .lock()
                    .status()
                    .iter()
                    .filter(|it| it.log_end == Some(10 + round))
                    .map(|it| it.partition)
                    .collect();
                assert!(
                    (0..3)
                        .filter(|it| *it != without)
                        .all(|it| told.contains(&it)),
                    "without {without}: {told:?}"
                );
            }
        }
    }

    #[test]
    fn a_lag_that_nobody_knows_is_not_told() {
        let (recorder, shared, mut watch) = (DebuggingRecorder::new(), shared(1), Watch::default());
        let snapshotter = recorder.snapshotter();
        let told = |name| {
            snapshotter
                .snapshot()
                .into_vec()
                .into_iter()
                .find(|it| it.0.key().name() == name)
                .map(|it| it.3)
        };
        metrics::with_local_recorder(&recorder, || {
            watch.look(|_, _| None, &shared, AFTER);
            assert!(
                told(crate::metric::WATERMARK_AGE).is_some() && told(crate::metric::LAG).is_none()
            );
            watch.look(|_, _| Some(9), &shared, AFTER);
            assert_eq!(
                told(crate::metric::LAG),
                Some(DebugValue::Gauge(5.0.into()))
            );
            watch.look(|_, _| None, &shared, AFTER);
            assert_eq!(
                told(crate::metric::LAG),
                Some(DebugValue::Gauge(5.0.into())),
                "it stands still"
            );
            let epochs = shared.revoke(&[("t".to_owned(), 0)]);
            shared.lock().forget(&epochs);
            watch.look(|_, _| None, &shared, AFTER);
            assert_eq!(
                told(crate::metric::LAG),
                Some(DebugValue::Gauge(0.0.into())),
                "another member's now"
            );
        });
    }

    #[test]
    fn who_asks_in_vain_of_all_partitions_hears_nothing() {
        let (shared, mut watch) = (shared(10), Watch::default());
        assert!(!watch.hears_nothing());
        watch.look(|_, _| None, &shared, AFTER);
        assert!(watch.hears_nothing());
        // Some have no leader. Each is found out once, and asked about after the others from then
        // on.
        for _ in 0..4 {
            watch.look(|_, partition| (partition > 3).then_some(9), &shared, AFTER);
        }
        assert!(!watch.hears_nothing());
    }

    #[test]
    fn a_stall_is_found_beside_a_partition_without_a_leader() {
        let (shared, mut watch) = (shared(2), Watch::default());
        for end in 9..=12 {
            assert!(!shared.lock().wants_another());
            waits(&shared, 0);
            watch.look(
                |_, partition| (partition == 1).then_some(end),
                &shared,
                Duration::ZERO,
            );
        }
        assert!(shared.lock().wants_another(), "it grows, and is not read");
    }

    #[test]
    fn a_stall_is_found_though_a_look_in_between_was_in_vain() {
        let (shared, mut watch) = (shared(1), Watch::default());
        for end in [Some(9), Some(9), None, Some(9), None, Some(12)] {
            assert!(!shared.lock().wants_another());
            waits(&shared, 0);
            watch.look(|_, _| end, &shared, Duration::ZERO);
        }
        assert!(
            shared.lock().wants_another(),
            "it stands where it stood before"
        );
    }

    /// Two partitions, of which the second is not fetched any more, while the source is full of the
    /// first and takes one message at a time: so much stands in the queue at each look, of which so
    /// much is read until the next one.
    fn beside_a_backlog(waiting: u64, is_read: u64, looks: i64) -> bool {
        let (shared, mut watch) = (shared(2), Watch::default());
        let full = 5_000;
        shared.take_in((5..full).map(|offset| record(0, offset)).collect());
        for look in 0..looks {
            assert_eq!(shared.lock().room(), 0);
            waits(&shared, waiting);
            watch.look(
                |_, partition| Some(if partition == 1 { 9 + look } else { 1_000_000 }),
                &shared,
                Duration::ZERO,
            );
            // The first partition moves with each look.
            shared.take_in(vec![record(0, full + look)]);
            shared.lock().was_read(is_read);
        }
        shared.lock().wants_another()
    }

    #[test]
    fn a_stall_beside_a_backlog_is_found_once_the_queue_was_read_three_times_over_and_not_before() {
        assert!(!beside_a_backlog(1_000, 1_000, 3));
        assert!(beside_a_backlog(1_000, 1_000, 4));
        assert!(
            !beside_a_backlog(1_000, 100, 30),
            "what was fetched of it may stand in the queue still"
        );
        assert!(beside_a_backlog(1_000, 100, 31));
    }

    #[test]
    fn where_there_is_no_room_to_read_nothing_stalls_and_nothing_is_forgotten() {
        let (shared, mut watch) = (shared(1), Watch::default());
        let mut end = 9;
        let mut look = |waiting| {
            waits(&shared, waiting);
            end += 1;
            watch.look(|_, _| Some(end), &shared, Duration::ZERO);
            shared.lock().wants_another()
        };
        assert!(!look(0) && !look(0));
        // Something of it may have come, and waits.
        assert!((0..100).all(|_| !look(1)));
        shared.lock().was_read(1);
        assert!(look(1), "that was none of it");
    }

    #[test]
    fn each_client_that_was_replaced_in_vain_gives_the_next_one_twice_the_time_until_it_reads_on() {
        let (shared, mut watch, begun) = (shared(1), Watch::default(), Instant::now());
        let (mut replaced, mut last) = (Vec::new(), 0);
        for second in 0..16_000 {
            waits(&shared, 0);
            let end = 9 + i64::try_from(second).expect("few");
            watch.look_at(
                || begun + Duration::from_secs(second),
                |_, _| Some(end),
                &shared,
                Duration::from_secs(60),
            );
            if shared.lock().replacing().is_none() {
                continue;
            }
            replaced.push(second - last);
            last = second;
            // The next client begins where the group stands, and gets no further than the one
            // before; the ninth does.
            let epochs = shared.revoke(&[("t".to_owned(), 0)]);
            shared.lock().forget(&epochs);
            shared.assign("t", 0, Begins::At(4), Log::default());
            shared.take_in(
                (4..if replaced.len() < 9 { 5 } else { 6 })
                    .map(|offset| record(0, offset))
                    .collect(),
            );
        }
        // A look at which it is replaced is the last of one client; the next one is looked at a
        // second later.
        let expected = [
            60, 121, 241, 481, 961, 1_921, 3_841, 3_841, 3_841, 61, 121, 241,
        ];
        assert_eq!(replaced[..expected.len()], expected);
    }

    #[test]
    fn a_thread_that_is_held_up_has_read_nothing_over() {
        let (shared, mut watch) = (shared(1), Watch::default());
        waits(&shared, 0);
        (9..100).for_each(|end| watch.look(|_, _| Some(end), &shared, Duration::ZERO));
        assert!(!shared.lock().wants_another());
    }

    #[test]
    fn no_broker_is_not_asked_about_each_partition_and_none_is_forgotten() {
        let (shared, mut watch) = (shared(8), Watch::default());
        let mut asked = Vec::new();
        watch.look(
            |_, partition| {
                asked.push(partition);
                None
            },
            &shared,
            AFTER,
        );
        assert_eq!(asked.len(), IN_VAIN);
        // Half of them are without a leader: all others are looked at, whichever were asked about
        // in vain before.
        for _ in 0..3 {
            watch.look(
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
    fn only_a_position_that_stands_while_its_log_grows_is_stalled() {
        let (begun, after, reading) = (Instant::now(), Duration::from_secs(60), Reading::default());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let next = |before, at, end, now| {
            let next = Standing::next(before, at, end, reading, now)?;
            Some(Standing {
                turns: TURNS,
                ..next
            })
        };
        assert_eq!(next(None, Some(7), 7, begun), None, "all was read");
        let first = next(None, Some(5), 7, begun).expect("behind");
        let later = next(Some(first), Some(5), 9, at(70)).expect("behind");
        assert_eq!(later, first);
        assert!(later.is_stalled(9, at(70), after));
        assert!(!later.is_stalled(9, at(59), after), "not for long enough");
        assert!(
            !later.is_stalled(7, at(70), after),
            "what is left may be markers"
        );
        let moved = next(Some(first), Some(6), 9, at(70)).expect("behind");
        assert!(!moved.is_stalled(12, at(80), after), "it was read on");
        let unread = next(None, None, 3, begun).expect("nothing was read of it");
        assert!(
            next(Some(unread), None, 4, at(60))
                .expect("behind")
                .is_stalled(4, at(60), after)
        );
    }
}
