//! Brokers that say nothing, messages that cannot be read, and a consumer that is full meanwhile.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqStatus, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Incoming, Limit, Open, Source};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::nodes::{by_way_of, proxy};
use crate::rig::*;

/// How many threads of this process belong to connections.
fn connection_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("lapin-io")).count()
}

/// In a process of its own: other tests come and go with connections.
#[test]
fn a_broker_that_accepts_and_says_nothing_costs_no_thread_per_attempt() {
    const ALONE: &str = "ONCEGATE_AMQP_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let program = std::env::current_exe().expect("this test");
        let name = "trouble::a_broker_that_accepts_and_says_nothing_costs_no_thread_per_attempt";
        let output = std::process::Command::new(program)
            .args([name, "--exact", "--nocapture"])
            .env(ALONE, "1")
            .output()
            .expect("run");
        assert!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        for scheme in ["amqp", "amqps"] {
            let url = format!("{scheme}://guest:guest@{address}/%2f?connection_timeout=100");
            let opening = tokio::spawn(RabbitMq::queue("q").url(url).open());
            let mut accepted = Vec::new();
            while accepted.len() < 6 {
                let accepting = tokio::time::timeout(Duration::from_secs(20), listener.accept());
                accepted.push(
                    accepting
                        .await
                        .expect("another attempt")
                        .expect("a connection"),
                );
            }
            assert!(
                connection_threads() <= 2,
                "{} threads after {} attempts",
                connection_threads(),
                accepted.len()
            );
            opening.abort();
            let patience = Instant::now() + Duration::from_secs(10);
            while connection_threads() > 0 {
                assert!(
                    Instant::now() < patience,
                    "{} threads are left",
                    connection_threads()
                );
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    });
}

