//! RabbitMQ queues that count reads towards a delivery limit.

use std::collections::BTreeMap;
use std::time::Instant;

use lapin::BasicProperties;
use lapin::types::AMQPValue;
use oncegate::source::{Connect, ConnectOptions};
use oncegate::{RabbitMq, Source};
use oncegate_testkit::servers::{RabbitServer, ServerSet};
use serde_json::Value;

use super::{fixture, ids};
use crate::cli::TestCli;
use crate::fixture::{Broker, TEST_TIMEOUT, publish_properties};

/// The count of a message in a quorum queue after two reads, by the release of RabbitMQ: 3.10 counts
/// each requeue, 4.3 none by `basic.nack`.
const COUNT_AFTER_TWO_READS: [(&str, i64); 2] = [("3.10", 2), ("4.3", 0)];

/// The count of the release under test.
fn quorum_count() -> i64 {
    let release = ServerSet::current().expect("a set of servers").rabbitmq();
    let row = COUNT_AFTER_TWO_READS.iter().find(|row| row.0 == release);
    row.unwrap_or_else(|| panic!("no row for RabbitMQ {release}"))
        .1
}

/// How RabbitMQ counts reads: a classic queue counts nothing, see [`COUNT_AFTER_TWO_READS`] for
/// others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_that_count_reads_are_read_only_with_an_unreachable_limit() {
    let fixture = fixture(Broker::RabbitMq).await;
    let name = fixture.cli.name.clone();
    let delivery_count_after_two_reads = async |queue: &str, extra: &[&str]| {
        let settings = fixture
            .settings()
            .replace(crate::fixture::COUNTS_ACCEPTED, "");
        fixture
            .cli
            .configure(&format!("{settings}dead-letters = \"{queue}\"\n"));
        fixture
            .publish_to(queue, "x", "{}", &[("oncegate-id", "x")])
            .await;
        for _ in 0..2 {
            let arguments: Vec<&str> = ["dead-letters", "list", "--json"]
                .into_iter()
                .chain(extra.iter().copied())
                .collect();
            let output = fixture.run(&arguments).await;
            if output.code != 0 {
                output.exits_with(3).prints("--accept-delivery-counts");
                return None;
            }
            assert_eq!(ids(&output.json()), ["x"]);
            fixture.until(queue, 1).await;
        }
        let messages = crate::fixture::take_all(queue).await;
        assert_eq!(messages.len(), 1, "{messages:?}");
        Some(messages[0].2)
    };
    let (classic, limited) = (format!("{name}.classic"), format!("{name}.limited"));
    crate::fixture::declare(&classic, &[("x-queue-type", "classic")], None).await;
    crate::fixture::declare(&limited, &[("x-queue-type", "quorum")], Some(5)).await;
    assert_eq!(delivery_count_after_two_reads(&classic, &[]).await, Some(0));
    // The header comes from another queue.
    let table: BTreeMap<_, _> = [
        ("oncegate-id".into(), crate::fixture::text("z")),
        ("x-delivery-count".into(), AMQPValue::LongLongInt(9)),
    ]
    .into();
    let properties = BasicProperties::default().with_headers(table.into());
    publish_properties(&crate::fixture::rabbitmq(), &classic, "{}", properties).await;
    let listed = fixture.json(&["dead-letters", "list"]).await;
    assert_eq!(
        (ids(&listed), &listed["messages"][0]["delivery_count"]),
        (vec!["z".to_owned()], &Value::Null),
        "{listed}"
    );
    assert_eq!(
        delivery_count_after_two_reads(&limited, &[]).await,
        None,
        "a queue that drops messages after five reads is not read"
    );
    crate::fixture::take_all(&limited).await;
    assert_eq!(
        delivery_count_after_two_reads(&limited, &["--accept-delivery-counts"]).await,
        Some(quorum_count())
    );
    assert_eq!(
        delivery_count_after_two_reads(&format!("{name}.dead-letters"), &[]).await,
        Some(quorum_count()),
        "the queue of oncegate has an unreachable limit"
    );
    for queue in [classic, limited] {
        crate::fixture::delete(&queue).await;
    }
    fixture.end().await;
}

/// Where the default queue type is quorum, a declaration without arguments matches a quorum queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_with_default_type_quorum_is_not_treated_as_classic() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    for arguments in [
        &["add_vhost", "quorum", "--default-queue-type", "quorum"][..],
        &["set_permissions", "-p", "quorum", "guest", ".*", ".*", ".*"],
    ] {
        server.control(arguments).expect("a virtual host");
    }
    let url = server.url().replace("%2f", "quorum");
    crate::fixture::declare_at(&url, "payments.dead-letters", &[], None).await;
    let cli = TestCli::new();
    cli.configure(&format!(
        "[rabbitmq]\nurl = \"{url}\"\nqueue = \"payments\"\n"
    ));
    cli.run(&["dead-letters", "list"])
        .exits_with(3)
        .prints("may drop messages")
        .prints("--accept-delivery-counts");
}

/// A RabbitMQ of its own, on which a consumer of the queue `payments` has declared its queues.
async fn server_with_queues() -> RabbitServer {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let source: Box<dyn Source> = Box::new(
        RabbitMq::queue("payments")
            .url(server.url())
            .connect(ConnectOptions::default())
            .await
            .expect("the queues are declared"),
    );
    source
        .close(Instant::now() + TEST_TIMEOUT)
        .await
        .expect("a clean end");
    server
}

