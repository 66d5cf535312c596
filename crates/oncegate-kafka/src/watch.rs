//! Watches from beside: how far behind the group is, and whether the client still reads at all.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};

use crate::log::Log;
use crate::outage::Outage;
use crate::shared::{Phase, Shared};

/// How often it looks, at the most seldom.
const LOOK: Duration = Duration::from_secs(10);
/// How often it looks whether the source closes.
const TURN: Duration = Duration::from_millis(200);
/// How long a question to the broker may take.
const PATIENCE: Duration = Duration::from_secs(3);

/// Looks at each partition from time to time, with a client of its own: what the watched one says of itself is what is in
/// question. Runs on a thread of its own.
pub(crate) fn run(config: &ClientConfig, shared: &Shared, outage: &Arc<Outage>, stalled_after: Duration) {
    let client: BaseConsumer<OwnLog> = match config.create_with_context(OwnLog(Log(outage.clone()))) {
        Ok(client) => client,
        Err(error) => return tracing::error!(%error, "nobody watches the Kafka client: there is no second one"),
    };
    let (mut watch, pause) = (Watch::default(), LOOK.min(stalled_after / 4));
    let mut looked: Option<Instant> = None;
    while shared.lock().phase() < Phase::Closing {
        if looked.is_none_or(|at| at.elapsed() >= pause) {
            watch.look(&client, shared, stalled_after);
            looked = Some(Instant::now());
        }
        // Serves its log.
        let _ = client.poll(TURN);
    }
    watch.gauges.keys().for_each(|(topic, partition)| gauges(topic, *partition, 0, Duration::ZERO));
    metrics::gauge!(crate::metric::PARTITIONS).set(0.0);
}

/// What was seen before.
#[derive(Default)]
struct Watch {
    standing: HashMap<(u64, i32), Standing>,
    /// Of which partitions something was told.
    gauges: HashMap<(String, i32), ()>,
}

/// A partition whose log has more than was read, and that is not read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    since: Instant,
    at: Option<i64>,
    /// Where the log ended then.
    end: i64,
}

impl Standing {
    /// What is to be remembered of a partition that was read to `at` of a log that ends at `end`.
    fn next(before: Option<Self>, at: Option<i64>, end: i64, now: Instant) -> Option<Self> {
        if at.is_some_and(|at| at >= end) {
            return None;
        }
        Some(before.filter(|before| before.at == at).unwrap_or(Self { since: now, at, end }))
    }

    /// Whether it has stood for so long while its log grew. A log that does not grow may end in what nobody is handed.
    fn is_stalled(&self, end: i64, now: Instant, after: Duration) -> bool {
        end > self.end && now.duration_since(self.since) >= after
    }
}

impl Watch {
    fn look(&mut self, client: &BaseConsumer<OwnLog>, shared: &Shared, stalled_after: Duration) {
        let mut seen = HashMap::new();
        let partitions = shared.lock().partitions();
        for (topic, partition) in &partitions {
            // The client says itself that no broker answers; the others would be asked in vain too.
            let Ok((_, end)) = client.fetch_watermarks(topic, *partition, PATIENCE) else { return self.standing.clear() };
            shared.lock().log_ends(topic, *partition, end);
            seen.insert((topic.clone(), *partition), end);
        }
        self.tell(shared);
        let (now, reading) = (Instant::now(), shared.lock().read_to());
        let mut standing = HashMap::new();
        for (epoch, topic, partition, at) in reading {
            let Some(end) = seen.get(&(topic.to_string(), partition)) else { continue };
            let Some(next) = Standing::next(self.standing.get(&(epoch, partition)).copied(), at, *end, now) else { continue };
            if next.is_stalled(*end, now, stalled_after) {
                let why = format!("{topic}/{partition} was read to {at:?} for {stalled_after:?}, though its log has grown to {end}");
                shared.lock().ask_for_another(why);
                shared.wake_poller();
            }
            standing.insert((epoch, partition), next);
        }
        self.standing = standing;
    }

    /// Sets the gauges, those of partitions that have left to 0.
    fn tell(&mut self, shared: &Shared) {
        let status = shared.lock().status();
        metrics::gauge!(crate::metric::PARTITIONS).set(status.len() as f64);
        let mut gone = std::mem::take(&mut self.gauges);
        for it in status {
            gone.remove(&(it.topic.to_string(), it.partition));
            gauges(&it.topic, it.partition, it.lag.unwrap_or(0), it.lowest.map_or(Duration::ZERO, |lowest| lowest.since));
            self.gauges.insert((it.topic.to_string(), it.partition), ());
        }
        gone.keys().for_each(|(topic, partition)| gauges(topic, *partition, 0, Duration::ZERO));
    }
}

fn gauges(topic: &str, partition: i32, lag: u64, age: Duration) {
    let labels = [("topic", topic.to_owned()), ("partition", partition.to_string())];
    metrics::gauge!(crate::metric::LAG, &labels).set(lag as f64);
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
    use super::*;

    #[test]
    fn only_a_position_that_stands_while_its_log_grows_is_stalled() {
        let (begun, after) = (Instant::now(), Duration::from_secs(60));
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(Standing::next(None, Some(7), 7, begun), None, "all was read");
        let first = Standing::next(None, Some(5), 7, begun).expect("behind");
        let later = Standing::next(Some(first), Some(5), 9, at(70)).expect("behind");
        assert_eq!(later, first);
        assert!(later.is_stalled(9, at(70), after));
        assert!(!later.is_stalled(9, at(59), after), "not for long enough");
        assert!(!later.is_stalled(7, at(70), after), "what is left may be markers");
        let moved = Standing::next(Some(first), Some(6), 9, at(70)).expect("behind");
        assert!(!moved.is_stalled(12, at(80), after), "it was read on");
        let unread = Standing::next(None, None, 3, begun).expect("nothing was read of it");
        assert!(Standing::next(Some(unread), None, 4, at(60)).expect("behind").is_stalled(4, at(60), after));
    }
}
