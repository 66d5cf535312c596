//! Metrics for Prometheus. The recorder is installed once per process, so this test has its own.

use std::io::Write;
use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use oncegate::metric::Kind;
use oncegate::{
    Consumer, Context, Failure, Handler, IdSource, MemoryBroker, MemoryStore, Message, Raw,
    RawBytes,
};
use oncegate_admin::{Admin, Metrics};

struct Done;

impl Handler for Done {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

#[tokio::test]
async fn a_scrape_has_all_metrics_and_passes_promtool() {
    assert!(Metrics::installed().is_none());
    let metrics = Metrics::install().expect("the first recorder");
    let installed = Metrics::installed().expect("the installed recorder");
    assert!(
        installed
            .text()
            .contains("oncegate_kafka_partitions_assigned_total 0")
    );
    assert!(
        Metrics::install()
            .expect_err("a second one")
            .to_string()
            .contains("Metrics::of")
    );
    let broker = MemoryBroker::new("payments");
    for id in ["one", "two", "two"] {
        broker.publish(Message::new("secret-canary").with_message_id(id));
    }
    let all = broker.clone();
    Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(Done)
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
    // Registers the metrics of the adapters too, so that each is checked once.
    for metric in oncegate::metrics::all() {
        let labels: Vec<(&str, &str)> = metric.labels.iter().map(|it| (*it, "some")).collect();
        match metric.kind {
            Kind::Counter => metrics::counter!(metric.name, &labels).increment(0),
            Kind::Gauge => metrics::gauge!(metric.name, &labels).increment(0),
            _ => {}
        }
    }

    let server = Admin::new()
        .listen((Ipv4Addr::LOCALHOST, 0))
        .metrics(metrics)
        .serve()
        .expect("it opens");
    let answer = reqwest::get(format!("http://{}/metrics", server.address()))
        .await
        .expect("it answers");
    assert_eq!(
        answer.headers()["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    let text = answer.text().await.expect("text");
    for line in [
        r#"oncegate_deliveries_total{outcome="completed"} 2"#,
        r#"oncegate_deliveries_total{outcome="duplicate"} 1"#,
        "# HELP oncegate_awaiting_claim Deliveries whose claim is repeated later: another delivery holds the id, or the store is unavailable",
        "# TYPE oncegate_claim_seconds histogram",
        r#"oncegate_handle_seconds_bucket{le="+Inf"} 2"#,
        "oncegate_kafka_messages_expired_total 0",
    ] {
        assert!(
            text.lines().any(|it| it == line),
            "{line} is not in:\n{text}"
        );
    }
    for metric in oncegate::metrics::all() {
        assert!(
            text.contains(&format!(
                "# TYPE {} {}\n",
                metric.name,
                metric.kind.as_str()
            )),
            "{} is not in:\n{text}",
            metric.name
        );
    }
    assert!(!text.contains("canary"), "{text}");
    promtool_accepts(&text);
}

fn promtool_accepts(text: &str) {
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool, of Debian's package prometheus: `cargo xtask setup` installs it");
    promtool
        .stdin
        .take()
        .expect("piped")
        .write_all(text.as_bytes())
        .expect("it reads");
    let output = promtool.wait_with_output().expect("it ends");
    let output = (
        output.status.success(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    );
    assert_eq!(output, (true, String::new(), String::new()));
}
