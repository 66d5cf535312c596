//! A RabbitMQ that accepts only TLS, with a certificate of a private CA.

use std::path::Path;
use std::time::Instant;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use oncegate::source::{Connect, ConnectOptions};
use oncegate::{RabbitMq, Source};
use oncegate_testkit::servers::{RabbitOptions, RabbitServer};

use crate::cli::TestCli;
use crate::fixture::TEST_TIMEOUT;

const QUEUE: &str = "payments";

/// Declares the queues of a source and publishes one dead letter.
async fn prepare(server: &RabbitServer) {
    let (authority, (certificate, key)) =
        (server.certificate_authority(), server.client_certificate());
    let source = RabbitMq::queue(QUEUE)
        .url(server.url())
        .ca_certificate(&authority)
        .client_certificate(&certificate, &key);
    let source: Box<dyn Source> = Box::new(
        source
            .connect(ConnectOptions::default())
            .await
            .expect("the queues are declared"),
    );
    source
        .close(Instant::now() + TEST_TIMEOUT)
        .await
        .expect("a clean end");

    let read = |path: &Path| std::fs::read(path).expect("a file");
    let identity = Some(OwnedIdentity::PKCS8 {
        pem: read(&certificate),
        key: read(&key),
    });
    let tls = OwnedTLSConfig {
        identity,
        cert_chain: Some(String::from_utf8(read(&authority)).expect("text")),
    };
    let (url, runtime) = (
        server.url(),
        lapin::runtime::default_runtime().expect("a runtime"),
    );
    let connection =
        Connection::connect_with_config(&url, ConnectionProperties::default(), tls, runtime)
            .await
            .expect("RabbitMQ answers");
    let channel = connection.create_channel().await.expect("a channel");
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .expect("confirms");
    let mut headers = FieldTable::default();
    headers.insert("oncegate-id".into(), AMQPValue::LongString("pay-1".into()));
    let properties = BasicProperties::default()
        .with_delivery_mode(2)
        .with_headers(headers);
    let messages = format!("{QUEUE}.dead-letters");
    let published = channel.basic_publish(
        "".into(),
        messages.as_str().into(),
        BasicPublishOptions::default(),
        b"{}",
        properties,
    );
    assert!(
        published
            .await
            .expect("a channel")
            .await
            .expect("an answer")
            .is_ack()
    );
    connection
        .close(200, "OK".into())
        .await
        .expect("a clean end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_with_a_private_ca_is_read_and_redriven() {
    let start = || RabbitServer::start_with(&RabbitOptions::new().tls());
    let server = tokio::task::spawn_blocking(start)
        .await
        .expect("no panic")
        .expect("a server");
    prepare(&server).await;
    let cli = TestCli::new();
    let (authority, (certificate, key)) =
        (server.certificate_authority(), server.client_certificate());
    let rabbitmq = format!(
        "[rabbitmq]\nurl = \"{}\"\nqueue = \"{QUEUE}\"\n",
        server.url()
    );
    let ca_setting = format!("ca-certificate = \"{}\"\n", authority.display());
    let client_setting = format!(
        "client-certificate = \"{}\"\nclient-key = \"{}\"\n",
        certificate.display(),
        key.display()
    );

    cli.configure(&rabbitmq);
    cli.run(&["dead-letters", "list"])
        .exits_with(3)
        .prints("UnknownIssuer")
        .prints("rabbitmq.ca-certificate");
    cli.configure(&format!("{rabbitmq}{ca_setting}"));
    cli.run(&["dead-letters", "list"])
        .exits_with(3)
        .prints("amqps://guest@localhost")
        .prints("cannot be reached");
    cli.configure(&format!("{rabbitmq}ca-certificate = \"nowhere.pem\"\n"));
    cli.run(&["dead-letters", "list"])
        .exits_with(2)
        .prints("rabbitmq.ca-certificate: nowhere.pem");
    cli.configure(&format!("{rabbitmq}{ca_setting}client-key = \"x\"\n"));
    cli.run(&["config", "check"])
        .exits_with(2)
        .prints("rabbitmq.client-key requires rabbitmq.client-certificate");

    cli.configure(&format!("{rabbitmq}{ca_setting}{client_setting}"));
    cli.run(&["doctor"])
        .prints("Checked the settings, Redis, RabbitMQ");
    assert_eq!(
        cli.json(&["dead-letters", "list"])["messages"][0]["id"],
        "pay-1"
    );
    cli.run(&[
        "dead-letters",
        "redrive",
        "--all",
        "--accept-forgotten",
        "--yes",
    ])
    .exits_with(0)
    .prints("1 redriven");
    assert_eq!(
        cli.json(&["dead-letters", "list"])["messages"]
            .as_array()
            .map(Vec::len),
        Some(0)
    );
}
