//! The laws of stores, on a single server, behind Sentinels and in a Cluster; and expiries that
//! other programs changed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use oncegate_core::marker::{
    self, Age, Attempts, Change, Effect, Fingerprint, Guarantee, Marker, Operation, OperationKind,
    Terms, Token, UNRESOLVED_AT_MOST_ONCE, Verdict,
};
use oncegate_core::{Store, StoreError};
use oncegate_redis::{Durability, Redis};
use oncegate_testkit::laws;
use oncegate_testkit::servers::{
    ClusterServers, RedisOptions, RedisServer, SENTINEL_NAME, SentinelServers,
};

use crate::support::{
    DONE, GRANTED, SECOND, at, claim, client, client_of, key, operation, store, terms, verdicts,
};
use crate::wire::has_msetex;

mod standalone {
    oncegate_testkit::store_laws!(async || crate::support::store().0);
}

/// A store with a long timeout and a prefix of its own.
fn with_own_prefix(store: Redis) -> Redis {
    store
        .timeout(5 * SECOND)
        .prefix(format!("processed:{:032x}:", Token::random().0))
}

#[test]
fn all_laws_hold_behind_sentinels() {
    let servers = SentinelServers::start().expect("Redis and Sentinels");
    laws::all(async || with_own_prefix(Redis::sentinel(servers.urls(), SENTINEL_NAME)));
    // The same with claims that wait for a replica.
    let replica = Durability::Replicas {
        count: 1,
        timeout: 2 * SECOND,
    };
    laws::all(async || {
        with_own_prefix(Redis::sentinel(servers.urls(), SENTINEL_NAME).durability(replica))
    });
}

#[test]
fn all_laws_hold_in_a_cluster() {
    let servers = ClusterServers::start().expect("a Cluster");
    laws::all(async || with_own_prefix(Redis::cluster(servers.urls())));
}

/// Each handle sends a few batches over a new connection: duplicates, which most laws cause, would
/// end the groups of claims on an older one.
struct ManyConnections {
    prefix: String,
    url: String,
    sent: Mutex<(Redis, u32)>,
}

impl ManyConnections {
    const BATCHES_EACH: u32 = 4;

    fn to(url: &str) -> Self {
        let prefix = format!("processed:{:032x}:", Token::random().0);
        Self {
            sent: Mutex::new((at(url).prefix(&prefix), 0)),
            url: url.to_owned(),
            prefix,
        }
    }
}

#[async_trait]
impl Store for ManyConnections {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let store = {
            let mut sent = self.sent.lock().expect("no panic while it is locked");
            if sent.1 == Self::BATCHES_EACH {
                *sent = (at(&self.url).prefix(&self.prefix), 0);
            }
            sent.1 += 1;
            sent.0.clone()
        };
        store.apply(operations).await
    }

    fn for_renewals(&self) -> Option<Arc<dyn Store>> {
        let sent = self.sent.lock().expect("no panic while it is locked");
        sent.0.for_renewals()
    }
}

#[test]
fn all_laws_hold_with_groups_of_claims() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    laws::all(async || ManyConnections::to(&server.url()));
    assert_eq!(groups_sent_to(&server) > 200, has_msetex(&server));
}

pub(crate) fn groups_sent_to(server: &RedisServer) -> u64 {
    let stats = server.reply("INFO commandstats").expect("a reply");
    let calls = stats
        .lines()
        .find_map(|line| line.strip_prefix("cmdstat_msetex:calls="));
    let number = calls.and_then(|it| it.split(',').next());
    number.map_or(0, |it| it.parse().expect("a number"))
}

