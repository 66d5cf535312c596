//! What waits in memory, and keeps those behind it from being acknowledged together.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqSource, RabbitMqStatus, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Delivery, Incoming, Open, Order, Source, headers};
use oncegate_testkit::servers::RabbitServer;

use crate::rig::*;

/// More than are acknowledged one by one before the source looks for a cheaper way.
const BEHIND: usize = 300;

async fn publish_behind(rig: &Rig) {
    for _ in 0..BEHIND {
        rig.publish("behind").await;
    }
}

/// Accepts all that comes, until so many came that are not `behind`: those.
async fn accept_all_behind(source: &mut RabbitMqSource, others: usize) -> Vec<Delivery> {
    let (mut behind, mut found) = (0, Vec::new());
    while behind < BEHIND || found.len() < others {
        for delivery in deliveries(source, 1, Duration::from_secs(30)).await.0 {
            if &delivery.message.body[..] == b"behind" {
                behind += 1;
                settle(source, delivery, accept()).await;
            } else {
                found.push(delivery);
            }
        }
    }
    found
}

async fn reach(status: &RabbitMqStatus, copies: u64) {
    let patience = Instant::now() + Duration::from_secs(20);
    while status.snapshot().copies < copies {
        assert!(
            Instant::now() < patience,
            "no copy: {:?}",
            status.snapshot()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn it_moves_to_a_delay_queue_with_its_delay_and_its_count_and_what_else_waits_does_not() {
    for kind in crate::KINDS {
        let (rig, status) = (Rig::new().await, RabbitMqStatus::new());
        let mut source = open(rig.source(kind).prefetch(64).status(status.clone())).await;
        rig.publish_with(
            "first",
            BasicProperties::default().with_message_id("m".into()),
        )
        .await;
        rig.publish("second").await;
        publish_behind(&rig).await;
        let (first, second) = (delivery(&mut source).await, delivery(&mut source).await);
        let place_before = place(&second);
        settle(&mut source, first, release(Duration::from_millis(4_900))).await;
        settle(&mut source, second, release(Duration::from_millis(2_500))).await;
        let second = accept_all_behind(&mut source, 1).await.remove(0);
        assert_eq!(
            (&second.message.body[..], place(&second), second.failures),
            (&b"second"[..], place_before, 1)
        );
        settle(&mut source, second, accept()).await;
        reach(&status, 1).await;
        let copy = rig
            .take(&format!("{}.delay.5000", rig.queue))
            .await
            .delivery;
        assert_eq!(
            (&copy.data[..], header(&copy, headers::FAILURES).as_deref()),
            (&b"first"[..], Some("1"))
        );
        assert_eq!(
            copy.properties.message_id().as_ref().map(|id| id.as_str()),
            Some("m")
        );
        close(source).await;
        assert_eq!(
            (status.snapshot().copies, status.snapshot().reconnects),
            (1, 0)
        );
        rig.becomes_empty(&rig.queue).await;
        rig.done().await;
    }
}

/// Releases the first message, accepts those behind it, and asserts that the first is handed over
/// again from memory.
async fn stays_in_memory(rig: &Rig, source: RabbitMq, properties: BasicProperties) {
    let status = RabbitMqStatus::new();
    let mut source = open(source.prefetch(64).status(status.clone())).await;
    rig.publish_with("first", properties).await;
    publish_behind(rig).await;
    let first = delivery(&mut source).await;
    let (place_before, carried) = (place(&first), first.message.headers.clone());
    settle(&mut source, first, release(Duration::from_millis(900))).await;
    let again = accept_all_behind(&mut source, 1).await.remove(0);
    assert_eq!(
        (place(&again), again.message.headers.clone(), again.failures),
        (place_before, carried, 1)
    );
    settle(&mut source, again, accept()).await;
    close(source).await;
    assert_eq!(status.snapshot().copies, 0);
    rig.becomes_empty(&rig.queue).await;
}

#[tokio::test]
async fn it_stays_in_memory_where_an_order_is_kept_or_no_delay_queue_was_declared() {
    let settings: [fn(RabbitMq) -> RabbitMq; 3] = [
        |source| source.topology(Topology::Trust),
        |source| source.single_active_consumer(),
        |source| source.for_order(Order::ByKey),
    ];
    for (number, setting) in settings.into_iter().enumerate() {
        let rig = Rig::new().await;
        let source = rig.source(QueueKind::Quorum);
        // With `Topology::Trust`, too, there are delay queues, of which it does not know.
        close(
            open(if number == 1 {
                source.single_active_consumer()
            } else {
                source
            })
            .await,
        )
        .await;
        stays_in_memory(
            &rig,
            setting(rig.source(QueueKind::Quorum)),
            BasicProperties::default(),
        )
        .await;
        rig.done().await;
    }
}

#[tokio::test]
async fn it_stays_in_memory_if_a_copy_would_lack_something() {
    let mut large = FieldTable::default();
    large.insert(
        "id".into(),
        AMQPValue::LongString("i".repeat(64 * 1_024).into()),
    );
    large.insert(
        "other".into(),
        AMQPValue::LongString("o".repeat(60_000).into()),
    );
    for properties in [
        BasicProperties::default().with_headers(large),
        BasicProperties::default().with_expiration("600000".into()),
    ] {
        let rig = Rig::new().await;
        stays_in_memory(&rig, rig.source(QueueKind::Quorum), properties).await;
        rig.done().await;
    }
}

/// Accepts what is behind, up to the next that is not.
async fn next_other(source: &mut RabbitMqSource) -> Delivery {
    loop {
        let next = delivery(source).await;
        if &next.message.body[..] != b"behind" {
            return next;
        }
        settle(source, next, accept()).await;
    }
}

/// Accepts all that is left.
async fn accept_the_rest(source: &mut RabbitMqSource, status: &RabbitMqStatus) {
    while status.snapshot().unacked > 0 {
        let mut into = Vec::new();
        let receiving =
            tokio::time::timeout(Duration::from_millis(200), source.receive(LIMIT, &mut into))
                .await;
        receiving.unwrap_or(Ok(())).expect("received");
        for incoming in into {
            let Incoming::Delivery(delivery) = incoming else {
                panic!("{incoming:?}")
            };
            settle(source, delivery, accept()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_handed_over_from_memory_if_its_copy_does_not_stand_in_time() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    a_broker_short_of_memory_keeps_nothing_back(&server).await;
    a_confirmation_that_comes_too_late_settles_nothing(&server).await;
}

async fn a_broker_short_of_memory_keeps_nothing_back(server: &RabbitServer) {
    let (rig, status) = (Rig::at(&server.url()).await, RabbitMqStatus::new());
    let (other, known) = (Rig::at(&server.url()).await, RabbitMqStatus::new());
    // One source finds out by itself, and one has been told.
    let mut source = open(
        rig.source(QueueKind::Quorum)
            .prefetch(64)
            .status(status.clone()),
    )
    .await;
    let mut told = open(
        other
            .source(QueueKind::Quorum)
            .prefetch(64)
            .status(known.clone()),
    )
    .await;
    for rig in [&rig, &other] {
        rig.publish("first").await;
        rig.publish("second").await;
        publish_behind(rig).await;
    }
    server
        .control(&["set_vm_memory_high_watermark", "0"])
        .expect("an alarm");

    let (first, second) = (delivery(&mut told).await, delivery(&mut told).await);
    let mut letters = 0;
    while known.snapshot().blocked == Duration::ZERO {
        letters += 1;
        assert!(letters < 20, "there was no alarm: the test proves nothing");
        let letter = delivery(&mut told).await;
        settle(&mut told, letter, Settlement::Reject(Reason::Refused)).await;
        let patience = Instant::now() + Duration::from_secs(20);
        while known.snapshot().blocked == Duration::ZERO && known.snapshot().copies < letters {
            assert!(Instant::now() < patience, "{:?}", known.snapshot());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    // It moves nowhere: it is back after its own delay, before the one that is due later.
    settle(&mut told, first, release(Duration::from_millis(1_000))).await;
    settle(&mut told, second, release(Duration::from_millis(1_900))).await;
    for body in ["first", "second"] {
        let next = next_other(&mut told).await;
        assert_eq!(
            (&next.message.body[..], next.failures),
            (body.as_bytes(), 1)
        );
        settle(&mut told, next, accept()).await;
    }

    let (first, second) = (delivery(&mut source).await, delivery(&mut source).await);
    let place_before = place(&first);
    settle(&mut source, second, accept()).await;
    settle(&mut source, first, release(Duration::from_millis(1_500))).await;
    let first = next_other(&mut source).await;
    assert_eq!(
        (&first.message.body[..], place(&first), first.failures),
        (&b"first"[..], place_before, 1)
    );
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    assert_eq!(
        status.snapshot().copies,
        0,
        "there was no alarm: the test proves nothing"
    );

    server
        .control(&["set_vm_memory_high_watermark", "0.8"])
        .expect("no alarm");
    reach(&status, 1).await;
    reach(&known, letters).await;
    accept_the_rest(&mut source, &status).await;
    accept_the_rest(&mut told, &known).await;
    close(source).await;
    close(told).await;
    assert_eq!(
        (status.snapshot().copies, known.snapshot().copies),
        (1, letters),
        "what had been handed over again was published"
    );
    for (rig, letters) in [(rig, 1), (other, letters as u32)] {
        rig.becomes_empty(&rig.queue).await;
        let delayed = [1_000, 5_000].map(|delay| format!("{}.delay.{delay}", rig.queue));
        assert_eq!(
            (
                rig.ready(&delayed[0]).await,
                rig.ready(&delayed[1]).await,
                rig.ready(&rig.dead_letters()).await
            ),
            (0, 0, letters)
        );
    }
}

async fn a_confirmation_that_comes_too_late_settles_nothing(server: &RabbitServer) {
    let (rig, status) = (Rig::at(&server.url()).await, RabbitMqStatus::new());
    let mut source = open(
        rig.source(QueueKind::Classic)
            .prefetch(64)
            .status(status.clone()),
    )
    .await;
    let delay_queue = |does: &str| {
        let name = format!(
            "rabbit_misc:r(<<\"/\">>, queue, <<\"{}.delay.1000\">>)",
            rig.queue
        );
        let program = format!(
            "{{ok, Queue}} = rabbit_amqqueue:lookup({name}), sys:{does}(amqqueue:get_pid(Queue))."
        );
        server.control(&["-q", "eval", &program]).expect("done");
    };
    delay_queue("suspend");
    rig.publish("first").await;
    publish_behind(&rig).await;
    let first = delivery(&mut source).await;
    let place_before = place(&first);
    settle(&mut source, first, release(Duration::from_millis(900))).await;
    let again = accept_all_behind(&mut source, 1).await.remove(0);
    assert_eq!((place(&again), status.snapshot().copies), (place_before, 0));
    delay_queue("resume");
    reach(&status, 1).await;
    // Nobody settled it. Beside it stands the copy, when its delay is over.
    close(source).await;
    let stand = [
        rig.take(&rig.queue).await.delivery,
        rig.take(&rig.queue).await.delivery,
    ];
    let mut failures = stand.map(|first| (first.data.clone(), header(&first, headers::FAILURES)));
    failures.sort();
    assert_eq!(
        failures,
        [
            (b"first".to_vec(), None),
            (b"first".to_vec(), Some("1".to_owned()))
        ]
    );
}
