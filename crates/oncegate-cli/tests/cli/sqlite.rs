//! The same on an SQLite file.

use std::sync::Arc;

use oncegate::marker::{Ask, Attempts, UNKNOWN_ATTEMPT, Verdict};
use serde_json::Value;

use crate::desk::{Desk, terms};
use crate::markers::{TOLD, one_of_each};
use crate::world::{Broker, Provider, World};

/// The keys that are listed, in order.
fn keys(listed: &Value) -> Vec<String> {
    listed["markers"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["key"].as_str().expect("a key").to_owned())
        .collect()
}

#[tokio::test]
async fn markers_are_told_and_listed_as_on_redis() {
    let desk = Desk::on_sqlite();
    one_of_each(&desk).await;
    for (id, state, words) in TOLD {
        let shown = desk.json(&["marker", "show", id]);
        assert_eq!(shown["state"], state, "{shown}");
        assert!(
            shown["says"]
                .as_str()
                .is_some_and(|says| says.contains(words)),
            "{shown}"
        );
    }
    let done = desk.json(&["marker", "show", "handled"]);
    assert_eq!(done["fingerprint"], "000000000000000042");
    assert!(
        done["written_at_ms"].as_u64().is_some() && done["expires_in_ms"].as_u64().is_some(),
        "{done}"
    );
    let all = desk.json(&["marker", "list"]);
    assert_eq!(
        keys(&all),
        ["failed", "handled", "held", "left", "refused", "unknown"]
    );
    assert_eq!(
        keys(&desk.json(&["marker", "list", "--state", "lapsed", "--state", "done"])),
        ["handled", "left"]
    );
    assert_eq!(desk.json(&["marker", "list", "--limit", "2"])["all"], false);
}

#[tokio::test]
async fn what_an_operator_changes_holds_for_consumers_and_is_audited_beside_the_file() {
    let desk = Desk::on_sqlite();
    one_of_each(&desk).await;
    desk.run(&["marker", "forget", "handled"])
        .ended(4)
        .says("would be handled AGAIN");
    assert_eq!(
        desk.json(&["marker", "show", "handled"])["state"],
        "done",
        "showing changes nothing"
    );
    for (id, fence) in [("handled", UNKNOWN_ATTEMPT), ("refused", 1)] {
        desk.run(&["marker", "forget", id, "--yes", "--as", "ann"])
            .ended(0)
            .says(&format!("is cleared, attempt {fence} now"));
        let next = Attempts {
            number: fence + 1,
            base: fence,
            crashes: 0,
        };
        assert_eq!(
            desk.ask(id, Ask::Claim, 9, 0, terms()).await,
            Verdict::Granted(next),
            "{id}"
        );
    }
    desk.run(&["marker", "forget", "unknown", "--yes"])
        .ended(1)
        .says("in-doubt resolve unknown");
    desk.run(&["marker", "forget", "held", "--yes"])
        .ended(1)
        .says("may be at work");
    for id in ["left", "failed", "never"] {
        desk.run(&["marker", "complete", id, "--yes"])
            .ended(0)
            .says("is done now");
        assert!(
            matches!(
                desk.ask(id, Ask::Claim, 9, 0, terms()).await,
                Verdict::Duplicate
            ),
            "{id}"
        );
    }
    assert_eq!(desk.json(&["audit"]).as_array().map(Vec::len), Some(5));
    assert_eq!(
        desk.json(&["audit", "--who", "ann"])
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    let lines = std::fs::read_to_string(desk.path("markers.db.audit.jsonl")).expect("the audit");
    assert_eq!(lines.lines().count(), 10, "two lines an act");
    // Somewhere else, if that is wanted.
    desk.configure(&format!(
        "[audit]\nfile = \"{}\"\n",
        desk.path("audit.jsonl").display()
    ));
    assert_eq!(desk.json(&["audit"]).as_array().map(Vec::len), Some(0));
}

#[test]
fn a_file_that_is_not_there_is_not_made_by_looking() {
    let desk = Desk::on_sqlite();
    for command in [
        &["marker", "show", "x"][..],
        &["marker", "list"],
        &["marker", "complete", "x", "--yes"],
    ] {
        desk.run(command)
            .ended(3)
            .says("there is no")
            .says("markers.db")
            .says("store.url");
    }
    assert!(!desk.path("markers.db").exists());
    desk.write("oncegate.toml", "[store]\nurl = \"memory:\"\n");
    desk.run(&["marker", "show", "x"])
        .ended(2)
        .says("store.url")
        .says("nobody else can look into it");
    desk.write(
        "oncegate.toml",
        "[store]\nurl = \"sqlite:x.db\"\nprefix = \"p:\"\n",
    );
    desk.run(&["config", "check"])
        .ended(2)
        .says("store.prefix is Redis's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stories_are_told_and_letters_resolved_with_a_consumer_on_sqlite() {
    let world = Arc::new(World::at(Desk::on_sqlite(), Broker::RabbitMq).await);
    world
        .publish(&[
            ("charged", "works"),
            ("declined", "declined"),
            ("yes", "silent"),
            ("no", "silent"),
        ])
        .await;
    world.consume(Provider::Judges, 1, 1, 2).await;
    let verdict = async |id: &str| world.json(&["explain", id]).await["verdict"].clone();
    for (id, told) in [
        ("charged", "handled"),
        ("declined", "dead-lettered"),
        ("yes", "in-doubt"),
        ("no", "in-doubt"),
        ("x", "unknown"),
    ] {
        assert_eq!(verdict(id).await, told, "{id}");
    }
    world
        .run(&[
            "in-doubt",
            "resolve",
            "yes",
            "--happened",
            "--yes",
            "--as",
            "bob",
        ])
        .await
        .ended(0)
        .says("1 resolved");
    world
        .run(&["in-doubt", "resolve", "no", "--did-not-happen", "--yes"])
        .await
        .ended(0)
        .says("sent to");
    world
        .run(&["dead-letters", "redrive", "--id", "declined", "--yes"])
        .await
        .ended(0)
        .says("1 redriven");
    world.consume(Provider::Works, 3, 0, 0).await;
    for id in ["charged", "declined", "yes", "no"] {
        assert_eq!(verdict(id).await, "handled", "{id}");
    }
    world
        .run(&["explain", "yes"])
        .await
        .ended(0)
        .says("bob said so");
    assert_eq!(
        keys(&world.json(&["marker", "list"]).await),
        ["charged", "declined", "no", "yes"]
    );
    world.end().await;
}
