//! Brokers that do not answer, recreated queues, unparsable messages and closed channels.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqStatus, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Connect, ConnectOptions, Delivery, Incoming, Limit, Receipt, Source};
use oncegate_testkit::servers::{RabbitOptions, RabbitServer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::fixture::*;
use crate::nodes::{proxy, url_with_address};

/// How many connection threads of lapin this process has.
fn connection_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.starts_with("lapin-io")).count()
}

/// In a process of its own, because other tests open connections.
#[test]
fn a_broker_that_accepts_and_does_not_answer_leaks_no_threads() {
    const ALONE: &str = "ONCEGATE_AMQP_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let program = std::env::current_exe().expect("this test");
        let name = "recovery::a_broker_that_accepts_and_does_not_answer_leaks_no_threads";
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
            let opening = tokio::spawn(
                RabbitMq::queue("q")
                    .url(url)
                    .connect(ConnectOptions::default()),
            );
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
            let deadline = Instant::now() + Duration::from_secs(10);
            while connection_threads() > 0 {
                assert!(
                    Instant::now() < deadline,
                    "{} threads are left",
                    connection_threads()
                );
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    });
}

#[tokio::test]
async fn a_full_consumer_receives_revocations_and_no_deliveries() {
    let (fixture, proxy) = (QueueFixture::new().await, ConnectionProxy::start().await);
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .url(&proxy.url)
            .prefetch(4),
    )
    .await;
    for number in 0..20 {
        fixture.publish(&number.to_string()).await;
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
        // The new channel's prefetch has arrived in the source, and the consumer receives nothing.
        let queued = if channel == 0 {
            "queued: 3"
        } else {
            "queued: 4"
        };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !format!("{source:?}").contains(queued) {
            assert!(Instant::now() < deadline, "{source:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        proxy.cut();
        let receiving = tokio::time::timeout(
            Duration::from_secs(10),
            source.receive(Limit::NOTHING, &mut into),
        )
        .await;
        receiving.expect("in time").expect("received");
    }
    let revoked = into.iter().map(|incoming| match incoming {
        Incoming::Revoked(epoch) => *epoch,
        Incoming::Delivery(delivery) => panic!("{delivery:?}"),
    });
    assert_eq!(revoked.collect::<Vec<_>>(), [1, 2, 3]);
    settle(&mut source, held, accept()).await;
    // Deliveries of closed channels are not returned.
    let (four, _) = deliveries(&mut source, 4, Duration::from_secs(10)).await;
    assert!(
        four.len() == 4 && four.iter().all(|delivery| delivery.receipt.epoch == 4),
        "{four:?}"
    );
    close(source).await;
    fixture.delete_queues().await;
}

/// As when an operator deletes the queue and declares it with other arguments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_recreated_with_other_arguments_is_consumed_once_it_is_deleted() {
    let (fixture, proxy) = (QueueFixture::new().await, proxy());
    let proxied_url =
        url_with_address(format!("127.0.0.1:{}", proxy.port())) + "?connection_timeout=500";
    let mut source = open(fixture.source(QueueKind::Quorum).url(proxied_url)).await;
    // So that the source does not declare the queue first.
    proxy.black_hole();
    proxy.reset();
    let delete_queue = async || {
        fixture
            .channel
            .queue_delete(fixture.queue.as_str().into(), QueueDeleteOptions::default())
            .await
            .expect("deleted")
    };
    delete_queue().await;
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    fixture
        .channel
        .queue_declare(
            fixture.queue.as_str().into(),
            options,
            FieldTable::default(),
        )
        .await
        .expect("declared");
    fixture.publish("of the other queue").await;
    proxy.pass();
    let passes_since = Instant::now();
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
        "a queue that may lose messages was consumed: {into:?}"
    );
    // Each refusal is an error in the broker's log. The first pause is at least half a second, and
    // each pause is twice the one before.
    let refusals = logged(&["Channel closed", "PRECONDITION_FAILED", &fixture.queue]);
    let max_refusals = 1 + (passes_since.elapsed().as_secs_f64() / 0.5 + 1.0).log2() as usize;
    assert!(
        (1..=max_refusals).contains(&refusals),
        "{refusals} refusals, {max_refusals} at most"
    );
    delete_queue().await;
    let deadline = Instant::now() + Duration::from_secs(60);
    while !fixture.try_publish("a", BasicProperties::default()).await {
        assert!(
            Instant::now() < deadline,
            "the queue was not declared again"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let (mut one, _) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
    assert_eq!(&one[0].message.body[..], b"a");
    assert_eq!(
        logged(&[
            "not consuming",
            "exists with other arguments",
            &fixture.queue
        ]),
        1,
        "the mismatch was logged more than once"
    );
    settle(&mut source, one.remove(0), accept()).await;
    close(source).await;
    fixture.delete_queues().await;
}

/// The direction that is rewritten.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToTheBroker,
    FromTheBroker,
}

