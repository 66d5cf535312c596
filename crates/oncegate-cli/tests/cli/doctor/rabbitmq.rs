//! Findings about RabbitMQ queues and permissions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lapin::options::QueueDeclareOptions;
use lapin::types::{AMQPValue, FieldTable};
use oncegate::source::{Connect, ConnectOptions};
use oncegate::{RabbitMq, Source};
use oncegate_testkit::proxy::{Proxy, RequestFault};
use oncegate_testkit::servers::RabbitServer;

use super::{assert_broker_findings, findings};
use crate::cli::TestCli;
use crate::fixture::{self, Broker, BrokerFixture};

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ends_although_the_broker_does_not_confirm_the_end_of_the_connection() {
    /// The class and the method of `connection.close`.
    const CLOSE: [u8; 4] = [0, 10, 0, 50];
    const DELAY: Duration = Duration::from_secs(90);
    let url = fixture::rabbitmq();
    let (_, after_host) = url.rsplit_once(':').expect("a port");
    let (port, _) = after_host.split_once('/').expect("a virtual host");
    let proxy = Proxy::to(port.parse().expect("a number")).expect("a proxy");
    let delayed = Arc::new(AtomicBool::new(false));
    let saw_close = delayed.clone();
    proxy.inject_faults(move |request| {
        if request.windows(CLOSE.len()).any(|part| part == CLOSE) {
            saw_close.store(true, Ordering::Relaxed);
            RequestFault::Delay(DELAY)
        } else {
            RequestFault::Pass
        }
    });
    let cli = TestCli::new();
    // Without heartbeats, whose absence would end the connection, too.
    let url = url.replace(&format!(":{port}/"), &format!(":{}/", proxy.port()));
    let url = format!("{url}?heartbeat=0");
    cli.write(
        "oncegate.toml",
        &format!("[rabbitmq]\nurl = \"{url}\"\nqueue = \"no-such-queue\"\n"),
    );
    let started = Instant::now();
    let _ = findings(&cli);
    assert!(delayed.load(Ordering::Relaxed), "it closes the connection");
    assert!(started.elapsed() < DELAY, "{:?}", started.elapsed());
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
                ![
                    "queue-without-dead-letter-exchange",
                    "queue-refused",
                    "store-not-configured",
                ]
                .contains(code)
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
    let (refused, no_exchange) = (
        ("queue-refused", "error"),
        ("queue-without-dead-letter-exchange", "warning"),
    );
    for (queue, more, expected) in [
        (&without_exchange, "", &[refused, no_exchange][..]),
        (&without_exchange, "topology = \"check\"\n", &[no_exchange]),
        (&cli.name, "", &[]),
        (&cli.name, "queue-kind = \"classic\"\n", &[refused]),
        (&cli.name, "consumers = \"single-active\"\n", &[refused]),
    ] {
        with(&format!("queue = \"{queue}\"\n{ours}{more}"));
        assert_broker_findings(cli, expected);
    }
    let single_active = format!("{}.single-active", cli.name);
    let source = RabbitMq::queue(&single_active)
        .url(fixture::rabbitmq())
        .single_active_consumer();
    let source: Box<dyn Source> = Box::new(
        source
            .connect(ConnectOptions::default())
            .await
            .expect("the queues are declared"),
    );
    source
        .close(Instant::now() + fixture::TEST_TIMEOUT)
        .await
        .expect("a clean end");
    with(&format!(
        "queue = \"{single_active}\"\nconsumers = \"single-active\"\n"
    ));
    cli.run(&["doctor"])
        .exits_with(1)
        .prints("single-active-consumer-delivery-limit");
    for suffix in ["dead-letters", "in-doubt"] {
        declared.push(format!("{single_active}.{suffix}"));
    }
    declared.extend([single_active, without_exchange]);
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
