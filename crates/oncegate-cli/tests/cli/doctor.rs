//! Misconfigurations that were planted, and what `oncegate doctor` says of each. A good set-up is
//! the control: whatever is found there would be found everywhere.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate::{Open, RabbitMq, Source};
use oncegate_testkit::servers::{RabbitServer, RedisOptions, RedisPersistence, RedisServer};
use rdkafka::admin::{NewTopic, TopicReplication};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use serde_json::Value;

use crate::desk::Desk;
use crate::world::{self, Broker, World};

const AT_MOST_ONCE: &str = "scope = \"s\"\n[gate]\nguarantee = \"at-most-once\"\n";

/// What was found: code and level, of those that are to be mended.
fn found(desk: &Desk) -> Vec<(String, String)> {
    let said = desk.run(&["doctor", "--json"]);
    assert!(said.code <= 1, "{said:?}");
    let json = said.json();
    let findings = json["findings"].as_array().expect("a list");
    let text = |finding: &Value, name: &str| finding[name].as_str().expect("a text").to_owned();
    for finding in findings {
        assert!(
            text(finding, "remedy").len() > 10 && text(finding, "what").len() > 10,
            "says what, and what to do: {finding}"
        );
    }
    let bad: Vec<(String, String)> = findings
        .iter()
        .filter(|finding| finding["level"] != "advice")
        .map(|finding| (text(finding, "code"), text(finding, "level")))
        .collect();
    assert_eq!(said.code, i32::from(!bad.is_empty()), "{said:?}");
    bad
}

#[track_caller]
fn finds(desk: &Desk, expected: &[(&str, &str)]) {
    let expected: Vec<(String, String)> = expected
        .iter()
        .map(|(code, level)| ((*code).to_owned(), (*level).to_owned()))
        .collect();
    assert_eq!(found(desk), expected);
}

fn good() -> RedisOptions {
    RedisOptions::new().persistence(RedisPersistence::EverySecond)
}

fn redis(options: RedisOptions) -> RedisServer {
    RedisServer::start(options).expect("Redis starts")
}

fn desk(server: &RedisServer, more: &str) -> Desk {
    let desk = Desk::at(&server.url());
    desk.configure(more);
    desk
}

/// Each code stands here as what is found of something that was planted.
#[test]
fn every_finding_is_planted() {
    let listed = Desk::at("redis://127.0.0.1:1")
        .run(&["doctor", "--list", "--json"])
        .ended(0)
        .json();
    let codes: Vec<&str> = listed
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it[0].as_str().expect("a code"))
        .collect();
    let planted = include_str!("doctor.rs");
    let missing: Vec<&&str> = codes
        .iter()
        .filter(|code| !planted.contains(&format!("\"{code}\"")))
        .collect();
    assert!(
        codes.len() > 40 && missing.is_empty(),
        "nobody planted {missing:?}"
    );
}

#[test]
fn a_good_store_is_let_be() {
    let server = redis(good());
    finds(&desk(&server, AT_MOST_ONCE), &[]);
    let desk = desk(&server, "");
    desk.write(
        "oncegate.toml",
        &format!("[store]\nurl = \"{}\"\n", server.url()),
    );
    desk.run(&["doctor"])
        .ended(0)
        .says("ADVICE")
        .says("no-scope")
        .says("Looked at the settings, Redis: 0 to be mended");
}

#[test]
fn a_store_that_evicts_or_forgets_is_found() {
    let server = redis(good().setting("maxmemory-policy", "allkeys-lru"));
    finds(&desk(&server, AT_MOST_ONCE), &[("store-evicts", "error")]);
    finds(&desk(&server, ""), &[("store-evicts", "warning")]);
    let server = redis(RedisOptions::new());
    finds(
        &desk(&server, AT_MOST_ONCE),
        &[("store-keeps-no-file", "error")],
    );
    desk(&server, AT_MOST_ONCE)
        .run(&["doctor"])
        .ended(1)
        .says("CONFIG SET appendonly yes");
}

#[test]
fn a_store_that_is_the_wrong_one_is_found() {
    let primary = redis(good());
    let replica = redis(good().replica_of(primary.port()));
    finds(
        &desk(&replica, AT_MOST_ONCE),
        &[("store-is-a-replica", "error")],
    );
    // A real one would take another port, which may be in use.
    let node = Liar::before(&primary, |bytes| say(bytes, "cluster_enabled:", "1"));
    let desk = Desk::at(&node.url());
    desk.configure(AT_MOST_ONCE);
    finds(&desk, &[("store-is-a-cluster-node", "error")]);
}

