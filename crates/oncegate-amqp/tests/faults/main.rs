//! Faults of a RabbitMQ node, at random times under load: no message is lost, none has its effect
//! twice, and the broker refuses no acknowledgement.
//!
//! One of each here; `cargo xtask faults` causes ten of each at 2,000 messages a second.
#![forbid(unsafe_code)]

mod dead_letters;
mod load;
mod memory;
mod poison;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_amqp::{RabbitMq, RabbitMqStatus};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Connect, ConnectOptions, Incoming, Limit, Settled, Source};
use oncegate_core::{Consumer, Guarantee, IdSource, MemoryStore};
use oncegate_testkit::proxy::Proxy;
use oncegate_testkit::servers::{RabbitCluster, RabbitServer};

use load::{LoadGenerator, OutcomeRecorder};

const QUEUE: &str = "payments";
/// The timeout of every step. The long run has stricter limits.
const TIMEOUT: Duration = Duration::from_secs(120);
/// The limit for recovery in the long run.
const MAX_RECOVERY_TIME: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RabbitMqFault {
    NodeRestarted,
    ConnectionReset,
    ChannelClosed,
    ConsumerCancelled,
    ConsumerLost,
    QueueDeleted,
    MemoryAlarm,
}

const FAULTS: [RabbitMqFault; 7] = [
    RabbitMqFault::ConnectionReset,
    RabbitMqFault::ChannelClosed,
    RabbitMqFault::ConsumerCancelled,
    RabbitMqFault::ConsumerLost,
    RabbitMqFault::QueueDeleted,
    RabbitMqFault::MemoryAlarm,
    RabbitMqFault::NodeRestarted,
];

/// The number of rounds, the load and the final timeout of a run.
struct RunLength {
    rounds: usize,
    rate: u32,
    /// The timeout after the last fault until each message has its effect.
    timeout: Duration,
}

impl RunLength {
    /// From the environment; by default one round at a rate that leaves room for other tests.
    fn from_env() -> Self {
        let number = |name: &str, default| {
            std::env::var(name)
                .ok()
                .map_or(default, |text| text.parse().expect("a number"))
        };
        let rounds = number("ONCEGATE_FAULT_ROUNDS", 1) as usize;
        Self {
            rounds,
            rate: number("ONCEGATE_FAULT_RATE", 500),
            timeout: TIMEOUT,
        }
    }

    fn is_long(&self) -> bool {
        self.rounds > 1
    }
}

/// A consumer under load.
struct FaultScenario {
    load: Arc<LoadGenerator>,
    effects: OutcomeRecorder,
    status: RabbitMqStatus,
}

impl FaultScenario {
    /// Starts the load and the consumer, runs the faults, then drains and checks the outcome.
    async fn run(
        source: RabbitMq,
        urls: Vec<String>,
        length: &RunLength,
        run: impl AsyncFnOnce(&Self),
    ) {
        let status = RabbitMqStatus::new();
        let scenario = Self {
            load: LoadGenerator::new(urls, QUEUE, length.rate),
            effects: OutcomeRecorder::default(),
            status: status.clone(),
        };
        let consumer = Consumer::builder()
            .source(source.status(status))
            .store(MemoryStore::new())
            .guarantee(Guarantee::AtMostOnce)
            .allow_volatile_store()
            .id(IdSource::message_id())
            // Failed messages are retried: first from the consumer, then from delay queues.
            .max_inline_retries(0)
            .backoff(Duration::from_millis(1_500), Duration::from_millis(5_500))
            .handler(scenario.effects.clone());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
        let (publishing, started) = (
            tokio::spawn(Arc::clone(&scenario.load).run()),
            Instant::now(),
        );
        scenario
            .wait_until("the first effects", || scenario.effects.count() > 50)
            .await;
        run(&scenario).await;
        scenario.load.end();
        publishing.await.expect("no panic");
        let all_done = || {
            scenario.effects.count() == scenario.load.confirmed()
                && scenario.status.snapshot().unacked == 0
        };
        scenario
            .wait_within(length.timeout, "each message has its effect", all_done)
            .await;
        let took = started.elapsed();
        stop.send(()).expect("the consumer runs");
        running.await.expect("no panic").expect("a clean end");
        let read = scenario.status.snapshot();
        println!(
            "{} confirmed in {took:.1?} ({:.0}/s of {} requested), {} published again; 0 lost; at most {} effects of a message; {} failures, {} refused\n{read:?}",
            scenario.load.confirmed(),
            scenario.load.confirmed() as f64 / took.as_secs_f64(),
            length.rate,
            scenario.load.republished(),
            scenario.effects.max_effects(),
            scenario.effects.failures(),
            scenario.effects.refused().len(),
        );
        assert_eq!(
            scenario.effects.max_effects(),
            1,
            "an effect happened twice"
        );
        assert_eq!(
            scenario.effects.count(),
            scenario.load.sent(),
            "an effect without a message"
        );
        assert!(
            scenario.effects.failures() > 0 && !scenario.effects.refused().is_empty(),
            "no message failed or was refused"
        );
        let in_doubt = load::take_all(&scenario.load.urls[0], &format!("{QUEUE}.in-doubt")).await;
        assert!(
            in_doubt.is_empty(),
            "no message may be in doubt: {in_doubt:?}"
        );
        let dead = load::take_all(&scenario.load.urls[0], &format!("{QUEUE}.dead-letters")).await;
        assert_eq!(
            dead,
            scenario.effects.refused(),
            "exactly the refused messages are in the dead letters"
        );
    }

