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
    let [always, perhaps] = of_row;
    let [listed, perhaps_listed] = keys("an entry of `messages`");
    [&always | &listed, &perhaps | &perhaps_listed]
}

#[track_caller]
fn has_the_shape(value: &Value, what: &str) {
    let [always, perhaps] = keys(what);
    let has: BTreeSet<&str> = value
        .as_object()
        .unwrap_or_else(|| panic!("no object: {value}"))
        .keys()
        .map(String::as_str)
        .collect();
    assert!(
        always.is_subset(&has),
        "{what} lacks {:?}: {value}",
        always.difference(&has)
    );
    let known: BTreeSet<&str> = always.union(&perhaps).copied().collect();
    assert!(
        has.is_subset(&known),
        "{what} has {:?}, which the book does not know: {value}",
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
        has_the_shape(
            &fixture.json(&["explain", id, "--copies"]).await,
            "`explain`",
        );
        has_the_shape(
            &fixture.json(&["marker", "show", id]).await,
            "`marker show`",
        );
    }
    has_the_shape(&fixture.json(&["marker", "list"]).await, "`marker list`");
    for destination in ["dead-letters", "in-doubt"] {
        let list = fixture.json(&[destination, "list"]).await;
        has_the_shape(&list, "`dead-letters list`, `in-doubt list`");
        has_the_shape(&list["messages"][0], "an entry of `messages`");
        let id = if destination == "in-doubt" { "b" } else { "a" };
        has_the_shape(
            &fixture.json(&[destination, "show", id, "--body"]).await[0],
            "`dead-letters show`, `in-doubt show`",
        );
    }
    let acts: [(&[&str], &str); 6] = [
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
    for (act, shape) in acts {
        let name = act[..2].join(" ");
        let shown: Vec<&str> = act.iter().copied().chain(["--json"]).collect();
        let shown = fixture.run(&shown).await.json();
        let done: Vec<&str> = act.iter().copied().chain(["--yes"]).collect();
        let done = fixture.json(&done).await;
        for (said, did) in [(&shown, false), (&done, act[2] != "nobody")] {
            has_the_shape(said, shape);
            assert_eq!(
                (&said["action"], &said["changed"]),
                (&name.as_str().into(), &did.into()),
                "{said}"
            );
            for message in said["messages"].as_array().into_iter().flatten() {
                has_the_shape(message, "an entry of `messages` after a change");
            }
        }
    }
    for act in fixture.json(&["audit"]).await.as_array().expect("a list") {
        has_the_shape(act, "an entry of `audit`");
    }
    let doctor = fixture.run(&["doctor", "--json"]).await.json();
    has_the_shape(&doctor, "`doctor`");
    has_the_shape(&doctor["findings"][0], "an entry of `findings`");
    let failed = fixture
        .run(&["dead-letters", "redrive", "--json"])
        .await
        .exits_with(2)
        .json();
    has_the_shape(&failed, "a command that failed");
    assert_eq!(failed["code"], 2);
    fixture.end().await;
}
