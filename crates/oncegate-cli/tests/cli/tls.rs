//! A RabbitMQ that takes no plain connection, and whose certificate an authority of its own has
//! signed.

use std::path::Path;
use std::time::Instant;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use oncegate::{Open, RabbitMq, Source};
use oncegate_testkit::servers::{RabbitOptions, RabbitServer};

use crate::desk::Desk;
use crate::world::PATIENCE;

const QUEUE: &str = "payments";

/// The queues as a source declares them, and one dead letter.
async fn prepare(server: &RabbitServer) {
    let (authority, (certificate, key)) =
        (server.certificate_authority(), server.client_certificate());
    let source = RabbitMq::queue(QUEUE)
        .url(server.url())
        .ca_certificate(&authority)
        .client_certificate(&certificate, &key);
    let source: Box<dyn Source> = Box::new(source.open().await.expect("the queues are declared"));
    source
        .close(Instant::now() + PATIENCE)
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
    let letters = format!("{QUEUE}.dead-letters");
    let published = channel.basic_publish(
        "".into(),
        letters.as_str().into(),
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
async fn a_broker_with_an_authority_of_its_own_is_looked_into_and_sent_to() {
    let start = || RabbitServer::start_with(&RabbitOptions::new().tls());
    let server = tokio::task::spawn_blocking(start)
        .await
        .expect("no panic")
        .expect("a server");
    prepare(&server).await;
    let desk = Desk::new();
    let (authority, (certificate, key)) =
        (server.certificate_authority(), server.client_certificate());
    let rabbitmq = format!(
        "[rabbitmq]\nurl = \"{}\"\nqueue = \"{QUEUE}\"\n",
        server.url()
    );
    let trusts = format!("ca-certificate = \"{}\"\n", authority.display());
    let shows = format!(
        "client-certificate = \"{}\"\nclient-key = \"{}\"\n",
        certificate.display(),
        key.display()
    );

    desk.configure(&rabbitmq);
    desk.run(&["dead-letters", "list"])
        .ended(3)
        .says("UnknownIssuer")
        .says("rabbitmq.ca-certificate");
    desk.configure(&format!("{rabbitmq}{trusts}"));
    desk.run(&["dead-letters", "list"])
        .ended(3)
        .says("amqps://guest@localhost")
        .says("cannot be reached");
    desk.configure(&format!("{rabbitmq}ca-certificate = \"nowhere.pem\"\n"));
    desk.run(&["dead-letters", "list"])
        .ended(2)
        .says("rabbitmq.ca-certificate: nowhere.pem");
    desk.configure(&format!("{rabbitmq}{trusts}client-key = \"x\"\n"));
    desk.run(&["config", "check"])
        .ended(2)
        .says("rabbitmq.client-key needs rabbitmq.client-certificate");

    desk.configure(&format!("{rabbitmq}{trusts}{shows}"));
    desk.run(&["doctor"])
        .says("Looked at the settings, Redis, RabbitMQ");
    assert_eq!(
        desk.json(&["dead-letters", "list"])["letters"][0]["id"],
        "pay-1"
    );
    desk.run(&[
        "dead-letters",
        "redrive",
        "--all",
        "--accept-forgotten",
        "--yes",
    ])
    .ended(0)
    .says("1 redriven");
    assert_eq!(
        desk.json(&["dead-letters", "list"])["letters"]
            .as_array()
            .map(Vec::len),
        Some(0)
    );
}
