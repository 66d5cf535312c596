//! All that a RabbitMQ node does to its consumers, at random times under load: no message is lost,
//! none has its effect twice, and the broker never refuses an acknowledgement.
//!
//! One of each here; `cargo xtask faults` plays ten of each at 2,000 messages a second.
#![forbid(unsafe_code)]

mod load;
mod memory;
mod poison;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use oncegate_amqp::{RabbitMq, RabbitMqStatus};
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Incoming, Limit, Open, Settled, Source};
use oncegate_core::{Consumer, Guarantee, IdSource, MemoryStore};
use oncegate_testkit::proxy::Proxy;
use oncegate_testkit::servers::{RabbitCluster, RabbitServer};

use load::{Effects, Load};

const QUEUE: &str = "payments";
/// How long anything may take before the run gives up. How long it took is printed, and judged in
/// the long run.
const PATIENCE: Duration = Duration::from_secs(120);
/// What the long run asks for.
const BACK_WITHIN: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    NodeRestarted,
    ConnectionReset,
    ChannelClosed,
    ConsumerCancelled,
    ConsumerForgotten,
    QueueDeleted,
    MemoryAlarm,
}

const FAULTS: [Fault; 7] = [
    Fault::ConnectionReset,
    Fault::ChannelClosed,
    Fault::ConsumerCancelled,
    Fault::ConsumerForgotten,
    Fault::QueueDeleted,
    Fault::MemoryAlarm,
    Fault::NodeRestarted,
];

/// How long a run is.
struct Length {
    rounds: usize,
    rate: u32,
    /// How long it may take, once nothing more happens, until each message has its effect.
    patience: Duration,
}

impl Length {
    /// As the environment says; one round at a rate that leaves room for other tests, by default.
    fn from_env() -> Self {
        let number = |name: &str, usual| {
            std::env::var(name)
                .ok()
                .map_or(usual, |text| text.parse().expect("a number"))
        };
        let rounds = number("ONCEGATE_FAULT_ROUNDS", 1) as usize;
        Self {
            rounds,
            rate: number("ONCEGATE_FAULT_RATE", 500),
            patience: PATIENCE,
        }
    }

    fn is_long(&self) -> bool {
        self.rounds > 1
    }
}

/// A consumer under load.
struct Stage {
    load: Arc<Load>,
    effects: Effects,
    status: RabbitMqStatus,
}

impl Stage {
    /// Runs the play between the start of the load and its end, then drains and judges.
    async fn play(
        source: RabbitMq,
        urls: Vec<String>,
        length: &Length,
        play: impl AsyncFnOnce(&Self),
    ) {
        let status = RabbitMqStatus::new();
        let stage = Self {
            load: Load::new(urls, QUEUE, length.rate),
            effects: Effects::default(),
            status: status.clone(),
        };
        let consumer = Consumer::builder()
            .source(source.status(status))
            .store(MemoryStore::new())
            .guarantee(Guarantee::AtMostOnce)
            .allow_volatile_store()
            .id(IdSource::message_id())
            // What fails waits in the source.
            .max_inline_retries(0)
            .handler(stage.effects.clone());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
        let (publishing, begun) = (tokio::spawn(Arc::clone(&stage.load).run()), Instant::now());
        stage
            .until("the first effects", || stage.effects.count() > 50)
            .await;
        play(&stage).await;
        stage.load.end();
        publishing.await.expect("no panic");
        let all_done = || {
            stage.effects.count() == stage.load.confirmed() && stage.status.snapshot().unacked == 0
        };
        stage
            .within(length.patience, "each message has its effect", all_done)
            .await;
        let took = begun.elapsed();
        stop.send(()).expect("the consumer runs");
        running.await.expect("no panic").expect("a clean end");
        let read = stage.status.snapshot();
        println!(
            "{} confirmed in {took:.1?} ({:.0}/s asked for {}), {} published again; 0 lost; most effects of one: {}; {} failures, {} refused\n{read:?}",
            stage.load.confirmed(),
            stage.load.confirmed() as f64 / took.as_secs_f64(),
            length.rate,
            stage.load.again(),
            stage.effects.most(),
            stage.effects.failures(),
            stage.effects.refused().len(),
        );
        assert_eq!(stage.effects.most(), 1, "an effect happened twice");
        assert_eq!(
            stage.effects.count(),
            stage.load.sent(),
            "an effect without a message"
        );
        assert!(
            stage.effects.failures() > 0 && !stage.effects.refused().is_empty(),
            "nothing failed"
        );
        let in_doubt = load::take_all(&stage.load.urls[0], &format!("{QUEUE}.in-doubt")).await;
        assert!(
            in_doubt.is_empty(),
            "of no message it is unknown what became of it: {in_doubt:?}"
        );
        let dead = load::take_all(&stage.load.urls[0], &format!("{QUEUE}.dead-letters")).await;
        assert_eq!(
            dead,
            stage.effects.refused(),
            "what was refused stands in the dead letters, and nothing else"
        );
    }

