//! Each finding of `oncegate doctor`, from a real misconfiguration. A good setup must have no
//! findings.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate::{Connect, ConnectOptions, RabbitMq, Source};
use oncegate_testkit::servers::{RabbitServer, RedisOptions, RedisPersistence, RedisServer};
use rdkafka::admin::{NewTopic, TopicReplication};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use serde_json::Value;

use crate::cli::TestCli;
use crate::fixture::{self, Broker, BrokerFixture};

const AT_MOST_ONCE: &str = "scope = \"s\"\n[gate]\nguarantee = \"at-most-once\"\n";

/// Code and level of the findings that are problems.
fn findings(cli: &TestCli) -> Vec<(String, String)> {
    let output = cli.run(&["doctor", "--json"]);
    assert!(output.code <= 1, "{output:?}");
    let json = output.json();
    let findings = json["findings"].as_array().expect("a list");
    let text = |finding: &Value, name: &str| finding[name].as_str().expect("a text").to_owned();
    for finding in findings {
        assert!(
            text(finding, "remedy").len() > 10 && text(finding, "what").len() > 10,
            "a finding has a problem and a remedy: {finding}"
        );
    }
    let bad: Vec<(String, String)> = findings
        .iter()
        .filter(|finding| finding["level"] != "advice")
        .map(|finding| (text(finding, "code"), text(finding, "level")))
        .collect();
    let has_errors = bad.iter().any(|(_, level)| level == "error");
    assert_eq!(output.code, i32::from(has_errors), "{output:?}");
    bad
}

#[track_caller]
fn assert_findings(cli: &TestCli, expected: &[(&str, &str)]) {
    let expected: Vec<(String, String)> = expected
        .iter()
        .map(|(code, level)| ((*code).to_owned(), (*level).to_owned()))
        .collect();
    assert_eq!(findings(cli), expected);
}

/// Asserts the findings of a configuration without a store, besides the one that reports this.
#[track_caller]
fn assert_broker_findings(cli: &TestCli, expected: &[(&str, &str)]) {
    let mut found = findings(cli);
    let store = ("store-not-configured".to_owned(), "error".to_owned());
    let at = found.iter().position(|finding| *finding == store);
    found.remove(at.unwrap_or_else(|| panic!("no finding about the store: {found:?}")));
    let found: Vec<(&str, &str)> = found
        .iter()
        .map(|(code, level)| (code.as_str(), level.as_str()))
        .collect();
    assert_eq!(found, expected);
}

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

/// Each code occurs in a test of this file.
#[test]
fn every_finding_has_a_test() {
    let listed = TestCli::at("redis://127.0.0.1:1")
        .run(&["doctor", "--list", "--json"])
        .exits_with(0)
        .json();
    let codes: Vec<&str> = listed
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it[0].as_str().expect("a code"))
        .collect();
    let cases = include_str!("doctor.rs");
    let missing: Vec<&&str> = codes
        .iter()
        .filter(|code| !cases.contains(&format!("\"{code}\"")))
        .collect();
    assert!(
        codes.len() > 40 && missing.is_empty(),
        "no test for {missing:?}"
    );
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

/// A consumer with this configuration does not start.
#[test]
fn finds_a_missing_store_or_broker() {
    let cli = TestCli::at("redis://127.0.0.1:1");
    for broker in [
        "[rabbitmq]\nurl = \"amqp://127.0.0.1:1\"\nqueue = \"q\"\n",
        "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n",
    ] {
        cli.write("oncegate.toml", broker);
        let codes: Vec<String> = findings(&cli).into_iter().map(|(code, _)| code).collect();
        assert!(
            codes.contains(&"store-not-configured".to_owned()),
            "{broker}: {codes:?}"
        );
        cli.run(&["doctor"])
            .exits_with(1)
            .prints("set store.url in oncegate.toml");
    }
    // The configuration names a broker and lacks its keys.
    for (broker, missing) in [
        ("[rabbitmq]\nqueue = \"q\"\n", "rabbitmq.url is missing"),
        ("[rabbitmq]\n", "rabbitmq.url is missing"),
        ("[kafka]\n", "kafka.brokers is missing"),
        (
            "[gate]\nbroker = \"kafka\"\n",
            "kafka.brokers is missing; set it, or remove [kafka] and gate.broker",
        ),
    ] {
        cli.configure(broker);
        cli.run(&["doctor"]).exits_with(2).prints(missing);
    }
    cli.configure("");
    cli.run(&["doctor"]).prints("broker-not-configured");
    for (file, error) in [
        ("", "oncegate.toml sets no key"),
        ("[store]\n[rabbitmq]\n", "sets no key"),
        ("[stor]\nurl = \"redis://h\"\n", "did you mean store?"),
    ] {
        cli.write("oncegate.toml", file);
        cli.run(&["doctor"]).exits_with(2).prints(error);
    }
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
    let codes: Vec<String> = findings(&cli(&server, AT_MOST_ONCE))
        .into_iter()
        .map(|(code, _)| code)
        .collect();
    assert!(codes.contains(&"store-nearly-full".to_owned()), "{codes:?}");
}

