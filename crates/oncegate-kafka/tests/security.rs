//! A broker that lets in only who shows a certificate or logs in. Alone in its process, because it
//! listens to all that is logged.

#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "kafka/stage.rs"]
mod stage;

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::SourceError;
use oncegate_core::lifecycle::Reason;
use oncegate_core::source::Open;
use oncegate_kafka::{Kafka, KafkaLogin};
use oncegate_testkit::servers::{KafkaDoor, KafkaServer, KafkaUser};

use crate::stage::*;

/// No line and no error may bear it.
const PASSWORD: &str = "canary-7Hq2-password";
const WRONG: &str = "canary-7Hq2-mistaken";

/// All that was logged.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl io::Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0
            .lock()
            .expect("nobody panics with it")
            .extend_from_slice(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("nobody panics with it")).into_owned()
    }
}

/// In one test: they share the broker and the log.
#[tokio::test(flavor = "multi_thread")]
async fn who_belongs_there_is_let_in_and_no_secret_is_ever_said() {
    let lines = Lines::default();
    let writer = lines.clone();
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .init();
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
        opens(&server, KafkaDoor::Tls, |kafka| kafka),
        opens(&server, KafkaDoor::MutualTls, |kafka| kafka
            .client_certificate(certificate, key)),
        opens(
            &server,
            KafkaDoor::Login,
            login(KafkaLogin::plain("ledger", PASSWORD))
        ),
        opens(
            &server,
            KafkaDoor::Login,
            login(KafkaLogin::scram_sha_256("ledger", PASSWORD))
        ),
        opens(
            &server,
            KafkaDoor::Login,
            login(KafkaLogin::scram_sha_512("ledger", PASSWORD))
        ),
        is_refused(&server, KafkaLogin::plain("ledger", WRONG)),
        is_refused(&server, KafkaLogin::scram_sha_256("who", PASSWORD)),
        is_refused(&server, KafkaLogin::scram_sha_512("ledger", WRONG)),
        who_shows_no_certificate_stays_outside(&server, &lines),
        a_broker_that_nobody_signed_for_is_not_believed(&server, &lines),
        a_broker_whose_certificate_bears_another_name_is_not_believed(&server, &lines),
    );

    let text = lines.text();
    assert!(
        text.contains("SASL") && text.contains("SCRAM-SHA-512"),
        "librdkafka was not heard:\n{text}"
    );
    let told: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("canary-7Hq2"))
        .collect();
    assert_eq!(told, [""; 0]);
}

/// A topic with all that belongs to it, made by the plain door.
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

fn by(server: &KafkaServer, door: KafkaDoor, topic: &Topic) -> Kafka {
    Kafka::topic(&topic.name)
        .brokers(server.brokers_by(door))
        .group(&topic.name)
        .ca_certificate(server.certificate_authority())
}

async fn opens(server: &KafkaServer, door: KafkaDoor, key: impl FnOnce(Kafka) -> Kafka) {
    let topic = topic(server).await;
    topic.send_numbers(0, 3).await;
    let kafka = key(by(server, door, &topic));
    tracing::info!(?kafka, "as a user might print it");
    let mut source = kafka
        .open()
        .await
        .unwrap_or_else(|error| panic!("{door:?}: {error}"));
    let mut deliveries = receive(&mut source, 3).await;
    // The producer of dead letters and the client that looks at topics come in by the same door.
    reject(&mut source, deliveries.remove(1), Reason::Refused).await;
    accept(&mut source, deliveries).await;
    topic.read(topic.dead_letters(), 1, |_| ()).await;
    close(source).await;
}

async fn is_refused(server: &KafkaServer, login: KafkaLogin) {
    let topic = topic(server).await;
    let opening = by(server, KafkaDoor::Login, &topic)
        .login(login.clone())
        .open();
    let Ok(opened) = tokio::time::timeout(BOUND, opening).await else {
        panic!("no answer to {login:?}")
    };
    match opened {
        Err(error @ SourceError::Misconfigured { .. }) => {
            let text = format!("{error} {error:?}");
            assert!(
                text.contains("refuses the credentials") && !text.contains("canary"),
                "{text}"
            );
        }
        other => panic!("{other:?}"),
    }
}

/// Says why it is not let in, and goes on trying.
async fn is_told(kafka: Kafka, brokers: &str, lines: &Lines, why: &str) {
    let said = |line: &str| {
        line.contains("WARN")
            && line.contains(&format!("{brokers} cannot be reached"))
            && line.contains(why)
    };
    let told = async {
        while !lines.text().lines().any(said) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        opened = kafka.open() => panic!("{opened:?}"),
        in_time = tokio::time::timeout(BOUND, told) => assert!(in_time.is_ok(), "nothing was said of {brokers}"),
    }
}

async fn who_shows_no_certificate_stays_outside(server: &KafkaServer, lines: &Lines) {
    let topic = topic(server).await;
    is_told(
        by(server, KafkaDoor::MutualTls, &topic),
        &server.brokers_by(KafkaDoor::MutualTls),
        lines,
        ".client_certificate(…)",
    )
    .await;
}

async fn a_broker_that_nobody_signed_for_is_not_believed(server: &KafkaServer, lines: &Lines) {
    let topic = topic(server).await;
    let brokers = server.brokers_by(KafkaDoor::Tls);
    let kafka = || {
        Kafka::topic(&topic.name)
            .brokers(&brokers)
            .group(&topic.name)
    };
    is_told(kafka().tls(), &brokers, lines, "certificate").await;
    close(
        kafka()
            .danger_accept_any_certificate()
            .open()
            .await
            .expect("a source"),
    )
    .await;
}

/// `127.1` is the same host as `127.0.0.1`, which the certificate names, by a name that it does
/// not.
async fn a_broker_whose_certificate_bears_another_name_is_not_believed(
    server: &KafkaServer,
    lines: &Lines,
) {
    let topic = topic(server).await;
    let brokers = server
        .brokers_by(KafkaDoor::Tls)
        .replace("localhost", "127.1");
    let kafka = Kafka::topic(&topic.name)
        .brokers(&brokers)
        .group(&topic.name)
        .ca_certificate(server.certificate_authority());
    is_told(
        kafka,
        &brokers,
        lines,
        "is its certificate made out to the very host that stands in .brokers(…)",
    )
    .await;
}