#[test]
fn a_store_that_is_away_or_refuses_is_found() {
    let server = redis(good().password("right"));
    finds(
        &Desk::at(&server.url().replace("right", "wrong")),
        &[("store-refuses-the-login", "error")],
    );
    finds(&Desk::at("redis://127.0.0.1:1"), &[("store-away", "error")]);
}

#[test]
fn a_right_that_is_missing_is_found() {
    let server = redis(good());
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
        let desk = Desk::at(&server.url().replace("redis://", "redis://some:word@"));
        desk.configure(AT_MOST_ONCE);
        finds(&desk, &[("store-lacks-a-right", "error")]);
        let said = desk.run(&["doctor"]).ended(1).says(missing);
        // One line grants all that is needed.
        let grant = said
            .out
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Do: "))
            .collect::<Vec<_>>();
        assert!(
            matches!(grant[..], [grant] if grant.starts_with("ACL SETUSER some ~test:")),
            "{said:?}"
        );
        assert_eq!(server.command(grant[0]).expect("a reply"), "+OK");
        finds(&desk, &[]);
    }
}

#[test]
fn a_store_that_is_too_small_is_found() {
    let server = redis(good().setting("maxmemory", "100mb"));
    finds(&desk(&server, AT_MOST_ONCE), &[]);
    finds(
        &desk(&server, &format!("{AT_MOST_ONCE}rate = 1000\n")),
        &[("store-too-small", "warning")],
    );
    server
        .command("CONFIG SET maxmemory 1100kb")
        .expect("Redis answers");
    let codes: Vec<String> = found(&desk(&server, AT_MOST_ONCE))
        .into_iter()
        .map(|(code, _)| code)
        .collect();
    assert!(codes.contains(&"store-nearly-full".to_owned()), "{codes:?}");
}

#[test]
fn replicas_that_are_missing_are_found() {
    let server = redis(good());
    finds(
        &desk(&server, "scope = \"s\"\nreplicas = 1\n"),
        &[("too-few-replicas", "error")],
    );
}

#[test]
fn a_store_that_cannot_be_used_for_another_reason_is_found() {
    for store in [
        "url = \"rediss://127.0.0.1:1\"\nca-certificate = \"/no/such.pem\"\n",
        "url = \"sqlite:/no/such/directory/markers.db\"\n",
        "url = \"sqlite:oncegate.toml\"\n",
    ] {
        let desk = Desk::on_sqlite();
        desk.write("oncegate.toml", &format!("[store]\n{store}{AT_MOST_ONCE}"));
        finds(&desk, &[("store-unusable", "error")]);
    }
}

#[tokio::test]
async fn a_file_that_survives_is_let_be_and_one_in_memory_is_found() {
    let desk = Desk::on_sqlite();
    desk.configure(AT_MOST_ONCE);
    // Not there yet.
    finds(&desk, &[]);
    desk.ask(
        "a",
        oncegate::marker::Ask::Claim,
        1,
        0,
        crate::desk::terms(),
    )
    .await;
    finds(&desk, &[]);
    desk.run(&["doctor"])
        .ended(0)
        .says("Looked at the settings, SQLite");
    // A file system in memory, on every Linux.
    let memory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    let file = memory.path().join("markers.db");
    oncegate::Store::persistence(&oncegate::Sqlite::file(&file))
        .await
        .expect("it is made");
    for store in [format!("sqlite:{}", file.display()), "memory:".to_owned()] {
        desk.write(
            "oncegate.toml",
            &format!("[store]\nurl = \"{store}\"\n{AT_MOST_ONCE}"),
        );
        finds(&desk, &[("store-forgets", "error")]);
        desk.write(
            "oncegate.toml",
            &format!("[store]\nurl = \"{store}\"\nscope = \"s\"\n"),
        );
        finds(&desk, &[("store-forgets", "warning")]);
    }
}

/// Changes what a server says of itself, by texts of the same length.
struct Liar {
    port: u16,
}

