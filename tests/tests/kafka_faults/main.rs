//! Faults of Kafka brokers and consumers: no message is lost, at most once has no second effect,
//! and no committed offset decreases.
//!
//! Each scenario is one function with a short test and a long one, which `cargo xtask kafka-faults`
//! runs and which prints measurements.
//! `dead_letters` has no fault and no short test: it measures.
#![forbid(unsafe_code)]

mod dead_letters;
mod poison;
mod rig;

use std::time::{Duration, Instant};

use oncegate_testkit::servers::{KafkaServer, KafkaServers};
use rustix::process::Signal;

use crate::rig::{LEASE, Rig, Violations};

/// The time limit of each wait, also on an overloaded machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// The time limit of recovery after a broker is back, on an idle machine.
const RECOVERY_TIME: Duration = Duration::from_secs(30);
/// Whether nothing was lost, nothing happened or began twice, each key stayed in order, and no log
/// was taken for cut, since none was; and whether each message in doubt is explained: by one of so
/// many that ran in a process that was ended or frozen, or by a lease that was lost, which its
/// consumer counts.
fn is_kept(violations: &Violations, cut_short: usize) -> bool {
    let Violations {
        lost,
        effects_twice,
        starts_twice,
        out_of_order,
        logs_cut,
        in_doubt,
        fenced,
    } = *violations;
    [lost, effects_twice, starts_twice, out_of_order, logs_cut] == [0; 5]
        && in_doubt <= cut_short + fenced
}

async fn broker() -> KafkaServer {
    tokio::task::spawn_blocking(|| KafkaServer::start().expect("a broker"))
        .await
        .expect("a broker")
}

fn shared_broker() -> String {
    oncegate_testkit::kafka_brokers().unwrap_or_else(|missing| panic!("{missing}"))
}