/// Starts a TCP proxy to the broker that rewrites the bytes of one direction, and returns its URL.
pub(crate) async fn rewriting_proxy(direction: Direction, rewrite: fn(&mut [u8])) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = url();
    let at = url.rfind('@').expect("user@host") + 1;
    let end = url[at..].find('/').map_or(url.len(), |slash| at + slash);
    let proxied = format!(
        "{}{}{}",
        &url[..at],
        listener.local_addr().expect("an address"),
        &url[end..]
    );
    let broker = url[at..end].to_owned();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let broker = TcpStream::connect(&broker).await.expect("the broker");
            let (client, broker) = (client.into_split(), broker.into_split());
            let (mut unchanged, mut rewritten) = if direction == Direction::ToTheBroker {
                ((broker.0, client.1), (client.0, broker.1))
            } else {
                ((client.0, broker.1), (broker.0, client.1))
            };
            tokio::spawn(async move { tokio::io::copy(&mut unchanged.0, &mut unchanged.1).await });
            tokio::spawn(async move {
                let mut buffer = vec![0; 1 << 16];
                while let Ok(read @ 1..) = rewritten.0.read(&mut buffer).await {
                    rewrite(&mut buffer[..read]);
                    if rewritten.1.write_all(&buffer[..read]).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    proxied
}

/// Gives the header `unreadable` a type that does not exist.
fn set_unknown_type(passed: &mut [u8]) {
    while let Some(found) = passed.windows(11).position(|part| part == b"unreadableS") {
        passed[found + 10] = b'z';
    }
}

#[tokio::test]
async fn an_unparsable_message_blocks_later_messages_and_not_earlier_ones() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    let proxied_url = rewriting_proxy(Direction::FromTheBroker, set_unknown_type).await;
    for number in 0..5 {
        fixture.publish(&number.to_string()).await;
    }
    let mut table = FieldTable::default();
    table.insert("unreadable".into(), AMQPValue::LongString("value".into()));
    fixture
        .publish_with("unreadable", BasicProperties::default().with_headers(table))
        .await;
    fixture.publish("behind").await;

    let mut source = open(fixture.source(QueueKind::Quorum).url(proxied_url)).await;
    let (mut read, mut channels) = (Vec::new(), 0);
    let until = Instant::now() + Duration::from_secs(4);
    while let Some(timeout) = until.checked_duration_since(Instant::now()) {
        let mut into = Vec::new();
        if tokio::time::timeout(timeout, source.receive(LIMIT, &mut into))
            .await
            .is_err()
        {
            break;
        }
        let (mut is_alone, number) = (true, into.len());
        for incoming in into {
            match incoming {
                Incoming::Revoked(_) => channels += 1,
                Incoming::Delivery(delivery) => {
                    is_alone = number == 1;
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
        assert!(
            channels == 0 || is_alone,
            "more than one at a time: {read:?}"
        );
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
    // The broker may deliver later messages before it detects that the last channel is closed.
    assert!(
        read.iter()
            .all(|(epoch, body)| *epoch <= 2 || body == "behind"),
        "a settled message was redelivered: {read:?}"
    );

    fixture
        .channel
        .queue_purge(fixture.queue.as_str().into(), QueuePurgeOptions::default())
        .await
        .expect("purged");
    fixture.publish("after").await;
    let (after, _) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
    assert_eq!(&after[0].message.body[..], b"after");
    close(source).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn dead_letter_and_in_doubt_queues_have_no_practical_delivery_limit() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    for queue in [fixture.dead_letters(), fixture.in_doubt()] {
        // The broker refuses a declaration with other arguments.
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
        fixture
            .channel
            .queue_declare(queue.as_str().into(), options, arguments)
            .await
            .expect("the queue has these arguments");
    }
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_repeated_settlement_on_an_open_channel_is_ignored_and_not_counted_as_stale() {
    let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
    let mut source = open(fixture.source(QueueKind::Quorum).status(status.clone())).await;
    fixture.publish("a").await;
    let settled = delivery(&mut source).await;
    let copy = || {
        Delivery::new(
            settled.message.clone(),
            Receipt::new(settled.receipt.epoch, settled.receipt.position)
                .with_partition(settled.receipt.partition),
        )
        .with_failures(settled.failures)
    };
    for settlement in [accept(), accept(), Settlement::Reject(Reason::Refused)] {
        settle(&mut source, copy(), settlement).await;
    }
    fixture.publish("b").await;
    let next = delivery(&mut source).await;
    settle(&mut source, next, accept()).await;
    close(source).await;
    let read = status.snapshot();
    assert_eq!(
        (read.stale_settlements, read.channels_lost, read.copies),
        (0, 0, 0),
        "{read:?}"
    );
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

/// The next channel has a delivery with the same tag.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_for_a_closed_channel_acknowledges_nothing_on_the_next() {
    let (fixture, proxy, status) = (
        QueueFixture::new().await,
        ConnectionProxy::start().await,
        RabbitMqStatus::new(),
    );
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .url(&proxy.url)
            .prefetch(4)
            .status(status.clone()),
    )
    .await;
    fixture.publish("a").await;
    let stale = delivery(&mut source).await;
    proxy.cut();
    let again = delivery(&mut source).await;
    assert_eq!(stale.receipt.position, again.receipt.position);
    settle(&mut source, stale, accept()).await;
    // Closing sends all acknowledgements.
    close(source).await;
    assert_eq!(status.snapshot().stale_settlements, 1);
    assert_eq!(fixture.take(&fixture.queue).await.delivery.data, b"a");
    fixture.delete_queues().await;
}

/// The dead letter is confirmed after its channel was closed, when the next channel has a delivery
/// with the same tag.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_confirm_for_a_closed_channel_settles_nothing_on_the_next() {
    let (fixture, proxy, status) = (
        QueueFixture::new().await,
        ConnectionProxy::start().await,
        RabbitMqStatus::new(),
    );
    close(open(fixture.source(QueueKind::Classic)).await).await;
    let source = fixture
        .source(QueueKind::Classic)
        .topology(Topology::Check)
        .url(&proxy.url)
        .prefetch(4)
        .status(status.clone());
    let mut source = open(source).await;
    fixture.publish("a").await;
    let first = delivery(&mut source).await;
    fixture
        .channel
        .queue_delete(
            fixture.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    let deadline = Instant::now() + Duration::from_secs(20);
    while status.snapshot().copy_retries == 0 {
        assert!(
            Instant::now() < deadline,
            "the dead letter was not refused: {:?}",
            status.snapshot()
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    proxy.cut();
    // The source checks its queues when it reconnects, so the queue has to exist by then.
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("classic".into()),
    );
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    fixture
        .channel
        .queue_declare(fixture.dead_letters().as_str().into(), options, arguments)
        .await
        .expect("declared");
    let again = delivery(&mut source).await;
    // Longer than the publisher's backoff.
    tokio::time::sleep(Duration::from_secs(4)).await;
    drop(again);
    close(source).await;
    assert_eq!(fixture.take(&fixture.queue).await.delivery.data, b"a");
    fixture.delete_queues().await;
}

/// RabbitMQ 3.10 closes the channel of a delivery that is unacknowledged for too long. 4.3 cancels the
/// consumer instead, and accepts a later acknowledgement without effect; its classic queues have no
/// such limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deliveries_beyond_the_consumer_timeout_of_the_broker_are_redelivered() {
    let options = RabbitOptions::new().setting("consumer_timeout", "3000");
    let server = tokio::task::spawn_blocking(move || RabbitServer::start_with(&options))
        .await
        .expect("no panic")
        .expect("a server");
    // The interval, in milliseconds, at which 3.10 checks. 4.3 does not use it.
    server
        .control(&[
            "eval",
            "application:set_env(rabbit, channel_tick_interval, 1000).",
        ])
        .expect("set");
    let fixture = QueueFixture::at(&server.url()).await;
    let mut source = open(fixture.source(QueueKind::Quorum)).await;
    for body in ["a", "b"] {
        fixture.publish(body).await;
    }
    let (held, _) = deliveries(&mut source, 2, Duration::from_secs(10)).await;
    let (again, revoked) = deliveries(&mut source, 2, Duration::from_secs(30)).await;
    assert!(revoked.contains(&held[0].receipt.epoch), "{revoked:?}");
    for delivery in held.into_iter().chain(again) {
        settle(&mut source, delivery, accept()).await;
    }
    close(source).await;
    assert_eq!(fixture.ready_messages(&fixture.queue).await, 0);
    fixture.delete_queues().await;
}