impl Liar {
    fn before(server: &RedisServer, lie: impl Fn(&mut Vec<u8>) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let (port, server, lie) = (
            listener.local_addr().expect("an address").port(),
            server.port(),
            Arc::new(lie),
        );
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let server =
                    TcpStream::connect((Ipv4Addr::LOCALHOST, server)).expect("Redis listens");
                let lie = Arc::clone(&lie);
                pass(
                    client.try_clone().expect("a second handle"),
                    server.try_clone().expect("a second handle"),
                    |_| {},
                );
                pass(server, client, move |bytes| lie(bytes));
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
        // All of an INFO fits in.
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

/// Writes over what stands behind a name, where it is said in one piece.
fn say(bytes: &mut [u8], name: &str, value: &str) {
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
fn a_store_that_is_too_old_is_found() {
    let server = redis(good());
    let old = Liar::before(&server, |bytes| say(bytes, "redis_version:", "6.2"));
    let desk = Desk::at(&old.url());
    desk.configure(AT_MOST_ONCE);
    finds(&desk, &[("store-too-old", "error")]);
    desk.configure("scope = \"s\"\n[gate]\nguarantee = \"bare\"\n");
    finds(&desk, &[]);
}

#[test]
fn a_store_that_cannot_write_its_file_is_found() {
    let server = redis(good());
    let full = Liar::before(&server, |bytes| say(bytes, "aof_last_write_status:", "err"));
    let desk = Desk::at(&full.url());
    desk.configure(AT_MOST_ONCE);
    finds(&desk, &[("store-cannot-write-its-file", "error")]);
}

#[test]
fn a_clock_that_is_elsewhere_is_found() {
    let server = redis(good());
    let late = Liar::before(&server, |bytes| say(bytes, "server_time_usec:", "1600000"));
    let desk = Desk::at(&late.url());
    desk.configure(AT_MOST_ONCE);
    finds(&desk, &[("clocks-differ", "warning")]);
}

#[test]
fn settings_that_do_not_go_together_are_found() {
    let server = redis(good());
    let desk = desk(&server, "");
    for (settings, code) in [
        ("[gate]\nlease = \"25h\"\n", "lease-against-window"),
        ("[gate]\nlease = \"50ms\"\n", "lease-too-short"),
        ("[gate]\nmax-age = \"25h\"\n", "max-age-against-window"),
        (
            "[audit]\nfile = \"/nowhere/at/all\"\n",
            "audit-has-no-place",
        ),
    ] {
        desk.configure(&format!("scope = \"s\"\n{settings}"));
        finds(&desk, &[(code, "error")]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_are_missing_are_found() {
    let desk = Desk::new();
    let configure = |topic: &str| {
        desk.write(
            "oncegate.toml",
            &format!(
                "[gate]\nwindow = \"30d\"\n[kafka]\nbrokers = \"{}\"\ntopic = \"{topic}\"\n",
                world::kafka()
            ),
        );
    };
    configure(&desk.name);
    let missing = [
        ("topic-missing", "error"),
        ("dead-letter-topic-missing", "error"),
        ("in-doubt-topic-missing", "error"),
    ];
    finds(&desk, &missing);
    let said = desk
        .run(&["doctor"])
        .ended(1)
        .says("--replication-factor 1 ")
        .says("kafka.create-replicas = 1")
        .says("kafka-topics.sh");
    assert!(
        !said.out.contains("factor 3"),
        "the cluster has one broker: {said:?}"
    );
    world::create_topics(&[NewTopic::new(&desk.name, 2, TopicReplication::Fixed(1))]).await;
    finds(&desk, &missing[1..]);
    desk.write(
        "oncegate.toml",
        "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n",
    );
    finds(&desk, &[("kafka-away", "error")]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_lose_or_refuse_letters_are_found() {
    let desk = Desk::new();
    let keeping =
        |name| NewTopic::new(name, 2, TopicReplication::Fixed(1)).set("retention.ms", "-1");
    let names: Vec<String> = (0..7).map(|n| format!("{}-{n}", desk.name)).collect();
    world::create_topics(&[
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
            world::kafka()
        );
        desk.write("oncegate.toml", &format!("[kafka]\n{kafka}"));
    };
    with(&names[6], &names[0], &names[0]);
    finds(&desk, &[]);
    let settings = std::fs::read_to_string(desk.path("oncegate.toml")).expect("just written");
    desk.write(
        "oncegate.toml",
        &format!("{settings}group = \"{}\"\n", desk.name),
    );
    finds(&desk, &[]);
    desk.run(&["doctor"]).ended(0).says("letters-have-one-copy");
    for (letters, code, level) in [
        (&names[1], "letters-expire", "error"),
        (&names[2], "letters-expire", "error"),
        (&names[3], "letters-are-compacted", "error"),
        (&names[4], "letters-are-refused", "error"),
        (&names[5], "letters-too-small", "warning"),
    ] {
        with(&names[6], letters, &names[0]);
        finds(&desk, &[(code, level)]);
        with(&names[6], &names[0], letters);
        finds(&desk, &[(code, level)]);
    }
    // A topic that keeps for ever is read again from its beginning one day.
    with(&names[0], &names[0], &names[0]);
    finds(&desk, &[("window-shorter-than-retention", "warning")]);
}

/// This broker answers as one that lets nobody ask for it: it does not know the question.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_are_not_described_are_found() {
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let desk = Desk::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        broker
            .create_topic(&format!("{}{suffix}", desk.name), 1, 1)
            .expect("a topic");
    }
    desk.write(
        "oncegate.toml",
        &format!(
            "[kafka]\nbrokers = \"{}\"\ntopic = \"{}\"\n",
            broker.bootstrap_servers(),
            desk.name
        ),
    );
    finds(&desk, &[("topic-not-described", "warning"); 3]);
    desk.run(&["doctor"]).ended(1).says("grant DescribeConfigs");
}

/// This broker answers of each topic as one with an authorizer does to who may not Describe it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn topics_that_may_not_be_described_are_found() {
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let desk = Desk::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        let topic = format!("{}{suffix}", desk.name);
        broker.create_topic(&topic, 1, 1).expect("a topic");
        broker
            .topic_error(
                &topic,
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
            )
            .expect("a topic that is there");
    }
    desk.write(
        "oncegate.toml",
        &format!(
            "[kafka]\nbrokers = \"{}\"\ntopic = \"{}\"\n",
            broker.bootstrap_servers(),
            desk.name
        ),
    );
    finds(&desk, &[("kafka-lacks-a-right", "error"); 3]);
    desk.run(&["doctor"]).ended(1).says(&format!(
        "grant Describe on the topic {}.in-doubt",
        desk.name
    ));
}

/// This broker answers as one with an authorizer does to who may see the topic and not read it, or
/// not see the group. It does not know the question for how a topic is configured.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_be_seen_and_not_used_is_found() {
    use RDKafkaRespErr::{
        RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED, RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED,
    };
    let broker = rdkafka::mocking::MockCluster::new(1).expect("a mock broker");
    let desk = Desk::new();
    for suffix in ["", ".dead-letters", ".in-doubt"] {
        broker
            .create_topic(&format!("{}{suffix}", desk.name), 1, 1)
            .expect("a topic");
    }
    // In the version of the answer in which a broker refuses each partition for itself. It then
    // tells no end of the log, and this one does: not where the reader stands, or librdkafka would
    // take that for all that was said.
    broker
        .partition_follower(&desk.name, 0, 1)
        .expect("a partition that is there");
    broker
        .follower_watermarks(&desk.name, 0, Some(0), Some(7))
        .expect("a partition that is there");
    broker
        .apiversion(RDKafkaApiKey::Fetch, Some(0), Some(3))
        .expect("versions that it knows");
    broker.request_errors(
        RDKafkaApiKey::Fetch,
        &[RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED; 100],
    );
    broker.request_errors(
        RDKafkaApiKey::FindCoordinator,
        &[RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED; 100],
    );
    let (brokers, topic) = (broker.bootstrap_servers(), &desk.name);
    desk.write(
        "oncegate.toml",
        &format!("[kafka]\nbrokers = \"{brokers}\"\ntopic = \"{topic}\"\ngroup = \"ledger\"\n"),
    );
    let said = desk.run(&["doctor", "--json"]).ended(1).json();
    let lacking = said["findings"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|it| it["code"] == "kafka-lacks-a-right");
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
                .all(|(expected, said)| said.starts_with(expected)),
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_away_or_refuses_is_found() {
    let desk = Desk::new();
    for (url, code) in [
        (
            "amqp://guest:guest@127.0.0.1:1/%2f".to_owned(),
            "rabbitmq-away",
        ),
        (
            world::rabbitmq().replace("guest:guest", "guest:wrong"),
            "rabbitmq-refuses-the-login",
        ),
        (
            world::rabbitmq().replace("%2f", "nowhere"),
            "rabbitmq-refuses-the-virtual-host",
        ),
    ] {
        desk.write(
            "oncegate.toml",
            &format!("[rabbitmq]\nurl = \"{url}\"\nqueue = \"q\"\n"),
        );
        finds(&desk, &[(code, "error")]);
    }
}

/// Arguments of a queue.
type Arguments = Vec<(&'static str, AMQPValue)>;

/// Declares a queue.
async fn declare(name: &str, durable: bool, arguments: &[(&'static str, AMQPValue)]) {
    let (connection, channel) = world::open().await;
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
async fn queues_that_lose_messages_are_found() {
    let world = World::on(Broker::RabbitMq).await;
    let desk = &world.desk;
    let with = |more: &str| {
        desk.write(
            "oncegate.toml",
            &format!("[rabbitmq]\nurl = \"{}\"\n{more}", world::rabbitmq()),
        )
    };
    with(&format!("queue = \"{}\"\n", desk.name));
    finds(desk, &[]);
    with(&format!(
        "queue = \"{}\"\nconsumer-timeout = \"5m\"\n",
        desk.name
    ));
    finds(desk, &[("runs-outlast-the-consumer-timeout", "error")]);
    // Each of the runs in place counts, and the wait for another holder: four runs of ten minutes,
    // or two leases of fifteen.
    for (gate, found) in [
        ("handler-timeout = \"10m\"", true),
        ("lease = \"15m\"", true),
        ("handler-timeout = \"6m\"", false),
    ] {
        desk.write(
            "oncegate.toml",
            &format!(
                "[gate]\n{gate}\n[rabbitmq]\nurl = \"{}\"\nqueue = \"{}\"\n",
                world::rabbitmq(),
                desk.name
            ),
        );
        finds(
            desk,
            if found {
                &[("runs-outlast-the-consumer-timeout", "error")]
            } else {
                &[]
            },
        );
    }
    with("queue = \"no-such-queue\"\n");
    finds(
        desk,
        &[
            ("queue-missing", "error"),
            ("dead-letter-queue-missing", "error"),
            ("in-doubt-queue-missing", "error"),
        ],
    );

    let text = |value: &str| AMQPValue::LongString(value.into());
    let quorum = || ("x-queue-type", text("quorum"));
    let planted: [(&str, bool, Arguments, &str); 8] = [
        ("classic", true, vec![], ""),
        ("transient", false, vec![], "queue-not-durable"),
        (
            "expiring",
            true,
            vec![("x-message-ttl", AMQPValue::LongInt(1_000))],
            "queue-expires",
        ),
        (
            "short",
            true,
            vec![("x-max-length", AMQPValue::LongInt(10))],
            "queue-has-a-length-limit",
        ),
        (
            "looks",
            true,
            vec![quorum(), ("x-delivery-limit", AMQPValue::LongInt(5))],
            "letters-are-dropped-when-looked-at",
        ),
        (
            "quorum",
            true,
            vec![quorum()],
            "letters-are-dropped-when-looked-at",
        ),
        (
            "odd",
            true,
            vec![("x-max-priority", AMQPValue::LongInt(3))],
            "queue-has-other-arguments",
        ),
        (
            "quorum-expiring",
            true,
            vec![quorum(), ("x-message-ttl", AMQPValue::LongInt(1_000))],
            "queue-expires",
        ),
    ];
    let mut declared = Vec::new();
    for (name, durable, arguments, code) in planted {
        let name = format!("{}.{name}", desk.name);
        declare(&name, durable, &arguments).await;
        with(&format!(
            "queue = \"{}\"\ndead-letters = \"{name}\"\n",
            desk.name
        ));
        let codes: Vec<String> = found(desk).into_iter().map(|(code, _)| code).collect();
        // The queue that is consumed gives up to another one, then.
        let codes: Vec<&str> = codes
            .iter()
            .map(String::as_str)
            .filter(|code| *code != "queue-drops-what-it-gives-up")
            .collect();
        assert_eq!(
            codes,
            if code.is_empty() { vec![] } else { vec![code] },
            "{name}"
        );
        declared.push(name);
    }
    let leaving = format!("{}.leaving", desk.name);
    let (connection, channel) = world::open().await;
    let options = QueueDeclareOptions {
        durable: true,
        auto_delete: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(leaving.as_str().into(), options, FieldTable::default())
        .await
        .expect("a new queue");
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
    with(&format!(
        "queue = \"{}\"\nin-doubt = \"{leaving}\"\n",
        desk.name
    ));
    finds(desk, &[("queue-deletes-itself", "error")]);
    declared.push(leaving);
    // Only its owner may look at it.
    let taken = format!("{}.taken", desk.name);
    let (owner, channel) = world::open().await;
    let options = QueueDeclareOptions {
        exclusive: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(taken.as_str().into(), options, FieldTable::default())
        .await
        .expect("a new queue");
    with(&format!(
        "queue = \"{}\"\nin-doubt = \"{taken}\"\n",
        desk.name
    ));
    finds(desk, &[("queue-cannot-be-used", "error")]);
    owner.close(200, "OK".into()).await.expect("a clean end");
    let gives_up = format!("{}.gives-up", desk.name);
    declare(&gives_up, true, &[quorum()]).await;
    let ours = format!(
        "dead-letters = \"{0}.dead-letters\"\nin-doubt = \"{0}.in-doubt\"\n",
        desk.name
    );
    with(&format!("queue = \"{gives_up}\"\n{ours}"));
    finds(desk, &[("queue-drops-what-it-gives-up", "warning")]);
    declared.push(gives_up);
    for name in declared {
        world::delete(&name).await;
    }
    world.end().await;
}

/// The rights are the server's own: of one that other tests use they would be everybody's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_that_may_not_be_configured_are_found() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let source = RabbitMq::queue("payments")
        .url(server.url())
        .open()
        .await
        .expect("the queues are declared");
    let source: Box<dyn Source> = Box::new(source);
    source
        .close(Instant::now() + world::PATIENCE)
        .await
        .expect("a clean end");
    server
        .control(&["add_user", "reader", "word"])
        .expect("a new user");
    let desk = Desk::new();
    let url = server.url().replace("guest:guest", "reader:word");
    let with = |more: &str| {
        desk.write(
            "oncegate.toml",
            &format!("[rabbitmq]\nurl = \"{url}\"\nqueue = \"payments\"\n{more}"),
        )
    };
    with("");
    server
        .control(&["set_permissions", "reader", ".*", ".*", ".*"])
        .expect("all rights");
    finds(&desk, &[]);
    server
        .control(&["set_permissions", "reader", "^$", ".*", ".*"])
        .expect("fewer rights");
    finds(&desk, &[("queue-not-compared", "error"); 3]);
    desk.run(&["doctor"])
        .ended(1)
        .says("let the user configure `payments.dead-letters`")
        .says("only for a user who may configure it");
    // Such a consumer is none that declares.
    with("topology = \"check\"\n");
    finds(&desk, &[]);
    desk.run(&["doctor"]).ended(0).says("queue-not-compared");
}

#[test]
fn a_server_that_cannot_be_asked_hides_nothing_that_was_found() {
    let desk = Desk::new();
    let kafka = "[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\nproperties = { \"security.protocol\" = \"nonsense\" }\n";
    desk.configure(&format!(
        "[gate]\nwindow = \"1h\"\nmax-age = \"2h\"\n{kafka}"
    ));
    let said = desk.run(&["doctor", "--json"]).ended(2);
    let found = said.json();
    let codes: Vec<&str> = found["findings"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["code"].as_str().expect("a code"))
        .collect();
    assert!(codes.contains(&"max-age-against-window"), "{found}");
    assert!(found["not_looked_at"][0]["where"] == "Kafka", "{found}");
    desk.run(&["doctor"])
        .ended(2)
        .says("max-age-against-window")
        .says("Not looked at: Kafka");
}

#[test]
fn a_consumer_timeout_of_any_length_is_judged() {
    let desk = Desk::new();
    let rabbitmq = "[rabbitmq]\nurl = \"amqp://127.0.0.1:1\"\nqueue = \"q\"\nconsumer-timeout = \"18446744073709551615s\"\n";
    desk.configure(rabbitmq);
    let said = desk.run(&["doctor"]).ended(1);
    assert!(
        !said.out.contains("runs-outlast-the-consumer-timeout"),
        "{said:?}"
    );
}