/// A policy may set a limit that no client can see.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_never_exceeds_the_delivery_limit_of_a_policy() {
    let server = server_with_queues().await;
    let limit = [
        "-q",
        "set_policy",
        "limit",
        "dead-letters",
        r#"{"delivery-limit": 5}"#,
        "--apply-to",
        "queues",
    ];
    server.control(&limit).expect("a policy");
    let cli = TestCli::new();
    cli.configure(&format!(
        "[gate]\nid = \"header payment-id\"\n[rabbitmq]\nurl = \"{}\"\nqueue = \"payments\"\n",
        server.url()
    ));
    for id in ["x", "y"] {
        let headers = [
            ("payment-id", id),
            ("oncegate-id", id),
            ("oncegate-reason", "refused"),
            ("oncegate-attempts", "5"),
            ("oncegate-crashes", "1"),
            ("oncegate-last-attempt", "6"),
        ];
        let table: BTreeMap<_, _> = headers
            .iter()
            .map(|(name, value)| ((*name).into(), crate::fixture::text(value)))
            .collect();
        let properties = BasicProperties::default()
            .with_headers(table.into())
            .with_timestamp(1_000)
            .with_message_id("m".into());
        publish_properties(
            &server.url(),
            "payments.dead-letters",
            r#"{"card":"works"}"#,
            properties,
        )
        .await;
    }
    let first = cli.json(&["dead-letters", "show", "x"])[0].clone();
    for look in 0..20 {
        let mut seen = ids(&cli.json(&["dead-letters", "list"]));
        seen.sort_unstable();
        assert_eq!(seen, ["x", "y"], "at look {look}");
    }
    let explanation = cli.json(&["explain", "x"]);
    assert_eq!(
        (&explanation["verdict"], &explanation["not_checked"]),
        (&"effect-unknown".into(), &serde_json::json!([])),
        "{explanation}"
    );
    let (message, last) = (
        &explanation["dead_letters"][0],
        cli.json(&["dead-letters", "show", "x", "--body"])[0].clone(),
    );
    assert_eq!(
        (
            &message["attempts"],
            &message["crashes"],
            &message["last_attempt"],
        ),
        (&5.into(), &1.into(), &6.into()),
        "{message}"
    );
    cli.run(&["dead-letters", "list"])
        .exits_with(0)
        .prints("ATTEMPTS  CRASHES  LAST ATTEMPT");
    let named = |message: &Value| -> BTreeMap<String, String> {
        let headers = message["headers"].as_array().expect("a list").iter();
        let text = |it: &Value| it.as_str().expect("a text").to_owned();
        headers
            .map(|it| (text(&it[0]), text(&it[1])))
            .filter(|(name, _)| {
                ![
                    "x-delivery-count",
                    "x-acquired-count",
                    "oncegate-replaced-by",
                ]
                .contains(&name.as_str())
            })
            .collect()
    };
    assert_eq!(
        (named(&last), &last["from_ms"], &last["body"]),
        (
            named(&first),
            &first["from_ms"],
            &r#"{"card":"works"}"#.into()
        ),
        "a replacement keeps headers, time and body"
    );
    // A user without write permission cannot replace messages: the queue is reported as not
    // checked.
    server
        .control(&[
            "-q",
            "set_permissions",
            "guest",
            ".*",
            "^(?!amq.default$).*$",
            ".*",
        ])
        .expect("rights");
    let without_permission = cli.run(&["explain", "x", "--json"]).exits_with(3).json();
    assert_eq!(
        (
            &without_permission["verdict"],
            &without_permission["dead_letters"]
        ),
        (&"unchecked".into(), &Value::Null),
        "{without_permission}"
    );
    assert_eq!(
        without_permission["not_checked"][0]["where"], "the dead-letter destination on rabbitmq",
        "{without_permission}"
    );
    cli.run(&["explain", "x"])
        .exits_with(3)
        .prints("x: unknown; not everything was checked; not checked: the dead-letter destination on rabbitmq");
    cli.run(&["dead-letters", "list"])
        .exits_with(3)
        .prints("Not checked: the dead-letter destination on rabbitmq")
        .prints("the user has no permission to publish")
        .prints("list_policies");
    let listed = cli
        .run(&["dead-letters", "list", "--json"])
        .exits_with(3)
        .json();
    assert_eq!(
        (&listed["all"], &listed["not_checked"][0]["where"]),
        (
            &false.into(),
            &without_permission["not_checked"][0]["where"]
        ),
        "{listed}"
    );
    server
        .control(&["-q", "set_permissions", "guest", ".*", ".*", ".*"])
        .expect("rights");
    assert_eq!(
        ids(&cli.json(&["dead-letters", "list"])).len(),
        2,
        "refused reads did not increase the delivery count"
    );
}

/// RabbitMQ answers nothing on a connection that published during an alarm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_letters_are_listed_and_not_redriven_during_a_resource_alarm() {
    let server = server_with_queues().await;
    let cli = TestCli::new();
    cli.configure(&format!(
        "[rabbitmq]\nurl = \"{}\"\nqueue = \"payments\"\n",
        server.url()
    ));
    publish_properties(
        &server.url(),
        "payments.dead-letters",
        "{}",
        BasicProperties::default(),
    )
    .await;
    server
        .control(&["set_vm_memory_high_watermark", "0"])
        .expect("an alarm");
    let count = |listed: Value| listed["messages"].as_array().map(Vec::len);
    assert_eq!(count(cli.json(&["dead-letters", "list"])), Some(1));
    let redrive = [
        "dead-letters",
        "redrive",
        "--all",
        "--accept-forgotten",
        "--yes",
    ];
    cli.run(&redrive).exits_with(3).prints("resource alarm");
    server
        .control(&["set_vm_memory_high_watermark", "0.8"])
        .expect("the end of the alarm");
    assert_eq!(count(cli.json(&["dead-letters", "list"])), Some(1));
}