#[tokio::test]
async fn a_full_consumer_hears_what_is_taken_from_it_and_nothing_else() {
    let (rig, proxy) = (Rig::new().await, Proxy::start().await);
    let mut source = open(rig.source(QueueKind::Quorum).url(&proxy.url).prefetch(4)).await;
    for number in 0..20 {
        rig.publish(&number.to_string()).await;
    }
    let held = delivery(&mut source).await;
    let mut into = Vec::new();
    let nothing = tokio::time::timeout(
        Duration::from_millis(300),
        source.receive(Limit::NOTHING, &mut into),
    )
    .await;
    assert!(nothing.is_err() && into.is_empty(), "{into:?}");
    for channel in 0..3 {
        // A new channel's prefetch has come, and is not taken.
        let waiting = if channel == 0 {
            "waiting: 3"
        } else {
            "waiting: 4"
        };
        let patience = Instant::now() + Duration::from_secs(10);
        while !format!("{source:?}").contains(waiting) {
            assert!(Instant::now() < patience, "{source:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        proxy.cut();
        let heard = tokio::time::timeout(
            Duration::from_secs(10),
            source.receive(Limit::NOTHING, &mut into),
        )
        .await;
        heard.expect("in time").expect("received");
    }
    let revoked = into.iter().map(|incoming| match incoming {
        Incoming::Revoked(epoch) => *epoch,
        Incoming::Delivery(delivery) => panic!("{delivery:?}"),
    });
    assert_eq!(revoked.collect::<Vec<_>>(), [1, 2, 3]);
    settle(&mut source, held, accept()).await;
    // What came by channels that are gone is not handed out any more.
    let (four, _) = deliveries(&mut source, 4, Duration::from_secs(10)).await;
    assert!(
        four.len() == 4 && four.iter().all(|delivery| delivery.receipt.epoch == 4),
        "{four:?}"
    );
    close(source).await;
    rig.done().await;
}

/// As when somebody makes the queue anew by hand, and otherwise.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_that_was_made_anew_with_other_arguments_is_consumed_when_that_is_mended() {
    let (rig, proxy) = (Rig::new().await, proxy());
    let way = by_way_of(format!("127.0.0.1:{}", proxy.port())) + "?connection_timeout=500";
    let mut source = open(rig.source(QueueKind::Quorum).url(way)).await;
    // So that the source does not make it anew first.
    proxy.black_hole();
    proxy.reset();
    let remove = async || {
        rig.channel
            .queue_delete(rig.queue.as_str().into(), QueueDeleteOptions::default())
            .await
            .expect("deleted")
    };
    remove().await;
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    rig.channel
        .queue_declare(rig.queue.as_str().into(), options, FieldTable::default())
        .await
        .expect("declared");
    rig.publish("of the other queue").await;
    proxy.pass();
    let passes = Instant::now();
    let (until, mut into) = (
        tokio::time::Instant::now() + Duration::from_secs(3),
        Vec::new(),
    );
    while tokio::time::timeout_at(until, source.receive(LIMIT, &mut into))
        .await
        .is_ok()
    {}
    assert!(
        into.iter()
            .all(|incoming| matches!(incoming, Incoming::Revoked(_))),
        "what loses messages was used: {into:?}"
    );
    // Each refusal is an error in the broker's log: the first pause is half a second at least, and
    // each is twice the one before.
    let refusals = logged(&["Channel closed", "PRECONDITION_FAILED", &rig.queue]);
    let most = 1 + (passes.elapsed().as_secs_f64() / 0.5 + 1.0).log2() as usize;
    assert!(
        (1..=most).contains(&refusals),
        "{refusals} refusals, {most} at most"
    );
    remove().await;
    let patience = Instant::now() + Duration::from_secs(60);
    while !rig.reaches("a", BasicProperties::default()).await {
        assert!(Instant::now() < patience, "the queue was not made again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (mut one, _) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
    assert_eq!(&one[0].message.body[..], b"a");
    assert_eq!(
        logged(&["not consuming", "exists with other arguments", &rig.queue]),
        1,
        "it is told once"
    );
    settle(&mut source, one.remove(0), accept()).await;
    close(source).await;
    rig.done().await;
}

/// Which way is changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    ToTheBroker,
    FromTheBroker,
}

/// Passes connections on to the broker, and changes what goes one way.
pub(crate) async fn spoiling_proxy(way: Way, spoil: fn(&mut [u8])) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = url();
    let at = url.rfind('@').expect("user@host") + 1;
    let end = url[at..].find('/').map_or(url.len(), |slash| at + slash);
    let spoiling = format!(
        "{}{}{}",
        &url[..at],
        listener.local_addr().expect("an address"),
        &url[end..]
    );
    let broker = url[at..end].to_owned();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(&broker).await.expect("the broker");
            let (near, far) = (near.into_split(), far.into_split());
            let (mut as_it_is, mut spoilt) = if way == Way::ToTheBroker {
                ((far.0, near.1), (near.0, far.1))
            } else {
                ((near.0, far.1), (far.0, near.1))
            };
            tokio::spawn(async move { tokio::io::copy(&mut as_it_is.0, &mut as_it_is.1).await });
            tokio::spawn(async move {
                let mut buffer = vec![0; 1 << 16];
                while let Ok(read @ 1..) = spoilt.0.read(&mut buffer).await {
                    spoil(&mut buffer[..read]);
                    if spoilt.1.write_all(&buffer[..read]).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    spoiling
}

/// Gives the value under `unreadable` a type that there is not.
fn of_no_type(passed: &mut [u8]) {
    while let Some(found) = passed.windows(11).position(|part| part == b"unreadableS") {
        passed[found + 10] = b'z';
    }
}

#[tokio::test]
async fn a_message_that_cannot_be_read_stops_what_is_behind_it_and_spares_what_is_before_it() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Quorum)).await).await;
    let way = spoiling_proxy(Way::FromTheBroker, of_no_type).await;
    for number in 0..5 {
        rig.publish(&number.to_string()).await;
    }
    let mut table = FieldTable::default();
    table.insert("unreadable".into(), AMQPValue::LongString("value".into()));
    rig.publish_with("unreadable", BasicProperties::default().with_headers(table))
        .await;
    rig.publish("behind").await;

    let mut source = open(rig.source(QueueKind::Quorum).url(way)).await;
    let (mut read, mut channels) = (Vec::new(), 0);
    let until = Instant::now() + Duration::from_secs(4);
    while let Some(patience) = until.checked_duration_since(Instant::now()) {
        let mut into = Vec::new();
        if tokio::time::timeout(patience, source.receive(LIMIT, &mut into))
            .await
            .is_err()
        {
            break;
        }
        let (mut alone, number) = (true, into.len());
        for incoming in into {
            match incoming {
                Incoming::Revoked(_) => channels += 1,
                Incoming::Delivery(delivery) => {
                    alone = number == 1;
                    let epoch = delivery.receipt.epoch;
                    read.push((
                        epoch,
                        String::from_utf8(delivery.message.body.to_vec()).expect("text"),
                    ));
                    if epoch > 1 {
                        settle(&mut source, delivery, accept()).await;
                    }
                }
            }
        }
        assert!(channels == 0 || alone, "more than one at a time: {read:?}");
    }
    assert!(
        (2..=7).contains(&channels),
        "{channels} channels in four seconds"
    );
    let second: Vec<_> = read
        .iter()
        .filter(|(epoch, _)| *epoch == 2)
        .map(|(_, body)| body.as_str())
        .collect();
    assert_eq!(second, ["0", "1", "2", "3", "4"], "{read:?}");
    // The broker may hand out what is behind before it noticed that the last channel has gone.
    assert!(
        read.iter()
            .all(|(epoch, body)| *epoch <= 2 || body == "behind"),
        "what was settled came back: {read:?}"
    );

    rig.channel
        .queue_purge(rig.queue.as_str().into(), QueuePurgeOptions::default())
        .await
        .expect("purged");
    rig.publish("after").await;
    let (after, _) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
    assert_eq!(&after[0].message.body[..], b"after");
    close(source).await;
    rig.done().await;
}

