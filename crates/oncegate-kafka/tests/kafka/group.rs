//! Members that join and leave.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Delivery, Gate, Incoming, Limit, MemoryStore, Source, WhenHeld};
use oncegate_kafka::{GroupProtocol, Kafka, KafkaSource, KafkaStatus};
use oncegate_testkit::servers::KafkaServers;
use tokio::sync::watch;

use crate::fixture::*;

/// How often each partition and offset was accepted.
type Accepted = Arc<Mutex<HashMap<(u32, i64), usize>>>;

/// What all members of a group handle, each message under an id in one store.
#[derive(Clone)]
struct Handled {
    gate: Gate,
    counts: Accepted,
}

impl Handled {
    async fn new() -> Self {
        let gate = Gate::builder()
            .store(MemoryStore::new())
            .when_held(WhenHeld::Wait(BOUND));
        Self {
            gate: gate.open().await.expect("a gate"),
            counts: Accepted::default(),
        }
    }

    async fn handle(&self, it: &Delivery) {
        let message = (it.receipt.partition, offset(it));
        let id = format!("{}-{}", message.0, message.1);
        let run = self.gate.run(id, async || {
            *self
                .counts
                .lock()
                .expect("no panic")
                .entry(message)
                .or_default() += 1;
            Ok(())
        });
        run.await.expect("an outcome");
    }

    /// How many messages were handled, and how many of them more than once.
    fn total_and_repeated(&self) -> (usize, usize) {
        let counts = self.counts.lock().expect("no panic");
        (
            counts.len(),
            counts.values().filter(|count| **count > 1).count(),
        )
    }
}

/// Handles and accepts everything until it is stopped.
async fn accept_all(
    mut source: KafkaSource,
    handled: Handled,
    accepted: Accepted,
    mut leave: watch::Receiver<()>,
) {
    loop {
        let mut incoming = Vec::new();
        tokio::select! {
            received = source.receive(Limit::new(50, 1 << 20), &mut incoming) => received.expect("deliveries"),
            _ = leave.changed() => break,
        }
        let deliveries: Vec<Delivery> = incoming.into_iter().filter_map(delivery).collect();
        for it in &deliveries {
            handled.handle(it).await;
            *accepted
                .lock()
                .expect("no panic")
                .entry((it.receipt.partition, offset(it)))
                .or_default() += 1;
        }
        // Slowly enough that deliveries are in flight when members join and leave.
        tokio::time::sleep(Duration::from_millis(2)).await;
        accept(&mut source, deliveries).await;
    }
    source.stop().await;
    close(source).await;
}

