//! The RabbitMQ source against a real broker.

mod bad_input;
mod bad_table;
mod consumer;
mod copies;
mod laws;
mod limits;
mod nodes;
mod obstacles;
mod releases;
mod rig;
mod security;
mod trouble;

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqSnapshot, RabbitMqStatus, Topology};
use oncegate_core::lifecycle::{DoubtCause, Reason, Settlement};
use oncegate_core::source::{FailureHistory, Open, Settled, Source, SourceError, headers};
use oncegate_testkit::servers::RabbitServer;
use tokio::io::AsyncReadExt;

use rig::*;

pub(crate) const KINDS: [QueueKind; 2] = [QueueKind::Quorum, QueueKind::Classic];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn accepted_deliveries_leave_the_queue_in_whatever_order_they_were_settled() {
    for kind in KINDS {
        let rig = Rig::new().await;
        let mut source = open(rig.source(kind).prefetch(16)).await;
        for number in 0..100 {
            rig.publish(&number.to_string()).await;
        }
        let mut seen = Vec::new();
        while seen.len() < 100 {
            // More than a quarter of the prefetch lies beyond the gap that the first delivery
            // leaves.
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
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

#[tokio::test]
async fn a_delivery_that_is_never_settled_does_not_stall_the_others() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum).prefetch(4)).await;
    for number in 0..40 {
        rig.publish(&number.to_string()).await;
    }
    let open_for_long = delivery(&mut source).await;
    for _ in 1..40 {
        let delivery = delivery(&mut source).await;
        settle(&mut source, delivery, accept()).await;
    }
    settle(&mut source, open_for_long, accept()).await;
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn what_was_settled_just_before_the_end_does_not_come_back() {
    for _ in 0..8 {
        let rig = Rig::new().await;
        let mut source = open(rig.source(QueueKind::Quorum)).await;
        for number in 0..200 {
            rig.publish(&number.to_string()).await;
        }
        let (mut all, _) = deliveries(&mut source, 200, Duration::from_secs(10)).await;
        // The first stays open, so that the others are acknowledged one by one.
        let mut settled: Vec<_> = all
            .drain(1..)
            .map(|delivery| Settled {
                delivery,
                settlement: accept(),
                story: None,
            })
            .collect();
        source.settle(&mut settled).await.expect("settled");
        close(source).await;
        rig.take(&rig.queue).await;
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

#[tokio::test]
async fn what_was_not_settled_comes_back() {
    for kind in KINDS {
        let rig = Rig::new().await;
        let mut source = open(rig.source(kind)).await;
        for body in ["a", "b", "c"] {
            rig.publish(body).await;
        }
        let (mut three, _) = deliveries(&mut source, 3, Duration::from_secs(10)).await;
        settle(&mut source, three.remove(1), accept()).await;
        source.stop().await;
        settle(&mut source, three.remove(1), release(Duration::ZERO)).await;
        rig.publish("d").await;
        nothing(&mut source, Duration::from_millis(300)).await;
        close(source).await;
        let mut again = open(rig.source(kind)).await;
        let (three, _) = deliveries(&mut again, 3, Duration::from_secs(10)).await;
        let mut bodies: Vec<_> = three
            .iter()
            .map(|delivery| &delivery.message.body[..])
            .collect();
        bodies.sort();
        assert_eq!(bodies, [b"a", b"c", b"d"]);
        assert!(
            three.iter().all(|delivery| delivery.failures == 0),
            "a shutdown is not a release"
        );
        close(again).await;
        rig.done().await;
    }
}

#[tokio::test]
async fn a_dropped_source_gives_back_what_it_held() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum)).await;
    rig.publish("a").await;
    let _unsettled = delivery(&mut source).await;
    drop(source);
    assert_eq!(rig.take(&rig.queue).await.delivery.data, b"a");
    rig.done().await;
}

