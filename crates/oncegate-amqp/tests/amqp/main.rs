//! The RabbitMQ source against a real broker.

mod bad_input;
mod bad_table;
mod consumer;
mod copies;
mod fixture;
mod laws;
mod limits;
mod nodes;
mod outbox;
mod policies;
mod recovery;
mod releases;
mod replies;
mod security;

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqSnapshot, RabbitMqStatus, Topology};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::{
    Connect, ConnectOptions, FailureHistory, Settled, Source, SourceError, headers,
};
use oncegate_testkit::servers::RabbitServer;
use tokio::io::AsyncReadExt;

use fixture::*;

pub(crate) const KINDS: [QueueKind; 2] = [QueueKind::Quorum, QueueKind::Classic];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accepted_deliveries_are_acknowledged_in_any_order_of_settlement() {
    for kind in KINDS {
        let fixture = QueueFixture::new().await;
        let mut source = open(fixture.source(kind).prefetch(16)).await;
        for number in 0..100 {
            fixture.publish(&number.to_string()).await;
        }
        let mut seen = Vec::new();
        while seen.len() < 100 {
            // More than a quarter of the prefetch is settled behind the first delivery.
            let (mut some, _) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
            some.reverse();
            for delivery in some {
                seen.push(String::from_utf8(delivery.message.body.to_vec()).expect("a number"));
                settle(&mut source, delivery, accept()).await;
            }
        }
        close(source).await;
        seen.sort_by_key(|number| number.parse::<u32>().expect("a number"));
        assert_eq!(
            seen,
            (0..100)
                .map(|number| number.to_string())
                .collect::<Vec<_>>()
        );
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

#[tokio::test]
async fn a_delivery_that_is_never_settled_does_not_stall_the_others() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum).prefetch(4)).await;
    for number in 0..40 {
        fixture.publish(&number.to_string()).await;
    }
    let unsettled = delivery(&mut source).await;
    for _ in 1..40 {
        let delivery = delivery(&mut source).await;
        settle(&mut source, delivery, accept()).await;
    }
    settle(&mut source, unsettled, accept()).await;
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn deliveries_settled_just_before_closing_are_not_redelivered() {
    for _ in 0..8 {
        let fixture = QueueFixture::new().await;
        let mut source = open(fixture.source(QueueKind::Quorum)).await;
        for number in 0..200 {
            fixture.publish(&number.to_string()).await;
        }
        let (mut all, _) = deliveries(&mut source, 200, Duration::from_secs(10)).await;
        // The first stays unsettled, so that the others are acknowledged one by one.
        let mut settled: Vec<_> = all
            .drain(1..)
            .map(|delivery| Settled::new(delivery, accept()))
            .collect();
        source.settle(&mut settled).await.expect("settled");
        close(source).await;
        fixture.take(&fixture.queue).await;
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

#[tokio::test]
async fn unsettled_deliveries_are_redelivered() {
    for kind in KINDS {
        let fixture = QueueFixture::new().await;
        let mut source = open(fixture.source(kind)).await;
        for body in ["a", "b", "c"] {
            fixture.publish(body).await;
        }
        let (mut three, _) = deliveries(&mut source, 3, Duration::from_secs(10)).await;
        settle(&mut source, three.remove(1), accept()).await;
        source.stop().await;
        let not_started = Settlement::Release {
            after: Duration::ZERO,
            failures: 0,
        };
        settle(&mut source, three.remove(1), not_started).await;
        fixture.publish("d").await;
        assert_nothing_delivered(&mut source, Duration::from_millis(300)).await;
        close(source).await;
        let mut again = open(fixture.source(kind)).await;
        let (three, _) = deliveries(&mut again, 3, Duration::from_secs(10)).await;
        let mut bodies: Vec<_> = three
            .iter()
            .map(|delivery| &delivery.message.body[..])
            .collect();
        bodies.sort();
        assert_eq!(bodies, [b"a", b"c", b"d"]);
        assert!(
            three.iter().all(|delivery| delivery.failures == 0),
            "a shutdown is no failed attempt"
        );
        close(again).await;
        fixture.delete_queues().await;
    }
}

#[tokio::test]
async fn a_dropped_source_returns_its_deliveries_to_the_queue() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum)).await;
    fixture.publish("a").await;
    let _unsettled = delivery(&mut source).await;
    drop(source);
    assert_eq!(fixture.take(&fixture.queue).await.delivery.data, b"a");
    fixture.delete_queues().await;
}