#[test]
fn finds_missing_replicas() {
    let server = redis(good_options());
    assert_findings(
        &cli(&server, "scope = \"s\"\nreplicas = 1\n"),
        &[("too-few-replicas", "error")],
    );
}

#[test]
fn finds_an_unusable_store() {
    for store in [
        "url = \"rediss://127.0.0.1:1\"\nca-certificate = \"/no/such.pem\"\n",
        "url = \"sqlite:/no/such/directory/markers.db\"\n",
        "url = \"sqlite:oncegate.toml\"\n",
    ] {
        let cli = TestCli::on_sqlite();
        cli.write("oncegate.toml", &format!("[store]\n{store}{AT_MOST_ONCE}"));
        assert_findings(&cli, &[("store-unusable", "error")]);
    }
}

#[tokio::test]
async fn finds_an_sqlite_file_in_memory() {
    let cli = TestCli::on_sqlite();
    cli.configure(AT_MOST_ONCE);
    assert_findings(&cli, &[("store-file-missing", "warning")]);
    let path = cli.path("markers.db").display().to_string();
    cli.run(&["doctor"])
        .exits_with(0)
        .prints("errors: 0, warnings: 1")
        .prints(&format!("no file yet at {path}"));
    assert!(!cli.path("markers.db").exists(), "doctor creates no file");
    cli.ask("a", oncegate::marker::Ask::Claim, 1, 0, crate::cli::terms())
        .await;
    assert_findings(&cli, &[]);
    cli.run(&["doctor"])
        .exits_with(0)
        .prints("Checked the settings, SQLite");
    // A file system in memory, on every Linux.
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let file = memory.path().join("markers.db");
    cli.write(
        "oncegate.toml",
        &format!(
            "[store]\nurl = \"sqlite:{}\"\n{AT_MOST_ONCE}",
            file.display()
        ),
    );
    assert_findings(
        &cli,
        &[
            ("store-volatile", "error"),
            ("store-file-missing", "warning"),
        ],
    );
    oncegate::Store::persistence(&oncegate::Sqlite::file(&file))
        .await
        .expect("the file is created");
    for store in [format!("sqlite:{}", file.display()), "memory:".to_owned()] {
        cli.write(
            "oncegate.toml",
            &format!("[store]\nurl = \"{store}\"\n{AT_MOST_ONCE}"),
        );
        assert_findings(&cli, &[("store-volatile", "error")]);
        cli.write(
            "oncegate.toml",
            &format!("[store]\nurl = \"{store}\"\nscope = \"s\"\n"),
        );
        assert_findings(&cli, &[("store-volatile", "warning")]);
    }
}

