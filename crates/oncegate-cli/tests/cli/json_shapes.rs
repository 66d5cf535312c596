//! The JSON output has the documented shape.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::Value;

use crate::fixture::{Broker, BrokerFixture, PaymentProvider};

const BOOK: &str = include_str!("../../../../docs/src/cli.md");

/// The keys that the book documents: required and optional ones.
fn keys(what: &str) -> [BTreeSet<&'static str>; 2] {
    let section = BOOK
        .split("\n## JSON output\n")
        .nth(1)
        .and_then(|rest| rest.split("\n## ").next())
        .expect("the section");
    let row = section
        .lines()
        .find(|line| line.starts_with(&format!("| {what} |")))
        .unwrap_or_else(|| panic!("no row for {what}"));
    let mut cells = row.split('|').skip(2);
    let of_row: [BTreeSet<&str>; 2] = [(); 2].map(|()| {
        cells
            .next()
            .expect("a cell")
            .split('`')
            .skip(1)
            .step_by(2)
            .collect()
    });
    if !row.contains("as in lists") {
        return of_row;
    }
    let [required, optional] = of_row;
    let [listed, optional_listed] = keys("an entry of `messages`");
    [&required | &listed, &optional | &optional_listed]
}

#[track_caller]
pub(crate) fn assert_shape(value: &Value, what: &str) {
    let [required, optional] = keys(what);
    let has: BTreeSet<&str> = value
        .as_object()
        .unwrap_or_else(|| panic!("no object: {value}"))
        .keys()
        .map(String::as_str)
        .collect();
    assert!(
        required.is_subset(&has),
        "{what} lacks {:?}: {value}",
        required.difference(&has)
    );
    let known: BTreeSet<&str> = required.union(&optional).copied().collect();
    assert!(
        has.is_subset(&known),
        "{what} has {:?}, which the book does not document: {value}",
        has.difference(&known)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_book_documents_every_json_output() {
    let fixture = Arc::new(BrokerFixture::on(Broker::Kafka).await);
    fixture
        .publish(&[("a", "declined"), ("b", "silent"), ("c", "works")])
        .await;
    fixture.consume(PaymentProvider::Judges, 1, 1, 1).await;
    for id in ["a", "b", "c", "nobody"] {
        assert_shape(
            &fixture.json(&["explain", id, "--copies"]).await,
            "`explain`",
        );
        assert_shape(
            &fixture.json(&["marker", "show", id]).await,
            "`marker show`",
        );
    }
    assert_shape(&fixture.json(&["marker", "list"]).await, "`marker list`");
    for destination in ["dead-letters", "in-doubt"] {
        let list = fixture.json(&[destination, "list"]).await;
        assert_shape(&list, "`dead-letters list`, `in-doubt list`");
        assert_shape(&list["messages"][0], "an entry of `messages`");
        let id = if destination == "in-doubt" { "b" } else { "a" };
        assert_shape(
            &fixture.json(&[destination, "show", id, "--body"]).await[0],
            "`dead-letters show`, `in-doubt show`",
        );
    }
    let actions: [(&[&str], &str); 6] = [
        (
            &["dead-letters", "redrive", "--id", "a"],
            "`dead-letters redrive`, `drop`, `in-doubt resolve`",
        ),
        (
            &["dead-letters", "drop", "--id", "a"],
            "`dead-letters redrive`, `drop`, `in-doubt resolve`",
        ),
        (
            &["in-doubt", "resolve", "b", "--happened"],
            "`dead-letters redrive`, `drop`, `in-doubt resolve`",
        ),
        (&["marker", "complete", "d"], "`marker forget`, `complete`"),
        (&["marker", "forget", "d"], "`marker forget`, `complete`"),
        (
            &["marker", "forget", "nobody"],
            "`marker forget`, `complete`",
        ),
    ];
    for (action, shape) in actions {
        let name = action[..2].join(" ");
        let shown: Vec<&str> = action.iter().copied().chain(["--json"]).collect();
        let shown = fixture.run(&shown).await.json();
        let done: Vec<&str> = action.iter().copied().chain(["--yes"]).collect();
        let done = fixture.json(&done).await;
        for (output, changed) in [(&shown, false), (&done, action[2] != "nobody")] {
            assert_shape(output, shape);
            assert_eq!(
                (&output["action"], &output["changed"]),
                (&name.as_str().into(), &changed.into()),
                "{output}"
            );
            for message in output["messages"].as_array().into_iter().flatten() {
                assert_shape(message, "an entry of `messages` after a change");
            }
        }
    }
    for action in fixture.json(&["audit"]).await.as_array().expect("a list") {
        assert_shape(action, "an entry of `audit`");
    }
    let doctor = fixture.run(&["doctor", "--json"]).await.json();
    assert_shape(&doctor, "`doctor`");
    assert_shape(&doctor["findings"][0], "an entry of `findings`");
    let failed = fixture
        .run(&["dead-letters", "redrive", "--json"])
        .await
        .exits_with(2)
        .json();
    assert_shape(&failed, "a command that failed");
    assert_eq!(failed["code"], 2);
    fixture.end().await;
}