#[tokio::test]
async fn rejected_deliveries_stand_in_their_queues_with_their_story() {
    for kind in KINDS {
        let rig = Rig::new().await;
        let mut source = open(rig.source(kind)).await;
        // As many as do not fit into one window of confirms.
        for number in 0..300 {
            rig.publish_with(
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
                let story = FailureHistory {
                    id: Some("pay-1".into()),
                    attempts: 2,
                    fence: 2,
                    first_error: None,
                    last_error: Some("no such card".into()),
                };
                Settled {
                    delivery,
                    settlement: Settlement::Reject(reason),
                    story: Some(Box::new(story)),
                }
            })
            .collect();
        source.settle(&mut settled).await.expect("settled");
        assert!(settled.is_empty());
        close(source).await;
        rig.becomes_empty(&rig.queue).await;
        assert_eq!(
            (
                rig.ready(&rig.dead_letters()).await,
                rig.ready(&rig.in_doubt()).await
            ),
            (299, 1)
        );
        let doubt = rig.take(&rig.in_doubt()).await.delivery;
        assert_eq!(
            (&doubt.data[..], header(&doubt, headers::REASON).as_deref()),
            (&b"0"[..], Some("in-doubt-panicked"))
        );
        let dead = rig.take(&rig.dead_letters()).await.delivery;
        for (name, value) in [
            (headers::REASON, "refused"),
            (headers::ID, "pay-1"),
            (headers::ATTEMPTS, "2"),
            (headers::LAST_ERROR, "no such card"),
            (headers::ORIGIN, rig.queue.as_str()),
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
        rig.done().await;
    }
}

#[tokio::test]
async fn a_dead_letter_queue_that_went_missing_is_made_again_before_the_original_is_acknowledged() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum)).await;
    rig.channel
        .queue_delete(
            rig.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    rig.publish("a").await;
    let refused = delivery(&mut source).await;
    settle(&mut source, refused, Settlement::Reject(Reason::Refused)).await;
    close(source).await;
    assert_eq!(rig.ready(&rig.dead_letters()).await, 1);
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn while_dead_letters_cannot_be_published_the_original_is_kept() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Quorum)).await).await;
    let mut source = open(rig.source(QueueKind::Quorum).topology(Topology::Check)).await;
    rig.channel
        .queue_delete(
            rig.dead_letters().as_str().into(),
            QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    rig.publish("a").await;
    let refused = delivery(&mut source).await;
    settle(&mut source, refused, Settlement::Reject(Reason::Refused)).await;
    let closing = source.close(Instant::now() + Duration::from_secs(1)).await;
    assert!(
        matches!(closing, Err(SourceError::Unavailable(_))),
        "{closing:?}"
    );
    assert_eq!(rig.take(&rig.queue).await.delivery.data, b"a");
    rig.done().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_connection_is_rebuilt_and_stale_receipts_are_never_sent() {
    for kind in KINDS {
        let (rig, proxy) = (Rig::new().await, Proxy::start().await);
        let status = RabbitMqStatus::new();
        let mut source = open(
            rig.source(kind)
                .url(&proxy.url)
                .prefetch(8)
                .status(status.clone()),
        )
        .await;
        for number in 0..20 {
            rig.publish(&number.to_string()).await;
        }
        let (stale, _) = deliveries(&mut source, 8, Duration::from_secs(10)).await;
        let epoch = stale[0].receipt.epoch;
        proxy.cut();
        let cut = Instant::now();
        let (mut fresh, revoked) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
        assert!(
            cut.elapsed() < Duration::from_secs(5),
            "consuming again after {:?}",
            cut.elapsed()
        );
        assert_eq!(
            (revoked, status.snapshot().away),
            (vec![epoch], Duration::ZERO)
        );
        for delivery in stale {
            settle(&mut source, delivery, accept()).await;
        }
        // All twenty come: the stale receipts acknowledged nothing, and closed nothing.
        let mut bodies = std::collections::BTreeSet::new();
        let mut handed_over = 0;
        while bodies.len() < 20 {
            for delivery in fresh.drain(..) {
                assert_eq!(delivery.receipt.epoch, epoch + 1);
                handed_over += 1;
                bodies.insert(delivery.message.body.to_vec());
                settle(&mut source, delivery, accept()).await;
            }
            if bodies.len() < 20 {
                let revoked;
                (fresh, revoked) = deliveries(&mut source, 1, Duration::from_secs(10)).await;
                assert!(revoked.is_empty(), "a stale receipt closed the channel");
            }
        }
        assert_eq!(handed_over, 20);
        close(source).await;
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

#[tokio::test]
async fn a_connection_on_which_nobody_answers_is_given_up() {
    let (rig, proxy) = (Rig::new().await, Proxy::start().await);
    let mut source = open(
        rig.source(QueueKind::Quorum)
            .url(format!("{}?heartbeat=1", proxy.url)),
    )
    .await;
    rig.publish("a").await;
    let stale = delivery(&mut source).await;
    proxy.freeze();
    let (mut again, revoked) = deliveries(&mut source, 1, Duration::from_secs(15)).await;
    assert_eq!(revoked, [stale.receipt.epoch]);
    settle(&mut source, stale, accept()).await;
    settle(&mut source, again.remove(0), accept()).await;
    close(source).await;
    rig.becomes_empty(&rig.queue).await;
    rig.done().await;
}

#[tokio::test]
async fn connections_that_are_cut_over_and_over_lose_nothing() {
    let (rig, proxy) = (Rig::new().await, Proxy::start().await);
    let mut source = open(rig.source(QueueKind::Quorum).url(&proxy.url).prefetch(32)).await;
    let (mut accepted, mut rejected) = (std::collections::BTreeSet::new(), 0);
    for number in 0..200 {
        rig.publish(&number.to_string()).await;
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
    // What came back for want of an acknowledgement is accepted now.
    while rig.ready(&rig.queue).await > 0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    close(source).await;
    let mut again = open(rig.source(QueueKind::Quorum)).await;
    let mut left = Vec::new();
    while tokio::time::timeout(Duration::from_millis(500), again.receive(LIMIT, &mut left))
        .await
        .is_ok()
    {}
    let dead = rig.ready(&rig.dead_letters()).await as usize;
    assert!(
        accepted.len() + dead + left.len() >= 200,
        "{} accepted, {dead} dead, {} left",
        accepted.len(),
        left.len()
    );
    close(again).await;
    rig.done().await;
}

#[tokio::test]
async fn a_deleted_queue_is_declared_and_consumed_again() {
    let rig = Rig::new().await;
    let mut source = open(rig.source(QueueKind::Quorum)).await;
    rig.channel
        .queue_delete(rig.queue.as_str().into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    let mut into = Vec::new();
    source.receive(LIMIT, &mut into).await.expect("received");
    assert!(
        matches!(into[..], [oncegate_core::Incoming::Revoked(1)]),
        "{into:?}"
    );
    let patience = Instant::now() + Duration::from_secs(10);
    while !rig.reaches("a", BasicProperties::default()).await {
        assert!(Instant::now() < patience);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let delivery = delivery(&mut source).await;
    settle(&mut source, delivery, accept()).await;
    close(source).await;
    rig.done().await;
}

#[tokio::test]
async fn a_queue_with_other_arguments_is_used_only_if_it_is_said_to_be_the_users_own() {
    let rig = Rig::new().await;
    close(open(rig.source(QueueKind::Quorum)).await).await;
    rig.channel
        .queue_delete(rig.queue.as_str().into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    // It drops what was delivered three times.
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(3));
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    rig.channel
        .queue_declare(rig.queue.as_str().into(), options, arguments)
        .await
        .expect("declared");
    let refused = rig
        .source(QueueKind::Quorum)
        .open()
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
        let mut source = open(rig.source(QueueKind::Quorum).topology(topology)).await;
        rig.publish("a").await;
        let delivery = delivery(&mut source).await;
        settle(&mut source, delivery, accept()).await;
        close(source).await;
    }
    rig.done().await;
}

#[tokio::test]
async fn what_a_person_has_to_change_is_said_at_open() {
    let refusal = async |source: RabbitMq| {
        let opening = tokio::time::timeout(Duration::from_secs(15), source.open())
            .await
            .expect("an answer");
        match opening {
            Err(error @ SourceError::Misconfigured { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let missing = refusal(
        RabbitMq::queue("test.nowhere")
            .url(url())
            .topology(Topology::Check),
    )
    .await;
    assert!(
        missing.contains("test.nowhere") && missing.contains("does not exist"),
        "{missing}"
    );
    let missing = refusal(
        RabbitMq::queue("test.nowhere")
            .url(url())
            .topology(Topology::Trust),
    )
    .await;
    assert!(
        missing.contains("test.nowhere") && missing.contains("does not exist"),
        "{missing}"
    );
    let password =
        refusal(RabbitMq::queue("q").url(url().replacen("guest:guest", "guest:canary", 1))).await;
    assert!(
        password.contains("ACCESS_REFUSED") && !password.contains("canary"),
        "{password}"
    );
    let vhost = refusal(RabbitMq::queue("q").url(format!(
        "{}/elsewhere",
        url().rsplit_once('/').expect("a vhost").0
    )))
    .await;
    assert!(vhost.contains("virtual host"), "{vhost}");
    let prefetch = refusal(RabbitMq::queue("q").url(url()).prefetch(0)).await;
    assert!(prefetch.starts_with("prefetch: 0"), "{prefetch}");
    assert!(
        refusal(RabbitMq::queue("").url(url()))
            .await
            .starts_with("queue: ")
    );
}

#[tokio::test]
async fn a_broker_that_is_not_there_yet_is_waited_for() {
    let rig = Rig::new().await;
    // A port that nobody listens on for now.
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port")
        .local_addr()
        .expect("an address")
        .port();
    let nowhere = format!("amqp://guest:guest@127.0.0.1:{port}/%2f");
    let opening = tokio::time::timeout(
        Duration::from_secs(1),
        RabbitMq::queue(&rig.queue).url(nowhere).open(),
    )
    .await;
    assert!(opening.is_err(), "it gave up: {opening:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_short_of_memory_delays_dead_letters_and_nothing_else_and_may_restart() {
    let mut server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let rig = Rig::at(&server.url()).await;
    let status = RabbitMqStatus::new();
    let mut source = open(
        rig.source(QueueKind::Quorum)
            .prefetch(4)
            .status(status.clone()),
    )
    .await;
    for number in 0..20 {
        rig.publish(&number.to_string()).await;
    }
    // The publishing connection stands before the alarm, as it may in a consumer that runs for
    // long.
    let first = delivery(&mut source).await;
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    assert_eq!(rig.take(&rig.dead_letters()).await.delivery.data, b"0");
    let other = Rig::at(&server.url()).await;
    let mut leaving = open(other.source(QueueKind::Quorum)).await;
    other.publish("cannot be delayed").await;
    let held = delivery(&mut leaving).await;

    server
        .control(&["set_vm_memory_high_watermark", "0"])
        .expect("an alarm");
    let counts = async |what: &str, is_so: &dyn Fn(RabbitMqSnapshot) -> bool| {
        let patience = Instant::now() + Duration::from_secs(20);
        while !is_so(status.snapshot()) {
            assert!(Instant::now() < patience, "{what}: {:?}", status.snapshot());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    // The broker tells its connections one after the other: a letter or two may stand before ours
    // has heard of it.
    let (mut number, mut letters) = (1, 1);
    while status.snapshot().blocked == Duration::ZERO {
        assert!(
            number < 10,
            "the alarm stopped nothing: the test proves nothing"
        );
        let letter = delivery(&mut source).await;
        settle(&mut source, letter, Settlement::Reject(Reason::Refused)).await;
        counts("it is blocked", &|read| {
            read.blocked > Duration::ZERO || read.copies > letters
        })
        .await;
        (number, letters) = (number + 1, status.snapshot().copies);
    }
    for number in number..20 {
        let delivery = delivery(&mut source).await;
        assert_eq!(delivery.message.body, number.to_string());
        settle(&mut source, delivery, accept()).await;
    }
    let during = status.snapshot().blocked;
    let standing = server_ready(&server, &rig.dead_letters());
    assert_eq!(
        (status.snapshot().copies, u64::from(standing) + 1),
        (letters, letters),
        "a letter was published in spite of the alarm"
    );
    settle(&mut leaving, held, release(Duration::from_secs(25))).await;
    let closing = tokio::time::timeout(
        Duration::from_secs(20),
        leaving.close(Instant::now() + Duration::from_secs(1)),
    )
    .await;
    let told = closing.expect("it ends, though its copy cannot be published");
    assert!(matches!(told, Err(SourceError::Unavailable(_))), "{told:?}");

    server
        .control(&["set_vm_memory_high_watermark", "0.8"])
        .expect("no alarm");
    let patience = Instant::now() + Duration::from_secs(20);
    while server_ready(&server, &rig.dead_letters()) == standing {
        assert!(Instant::now() < patience, "the dead letter never came");
    }
    counts("it was blocked for longer, and holds nothing", &|read| {
        read.blocked > during && read.unacked == 0
    })
    .await;
    assert_eq!(status.snapshot().reconnects, 0);
    assert_eq!(
        other.again().await.take(&other.queue).await.delivery.data,
        b"cannot be delayed"
    );

    tokio::task::block_in_place(|| {
        server.stop();
        server.start_again().expect("started again");
    });
    let again = rig.again().await;
    again.publish("after").await;
    let (mut after, revoked) = deliveries(&mut source, 1, Duration::from_secs(20)).await;
    assert!(!revoked.is_empty());
    let after = after.remove(0);
    assert_eq!(
        &after.message.body[..],
        b"after",
        "what was acknowledged came back"
    );
    settle(&mut source, after, accept()).await;
    close(source).await;
    again.becomes_empty(&again.queue).await;
}

/// How many messages a queue holds, asked past every connection: an alarm blocks those that
/// published.
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
    let opening = tokio::spawn(RabbitMq::queue("q").url(url).open());
    let (mut connection, _) = tokio::time::timeout(Duration::from_secs(10), listener.accept())
        .await
        .expect("in time")
        .expect("a connection");
    // 22 is a TLS handshake record; `A` would be AMQP with the password soon to follow.
    assert_eq!(connection.read_u8().await.expect("a byte"), 22);
    opening.abort();
}