#[test]
fn refuses_an_sqlite_database_in_memory() {
    let cli = TestCli::on_sqlite();
    let store = "[store]\nurl = \"sqlite::memory:\"\n";
    cli.write("oncegate.toml", &format!("{store}{AT_MOST_ONCE}"));
    cli.run(&["doctor"])
        .exits_with(2)
        .prints("store.url: sqlite::memory: is no file");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_missing_topics() {
    let cli = TestCli::new();
    let configure = |topic: &str| {
        cli.write(
            "oncegate.toml",
            &format!(
                "[gate]\ndedup-window = \"30d\"\n[kafka]\nbrokers = \"{}\"\ntopic = \"{topic}\"\n",
                fixture::kafka()
            ),
        );
    };
    configure(&cli.name);
    let missing = [
        ("topic-missing", "error"),
        ("dead-letter-topic-missing", "error"),
        ("in-doubt-topic-missing", "error"),
    ];
    assert_broker_findings(&cli, &missing);
    let output = cli
        .run(&["doctor"])
        .exits_with(1)
        .prints("--replication-factor 1 ")
        .prints("kafka.create-replicas = 1")
        .prints("kafka-topics.sh");
    assert!(
        !output.out.contains("factor 3"),
        "the cluster has one broker: {output:?}"
    );
    fixture::create_topics(&[NewTopic::new(&cli.name, 2, TopicReplication::Fixed(1))]).await;
    assert_broker_findings(&cli, &missing[1..]);
    let settings = std::fs::read_to_string(cli.path("oncegate.toml")).expect("just written");
    cli.write(
        "oncegate.toml",
        &format!("{settings}create-partitions = 1\ncreate-replicas = 1\n"),
    );
    assert_broker_findings(&cli, &[]);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("not created yet; the consumer creates it at its first start");
    cli.write(
        "oncegate.toml",
        "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n",
    );
    assert_broker_findings(&cli, &[("kafka-unreachable", "error")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_topics_that_lose_or_reject_dead_letters() {
    let cli = TestCli::new();
    let keeping =
        |name| NewTopic::new(name, 2, TopicReplication::Fixed(1)).set("retention.ms", "-1");
    let names: Vec<String> = (0..7).map(|n| format!("{}-{n}", cli.name)).collect();
    fixture::create_topics(&[
        keeping(&names[0]),
        NewTopic::new(&names[1], 2, TopicReplication::Fixed(1)).set("retention.ms", "3600000"),
        keeping(&names[2]).set("retention.bytes", "1000000"),
        keeping(&names[3]).set("cleanup.policy", "compact"),
        keeping(&names[4]).set("min.insync.replicas", "2"),
        keeping(&names[5]).set("max.message.bytes", "1000"),
        NewTopic::new(&names[6], 2, TopicReplication::Fixed(1)).set("retention.ms", "3600000"),
    ])
    .await;
    let with = |topic: &str, dead_letters: &str, in_doubt: &str| {
        let kafka = format!(
            "brokers = \"{}\"\ntopic = \"{topic}\"\ndead-letters = \"{dead_letters}\"\nin-doubt = \"{in_doubt}\"\n",
            fixture::kafka()
        );
        cli.write("oncegate.toml", &format!("[kafka]\n{kafka}"));
    };
    with(&names[6], &names[0], &names[0]);
    assert_broker_findings(&cli, &[]);
    let settings = std::fs::read_to_string(cli.path("oncegate.toml")).expect("just written");
    cli.write(
        "oncegate.toml",
        &format!("{settings}group = \"{}\"\n", cli.name),
    );
    assert_broker_findings(&cli, &[]);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("dead-letter-topic-one-replica");
    for (messages, code, level) in [
        (&names[1], "dead-letter-topic-limited-retention", "error"),
        (&names[2], "dead-letter-topic-limited-retention", "error"),
        (&names[3], "dead-letter-topic-compacted", "error"),
        (&names[4], "dead-letter-topic-min-insync-replicas", "error"),
        (&names[5], "dead-letter-topic-max-message-bytes", "warning"),
    ] {
        with(&names[6], messages, &names[0]);
        assert_broker_findings(&cli, &[(code, level)]);
        with(&names[6], &names[0], messages);
        assert_broker_findings(&cli, &[(code, level)]);
    }
    // An unlimited topic may be read again from the start.
    with(&names[0], &names[0], &names[0]);
    assert_broker_findings(&cli, &[("window-shorter-than-retention", "warning")]);
}

/// A broker that denies DescribeConfigs: it does not know the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_unreadable_topic_configurations() {
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let cli = TestCli::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        broker
            .create_topic(&format!("{}{suffix}", cli.name), 1, 1)
            .expect("a topic");
    }
    cli.write(
        "oncegate.toml",
        &format!(
            "[kafka]\nbrokers = \"{}\"\ntopic = \"{}\"\n",
            broker.bootstrap_servers(),
            cli.name
        ),
    );
    assert_broker_findings(&cli, &[("topic-config-not-readable", "warning"); 3]);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("grant DescribeConfigs");
}

/// A broker that denies Describe on each topic, like one with an authorizer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_missing_describe_permission() {
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let cli = TestCli::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        let topic = format!("{}{suffix}", cli.name);
        broker.create_topic(&topic, 1, 1).expect("a topic");
        broker
            .topic_error(
                &topic,
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
            )
            .expect("an existing topic");
    }
    cli.write(
        "oncegate.toml",
        &format!(
            "[kafka]\nbrokers = \"{}\"\ntopic = \"{}\"\n",
            broker.bootstrap_servers(),
            cli.name
        ),
    );
    assert_broker_findings(&cli, &[("kafka-permission-missing", "error"); 3]);
    cli.run(&["doctor"]).exits_with(1).prints(&format!(
        "grant Describe on the topic {}.in-doubt",
        cli.name
    ));
}

