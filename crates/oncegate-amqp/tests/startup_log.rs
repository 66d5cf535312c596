//! The log lines of a source without a broker, or with one that refuses it. In a test binary of its
//! own, because it captures the log of the process.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use oncegate_amqp::{RabbitMq, Topology};
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, Raw};
use oncegate_testkit::Lines;
use oncegate_testkit::proxy::Proxy;

/// One test with sequential parts, because the process has one log.
#[tokio::test]
async fn log_lines_of_a_source_without_a_broker_and_with_one_that_refuses_it() {
    let lines = Lines::of_this_process();
    a_refusal_is_an_error_without_log_lines_of_the_client(&lines).await;
    the_loss_of_a_connection_is_logged_in_one_line(&lines).await;
    without_a_broker_one_line_with_setting_problem_and_remedy_is_logged(&lines).await;
    a_consumer_that_may_exceed_the_consumer_timeout_logs_a_warning_at_start(&lines).await;
}

/// The broker refuses the login, the virtual host, and the queue: connection and channel are closed.
async fn a_refusal_is_an_error_without_log_lines_of_the_client(lines: &Lines) {
    let broker = oncegate_testkit::rabbitmq_url().expect("a RabbitMQ to test against");
    let (address, _) = broker.rsplit_once('/').expect("a virtual host");
    for (url, refusal) in [
        (
            broker.replacen("guest:guest", "someone:canary", 1),
            "check the user and the password",
        ),
        (
            format!("{address}/missing"),
            "check that the virtual host exists",
        ),
        (broker.clone(), "does not exist; create it"),
    ] {
        let opening = RabbitMq::queue("test.startup-log.missing")
            .url(url)
            .topology(Topology::Check)
            .connect(ConnectOptions::default());
        let error = opening.await.expect_err("refused").to_string();
        assert!(error.contains(refusal), "{refusal}: {error}");
        wait_for_the_end_of_connection_threads().await;
        let logged = lines.take();
        assert!(logged.is_empty(), "{refusal}: {logged:#?}");
    }
}

/// The proxy closes the connection, like a node that stops.
async fn the_loss_of_a_connection_is_logged_in_one_line(lines: &Lines) {
    let broker = oncegate_testkit::rabbitmq_url().expect("a RabbitMQ to test against");
    let (address, vhost) = broker.rsplit_once('/').expect("a virtual host");
    let (user, port) = address.rsplit_once(':').expect("a port");
    let proxy = Proxy::to(port.parse().expect("a port")).expect("a proxy");
    let client = lapin::Connection::connect(&broker, lapin::ConnectionProperties::default())
        .await
        .expect("a connection");
    let channel = client.create_channel().await.expect("a channel");
    let queue = format!("test.startup-log.{}", std::process::id());
    channel
        .queue_declare(
            queue.as_str().into(),
            lapin::options::QueueDeclareOptions::default(),
            lapin::types::FieldTable::default(),
        )
        .await
        .expect("declared");
    let source = RabbitMq::queue(&queue)
        .url(format!("{user}:{}/{vhost}", proxy.port()))
        .topology(Topology::Trust)
        .connect(ConnectOptions::default())
        .await
        .expect("a source");
    proxy.reset();
    let mut logged = Vec::new();
    while !logged
        .iter()
        .any(|line: &String| line.contains("channel lost"))
    {
        tokio::time::sleep(Duration::from_millis(10)).await;
        logged.extend(lines.take().into_iter().map(|(_, line)| line));
    }
    drop(source);
    channel
        .queue_delete(
            queue.as_str().into(),
            lapin::options::QueueDeleteOptions::default(),
        )
        .await
        .expect("deleted");
    client.close(200, "OK".into()).await.expect("closed");
    drop((channel, client));
    wait_for_the_end_of_connection_threads().await;
    logged.extend(lines.take().into_iter().map(|(_, line)| line));
    let errors: Vec<_> = logged
        .iter()
        .filter(|line| line.contains("ERROR") || line.contains("lapin"))
        .collect();
    assert!(errors.is_empty(), "{errors:#?}");
}

/// The client's threads may log after an error was returned, until they end.
async fn wait_for_the_end_of_connection_threads() {
    let runs = || {
        std::fs::read_dir("/proc/self/task")
            .expect("threads")
            .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok())
            .any(|name| name.starts_with("lapin"))
    };
    let deadline = Instant::now() + Duration::from_secs(30);
    while runs() {
        assert!(
            Instant::now() < deadline,
            "a connection thread has not ended"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn without_a_broker_one_line_with_setting_problem_and_remedy_is_logged(lines: &Lines) {
    let started = Instant::now();
    let opening = RabbitMq::queue("q")
        .url("amqp://someone:canary@127.0.0.1:1/%2f")
        .connect(ConnectOptions::default());
    // Long enough for six attempts to connect.
    assert!(
        tokio::time::timeout(Duration::from_secs(5), opening)
            .await
            .is_err()
    );
    let mut lines = lines.take();
    // The source of the check before may end later.
    lines.retain(|(_, line)| !line.contains("closed while not connected"));
    let [(at, line)] = lines.as_slice() else {
        panic!("{} lines: {lines:#?}", lines.len())
    };
    assert!(
        at.duration_since(started) < Duration::from_secs(2),
        "after {:?}",
        at.duration_since(started)
    );
    for part in [
        "WARN",
        "url: amqp://someone@127.0.0.1:1/%2f cannot be reached (",
        "refused",
        "check that RabbitMQ is running, that host and port are correct",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

/// A handler that never runs.
struct UncalledHandler;

impl Handler for UncalledHandler {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

async fn a_consumer_that_may_exceed_the_consumer_timeout_logs_a_warning_at_start(lines: &Lines) {
    for (minutes, may_exceed) in [(5, false), (10, true)] {
        let queue = format!("slow-{minutes}");
        let mut logged = Vec::new();
        let until_the_broker_cannot_be_reached = async {
            while !logged
                .iter()
                .any(|line: &String| line.contains("cannot be reached") && line.contains(&queue))
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
                logged.extend(lines.take().into_iter().map(|(_, line)| line));
            }
        };
        let consumer = Consumer::builder()
            .source(RabbitMq::queue(&queue).url("amqp://127.0.0.1:1/%2f"))
            .store(MemoryStore::new())
            .id(IdSource::message_id())
            .handler(UncalledHandler)
            .handler_timeout(Duration::from_secs(60 * minutes));
        consumer
            .run_until(until_the_broker_cannot_be_reached)
            .await
            .expect("no configuration error");
        let warned = logged.iter().any(|line| {
            line.contains("WARN")
                && line.contains("consumer_timeout: it may stay unacknowledged for 2500s")
        });
        assert_eq!(warned, may_exceed, "{minutes} min: {logged:#?}");
    }
}