/// Up to eight members that join and leave every three seconds, with handlers that take a second.
async fn members_come_and_go(for_so_long: Duration) {
    const KEYS: usize = 48;
    let (turn, most) = (Duration::from_secs(3), 8);
    // A key handles one message per second, so there is work until the end.
    let each = for_so_long.as_secs() as usize;
    let rig = Rig::new(shared_broker(), 8, 1).await;
    rig.publish(KEYS, 0..each, Duration::from_secs(1));
    let offsets = rig.watch_offsets();
    let join = || rig.consumer("at-most-once", &[]);
    let (begun, mut members, mut leaving, mut joined, mut grows) =
        (Instant::now(), vec![join(), join()], Vec::new(), 2, true);
    let mut full = 0;
    while begun.elapsed() < for_so_long {
        tokio::time::sleep(turn).await;
        grows = if grows {
            members.len() < most
        } else {
            members.len() <= 2
        };
        if grows {
            members.push(join());
            joined += 1;
            if members.len() == most {
                // One partition for each.
                for member in joined - most..joined {
                    rig.until_assigned(member as u32, 1, WAIT_TIMEOUT).await;
                }
                full += 1;
            }
        } else {
            leaving.push(tokio::spawn(members.remove(0).leave()));
        }
    }
    let outcomes_after = rig
        .until_ids_with_outcome(KEYS * each, WAIT_TIMEOUT + for_so_long * 3)
        .await;
    rig.until_committed(WAIT_TIMEOUT).await;
    leaving.extend(
        members
            .into_iter()
            .map(|member| tokio::spawn(member.leave())),
    );
    for left in leaving {
        left.await.expect("the member leaves the group");
    }
    let (seen, violations) = (offsets.end(), rig.count_violations(KEYS, each));
    println!(
        "members: {joined} joined, {full} times {most} at once, {} messages, {violations:?}, {} offset regressions in {} samples, all outcomes {outcomes_after:?} after the last change",
        KEYS * each,
        seen.regressions,
        seen.samples
    );
    // Each member left after its handlers had ended.
    assert!(
        is_kept(&violations, 0) && seen.regressions == 0,
        "{}",
        rig.logs()
    );
    assert!(seen.samples > 10 && full > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn members_join_and_leave_every_three_seconds() {
    members_come_and_go(Duration::from_secs(30)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "five minutes: cargo xtask kafka-faults"]
async fn long_members_join_and_leave_every_three_seconds() {
    members_come_and_go(Duration::from_secs(300)).await;
}

/// The fault of the broker.
#[derive(Clone, Copy, Debug)]
enum BrokerFault {
    Frozen(Duration),
    Killed,
}

/// Two consumers under load during an outage of the broker. Messages that are published afterwards
/// are handled within `soon`.
async fn the_broker_fails(fault: BrokerFault, soon: Duration) {
    const KEYS: usize = 40;
    const EARLY: usize = 30;
    const ALL: usize = 35;
    const PARTITIONS: usize = 4;
    let mut server = broker().await;
    let rig = Rig::new(server.brokers(), PARTITIONS as i32, 1).await;
    rig.publish(KEYS, 0..EARLY, Duration::from_millis(150));
    let offsets = rig.watch_offsets();
    let members = [
        rig.consumer("at-most-once", &[]),
        rig.consumer("at-most-once", &[]),
    ];
    rig.until_effects(KEYS * EARLY / 4, WAIT_TIMEOUT).await;
    let server = tokio::task::spawn_blocking(move || {
        match fault {
            BrokerFault::Frozen(time) => {
                server.freeze();
                std::thread::sleep(time);
                server.thaw();
            }
            BrokerFault::Killed => {
                server.kill();
                std::thread::sleep(Duration::from_secs(3));
                server.start_again().expect("the broker again");
            }
        }
        server
    });
    let server = server.await.expect("the broker again");
    let back = Instant::now();
    rig.publish(KEYS, EARLY..ALL, Duration::ZERO);
    let handled = rig.until_ids_with_outcome(KEYS * ALL, WAIT_TIMEOUT).await;
    let again = back.elapsed();
    rig.until_committed(WAIT_TIMEOUT).await;
    let committed = back.elapsed();
    // A client that lost the metadata of its brokers is replaced.
    for member in &members {
        member.until_assigned().await;
    }
    for member in members {
        member.leave().await;
    }
    let (seen, violations) = (offsets.end(), rig.count_violations(KEYS, ALL));
    println!(
        "broker {fault:?}: {} messages, {violations:?}, {} regressions in {} samples, all handled {again:?} after it was back ({handled:?} after the last was published), committed after {committed:?}",
        KEYS * ALL,
        seen.regressions,
        seen.samples
    );
    // Seen once, on two partitions, with nothing lost or handled twice: a broker that thaws may read
    // a commit from a closed connection after one from the connection that replaced it. The next
    // commit corrects that.
    let most = match fault {
        BrokerFault::Frozen(_) => PARTITIONS,
        BrokerFault::Killed => 0,
    };
    assert!(
        is_kept(&violations, 0) && seen.regressions <= most,
        "{}",
        rig.logs()
    );
    assert!(
        again < soon,
        "consuming again after {again:?}\n{}",
        rig.logs()
    );
    drop(server);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_is_killed_and_restarted() {
    the_broker_fails(BrokerFault::Killed, WAIT_TIMEOUT).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_is_frozen_for_longer_than_a_session() {
    the_broker_fails(BrokerFault::Frozen(Duration::from_secs(8)), WAIT_TIMEOUT).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: cargo xtask kafka-faults"]
async fn long_a_broker_is_frozen_for_twenty_seconds() {
    the_broker_fails(BrokerFault::Frozen(Duration::from_secs(20)), RECOVERY_TIME).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: cargo xtask kafka-faults"]
async fn long_a_broker_is_killed_five_times() {
    for _ in 0..5 {
        the_broker_fails(BrokerFault::Killed, RECOVERY_TIME).await;
    }
}

/// Each of three brokers is killed and restarted, one after the other.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: cargo xtask kafka-faults"]
async fn long_one_of_three_brokers_is_killed() {
    const KEYS: usize = 40;
    const EACH: usize = 120;
    let started = tokio::task::spawn_blocking(|| KafkaServers::start().expect("three brokers"));
    let mut servers = started.await.expect("three brokers");
    let rig = Rig::new(servers.brokers(), 6, 3).await;
    rig.publish(KEYS, 0..EACH, Duration::from_millis(400));
    let offsets = rig.watch_offsets();
    let members = [
        rig.consumer("at-most-once", &[]),
        rig.consumer("at-most-once", &[]),
    ];
    let mut again = Vec::new();
    for node in 0..servers.count() {
        rig.until_effects(KEYS * EACH * (node + 1) / 5, WAIT_TIMEOUT * 2)
            .await;
        let killed = tokio::task::spawn_blocking(move || {
            servers.node_mut(node).kill();
            std::thread::sleep(Duration::from_secs(5));
            servers
                .node_mut(node)
                .start_again()
                .expect("the broker again");
            servers
        });
        servers = killed.await.expect("the broker again");
        // A message of each key, in partitions of all brokers.
        again.push(rig.until_each_key_starts_again(KEYS, WAIT_TIMEOUT).await);
    }
    rig.until_ids_with_outcome(KEYS * EACH, WAIT_TIMEOUT * 3)
        .await;
    rig.until_committed(WAIT_TIMEOUT).await;
    for member in members {
        member.leave().await;
    }
    let (seen, violations) = (offsets.end(), rig.count_violations(KEYS, EACH));
    println!(
        "one of three brokers killed, three times: {} messages, {violations:?}, {} regressions in {} samples, each key again after {again:?}",
        KEYS * EACH,
        seen.regressions,
        seen.samples
    );
    assert!(
        is_kept(&violations, 0) && seen.regressions == 0,
        "{}",
        rig.logs()
    );
    assert!(
        again.iter().all(|again| *again < RECOVERY_TIME),
        "consuming again after {again:?}\n{}",
        rig.logs()
    );
    drop(servers);
}

/// Shorter than three leases.
const SESSION: &str = "session.timeout.ms=3000";

/// The fault of one of two consumers.
#[derive(Clone, Copy, Debug)]
enum ConsumerFault {
    Killed,
    Frozen(Duration),
}

async fn a_consumer_fails(fault: ConsumerFault) {
    const KEYS: usize = 40;
    const EACH: usize = 20;
    const PARTITIONS: usize = 4;
    let rig = Rig::new(shared_broker(), PARTITIONS as i32, 1).await;
    rig.publish(KEYS, 0..EACH, Duration::from_millis(150));
    let offsets = rig.watch_offsets();
    let member = || rig.consumer("at-most-once", &["--in-flight=16", "--property", SESSION]);
    let mut members = vec![member(), member()];
    rig.until_assigned(0, PARTITIONS / 2, WAIT_TIMEOUT).await;
    rig.until_assigned(1, PARTITIONS / 2, WAIT_TIMEOUT).await;
    rig.until_effects(KEYS * EACH / 4, WAIT_TIMEOUT).await;
    let since = Instant::now();
    match fault {
        ConsumerFault::Killed => {
            members.remove(0).signal(Signal::KILL);
            rig.until_assigned(1, PARTITIONS, WAIT_TIMEOUT).await;
        }
        ConsumerFault::Frozen(time) => {
            members[0].signal(Signal::STOP);
            // Longer than the session timeout: the other consumer gets its partitions and takes
            // over its
            // running messages.
            tokio::time::sleep(time).await;
            rig.until_assigned(1, PARTITIONS, WAIT_TIMEOUT).await;
            members[0].signal(Signal::CONT);
            rig.until_logged("lost=true", WAIT_TIMEOUT).await;
        }
    }
    rig.until_ids_with_outcome(KEYS * EACH, WAIT_TIMEOUT * 2)
        .await;
    rig.until_committed(WAIT_TIMEOUT).await;
    let took = since.elapsed();
    for member in members {
        member.leave().await;
    }
    let (seen, violations) = (offsets.end(), rig.count_violations(KEYS, EACH));
    println!(
        "consumer {fault:?}: {} messages, {violations:?}, {} regressions in {} samples, all outcomes known and offsets committed after {took:?}",
        KEYS * EACH,
        seen.regressions,
        seen.samples
    );
    assert!(
        is_kept(&violations, 16) && seen.regressions == 0,
        "{}",
        rig.logs()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_killed() {
    a_consumer_fails(ConsumerFault::Killed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_is_frozen_for_three_leases() {
    a_consumer_fails(ConsumerFault::Frozen(LEASE * 3)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: cargo xtask kafka-faults"]
async fn long_a_consumer_is_killed_or_frozen_ten_times() {
    for _ in 0..5 {
        a_consumer_fails(ConsumerFault::Killed).await;
        a_consumer_fails(ConsumerFault::Frozen(LEASE * 5)).await;
    }
}

/// A handler that runs longer than `max.poll.interval.ms`.
async fn a_slow_handler(takes: Duration) {
    const KEYS: usize = 4;
    let rig = Rig::new(shared_broker(), 2, 1).await;
    rig.publish(KEYS, 0..1, takes);
    // No lease is lost, even if a renewal is late, so a second start means a second delivery.
    let member = rig.consumer(
        "at-most-once",
        &[
            "--property",
            "max.poll.interval.ms=6500",
            "--lease-ms=60000",
        ],
    );
    rig.until_ids_with_outcome(KEYS, takes + WAIT_TIMEOUT).await;
    rig.until_committed(WAIT_TIMEOUT).await;
    // Checked before the member leaves the group.
    let (revoked, exceeded) = (rig.logged("partition revoked"), rig.logged("poll interval"));
    member.leave().await;
    let violations = rig.count_violations(KEYS, 1);
    println!(
        "handler of {takes:?} with max.poll.interval.ms=6500: {violations:?}, {revoked} revocations"
    );
    assert!(is_kept(&violations, 0), "{}", rig.logs());
    assert_eq!((revoked, exceeded), (0, 0), "{}", rig.logs());
    // Each delivery has a granted claim or one of these outcomes; so each message was delivered
    // once.
    let outcomes = |outcome| rig.counted(outcome);
    assert_eq!(
        (outcomes("first"), outcomes("completed")),
        (KEYS, KEYS),
        "{}",
        rig.logs()
    );
    assert_eq!(
        ["reclaimed", "duplicate", "busy", "released"].map(outcomes),
        [0; 4],
        "{}",
        rig.logs()
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_is_slower_than_the_poll_interval() {
    a_slow_handler(Duration::from_secs(9)).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: cargo xtask kafka-faults"]
async fn long_a_handler_takes_five_times_the_poll_interval() {
    a_slow_handler(Duration::from_secs(33)).await;
}

/// The number of measurements for each backlog.
const ROUNDS: usize = 3;

/// The maximum memory in MiB of several consumers with this backlog; they run one after the other,
/// each in a new group.
async fn memory_with_a_backlog_of(count: usize) -> Vec<f64> {
    const KEYS: usize = 1_000;
    let server = broker().await;
    let rig = Rig::new(server.brokers(), 4, 1).await;
    rig.publish(KEYS, 0..count / KEYS, Duration::from_millis(50));
    let mut memory = Vec::new();
    for round in 0..ROUNDS {
        let before = rig.effects().len();
        let member = rig.consumer_of(
            &format!("{}-{round}", rig.name),
            "effectively-once",
            &["--in-flight=128"],
        );
        rig.until_effects(before + 1_000, WAIT_TIMEOUT).await;
        let (mut most, begun) = (0, Instant::now());
        while begun.elapsed() < Duration::from_secs(10) {
            most = most.max(member.memory());
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert!(
            rig.effects().len() - before < count,
            "nothing was left to wait"
        );
        memory.push(most as f64 / 1024.0);
    }
    println!("memory: {memory:.1?} MiB with a backlog of {count}");
    memory
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long: cargo xtask kafka-faults"]
async fn long_memory_does_not_grow_with_the_backlog() {
    let few = memory_with_a_backlog_of(50_000).await;
    let many = memory_with_a_backlog_of(5_000_000).await;
    let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
    let ratio = mean(&many) / mean(&few);
    println!("memory: {ratio:.2} times as much with a hundred times the backlog");
    assert!(
        ratio <= 1.2,
        "{few:.1?} and {many:.1?} MiB: it grows with the backlog"
    );
}