/// Random batches, some repeated as after a lost reply, on ids of which some are new.
#[tokio::test]
async fn groups_of_claims_have_the_verdicts_of_marker_apply() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for history in 0..40 {
        let store = ManyConnections::to(&server.url());
        let terms = terms(match history % 2 {
            0 => Guarantee::AtMostOnce,
            _ => Guarantee::EffectivelyOnce,
        });
        let mut markers: HashMap<usize, Marker> = HashMap::new();
        for step in 0..40 {
            let mut ids: Vec<usize> = (step..step + 12).collect();
            random.shuffle(&mut ids);
            ids.truncate(random.usize(2..8));
            if random.u8(..4) == 0 {
                ids.push(ids[0]);
            }
            let mut on = |id: &usize| {
                let kind = match random.u8(..6) {
                    0 => OperationKind::Complete,
                    1 => OperationKind::Clear(Effect::Nothing),
                    _ => OperationKind::Claim,
                };
                operation(&format!("k{id}"), kind, random.u128(1..4), 1, terms)
            };
            let batch: Vec<Operation> = ids.iter().map(&mut on).collect();
            for _ in 0..random.u8(1..3) {
                let answers = verdicts(&store, &batch).await;
                for ((id, operation), received) in ids.iter().zip(&batch).zip(answers) {
                    let marker = markers.entry(*id).or_insert(Marker::Absent);
                    let before = *marker;
                    let (change, expected) =
                        marker::apply(before, Age::Of(Duration::ZERO), operation);
                    match change {
                        Change::Keep => {}
                        Change::Write(written, _) => *marker = written,
                        Change::Delete => *marker = Marker::Absent,
                    }
                    let is_same = match (received, expected) {
                        (Verdict::Busy { .. }, Verdict::Busy { .. }) => true,
                        (received, expected) => received == expected,
                    };
                    assert!(
                        is_same,
                        "{received:?}, not {expected:?}: {operation:?} on {before:?} in {batch:?}"
                    );
                }
            }
        }
    }
    assert_eq!(groups_sent_to(&server) > 500, has_msetex(&server));
}

/// The rights in the book are sufficient.
#[tokio::test(flavor = "multi_thread")]
async fn all_laws_hold_for_a_user_with_the_rights_of_the_book() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let book = include_str!("../../../../docs/src/stores.md");
    let line = book
        .lines()
        .find(|line| line.starts_with("ACL SETUSER oncegate "))
        .expect("the line of the book");
    let mut words = line.split(' ');
    let mut command = redis::cmd(words.next().expect("ACL"));
    words.for_each(|word| {
        command.arg(word);
    });
    let _: () = command
        .query_async(&mut client_of(&server.url()).await)
        .await
        .expect("the documented line is valid");
    let url = format!("redis://oncegate:PASSWORD@127.0.0.1:{}", server.port());
    let all = tokio::task::spawn_blocking(move || laws::all(async || with_own_prefix(at(&url))));
    all.await.expect("all laws hold");
}

/// A lease of zero is valid within the millisecond of its claim.
#[tokio::test]
async fn a_lease_is_valid_to_its_last_millisecond() {
    let (store, _) = store();
    let brief = Terms {
        lease: Duration::ZERO,
        ..terms(Guarantee::EffectivelyOnce)
    };
    for it in 0..2000 {
        let claim = |token| operation(&format!("k{it}"), OperationKind::Claim, token, 0, brief);
        match verdicts(&store, &[claim(1), claim(2)]).await[1] {
            Verdict::Busy {
                remaining: Duration::ZERO,
            } => return,
            taken => assert_eq!(
                taken,
                Verdict::Granted(Attempts {
                    number: 2,
                    base: 1,
                    crashes: 1
                })
            ),
        }
    }
    panic!("no claim was busy in 2,000 tries");
}

/// A request, its token, its attempt and its terms.
type LawRequest = (OperationKind, u128, u32, Terms);