    async fn wait_until(&self, what: &str, condition: impl Fn() -> bool) {
        self.wait_within(TIMEOUT, what, condition).await;
    }

    async fn wait_within(&self, timeout: Duration, what: &str, condition: impl Fn() -> bool) {
        let end = Instant::now() + timeout;
        while !condition() {
            assert!(
                Instant::now() < end,
                "not within {timeout:?}: {what}\n{self:?}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits for the first delivery on a new channel; returns the time since `fault_ended`.
    async fn consumes_again(&self, channels_lost: u64, fault_ended: Instant) -> Duration {
        self.wait_until("the source detects the lost channel", || {
            self.status.snapshot().channels_lost > channels_lost
        })
        .await;
        let delivered = self.status.snapshot().delivered;
        self.wait_until("the source receives a delivery", || {
            self.status.snapshot().delivered > delivered
        })
        .await;
        fault_ended.elapsed()
    }
}

impl fmt::Debug for FaultScenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = (
            self.load.sent(),
            self.load.confirmed(),
            self.effects.count(),
        );
        f.debug_struct("FaultScenario")
            .field("sent_confirmed_effects", &counts)
            .field("status", &self.status.snapshot())
            .finish()
    }
}

/// Asserts that a node has logged no refused acknowledgement since its last start.
fn assert_no_refused_acks(server: &RabbitServer) {
    let log = std::fs::read_to_string(server.directory().join("server.log")).expect("a log");
    let refused: Vec<&str> = log
        .lines()
        .filter(|line| line.to_lowercase().contains("precondition_failed"))
        .collect();
    assert!(refused.is_empty(), "406: {refused:#?}");
}

/// Evaluates an Erlang expression on the node for each consuming `Channel` and its `Tag`.
fn eval_for_consumers(server: &RabbitServer, expression: &str) {
    let program = [
        &format!("[begin {expression} end || C <- rabbit_amqqueue:consumers_all(<<\"/\">>)"),
        "Channel <- [proplists:get_value(channel_pid, C)]",
        "Tag <- [proplists:get_value(consumer_tag, C)]].",
    ];
    let done = server
        .control(&["-q", "eval", &program.join(", ")])
        .expect("done");
    assert!(done.contains("ok"), "no consumer: {done}");
}

/// Makes the queue lose its consumer, as when its leader moves to another node: there are no more
/// deliveries and no `basic.cancel`.
fn lose_consumer(server: &RabbitServer) {
    let queue = format!("{{resource, <<\"/\">>, queue, <<\"{QUEUE}\">>}}");
    eval_for_consumers(
        server,
        &format!("gen_server2:cast(Channel, {{queue_event, {queue}, {{none, {{machine, eol}}}}}})"),
    );
}

/// Injects a fault; returns the time from its end to the next delivery.
async fn inject(
    fault: RabbitMqFault,
    scenario: &FaultScenario,
    server: &mut RabbitServer,
    proxy: &Proxy,
) -> Duration {
    let channels_lost = scenario.status.snapshot().channels_lost;
    match fault {
        RabbitMqFault::NodeRestarted => {
            assert_no_refused_acks(server);
            tokio::task::block_in_place(|| {
                server.stop();
                server.start_again().expect("started again");
            });
        }
        RabbitMqFault::ConnectionReset => proxy.reset(),
        // A soft error: `basic.get` of a queue that does not exist.
        RabbitMqFault::ChannelClosed => tokio::task::block_in_place(|| {
            eval_for_consumers(
                server,
                "rabbit_channel_common:do(Channel, {'basic.get', 0, <<\"no such queue\">>, false})",
            );
        }),
        // As when a queue is deleted or its leader moves: the broker sends `basic.cancel`, and the channel
        // remains open with its unacknowledged deliveries.
        RabbitMqFault::ConsumerCancelled => tokio::task::block_in_place(|| {
            let expression = "Cancel = {'basic.cancel', Tag, true}, rabbit_channel_common:do(Channel, Cancel), rabbit_channel:send_command(Channel, Cancel)";
            eval_for_consumers(server, expression);
        }),
        RabbitMqFault::ConsumerLost => tokio::task::block_in_place(|| lose_consumer(server)),
        RabbitMqFault::QueueDeleted => {
            // A deleted queue loses its messages, so it has to be empty.
            scenario.load.pause();
            let settled = || {
                let all = scenario.load.sent();
                scenario.load.confirmed() == all
                    && scenario.effects.count() == all
                    && scenario.status.snapshot().unacked == 0
            };
            scenario.wait_until("the queue is empty", settled).await;
            tokio::task::block_in_place(|| server.control(&["-q", "delete_queue", QUEUE]))
                .expect("deleted");
            scenario.load.resume();
        }
        RabbitMqFault::MemoryAlarm => {
            tokio::task::block_in_place(|| {
                server
                    .control(&["-q", "set_vm_memory_high_watermark", "0"])
                    .expect("an alarm");
                std::thread::sleep(Duration::from_millis(500));
                server
                    .control(&["-q", "set_vm_memory_high_watermark", "0.8"])
                    .expect("no alarm");
            });
            let (fault_ended, delivered) = (Instant::now(), scenario.status.snapshot().delivered);
            scenario
                .wait_until("the source receives a delivery", || {
                    scenario.status.snapshot().delivered > delivered
                })
                .await;
            assert_eq!(
                scenario.status.snapshot().channels_lost,
                channels_lost,
                "an alarm must close no channel"
            );
            return fault_ended.elapsed();
        }
    }
    scenario.consumes_again(channels_lost, Instant::now()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_fault_of_a_node_loses_or_doubles_an_effect_or_causes_a_refused_ack() {
    let length = RunLength::from_env();
    let mut server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let proxy = Proxy::to(server.port()).expect("a port");
    let url = server
        .url()
        .replacen(&server.port().to_string(), &proxy.port().to_string(), 1);
    let mut faults: Vec<RabbitMqFault> = FAULTS
        .into_iter()
        .flat_map(|fault| vec![fault; length.rounds])
        .collect();
    fastrand::shuffle(&mut faults);
    FaultScenario::run(
        RabbitMq::queue(QUEUE).url(url),
        vec![server.url()],
        &length,
        async |scenario| {
            for fault in faults {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(100..600))).await;
                let after = inject(fault, scenario, &mut server, &proxy).await;
                println!("{fault:?}: consuming again after {after:.2?}");
                assert!(
                    !length.is_long() || after <= MAX_RECOVERY_TIME,
                    "{fault:?}: after {after:?}"
                );
            }
        },
    )
    .await;
    assert_no_refused_acks(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_single_active_consumer_consumes_again_with_unsettled_deliveries() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    // The queue assigns messages to the lost consumer up to its prefetch, and these are not ready. Only
    // ready messages show the fault, so there are more messages than the prefetch.
    let source = RabbitMq::queue(QUEUE)
        .url(server.url())
        .single_active_consumer()
        .prefetch(2)
        .connect(ConnectOptions::default())
        .await
        .expect("opened");
    let mut source: Box<dyn Source> = Box::new(source);
    let connection =
        lapin::Connection::connect(&server.url(), lapin::ConnectionProperties::default())
            .await
            .expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    let publish = async |body: &'static str| {
        let options = lapin::options::BasicPublishOptions::default();
        let sent = channel.basic_publish(
            "".into(),
            QUEUE.into(),
            options,
            body.as_bytes(),
            lapin::BasicProperties::default(),
        );
        sent.await.expect("sent");
    };
    publish("held").await;
    let mut into = Vec::new();
    source
        .receive(Limit::new(1, 1), &mut into)
        .await
        .expect("received");
    tokio::task::block_in_place(|| lose_consumer(&server));
    publish("behind").await;
    publish("ready").await;
    let (timeout, mut bodies) = (tokio::time::Instant::now() + TIMEOUT, Vec::new());
    while bodies.len() < 2 {
        let mut into = Vec::new();
        let receiving =
            tokio::time::timeout_at(timeout, source.receive(Limit::new(9, 1_000), &mut into));
        receiving.await.expect("in time").expect("received");
        bodies.extend(into.into_iter().filter_map(|incoming| match incoming {
            Incoming::Delivery(delivery) => Some(delivery.message.body),
            Incoming::Revoked(_) => None,
        }));
    }
    assert_eq!(
        bodies,
        ["held", "behind"],
        "the unsettled deliveries are redelivered on a new channel"
    );
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed");
    assert_no_refused_acks(&server);
}

/// The publisher's channel accepts messages and confirms nothing, as when the queue's leader moved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half a minute; cargo xtask faults runs it"]
async fn a_dead_letter_that_is_never_confirmed_is_published_again() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let status = RabbitMqStatus::new();
    let source = RabbitMq::queue(QUEUE)
        .url(server.url())
        .status(status.clone())
        .connect(ConnectOptions::default())
        .await
        .expect("opened");
    let mut source: Box<dyn Source> = Box::new(source);
    let connection =
        lapin::Connection::connect(&server.url(), lapin::ConnectionProperties::default())
            .await
            .expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    for round in 1..=2 {
        let options = lapin::options::BasicPublishOptions::default();
        let sent = channel.basic_publish(
            "".into(),
            QUEUE.into(),
            options,
            b"refused",
            lapin::BasicProperties::default(),
        );
        sent.await.expect("sent");
        let mut into = Vec::new();
        source
            .receive(Limit::new(1, 1), &mut into)
            .await
            .expect("received");
        let Some(Incoming::Delivery(delivery)) = into.pop() else {
            panic!("no delivery")
        };
        if round == 2 {
            // Suspends all channels but the consuming one: the publisher's, and the test's own,
            // which is no longer needed.
            let program = "Consuming = [proplists:get_value(channel_pid, C) || C <- rabbit_amqqueue:consumers_all(<<\"/\">>)], [sys:suspend(C) || C <- rabbit_channel:list() -- Consuming].";
            tokio::task::block_in_place(|| server.control(&["-q", "eval", program]))
                .expect("suspended");
        }
        source
            .settle(&mut vec![Settled::new(
                delivery,
                Settlement::Reject(Reason::Refused),
            )])
            .await
            .expect("settled");
        let deadline = Instant::now() + TIMEOUT;
        while status.snapshot().copies < round {
            assert!(Instant::now() < deadline, "{:?}", status.snapshot());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert!(
        status.snapshot().copy_retries > 0,
        "no confirm timed out, so this test checks nothing"
    );
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed");
    assert_no_refused_acks(&server);
}

/// Three nodes start slowly, so only `cargo xtask faults` runs it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "starts three nodes; cargo xtask faults runs it"]
async fn a_node_of_a_cluster_is_killed_and_another_takes_over() {
    // A delay queue whose target lost its leader dead-letters the message again after three
    // minutes.
    let length = RunLength {
        timeout: Duration::from_secs(600),
        ..RunLength::from_env()
    };
    let mut cluster = tokio::task::spawn_blocking(RabbitCluster::start)
        .await
        .expect("no panic")
        .expect("a cluster");
    let urls = cluster.urls();
    FaultScenario::run(
        RabbitMq::queue(QUEUE).urls(&urls),
        urls.clone(),
        &length,
        async |scenario| {
            for round in 0..length.rounds.min(3) {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(100..600))).await;
                let before = (scenario.effects.count(), Instant::now());
                // A restarted node truncates its log.
                assert_no_refused_acks(&cluster.nodes()[round]);
                tokio::task::block_in_place(|| cluster.node_mut(round).kill());
                let wanted = before.0 + length.rate as usize;
                scenario
                    .wait_until("messages are handled while a node is down", || {
                        scenario.effects.count() > wanted
                    })
                    .await;
                println!(
                    "node {round} killed: a second's messages handled after {:.2?}",
                    before.1.elapsed()
                );
                tokio::task::block_in_place(|| {
                    cluster
                        .node_mut(round)
                        .start_again()
                        .expect("started again")
                });
                // As in a rolling restart.
                let next = &cluster.nodes()[(round + 1) % 3];
                let critical = || {
                    tokio::task::block_in_place(|| {
                        next.control(&[
                            "-q",
                            "eval",
                            "rabbit_quorum_queue:list_with_minimum_quorum().",
                        ])
                    })
                };
                scenario
                    .wait_until("the queues can spare the next node", || {
                        critical().is_ok_and(|queues| queues.trim() == "[]")
                    })
                    .await;
            }
        },
    )
    .await;
    cluster.nodes().iter().for_each(assert_no_refused_acks);
}
