//! Logs that were cut or damaged.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use oncegate_core::source::Open;
use oncegate_core::{Delivery, Limit, Source, SourceError};
use oncegate_kafka::{KafkaSource, TopicCreation};
use oncegate_testkit::servers::KafkaServer;
use rdkafka::message::OwnedHeaders;

use crate::stage::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_was_cut_below_the_commit_commits_lower() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 10).await;
    topic.commit(50).await;
    let mut source = topic.open().await;
    let mut deliveries = receive(&mut source, 10).await;
    assert_eq!(offsets(&deliveries), (0..10).collect::<Vec<_>>());
    // Before anything is settled, or a crash would skip what fills the log up to 50 meanwhile.
    topic.await_reset(0, 0).await;
    accept(&mut source, deliveries.drain(..4)).await;
    topic.await_commit(0, 4).await;
    accept(&mut source, deliveries).await;
    topic.await_commit(0, 10).await;
    topic.send_numbers(0, 50).await;
    let next = receive(&mut source, 50).await;
    assert_eq!(offsets(&next), (10..60).collect::<Vec<_>>());
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_made_anew_under_a_running_source_commits_lower() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 50).await;
    let mut source = topic.source().property("topic.metadata.refresh.interval.ms", "500").open().await.expect("a source");
    let all = receive(&mut source, 50).await;
    accept(&mut source, all).await;
    topic.await_commit(0, 50).await;
    topic.make_anew().await;
    topic.send_numbers(0, 10).await;
    let mut again = receive(&mut source, 10).await;
    assert_eq!(offsets(&again), (0..10).collect::<Vec<_>>());
    accept(&mut source, again.drain(..4)).await;
    topic.await_reset(0, 4).await;
    // Longer than librdkafka waits before it commits what was stored.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(topic.committed(0).await, Some(4));
    accept(&mut source, again).await;
    topic.await_commit(0, 10).await;
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(10));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_loses_its_end_under_a_running_source_commits_lower() {
    let mut server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker")).await.expect("a broker");
    let topic = Topic::at(server.brokers(), 1).await;
    topic.send_numbers(0, 50).await;
    let kafka = topic.source().create_topics(TopicCreation::Create { partitions: 1, replication: 1 });
    let mut source = kafka.open().await.expect("a source");
    let all = receive(&mut source, 50).await;
    accept(&mut source, all).await;
    topic.await_commit(0, 50).await;

    let log = server.directory().join("data").join(format!("{}-0", topic.name));
    let again = tokio::task::spawn_blocking(move || {
        server.stop();
        empty(&log);
        server.start_again().expect("the broker again");
        server
    });
    let server = again.await.expect("the broker again");
    topic.send_numbers(0, 10).await;
    let mut again = receive(&mut source, 10).await;
    assert_eq!(offsets(&again), (0..10).collect::<Vec<_>>());
    topic.await_reset(0, 0).await;
    // Longer than librdkafka waits before it commits what was stored.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(topic.committed(0).await, Some(0));
    accept(&mut source, again.drain(..4)).await;
    topic.await_commit(0, 4).await;
    close(source).await;
    assert_eq!(topic.committed(0).await, Some(4));
    drop(server);
}

/// Takes all messages from the directory of a partition.
fn empty(log: &Path) {
    for file in std::fs::read_dir(log).expect("a log") {
        let path = file.expect("a file").path();
        match path.extension().and_then(|it| it.to_str()) {
            Some("log") => std::fs::write(path, []).expect("emptied"),
            Some("index" | "timeindex" | "snapshot") => std::fs::remove_file(path).expect("removed"),
            _ => {}
        }
    }
}

/// Receives until the source fails, and accepts what comes.
async fn failure(source: &mut KafkaSource) -> (Vec<i64>, SourceError) {
    let mut seen = Vec::new();
    let failed = tokio::time::timeout(BOUND, async {
        loop {
            let mut incoming = Vec::new();
            if let Err(error) = source.receive(Limit { count: 50, bytes: 1 << 20 }, &mut incoming).await {
                return error;
            }
            let deliveries: Vec<Delivery> = incoming.into_iter().filter_map(delivery).collect();
            seen.extend(offsets(&deliveries));
            accept(source, deliveries).await;
        }
    });
    let error = failed.await.expect("an error in time");
    (seen, error)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_batch_ends_the_source_and_is_never_passed() {
    let server = tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker")).await.expect("a broker");
    let topic = Topic::at(server.brokers(), 1).await;
    for body in ["first", "second", "to-be-damaged", "fourth"] {
        topic.send(None, Some(body.as_bytes()), OwnedHeaders::new()).await;
    }
    damage(&server.directory().join("data").join(format!("{}-0/00000000000000000000.log", topic.name)), b"to-be-damaged");
    let open = async || {
        let kafka = topic.source().create_topics(TopicCreation::Create { partitions: 1, replication: 1 });
        kafka.property("check.crcs", "true").open().await.expect("a source")
    };
    for _ in 0..2 {
        let mut source = open().await;
        let (seen, error) = failure(&mut source).await;
        assert!(seen.iter().all(|offset| *offset < 2), "{seen:?}");
        let text = error.to_string();
        assert!(text.contains(&format!("{}/0", topic.name)) && text.contains("offset 2"), "{text}");
        // What was read before the damage is handed out still, and nothing past it, whoever goes on asking.
        let mut incoming = Vec::new();
        let limit = Limit { count: 50, bytes: 1 << 20 };
        while tokio::time::timeout(Duration::from_millis(500), source.receive(limit, &mut incoming)).await.is_ok() {
            let deliveries: Vec<Delivery> = incoming.drain(..).filter_map(delivery).collect();
            assert!(deliveries.iter().all(|it| offset(it) < 2), "{deliveries:?}");
            accept(&mut source, deliveries).await;
        }
        close(source).await;
        assert!(topic.committed(0).await.is_none_or(|committed| committed <= 2), "the damaged message was passed");
    }
}

/// Changes the bytes that are found in a file.
fn damage(file: &Path, what: &[u8]) {
    let bytes = std::fs::read(file).expect("a log");
    let at = bytes.windows(what.len()).position(|it| it == what).expect("the message");
    let mut file = std::fs::OpenOptions::new().write(true).open(file).expect("a log");
    file.seek(SeekFrom::Start(at as u64)).expect("a place");
    file.write_all(&vec![b'#'; what.len()]).expect("damaged");
}
