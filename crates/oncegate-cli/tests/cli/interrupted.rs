//! Interrupted commands: no message is lost, and none is charged twice.

use std::process::{Command, Stdio};
use std::sync::Arc;

use oncegate_testkit::proxy::{Proxy, RequestFault, contains};

use crate::cli::TestCli;
use crate::destinations::{ids, on_both_brokers};
use crate::fixture::{Broker, BrokerFixture, PaymentProvider};
use crate::redrive::write_marker;

on_both_brokers!(
    a_redrive_survives_sigkill_at_each_step,
    sigterm_ends_a_redrive_after_the_current_message,
    a_resolve_survives_sigkill_before_its_audit_line,
    a_sent_message_that_was_not_removed_is_deduplicated,
);

/// A fixture whose Redis is behind a proxy.
async fn fixture(broker: Broker) -> (Arc<BrokerFixture>, Proxy) {
    let url = oncegate_testkit::redis_url().expect("ONCEGATE_REDIS is set");
    let port = url
        .rsplit(':')
        .next()
        .and_then(|port| port.trim_end_matches('/').parse().ok())
        .expect("a port");
    let proxy = Proxy::to(port).expect("a port is free");
    let cli = TestCli::at(&format!("redis://127.0.0.1:{}", proxy.port()));
    (Arc::new(BrokerFixture::at(cli, broker).await), proxy)
}

/// Selects a request.
type RequestMatch = fn(&[u8]) -> bool;

/// Kills the program (SIGKILL) when it sends the selected request, which Redis never receives.
async fn kill_at(
    fixture: &BrokerFixture,
    proxy: &Proxy,
    matches: RequestMatch,
    arguments: &[&str],
) {
    let (matched_tx, mut matched_rx) = tokio::sync::mpsc::unbounded_channel();
    proxy.inject_faults(move |request| {
        if !matches(request) {
            return RequestFault::Pass;
        }
        let _ = matched_tx.send(());
        // Longer than the test.
        RequestFault::Delay(std::time::Duration::from_secs(3_600))
    });
    let mut program = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .current_dir(fixture.cli.path(""))
        .args(arguments)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program was built");
    tokio::time::timeout(crate::fixture::TEST_TIMEOUT, matched_rx.recv())
        .await
        .expect("the program sends the request in time")
        .expect("the proxy runs");
    program.kill().expect("it is running");
    program.wait().expect("it ended");
    proxy.pass();
}