#[tokio::test]
async fn a_person_may_look_at_an_in_doubt_message_as_often_as_they_like() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Quorum)).await).await;
    for queue in [rig.dead_letters(), rig.in_doubt()] {
        // The broker refuses to declare a queue with other arguments than it has.
        let mut arguments = FieldTable::default();
        arguments.insert(
            "x-queue-type".into(),
            AMQPValue::LongString("quorum".into()),
        );
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(i32::MAX));
        let options = QueueDeclareOptions {
            durable: true,
            ..QueueDeclareOptions::default()
        };
        rig.channel
            .queue_declare(queue.as_str().into(), options, arguments)
            .await
            .expect("these are its arguments");
    }
    rig.done().await;
}

/// The new channel has a delivery with the tag of the old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_receipt_of_a_dead_channel_acknowledges_nothing_on_the_next() {
    let (rig, proxy, status) = (
        Rig::new().await,
        Proxy::start().await,
        RabbitMqStatus::new(),
    );
    let mut source = open(
        rig.source(QueueKind::Quorum)
            .url(&proxy.url)
            .prefetch(4)
            .status(status.clone()),
    )
    .await;
    rig.publish("a").await;
    let stale = delivery(&mut source).await;
    proxy.cut();
    let again = delivery(&mut source).await;
    assert_eq!(stale.receipt.position, again.receipt.position);
    settle(&mut source, stale, accept()).await;
    // Closed in good order, so that what was acknowledged is acknowledged.
    close(source).await;
    assert_eq!(status.snapshot().stale_receipts, 1);
    assert_eq!(rig.take(&rig.queue).await.delivery.data, b"a");
    rig.done().await;
}

/// A dead letter is published while its own channel is gone, and confirmed when the next one has a
/// delivery with its tag.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_confirmation_for_a_dead_channel_settles_nothing_on_the_next() {
    let (rig, proxy, status) = (
        Rig::new().await,
        Proxy::start().await,
        RabbitMqStatus::new(),
    );
    close(open(rig.source(QueueKind::Classic)).await).await;
    let source = rig
        .source(QueueKind::Classic)
        .topology(Topology::Check)
        .url(&proxy.url)
        .prefetch(4)
        .status(status.clone());
    let mut source = open(source).await;
    rig.publish("a").await;
    let first = delivery(&mut source).await;
    rig.channel
        .queue_delete(
            rig.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    let patience = Instant::now() + Duration::from_secs(20);
    while status.snapshot().copy_retries == 0 {
        assert!(
            Instant::now() < patience,
            "the dead letter was not refused: {:?}",
            status.snapshot()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    proxy.cut();
    // The source checks its queues when it connects: this one has to be there again by then.
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("classic".into()),
    );
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    rig.channel
        .queue_declare(rig.dead_letters().as_str().into(), options, arguments)
        .await
        .expect("declared");
    let again = delivery(&mut source).await;
    // Longer than the publisher waits before it tries again.
    tokio::time::sleep(Duration::from_secs(4)).await;
    drop(again);
    close(source).await;
    assert_eq!(rig.take(&rig.queue).await.delivery.data, b"a");
    rig.done().await;
}
