//! Handlers that fail, and messages that cannot be handled.

use crate::broker::{Broker, RejectedMessage, Sent};
use crate::on_both_brokers;
use crate::world::World;

on_both_brokers!(
    a_failure_clears_the_marker_and_the_message_runs_again,
    a_panic_is_in_doubt_at_most_once,
    a_panic_runs_again_with_a_higher_attempt_effectively_once,
    a_panic_runs_again_bare,
    invalid_messages_go_to_the_dead_letters_and_the_others_are_handled,
    the_log_names_each_message_that_is_not_handled,
);

async fn a_failure_clears_the_marker_and_the_message_runs_again(broker: Broker) {
    for guarantee in ["at-most-once", "effectively-once", "bare"] {
        let world = World::new(broker).await;
        world.publish([Sent::new("a", "retry-once")]).await;
        let consumer = world
            .consumer(guarantee)
            .with("retries", 0)
            .with("backoff-ms", 800)
            .start();
        world.until_starts(1).await;
        world
            .until("the marker is cleared", async || {
                world.marker("a").await.is_none()
            })
            .await;
        assert_eq!(world.effects(), [], "{guarantee}");
        world.until_settled(1).await;
        assert_eq!(world.attempts("a"), [1, 1], "{guarantee}");
        assert_eq!(world.effected(), ["a"], "{guarantee}");
        assert!(world.is_done("a").await, "{guarantee}");
        world.end([consumer]).await;
    }
}

async fn a_panic_is_in_doubt_at_most_once(broker: Broker) {
    let world = World::new(broker).await;
    world
        .publish([Sent::new("a", "panic-once"), Sent::new("b", "work")])
        .await;
    let consumer = world.consumer("at-most-once").start();
    world.until_settled(2).await;
    world
        .until("it is in doubt", async || world.in_doubt().await.len() == 1)
        .await;
    let rejected = world.in_doubt().await.remove(0);
    assert_eq!(
        (
            rejected.reason(),
            rejected.header("oncegate-id"),
            rejected.header("id")
        ),
        ("in-doubt-panicked", "a", "a")
    );
    assert_eq!(rejected.body, r#"{"do":"panic-once"}"#);
    assert!(
        rejected
            .header("oncegate-first-error")
            .contains("as the message says"),
        "{rejected:?}"
    );
    assert_eq!(
        (world.attempts("a"), world.effected()),
        (vec![1], vec!["b".to_owned()])
    );
    assert!(
        world
            .marker("a")
            .await
            .is_some_and(|marker| marker.starts_with("v1 "))
    );
    assert_eq!(world.dead_letters().await, []);
    world.end([consumer]).await;
}

async fn a_panic_runs_again_with_a_higher_attempt_effectively_once(broker: Broker) {
    let world = World::new(broker).await;
    world.publish([Sent::new("a", "panic-once")]).await;
    let consumer = world.consumer("effectively-once").start();
    world.until_settled(1).await;
    assert_eq!(
        (world.attempts("a"), world.effected()),
        (vec![1, 2], vec!["a".to_owned()])
    );
    assert_eq!(world.marker("a").await.as_deref(), Some("1"));
    world.end([consumer]).await;
}

async fn a_panic_runs_again_bare(broker: Broker) {
    let world = World::new(broker).await;
    world.publish([Sent::new("a", "panic-once")]).await;
    let consumer = world.consumer("bare").start();
    world.until_settled(1).await;
    assert_eq!(
        (world.attempts("a"), world.effected()),
        (vec![1, 1], vec!["a".to_owned()])
    );
    assert_eq!(world.marker("a").await.as_deref(), Some("1"));
    world.end([consumer]).await;
}

async fn invalid_messages_go_to_the_dead_letters_and_the_others_are_handled(broker: Broker) {
    let world = World::new(broker).await;
    let bad = [
        Sent::raw(Some("broken".into()), "{not json"),
        Sent::raw(Some("unknown".into()), r#"{"do":"unknown action"}"#),
        Sent::raw(None, r#"{"do":"work"}"#),
        Sent::raw(Some(String::new()), r#"{"do":"slow"}"#),
        Sent::raw(Some("empty".into()), ""),
    ];
    world
        .publish([Sent::new("before", "work")].into_iter().chain(bad.clone()))
        .await;
    let consumer = world.consumer("effectively-once").start();
    world.until_settled(6).await;
    world.publish([Sent::new("after", "work")]).await;
    world.until_settled(7).await;
    assert_eq!(world.effected(), ["after", "before"]);
    world
        .until("all are in the dead letters", async || {
            world.dead_letters().await.len() == bad.len()
        })
        .await;
    let rejected_messages = world.dead_letters().await;
    let of = |sent: &Sent| {
        rejected_messages
            .iter()
            .find(|rejected| rejected.body == sent.body)
            .unwrap_or_else(|| panic!("{sent:?}: {rejected_messages:?}"))
    };
    let reasons: Vec<&str> = bad.iter().map(of).map(RejectedMessage::reason).collect();
    assert_eq!(
        reasons,
        [
            "unreadable",
            "unreadable",
            "missing-id",
            "missing-id",
            "unreadable"
        ]
    );
    assert_eq!(of(&bad[0]).header("oncegate-id"), "broken");
    assert!(
        rejected_messages
            .iter()
            .all(|rejected| rejected.header("oncegate-origin").starts_with(&world.name)),
        "{rejected_messages:?}"
    );
    assert_eq!(world.in_doubt().await, []);
    world.end([consumer]).await;
}

async fn the_log_names_each_message_that_is_not_handled(broker: Broker) {
    let world = World::new(broker).await;
    let large = format!(r#"{{"do":"work","padding":"{}"}}"#, "x".repeat(200));
    world
        .publish([
            Sent::raw(Some("incomplete".into()), r#"{"ms":1}"#),
            Sent::new("panics", "panic-once"),
            Sent::raw(Some("large".into()), &large),
        ])
        .await;
    let consumer = world
        .consumer("at-most-once")
        .with("body-limit", 100)
        .start();
    world
        .until("all are dead-lettered or in doubt", async || {
            (
                world.dead_letters().await.len(),
                world.in_doubt().await.len(),
            ) == (2, 1)
        })
        .await;
    let log = consumer.log();
    let dead_letters = format!("destination=\"{}.dead-letters\"", world.name);
    let in_doubt = format!("destination=\"{}.in-doubt\"", world.name);
    let origin = format!("origin={}", world.name);
    for (line, id, destination, others) in [
        (
            "message rejected, sending it to the dead letters",
            r#"id="incomplete""#,
            &dead_letters,
            [r#"reason="unreadable""#, "missing field `do`"],
        ),
        (
            "message in doubt, sending it to the in-doubt queue",
            r#"id="panics""#,
            &in_doubt,
            [r#"reason="in-doubt-panicked""#, "as the message says"],
        ),
        (
            "message body exceeds body_limit",
            r#"id="large""#,
            &dead_letters,
            [r#"reason="too-large""#, "limit=100"],
        ),
    ] {
        let lines: Vec<&str> = log.lines().filter(|it| it.contains(line)).collect();
        let [found] = lines[..] else {
            panic!("{line}: {lines:#?}\n{log}");
        };
        for field in [id, destination, origin.as_str()].into_iter().chain(others) {
            assert!(found.contains(field), "{field} in {found}");
        }
    }
    world.end([consumer]).await;
}
