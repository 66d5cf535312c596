//! The commands on an SQLite store.

use std::sync::Arc;

use oncegate::marker::{Ask, Attempts, UNKNOWN_ATTEMPT, Verdict};
use serde_json::Value;

use crate::cli::{TestCli, terms};
use crate::fixture::{Broker, BrokerFixture, Provider};
use crate::markers::{TOLD, one_of_each};

/// The listed keys, in order.
fn keys(listed: &Value) -> Vec<String> {
    listed["markers"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["key"].as_str().expect("a key").to_owned())
        .collect()
}

#[tokio::test]
async fn markers_are_shown_and_listed_as_on_redis() {
    let cli = TestCli::on_sqlite();
    one_of_each(&cli).await;
    for (id, state, words) in TOLD {
        let shown = cli.json(&["marker", "show", id]);
        assert_eq!(shown["state"], state, "{shown}");
        assert!(
            shown["says"]
                .as_str()
                .is_some_and(|says| says.contains(words)),
            "{shown}"
        );
    }
    let done = cli.json(&["marker", "show", "handled"]);
    assert_eq!(done["fingerprint"], "000000000000000042");
    assert!(
        done["written_at_ms"].as_u64().is_some() && done["expires_in_ms"].as_u64().is_some(),
        "{done}"
    );
    let all = cli.json(&["marker", "list"]);
    assert_eq!(
        keys(&all),
        ["failed", "handled", "held", "left", "refused", "unknown"]
    );
    assert_eq!(
        keys(&cli.json(&["marker", "list", "--state", "lapsed", "--state", "done"])),
        ["handled", "left"]
    );
    assert_eq!(cli.json(&["marker", "list", "--limit", "2"])["all"], false);
}

#[tokio::test]
async fn changes_apply_to_consumers_and_are_audited_beside_the_file() {
    let cli = TestCli::on_sqlite();
    one_of_each(&cli).await;
    cli.run(&["marker", "forget", "handled"])
        .exits_with(4)
        .prints("would be handled AGAIN");
    assert_eq!(
        cli.json(&["marker", "show", "handled"])["state"],
        "done",
        "showing changes nothing"
    );
    for (id, fence) in [("handled", UNKNOWN_ATTEMPT), ("refused", 1)] {
        cli.run(&["marker", "forget", id, "--yes", "--as", "ann"])
            .exits_with(0)
            .prints(&format!("is cleared, attempt {fence} now"));
        let next = Attempts {
            number: fence + 1,
            base: fence,
            crashes: 0,
        };
        assert_eq!(
            cli.ask(id, Ask::Claim, 9, 0, terms()).await,
            Verdict::Granted(next),
            "{id}"
        );
    }
    cli.run(&["marker", "forget", "unknown", "--yes"])
        .exits_with(1)
        .prints("in-doubt resolve unknown");
    cli.run(&["marker", "forget", "held", "--yes"])
        .exits_with(1)
        .prints("may be handling it");
    for id in ["left", "failed", "never"] {
        cli.run(&["marker", "complete", id, "--yes"])
            .exits_with(0)
            .prints("is done now");
        assert!(
            matches!(
                cli.ask(id, Ask::Claim, 9, 0, terms()).await,
                Verdict::Duplicate
            ),
            "{id}"
        );
    }
    assert_eq!(cli.json(&["audit"]).as_array().map(Vec::len), Some(5));
    assert_eq!(
        cli.json(&["audit", "--who", "ann"])
            .as_array()
            .map(Vec::len),
        Some(2)
    );
    let lines = std::fs::read_to_string(cli.path("markers.db.audit.jsonl")).expect("the audit");
    assert_eq!(lines.lines().count(), 10, "two lines an act");
    // Another file can be configured.
    // A line that is not UTF-8 hides no other.
    let mut bytes = lines.into_bytes();
    bytes.splice(0..0, *b"{\"act\":\"\xff\"}\n");
    std::fs::write(cli.path("markers.db.audit.jsonl"), bytes).expect("the file is ours");
    let audit = cli.run(&["audit", "--json"]).exits_with(1);
    assert_eq!(audit.json().as_array().map(Vec::len), Some(5));
    audit.prints("lines of the audit that cannot be read, and are not shown: 1");
    cli.run(&["marker", "complete", "new", "--yes"])
        .exits_with(0);
    cli.configure(&format!(
        "[audit]\nfile = \"{}\"\n",
        cli.path("audit.jsonl").display()
    ));
    assert_eq!(cli.json(&["audit"]).as_array().map(Vec::len), Some(0));
}

#[test]
fn reading_does_not_create_a_missing_file() {
    let cli = TestCli::on_sqlite();
    for command in [
        &["marker", "show", "x"][..],
        &["marker", "list"],
        &["marker", "complete", "x", "--yes"],
    ] {
        cli.run(command)
            .exits_with(3)
            .prints("there is no")
            .prints("markers.db")
            .prints("store.url");
    }
    assert!(!cli.path("markers.db").exists());
    cli.write("oncegate.toml", "[store]\nurl = \"memory:\"\n");
    cli.run(&["marker", "show", "x"])
        .exits_with(2)
        .prints("store.url")
        .prints("no other process can read it");
    cli.write(
        "oncegate.toml",
        "[store]\nurl = \"sqlite:x.db\"\nprefix = \"p:\"\n",
    );
    cli.run(&["config", "check"])
        .exits_with(2)
        .prints("store.prefix requires Redis");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_and_resolve_work_with_a_consumer_on_sqlite() {
    let fixture = Arc::new(BrokerFixture::at(TestCli::on_sqlite(), Broker::RabbitMq).await);
    fixture
        .publish(&[
            ("charged", "works"),
            ("declined", "declined"),
            ("yes", "silent"),
            ("no", "silent"),
        ])
        .await;
    fixture.consume(Provider::Judges, 1, 1, 2).await;
    let verdict = async |id: &str| fixture.json(&["explain", id]).await["verdict"].clone();
    for (id, told) in [
        ("charged", "handled"),
        ("declined", "dead-lettered"),
        ("yes", "in-doubt"),
        ("no", "in-doubt"),
        ("x", "unknown"),
    ] {
        assert_eq!(verdict(id).await, told, "{id}");
    }
    fixture
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
        .exits_with(0)
        .prints("1 resolved");
    fixture
        .run(&["in-doubt", "resolve", "no", "--did-not-happen", "--yes"])
        .await
        .exits_with(0)
        .prints("sent to");
    fixture
        .run(&["dead-letters", "redrive", "--id", "declined", "--yes"])
        .await
        .exits_with(0)
        .prints("1 redriven");
    fixture.consume(Provider::Works, 3, 0, 0).await;
    for id in ["charged", "declined", "yes", "no"] {
        assert_eq!(verdict(id).await, "handled", "{id}");
    }
    fixture
        .run(&["explain", "yes"])
        .await
        .exits_with(0)
        .prints("bob recorded that");
    assert_eq!(
        keys(&fixture.json(&["marker", "list"]).await),
        ["charged", "declined", "no", "yes"]
    );
    fixture.end().await;
}
