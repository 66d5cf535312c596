//! A delivery that is delayed in memory, so that later ones cannot be acknowledged together.

use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use oncegate_amqp::{QueueKind, RabbitMq, RabbitMqSource, RabbitMqStatus, Topology};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Delivery, Incoming, Order, Source, headers};
use oncegate_testkit::servers::RabbitServer;

use crate::fixture::*;

/// More single acknowledgements than the source sends before the delayed delivery moves to a delay
/// queue.
const BEHIND: usize = 300;

async fn publish_behind(fixture: &QueueFixture) {
    for _ in 0..BEHIND {
        fixture.publish("behind").await;
    }
}

/// Accepts all messages `behind`, and returns the others once there are this many.
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

async fn wait_for_copies(status: &RabbitMqStatus, copies: u64) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while status.snapshot().copies < copies {
        assert!(
            Instant::now() < deadline,
            "no copy: {:?}",
            status.snapshot()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_delivery_that_blocks_acks_moves_to_a_delay_queue_with_its_delay_and_failures() {
    for kind in crate::KINDS {
        let (fixture, status) = (QueueFixture::new().await, RabbitMqStatus::new());
        let mut source = open(fixture.source(kind).prefetch(64).status(status.clone())).await;
        fixture
            .publish_with(
                "first",
                BasicProperties::default().with_message_id("m".into()),
            )
            .await;
        fixture.publish("second").await;
        publish_behind(&fixture).await;
        let (first, second) = (delivery(&mut source).await, delivery(&mut source).await);
        let tag_before = channel_and_tag(&second);
        settle(&mut source, first, release(Duration::from_millis(4_900))).await;
        settle(&mut source, second, release(Duration::from_millis(2_500))).await;
        let second = accept_all_behind(&mut source, 1).await.remove(0);
        assert_eq!(
            (
                &second.message.body[..],
                channel_and_tag(&second),
                second.failures
            ),
            (&b"second"[..], tag_before, 1)
        );
        settle(&mut source, second, accept()).await;
        wait_for_copies(&status, 1).await;
        let copy = fixture
            .take(&format!("{}.delay.5000", fixture.queue))
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
            (status.snapshot().copies, status.snapshot().channels_lost),
            (1, 0)
        );
        fixture.wait_until_empty(&fixture.queue).await;
        fixture.delete_queues().await;
    }
}

/// Releases the first message, accepts those behind it, and asserts that the first is redelivered
/// from memory.
async fn assert_redelivered_from_memory(
    fixture: &QueueFixture,
    source: RabbitMq,
    order: Order,
    properties: BasicProperties,
) {
    let status = RabbitMqStatus::new();
    let mut source = open_ordered(source.prefetch(64).status(status.clone()), order).await;
    fixture.publish_with("first", properties).await;
    publish_behind(fixture).await;
    let first = delivery(&mut source).await;
    let (tag_before, headers_before) = (channel_and_tag(&first), first.message.headers.clone());
    settle(&mut source, first, release(Duration::from_millis(900))).await;
    let again = accept_all_behind(&mut source, 1).await.remove(0);
    assert_eq!(
        (
            channel_and_tag(&again),
            again.message.headers.clone(),
            again.failures
        ),
        (tag_before, headers_before, 1)
    );
    settle(&mut source, again, accept()).await;
    close(source).await;
    assert_eq!(status.snapshot().copies, 0);
    fixture.wait_until_empty(&fixture.queue).await;
}

#[tokio::test]
async fn a_delivery_that_blocks_acks_stays_in_memory_with_an_order_or_without_delay_queues() {
    type Setting = fn(RabbitMq) -> RabbitMq;
    let settings: [(Setting, Order); 3] = [
        (|source| source.topology(Topology::Trust), Order::Unordered),
        (RabbitMq::single_active_consumer, Order::Unordered),
        (|source| source, Order::ByKey),
    ];
    for (number, (setting, order)) in settings.into_iter().enumerate() {
        let fixture = QueueFixture::new().await;
        let source = fixture.source(QueueKind::Quorum);
        // With `Topology::Trust` the source uses no delay queues, although they exist.
        close(
            open(if number == 1 {
                source.single_active_consumer()
            } else {
                source
            })
            .await,
        )
        .await;
        assert_redelivered_from_memory(
            &fixture,
            setting(fixture.source(QueueKind::Quorum)),
            order,
            BasicProperties::default(),
        )
        .await;
        fixture.delete_queues().await;
    }
}

#[tokio::test]
async fn a_delivery_that_blocks_acks_stays_in_memory_if_its_copy_would_lose_a_property_or_header() {
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
        let fixture = QueueFixture::new().await;
        let source = fixture.source(QueueKind::Quorum);
        assert_redelivered_from_memory(&fixture, source, Order::Unordered, properties).await;
        fixture.delete_queues().await;
    }
}

/// Accepts messages `behind` and returns the next other one.
async fn next_other(source: &mut RabbitMqSource) -> Delivery {
    loop {
        let next = delivery(source).await;
        if &next.message.body[..] != b"behind" {
            return next;
        }
        settle(source, next, accept()).await;
    }
}

/// Accepts all remaining messages.
async fn accept_remaining(source: &mut RabbitMqSource, status: &RabbitMqStatus) {
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
async fn a_delivery_is_redelivered_from_memory_if_its_copy_is_not_confirmed_in_time() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    a_memory_alarm_delays_no_redelivery(&server).await;
    a_late_confirm_settles_nothing(&server).await;
}

