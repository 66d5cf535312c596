//! The log lines of a source whose topic is deleted while it reads. Alone in its process, because it
//! captures all log lines.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_core::Incoming;
use oncegate_core::source::{Connect, ConnectOptions, Limit, Source};
use oncegate_kafka::{Kafka, KafkaSource, TopicCreation};
use oncegate_testkit::Lines;
use oncegate_testkit::servers::KafkaServer;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{FutureProducer, FutureRecord};

const TOPIC: &str = "payments";

async fn create(admin: &AdminClient<DefaultClientContext>) {
    let topic = NewTopic::new(TOPIC, 2, TopicReplication::Fixed(1));
    let created = admin.create_topics(&[topic], &AdminOptions::new()).await;
    created.expect("an answer")[0].as_ref().expect("created");
}

async fn send(brokers: &str) {
    let producer: FutureProducer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .create()
        .expect("a client");
    let sent = producer.send(
        FutureRecord::<str, str>::to(TOPIC).payload("x"),
        Duration::from_secs(30),
    );
    sent.await.expect("sent");
}

/// Receives for at most this long, or until there is a delivery.
async fn receives(source: &mut KafkaSource, within: Duration) -> bool {
    let limit = Limit::new(10, usize::MAX);
    let (end, mut incoming) = (Instant::now() + within, Vec::new());
    while Instant::now() < end {
        let left = end.saturating_duration_since(Instant::now());
        let received = tokio::time::timeout(left, source.receive(limit, &mut incoming)).await;
        if let Ok(received) = received {
            received.expect("the source continues to receive");
        }
        if incoming
            .iter()
            .any(|it| matches!(it, Incoming::Delivery(_)))
        {
            return true;
        }
    }
    false
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_topic_is_one_line_with_the_command_that_creates_it() {
    let lines = Lines::of_this_process();
    let server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker"))
        .await
        .expect("a broker");
    let brokers = &server.brokers();
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", brokers.as_str())
        .create()
        .expect("a client");
    create(&admin).await;
    send(brokers).await;
    let mut source = Kafka::topic(TOPIC)
        .brokers(brokers.as_str())
        .group("g")
        .create_topics(TopicCreation::Create {
            partitions: 1,
            replication: 1,
        })
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    assert!(receives(&mut source, Duration::from_secs(60)).await);
    lines.take();
    let deleted = admin.delete_topics(&[TOPIC], &AdminOptions::new()).await;
    deleted.expect("an answer")[0].as_ref().expect("deleted");
    assert!(!receives(&mut source, Duration::from_secs(50)).await);
    let logged: Vec<String> = lines.take().into_iter().map(|(_, line)| line).collect();
    let raised: Vec<_> = logged
        .iter()
        .filter(|line| !line.contains(" INFO "))
        .collect();
    let [line] = raised[..] else {
        panic!("{} lines: {raised:#?}", raised.len())
    };
    for part in [
        "ERROR",
        "topic deleted: ",
        "topic=\"payments\"",
        "group=\"g\"",
        "--create --topic payments",
        "--partitions 2",
        "--replication-factor 1",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    create(&admin).await;
    send(brokers).await;
    assert!(
        receives(&mut source, Duration::from_secs(120)).await,
        "it is read once it exists again"
    );
    let _ = Box::new(source)
        .close(Instant::now() + Duration::from_secs(30))
        .await;
}