#[tokio::test]
async fn rejected_deliveries_are_in_their_queues_with_their_failure_headers() {
    for kind in KINDS {
        let fixture = QueueFixture::new().await;
        let mut source = open(fixture.source(kind)).await;
        // More than one batch.
        for number in 0..300 {
            fixture
                .publish_with(
                    &number.to_string(),
                    BasicProperties::default().with_content_type("text/plain".into()),
                )
                .await;
        }
        let (all, _) = deliveries(&mut source, 300, Duration::from_secs(10)).await;
        let mut settled: Vec<_> = all
            .into_iter()
            .enumerate()
            .map(|(number, delivery)| {
                let reason = if number == 0 {
                    Reason::InDoubt(DoubtCause::Panicked)
                } else {
                    Reason::Refused
                };
                let mut failure_history = FailureHistory::default();
                failure_history.id = Some("pay-1".into());
                failure_history.attempts = 2;
                failure_history.last_attempt = 2;
                failure_history.last_error = Some("no such card".into());
                Settled::new(delivery, Settlement::Reject(reason))
                    .with_failure_history(failure_history)
            })
            .collect();
        source.settle(&mut settled).await.expect("settled");
        assert!(settled.is_empty());
        close(source).await;
        fixture.wait_until_empty(&fixture.queue).await;
        assert_eq!(
            (
                fixture.ready_messages(&fixture.dead_letters()).await,
                fixture.ready_messages(&fixture.in_doubt()).await
            ),
            (299, 1)
        );
        let doubt = fixture.take(&fixture.in_doubt()).await.delivery;
        assert_eq!(
            (&doubt.data[..], header(&doubt, headers::REASON).as_deref()),
            (&b"0"[..], Some("in-doubt-panicked"))
        );
        let dead = fixture.take(&fixture.dead_letters()).await.delivery;
        for (name, value) in [
            (headers::REASON, "refused"),
            (headers::ID, "pay-1"),
            (headers::ATTEMPTS, "2"),
            (headers::LAST_ERROR, "no such card"),
            (headers::ORIGIN, fixture.queue.as_str()),
        ] {
            assert_eq!(header(&dead, name).as_deref(), Some(value), "{name}");
        }
        assert_eq!(
            dead.properties
                .content_type()
                .as_ref()
                .map(|it| it.as_str()),
            Some("text/plain")
        );
        fixture.delete_queues().await;
    }
}

