//! Invalid settings are reported in one line, without secrets.

use std::net::TcpListener;
use std::time::Duration;

use oncegate_core::marker::{Effect, Guarantee, Operation, OperationKind, Verdict};
use oncegate_core::{Persistence, Store, StoreError};
use oncegate_redis::{Durability, Redis};
use oncegate_testkit::Lines;
use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};

use crate::support::{
    GRANTED, apply_one, at, claim, client_of, complete, key, operation, rights, terms,
};

const SECRET: &str = "s3cr3tpassw0rd";

/// The one line that a misconfigured store returns for every call.
async fn misconfigured(store: &Redis) -> String {
    assert!(!format!("{store:?}").contains(SECRET));
    let answers = [
        apply_one(store, claim("k", 1)).await.map(|_| ()),
        store.persistence().await.map(|_| ()),
        store.preflight(Guarantee::AtMostOnce).await,
    ];
    let lines = answers.map(|answer| match answer {
        Err(error @ StoreError::Misconfigured(_)) => {
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains(SECRET), "{shown}");
            error.to_string()
        }
        other => panic!("{other:?}"),
    });
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    assert!(
        lines[0].contains("Redis::at") && !lines[0].contains('\n'),
        "{lines:?}"
    );
    lines[0].clone()
}

#[tokio::test]
async fn an_invalid_url() {
    for url in [
        "",
        "localhost:6379",
        "http://localhost",
        &format!("redis://:{SECRET}@"),
        &format!("redis://u:{SECRET}@host/x"),
    ] {
        let line = misconfigured(&Redis::at(url)).await;
        assert!(line.contains("write redis://"), "{line}");
    }
    let line = misconfigured(&Redis::at(format!(
        "rediss://:{SECRET}@localhost/#insecure"
    )))
    .await;
    assert!(line.contains("ca_certificate"), "{line}");
}

