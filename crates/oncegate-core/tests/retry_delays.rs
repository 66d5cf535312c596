//! Deliveries that wait for their next attempt: in the consumer, within its limits, or in their
//! source.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::lifecycle::Settlement;
use oncegate_core::*;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

const HOUR: Duration = Duration::from_secs(3600);

/// Fails the first runs of each message, and counts the runs.
#[derive(Clone)]
struct Fails {
    first: fn(id: &str) -> u32,
    runs: Arc<Mutex<HashMap<String, u32>>>,
}

impl Fails {
    fn first(first: fn(id: &str) -> u32) -> Self {
        Self {
            first,
            runs: Arc::default(),
        }
    }
}

impl Handler for Fails {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        let mut runs = self.runs.lock().expect("no panic inside");
        let run = runs.entry(cx.id().to_owned()).or_default();
        *run += 1;
        match *run <= (self.first)(cx.id()) {
            true => Err("not yet").retry(),
            false => Ok(()),
        }
    }
}

/// A source that delivers these ids and reports what the consumer does with it.
struct Reporting {
    ids: VecDeque<&'static str>,
    retry_delays: RetryDelays,
    reports: UnboundedSender<Report>,
}

#[derive(Debug, PartialEq)]
enum Report {
    Accepted(String),
    Released {
        id: String,
        after: Duration,
        failures: u32,
    },
    Level(QueueLevel),
}

#[async_trait]
impl Connect for Reporting {
    type Source = Self;

    async fn connect(self, _: ConnectOptions) -> Result<Self, SourceError> {
        Ok(self)
    }
}

#[async_trait]
impl Source for Reporting {
    async fn receive(&mut self, limit: Limit, into: &mut Vec<Incoming>) -> Result<(), SourceError> {
        let count = limit.count.min(self.ids.len());
        if count == 0 {
            return std::future::pending().await;
        }
        into.extend(self.ids.drain(..count).map(|id| {
            Incoming::Delivery(Delivery::new(
                Message::new("x").with_message_id(id).with_key(id),
                Receipt::new(1, 0),
            ))
        }));
        Ok(())
    }

    async fn settle(&mut self, settled: &mut Vec<Settled>) -> Result<(), SourceError> {
        for settled in settled.drain(..) {
            let id = settled.delivery.message.message_id.expect("an id");
            let id = String::from_utf8(id.to_vec()).expect("text");
            let report = match settled.settlement {
                Settlement::Accept(_) => Report::Accepted(id),
                Settlement::Release { after, failures } => Report::Released {
                    id,
                    after,
                    failures,
                },
                rejected => panic!("{rejected:?}"),
            };
            self.reports.send(report).expect("the test listens");
        }
        Ok(())
    }

    async fn close(self: Box<Self>, _: Instant) -> Result<(), SourceError> {
        Ok(())
    }

    fn queue_level(&mut self, level: QueueLevel) {
        let report = Report::Level(level);
        self.reports.send(report).expect("the test listens");
    }

    fn properties(&self) -> SourceProperties {
        let mut properties = SourceProperties::default();
        properties.retry_delays = self.retry_delays;
        properties
    }
}

fn source(
    ids: impl IntoIterator<Item = &'static str>,
    retry_delays: RetryDelays,
) -> (Reporting, UnboundedReceiver<Report>) {
    let (reports, reported) = unbounded_channel();
    let ids = ids.into_iter().collect();
    let source = Reporting {
        ids,
        retry_delays,
        reports,
    };
    (source, reported)
}

fn consumer<C: Connect>(
    source: C,
    handler: &Fails,
    backoff: Duration,
) -> Builder<C, MemoryStore, Fails, RawBytes> {
    Consumer::builder()
        .source(source)
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .backoff(backoff, backoff)
        .max_inline_retries(0)
        .max_attempts(1_000)
        .decode(RawBytes)
        .handler(handler.clone())
}

/// Runs the consumer until `script` ends.
async fn run<C: Connect>(
    consumer: Builder<C, MemoryStore, Fails, RawBytes>,
    script: impl Future<Output = ()>,
) {
    let ended = tokio::time::timeout(Duration::from_secs(60), consumer.run_until(script)).await;
    ended.expect("nothing is stuck").expect("a clean end");
}

fn released(id: &str, after: Duration) -> Report {
    Report::Released {
        id: id.to_owned(),
        after,
        failures: 1,
    }
}

/// The next `count` reports, without levels.
async fn settlements(reported: &mut UnboundedReceiver<Report>, count: usize) -> Vec<Report> {
    let mut all = Vec::new();
    while all.len() < count {
        match reported.recv().await.expect("the consumer runs") {
            Report::Level(_) => {}
            report => all.push(report),
        }
    }
    all
}

