//! Brokers that require a certificate or a login. Alone in its process, because it captures all log
//! lines.

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/fixture.rs"]
mod fixture;

use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::{Connect, ConnectOptions};
use oncegate_kafka::{Kafka, KafkaLogin};
use oncegate_testkit::Lines;
use oncegate_testkit::servers::{KafkaListener, KafkaServer, KafkaUser};

use crate::fixture::*;

/// The password, which no log line and no error may contain.
const PASSWORD: &str = "canary-7Hq2-password";
const WRONG: &str = "canary-7Hq2-mistaken";

/// One test, because all parts share the broker and the log.
#[tokio::test(flavor = "multi_thread")]
async fn authorized_clients_connect_and_no_secret_is_logged() {
    let lines = Lines::filtered("trace");
    let user = KafkaUser {
        name: "ledger".to_owned(),
        password: PASSWORD.to_owned(),
    };
    let server =
        tokio::task::spawn_blocking(|| KafkaServer::start_secured(user).expect("a broker"))
            .await
            .expect("a broker");
    let (certificate, key) = server.client_certificate();

    let login = |login: KafkaLogin| {
        move |kafka: Kafka| {
            kafka
                .login(login)
                .property("debug", "security,protocol,conf")
        }
    };
    tokio::join!(
        connects(&server, KafkaListener::Tls, |kafka| kafka),
        connects(&server, KafkaListener::MutualTls, |kafka| kafka
            .client_certificate(certificate, key)),
        connects(
            &server,
            KafkaListener::Login,
            login(KafkaLogin::plain("ledger", PASSWORD))
        ),
        connects(
            &server,
            KafkaListener::Login,
            login(KafkaLogin::scram_sha_256("ledger", PASSWORD))
        ),
        connects(
            &server,
            KafkaListener::Login,
            login(KafkaLogin::scram_sha_512("ledger", PASSWORD))
        ),
        is_rejected(&server, KafkaLogin::plain("ledger", WRONG)),
        is_rejected(&server, KafkaLogin::scram_sha_256("who", PASSWORD)),
        is_rejected(&server, KafkaLogin::scram_sha_512("ledger", WRONG)),
        a_client_without_a_certificate_is_rejected(&server, &lines),
        a_broker_with_an_unsigned_certificate_is_rejected(&server, &lines),
        a_broker_with_a_certificate_for_another_host_is_rejected(&server, &lines),
    );

    let text = lines.text();
    assert!(
        text.contains("SASL") && text.contains("SCRAM-SHA-512"),
        "librdkafka logged nothing about SASL:\n{text}"
    );
    let leaks: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("canary-7Hq2"))
        .collect();
    assert_eq!(leaks, [""; 0]);
}

/// A topic with its dead-letter and in-doubt topics, created through the plain listener.
async fn topic(server: &KafkaServer) -> Topic {
    let topic = Topic::at(server.brokers(), 1).await;
    for name in [topic.dead_letters(), topic.in_doubt()] {
        topic
            .create(
                &name,
                1,
                &[("retention.ms", "-1"), ("retention.bytes", "-1")],
            )
            .await;
    }
    topic
}

fn kafka_at(server: &KafkaServer, listener: KafkaListener, topic: &Topic) -> Kafka {
    Kafka::topic(&topic.name)
        .brokers(server.brokers_at(listener))
        .group(&topic.name)
        .ca_certificate(server.certificate_authority())
}

async fn connects(
    server: &KafkaServer,
    listener: KafkaListener,
    authenticate: impl FnOnce(Kafka) -> Kafka,
) {
    let topic = topic(server).await;
    topic.send_numbers(0, 3).await;
    let kafka = authenticate(kafka_at(server, listener, &topic));
    tracing::info!(?kafka, "as a user might print it");
    let mut source = kafka
        .connect(ConnectOptions::default())
        .await
        .unwrap_or_else(|error| panic!("{listener:?}: {error}"));
    let mut deliveries = receive(&mut source, 3).await;
    // The dead-letter producer and the admin client use the same listener.
    reject(&mut source, deliveries.remove(1), Reason::Refused).await;
    accept(&mut source, deliveries).await;
    topic.read(topic.dead_letters(), 1, |_| ()).await;
    close(source).await;
}

async fn is_rejected(server: &KafkaServer, login: KafkaLogin) {
    let topic = topic(server).await;
    let opening = kafka_at(server, KafkaListener::Login, &topic)
        .login(login.clone())
        .connect(ConnectOptions::default());
    let Ok(opened) = tokio::time::timeout(BOUND, opening).await else {
        panic!("no answer to {login:?}")
    };
    match opened {
        Err(error @ SourceError::Misconfigured { .. }) => {
            let text = format!("{error} {error:?}");
            assert!(
                text.contains("rejects the credentials") && !text.contains("canary"),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }
}

/// Waits for a warning with this reason, while opening is retried.
async fn is_logged(kafka: Kafka, brokers: &str, lines: &Lines, why: &str) {
    let is_expected = |line: &str| {
        line.contains("WARN")
            && line.contains("cannot reach the brokers")
            && line.contains(&format!("brokers={brokers:?}"))
            && line.contains(why)
    };
    let logged = async {
        while !lines.text().lines().any(is_expected) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        opened = kafka.connect(ConnectOptions::default()) => panic!("{opened:?}"),
        in_time = tokio::time::timeout(BOUND, logged) => assert!(in_time.is_ok(), "no warning about {brokers} was logged in time"),
    }
}

async fn a_client_without_a_certificate_is_rejected(server: &KafkaServer, lines: &Lines) {
    let topic = topic(server).await;
    is_logged(
        kafka_at(server, KafkaListener::MutualTls, &topic),
        &server.brokers_at(KafkaListener::MutualTls),
        lines,
        ".client_certificate(…)",
    )
    .await;
}

async fn a_broker_with_an_unsigned_certificate_is_rejected(server: &KafkaServer, lines: &Lines) {
    let topic = topic(server).await;
    let brokers = server.brokers_at(KafkaListener::Tls);
    let kafka = || {
        Kafka::topic(&topic.name)
            .brokers(&brokers)
            .group(&topic.name)
    };
    is_logged(kafka().tls(), &brokers, lines, "certificate").await;
    close(
        kafka()
            .danger_accept_any_certificate()
            .connect(ConnectOptions::default())
            .await
            .expect("a source"),
    )
    .await;
}

/// `127.1` is the same host as `127.0.0.1`, but not the name in the certificate.
async fn a_broker_with_a_certificate_for_another_host_is_rejected(
    server: &KafkaServer,
    lines: &Lines,
) {
    let topic = topic(server).await;
    let brokers = server
        .brokers_at(KafkaListener::Tls)
        .replace("localhost", "127.1");
    let kafka = Kafka::topic(&topic.name)
        .brokers(&brokers)
        .group(&topic.name)
        .ca_certificate(server.certificate_authority());
    is_logged(
        kafka,
        &brokers,
        lines,
        "names the host that is set in .brokers(…)",
    )
    .await;
}