#[tokio::test]
async fn a_timeout_or_count_of_zero() {
    let unreachable = || Redis::at(format!("redis://:{SECRET}@127.0.0.1:1"));
    let replicas = |count, timeout| Durability::Replicas { count, timeout };
    let wrong = [
        (
            unreachable().timeout(Duration::ZERO),
            "Redis::timeout: the timeout is 0",
        ),
        (
            unreachable()
                .timeout(Duration::ZERO)
                .timeout(Duration::from_secs(1)),
            "Redis::timeout: the timeout is 0",
        ),
        (
            unreachable().durability(replicas(0, Duration::from_secs(1))),
            "count is 0; set at least 1",
        ),
        (
            unreachable().durability(replicas(1, Duration::ZERO)),
            "timeout is 0",
        ),
        (
            unreachable()
                .durability(replicas(0, Duration::from_secs(1)))
                .prefix("p:"),
            "count is 0",
        ),
    ];
    for (store, expected) in wrong {
        let result = store.preflight(Guarantee::AtMostOnce).await;
        assert!(
            matches!(&result, Err(StoreError::Misconfigured(why)) if why.to_string().contains(expected)),
            "{result:?}"
        );
        let result = apply_one(&store, claim("k", 1)).await;
        assert!(
            matches!(&result, Err(StoreError::Misconfigured(why)) if why.to_string().contains(expected)),
            "{result:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_server_as_a_sentinel() {
    for options in [RedisOptions::new(), RedisOptions::new().password(SECRET)] {
        let server = RedisServer::start(options).expect("a Redis");
        let result = apply_one(&Redis::sentinel([server.url()], "mymaster"), claim("k", 1)).await;
        assert!(
            matches!(&result, Err(StoreError::Misconfigured(why)) if why.to_string().contains("give this server to Redis::at")),
            "{result:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password() {
    let server = RedisServer::start(RedisOptions::new().password("right")).expect("a Redis");
    let port = server.port();
    for url in [
        format!("redis://:{SECRET}@127.0.0.1:{port}"),
        format!("redis://someone:{SECRET}@127.0.0.1:{port}"),
        format!("redis://127.0.0.1:{port}"),
    ] {
        let line = misconfigured(&at(&url)).await;
        assert!(
            line.contains("password") && line.contains(&port.to_string()),
            "{line}"
        );
    }
    assert_eq!(
        apply_one(&at(&server.url()), claim("k", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_configured_authority_is_trusted() {
    let server = RedisServer::start(RedisOptions::new().tls().password(SECRET)).expect("a Redis");
    let other_server = RedisServer::start(RedisOptions::new().tls()).expect("a Redis");
    let trusting = at(&server.url()).ca_certificate(server.certificate_authority());
    assert_eq!(
        apply_one(&trusting, claim("k", 1))
            .await
            .expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(&trusting, complete("k", 1, 1))
            .await
            .expect("a verdict"),
        crate::support::DONE
    );
    let renewals = trusting.for_renewals().expect("a handle");
    assert_eq!(
        apply_one(&*renewals, claim("k", 2))
            .await
            .expect("a verdict"),
        Verdict::Duplicate
    );

    for untrusted in [
        at(&server.url()),
        at(&server.url()).ca_certificate(other_server.certificate_authority()),
    ] {
        let line = misconfigured(&untrusted).await;
        assert!(
            line.contains("certificate") && line.contains("not trusted"),
            "{line}"
        );
    }
    let missing = apply_one(
        &at(&server.url()).ca_certificate("/no/such/file"),
        claim("k", 1),
    )
    .await;
    assert!(
        matches!(&missing, Err(StoreError::Misconfigured(why)) if why.to_string().contains("/no/such/file")),
        "{missing:?}"
    );
    let nothing = apply_one(
        &at(&server.url()).ca_certificate("Cargo.toml"),
        claim("k", 1),
    )
    .await;
    assert!(
        matches!(&nothing, Err(StoreError::Misconfigured(why)) if why.to_string().contains("ca_certificate")),
        "{nothing:?}"
    );
    let plain = apply_one(
        &at("redis://localhost").ca_certificate(server.certificate_authority()),
        claim("k", 1),
    )
    .await;
    assert!(
        matches!(&plain, Err(StoreError::Misconfigured(why)) if why.to_string().contains("rediss://")),
        "{plain:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_hello_is_used_with_resp2() {
    let directory = tempfile::tempdir().expect("a directory");
    let renamed = directory.path().join("renamed.conf");
    std::fs::write(&renamed, "rename-command HELLO HI\n").expect("written");
    let options = RedisOptions::new()
        .password(SECRET)
        .setting("include", renamed.display().to_string());
    let server = RedisServer::start(options).expect("a Redis");
    let store = at(&server.url());
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert_eq!(
        apply_one(&store, complete("k", 1, 1))
            .await
            .expect("a verdict"),
        crate::support::DONE
    );
    assert!(matches!(
        store.persistence().await,
        Ok(Persistence::Volatile(_))
    ));
    let wrong = format!("redis://:{SECRET}x@127.0.0.1:{}", server.port());
    assert!(misconfigured(&at(&wrong)).await.contains("password"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_on_the_same_machine() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("redis.sock");
    let _server =
        RedisServer::start(RedisOptions::new().setting("unixsocket", socket.display().to_string()))
            .expect("a Redis");
    let store = at(&format!("redis+unix://{}", socket.display()));
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_does_not_exist() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let line = misconfigured(&at(&format!("{}/99", server.url()))).await;
    assert!(line.contains("database"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_redis() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = std::io::Write::write_all(&mut &stream, b"HTTP/1.1 400 Bad Request\r\n\r\n");
            // Closed only after the client has read it.
            std::thread::sleep(std::time::Duration::from_millis(300));
        }
    });
    let line = misconfigured(&at(&format!("redis://127.0.0.1:{port}"))).await;
    assert!(line.contains("does not speak the Redis protocol"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_documented_rights_suffice_and_missing_ones_are_reported() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let mut raw = client_of(&server.url()).await;
    let rights = [
        "+set", "+get", "+mget", "+del", "+pttl", "+pexpire", "+eval", "+evalsha", "+info",
        "+hello",
    ];
    let user = |name: &str, rights: &[&str]| {
        let mut command = redis::cmd("ACL");
        command
            .arg("SETUSER")
            .arg(name)
            .arg("on")
            .arg(format!(">{SECRET}"))
            .arg("~processed:*")
            .arg("-@all");
        rights.iter().for_each(|right| {
            command.arg(right);
        });
        command
    };
    let _: () = user("enough", &rights)
        .query_async(&mut raw)
        .await
        .expect("an answer");
    let _: () = user("poor", &["+hello"])
        .query_async(&mut raw)
        .await
        .expect("an answer");
    let url = |name: &str| format!("redis://{name}:{SECRET}@127.0.0.1:{}", server.port());

    let enough = at(&url("enough"));
    let answers = enough
        .apply(&[claim("k", 1), claim("k", 2), complete("k", 1, 1)])
        .await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    enough.persistence().await.expect("INFO is allowed");
    let elsewhere = apply_one(&at(&url("enough")).prefix("mine:"), claim("k", 1)).await;
    assert!(
        matches!(elsewhere, Err(StoreError::Misconfigured(_))),
        "{elsewhere:?}"
    );

    // A right that only the script needs is reported when the script fails.
    let held = complete("held", 1, 1);
    for (name, missing) in [
        ("no-pttl", "+pttl"),
        ("no-del", "+del"),
        ("no-pexpire", "+pexpire"),
    ] {
        let rest: Vec<&str> = rights
            .iter()
            .filter(|right| **right != missing)
            .copied()
            .collect();
        let _: () = user(name, &rest)
            .query_async(&mut raw)
            .await
            .expect("an answer");
        let store = at(&url(name));
        let id = |operation: Operation| Operation {
            key: key(name),
            ..operation
        };
        let clear = Operation {
            kind: OperationKind::Clear(Effect::Nothing),
            ..claim("k", 1)
        };
        let batch = [
            id(claim("k", 1)),
            held.clone(),
            id(claim("k", 1)),
            id(claim("k", 2)),
            id(Operation {
                attempt: 1,
                ..clear
            }),
        ];
        let answers = store.apply(&batch).await;
        assert!(
            answers[0].is_ok() && answers[1].is_ok(),
            "{missing}: {answers:?}"
        );
        let is_expected = |answer: &Result<Verdict, StoreError>| matches!(answer, Err(StoreError::Misconfigured(why)) if why.to_string().to_lowercase().contains("pexpire"));
        assert!(
            answers[2..].iter().any(is_expected),
            "{missing}: {answers:?}"
        );
        assert!(
            answers
                .iter()
                .all(|answer| answer.is_ok() || is_expected(answer)),
            "{missing}: {answers:?}"
        );
    }

    // Revoking this right stops nothing: the script falls back to reading each key.
    let rest: Vec<&str> = rights
        .iter()
        .filter(|right| **right != "+mget")
        .copied()
        .collect();
    let _: () = user("no-mget", &rest)
        .query_async(&mut raw)
        .await
        .expect("an answer");
    let answers = at(&url("no-mget"))
        .apply(&[claim("n", 1), complete("n", 1, 1), claim("n", 2)])
        .await;
    let done = Verdict::Done { marker_lost: false };
    assert!(
        matches!(answers[..], [Ok(Verdict::Granted(_)), Ok(it), Ok(Verdict::Duplicate)] if it == done),
        "{answers:?}"
    );

    let poor = at(&url("poor"));
    for refused in [claim("k", 1), complete("k", 1, 1)] {
        let answer = apply_one(&poor, refused).await;
        assert!(
            matches!(&answer, Err(StoreError::Misconfigured(why)) if why.to_string().contains("+evalsha")),
            "{answer:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn persistence_is_read_from_the_server() {
    let durable =
        RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EverySecond))
            .expect("a Redis");
    assert!(matches!(
        at(&durable.url()).persistence().await,
        Ok(Persistence::Durable(_))
    ));
    let mut raw = client_of(&durable.url()).await;
    let _: () = redis::cmd("CONFIG")
        .arg("SET")
        .arg("maxmemory-policy")
        .arg("volatile-lru")
        .query_async(&mut raw)
        .await
        .expect("an answer");
    let evicting = at(&durable.url()).persistence().await;
    assert!(
        matches!(&evicting, Ok(Persistence::Volatile(why)) if why.contains("volatile-lru")),
        "{evicting:?}"
    );

    let volatile = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let volatile_persistence = at(&volatile.url()).persistence().await;
    assert!(
        matches!(&volatile_persistence, Ok(Persistence::Volatile(why)) if why.contains("appendonly yes")),
        "{volatile_persistence:?}"
    );
    let accepted = at(&volatile.url())
        .allow_volatile_store()
        .persistence()
        .await;
    assert!(
        matches!(&accepted, Ok(Persistence::Durable(why)) if why.contains("risk accepted")),
        "{accepted:?}"
    );
}

/// A server with the user of the book, without some rights.
fn server_without_rights(missing: &[&str]) -> (RedisServer, Redis) {
    let server = RedisServer::start(RedisOptions::new().persistence(RedisPersistence::EverySecond))
        .expect("a Redis");
    let line = rights("+wait")
        .split(' ')
        .filter(|word| !missing.contains(word))
        .collect::<Vec<_>>()
        .join(" ");
    assert_eq!(server.command(&line).expect("a reply"), "+OK");
    let store = at(&format!(
        "redis://oncegate:PASSWORD@127.0.0.1:{}",
        server.port()
    ));
    (server, store)
}

const GUARANTEES: [Guarantee; 3] = [
    Guarantee::AtMostOnce,
    Guarantee::EffectivelyOnce,
    Guarantee::Bare,
];

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_fails_at_start() {
    let all = [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce];
    let rows: [(&[&str], &[Guarantee]); 11] = [
        (&[], &[]),
        (&["+set"], &GUARANTEES),
        (&["+del"], &GUARANTEES),
        (&["+get"], &all),
        (&["+mget"], &all),
        (&["+pttl"], &all),
        (&["+pexpire"], &all),
        (&["+eval"], &all),
        (&["+evalsha"], &all),
        (&["+info"], &[Guarantee::AtMostOnce]),
        (
            &[
                "+get", "+pttl", "+pexpire", "+eval", "+evalsha", "+info", "+wait",
            ],
            &all,
        ),
    ];
    for (missing, refused) in rows {
        for guarantee in GUARANTEES {
            let (server, store) = server_without_rights(missing);
            let result = store.preflight(guarantee).await;
            match &result {
                Ok(()) => assert!(!refused.contains(&guarantee), "{missing:?}, {guarantee:?}"),
                Err(StoreError::Misconfigured(why)) => {
                    assert!(
                        refused.contains(&guarantee),
                        "{missing:?}, {guarantee:?}: {result:?}"
                    );
                    let line = why.to_string();
                    // The setting, the problem and the remedy, in one line.
                    let is_one = line.matches("does not let").count() == 1
                        && line.matches("ACL SETUSER").count() == 1;
                    let whole = line.starts_with("Redis::at: ")
                        && line.contains("ACL SETUSER oncegate ~processed:* +");
                    assert!(
                        is_one
                            && whole
                            && line.contains(&format!("{guarantee:?}"))
                            && !line.contains('\n'),
                        "{line}"
                    );
                    // The command in the message grants all rights that are needed.
                    let command = line.find("ACL SETUSER").map_or("", |at| &line[at..]);
                    assert_eq!(
                        server.command(command).expect("a reply"),
                        "+OK",
                        "{command}"
                    );
                    store
                        .preflight(guarantee)
                        .await
                        .expect("the printed command grants all rights");
                }
                other => panic!("{missing:?}, {guarantee:?}: {other:?}"),
            }
        }
    }
    let replicas = Durability::Replicas {
        count: 1,
        timeout: std::time::Duration::from_millis(100),
    };
    for (missing, refused) in [(&["+wait"][..], true), (&[], false)] {
        let (_server, store) = server_without_rights(missing);
        let result = store
            .durability(replicas)
            .preflight(Guarantee::EffectivelyOnce)
            .await;
        let named = matches!(&result, Err(StoreError::Misconfigured(why)) if why.to_string().contains("+wait"));
        assert_eq!((named, result.is_ok()), (refused, !refused), "{result:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_access_to_keys_fails_at_start() {
    let (_server, store) = server_without_rights(&[]);
    for guarantee in GUARANTEES {
        let result = store.clone().prefix("mine:").preflight(guarantee).await;
        assert!(
            matches!(&result, Err(StoreError::Misconfigured(why)) if why.to_string().contains("~mine:*")),
            "{result:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_command_fails_at_start() {
    let directory = tempfile::tempdir().expect("a directory");
    let renamed = directory.path().join("renamed.conf");
    std::fs::write(&renamed, "rename-command EVAL \"\"\n").expect("written");
    let server =
        RedisServer::start(RedisOptions::new().setting("include", renamed.display().to_string()))
            .expect("a Redis");
    let store = at(&server.url());
    let result = store.preflight(Guarantee::EffectivelyOnce).await;
    assert!(
        matches!(&result, Err(StoreError::Misconfigured(why)) if why.to_string().contains("does not support EVAL")),
        "{result:?}"
    );
    store
        .preflight(Guarantee::Bare)
        .await
        .expect("Bare needs no script");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_rejects_writes_temporarily_does_not_fail_at_start() {
    let server = RedisServer::start(RedisOptions::new().setting("min-replicas-to-write", "1"))
        .expect("a Redis");
    for guarantee in GUARANTEES {
        at(&server.url())
            .preflight(guarantee)
            .await
            .expect("a transient error is not a failure at start");
    }
}

/// The same line as at start, which can be run as it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_missing_later_is_granted_by_the_command_in_the_error() {
    let (server, store) = server_without_rights(&[]);
    store
        .preflight(Guarantee::EffectivelyOnce)
        .await
        .expect("nothing is missing");
    for right in ["set", "evalsha"] {
        let deny = format!("ACL SETUSER oncegate -{right}");
        assert_eq!(server.command(&deny).expect("a reply"), "+OK");
        let id = format!("without-{right}");
        let claimed = apply_one(&store, claim(&id, 1)).await;
        let (denied, operation) = match claimed {
            Ok(_) => {
                // By the script on every server.
                let renew = operation(
                    &id,
                    OperationKind::Renew,
                    1,
                    1,
                    terms(Guarantee::EffectivelyOnce),
                );
                (apply_one(&store, renew.clone()).await, renew)
            }
            denied => (denied, claim(&id, 1)),
        };
        let Err(StoreError::Misconfigured(error)) = denied else {
            panic!("{right}: {denied:?}")
        };
        let error = error.to_string();
        let grant = error.find("ACL SETUSER").map(|at| &error[at..]);
        let grant = grant.unwrap_or_else(|| panic!("{error}"));
        assert_eq!(server.command(grant).expect("a reply"), "+OK", "{grant}");
        apply_one(&store, operation)
            .await
            .unwrap_or_else(|error| panic!("{right}: {grant}: {error}"));
    }
}

/// A database other than 0 needs one more right.
#[tokio::test(flavor = "multi_thread")]
async fn a_numbered_database() {
    let server = RedisServer::start(RedisOptions::new()).expect("a Redis");
    let url = format!("redis://oncegate:PASSWORD@127.0.0.1:{}/3", server.port());
    assert_eq!(server.command(&rights("+wait")).expect("a reply"), "+OK");
    let line = misconfigured(&at(&url)).await;
    assert!(line.contains("NOPERM") && line.contains("SELECT"), "{line}");
    assert_eq!(server.command(&rights("+select")).expect("a reply"), "+OK");
    let store = at(&url);
    store
        .preflight(Guarantee::AtMostOnce)
        .await
        .expect("nothing is missing");
    assert_eq!(
        apply_one(&store, claim("k", 1)).await.expect("a verdict"),
        GRANTED
    );
    assert!(
        server
            .reply("INFO keyspace")
            .expect("a reply")
            .contains("db3:"),
        "{:?}",
        server.reply("INFO keyspace")
    );
}

/// A missing right that the guarantee does not need is a warning.
#[tokio::test]
async fn undetectable_losses_are_a_warning_at_start() {
    let (_server, store) = server_without_rights(&["+info"]);
    let logged = Lines::default();
    let writer = logged.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .with_ansi(false)
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    store
        .preflight(Guarantee::EffectivelyOnce)
        .await
        .expect("effectively once starts without INFO");
    let lines = logged.text();
    assert!(
        lines
            .lines()
            .filter(|line| line.contains("Redis::at") && line.contains("+info"))
            .count()
            == 1,
        "{lines}"
    );
}
