//! The program connects to brokers as a consumer does: it rejects the same settings and tolerates
//! the same messages.

use std::collections::BTreeMap;
use std::sync::Arc;

use lapin::BasicProperties;
use lapin::types::AMQPValue;
use oncegate::source::{Connect, ConnectOptions};
use oncegate::{Kafka, RabbitMq};
use oncegate_testkit::proxy::{Proxy, RequestFault};

use crate::cli::TestCli;
use crate::destinations::ids;
use crate::fixture::{
    Broker, BrokerFixture, PaymentProvider, kafka, publish_properties, rabbitmq, text,
};

/// Commands that connect to a broker.
const COMMANDS: [&[&str]; 5] = [
    &["dead-letters", "list"],
    &["dead-letters", "show", "a"],
    &["dead-letters", "redrive", "--all", "--yes"],
    &["dead-letters", "drop", "--all", "--yes"],
    &["in-doubt", "list"],
];

/// Commands that report what they could not check.
const REPORTS: [&[&str]; 2] = [&["explain", "a"], &["doctor"]];

fn assert_rejected(cli: &TestCli, words: &str) {
    for command in COMMANDS {
        cli.run(command).exits_with(2).prints(words);
    }
    for command in REPORTS {
        let output = cli.run(command).prints(words);
        assert_ne!(output.code, 0, "{output:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kafka_settings_are_rejected_like_in_a_consumer() {
    let cli = TestCli::new();
    for (property, value) in [
        ("enable.ssl.certificate.verification", "false"),
        ("ssl.endpoint.identification.algorithm", "none"),
        ("bootstrap.servers", "elsewhere:9092"),
    ] {
        let consumer = Kafka::topic("t")
            .brokers(kafka())
            .group("g")
            .property(property, value)
            .connect(ConnectOptions::default())
            .await;
        let error = consumer.expect_err("it is refused").to_string();
        // The command line names the key of the file.
        let words = error.replace(".brokers(…)", "kafka.brokers");
        let brokers = format!("[kafka]\nbrokers = \"{}\"\ntopic = \"t\"\n", kafka());
        cli.configure(&format!(
            "{brokers}password = \"canary\"\nproperties = {{ \"{property}\" = \"{value}\" }}\n"
        ));
        assert_rejected(&cli, &words);
        assert!(!format!("{:?}", cli.run(COMMANDS[0])).contains("canary"));
    }
    cli.configure("[kafka]\nbrokers = \"http://x\"\ntopic = \"t\"\n");
    assert_rejected(&cli, "kafka.brokers: `http://x` begins with http://");
}

#[test]
fn the_error_of_an_unreachable_kafka_has_address_and_remedy() {
    let cli = TestCli::new();
    cli.configure("[kafka]\nbrokers = \"127.0.0.1:1\"\ntopic = \"t\"\n");
    cli.run(COMMANDS[0])
        .exits_with(3)
        .prints("Kafka at 127.0.0.1:1: cannot fetch the metadata of the topic `t.dead-letters`")
        .prints("check that Kafka is running, and that kafka.brokers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rabbitmq_settings_are_rejected_like_in_a_consumer() {
    let cli = TestCli::new();
    for url in [
        rabbitmq() + "?verify=verify_none",
        "amqp://guest:can/ary@localhost:5672/%2f".to_owned(),
    ] {
        let words = RabbitMq::queue("q")
            .url(&url)
            .connect(ConnectOptions::default())
            .await
            .expect_err("it is refused")
            .to_string();
        cli.configure(&format!("[rabbitmq]\nurl = \"{url}\"\nqueue = \"q\"\n"));
        assert_rejected(&cli, &words);
    }
    cli.configure("[rabbitmq]\nurl = \"amqp://guest:canary@127.0.0.1:1/%2f\"\nqueue = \"q\"\n");
    let output = cli
        .run(COMMANDS[0])
        .exits_with(3)
        .prints("amqp://guest@127.0.0.1:1/%2f")
        .prints("check that RabbitMQ is running");
    assert!(!output.err.contains("canary"), "{output:?}");
    cli.configure(&format!(
        "[rabbitmq]\nurl = \"{}\"\nqueue = \"q\"\n",
        rabbitmq().replace("guest:guest", "guest:canary")
    ));
    let output = cli
        .run(COMMANDS[0])
        .exits_with(3)
        .prints("ACCESS_REFUSED")
        .prints("check the user and the password");
    assert!(!output.err.contains("canary"), "{output:?}");
}

/// Nested AMQP tables in wire format: a name of one character, `F`, a length, and the content.
fn nested(depth: usize) -> Vec<u8> {
    let mut bytes = vec![0; depth * 7];
    for (level, part) in bytes.chunks_exact_mut(7).enumerate() {
        let inside = u32::try_from((depth - level - 1) * 7).expect("a frame holds it");
        part[..3].copy_from_slice(b"\x01aF");
        part[3..].copy_from_slice(&inside.to_be_bytes());
    }
    bytes
}

/// A proxy that turns the text under `nested` into a table (both have a length) and `@@@@` into
/// bytes that are not UTF-8.
fn corrupting_proxy() -> (Proxy, String) {
    let url = rabbitmq();
    let at = url.rfind(':').expect("a port") + 1;
    let port: String = url[at..].chars().take_while(char::is_ascii_digit).collect();
    let proxy = Proxy::to(port.parse().expect("a port")).expect("a free port");
    proxy.inject_faults(|bytes| {
        if let Some(found) = bytes.windows(7).position(|seven| seven == b"nestedS") {
            bytes[found + 6] = b'F';
        }
        while let Some(found) = bytes.windows(4).position(|four| four == b"@@@@") {
            bytes[found..found + 4].fill(0xff);
        }
        RequestFault::Pass
    });
    let proxy_url = url.replacen(&format!(":{port}"), &format!(":{}", proxy.port()), 1);
    (proxy, proxy_url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn list_and_redrive_tolerate_unreadable_headers() {
    let fixture = Arc::new(BrokerFixture::on(Broker::RabbitMq).await);
    let (name, (_proxy, url)) = (&fixture.cli.name, corrupting_proxy());
    let body = r#"{"card":"works"}"#;
    for (id, odd, value) in [
        (
            "deep",
            "nested",
            AMQPValue::LongString(nested(15_000).into()),
        ),
        ("odd", "a@@@@", text("value")),
        ("sound", "plain", text("value")),
    ] {
        let table = BTreeMap::from([("payment-id".into(), text(id)), (odd.into(), value)]);
        // The broker dead-letters it without a client.
        let properties = BasicProperties::default()
            .with_headers(table.into())
            .with_expiration("1".into());
        publish_properties(&url, name, body, properties).await;
        fixture.until_there_are(0, "").await;
    }
    fixture.until_there_are(3, ".dead-letters").await;
    assert_eq!(
        ids(&fixture.json(&["dead-letters", "list"]).await),
        ["deep", "odd", "sound"]
    );
    fixture
        .run(&["dead-letters", "show", "deep", "--body"])
        .await
        .exits_with(0)
        .prints("payment-id: deep")
        .prints(body);
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("3 redriven");
    // The consumer dead-letters a message with a header name that is not UTF-8.
    fixture.consume(PaymentProvider::Works, 2, 1, 0).await;
    let mut charged = fixture.charged();
    charged.sort();
    assert_eq!(charged, ["deep", "sound"]);
    assert_eq!(
        fixture.json(&["dead-letters", "list"]).await["messages"][0]["reason"],
        "unreadable"
    );
    fixture.end().await;
}
