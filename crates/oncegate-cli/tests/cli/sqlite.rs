//! The commands on an SQLite store.

use std::sync::Arc;

use oncegate::marker::{Attempts, OperationKind, UNKNOWN_ATTEMPT, Verdict};
use oncegate::{Failure, Gate, GateError, Guarantee, RunOutcome};
use serde_json::Value;

use crate::cli::{TestCli, terms};
use crate::fixture::{Broker, BrokerFixture, PaymentProvider};
use crate::markers::{MARKER_STATES, write_one_marker_per_state};

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
    assert_markers_are_shown_and_listed(&TestCli::on_sqlite()).await;
}

/// Also for PostgreSQL.
pub(crate) async fn assert_markers_are_shown_and_listed(cli: &TestCli) {
    write_one_marker_per_state(cli).await;
    for (id, state, words) in MARKER_STATES {
        let shown = cli.json(&["marker", "show", id]);
        assert_eq!(shown["state"], state, "{shown}");
        assert!(
            shown["description"]
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
    write_one_marker_per_state(&cli).await;
    cli.run(&["marker", "forget", "handled"])
        .exits_with(4)
        .prints("would be handled AGAIN");
    assert_eq!(
        cli.json(&["marker", "show", "handled"])["state"],
        "done",
        "a preview changes nothing"
    );
    for (id, last_attempt) in [("handled", UNKNOWN_ATTEMPT), ("refused", 1)] {
        cli.run(&["marker", "forget", id, "--yes", "--as", "ann"])
            .exits_with(0)
            .prints(&format!("is cleared, attempt {last_attempt} now"));
        let next = Attempts {
            number: last_attempt + 1,
            base: last_attempt,
            crashes: 0,
        };
        assert_eq!(
            cli.apply_one(id, OperationKind::Claim, 9, 0, terms()).await,
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
                cli.apply_one(id, OperationKind::Claim, 9, 0, terms()).await,
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
    assert_eq!(lines.lines().count(), 10, "two lines for each action");
    // A line that is not UTF-8 hides no other.
    let mut bytes = lines.into_bytes();
    bytes.splice(0..0, *b"{\"act\":\"\xff\"}\n");
    std::fs::write(cli.path("markers.db.audit.jsonl"), bytes).expect("the file is writable");
    let audit = cli.run(&["audit", "--json"]).exits_with(1);
    assert_eq!(audit.json().as_array().map(Vec::len), Some(5));
    audit.prints("lines of the audit that cannot be read, and are not shown: 1");
    cli.run(&["marker", "complete", "new", "--yes"])
        .exits_with(0);
    // Another file can be configured.
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

/// A `Gate` in at most once whose work ends with this result.
async fn run_gate(
    cli: &TestCli,
    id: &str,
    result: Result<(), Failure>,
) -> Result<RunOutcome<()>, GateError> {
    let gate = Gate::builder()
        .store(cli.sqlite().expect("a file"))
        .guarantee(Guarantee::AtMostOnce)
        .open()
        .await
        .expect("it opens");
    let mut result = Some(result);
    gate.run(id, || {
        let result = result.take().expect("it runs once");
        async move { result }
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_in_doubt_id_of_a_gate_is_resolved_without_a_broker() {
    let cli = TestCli::on_sqlite();
    for id in ["yes", "no"] {
        let in_doubt = run_gate(&cli, id, Err(Failure::InDoubt("no answer".into()))).await;
        assert!(matches!(in_doubt, Err(GateError::InDoubt(_))), "{id}");
        assert_eq!(
            cli.json(&["marker", "show", id])["state"],
            "in-doubt",
            "{id}"
        );
    }
    cli.run(&["in-doubt", "resolve", "yes", "--happened"])
        .exits_with(4)
        .prints("no broker is configured");
    let unknown = cli
        .run(&["in-doubt", "resolve", "nosuchid", "--did-not-happen"])
        .exits_with(1)
        .prints("no message in doubt has this id")
        .prints("in the SQLite file the id nosuchid is");
    assert!(!unknown.err.contains("--yes"), "{unknown:?}");
    let resolved = cli.json(&["in-doubt", "resolve", "yes", "--happened", "--yes"]);
    assert_eq!(
        (
            &resolved["done"],
            &resolved["not_checked"][0]["where"],
            &resolved["not_checked"][0]["why"]
        ),
        (
            &1.into(),
            &"the messages in doubt".into(),
            &"no broker is configured, so there was no message to move".into()
        ),
        "{resolved}"
    );
    cli.run(&["in-doubt", "resolve", "no", "--did-not-happen", "--yes"])
        .exits_with(0)
        .prints("1 resolved")
        .prints("no broker is configured, so there was no message to move");
    assert_eq!(cli.json(&["audit"]).as_array().map(Vec::len), Some(2));
    assert!(matches!(
        run_gate(&cli, "yes", Ok(())).await,
        Ok(RunOutcome::AlreadyDone)
    ));
    assert!(matches!(
        run_gate(&cli, "no", Ok(())).await,
        Ok(RunOutcome::Executed(()))
    ));
    // What is not in doubt stays as it is.
    cli.run(&["in-doubt", "resolve", "mistyped", "--happened", "--yes"])
        .exits_with(1)
        .prints("mistyped is absent, not in doubt");
    // A broker that is named or partly configured has to be complete.
    let resolve = ["in-doubt", "resolve", "yes", "--happened", "--yes"];
    cli.run(&[&resolve[..], &["--broker", "kafka"]].concat())
        .exits_with(2)
        .prints("--broker kafka: set kafka.brokers and kafka.topic");
    cli.configure("[kafka]\ntopic = \"payments\"\n");
    cli.run(&resolve)
        .exits_with(2)
        .prints("no broker: set kafka.brokers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_and_resolve_work_with_a_consumer_on_sqlite() {
    assert_explain_and_resolve_work(TestCli::on_sqlite()).await;
}

/// Also for PostgreSQL.
pub(crate) async fn assert_explain_and_resolve_work(cli: TestCli) {
    let fixture = Arc::new(BrokerFixture::at(cli, Broker::RabbitMq).await);
    fixture
        .publish(&[
            ("charged", "works"),
            ("declined", "declined"),
            ("yes", "silent"),
            ("no", "silent"),
        ])
        .await;
    fixture.consume(PaymentProvider::Judges, 1, 1, 2).await;
    let verdict = async |id: &str| fixture.json(&["explain", id]).await["verdict"].clone();
    for (id, assert_explained) in [
        ("charged", "handled"),
        ("declined", "dead-lettered"),
        ("yes", "in-doubt"),
        ("no", "in-doubt"),
        ("x", "unknown"),
    ] {
        assert_eq!(verdict(id).await, assert_explained, "{id}");
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
    fixture.consume(PaymentProvider::Works, 3, 0, 0).await;
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

/// A record of an inbox is a done marker, so the command line cannot tell which the consumer uses.
#[tokio::test]
async fn explain_says_what_holds_with_an_inbox_where_the_consumer_may_have_one() {
    let cli = TestCli::on_sqlite();
    cli.apply_one("a", OperationKind::Complete, 1, 1, terms())
        .await;
    cli.run(&["explain", "a"])
        .exits_with(0)
        .prints("unless it has an inbox, which rolled back each interrupted run");
    cli.configure("[gate]\nguarantee = \"effectively-once\"\n");
    cli.run(&["explain", "a"]).exits_with(0).prints("inbox");
    // An inbox refuses these settings.
    for gate in [
        "guarantee = \"at-most-once\"",
        "outage = \"pass-through\"",
        "mode = \"shadow\"",
    ] {
        cli.configure(&format!("[gate]\n{gate}\n"));
        let output = cli.run(&["explain", "a"]).exits_with(0);
        assert!(!output.out.contains("inbox"), "{output:?}");
    }
}
