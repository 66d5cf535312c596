//! Findings about Redis and settings of the gate.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;

use oncegate_testkit::servers::{RedisOptions, RedisPersistence, RedisServer};

use super::{AT_MOST_ONCE, assert_findings, findings};
use crate::cli::TestCli;

fn good_options() -> RedisOptions {
    RedisOptions::new().persistence(RedisPersistence::EverySecond)
}

fn redis(options: RedisOptions) -> RedisServer {
    RedisServer::start(options).expect("Redis starts")
}

fn cli(server: &RedisServer, more: &str) -> TestCli {
    let cli = TestCli::at(&server.url());
    cli.configure(more);
    cli
}

#[test]
fn a_good_redis_has_no_findings() {
    let server = redis(good_options());
    assert_findings(&cli(&server, AT_MOST_ONCE), &[]);
    let cli = cli(&server, "");
    cli.write(
        "oncegate.toml",
        &format!("[store]\nurl = \"{}\"\n", server.url()),
    );
    cli.run(&["doctor"])
        .exits_with(0)
        .prints("ADVICE")
        .prints("scope-not-configured")
        .prints("Checked the settings, Redis; errors: 0, warnings: 0");
}

#[test]
fn finds_eviction_and_missing_persistence() {
    let server = redis(good_options().setting("maxmemory-policy", "allkeys-lru"));
    assert_findings(
        &cli(&server, AT_MOST_ONCE),
        &[("store-evicts-keys", "error")],
    );
    assert_findings(&cli(&server, ""), &[("store-evicts-keys", "warning")]);
    let server = redis(RedisOptions::new());
    assert_findings(
        &cli(&server, AT_MOST_ONCE),
        &[("store-without-append-only-file", "error")],
    );
    cli(&server, AT_MOST_ONCE)
        .run(&["doctor"])
        .exits_with(1)
        .prints("CONFIG SET appendonly yes");
}

#[test]
fn finds_replicas_and_cluster_nodes() {
    let primary = redis(good_options());
    let replica = redis(good_options().replica_of(primary.port()));
    assert_findings(
        &cli(&replica, AT_MOST_ONCE),
        &[("store-is-replica", "error")],
    );
    // A real one may need a port that is in use.
    let node = RewritingProxy::before(&primary, |bytes| overwrite(bytes, "cluster_enabled:", "1"));
    let cli = TestCli::at(&node.url());
    cli.configure(AT_MOST_ONCE);
    assert_findings(&cli, &[("store-is-cluster-node", "error")]);
}

#[test]
fn finds_an_unreachable_store_and_a_rejected_login() {
    let server = redis(good_options().password("right"));
    assert_findings(
        &TestCli::at(&server.url().replace("right", "wrong")),
        &[("store-login-rejected", "error")],
    );
    assert_findings(
        &TestCli::at("redis://127.0.0.1:1"),
        &[("store-unreachable", "error")],
    );
}

#[test]
fn finds_missing_redis_permissions() {
    let server = redis(good_options());
    for (rights, missing) in [
        (
            "+set +get +mget +del +pttl +pexpire +eval +info +hello",
            "EVALSHA",
        ),
        (
            "+set +get +mget +del +pttl +pexpire +eval +evalsha +hello",
            "INFO",
        ),
        (
            "+get +mget +del +pttl +pexpire +eval +evalsha +info +hello",
            "SET",
        ),
    ] {
        server
            .command(&format!(
                "ACL SETUSER some reset on >word ~test:* -@all {rights}"
            ))
            .expect("Redis answers");
        let cli = TestCli::at(&server.url().replace("redis://", "redis://some:word@"));
        cli.configure(AT_MOST_ONCE);
        assert_findings(&cli, &[("store-permission-missing", "error")]);
        let output = cli.run(&["doctor"]).exits_with(1).prints(missing);
        assert!(
            output
                .out
                .contains("only the commands of `oncegate` need XADD, XRANGE, SCAN, TYPE, STRLEN"),
            "{output:?}"
        );
        // One ACL line grants everything, also what only this program needs.
        let grant = output
            .out
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Fix: ACL "))
            .collect::<Vec<_>>();
        assert!(
            matches!(grant[..], [grant] if grant.starts_with("SETUSER some ~test:")),
            "{output:?}"
        );
        assert_eq!(
            server
                .command(&format!("ACL {}", grant[0]))
                .expect("a reply"),
            "+OK"
        );
        assert_findings(&cli, &[]);
        let output = cli.run(&["doctor"]).exits_with(0);
        assert!(!output.out.contains("permission-missing"), "{output:?}");
        for command in [&["marker", "list"][..], &["audit"]] {
            cli.run(command).exits_with(0);
        }
    }
}

