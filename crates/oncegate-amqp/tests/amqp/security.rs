//! TLS, client certificates and login.

use std::path::Path;
use std::time::{Duration, Instant};

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate_amqp::RabbitMq;
use oncegate_core::lifecycle::{Reason, Settlement};
use oncegate_core::source::{Connect, ConnectOptions, SourceError};
use oncegate_testkit::servers::{RABBITMQ_CLIENT, RabbitOptions, RabbitServer};

use crate::fixture::*;

const QUEUE: &str = "payments";

/// A channel without oncegate, for publishing and counting.
async fn channel(server: &RabbitServer) -> (Connection, Channel) {
    let read = |path: &Path| std::fs::read(path).expect("a file");
    let (certificate, key) = server.client_certificate();
    let identity = OwnedIdentity::PKCS8 {
        pem: read(&certificate),
        key: read(&key),
    };
    let authority = String::from_utf8(read(&server.certificate_authority())).expect("text");
    let config = OwnedTLSConfig {
        identity: Some(identity),
        cert_chain: Some(authority),
    };
    let runtime = lapin::runtime::default_runtime().expect("a runtime");
    let url = server.url();
    let connecting =
        Connection::connect_with_config(&url, ConnectionProperties::default(), config, runtime);
    let connection = connecting.await.expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .expect("confirms");
    (connection, channel)
}

async fn publish(channel: &Channel, body: &str) {
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let published = channel.basic_publish(
        "".into(),
        QUEUE.into(),
        options,
        body.as_bytes(),
        BasicProperties::default(),
    );
    let confirmation = published
        .await
        .expect("published")
        .await
        .expect("confirmed");
    assert!(confirmation.is_ack() && confirmation.take_message().is_none());
}

async fn ready(channel: &Channel, queue: &str) -> u32 {
    let options = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(queue.into(), options, FieldTable::default())
        .await
        .expect("the queue")
        .message_count()
}

/// Consumes one message and rejects another, so that both connections are used.
async fn assert_consumes(source: RabbitMq, channel: &Channel) {
    let mut source = open(source).await;
    publish(channel, "accepted").await;
    publish(channel, "rejected").await;
    for settlement in [accept(), Settlement::Reject(Reason::Refused)] {
        let delivery = delivery(&mut source).await;
        settle(&mut source, delivery, settlement).await;
    }
    close(source).await;
    let deadline = Instant::now() + Duration::from_secs(20);
    while ready(channel, QUEUE).await > 0 || ready(channel, "payments.dead-letters").await == 0 {
        assert!(Instant::now() < deadline, "the settlements did not arrive");
    }
    let options = lapin::options::QueuePurgeOptions::default();
    channel
        .queue_purge("payments.dead-letters".into(), options)
        .await
        .expect("purged");
}