#[tokio::test]
async fn a_deleted_dead_letter_queue_is_declared_before_the_original_is_acknowledged() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum)).await;
    fixture
        .channel
        .queue_delete(
            fixture.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    fixture.publish("a").await;
    let refused = delivery(&mut source).await;
    settle(&mut source, refused, Settlement::Reject(Reason::Refused)).await;
    close(source).await;
    assert_eq!(fixture.ready_messages(&fixture.dead_letters()).await, 1);
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn the_original_is_kept_while_dead_letters_cannot_be_published() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    let mut source = open(fixture.source(QueueKind::Quorum).topology(Topology::Check)).await;
    fixture
        .channel
        .queue_delete(
            fixture.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    fixture.publish("a").await;
    let refused = delivery(&mut source).await;
    settle(&mut source, refused, Settlement::Reject(Reason::Refused)).await;
    let closing = source.close(Instant::now() + Duration::from_secs(1)).await;
    assert!(
        matches!(closing, Err(SourceError::Unavailable(_))),
        "{closing:?}"
    );
    assert_eq!(fixture.take(&fixture.queue).await.delivery.data, b"a");
    fixture.delete_queues().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_source_reconnects_and_drops_stale_settlements() {
    for kind in KINDS {
        let (fixture, proxy) = (QueueFixture::new().await, ConnectionProxy::start().await);
        let status = RabbitMqStatus::new();
        let mut source = open(
            fixture
                .source(kind)
                .url(&proxy.url)
                .prefetch(8)
                .status(status.clone()),
        )
        .await;
        for number in 0..20 {
            fixture.publish(&number.to_string()).await;
        }
        let (stale, _) = deliveries(&mut source, 8, Duration::from_secs(10)).await;
        let epoch = stale[0].receipt.epoch;
        proxy.cut();
        let cut = Instant::now();
        let (mut fresh, revoked) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
        assert!(
            cut.elapsed() < Duration::from_secs(5),
            "the first delivery arrived after {:?}",
            cut.elapsed()
        );
        assert_eq!(
            (revoked, status.snapshot().unavailable),
            (vec![epoch], Duration::ZERO)
        );
        for delivery in stale {
            settle(&mut source, delivery, accept()).await;
        }
        // All twenty are delivered: the stale settlements acknowledged nothing and closed no channel.
        let mut bodies = std::collections::BTreeSet::new();
        let mut received = 0;
        while bodies.len() < 20 {
            for delivery in fresh.drain(..) {
                assert_eq!(delivery.receipt.epoch, epoch + 1);
                received += 1;
                bodies.insert(delivery.message.body.to_vec());
                settle(&mut source, delivery, accept()).await;
            }
            if bodies.len() < 20 {
                let revoked;
                (fresh, revoked) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
                assert!(revoked.is_empty(), "a stale settlement closed the channel");
            }
        }
        assert_eq!(received, 20);
        close(source).await;
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

#[tokio::test]
async fn a_connection_without_heartbeats_is_replaced() {
    let (fixture, proxy) = (QueueFixture::new().await, ConnectionProxy::start().await);
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .url(format!("{}?heartbeat=1", proxy.url)),
    )
    .await;
    fixture.publish("a").await;
    let stale = delivery(&mut source).await;
    proxy.freeze();
    let (mut again, revoked) = deliveries(&mut source, 1, Duration::from_secs(15)).await;
    assert_eq!(revoked, [stale.receipt.epoch]);
    settle(&mut source, stale, accept()).await;
    settle(&mut source, again.remove(0), accept()).await;
    close(source).await;
    fixture.wait_until_empty(&fixture.queue).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn repeatedly_cut_connections_lose_no_message() {
    let (fixture, proxy) = (QueueFixture::new().await, ConnectionProxy::start().await);
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .url(&proxy.url)
            .prefetch(32),
    )
    .await;
    let (mut accepted, mut rejected) = (std::collections::BTreeSet::new(), 0);
    for number in 0..200 {
        fixture.publish(&number.to_string()).await;
    }
    let (started, mut cuts) = (Instant::now(), 0);
    let mut seen = std::collections::BTreeSet::new();
    while seen.len() < 200 {
        let (some, _) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
        for delivery in some {
            let body = delivery.message.body.to_vec();
            seen.insert(body.clone());
            if seen.len() % 5 == 0 {
                rejected += 1;
                settle(&mut source, delivery, Settlement::Reject(Reason::Refused)).await;
            } else {
                accepted.insert(body);
                settle(&mut source, delivery, accept()).await;
            }
        }
        if seen.len() > 40 * (cuts + 1) {
            cuts += 1;
            proxy.cut();
        }
        assert!(started.elapsed() < Duration::from_secs(60));
    }
    assert!(cuts >= 3 && rejected > 0);
    // Waits until redelivered messages are delivered, too.
    while fixture.ready_messages(&fixture.queue).await > 0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    close(source).await;
    let mut again = open(fixture.source(QueueKind::Quorum)).await;
    let mut left = Vec::new();
    while tokio::time::timeout(Duration::from_millis(500), again.receive(LIMIT, &mut left))
        .await
        .is_ok()
    {}
    let dead = fixture.ready_messages(&fixture.dead_letters()).await as usize;
    assert!(
        accepted.len() + dead + left.len() >= 200,
        "{} accepted, {dead} dead, {} left",
        accepted.len(),
        left.len()
    );
    close(again).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_deleted_queue_is_declared_and_consumed_again() {
    let fixture = QueueFixture::new().await;
    let mut source = open(fixture.source(QueueKind::Quorum)).await;
    fixture
        .channel
        .queue_delete(fixture.queue.as_str().into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    let mut into = Vec::new();
    source.receive(LIMIT, &mut into).await.expect("received");
    assert!(
        matches!(into[..], [oncegate_core::Incoming::Revoked(1)]),
        "{into:?}"
    );
    let deadline = Instant::now() + Duration::from_secs(10);
    while !fixture.try_publish("a", BasicProperties::default()).await {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let delivery = delivery(&mut source).await;
    settle(&mut source, delivery, accept()).await;
    close(source).await;
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_queue_with_other_arguments_is_consumed_only_with_topology_check_or_trust() {
    let fixture = QueueFixture::new().await;
    close(open(fixture.source(QueueKind::Quorum)).await).await;
    let other_type = fixture
        .source(QueueKind::Classic)
        .connect(ConnectOptions::default())
        .await
        .expect_err("the queue is a quorum queue")
        .to_string();
    assert!(
        other_type.contains("set `.queue_kind(…)` to the type that it has"),
        "{other_type}"
    );
    fixture
        .channel
        .queue_delete(fixture.queue.as_str().into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    // Without a dead-letter exchange it drops messages over the limit.
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(3));
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    fixture
        .channel
        .queue_declare(fixture.queue.as_str().into(), options, arguments)
        .await
        .expect("declared");
    let refused = fixture
        .source(QueueKind::Quorum)
        .connect(ConnectOptions::default())
        .await
        .expect_err("it would lose messages")
        .to_string();
    assert!(
        refused.starts_with("queue: ")
            && refused.contains("Topology::Check")
            && !refused.contains('\n'),
        "{refused}"
    );
    for topology in [Topology::Check, Topology::Trust] {
        let mut source = open(fixture.source(QueueKind::Quorum).topology(topology)).await;
        fixture.publish("a").await;
        let delivery = delivery(&mut source).await;
        settle(&mut source, delivery, accept()).await;
        close(source).await;
    }
    fixture.delete_queues().await;
}

#[tokio::test]
async fn a_configuration_error_is_returned_by_connect() {
    let configuration_error = async |source: RabbitMq| {
        let opening = tokio::time::timeout(
            Duration::from_secs(15),
            source.connect(ConnectOptions::default()),
        )
        .await
        .expect("an answer");
        match opening {
            Err(error @ SourceError::Misconfigured { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let missing = configuration_error(
        RabbitMq::queue("test.nowhere")
            .url(url())
            .topology(Topology::Check),
    )
    .await;
    assert!(
        missing.contains("test.nowhere") && missing.contains("does not exist"),
        "{missing}"
    );
    let missing = configuration_error(
        RabbitMq::queue("test.nowhere")
            .url(url())
            .topology(Topology::Trust),
    )
    .await;
    assert!(
        missing.contains("test.nowhere") && missing.contains("does not exist"),
        "{missing}"
    );
    let password = configuration_error(RabbitMq::queue("q").url(url().replacen(
        "guest:guest",
        "guest:canary",
        1,
    )))
    .await;
    assert!(
        password.contains("ACCESS_REFUSED") && !password.contains("canary"),
        "{password}"
    );
    let vhost = configuration_error(RabbitMq::queue("q").url(format!(
        "{}/elsewhere",
        url().rsplit_once('/').expect("a vhost").0
    )))
    .await;
    assert!(vhost.contains("virtual host"), "{vhost}");
    let prefetch = configuration_error(RabbitMq::queue("q").url(url()).prefetch(0)).await;
    assert!(prefetch.starts_with("prefetch: 0"), "{prefetch}");
    assert!(
        configuration_error(RabbitMq::queue("").url(url()))
            .await
            .starts_with("queue: ")
    );
}

#[tokio::test]
async fn opening_waits_for_an_unavailable_broker() {
    let fixture = QueueFixture::new().await;
    // An unused port.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address")
        .port();
    let nowhere = format!("amqp://guest:guest@127.0.0.1:{port}/%2f");
    let opening = tokio::time::timeout(
        Duration::from_secs(1),
        RabbitMq::queue(&fixture.queue)
            .url(nowhere)
            .connect(ConnectOptions::default()),
    )
    .await;
    assert!(opening.is_err(), "opening did not wait: {opening:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_memory_alarm_delays_only_dead_letters_and_the_broker_may_restart_afterwards() {
    let mut server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let fixture = QueueFixture::at(&server.url()).await;
    let status = RabbitMqStatus::new();
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .prefetch(4)
            .status(status.clone()),
    )
    .await;
    for number in 0..20 {
        fixture.publish(&number.to_string()).await;
    }
    // The publishing connection is open before the alarm, as in a consumer that runs for long.
    let first = delivery(&mut source).await;
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    assert_eq!(
        fixture.take(&fixture.dead_letters()).await.delivery.data,
        b"0"
    );
    let closing_fixture = QueueFixture::at(&server.url()).await;
    let mut closing_source = open(closing_fixture.source(QueueKind::Quorum)).await;
    closing_fixture.publish("cannot be delayed").await;
    let unsettled = delivery(&mut closing_source).await;

    server
        .control(&["set_vm_memory_high_watermark", "0"])
        .expect("an alarm");
    let wait_for_status = async |what: &str, condition: &dyn Fn(RabbitMqSnapshot) -> bool| {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !condition(status.snapshot()) {
            assert!(Instant::now() < deadline, "{what}: {:?}", status.snapshot());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // The broker notifies its connections one after the other: a dead letter or two may be
    // published before.
    let (mut number, mut dead_letters) = (1, 1);
    while status.snapshot().blocked == Duration::ZERO {
        assert!(
            number < 10,
            "the alarm does not block publishing, so this test checks nothing"
        );
        let dead_letter = delivery(&mut source).await;
        settle(
            &mut source,
            dead_letter,
            Settlement::Reject(Reason::Refused),
        )
        .await;
        wait_for_status(
            "publishing is blocked, or the dead letter is published",
            &|read| read.blocked > Duration::ZERO || read.copies > dead_letters,
        )
        .await;
        (number, dead_letters) = (number + 1, status.snapshot().copies);
    }
    for number in number..20 {
        let delivery = delivery(&mut source).await;
        assert_eq!(delivery.message.body, number.to_string());
        settle(&mut source, delivery, accept()).await;
    }
    let during = status.snapshot().blocked;
    let ready = server_ready(&server, &fixture.dead_letters());
    assert_eq!(
        (status.snapshot().copies, u64::from(ready) + 1),
        (dead_letters, dead_letters),
        "a dead letter was published despite the alarm"
    );
    settle(
        &mut closing_source,
        unsettled,
        release(Duration::from_secs(25)),
    )
    .await;
    let closing = tokio::time::timeout(
        Duration::from_secs(20),
        closing_source.close(Instant::now() + Duration::from_secs(1)),
    )
    .await;
    let outcome = closing.expect("closing has a deadline");
    assert!(
        matches!(outcome, Err(SourceError::Unavailable(_))),
        "{outcome:?}"
    );

    server
        .control(&["set_vm_memory_high_watermark", "0.8"])
        .expect("no alarm");
    let deadline = Instant::now() + Duration::from_secs(20);
    while server_ready(&server, &fixture.dead_letters()) == ready {
        assert!(Instant::now() < deadline, "no dead letter was published");
    }
    wait_for_status(
        "the alarm is over, and all deliveries are acknowledged",
        &|read| read.blocked > during && read.unacked == 0,
    )
    .await;
    assert_eq!(status.snapshot().channels_lost, 0);
    assert_eq!(
        closing_fixture
            .reconnect()
            .await
            .take(&closing_fixture.queue)
            .await
            .delivery
            .data,
        b"cannot be delayed"
    );

    tokio::task::block_in_place(|| {
        server.stop();
        server.start_again().expect("started again");
    });
    let again = fixture.reconnect().await;
    again.publish("after").await;
    let (mut after, revoked) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
    assert!(!revoked.is_empty());
    let after = after.remove(0);
    assert_eq!(
        &after.message.body[..],
        b"after",
        "an acknowledged message was redelivered"
    );
    settle(&mut source, after, accept()).await;
    close(source).await;
    again.wait_until_empty(&again.queue).await;
}

/// How many messages of a queue are ready, from `rabbitmqctl`, because the alarm blocks connections
/// that publish.
fn server_ready(server: &RabbitServer, queue: &str) -> u32 {
    let listed = server
        .control(&[
            "list_queues",
            "-q",
            "--no-table-headers",
            "name",
            "messages_ready",
        ])
        .expect("a list");
    let line = listed
        .lines()
        .find_map(|line| line.strip_prefix(queue))
        .expect("the queue is listed");
    line.trim().parse().expect("a number")
}

#[tokio::test]
async fn an_encrypted_url_begins_with_a_tls_handshake() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let url = format!(
        "amqps://guest:guest@localhost:{}/%2f",
        listener.local_addr().expect("an address").port()
    );
    let opening = tokio::spawn(
        RabbitMq::queue("q")
            .url(url)
            .connect(ConnectOptions::default()),
    );
    let (mut connection, _) = tokio::time::timeout(Duration::from_secs(10), listener.accept())
        .await
        .expect("in time")
        .expect("a connection");
    // 22 is a TLS handshake record; `A` would be an unencrypted AMQP header.
    assert_eq!(connection.read_u8().await.expect("a byte"), 22);
    opening.abort();
}