/// A broker that denies Read on the topic or access to the group, like one with an authorizer. It
/// does not know DescribeConfigs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_missing_read_permission() {
    use RDKafkaRespErr::{
        RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
    };
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let cli = TestCli::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        broker
            .create_topic(&format!("{}{suffix}", cli.name), 1, 1)
            .expect("a topic");
    }
    // A response version in which each partition has its own error. A denied partition has no log
    // end offset; this response has one that differs from the position of the reader, or librdkafka
    // would report the end of the partition.
    broker
        .partition_follower(&cli.name, 0, 1)
        .expect("an existing partition");
    broker
        .follower_watermarks(&cli.name, 0, Some(0), Some(7))
        .expect("an existing partition");
    broker
        .apiversion(RDKafkaApiKey::Fetch, Some(0), Some(3))
        .expect("supported versions");
    broker.request_errors(
        RDKafkaApiKey::Fetch,
        &[RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED; 100],
    );
    broker.request_errors(
        RDKafkaApiKey::FindCoordinator,
        &[RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED; 100],
    );
    let (brokers, topic) = (broker.bootstrap_servers(), &cli.name);
    cli.write(
        "oncegate.toml",
        &format!("[kafka]\nbrokers = \"{brokers}\"\ntopic = \"{topic}\"\ngroup = \"ledger\"\n"),
    );
    let output = cli.run(&["doctor", "--json"]).exits_with(1).json();
    let lacking = output["findings"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|it| it["code"] == "kafka-permission-missing");
    let grants: Vec<&str> = lacking
        .map(|it| it["remedy"].as_str().expect("a text"))
        .collect();
    let expected = [
        format!("grant Read on the topic {topic} to the user"),
        "grant Read on the group ledger to the user".to_owned(),
    ];
    assert!(
        grants.len() == 2
            && expected
                .iter()
                .zip(&grants)
                .all(|(expected, output)| output.starts_with(expected)),
        "{output}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_an_unreachable_broker_and_a_rejected_login() {
    let cli = TestCli::new();
    for (url, code) in [
        (
            "amqp://guest:guest@127.0.0.1:1/%2f".to_owned(),
            "rabbitmq-unreachable",
        ),
        (
            fixture::rabbitmq().replace("guest:guest", "guest:wrong"),
            "rabbitmq-login-rejected",
        ),
        (
            fixture::rabbitmq().replace("%2f", "nowhere"),
            "rabbitmq-virtual-host-rejected",
        ),
    ] {
        cli.write(
            "oncegate.toml",
            &format!("[rabbitmq]\nurl = \"{url}\"\nqueue = \"q\"\n"),
        );
        assert_broker_findings(&cli, &[(code, "error")]);
    }
}