/// Asserts that connecting is retried and does not fail.
async fn assert_retries(source: RabbitMq) {
    let opening = tokio::time::timeout(
        Duration::from_millis(700),
        source.connect(ConnectOptions::default()),
    )
    .await;
    assert!(opening.is_err(), "connecting failed: {opening:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_requires_tls_and_a_client_certificate_is_consumed_from() {
    let start = || RabbitServer::start_with(&RabbitOptions::new().tls());
    let server = tokio::task::spawn_blocking(start)
        .await
        .expect("no panic")
        .expect("a server");
    let (authority, (certificate, key)) =
        (server.certificate_authority(), server.client_certificate());
    let (connection, channel) = channel(&server).await;
    let source = || {
        RabbitMq::queue(QUEUE)
            .url(server.url())
            .ca_certificate(&authority)
    };
    assert_consumes(source().client_certificate(&certificate, &key), &channel).await;

    // The user is the certificate's common name, without a password.
    let user = format!("<<\"{RABBITMQ_CLIENT}\">>");
    let permissions = "<<\".*\">>, <<\".*\">>, <<\".*\">>, <<\"test\">>";
    let add =
        format!("rabbit_auth_backend_internal:add_user({user}, <<\"not used\">>, <<\"test\">>)");
    let permit =
        format!("rabbit_auth_backend_internal:set_permissions({user}, <<\"/\">>, {permissions})");
    server
        .control(&["-q", "eval", &format!("{add}, {permit}.")])
        .expect("a user");
    let external = server.url().replacen("guest:guest@", "", 1) + "?auth_mechanism=external";
    assert_consumes(
        source()
            .url(external)
            .client_certificate(&certificate, &key),
        &channel,
    )
    .await;
    assert_retries(source()).await;
    assert_retries(
        RabbitMq::queue(QUEUE)
            .url(server.url())
            .client_certificate(&certificate, &key),
    )
    .await;
    let swapped = source()
        .client_certificate(&key, &certificate)
        .connect(ConnectOptions::default())
        .await
        .expect_err("they are swapped")
        .to_string();
    assert!(swapped.starts_with("client_certificate: "), "{swapped}");
    let foreign = source()
        .client_certificate(&authority, &key)
        .connect(ConnectOptions::default())
        .await
        .expect_err("another key")
        .to_string();
    assert!(foreign.starts_with("client_certificate: "), "{foreign}");
    let wrong = source()
        .client_certificate(&certificate, &key)
        .url(server.url().replacen("guest:guest", "guest:canary", 1))
        .connect(ConnectOptions::default())
        .await;
    match wrong {
        Err(error @ SourceError::Misconfigured { .. }) => {
            assert!(!error.to_string().contains("canary"), "{error}")
        }
        other => panic!("{other:?}"),
    }
    connection.close(200, "OK".into()).await.expect("closed");
}

/// Each missing right ends a first start with the right that RabbitMQ names and all that are needed;
/// the rights of the book suffice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_start_names_each_missing_right_and_those_of_the_book_suffice() {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let control = |arguments: &[&str]| server.control(arguments).expect("a reply");
    control(&["-q", "add_user", "consumer", "canary"]);
    let permit = |rights: [&str; 3]| {
        control(&[&["-q", "set_permissions", "consumer"][..], &rights].concat());
    };
    let source =
        || RabbitMq::queue(QUEUE).url(server.url().replacen("guest:guest", "consumer:canary", 1));
    let (all, none) = (".*", "^$");
    // Configure, write, read; then what the reply names, and what the remedy names. RabbitMQ
    // 3.10 names the object, and not the right.
    for (rights, denied, remedy) in [
        (
            [none, all, all],
            "access to queue",
            "configure on the queue",
        ),
        (
            [all, all, none],
            "access to queue",
            "also read on the queue",
        ),
        (
            [all, none, all],
            "access to exchange",
            "write on the exchange",
        ),
    ] {
        permit(rights);
        let error = tokio::time::timeout(
            Duration::from_secs(20),
            source().connect(ConnectOptions::default()),
        )
        .await
        .expect("it ends")
        .expect_err("a right is missing");
        let SourceError::Misconfigured { .. } = error else {
            panic!("{denied}: {error}");
        };
        let text = error.to_string();
        for words in [denied, remedy, "payments", "Topology::Check"] {
            assert!(text.contains(words), "{words}: {text}");
        }
        assert!(!text.contains("canary"), "{text}");
    }
    let book = include_str!("../../../../docs/src/rabbitmq.md");
    let line = book
        .lines()
        .find_map(|line| line.strip_prefix("rabbitmqctl set_permissions consumer "))
        .expect("the line of the book");
    let rights: Vec<&str> = line
        .split(' ')
        .map(|right| right.trim_matches('\''))
        .collect();
    permit(rights.try_into().expect("three rights"));
    let connection = Connection::connect(&server.url(), ConnectionProperties::default())
        .await
        .expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .expect("confirms");
    assert_consumes(source(), &channel).await;
    connection.close(200, "OK".into()).await.expect("closed");
}