fn starts_action(request: &[u8]) -> bool {
    contains(request, r#""stage":"begun""#)
}

fn releases_marker(request: &[u8]) -> bool {
    contains(request, "EVAL")
}

fn records_sent(request: &[u8]) -> bool {
    contains(request, r#""stage":"done""#) && contains(request, "sent to ")
}

async fn sigterm_ends_a_redrive_after_the_current_message(broker: Broker) {
    let (fixture, proxy) = fixture(broker).await;
    fixture
        .publish(&[("a", "declined"), ("b", "declined"), ("c", "declined")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 3, 0).await;
    let (matched_tx, mut matched_rx) = tokio::sync::mpsc::unbounded_channel();
    proxy.inject_faults(move |request| {
        if !records_sent(request) || matched_tx.send(()).is_err() {
            return RequestFault::Pass;
        }
        // The signal arrives after the copy and before the removal of a message.
        RequestFault::Delay(std::time::Duration::from_secs(2))
    });
    let program = Command::new(env!("CARGO_BIN_EXE_oncegate"))
        .current_dir(fixture.cli.path(""))
        .args(["dead-letters", "redrive", "--all", "--rate", "50", "--yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program was built");
    tokio::time::timeout(crate::fixture::TEST_TIMEOUT, matched_rx.recv())
        .await
        .expect("the program sends the request in time")
        .expect("the proxy runs");
    drop(matched_rx);
    let assert_explained = Command::new("kill")
        .args(["-TERM", &program.id().to_string()])
        .status()
        .expect("there is a kill");
    assert!(assert_explained.success());
    let ended = tokio::task::spawn_blocking(|| program.wait_with_output().expect("it ended"))
        .await
        .expect("no panic");
    let (out, err) = (
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr),
    );
    assert_eq!(ended.status.code(), Some(1), "{out}{err}");
    assert!(
        out.contains("1 redriven, 0 left where they are") && err.contains("stopped by a signal"),
        "{out}{err}"
    );
    proxy.pass();
    // The current message was removed, or marked as done on Kafka; none is half done.
    assert_eq!(
        fixture.json(&["dead-letters", "list"]).await["messages"]
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("2 redriven");
    fixture
        .consume(
            PaymentProvider::Works,
            3,
            if broker == Broker::Kafka { 3 } else { 0 },
            0,
        )
        .await;
    fixture.end().await;
}

async fn a_redrive_survives_sigkill_at_each_step(broker: Broker) {
    let (fixture, proxy) = fixture(broker).await;
    fixture
        .publish(&[("a", "declined"), ("b", "declined"), ("c", "declined")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 3, 0).await;
    let steps: [(&str, RequestMatch, &str); 3] = [
        ("a", starts_action, "waiting"),
        ("b", releases_marker, "begun"),
        ("c", records_sent, "begun"),
    ];
    for (id, step, state) in steps {
        kill_at(
            &fixture,
            &proxy,
            step,
            &["dead-letters", "redrive", "--id", id, "--yes"],
        )
        .await;
        fixture.until_there_are(3, ".dead-letters").await;
        let messages = fixture.json(&["dead-letters", "list", "--id", id]).await;
        assert_eq!(messages["messages"][0]["state"], state, "{id}: {messages}");
    }
    // Without a marker, a message that may have been sent is not sent again without a flag; with a
    // marker that records no effect, it is.
    write_marker(&fixture.cli, "c", None).await;
    let output = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1);
    output
        .prints("an interrupted command may have sent it")
        .prints("2 redriven, 1 left");
    let left = if broker == Broker::Kafka { 3 } else { 1 };
    fixture.consume(PaymentProvider::Works, 3, left, 0).await;
    let mut charged = fixture.charged();
    charged.sort();
    assert_eq!(charged, ["a", "b", "c"]);
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1)
        .prints("was handled meanwhile");
    // Its marker expires, as after the window.
    write_marker(&fixture.cli, "c", None).await;
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1)
        .prints("--accept-unfinished");
    // Kafka keeps three messages and three copies; the queue of RabbitMQ is empty.
    fixture
        .until_there_are(if broker == Broker::Kafka { 6 } else { 0 }, "")
        .await;
    assert_eq!(ids(&fixture.json(&["dead-letters", "list"]).await), ["c"]);
    fixture
        .run(&["dead-letters", "drop", "--id", "c", "--yes"])
        .await
        .exits_with(0);
    assert_eq!(ids(&fixture.json(&["dead-letters", "list"]).await), [""; 0]);
    fixture.end().await;
}

async fn a_resolve_survives_sigkill_before_its_audit_line(broker: Broker) {
    let (fixture, proxy) = fixture(broker).await;
    fixture.publish(&[("a", "silent")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 0, 1).await;
    let resolve = ["in-doubt", "resolve", "a", "--did-not-happen", "--yes"];
    kill_at(&fixture, &proxy, records_sent, &resolve).await;
    fixture.until_there_are(1, ".in-doubt").await;
    assert_eq!(
        fixture.json(&["in-doubt", "list"]).await["messages"][0]["state"],
        "begun"
    );
    // The marker deduplicates a second copy.
    fixture
        .run(&resolve)
        .await
        .exits_with(0)
        .prints("1 resolved");
    fixture
        .consume(
            PaymentProvider::Works,
            1,
            0,
            if broker == Broker::Kafka { 1 } else { 0 },
        )
        .await;
    assert_eq!(fixture.charged(), ["a"]);
    fixture.end().await;
}

/// The reply to the last audit line is lost: on RabbitMQ the message stays, though the audit
/// records that it was sent.
async fn a_sent_message_that_was_not_removed_is_deduplicated(broker: Broker) {
    let (fixture, proxy) = fixture(broker).await;
    fixture.publish(&[("a", "declined")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 1, 0).await;
    proxy.inject_faults(|request| {
        if records_sent(request) {
            RequestFault::LoseReply
        } else {
            RequestFault::Pass
        }
    });
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(3)
        .prints("the audit cannot record that");
    proxy.pass();
    fixture.until_there_are(1, ".dead-letters").await;
    assert_eq!(fixture.json(&["audit"]).await[0]["stage"], "done");
    let waits = ids(&fixture.json(&["dead-letters", "list"]).await);
    let again = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await;
    match broker {
        Broker::Kafka => {
            assert_eq!(waits, [""; 0], "the audit records that it was redriven");
            again.exits_with(0).prints("0 redriven, 0 left");
        }
        Broker::RabbitMq => {
            // The marker shows that the first copy was not claimed, so the gate deduplicates a
            // second one.
            assert_eq!(waits, ["a"]);
            again.exits_with(0).prints("1 redriven, 0 left");
        }
    }
    fixture.until_there_are(2, "").await;
    fixture
        .consume(
            PaymentProvider::Works,
            1,
            if broker == Broker::Kafka { 1 } else { 0 },
            0,
        )
        .await;
    assert_eq!(fixture.charged(), ["a"]);
    fixture.end().await;
}