async fn wait_until_accepted(accepted: &Accepted, count: usize) {
    let end = Instant::now() + BOUND;
    while accepted.lock().expect("no panic").len() < count {
        assert!(
            Instant::now() < end,
            "{} of {count} were accepted",
            accepted.lock().expect("no panic").len()
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_that_join_and_leave_lose_nothing_and_accept_nothing_twice() {
    join_and_leave(|topic, _| topic.source()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_eager_group_loses_nothing_and_accepts_nothing_twice() {
    join_and_leave(|topic, _| {
        topic
            .classic_source()
            .property("partition.assignment.strategy", "range")
    })
    .await;
}

/// Three members; the first one leaves while the others consume.
async fn join_and_leave(source: impl Fn(&Topic, usize) -> Kafka) {
    const PARTITIONS: i32 = 6;
    const EACH: usize = 2_000;
    let topic = Topic::new(PARTITIONS).await;
    for partition in 0..PARTITIONS {
        topic.send_numbers(partition, EACH).await;
    }
    let (accepted, handled) = (Accepted::default(), Handled::new().await);
    let member = async |number| {
        let (leave, left) = watch::channel(());
        let source = source(&topic, number)
            .connect(ConnectOptions::default())
            .await
            .expect("a source");
        (
            leave,
            tokio::spawn(accept_all(source, handled.clone(), accepted.clone(), left)),
        )
    };
    let total = PARTITIONS as usize * EACH;
    let first = member(0).await;
    wait_until_accepted(&accepted, total / 6).await;
    let second = member(1).await;
    wait_until_accepted(&accepted, total / 2).await;
    let third = member(2).await;
    wait_until_accepted(&accepted, total * 2 / 3).await;
    first.0.send(()).expect("a member");
    first.1.await.expect("left");
    wait_until_accepted(&accepted, total).await;
    for (leave, left) in [second, third] {
        leave.send(()).expect("a member");
        left.await.expect("left");
    }
    let twice = accepted
        .lock()
        .expect("no panic")
        .values()
        .filter(|count| **count > 1)
        .count();
    assert_eq!(twice, 0);
    assert_eq!(handled.total_and_repeated(), (total, 0), "handled");
    for partition in 0..PARTITIONS {
        topic.await_commit(partition, EACH as i64).await;
    }
}

/// A member of a group whose members are replaced one after the other.
struct Replaced {
    accepted: Accepted,
    leave: watch::Sender<()>,
    left: tokio::task::JoinHandle<()>,
}

impl Replaced {
    /// Joins, and returns once the member has accepted a message.
    async fn join(kafka: Kafka, handled: &Handled) -> Self {
        let source = kafka
            .connect(ConnectOptions::default())
            .await
            .expect("a source");
        let (accepted, (leave, leaving)) = (Accepted::default(), watch::channel(()));
        let left = tokio::spawn(accept_all(
            source,
            handled.clone(),
            accepted.clone(),
            leaving,
        ));
        wait_until_accepted(&accepted, 1).await;
        Self {
            accepted,
            leave,
            left,
        }
    }

    async fn leave(self) -> Accepted {
        self.leave.send(()).expect("a member");
        self.left.await.expect("left");
        self.accepted
    }
}

/// How the members of a group are replaced.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Restart {
    /// Each one leaves after its successor has joined.
    Rolling,
    /// All leave before the first successor joins.
    AllAtOnce,
}

/// Replaces two members by two others, while messages are published all the time.
async fn replace_members(
    brokers: String,
    restart: Restart,
    from: impl Fn(Kafka) -> Kafka,
    to: impl Fn(Kafka) -> Kafka,
) {
    const PARTITIONS: i32 = 6;
    let topic = Arc::new(Topic::with_destinations_at(brokers, PARTITIONS).await);
    let (end, ended) = watch::channel(());
    let publisher = tokio::spawn({
        let topic = topic.clone();
        async move {
            let mut count = 0;
            while !ended.has_changed().expect("a sender") {
                for partition in 0..PARTITIONS {
                    topic.send_numbers(partition, 20).await;
                }
                count += 20;
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            count
        }
    });
    let handled = Handled::new().await;
    let join_old = || Replaced::join(from(topic.classic_source()), &handled);
    let join_new = || Replaced::join(to(topic.classic_source()), &handled);
    let (first, second) = (join_old().await, join_old().await);
    let (mut accepted, third, fourth);
    match restart {
        Restart::Rolling => {
            third = join_new().await;
            accepted = vec![first.leave().await];
            fourth = join_new().await;
            accepted.push(second.leave().await);
        }
        Restart::AllAtOnce => {
            accepted = vec![first.leave().await, second.leave().await];
            third = join_new().await;
            fourth = join_new().await;
        }
    }
    // All partitions have a new member, and more messages.
    let before = fourth.accepted.lock().expect("no panic").len();
    wait_until_accepted(&fourth.accepted, before + 1_000).await;
    end.send(()).expect("a publisher");
    let each: i64 = publisher.await.expect("published");
    for partition in 0..PARTITIONS {
        topic.await_commit(partition, each).await;
    }
    accepted.extend([third.leave().await, fourth.leave().await]);
    let mut counts: HashMap<(u32, i64), usize> = HashMap::new();
    for accepted in accepted {
        for (message, count) in accepted.lock().expect("no panic").drain() {
            *counts.entry(message).or_default() += count;
        }
    }
    let twice = counts.values().filter(|count| **count > 1).count();
    println!("{} accepted, {twice} of them twice", counts.len());
    let all = usize::try_from(each).expect("a count") * PARTITIONS as usize;
    assert_eq!(counts.len(), all, "lost");
    assert_eq!(handled.total_and_repeated(), (all, 0), "handled");
    // In a rolling restart the brokers assign some partitions to two members for a while. Then the
    // marker prevents that a message is handled twice.
    if restart == Restart::AllAtOnce {
        assert_eq!(twice, 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_group_that_is_stopped_changes_its_protocol_in_both_directions() {
    let classic = |kafka: Kafka| kafka;
    let consumer = |kafka: Kafka| kafka.group_protocol(GroupProtocol::Consumer);
    let brokers = || oncegate_testkit::kafka_brokers().expect("a broker");
    replace_members(brokers(), Restart::AllAtOnce, classic, consumer).await;
    replace_members(brokers(), Restart::AllAtOnce, consumer, classic).await;
}

/// The upgrade on three brokers, the way back on one. With the default assignor, brokers refuse members
/// of the other protocol as long as there are several of the classic one (KAFKA-18134).
#[tokio::test(flavor = "multi_thread")]
async fn a_rolling_change_of_the_protocol_handles_each_message_once() {
    let classic = |kafka: Kafka| kafka.property("partition.assignment.strategy", "range");
    let consumer = |kafka: Kafka| kafka.group_protocol(GroupProtocol::Consumer);
    let servers = tokio::task::spawn_blocking(KafkaServers::start)
        .await
        .expect("no panic")
        .expect("three brokers");
    let single = oncegate_testkit::kafka_brokers().expect("a broker");
    tokio::join!(
        replace_members(servers.brokers(), Restart::Rolling, classic, consumer),
        replace_members(single, Restart::Rolling, consumer, classic),
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_member_leaves_the_group_at_once() {
    const SESSION_TIMEOUT: Duration = Duration::from_secs(45);
    let topic = Topic::new(2).await;
    let member = async || {
        let source = topic.classic_source().property(
            "session.timeout.ms",
            SESSION_TIMEOUT.as_millis().to_string(),
        );
        source
            .connect(ConnectOptions::default())
            .await
            .expect("a source")
    };
    let (mut first, mut second) = (member().await, member().await);
    for partition in 0..2 {
        topic.send_numbers(partition, 1).await;
    }
    let unsettled = tokio::join!(receive(&mut first, 1), receive(&mut second, 1));
    first.stop().await;
    close(first).await;
    tokio::time::timeout(SESSION_TIMEOUT / 2, receive(&mut second, 1))
        .await
        .expect("the partition is assigned before the session of the first member times out");
    drop(unsettled);
    close(second).await;
}

/// Waits until a partition of this source is revoked, like a consumer without room for deliveries.
async fn revocation(source: &mut KafkaSource) -> u64 {
    let revoked = tokio::time::timeout(BOUND, async {
        loop {
            let mut incoming = Vec::new();
            source
                .receive(Limit::NOTHING, &mut incoming)
                .await
                .expect("a revocation or a wake-up");
            if let Some(Incoming::Revoked(epoch)) = incoming.pop() {
                return epoch;
            }
        }
    });
    revoked.await.expect("a revocation")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settlement_after_the_revocation_commits_nothing() {
    let topic = Topic::new(2).await;
    topic.send_numbers(0, 5).await;
    topic.send_numbers(1, 5).await;
    let mut first = topic
        .source()
        .drain_on_revoke(Duration::from_millis(50))
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let held = receive(&mut first, 10).await;
    let mut second = topic.open().await;
    let epoch = revocation(&mut first).await;
    let (revoked, kept): (Vec<_>, Vec<_>) =
        held.into_iter().partition(|it| it.receipt.epoch == epoch);
    let again = receive(&mut second, 5).await;
    assert_eq!(offsets(&again), offsets(&revoked));
    let partition = again[0].receipt.partition as i32;
    accept(&mut first, revoked).await;
    accept(&mut first, kept).await;
    topic.await_commit(1 - partition, 5).await;
    topic.await_commit(partition, 0).await;
    accept(&mut second, again).await;
    topic.await_commit(partition, 5).await;
    close(first).await;
    close(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_is_announced_and_waits_for_in_flight_deliveries() {
    let topic = Topic::new(2).await;
    topic.send_numbers(0, 20).await;
    topic.send_numbers(1, 20).await;
    let mut first = topic.open().await;
    let mut held = receive(&mut first, 40).await;
    // The deliveries are not received; only revocations are requested.
    topic.send_numbers(0, 5).await;
    topic.send_numbers(1, 5).await;
    let second = tokio::spawn({
        let kafka = topic.source();
        async move {
            kafka
                .connect(ConnectOptions::default())
                .await
                .expect("a source")
        }
    });
    // The second member gets one of the two partitions.
    let epoch = revocation(&mut first).await;
    let (of_revoked, of_kept): (Vec<_>, Vec<_>) =
        held.drain(..).partition(|it| it.receipt.epoch == epoch);
    assert_eq!((of_revoked.len(), of_kept.len()), (20, 20));
    let partition = of_revoked[0].receipt.partition as i32;
    // Settled while the rebalance waits, so it is committed before the other member has the
    // partition.
    accept(&mut first, of_revoked).await;
    let mut second = second.await.expect("a source");
    topic.await_commit(partition, 20).await;
    let next = receive(&mut second, 5).await;
    assert_eq!(offsets(&next), [20, 21, 22, 23, 24]);
    accept(&mut second, next).await;
    accept(&mut first, of_kept).await;
    close(first).await;
    close(second).await;
    assert_eq!(
        (
            topic.committed(partition).await,
            topic.committed(1 - partition).await
        ),
        (Some(25), Some(20))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_whose_instance_id_is_taken_ends_with_an_error() {
    let topic = Topic::new(1).await;
    let open = async || {
        topic
            .classic_source()
            .property("group.instance.id", "one")
            .connect(ConnectOptions::default())
            .await
            .expect("a source")
    };
    let mut first = open().await;
    topic.send_numbers(0, 1).await;
    let mut deliveries = receive(&mut first, 1).await;
    let second = open().await;
    let text = end_of(&mut first).await;
    assert!(
        text.starts_with("group.instance.id: ") && text.contains("of its own"),
        "{text}"
    );
    accept(&mut first, deliveries.drain(..)).await;
    close(first).await;
    close(second).await;
}

/// The consumer group protocol rejects a second member with the same instance id, which is a fatal
/// error of its client: the source replaces the client until the first member has left, and logs it
/// each time.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_with_a_fatal_error_is_replaced_until_it_works() {
    let topic = Topic::new(1).await;
    topic.send_numbers(0, 3).await;
    let kafka = || {
        topic
            .classic_source()
            .group_protocol(GroupProtocol::Consumer)
            .property("group.instance.id", "one")
    };
    let mut first = kafka()
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let mut deliveries = receive(&mut first, 3).await;
    accept(&mut first, deliveries.drain(..1)).await;
    topic.await_commit(0, 1).await;
    let status = KafkaStatus::new();
    let mut second = kafka()
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let end = Instant::now() + BOUND;
    while status.clients_replaced() == 0 {
        assert!(
            Instant::now() < end,
            "the second member's client was not replaced"
        );
        assert!(
            is_silent(&mut second, Duration::from_millis(100)).await,
            "an instance id was used twice"
        );
    }
    close(first).await;
    let deliveries = receive(&mut second, 2).await;
    assert_eq!(offsets(&deliveries), [1, 2]);
    accept(&mut second, deliveries).await;
    topic.await_commit(0, 3).await;
    close(second).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_that_affect_every_client_end_the_source() {
    let topic = Topic::new(1).await;
    let status = KafkaStatus::new();
    let kafka = topic
        .classic_source()
        .group_protocol(GroupProtocol::Consumer)
        .property("group.remote.assignor", "no-such-assignor");
    let mut source = kafka
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    let text = end_of(&mut source).await;
    assert!(text.starts_with("group.remote.assignor: "), "{text}");
    close(source).await;
    assert_eq!(status.clients_replaced(), 0);
}

/// The error that a source ends with.
async fn end_of(source: &mut KafkaSource) -> String {
    let ended = tokio::time::timeout(BOUND, async {
        loop {
            let mut incoming = Vec::new();
            if let Err(error) = source.receive(Limit::new(1, 1 << 20), &mut incoming).await {
                return error.to_string();
            }
        }
    });
    ended.await.expect("an error in time")
}
