//! Lost replies and late commands, because of the network or a stopped server.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oncegate_core::marker::{Effect, Guarantee, Marker, Operation, OperationKind, Token, Verdict};
use oncegate_core::{
    Consumer, Context, Error, Failure, FailureExt, Gate, Handler, IdSource, MemoryBroker, Message,
    Raw, RawBytes, RunOutcome, Store, StoreError,
};
use oncegate_redis::Redis;
use oncegate_testkit::proxy::{Proxy, RequestFault, contains};
use oncegate_testkit::servers::{RedisOptions, RedisServer};

use tokio::sync::mpsc::unbounded_channel;

use crate::sentinel_and_cluster::until_answered;
use crate::support::{
    DONE, GRANTED, SECOND, apply_one, at, claim, complete, key, operation, terms, verdicts,
};

const IDS: usize = 4_000;
const GATES: usize = 4;
const LOST_PERCENT: u8 = 5;

/// How many ids took effect never or more than once, while replies were lost.
struct Effects {
    skipped: usize,
    repeated: usize,
    lost_replies: u64,
}

/// Runs each id through a gate until the gate reports that it ran, behind a proxy that drops
/// replies.
async fn run_with_lost_replies(guarantee: Guarantee) -> Effects {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let random = Mutex::new(fastrand::Rng::with_seed(seed));
    let mut gates = Vec::new();
    for _ in 0..GATES {
        let store = Redis::at(format!("redis://127.0.0.1:{}", proxy.port())).allow_volatile_store();
        let gate = Gate::builder()
            .store(store)
            .guarantee(guarantee)
            .backoff(Duration::from_millis(1), Duration::from_millis(20));
        gates.push(gate.open().await.expect("a gate"));
    }
    // Only replies to commands on ids; connecting works as usual.
    proxy.inject_faults(move |request| {
        let about_id = contains(request, "processed:id-");
        let loses =
            about_id && random.lock().expect("the lock is not poisoned").u8(..100) < LOST_PERCENT;
        if loses {
            RequestFault::LoseReply
        } else {
            RequestFault::Pass
        }
    });
    let effects: Arc<Vec<AtomicU32>> = Arc::new((0..IDS).map(|_| AtomicU32::new(0)).collect());
    let share = IDS / GATES;
    let running = gates.into_iter().enumerate().map(|(which, gate)| {
        let effects = effects.clone();
        tokio::spawn(async move {
            for it in which * share..(which + 1) * share {
                let run = || {
                    gate.run(format!("id-{it}"), async || {
                        effects[it].fetch_add(1, Ordering::SeqCst);
                        Ok(())
                    })
                };
                // As a broker redelivers it.
                while !matches!(
                    run().await,
                    Ok(RunOutcome::Executed(()) | RunOutcome::AlreadyDone)
                ) {}
            }
        })
    });
    for done in futures_util::future::join_all(running).await {
        done.expect("no gate panicked");
    }
    let times = |wanted: fn(u32) -> bool| {
        effects
            .iter()
            .filter(|effect| wanted(effect.load(Ordering::SeqCst)))
            .count()
    };
    Effects {
        skipped: times(|it| it == 0),
        repeated: times(|it| it > 1),
        lost_replies: proxy.lost_replies(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_id_is_skipped_or_repeated_when_replies_are_lost() {
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        let Effects {
            skipped,
            repeated,
            lost_replies,
        } = run_with_lost_replies(guarantee).await;
        println!(
            "{guarantee:?}: {skipped} skipped, {repeated} doubled, {lost_replies} replies lost"
        );
        assert!(
            lost_replies > 200,
            "{lost_replies} lost: too few to prove anything"
        );
        assert_eq!((skipped, repeated), (0, 0), "{guarantee:?}");
    }
}

/// The control: `Guarantee::Bare` takes its own claim for a duplicate.
#[tokio::test(flavor = "multi_thread")]
async fn bare_skips_ids_when_replies_are_lost() {
    let Effects {
        skipped,
        repeated,
        lost_replies,
    } = run_with_lost_replies(Guarantee::Bare).await;
    println!("Bare: {skipped} skipped, {repeated} doubled, {lost_replies} replies lost");
    assert!(
        skipped > 20,
        "{skipped} skipped of {IDS}: too few to prove anything"
    );
}

const OLDER: u128 = 1;
const NEWER: u128 = 2;
const CLAIMS: usize = 600;

fn operations_on_all_ids(kind: OperationKind, token: u128, guarantee: Guarantee) -> Vec<Operation> {
    (0..CLAIMS)
        .map(|it| {
            operation(
                &format!("k{it}"),
                kind,
                token,
                u32::from(kind != OperationKind::Claim),
                terms(guarantee),
            )
        })
        .collect()
}

/// An older claim is abandoned while the server is stopped for 2 s, with commands in flight: some
/// arrive when the server continues, some only when a newer claim holds the ids. Returns how many
/// markers of the newer claim they changed.
async fn changed_by_late_commands(guarantee: Guarantee) -> usize {
    let mut server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let slow = Proxy::to(server.port()).expect("a proxy");
    let url = |port: u16| format!("redis://127.0.0.1:{port}");
    let short_timeout = |port: u16| {
        Redis::at(url(port))
            .timeout(Duration::from_millis(150))
            .allow_volatile_store()
    };
    let older: Vec<Redis> = (0..8)
        .map(|it| {
            short_timeout(if it % 2 == 0 {
                server.port()
            } else {
                slow.port()
            })
        })
        .collect();
    let newer = at(&url(server.port()));

    for answer in older[0]
        .apply(&operations_on_all_ids(
            OperationKind::Claim,
            OLDER,
            guarantee,
        ))
        .await
    {
        assert_eq!(answer.expect("a verdict"), GRANTED);
    }
    // Loads the script, so that late calls of it take effect.
    apply_one(
        &newer,
        operation("learns", OperationKind::Complete, 9, 1, terms(guarantee)),
    )
    .await
    .expect("a verdict");
    // Every store connects before the server is stopped, and finds out which commands it has.
    for store in &older {
        let clear = operation(
            "free",
            OperationKind::Clear(Effect::Nothing),
            9,
            1,
            terms(guarantee),
        );
        for _ in 0..3 {
            // A busy machine may exceed the short timeout.
            while apply_one(store, clear.clone()).await.is_err() {}
        }
    }
    newer.read_marker(&key("k0")).await.expect("a marker");
    server.freeze();
    slow.black_hole();
    let stopped = Instant::now();
    // Each store gives up after its third consecutive timeout; its commands are still in flight.
    let giving_up = older.iter().map(|store| async move {
        for kind in [
            OperationKind::Clear(Effect::Nothing),
            OperationKind::Renew,
            OperationKind::Clear(Effect::Nothing),
        ] {
            let answers = store
                .apply(&operations_on_all_ids(kind, OLDER, guarantee))
                .await;
            let abandoned = answers
                .iter()
                .filter(|answer| matches!(answer, Err(StoreError::Unknown(_))))
                .count();
            // Bare sends no renewals.
            assert!(
                abandoned == CLAIMS
                    || (guarantee == Guarantee::Bare && kind == OperationKind::Renew),
                "{abandoned} of {kind:?}"
            );
        }
    });
    futures_util::future::join_all(giving_up).await;
    tokio::time::sleep((2 * SECOND).saturating_sub(stopped.elapsed())).await;
    server.thaw();

    // Under load: the newer claim is repeated until it holds all ids.
    let deadline = Instant::now() + 30 * SECOND;
    let mut waiting = operations_on_all_ids(OperationKind::Claim, NEWER, guarantee);
    while !waiting.is_empty() {
        assert!(
            Instant::now() < deadline,
            "{} ids are never free",
            waiting.len()
        );
        let answers = newer.apply(&waiting).await;
        let mut granted = answers
            .into_iter()
            .map(|answer| matches!(answer, Ok(Verdict::Granted { .. })));
        waiting.retain(|_| !granted.next().unwrap_or(false));
    }
    slow.pass();
    until_idle(&server).await;

    let mut changed = 0;
    for it in 0..CLAIMS {
        changed += usize::from(
            match newer
                .read_marker(&key(&format!("k{it}")))
                .await
                .expect("a marker")
            {
                Marker::InProgress(hold) => hold.token != Token(NEWER),
                Marker::Done(None) => guarantee != Guarantee::Bare,
                _ => true,
            },
        );
    }
    if guarantee != Guarantee::Bare {
        let ends = newer
            .apply(&operations_on_all_ids(
                OperationKind::Complete,
                NEWER,
                guarantee,
            ))
            .await;
        changed += ends
            .into_iter()
            .filter(|answer| !matches!(answer, Ok(DONE)))
            .count();
    }
    changed
}

/// Waits until the server is idle.
async fn until_idle(server: &RedisServer) {
    let clients = || {
        server
            .reply("INFO stats")
            .expect("a reply")
            .lines()
            .find_map(|line| {
                line.strip_prefix("total_net_input_bytes:")?
                    .parse::<u64>()
                    .ok()
            })
    };
    let mut before = clients();
    let mut quiet = 0;
    while quiet < 5 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let now = clients();
        // INFO itself adds some bytes.
        let same = matches!((before, now), (Some(before), Some(now)) if now - before < 500);
        quiet = if same { quiet + 1 } else { 0 };
        before = now;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_late_command_of_an_older_claim_changes_a_newer_one() {
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        assert_eq!(
            changed_by_late_commands(guarantee).await,
            0,
            "{guarantee:?}"
        );
    }
    // The control: Bare deletes any marker.
    let changed = changed_by_late_commands(Guarantee::Bare).await;
    println!("Bare: {changed} of {CLAIMS} newer claims lost to late commands");
    assert!(changed > CLAIMS / 2, "{changed}: too few to prove anything");
}

/// The single claims that follow a refused group recognise their own tokens.
#[tokio::test(flavor = "multi_thread")]
async fn claims_of_new_ids_are_repeated_after_a_lost_reply() {
    const IDS: usize = 20;
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let store = at(&format!("redis://127.0.0.1:{}", proxy.port()));
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        let claims = |token| -> Vec<Operation> {
            let ids = (0..IDS).map(|it| format!("{guarantee:?}-{it}"));
            ids.map(|id| operation(&id, OperationKind::Claim, token, 0, terms(guarantee)))
                .collect()
        };
        until_answered(&store, claim("connects", 1)).await;
        let mut losses = 1;
        proxy.inject_faults(move |request| {
            if losses > 0 && contains(request, "Once-0") {
                losses -= 1;
                return RequestFault::LoseReply;
            }
            RequestFault::Pass
        });
        let lost = store.apply(&claims(1)).await;
        assert!(
            lost.iter()
                .all(|it| matches!(it, Err(StoreError::Unknown(_)))),
            "{lost:?}"
        );
        assert_eq!(verdicts(&store, &claims(1)).await, [GRANTED; IDS]);
        let others = verdicts(&store, &claims(2)).await;
        assert!(
            others.iter().all(|it| matches!(it, Verdict::Busy { .. })),
            "{others:?}"
        );
    }
    assert_eq!(proxy.lost_replies(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_reply_answers_no_other_request() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let store = Redis::at(format!("redis://127.0.0.1:{}", proxy.port())).timeout(SECOND / 4);
    assert_eq!(until_answered(&store, claim("warm", 1)).await, GRANTED);
    assert_eq!(
        until_answered(&store, complete("done", 1, 1)).await,
        Verdict::Done { marker_lost: true }
    );
    proxy.inject_faults(|request| {
        if contains(request, "processed:late") {
            RequestFault::Delay(SECOND / 2)
        } else {
            RequestFault::Pass
        }
    });
    let late = apply_one(&store, claim("late", 1)).await;
    assert!(matches!(late, Err(StoreError::Unknown(_))), "{late:?}");
    // The late reply, nil, would grant this claim.
    assert_eq!(
        until_answered(&store, claim("done", 2)).await,
        Verdict::Duplicate
    );
    proxy.pass();
    assert_eq!(until_answered(&store, claim("late", 1)).await, GRANTED);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_store_recovers_from_lost_packets_and_a_reset() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let proxy = Proxy::to(server.port()).expect("a proxy");
    let store = Redis::at(format!("redis://127.0.0.1:{}", proxy.port())).timeout(SECOND / 4);
    assert_eq!(until_answered(&store, claim("k", 1)).await, GRANTED);
    proxy.black_hole();
    for _ in 0..5 {
        let started = Instant::now();
        let dark = apply_one(&store, claim("dark", 1)).await;
        assert!(
            matches!(
                dark,
                Err(StoreError::Unknown(_) | StoreError::NotApplied(_))
            ),
            "{dark:?}"
        );
        assert!(started.elapsed() < 8 * SECOND, "{:?}", started.elapsed());
    }
    proxy.pass();
    assert_eq!(until_answered(&store, claim("dark", 1)).await, GRANTED);
    proxy.reset();
    assert_eq!(until_answered(&store, complete("dark", 1, 1)).await, DONE);
    assert_eq!(until_answered(&store, complete("k", 1, 1)).await, DONE);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_right_is_reported_and_a_granted_one_is_used() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    server
        .command(&crate::support::rights("+wait"))
        .expect("a reply");
    let store = at(&format!(
        "redis://oncegate:PASSWORD@127.0.0.1:{}",
        server.port()
    ));
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    server
        .command("ACL SETUSER oncegate -set")
        .expect("a reply");
    for refused in [claim("l", 1), complete("k", 1, 1)] {
        let answer = apply_one(&store, refused).await;
        assert!(
            matches!(&answer, Err(StoreError::Misconfigured(why)) if why.to_string().contains("SET")),
            "{answer:?}"
        );
    }
    server
        .command("ACL SETUSER oncegate +set")
        .expect("a reply");
    assert_eq!(
        apply_one(&store, complete("k", 1, 1))
            .await
            .expect("a verdict"),
        DONE
    );
}

/// The id of the message that was handled last is sent to `handled`.
struct Reports(tokio::sync::mpsc::UnboundedSender<String>);

impl Handler for Reports {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        self.0.send(cx.id().to_owned()).retry()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_revoked_while_a_consumer_runs_ends_it_with_that_error() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let command = |text: &str| server.command(text).expect("a reply");
    command(&crate::support::rights("+wait"));
    let store = at(&format!(
        "redis://oncegate:PASSWORD@127.0.0.1:{}",
        server.port()
    ));
    let (broker, (handled, mut ids)) = (MemoryBroker::new("q"), unbounded_channel());
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store.allow_volatile_store())
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(Reports(handled));
    let running = tokio::spawn(consumer.run_until(std::future::pending::<()>()));
    broker.publish(Message::new("x").with_message_id("before"));
    assert_eq!(ids.recv().await.as_deref(), Some("before"));
    broker.all_settled().await;
    command("ACL SETUSER oncegate -set");
    for number in 0..100 {
        broker.publish(Message::new("x").with_message_id(format!("after-{number}")));
    }
    let ended = tokio::time::timeout(10 * SECOND, running)
        .await
        .expect("at once")
        .expect("no panic");
    assert!(
        matches!(&ended, Err(Error::Store(StoreError::Misconfigured(why))) if why.to_string().contains("NOPERM")),
        "{ended:?}"
    );
    assert_eq!(
        ids.recv().await,
        None,
        "nothing was handled without a claim"
    );
    assert_eq!(broker.unsettled(), 100, "nothing is lost");
}

/// A rolling upgrade: consumers with different leases, windows and guarantees share the ids.
#[tokio::test(flavor = "multi_thread")]
async fn gates_with_different_settings_run_each_id_once() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let gate = |lease: u32, window: u32, guarantee| {
        let store = at(&server.url()).allow_volatile_store();
        Gate::builder()
            .store(store)
            .guarantee(guarantee)
            .lease(lease * SECOND / 10)
            .dedup_window(window * SECOND)
            .open()
    };
    let old = gate(5, 60, Guarantee::EffectivelyOnce)
        .await
        .expect("a gate");
    let gates = [
        gate(300, 600, Guarantee::EffectivelyOnce)
            .await
            .expect("a gate"),
        gate(5, 600, Guarantee::AtMostOnce).await.expect("a gate"),
        gate(300, 60, Guarantee::AtMostOnce).await.expect("a gate"),
        old,
    ];
    let runs: Vec<AtomicU32> = (0..200).map(|_| AtomicU32::new(0)).collect();
    let consumers = gates.iter().enumerate().map(|(which, gate)| {
        let runs = &runs;
        async move {
            for it in 0..runs.len() {
                // Each starts at another id, so that they meet while others hold claims.
                let it = (it + which * 50) % runs.len();
                let work = || async move {
                    runs[it].fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    Ok(())
                };
                while !matches!(
                    gate.run(format!("{it}"), work).await.expect("a verdict"),
                    RunOutcome::Executed(()) | RunOutcome::AlreadyDone
                ) {}
            }
        }
    });
    futures_util::future::join_all(consumers).await;
    assert!(
        runs.iter().all(|runs| runs.load(Ordering::SeqCst) == 1),
        "{runs:?}"
    );
}