    async fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        self.within(PATIENCE, what, is_so).await;
    }

    async fn within(&self, patience: Duration, what: &str, is_so: impl Fn() -> bool) {
        let end = Instant::now() + patience;
        while !is_so() {
            assert!(
                Instant::now() < end,
                "not within {patience:?}: {what}\n{self:?}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a new channel has brought something, and says how long after `back` that was.
    async fn consumes_again(&self, reconnects: u64, back: Instant) -> Duration {
        self.until("the channel is lost", || {
            self.status.snapshot().reconnects > reconnects
        })
        .await;
        let delivered = self.status.snapshot().delivered;
        self.until("it consumes again", || {
            self.status.snapshot().delivered > delivered
        })
        .await;
        back.elapsed()
    }
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = (
            self.load.sent(),
            self.load.confirmed(),
            self.effects.count(),
        );
        f.debug_struct("Stage")
            .field("sent_confirmed_effects", &counts)
            .field("status", &self.status.snapshot())
            .finish()
    }
}

/// Looks for refused acknowledgements in what a node has logged since its last start.
fn no_refusals(server: &RabbitServer) {
    let log = std::fs::read_to_string(server.directory().join("server.log")).expect("a log");
    let refused: Vec<&str> = log
        .lines()
        .filter(|line| line.to_lowercase().contains("precondition_failed"))
        .collect();
    assert!(refused.is_empty(), "406: {refused:#?}");
}

/// Lets the node do something with each `Channel` that consumes, and its consumer's `Tag`.
fn to_consumers(server: &RabbitServer, does: &str) {
    let program = [
        &format!("[begin {does} end || C <- rabbit_amqqueue:consumers_all(<<\"/\">>)"),
        "Channel <- [proplists:get_value(channel_pid, C)]",
        "Tag <- [proplists:get_value(consumer_tag, C)]].",
    ];
    let done = server
        .control(&["-q", "eval", &program.join(", ")])
        .expect("done");
    assert!(done.contains("ok"), "nobody consumes: {done}");
}

/// As when the queue moved to another node and its consumer did not come along: nothing comes, and
/// nobody says so.
fn forget(server: &RabbitServer) {
    let queue = format!("{{resource, <<\"/\">>, queue, <<\"{QUEUE}\">>}}");
    to_consumers(
        server,
        &format!("gen_server2:cast(Channel, {{queue_event, {queue}, {{none, {{machine, eol}}}}}})"),
    );
}

/// Does it, and says how long after it was over the consumer consumed again.
async fn happens(
    fault: Fault,
    stage: &Stage,
    server: &mut RabbitServer,
    proxy: &Proxy,
) -> Duration {
    let reconnects = stage.status.snapshot().reconnects;
    match fault {
        Fault::NodeRestarted => {
            no_refusals(server);
            tokio::task::block_in_place(|| {
                server.stop();
                server.start_again().expect("started again");
            });
        }
        Fault::ConnectionReset => proxy.reset(),
        // As any soft error of a channel: it asks for what is not there.
        Fault::ChannelClosed => tokio::task::block_in_place(|| {
            to_consumers(
                server,
                "rabbit_channel:do(Channel, {'basic.get', 0, <<\"no such queue\">>, false})",
            );
        }),
        // As when a queue is gone or moves: the queue has the consumer no more, the client is told,
        // and the channel stays open with all that it holds.
        Fault::ConsumerCancelled => tokio::task::block_in_place(|| {
            let does = "Cancel = {'basic.cancel', Tag, true}, rabbit_channel:do(Channel, Cancel), rabbit_channel:send_command(Channel, Cancel)";
            to_consumers(server, does);
        }),
        Fault::ConsumerForgotten => tokio::task::block_in_place(|| forget(server)),
        Fault::QueueDeleted => {
            // What stands in a queue goes with it, so nothing is to stand there.
            stage.load.pause();
            let settled = || {
                let all = stage.load.sent();
                stage.load.confirmed() == all
                    && stage.effects.count() == all
                    && stage.status.snapshot().unacked == 0
            };
            stage.until("the queue is empty", settled).await;
            tokio::task::block_in_place(|| server.control(&["-q", "delete_queue", QUEUE]))
                .expect("deleted");
            stage.load.go_on();
        }
        Fault::MemoryAlarm => {
            tokio::task::block_in_place(|| {
                server
                    .control(&["-q", "set_vm_memory_high_watermark", "0"])
                    .expect("an alarm");
                std::thread::sleep(Duration::from_millis(500));
                server
                    .control(&["-q", "set_vm_memory_high_watermark", "0.8"])
                    .expect("no alarm");
            });
            let (back, delivered) = (Instant::now(), stage.status.snapshot().delivered);
            stage
                .until("it consumes again", || {
                    stage.status.snapshot().delivered > delivered
                })
                .await;
            assert_eq!(
                stage.status.snapshot().reconnects,
                reconnects,
                "an alarm costs no channel"
            );
            return back.elapsed();
        }
    }
    stage.consumes_again(reconnects, Instant::now()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_node_does_nothing_is_lost_doubled_or_refused() {
    let length = Length::from_env();
    let mut server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let proxy = Proxy::to(server.port()).expect("a port");
    let url = server
        .url()
        .replacen(&server.port().to_string(), &proxy.port().to_string(), 1);
    let mut faults: Vec<Fault> = FAULTS
        .into_iter()
        .flat_map(|fault| vec![fault; length.rounds])
        .collect();
    fastrand::shuffle(&mut faults);
    Stage::play(
        RabbitMq::queue(QUEUE).url(url),
        vec![server.url()],
        &length,
        async |stage| {
            for fault in faults {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(100..600))).await;
                let after = happens(fault, stage, &mut server, &proxy).await;
                println!("{fault:?}: consuming again after {after:.2?}");
                assert!(
                    !length.is_long() || after <= BACK_WITHIN,
                    "{fault:?}: after {after:?}"
                );
            }
        },
    )
    .await;
    no_refusals(&server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_active_consumer_that_the_broker_forgot_consumes_again_though_it_holds_something()
{
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    // The queue hands it what it has room for all the same, to no one; what stands ready shows
    // that.
    let source = RabbitMq::queue(QUEUE)
        .url(server.url())
        .single_active_consumer()
        .prefetch(2)
        .open()
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
        .receive(Limit { count: 1, bytes: 1 }, &mut into)
        .await
        .expect("received");
    tokio::task::block_in_place(|| forget(&server));
    publish("behind").await;
    publish("ready").await;
    let (patience, mut bodies) = (tokio::time::Instant::now() + PATIENCE, Vec::new());
    while bodies.len() < 2 {
        let mut into = Vec::new();
        let receiving = tokio::time::timeout_at(
            patience,
            source.receive(
                Limit {
                    count: 9,
                    bytes: 1_000,
                },
                &mut into,
            ),
        );
        receiving.await.expect("in time").expect("received");
        bodies.extend(into.into_iter().filter_map(|incoming| match incoming {
            Incoming::Delivery(delivery) => Some(delivery.message.body),
            Incoming::Revoked(_) => None,
        }));
    }
    assert_eq!(
        bodies,
        ["held", "behind"],
        "they come again by a new channel"
    );
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed");
    no_refusals(&server);
}

/// The channel that dead letters travel on takes what comes and answers nothing, as it may when its
/// queue moves.
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
        .open()
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
            .receive(Limit { count: 1, bytes: 1 }, &mut into)
            .await
            .expect("received");
        let Some(Incoming::Delivery(delivery)) = into.pop() else {
            panic!("no delivery")
        };
        if round == 2 {
            // All but the one that consumes: the publisher's, and the test's own, which is not
            // needed any more.
            let program = "Consuming = [proplists:get_value(channel_pid, C) || C <- rabbit_amqqueue:consumers_all(<<\"/\">>)], [sys:suspend(C) || C <- rabbit_channel:list() -- Consuming].";
            tokio::task::block_in_place(|| server.control(&["-q", "eval", program]))
                .expect("suspended");
        }
        source
            .settle(&mut vec![Settled {
                delivery,
                settlement: Settlement::Reject(Reason::Refused),
                story: None,
            }])
            .await
            .expect("settled");
        let patience = Instant::now() + PATIENCE;
        while status.snapshot().copies < round {
            assert!(Instant::now() < patience, "{:?}", status.snapshot());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    assert!(
        status.snapshot().copy_retries > 0,
        "the channel answered: the test proves nothing"
    );
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed");
    no_refusals(&server);
}

/// Three nodes start slowly: it is left to `cargo xtask faults`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "starts three nodes; cargo xtask faults runs it"]
async fn a_node_of_a_cluster_is_killed_and_another_takes_over() {
    // A delay queue that was handing a message on to a leader that is gone tries again after three
    // minutes.
    let length = Length {
        patience: Duration::from_secs(600),
        ..Length::from_env()
    };
    let mut cluster = tokio::task::spawn_blocking(RabbitCluster::start)
        .await
        .expect("no panic")
        .expect("a cluster");
    let urls = cluster.urls();
    Stage::play(
        RabbitMq::queue(QUEUE).urls(&urls),
        urls.clone(),
        &length,
        async |stage| {
            for round in 0..length.rounds.min(3) {
                tokio::time::sleep(Duration::from_millis(fastrand::u64(100..600))).await;
                let before = (stage.effects.count(), Instant::now());
                // A node that starts again writes its log anew.
                no_refusals(&cluster.nodes()[round]);
                tokio::task::block_in_place(|| cluster.node_mut(round).kill());
                let wanted = before.0 + length.rate as usize;
                stage
                    .until("messages are handled while a node is down", || {
                        stage.effects.count() > wanted
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
                // As whoever restarts the nodes of a cluster one after the other has to wait.
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
                stage
                    .until("the queues can spare the next node", || {
                        critical().is_ok_and(|queues| queues.trim() == "[]")
                    })
                    .await;
            }
        },
    )
    .await;
    cluster.nodes().iter().for_each(no_refusals);
}
