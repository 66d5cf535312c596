//! Invalid settings at start: a permanent error is reported in one line that names the setting; an
//! unreachable server is retried.

use std::time::Duration;

use oncegate_testkit::servers::{RedisOptions, RedisServer};

use crate::broker::Broker;
use crate::on_both_brokers;
use crate::world::{ConsumerArguments, World};

on_both_brokers!(
    a_wrong_setting_is_refused_with_one_line_that_names_it,
    the_start_waits_for_an_unavailable_server
);

/// A reserved port without a listener.
const UNREACHABLE: &str = "127.0.0.1:1";

async fn a_wrong_setting_is_refused_with_one_line_that_names_it(broker: Broker) {
    let world = World::new(broker).await;
    let missing = format!("{}-missing", world.name);
    let redis = RedisServer::start(RedisOptions::new().password("right")).expect("Redis starts");
    let wrong_password = redis.url().replace("right", "canary");
    let refused_user = broker.url().replace("guest:guest", "guest:canary");
    let mut wrong = vec![
        ("Redis::at", "redis", "localhost:6379"),
        ("Redis::at", "redis", &wrong_password),
        ("lease", "lease-ms", "0"),
        ("lease", "lease-ms", "100000000"),
        ("max_in_flight", "in-flight", "0"),
        ("scope", "scope", "a|b"),
    ];
    wrong.extend(match broker {
        Broker::Kafka => vec![
            ("brokers", "url", ""),
            ("topic", "from", missing.as_str()),
            ("topic", "from", ""),
            ("group", "group", ""),
        ],
        Broker::RabbitMq => vec![
            ("url", "url", "http://localhost"),
            ("url", "url", refused_user.as_str()),
            ("queue", "from", missing.as_str()),
            ("queue", "from", ""),
            ("prefetch", "prefetch", "0"),
        ],
    });
    for (setting, argument, value) in wrong {
        refused(
            setting,
            world
                .consumer("effectively-once")
                .with("missing", "refuse")
                .with(argument, value),
        )
        .await;
    }
    // This Redis has no persistence, which at most once requires.
    refused(
        "store",
        world.consumer("at-most-once").with("redis", redis.url()),
    )
    .await;
    world.broker.remove(&world.name).await;
}

/// Starts a consumer, and checks that it ends with one line that names the invalid setting.
async fn refused(setting: &str, settings: ConsumerArguments<'_>) {
    let arguments = format!("{settings:?}");
    let mut consumer = settings.start();
    let status = consumer.ended(Duration::from_secs(15)).await;
    let log = consumer.log();
    assert_eq!(status.code(), Some(1), "{arguments}: {log}");
    // The thread of a client may log after that line.
    let error_line: Vec<&str> = log
        .lines()
        .filter_map(|line| line.strip_prefix("consumer: "))
        .collect();
    let [error_line] = error_line[..] else {
        panic!("{arguments}: {log}")
    };
    assert!(
        log.lines()
            .all(|line| line.starts_with("consumer: ") || line.starts_with("20")),
        "more than one line: {log}"
    );
    assert!(
        error_line
            .split(": ")
            .any(|part| part.split(' ').next() == Some(setting)),
        "{arguments}: {error_line}"
    );
    assert!(
        !log.contains("canary") && !log.contains("panicked"),
        "{log}"
    );
}

async fn the_start_waits_for_an_unavailable_server(broker: Broker) {
    let world = World::new(broker).await;
    let unreachable = match broker {
        Broker::Kafka => UNREACHABLE.to_owned(),
        Broker::RabbitMq => format!("amqp://guest:canary@{UNREACHABLE}/%2f"),
    };
    for (argument, value) in [
        ("url", unreachable),
        ("redis", format!("redis://:canary@{UNREACHABLE}")),
    ] {
        let consumer = world
            .consumer("effectively-once")
            .with(argument, value)
            .start();
        let warned = async || {
            consumer
                .log()
                .lines()
                .any(|line| line.contains("WARN") && line.contains(UNREACHABLE))
        };
        world
            .until(&format!("a warning about {argument}"), warned)
            .await;
        assert!(!consumer.log().contains("canary"), "{}", consumer.log());
        consumer.stop().await;
    }
    world.broker.remove(&world.name).await;
}
