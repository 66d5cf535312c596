//! A message that always fails, among many that do not.

use std::time::{Duration, Instant};

use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeleteOptions,
};
use lapin::types::AMQPValue;
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use oncegate_amqp::RabbitMq;
use oncegate_core::IdSource;
use oncegate_core::source::{Connect, ConnectOptions, Source, headers};
use oncegate_testkit::poison::{self, POISON, Poison, Rounds};
use oncegate_testkit::servers::RabbitServer;

const QUEUE: &str = "orders";
const TIMEOUT: Duration = Duration::from_secs(60);

/// Publishes these messages with confirms.
async fn publish(channel: &Channel, numbers: impl Iterator<Item = u32>) {
    let mut sent = Vec::new();
    for number in numbers {
        let options = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_message_id(format!("n-{number}").into());
        sent.push(
            channel
                .basic_publish(
                    "".into(),
                    QUEUE.into(),
                    options,
                    number.to_string().as_bytes(),
                    properties,
                )
                .await
                .expect("sent"),
        );
    }
    for confirm in sent {
        assert!(confirm.await.expect("confirmed").take_message().is_none());
    }
}

/// Handles this many sound messages, behind a poisoned one or none; returns the time from the first
/// to the last. The poisoned one ends in the dead letters.
async fn handle(
    url: &str,
    channel: &Channel,
    sound: u32,
    (poison, first): (Poison, u32),
) -> Duration {
    let source: Box<dyn Source> = Box::new(
        RabbitMq::queue(QUEUE)
            .url(url)
            .connect(ConnectOptions::default())
            .await
            .expect("opened"),
    );
    source
        .close(Instant::now() + Duration::from_secs(10))
        .await
        .expect("closed");
    publish(channel, first..=sound).await;
    let source = RabbitMq::queue(QUEUE).url(url);
    let check_dead_letter = async || {
        if first == POISON {
            let dead = dead_letter(channel).await;
            let table = dead.properties.headers().clone().unwrap_or_default();
            assert_eq!(dead.data, POISON.to_string().as_bytes());
            assert_eq!(
                table.inner().get(headers::REASON),
                Some(&AMQPValue::LongString("attempts-spent".into()))
            );
        }
    };
    let took = poison::handle(
        source,
        IdSource::message_id(),
        (poison, first),
        sound,
        check_dead_letter,
    )
    .await;
    channel
        .queue_delete(QUEUE.into(), QueueDeleteOptions::default())
        .await
        .expect("deleted");
    took
}

async fn dead_letter(channel: &Channel) -> lapin::message::Delivery {
    let until = Instant::now() + TIMEOUT;
    loop {
        let name = format!("{QUEUE}.dead-letters");
        let got = channel
            .basic_get(name.into(), BasicGetOptions { no_ack: true })
            .await
            .expect("the queue");
        if let Some(message) = got {
            return message.delivery;
        }
        assert!(Instant::now() < until, "no dead letter");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn poison_among(poison: Poison, sound: u32, rounds: usize) -> Rounds {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let connection = Connection::connect(&server.url(), ConnectionProperties::default())
        .await
        .expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .expect("confirms");
    let measured = Rounds::measure(poison, rounds, async |what| {
        handle(&server.url(), &channel, sound, what).await
    })
    .await;
    crate::assert_no_refused_acks(&server);
    measured
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poisoned_message_is_dead_lettered_after_its_attempts_and_others_are_handled() {
    for poison in [Poison::Fails, Poison::Panics] {
        poison_among(poison, 1_000, 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures; cargo xtask faults runs it"]
async fn a_poisoned_message_among_ten_thousand() {
    for poison in [Poison::Fails, Poison::Panics] {
        poison_among(poison, 10_000, crate::RunLength::from_env().rounds.max(5))
            .await
            .assert_slowdown_limit();
    }
}
