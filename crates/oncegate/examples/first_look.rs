//! A rough comparison of throughput: the bare Kafka client and oncegate, one after the other, on the
//! same topic and the same machine.
//!
//! `ONCEGATE_KAFKA=… ONCEGATE_REDIS=… cargo run --release -p oncegate --features kafka --example
//! first_look -- [MESSAGES [ONLY]]`
//!
//! `ONLY` selects the cases whose names contain it, such as `Redis, spawned`; the bare client always
//! runs.
//!
//! It prints messages a second and the ratio to the bare client. It is not a benchmark: one run, one
//! message size, one handler.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use oncegate::{
    Consumer, Context, Execution, Failure, Guarantee, Handler, IdSource, Kafka, MemoryStore,
    RawBytes, Redis, Store,
};
use rdkafka::ClientConfig;
use rdkafka::consumer::{Consumer as _, StreamConsumer};
use rdkafka::producer::{BaseRecord, Producer, ThreadedProducer};
use tokio::sync::Notify;

type ExampleResult<T> = Result<T, Box<dyn std::error::Error>>;

/// Counts messages, and notifies `done` at the last one.
#[derive(Clone)]
struct CountMessages {
    handled: Arc<AtomicUsize>,
    total: usize,
    done: Arc<Notify>,
}

impl Handler for CountMessages {
    type Payload = oncegate::Raw;

    async fn handle(&self, _: oncegate::Raw, _: &Context) -> Result<(), Failure> {
        if self.handled.fetch_add(1, Ordering::Relaxed) + 1 == self.total {
            self.done.notify_one();
        }
        Ok(())
    }
}

#[tokio::main]
async fn main() -> ExampleResult<()> {
    let brokers = std::env::var("ONCEGATE_KAFKA")
        .map_err(|_| "set ONCEGATE_KAFKA, as `cargo xtask services up` prints it")?;
    let redis = std::env::var("ONCEGATE_REDIS")
        .map_err(|_| "set ONCEGATE_REDIS, as `cargo xtask services up` prints it")?;
    let messages = std::env::args()
        .nth(1)
        .map_or(Ok(1_000_000), |text| text.parse())?;
    let run = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_millis();
    let topic = format!("first-look-{run}");
    produce(&brokers, &topic, messages).await?;

    let bare = bare(&brokers, &topic, messages).await?;
    println!("{:<42} {:>10.0}/s", "bare client, recv()", bare);
    let only = std::env::args().nth(2).unwrap_or_default();
    for (name, execution) in [
        ("inline", Execution::Inline),
        ("spawned", Execution::Spawned),
    ] {
        let memory = format!("oncegate, memory store, {name}");
        if memory.contains(&only) {
            let rate = with_oncegate(
                &brokers,
                &topic,
                &memory,
                messages,
                MemoryStore::new(),
                execution,
            )
            .await?;
            println!("{memory:<42} {rate:>10.0}/s {:>6.2}", rate / bare);
        }
        let on_redis = format!("oncegate, Redis, {name}");
        if on_redis.contains(&only) {
            let store = Redis::at(&redis)
                .prefix(format!("{topic}-{execution:?}:"))
                .allow_volatile_store();
            let rate =
                with_oncegate(&brokers, &topic, &on_redis, messages, store, execution).await?;
            println!("{on_redis:<42} {rate:>10.0}/s {:>6.2}", rate / bare);
        }
    }
    Ok(())
}

/// 100-byte messages with an id in a header, over four partitions.
async fn produce(brokers: &str, topic: &str, messages: usize) -> ExampleResult<()> {
    use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    let admin: AdminClient<_> = config.create()?;
    let topics = [
        (topic.to_owned(), 4),
        (format!("{topic}.dead-letters"), 1),
        (format!("{topic}.in-doubt"), 1),
    ];
    let new = topics
        .iter()
        .map(|(name, partitions)| NewTopic::new(name, *partitions, TopicReplication::Fixed(1)));
    // oncegate refuses dead-letter and in-doubt topics whose messages expire.
    let new: Vec<_> = new
        .map(|topic| topic.set("retention.ms", "-1").set("retention.bytes", "-1"))
        .collect();
    admin.create_topics(&new, &AdminOptions::new()).await?;
    let producer: ThreadedProducer<_> = config
        .set("queue.buffering.max.messages", "1000000")
        .set("linger.ms", "20")
        .create()?;
    let body = [b'x'; 100];
    for n in 0..messages {
        let id = format!("{n:012}");
        let header = rdkafka::message::Header {
            key: "id",
            value: Some(&id),
        };
        let mut record = BaseRecord::<(), _>::to(topic)
            .payload(&body)
            .headers(rdkafka::message::OwnedHeaders::new().insert(header));
        while let Err((_, unsent)) = producer.send(record) {
            tokio::time::sleep(Duration::from_millis(5)).await;
            record = unsent;
        }
    }
    producer.flush(Duration::from_secs(60))?;
    Ok(())
}

/// The throughput of the bare client with `recv()`.
async fn bare(brokers: &str, topic: &str, messages: usize) -> ExampleResult<f64> {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("group.id", format!("{topic}-bare"))
        .set("auto.offset.reset", "earliest");
    let consumer: StreamConsumer = config.set("fetch.queue.backoff.ms", "10").create()?;
    consumer.subscribe(&[topic])?;
    consumer.recv().await?;
    let start = Instant::now();
    for _ in 1..messages {
        consumer.recv().await?;
    }
    Ok(messages as f64 / start.elapsed().as_secs_f64())
}

/// The throughput of an oncegate consumer, from the first message to the last.
async fn with_oncegate(
    brokers: &str,
    topic: &str,
    name: &str,
    messages: usize,
    store: impl Store + 'static,
    execution: Execution,
) -> ExampleResult<f64> {
    let count = CountMessages {
        handled: Arc::default(),
        total: messages,
        done: Arc::default(),
    };
    let start = Instant::now();
    let (handled, done) = (count.handled.clone(), count.done.clone());
    let timed = async move {
        let mut first = start;
        while handled.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            first = Instant::now();
        }
        done.notified().await;
        messages as f64 / first.elapsed().as_secs_f64()
    };
    let (send_rate, rate) = tokio::sync::oneshot::channel();
    let finish = async {
        let _ = send_rate.send(timed.await);
    };
    // A group of its own: that of another case has committed the offsets of all messages.
    let group = format!("{topic} {name}");
    Consumer::builder()
        .source(Kafka::topic(topic).brokers(brokers).group(group))
        .store(store)
        .guarantee(Guarantee::EffectivelyOnce)
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .execution(execution)
        .handler(count)
        .run_until(finish)
        .await?;
    Ok(rate.await?)
}