/// A consumer needs fewer rights than an operator.
#[test]
fn missing_permissions_of_the_tool_are_advice() {
    let server = redis(good_options());
    server
        .command(
            "ACL SETUSER some reset on >word ~test:* -@all +set +get +mget +del +pttl +pexpire +eval +evalsha +info +hello",
        )
        .expect("Redis answers");
    let cli = TestCli::at(&server.url().replace("redis://", "redis://some:word@"));
    cli.configure(AT_MOST_ONCE);
    let output = cli
        .run(&["doctor"])
        .exits_with(0)
        .prints("tool-permission-missing")
        .prints("the user may not run XADD, XRANGE, SCAN, TYPE, STRLEN")
        .prints("+info +xadd +xrange +scan +type +strlen");
    assert!(output.out.contains("ACL SETUSER some ~test:"), "{output:?}");
    // The audit is a file.
    let file = cli.path("audit.jsonl");
    cli.configure(&format!(
        "{AT_MOST_ONCE}[audit]\nfile = \"{}\"\n",
        file.display()
    ));
    cli.run(&["doctor"])
        .exits_with(0)
        .prints("the user may not run SCAN, TYPE, STRLEN");
}

#[test]
fn finds_insufficient_memory() {
    let server = redis(good_options().setting("maxmemory", "100mb"));
    assert_findings(&cli(&server, AT_MOST_ONCE), &[]);
    assert_findings(
        &cli(&server, &format!("{AT_MOST_ONCE}rate = 1000\n")),
        &[("store-memory-too-small", "warning")],
    );
    server
        .command("CONFIG SET maxmemory 1000000")
        .expect("Redis answers");
    let found = findings(&cli(&server, AT_MOST_ONCE));
    let full = ("store-nearly-full".to_owned(), "error".to_owned());
    assert!(found.contains(&full), "{found:?}");
}

#[test]
fn finds_missing_replicas() {
    let server = redis(good_options());
    assert_findings(
        &cli(&server, "scope = \"s\"\nreplicas = 1\n"),
        &[("too-few-replicas", "error")],
    );
}

/// Rewrites replies of a server with texts of the same length.
struct RewritingProxy {
    port: u16,
}

impl RewritingProxy {
    fn before(
        server: &RedisServer,
        rewrite: impl Fn(&mut Vec<u8>) + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let (port, server, rewrite) = (
            listener.local_addr().expect("an address").port(),
            server.port(),
            Arc::new(rewrite),
        );
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server =
                    TcpStream::connect((Ipv4Addr::LOCALHOST, server)).expect("Redis listens");
                let rewrite = Arc::clone(&rewrite);
                pass(
                    client.try_clone().expect("a second handle"),
                    server.try_clone().expect("a second handle"),
                    |_| {},
                );
                pass(server, client, move |bytes| rewrite(bytes));
            }
        });
        Self { port }
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, change: impl Fn(&mut Vec<u8>) + Send + 'static) {
    std::thread::spawn(move || {
        // The buffer holds a whole INFO reply.
        let mut buffer = vec![0; 1 << 20];
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            let mut bytes = buffer[..read].to_vec();
            change(&mut bytes);
            if to.write_all(&bytes).is_err() {
                return;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
}

/// Overwrites the value behind a name.
fn overwrite(bytes: &mut [u8], name: &str, value: &str) {
    if let Some(at) = bytes
        .windows(name.len())
        .position(|it| it == name.as_bytes())
    {
        let at = at + name.len();
        if let Some(place) = bytes.get_mut(at..at + value.len()) {
            place.copy_from_slice(value.as_bytes());
        }
    }
}

#[test]
fn finds_an_old_redis() {
    let server = redis(good_options());
    let old = RewritingProxy::before(&server, |bytes| overwrite(bytes, "redis_version:", "6.2"));
    let cli = TestCli::at(&old.url());
    cli.configure(AT_MOST_ONCE);
    assert_findings(&cli, &[("store-too-old", "error")]);
    cli.configure("scope = \"s\"\n[gate]\nguarantee = \"bare\"\n");
    assert_findings(&cli, &[]);
}

#[test]
fn finds_a_failing_append_only_file() {
    let server = redis(good_options());
    let full = RewritingProxy::before(&server, |bytes| {
        overwrite(bytes, "aof_last_write_status:", "err")
    });
    let cli = TestCli::at(&full.url());
    cli.configure(AT_MOST_ONCE);
    assert_findings(&cli, &[("store-append-only-file-error", "error")]);
}

#[test]
fn finds_clock_skew() {
    let server = redis(good_options());
    let late = RewritingProxy::before(&server, |bytes| {
        overwrite(bytes, "server_time_usec:", "1600000")
    });
    let cli = TestCli::at(&late.url());
    cli.configure(AT_MOST_ONCE);
    assert_findings(&cli, &[("clocks-differ", "warning")]);
}

#[test]
fn finds_contradictory_settings() {
    let server = redis(good_options());
    let cli = cli(&server, "");
    for (settings, code) in [
        ("[gate]\nlease = \"25h\"\n", "lease-not-shorter-than-window"),
        ("[gate]\nlease = \"50ms\"\n", "lease-too-short"),
        ("[gate]\nmax-age = \"25h\"\n", "max-age-exceeds-window"),
        (
            "[audit]\nfile = \"/nowhere/at/all\"\n",
            "audit-directory-missing",
        ),
    ] {
        cli.configure(&format!("scope = \"s\"\n{settings}"));
        assert_findings(&cli, &[(code, "error")]);
    }
}