#[tokio::test]
async fn a_delivery_without_an_order_waits_in_the_consumer_and_delays_no_other() {
    let broker = MemoryBroker::new("q");
    for number in 0..10 {
        broker.publish(Message::new("x").with_message_id(format!("n-{number}")));
    }
    let handler = Fails::first(|id| if id == "n-0" { 5 } else { 0 });
    let until = broker.clone();
    let one_at_a_time =
        consumer(broker.source(), &handler, Duration::from_millis(20)).max_in_flight(1);
    run(one_at_a_time, async move { until.all_settled().await }).await;
    assert_eq!(handler.runs.lock().expect("no panic inside")["n-0"], 6);
    assert_eq!(broker.delivered(), 10, "each message was delivered once");
}

#[tokio::test]
async fn a_full_queue_stops_receiving_until_the_retries_succeed() {
    let broker = MemoryBroker::new("q");
    for number in 0..200 {
        broker.publish(Message::new("x").with_message_id(format!("n-{number}")));
    }
    let handler = Fails::first(|_| 3);
    let (until, runs) = (broker.clone(), handler.runs.clone());
    let limited = consumer(broker.source(), &handler, Duration::from_millis(10))
        .max_in_flight(4)
        .max_queued(20);
    let script = async {
        let mut most = 0;
        while until.unsettled() > 0 {
            let settled = 200 - until.unsettled() as u64;
            most = most.max(until.delivered() - settled);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!((20..=20 + 4 + 4).contains(&most), "{most} at once");
    };
    run(limited, script).await;
    let runs = runs.lock().expect("no panic inside");
    assert!(runs.len() == 200 && runs.values().all(|runs| *runs == 4));
}

#[tokio::test]
async fn a_source_with_delays_takes_long_ones_and_those_for_which_there_is_no_room() {
    let handler = Fails::first(|_| 1);
    for (above, max_kept, max_queued, kept) in [
        (HOUR / 2, 9, 9, 0),
        (HOUR, 0, 9, 0),
        (HOUR, 2, 9, 2),
        (HOUR, 9, 2, 2),
    ] {
        let retry_delays = RetryDelays::InSource { above, max_kept };
        let (source, mut reported) = source(["a", "b", "c", "d"], retry_delays);
        let consumer = consumer(source, &handler, HOUR)
            .max_in_flight(1)
            .max_queued(max_queued);
        handler.runs.lock().expect("no panic inside").clear();
        // With a full queue the consumer receives nothing more.
        let returned = if max_queued == 2 { 0 } else { 4 - kept };
        let (runs, mut during) = (handler.runs.clone(), Vec::new());
        let script = async {
            during = settlements(&mut reported, returned).await;
            while runs.lock().expect("no panic inside").len() < returned + kept {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        run(consumer, script).await;
        let all = ["a", "b", "c", "d"];
        let expected = all[kept..][..returned].iter().map(|id| released(id, HOUR));
        assert_eq!(during, Vec::from_iter(expected));
        let mut at_the_end = settlements(&mut reported, kept).await;
        at_the_end.sort_by_key(|report| format!("{report:?}"));
        let expected = all[..kept].iter().map(|id| released(id, Duration::ZERO));
        assert_eq!(at_the_end, Vec::from_iter(expected));
    }
}

#[tokio::test]
async fn a_delivery_with_an_ordering_key_waits_in_the_consumer_although_its_source_has_delays() {
    let above = Duration::ZERO;
    let (source, mut reported) = source(["a"], RetryDelays::InSource { above, max_kept: 0 });
    let ordered =
        consumer(source, &Fails::first(|_| 3), Duration::from_millis(5)).order(Order::ByKey);
    run(ordered, async {
        let settled = settlements(&mut reported, 1).await;
        assert_eq!(settled, [Report::Accepted("a".into())]);
    })
    .await;
}

#[tokio::test]
async fn a_delay_is_shortened_to_the_longest_that_the_source_allows() {
    let longest = Duration::from_millis(20);
    let (source, mut reported) = source(["a"], RetryDelays::InConsumer { longest });
    run(consumer(source, &Fails::first(|_| 3), HOUR), async {
        let settled = settlements(&mut reported, 1).await;
        assert_eq!(settled, [Report::Accepted("a".into())]);
    })
    .await;
}

#[tokio::test]
async fn the_source_learns_when_the_queue_fills_and_when_it_is_empty_again() {
    let (source, mut reported) = source(
        ["a", "b", "c"],
        RetryDelays::InConsumer {
            longest: Duration::MAX,
        },
    );
    let consumer = consumer(source, &Fails::first(|_| 1), Duration::from_millis(50)).max_queued(4);
    run(consumer, async {
        let mut levels = Vec::new();
        for _ in 0..5 {
            if let Report::Level(level) = reported.recv().await.expect("the consumer runs") {
                levels.push(level);
            }
        }
        assert_eq!(levels, [QueueLevel::High, QueueLevel::Low]);
    })
    .await;
}