/// The arguments of a queue.
type Arguments = Vec<(&'static str, AMQPValue)>;

/// Declares a queue.
async fn declare(name: &str, durable: bool, arguments: &[(&'static str, AMQPValue)]) {
    let (connection, channel) = fixture::open().await;
    let mut table = FieldTable::default();
    for (name, value) in arguments {
        table.insert((*name).into(), value.clone());
    }
    let options = QueueDeclareOptions {
        durable,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(name.into(), options, table)
        .await
        .expect("a new queue");
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_queues_that_lose_messages() {
    let fixture = BrokerFixture::on(Broker::RabbitMq).await;
    let cli = &fixture.cli;
    let with = |more: &str| {
        cli.write(
            "oncegate.toml",
            &format!("[rabbitmq]\nurl = \"{}\"\n{more}", fixture::rabbitmq()),
        )
    };
    with(&format!("queue = \"{}\"\n", cli.name));
    assert_broker_findings(cli, &[]);
    with(&format!(
        "queue = \"{}\"\nconsumer-timeout = \"5m\"\n",
        cli.name
    ));
    assert_broker_findings(cli, &[("consumer-timeout-too-short", "error")]);
    // Inline retries and the wait for another holder count: four runs of ten minutes, or two leases
    // of fifteen.
    for (gate, findings) in [
        ("handler-timeout = \"10m\"", true),
        ("lease = \"15m\"", true),
        ("handler-timeout = \"6m\"", false),
    ] {
        cli.write(
            "oncegate.toml",
            &format!(
                "[gate]\n{gate}\n[rabbitmq]\nurl = \"{}\"\nqueue = \"{}\"\n",
                fixture::rabbitmq(),
                cli.name
            ),
        );
        assert_broker_findings(
            cli,
            if findings {
                &[("consumer-timeout-too-short", "error")]
            } else {
                &[]
            },
        );
    }
    let missing = [
        ("queue-missing", "error"),
        ("dead-letter-queue-missing", "error"),
        ("in-doubt-queue-missing", "error"),
    ];
    with("queue = \"no-such-queue\"\ntopology = \"check\"\n");
    assert_broker_findings(cli, &missing);
    // The consumer declares them.
    with("queue = \"no-such-queue\"\n");
    assert_broker_findings(cli, &[]);
    let output = cli.run(&["doctor"]).exits_with(1);
    for (code, _) in missing {
        assert!(output.out.contains(code), "{output:?}");
    }
    output.prints("not declared yet; the consumer declares it at its first start");

    let text = |value: &str| AMQPValue::LongString(value.into());
    let quorum = || ("x-queue-type", text("quorum"));
    let cases: [(&str, bool, Arguments, &str); 8] = [
        ("classic", true, vec![], ""),
        ("transient", false, vec![], "queue-not-durable"),
        (
            "expiring",
            true,
            vec![("x-message-ttl", AMQPValue::LongInt(1_000))],
            "queue-expires",
        ),
        (
            "length-limit",
            true,
            vec![("x-max-length", AMQPValue::LongInt(10))],
            "queue-length-limit",
        ),
        (
            "low-delivery-limit",
            true,
            vec![quorum(), ("x-delivery-limit", AMQPValue::LongInt(5))],
            "dead-letter-queue-delivery-limit",
        ),
        (
            "quorum",
            true,
            vec![quorum()],
            "dead-letter-queue-delivery-limit",
        ),
        (
            "odd",
            true,
            vec![("x-max-priority", AMQPValue::LongInt(3))],
            "queue-arguments-differ",
        ),
        (
            "quorum-expiring",
            true,
            vec![quorum(), ("x-message-ttl", AMQPValue::LongInt(1_000))],
            "queue-expires",
        ),
    ];
    let mut declared = Vec::new();
    for (name, durable, arguments, code) in cases {
        let name = format!("{}.{name}", cli.name);
        declare(&name, durable, &arguments).await;
        with(&format!(
            "queue = \"{}\"\ndead-letters = \"{name}\"\n",
            cli.name
        ));
        let codes: Vec<String> = findings(cli).into_iter().map(|(code, _)| code).collect();
        // The consumed queue dead-letters to another queue.
        let codes: Vec<&str> = codes
            .iter()
            .map(String::as_str)
            .filter(|code| {
                !["queue-without-dead-letter-exchange", "store-not-configured"].contains(code)
            })
            .collect();
        assert_eq!(
            codes,
            if code.is_empty() { vec![] } else { vec![code] },
            "{name}"
        );
        declared.push(name);
    }
    let auto_delete_queue = format!("{}.auto-delete", cli.name);
    let (connection, channel) = fixture::open().await;
    let options = QueueDeclareOptions {
        durable: true,
        auto_delete: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(
            auto_delete_queue.as_str().into(),
            options,
            FieldTable::default(),
        )
        .await
        .expect("a new queue");
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
    with(&format!(
        "queue = \"{}\"\nin-doubt = \"{auto_delete_queue}\"\n",
        cli.name
    ));
    assert_broker_findings(cli, &[("queue-auto-deleted", "error")]);
    declared.push(auto_delete_queue);
    // Only the connection that declared it may use it.
    let exclusive_queue = format!("{}.exclusive", cli.name);
    let (owner, channel) = fixture::open().await;
    let options = QueueDeclareOptions {
        exclusive: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(
            exclusive_queue.as_str().into(),
            options,
            FieldTable::default(),
        )
        .await
        .expect("a new queue");
    with(&format!(
        "queue = \"{}\"\nin-doubt = \"{exclusive_queue}\"\n",
        cli.name
    ));
    assert_broker_findings(cli, &[("queue-permission-missing", "error")]);
    owner.close(200, "OK".into()).await.expect("a clean end");
    let without_exchange = format!("{}.without-exchange", cli.name);
    declare(&without_exchange, true, &[quorum()]).await;
    let ours = format!(
        "dead-letters = \"{0}.dead-letters\"\nin-doubt = \"{0}.in-doubt\"\n",
        cli.name
    );
    with(&format!("queue = \"{without_exchange}\"\n{ours}"));
    assert_broker_findings(cli, &[("queue-without-dead-letter-exchange", "warning")]);
    declared.push(without_exchange);
    for name in declared {
        fixture::delete(&name).await;
    }
    fixture.end().await;
}

/// A server of its own: permissions of a shared server would affect other tests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finds_missing_configure_permission() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let source = RabbitMq::queue("payments")
        .url(server.url())
        .connect(ConnectOptions::default())
        .await
        .expect("the queues are declared");
    let source: Box<dyn Source> = Box::new(source);
    source
        .close(Instant::now() + fixture::TEST_TIMEOUT)
        .await
        .expect("a clean end");
    server
        .control(&["add_user", "reader", "word"])
        .expect("a new user");
    let cli = TestCli::new();
    let url = server.url().replace("guest:guest", "reader:word");
    let with = |more: &str| {
        cli.write(
            "oncegate.toml",
            &format!("[rabbitmq]\nurl = \"{url}\"\nqueue = \"payments\"\n{more}"),
        )
    };
    with("");
    server
        .control(&["set_permissions", "reader", ".*", ".*", ".*"])
        .expect("all rights");
    assert_broker_findings(&cli, &[]);
    server
        .control(&["set_permissions", "reader", "^$", ".*", ".*"])
        .expect("fewer rights");
    assert_broker_findings(&cli, &[("queue-arguments-not-checked", "error"); 3]);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("let the user configure `payments.dead-letters`")
        .prints("only for a user who may configure it");
    // With this topology the consumer declares nothing.
    with("topology = \"check\"\n");
    assert_broker_findings(&cli, &[]);
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("queue-arguments-not-checked");
}

#[test]
fn an_unreachable_server_hides_no_findings() {
    let cli = TestCli::new();
    let kafka = "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\nproperties = { \"security.protocol\" = \"nonsense\" }\n";
    cli.configure(&format!(
        "[gate]\ndedup-window = \"1h\"\nmax-age = \"2h\"\n{kafka}"
    ));
    let output = cli.run(&["doctor", "--json"]).exits_with(2);
    let findings = output.json();
    let codes: Vec<&str> = findings["findings"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["code"].as_str().expect("a code"))
        .collect();
    assert!(codes.contains(&"max-age-exceeds-window"), "{findings}");
    assert!(findings["not_checked"][0]["where"] == "Kafka", "{findings}");
    cli.run(&["doctor"])
        .exits_with(2)
        .prints("max-age-exceeds-window")
        .prints("Not checked: Kafka");
}

#[test]
fn a_consumer_timeout_of_any_length_is_checked() {
    let cli = TestCli::new();
    let rabbitmq = "[rabbitmq]\nurl = \"amqp://127.0.0.1:1\"\nqueue = \"q\"\nconsumer-timeout = \"18446744073709551615s\"\n";
    cli.configure(rabbitmq);
    let output = cli.run(&["doctor"]).exits_with(1);
    assert!(
        !output.out.contains("consumer-timeout-too-short"),
        "{output:?}"
    );
}