/// Every marker has the expiry of `marker::apply`.
#[tokio::test]
async fn every_marker_has_the_expiry_of_the_table() {
    const WINDOW: Duration = Duration::from_secs(600);
    let (store, prefix) = store();
    let mut raw = client().await;
    let [lax, strict] = [Guarantee::EffectivelyOnce, Guarantee::AtMostOnce].map(terms);
    let bare = terms(Guarantee::Bare);
    let body = |terms| Terms {
        fingerprint: Some(Fingerprint::new(7)),
        ..terms
    };
    let brief = |terms| Terms {
        lease: Duration::ZERO,
        window: 300 * SECOND,
        ..terms
    };
    let cases: [(&str, Duration, &[LawRequest]); 12] = [
        ("claimed", WINDOW, &[(OperationKind::Claim, 1, 0, lax)]),
        (
            "claimed at most once",
            UNRESOLVED_AT_MOST_ONCE,
            &[(OperationKind::Claim, 1, 0, strict)],
        ),
        ("bare", WINDOW, &[(OperationKind::Claim, 1, 0, bare)]),
        (
            "done",
            WINDOW,
            &[
                (OperationKind::Claim, 1, 0, brief(lax)),
                (OperationKind::Complete, 1, 1, lax),
            ],
        ),
        (
            "done at most once",
            WINDOW,
            &[
                (OperationKind::Claim, 1, 0, strict),
                (OperationKind::Complete, 1, 1, strict),
            ],
        ),
        (
            "done, body",
            WINDOW,
            &[(OperationKind::Complete, 1, 1, body(strict))],
        ),
        (
            "cleared",
            WINDOW,
            &[
                (OperationKind::Claim, 1, 0, brief(lax)),
                (OperationKind::Clear(Effect::Unknown), 1, 1, lax),
            ],
        ),
        (
            "rejected",
            WINDOW,
            &[
                (OperationKind::Claim, 1, 0, strict),
                (OperationKind::Reject(Effect::Unknown), 1, 1, strict),
            ],
        ),
        (
            "doubted",
            UNRESOLVED_AT_MOST_ONCE,
            &[
                (OperationKind::Claim, 1, 0, strict),
                (OperationKind::Doubt, 1, 1, strict),
            ],
        ),
        ("doubted, lax", WINDOW, &[(OperationKind::Doubt, 1, 1, lax)]),
        (
            "taken over",
            WINDOW,
            &[
                (OperationKind::Claim, 1, 0, brief(lax)),
                (OperationKind::Claim, 2, 0, lax),
            ],
        ),
        (
            "taken in doubt",
            UNRESOLVED_AT_MOST_ONCE,
            &[
                (OperationKind::Claim, 1, 0, brief(lax)),
                (OperationKind::Claim, 2, 0, strict),
            ],
        ),
    ];
    for (id, expiry, requests) in cases {
        let id = id.replace([' ', ','], "-"); // an id that needs no escaping in its key
        for (kind, token, attempt, terms) in requests {
            verdicts(&store, &[operation(&id, *kind, *token, *attempt, *terms)]).await;
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        let left: u64 = redis::cmd("PTTL")
            .arg(format!("{prefix}{id}"))
            .query_async(&mut raw)
            .await
            .expect("an expiry");
        let expiry = expiry.as_millis() as u64;
        assert!(
            (expiry - 5000..=expiry).contains(&left),
            "{id}: {left} ms left, not {expiry}"
        );
    }
}

/// Another program changed the expiry of a marker without expiry, or with more than its horizon: its
/// age is unknown. The next request resets the expiry to the horizon, and other claims wait for a
/// whole lease.
#[tokio::test]
async fn a_marker_of_unknown_age_gets_a_new_expiry() {
    let (store, prefix) = store();
    let mut raw = client().await;
    let strict = terms(Guarantee::AtMostOnce);
    let lax = terms(Guarantee::EffectivelyOnce);
    let body = |number| Terms {
        fingerprint: Some(Fingerprint::new(number)),
        ..lax
    };
    let busy = Verdict::Busy {
        remaining: lax.lease,
    };
    let doubt = [
        operation("-", OperationKind::Doubt, 8, 1, strict),
        operation("-", OperationKind::Claim, 1, 0, strict),
    ];
    let hold = |terms| [operation("-", OperationKind::Claim, 1, 0, terms)];
    // The marker, the request, and the verdict, each with its own id.
    let cases = [
        (
            "in progress",
            &hold(lax)[..],
            operation("-", OperationKind::Claim, 2, 0, lax),
            busy,
        ),
        (
            "in progress at most once",
            &hold(strict),
            operation("-", OperationKind::Claim, 2, 0, strict),
            busy,
        ),
        (
            "another body",
            &hold(body(7)),
            operation("-", OperationKind::Claim, 2, 0, body(8)),
            busy,
        ),
        (
            "reconciling",
            &doubt,
            operation("-", OperationKind::Claim, 2, 0, strict),
            busy,
        ),
        (
            "mine",
            &hold(lax),
            operation("-", OperationKind::Claim, 1, 0, lax),
            GRANTED,
        ),
        (
            "renewed",
            &hold(lax),
            operation("-", OperationKind::Renew, 1, 1, lax),
            Verdict::Applied,
        ),
        (
            "my doubt",
            &doubt,
            operation("-", OperationKind::Claim, 1, 0, strict),
            Verdict::InDoubt(Attempts::none_counted(2)),
        ),
    ];
    for (name, made, request, expected) in cases {
        for (how, tamper) in [
            ("without", None),
            (
                "beyond",
                Some(UNRESOLVED_AT_MOST_ONCE.as_millis() as u64 + 60_000),
            ),
        ] {
            let id = format!("{name} {how}").replace(' ', "-");
            let of = |operation: &Operation| Operation {
                key: key(&id),
                ..operation.clone()
            };
            for operation in made {
                verdicts(&store, &[of(operation)]).await;
            }
            let before = store.read_marker(&key(&id)).await.expect("a marker");
            let (Marker::InProgress(hold) | Marker::InDoubt(hold, _)) = before else {
                panic!("{before:?}")
            };
            let key_name = format!("{prefix}{id}");
            let mut command = redis::cmd(if tamper.is_some() {
                "PEXPIRE"
            } else {
                "PERSIST"
            });
            command.arg(&key_name);
            if let Some(expiry) = tamper {
                command.arg(expiry);
            }
            let changed: i64 = command.query_async(&mut raw).await.expect("an answer");
            assert_eq!(changed, 1);

            assert_eq!(verdicts(&store, &[of(&request)]).await, [expected], "{id}");
            assert_eq!(
                store.read_marker(&key(&id)).await.expect("a marker"),
                before,
                "{id}"
            );
            let left: i64 = redis::cmd("PTTL")
                .arg(&key_name)
                .query_async(&mut raw)
                .await
                .expect("an answer");
            let horizon = hold.horizon.as_millis() as i64;
            assert!(
                (horizon - 5000..=horizon).contains(&left),
                "{id}: {left} ms left, not {horizon}"
            );
        }
    }
    // A waiting doubt is taken over, whatever its age.
    let waiting = operation("waiting", OperationKind::Doubt, 1, 1, strict);
    verdicts(&store, &[waiting]).await;
    let _: i64 = redis::cmd("PERSIST")
        .arg(format!("{prefix}waiting"))
        .query_async(&mut raw)
        .await
        .expect("an answer");
    let taken = verdicts(
        &store,
        &[operation("waiting", OperationKind::Claim, 2, 0, strict)],
    )
    .await;
    assert_eq!(taken, [Verdict::InDoubt(Attempts::none_counted(2))]);
    // A done marker without expiry, as other programs may write it, stays a duplicate.
    let _: () = redis::cmd("SET")
        .arg(format!("{prefix}theirs"))
        .arg("1")
        .query_async(&mut raw)
        .await
        .expect("an answer");
    let complete = operation("theirs", OperationKind::Complete, 2, 1, lax);
    assert_eq!(
        verdicts(&store, &[claim("theirs", 2), complete]).await,
        [Verdict::Duplicate, DONE]
    );
    let left: i64 = redis::cmd("PTTL")
        .arg(format!("{prefix}theirs"))
        .query_async(&mut raw)
        .await
        .expect("an answer");
    assert_eq!(left, -1);
}
