//! Measures how fast the source reads a backlog, with default or given properties:
//!
//! ```text
//! cargo run --release -p oncegate-kafka --example backlog -- localhost:9092 5000000 100 [rounds=3] [property=value …]
//! ```
//!
//! Creates a topic with four partitions, writes this many messages of this many bytes, and reads
//! them all once per round, each time in a new group, and prints the rate of each round. There is
//! no handler and no store: this measures the source alone.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Incoming, Limit, Settled, Source};
use oncegate_kafka::{Kafka, TopicCreation};
use oncegate_testkit::laws::source::accepted;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer, ThreadedProducer};

const PARTITIONS: i32 = 4;
/// The limit of one receive.
const LIMIT: Limit = Limit::new(1_024, 16 << 20);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(brokers), Some(count), Some(size)) =
        (arguments.next(), arguments.next(), arguments.next())
    else {
        return Err(
            "usage: backlog BROKERS MESSAGES BYTES_PER_MESSAGE [rounds=3] [property=value …]"
                .into(),
        );
    };
    let (count, size): (usize, usize) = (count.parse()?, size.parse()?);
    let (mut rounds, mut properties) = (3, Vec::new());
    for argument in arguments {
        match argument.split_once('=') {
            Some(("rounds", value)) => rounds = value.parse()?,
            Some((key, value)) => properties.push((key.to_owned(), value.to_owned())),
            None => return Err(format!("`{argument}` is not key=value").into()),
        }
    }
    let topic = format!(
        "backlog-{}",
        SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos()
    );
    write(&brokers, &topic, count, size).await?;
    for round in 0..rounds {
        let kafka = Kafka::topic(&topic)
            .brokers(&brokers)
            .group(format!("{topic}-{round}"))
            .create_topics(TopicCreation::Create {
                partitions: 1,
                replication: 1,
            });
        let kafka = properties
            .iter()
            .fold(kafka, |kafka, (key, value)| kafka.property(key, value));
        let (elapsed, mut source) = read(kafka, count).await?;
        source.stop().await;
        Box::new(source)
            .close(Instant::now() + Duration::from_secs(10))
            .await?;
        println!(
            "{:.0} messages a second",
            count as f64 / elapsed.as_secs_f64()
        );
    }
    let admin: AdminClient<DefaultClientContext> = client(&brokers).create()?;
    let names = [
        topic.clone(),
        format!("{topic}.dead-letters"),
        format!("{topic}.in-doubt"),
    ];
    admin
        .delete_topics(&names.each_ref().map(String::as_str), &AdminOptions::new())
        .await?;
    Ok(())
}

async fn write(
    brokers: &str,
    topic: &str,
    count: usize,
    size: usize,
) -> Result<(), Box<dyn Error>> {
    let admin: AdminClient<DefaultClientContext> = client(brokers).create()?;
    let options = AdminOptions::new().operation_timeout(Some(Duration::from_secs(30)));
    let created = admin
        .create_topics(
            &[NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1))],
            &options,
        )
        .await?;
    created
        .into_iter()
        .collect::<Result<Vec<_>, _>>()
        .map_err(|(topic, code)| format!("{topic}: {code}"))?;
    let producer: ThreadedProducer<DefaultProducerContext> =
        client(brokers).set("linger.ms", "5").create()?;
    let body = vec![b'x'; size];
    for number in 0..count {
        let mut record = BaseRecord::<[u8], [u8]>::to(topic)
            .partition(number as i32 % PARTITIONS)
            .payload(&body);
        while let Err((error, again)) = producer.send(record) {
            if error != KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull) {
                return Err(error.into());
            }
            record = again;
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(producer.flush(Duration::from_secs(60))?)
}

/// Accepts everything; the time starts at the first delivery.
async fn read(
    kafka: Kafka,
    count: usize,
) -> Result<(Duration, <Kafka as Connect>::Source), Box<dyn Error>> {
    let mut source = kafka.connect(ConnectOptions::default()).await?;
    let (mut seen, mut started, mut incoming, mut settled) = (0, None, Vec::new(), Vec::new());
    while seen < count {
        source.receive(LIMIT, &mut incoming).await?;
        started.get_or_insert_with(Instant::now);
        settled.extend(incoming.drain(..).filter_map(|it| match it {
            Incoming::Delivery(delivery) => Some(Settled::new(delivery, accepted())),
            Incoming::Revoked(_) => None,
        }));
        seen += settled.len();
        source.settle(&mut settled).await?;
    }
    Ok((started.map(|at| at.elapsed()).unwrap_or_default(), source))
}

fn client(brokers: &str) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config
}