async fn a_memory_alarm_delays_no_redelivery(server: &RabbitServer) {
    let (fixture, status) = (QueueFixture::at(&server.url()).await, RabbitMqStatus::new());
    let (other, blocked_status) = (QueueFixture::at(&server.url()).await, RabbitMqStatus::new());
    // `blocked_source` publishes dead letters, so it receives `connection.blocked`. `source` publishes
    // nothing before its first move to a delay queue.
    let mut source = open(
        fixture
            .source(QueueKind::Quorum)
            .prefetch(64)
            .status(status.clone()),
    )
    .await;
    let mut blocked_source = open(
        other
            .source(QueueKind::Quorum)
            .prefetch(64)
            .status(blocked_status.clone()),
    )
    .await;
    for fixture in [&fixture, &other] {
        fixture.publish("first").await;
        fixture.publish("second").await;
        publish_behind(fixture).await;
    }
    server
        .control(&["set_vm_memory_high_watermark", "0"])
        .expect("an alarm");

    let (first, second) = (
        delivery(&mut blocked_source).await,
        delivery(&mut blocked_source).await,
    );
    let mut dead_letters = 0;
    while blocked_status.snapshot().blocked == Duration::ZERO {
        dead_letters += 1;
        assert!(
            dead_letters < 20,
            "the alarm does not block publishing, so this test checks nothing"
        );
        let dead_letter = delivery(&mut blocked_source).await;
        settle(
            &mut blocked_source,
            dead_letter,
            Settlement::Reject(Reason::Refused),
        )
        .await;
        let deadline = Instant::now() + Duration::from_secs(20);
        while blocked_status.snapshot().blocked == Duration::ZERO
            && blocked_status.snapshot().copies < dead_letters
        {
            assert!(Instant::now() < deadline, "{:?}", blocked_status.snapshot());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    // No delivery moves to a delay queue: each is redelivered after its own delay.
    settle(
        &mut blocked_source,
        first,
        release(Duration::from_millis(1_000)),
    )
    .await;
    settle(
        &mut blocked_source,
        second,
        release(Duration::from_millis(1_900)),
    )
    .await;
    for body in ["first", "second"] {
        let next = next_other(&mut blocked_source).await;
        assert_eq!(
            (&next.message.body[..], next.failures),
            (body.as_bytes(), 1)
        );
        settle(&mut blocked_source, next, accept()).await;
    }

    let (first, second) = (delivery(&mut source).await, delivery(&mut source).await);
    let tag_before = channel_and_tag(&first);
    settle(&mut source, second, accept()).await;
    settle(&mut source, first, release(Duration::from_millis(1_500))).await;
    let first = next_other(&mut source).await;
    assert_eq!(
        (
            &first.message.body[..],
            channel_and_tag(&first),
            first.failures
        ),
        (&b"first"[..], tag_before, 1)
    );
    settle(&mut source, first, Settlement::Reject(Reason::Refused)).await;
    assert_eq!(
        status.snapshot().copies,
        0,
        "the alarm does not block publishing, so this test checks nothing"
    );

    server
        .control(&["set_vm_memory_high_watermark", "0.8"])
        .expect("no alarm");
    wait_for_copies(&status, 1).await;
    wait_for_copies(&blocked_status, dead_letters).await;
    accept_remaining(&mut source, &status).await;
    accept_remaining(&mut blocked_source, &blocked_status).await;
    close(source).await;
    close(blocked_source).await;
    assert_eq!(
        (status.snapshot().copies, blocked_status.snapshot().copies),
        (1, dead_letters),
        "the copy of a redelivered message was published"
    );
    for (fixture, dead_letters) in [(fixture, 1), (other, dead_letters as u32)] {
        fixture.wait_until_empty(&fixture.queue).await;
        let delayed = [1_000, 5_000].map(|delay| format!("{}.delay.{delay}", fixture.queue));
        assert_eq!(
            (
                fixture.ready_messages(&delayed[0]).await,
                fixture.ready_messages(&delayed[1]).await,
                fixture.ready_messages(&fixture.dead_letters()).await
            ),
            (0, 0, dead_letters)
        );
    }
}

async fn a_late_confirm_settles_nothing(server: &RabbitServer) {
    let (fixture, status) = (QueueFixture::at(&server.url()).await, RabbitMqStatus::new());
    let mut source = open(
        fixture
            .source(QueueKind::Classic)
            .prefetch(64)
            .status(status.clone()),
    )
    .await;
    let call_queue_process = |function: &str| {
        let name = format!(
            "rabbit_misc:r(<<\"/\">>, queue, <<\"{}.delay.1000\">>)",
            fixture.queue
        );
        let program = format!(
            "{{ok, Queue}} = rabbit_amqqueue:lookup({name}), sys:{function}(amqqueue:get_pid(Queue))."
        );
        server.control(&["-q", "eval", &program]).expect("done");
    };
    call_queue_process("suspend");
    fixture.publish("first").await;
    publish_behind(&fixture).await;
    let first = delivery(&mut source).await;
    let tag_before = channel_and_tag(&first);
    settle(&mut source, first, release(Duration::from_millis(900))).await;
    let again = accept_all_behind(&mut source, 1).await.remove(0);
    assert_eq!(
        (channel_and_tag(&again), status.snapshot().copies),
        (tag_before, 0)
    );
    call_queue_process("resume");
    wait_for_copies(&status, 1).await;
    // The original is unsettled; its copy is in the queue, too, after its delay.
    close(source).await;
    let messages = [
        fixture.take(&fixture.queue).await.delivery,
        fixture.take(&fixture.queue).await.delivery,
    ];
    let mut failures =
        messages.map(|first| (first.data.clone(), header(&first, headers::FAILURES)));
    failures.sort();
    assert_eq!(
        failures,
        [
            (b"first".to_vec(), None),
            (b"first".to_vec(), Some("1".to_owned()))
        ]
    );
}
