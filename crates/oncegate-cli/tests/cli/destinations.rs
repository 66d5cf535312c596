//! Reading and changing dead letters and messages in doubt of a real consumer, on both brokers.

mod delivery_counts;

use std::sync::Arc;

use oncegate::{Context, Failure, Guarantee, Handler, Reconciled};
use serde_json::Value;

use crate::fixture::{Broker, BrokerFixture, PaymentProvider};

/// Creates a test for each scenario and broker.
macro_rules! on_both_brokers {
    ($($scenario:ident),+ $(,)?) => {
        mod on_kafka {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::fixture::Broker::Kafka).await;
            })+
        }

        mod on_rabbitmq {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::fixture::Broker::RabbitMq).await;
            })+
        }
    };
}

pub(crate) use on_both_brokers;

on_both_brokers!(
    dead_letters_are_listed_redriven_and_charged_once,
    dropped_messages_are_not_listed_again,
    messages_in_doubt_are_resolved_either_way,
    redrive_skips_handled_and_in_doubt_messages,
    ids_without_a_marker_are_redriven,
    messages_without_an_id_are_named_by_a_handle,
    both_errors_of_a_message_in_doubt_are_shown,
);

pub(crate) fn ids(listed: &Value) -> Vec<String> {
    let mut ids: Vec<String> = listed["messages"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["id"].as_str().unwrap_or("-").to_owned())
        .collect();
    ids.sort();
    ids
}

async fn fixture(broker: Broker) -> Arc<BrokerFixture> {
    Arc::new(BrokerFixture::on(broker).await)
}

/// `show`, `redrive` and `drop` accept what `list` shows in place of the id.
async fn messages_without_an_id_are_named_by_a_handle(broker: Broker) {
    let fixture = fixture(broker).await;
    for body in [r#"{"card":"1"}"#, r#"{"card":"2"}"#] {
        fixture.publish_with(&fixture.cli.name, body, &[]).await;
    }
    fixture.publish(&[("a", "declined")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 3, 0).await;
    let listed = fixture.json(&["dead-letters", "list"]).await;
    let dead_letters = listed["messages"].as_array().expect("a list");
    let handles: Vec<&str> = dead_letters
        .iter()
        .filter_map(|dead_letter| dead_letter["handle"].as_str())
        .collect();
    assert!(
        handles.len() == 2 && handles[0] != handles[1],
        "only messages without an id have a handle: {listed}"
    );
    let again = fixture.json(&["dead-letters", "list"]).await;
    assert!(
        handles
            .iter()
            .all(|handle| again.to_string().contains(handle)),
        "a read changes no handle: {again}"
    );
    fixture
        .run(&["dead-letters", "list"])
        .await
        .exits_with(0)
        .prints(handles[0])
        .prints(handles[1])
        .prints("no id in the header `payment-id`")
        .prints("the card was declined");
    let shown = fixture
        .json(&["dead-letters", "show", handles[0], "--body"])
        .await;
    assert_eq!(
        (shown.as_array().map(Vec::len), &shown[0]["handle"]),
        (Some(1), &handles[0].into()),
        "{shown}"
    );
    let preview = ["dead-letters", "drop", "--id", handles[0]];
    fixture.run(&preview).await.exits_with(4).prints(handles[0]);
    fixture
        .run(&["dead-letters", "drop", "--id", handles[0], "--yes"])
        .await
        .exits_with(0)
        .prints(handles[0])
        .prints("1 dropped");
    fixture
        .run(&["dead-letters", "redrive", "--id", handles[1], "--yes"])
        .await
        .exits_with(0)
        .prints("1 redriven");
    assert_eq!(ids(&fixture.json(&["dead-letters", "list"]).await), ["a"]);
    for (handle, action) in [
        (handles[0], "dead-letters drop"),
        (handles[1], "dead-letters redrive"),
    ] {
        let audit = fixture.json(&["audit", "--id", handle]).await;
        assert_eq!(
            (
                audit.as_array().map(Vec::len),
                &audit[0]["what"],
                &audit[0]["handle"]
            ),
            (Some(1), &action.into(), &handle.into()),
            "{audit}"
        );
    }
    fixture.end().await;
}

/// Its handler reports an unknown outcome, and `reconcile` fails.
struct Doubtful;

impl Handler for Doubtful {
    type Payload = Value;

    async fn handle(&self, _: Value, _: &Context) -> Result<(), Failure> {
        Err(Failure::InDoubt("no answer from the provider".into()))
    }

    async fn reconcile(&self, _: Value, _: &Context) -> Result<Reconciled, Failure> {
        Err(Failure::Retry("the provider is down".into()))
    }
}

async fn both_errors_of_a_message_in_doubt_are_shown(broker: Broker) {
    let fixture = fixture(broker).await;
    fixture.publish(&[("a", "silent")]).await;
    let until = fixture.until_there_are(1, ".in-doubt");
    fixture.handle(Guarantee::AtMostOnce, Doubtful, until).await;
    for command in [&["in-doubt", "list"][..], &["explain", "a"]] {
        fixture
            .run(command)
            .await
            .exits_with(0)
            .prints("no answer from the provider; last error: ")
            .prints("the provider is down");
    }
    let listed = fixture.json(&["in-doubt", "list"]).await;
    let dead_letter = &listed["messages"][0];
    assert_eq!(
        dead_letter["reason_text"], "its handler reported that it may have happened",
        "{dead_letter}"
    );
    for (name, error) in [
        ("first_error", "no answer from the provider"),
        ("last_error", "the provider is down"),
    ] {
        assert!(
            dead_letter[name]
                .as_str()
                .is_some_and(|it| it.contains(error)),
            "{dead_letter}"
        );
    }
    fixture.end().await;
}

async fn dead_letters_are_listed_redriven_and_charged_once(broker: Broker) {
    let fixture = fixture(broker).await;
    fixture
        .publish(&[
            ("a", "works"),
            ("b", "declined"),
            ("c", "declined"),
            ("d", "declined"),
        ])
        .await;
    fixture.consume(PaymentProvider::Judges, 1, 3, 0).await;

    let listed = fixture.json(&["dead-letters", "list"]).await;
    assert_eq!(ids(&listed), ["b", "c", "d"]);
    let message = &listed["messages"][0];
    assert_eq!(
        (&message["reason"], &message["state"]),
        (&"refused".into(), &"waiting".into()),
        "{message}"
    );
    assert!(
        message["last_error"]
            .as_str()
            .is_some_and(|error| error.contains("declined")),
        "{message}"
    );
    for (filter, found) in [
        (&["--reason", "refused"][..], 3),
        (&["--reason", "conflict"], 0),
        (&["--id", "b"], 1),
        (&["--limit", "2"], 2),
        (&["--younger-than", "1h", "--reason", "refused"], 3),
        (&["--older-than", "1h"], 0),
    ] {
        let arguments: Vec<&str> = ["dead-letters", "list"]
            .into_iter()
            .chain(filter.iter().copied())
            .collect();
        assert_eq!(
            ids(&fixture.json(&arguments).await).len(),
            found,
            "{filter:?}"
        );
    }
    fixture
        .run(&["dead-letters", "list"])
        .await
        .exits_with(0)
        .prints("REASON")
        .prints("3 shown");
    let shown = fixture.json(&["dead-letters", "show", "b"]).await;
    assert!(
        shown[0]["headers"]
            .as_array()
            .is_some_and(|headers| headers.len() > 4)
            && shown[0]["body"].is_null(),
        "{shown}"
    );
    fixture
        .run(&["dead-letters", "show", "b", "--body"])
        .await
        .exits_with(0)
        .prints("\"card\":\"declined\"")
        .prints("payment-id: b");
    fixture
        .run(&["dead-letters", "show", "a"])
        .await
        .exits_with(1);

    // A command without a selection fails.
    fixture
        .run(&["dead-letters", "redrive", "--yes"])
        .await
        .exits_with(2)
        .prints("--all");
    fixture
        .run(&["dead-letters", "redrive", "--all", "--dry-run"])
        .await
        .exits_with(0)
        .prints("its marker is rejected, attempt 1, and would be cleared; it would be sent to")
        .prints("3 would be redriven");
    fixture
        .run(&["dead-letters", "redrive", "--id", "b"])
        .await
        .exits_with(4)
        .prints("1 would be redriven");
    assert_eq!(
        fixture.json(&["marker", "show", "b"]).await["state"],
        "rejected"
    );
    assert_eq!(
        fixture.json(&["audit"]).await.as_array().map(Vec::len),
        Some(0)
    );

    let redriven = fixture
        .json(&[
            "dead-letters",
            "redrive",
            "--id",
            "b",
            "--yes",
            "--as",
            "ann",
            "--why",
            "the card was mended",
        ])
        .await;
    assert_eq!(
        (&redriven["done"], &redriven["left"]),
        (&1.into(), &0.into()),
        "{redriven}"
    );
    assert_eq!(
        ids(&fixture.json(&["dead-letters", "list"]).await),
        ["c", "d"]
    );
    assert_eq!(
        fixture.json(&["marker", "show", "b"]).await["state"],
        "cleared"
    );
    let rest = fixture
        .json(&[
            "dead-letters",
            "redrive",
            "--all",
            "--limit",
            "1",
            "--rate",
            "50",
            "--yes",
        ])
        .await;
    assert_eq!(rest["done"], 1, "{rest}");
    let left_on_kafka = if broker == Broker::Kafka { 3 } else { 1 };
    fixture
        .consume(PaymentProvider::Works, 3, left_on_kafka, 0)
        .await;
    let mut charged = fixture.charged();
    charged.sort();
    assert_eq!(charged.len(), 3, "{charged:?}");
    assert_eq!(&charged[..2], ["a", "b"]);
    assert_eq!(
        fixture.json(&["marker", "show", "b"]).await["state"],
        "done"
    );

    let audit = fixture.json(&["audit", "--id", "b"]).await;
    let action = &audit[0];
    assert_eq!(
        (&action["who"], &action["what"], &action["stage"]),
        (
            &"ann".into(),
            &"dead-letters redrive".into(),
            &"done".into()
        ),
        "{audit}"
    );
    assert_eq!(
        (&action["before"], &action["why"]),
        (
            &"dead-lettered, rejected, attempt 1".into(),
            &"the card was mended".into()
        )
    );
    assert_eq!(action["location"]["broker"], fixture.broker_name());
    fixture.end().await;
}

async fn dropped_messages_are_not_listed_again(broker: Broker) {
    let fixture = fixture(broker).await;
    fixture
        .publish(&[("a", "declined"), ("b", "declined")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 2, 0).await;
    fixture
        .run(&["dead-letters", "drop", "--id", "a"])
        .await
        .exits_with(4)
        .prints("would be dropped");
    assert_eq!(
        ids(&fixture.json(&["dead-letters", "list"]).await),
        ["a", "b"]
    );
    let not_found = format!(
        "no message with the id nope was found in the dead-letter destination on {}",
        fixture.broker_name()
    );
    for action in ["redrive", "drop"] {
        for mode in ["--yes", "--dry-run"] {
            fixture
                .run(&["dead-letters", action, "--id", "nope", mode])
                .await
                .exits_with(1)
                .prints(&not_found);
        }
    }
    fixture
        .run(&["dead-letters", "drop", "--id", "a", "--yes"])
        .await
        .exits_with(0)
        .prints("1 dropped");
    assert_eq!(ids(&fixture.json(&["dead-letters", "list"]).await), ["b"]);
    let everything = fixture
        .json(&["dead-letters", "list", "--everything"])
        .await;
    match broker {
        Broker::Kafka => {
            assert_eq!(ids(&everything), ["a", "b"], "Kafka keeps dropped messages");
            let states: Vec<&Value> = everything["messages"]
                .as_array()
                .expect("a list")
                .iter()
                .map(|it| &it["state"])
                .collect();
            assert!(
                states.contains(&&"dropped".into()) && states.contains(&&"waiting".into()),
                "{everything}"
            );
        }
        Broker::RabbitMq => fixture.until_there_are(1, ".dead-letters").await,
    }
    // The id stays rejected: another copy does not run.
    assert_eq!(
        fixture.json(&["marker", "show", "a"]).await["state"],
        "rejected"
    );
    assert_eq!(
        fixture.json(&["audit"]).await[0]["what"],
        "dead-letters drop"
    );
    let again = fixture
        .json(&["dead-letters", "redrive", "--all", "--yes"])
        .await;
    assert_eq!(
        again["done"], 1,
        "only the message that was not dropped: {again}"
    );
    fixture.end().await;
}

async fn messages_in_doubt_are_resolved_either_way(broker: Broker) {
    let fixture = fixture(broker).await;
    fixture
        .publish(&[("yes", "silent"), ("no", "silent")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 0, 2).await;
    assert_eq!(
        ids(&fixture.json(&["in-doubt", "list"]).await),
        ["no", "yes"]
    );
    fixture
        .run(&["in-doubt", "list"])
        .await
        .exits_with(0)
        .prints("in-doubt-handler-reported")
        .prints("the handler has no `reconcile`");
    fixture
        .run(&["in-doubt", "show", "yes"])
        .await
        .exits_with(0)
        .prints("payment-id: yes")
        .prints("no answer from the provider");
    fixture
        .run(&["in-doubt", "resolve", "yes"])
        .await
        .exits_with(2);
    fixture
        .run(&["in-doubt", "resolve", "yes", "--happened"])
        .await
        .exits_with(4)
        .prints("would be recorded as done");
    assert_eq!(
        fixture.json(&["marker", "show", "yes"]).await["state"],
        "in-doubt"
    );

    fixture
        .run(&["in-doubt", "resolve", "yes", "--happened", "--yes"])
        .await
        .exits_with(0)
        .prints("1 resolved");
    assert_eq!(
        fixture.json(&["marker", "show", "yes"]).await["state"],
        "done"
    );
    fixture
        .run(&["in-doubt", "resolve", "no", "--did-not-happen", "--yes"])
        .await
        .exits_with(0)
        .prints("sent to");
    assert_eq!(
        fixture.json(&["marker", "show", "no"]).await["state"],
        "cleared"
    );
    assert_eq!(ids(&fixture.json(&["in-doubt", "list"]).await), [""; 0]);
    for (id, finding, decision) in [
        ("no", "--happened", "did not happen"),
        ("yes", "--happened", "effect happened"),
        ("yes", "--did-not-happen", "effect happened"),
    ] {
        for confirmed in [&["--yes"][..], &[]] {
            let resolve = ["in-doubt", "resolve", id, finding];
            let output = fixture.run(&[&resolve[..], confirmed].concat()).await;
            let output = output
                .exits_with(1)
                .prints(&format!("{id} was resolved before by "))
                .prints(decision);
            assert!(
                !format!("{output:?}").contains("marker complete"),
                "{output:?}"
            );
        }
    }

    let left = if broker == Broker::Kafka { 2 } else { 0 };
    fixture.consume(PaymentProvider::Works, 1, 0, left).await;
    assert_eq!(
        fixture.charged(),
        ["no"],
        "an effect that happened is not repeated"
    );
    fixture
        .run(&["in-doubt", "resolve", "no", "--did-not-happen", "--yes"])
        .await
        .exits_with(1)
        .prints("it was handled");
    let what: Vec<String> = fixture
        .json(&["audit"])
        .await
        .as_array()
        .expect("a list")
        .iter()
        .map(|action| action["after"].to_string())
        .collect();
    assert_eq!(
        what.len(),
        4,
        "one action for the marker and one for the message of each id: {what:?}"
    );
    fixture.end().await;
}

async fn redrive_skips_handled_and_in_doubt_messages(broker: Broker) {
    let fixture = fixture(broker).await;
    fixture
        .publish(&[("done", "declined"), ("doubt", "silent")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 1, 1).await;
    // An operator releases the id, and the producer sends it again.
    fixture
        .run(&["marker", "forget", "done", "--yes"])
        .await
        .exits_with(0);
    fixture.publish(&[("done", "works")]).await;
    fixture.consume(PaymentProvider::Works, 1, 1, 1).await;
    // One that is in doubt is dead-lettered too.
    let headers = [
        ("oncegate-id", "doubt"),
        ("oncegate-reason", "attempts-spent"),
    ];
    fixture
        .publish_to(
            &format!("{}.dead-letters", fixture.cli.name),
            "doubt",
            "{}",
            &headers,
        )
        .await;
    let output = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1);
    let output = output
        .prints("would be a duplicate")
        .prints("`oncegate in-doubt resolve` first")
        .prints("0 redriven, 2 left");
    assert!(!output.out.contains("sent to"), "{output:?}");
    assert_eq!(
        ids(&fixture.json(&["dead-letters", "list"]).await),
        ["done", "doubt"],
        "skipped messages stay in the destination"
    );
    assert_eq!(
        fixture.json(&["marker", "show", "done"]).await["state"],
        "done"
    );
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reading_joins_no_group_and_commits_no_offset_on_kafka() {
    let fixture = fixture(Broker::Kafka).await;
    fixture.publish(&[("a", "declined")]).await;
    fixture.consume(PaymentProvider::Judges, 0, 1, 0).await;
    let before = crate::fixture::groups().await;
    for _ in 0..3 {
        assert_eq!(ids(&fixture.json(&["dead-letters", "list"]).await), ["a"]);
    }
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0);
    let new: Vec<String> = crate::fixture::groups()
        .await
        .into_iter()
        .filter(|group| !before.contains(group))
        .collect();
    assert!(
        !new.iter().any(|group| group.starts_with("oncegate-cli")),
        "{new:?}"
    );
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_stays_if_its_copy_is_refused() {
    let fixture = fixture(Broker::RabbitMq).await;
    fixture
        .publish(&[("a", "declined"), ("b", "declined")])
        .await;
    fixture.consume(PaymentProvider::Judges, 0, 2, 0).await;
    crate::fixture::delete(&fixture.cli.name).await;
    let output = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(3);
    output
        .prints("does not exist or is full")
        .prints("0 redriven, 1 left");
    fixture.until_there_are(2, ".dead-letters").await;
    let action = fixture.json(&["audit"]).await[0].clone();
    assert_eq!(
        action["stage"], "not-sent",
        "its marker was cleared, and no copy was published"
    );
    // Either may be first.
    let first = action["id"].as_str().expect("an id");
    assert_eq!(
        fixture.json(&["marker", "show", first]).await["state"],
        "cleared"
    );
    // The consumer declares the queue again; no message is lost.
    crate::fixture::declare_like_the_source(&fixture.cli.name).await;
    fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(0)
        .prints("2 redriven");
    fixture.consume(PaymentProvider::Works, 2, 0, 0).await;
    fixture.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_without_body_are_skipped_and_copies_keep_their_partition() {
    let fixture = fixture(Broker::Kafka).await;
    let name = fixture.cli.name.clone();
    let publish_dead_letter =
        |id: &'static str, partition: i32, omitted: &'static [(&'static str, &'static str)]| {
            let (fixture, name, origin) = (
                &fixture,
                &name,
                format!("{}/{partition}/7", fixture.cli.name),
            );
            async move {
                let headers = [
                    ("oncegate-id", id),
                    ("oncegate-reason", "refused"),
                    ("oncegate-origin", origin.as_str()),
                ];
                let headers: Vec<(&str, &str)> = headers.iter().chain(omitted).copied().collect();
                fixture
                    .publish_to(
                        &format!("{name}.dead-letters"),
                        id,
                        r#"{"card":"works"}"#,
                        &headers,
                    )
                    .await;
            }
        };
    publish_dead_letter("large", 0, &[("oncegate-body-omitted", "2000000")]).await;
    publish_dead_letter("first", 0, &[]).await;
    publish_dead_letter("second", 1, &[]).await;
    publish_dead_letter("gone", 9, &[]).await;
    let output = fixture
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .exits_with(1);
    let output = output
        .prints("body of 2000000 bytes")
        .prints("3 redriven, 1 left");
    assert!(
        output
            .out
            .contains(&format!("complete message is {name}/0/7")),
        "the output names the complete message: {output:?}"
    );
    assert_eq!(
        ids(&fixture.json(&["dead-letters", "list"]).await),
        ["large"]
    );
    fixture.cli.configure(&format!(
        "{}dead-letters = \"{name}\"\n",
        fixture.settings()
    ));
    let sent = fixture
        .json(&["dead-letters", "list", "--everything"])
        .await;
    let partition = |id: &str| {
        sent["messages"]
            .as_array()
            .expect("a list")
            .iter()
            .find(|it| it["id"] == id)
            .map(|it| it["partition"].clone())
    };
    assert_eq!(
        (partition("first"), partition("second")),
        (Some(0.into()), Some(1.into())),
        "{sent}"
    );
    assert!(
        partition("gone").is_some(),
        "sent to another partition, since its own does not exist: {sent}"
    );
    fixture.end().await;
}

/// Messages that RabbitMQ dead-lettered have no `oncegate-*` headers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_dead_lettered_by_the_broker_have_their_own_id() {
    let fixture = fixture(Broker::RabbitMq).await;
    fixture
        .publish_to(
            &format!("{}.dead-letters", fixture.cli.name),
            "plain",
            r#"{"card":"works"}"#,
            &[],
        )
        .await;
    assert_eq!(
        ids(&fixture
            .json(&["dead-letters", "list", "--id", "plain"])
            .await),
        ["plain"]
    );
    // Its age is unknown.
    fixture
        .run(&["dead-letters", "redrive", "--id", "plain", "--dry-run"])
        .await
        .exits_with(0)
        .prints("reconciles it first");
    fixture
        .run(&[
            "dead-letters",
            "redrive",
            "--id",
            "plain",
            "--accept-forgotten",
            "--yes",
        ])
        .await
        .exits_with(0);
    fixture.consume(PaymentProvider::Works, 1, 0, 0).await;
    assert_eq!(fixture.charged(), ["plain"]);
    fixture.end().await;
}

async fn ids_without_a_marker_are_redriven(broker: Broker) {
    let fixture = fixture(broker).await;
    // It is old enough to be in doubt and has failed more often than allowed.
    let headers = [
        ("oncegate-id", "old"),
        ("oncegate-first-seen", "1000"),
        ("oncegate-failures", "99"),
        ("kept", "yes"),
    ];
    let body = r#"{"id":"old","card":"works","amount":1}"#;
    fixture
        .publish_to(
            &format!("{}.dead-letters", fixture.cli.name),
            "old",
            body,
            &headers,
        )
        .await;
    assert_eq!(
        ids(&fixture
            .json(&["dead-letters", "list", "--older-than", "365d"])
            .await),
        ["old"]
    );
    let redrive = [
        "dead-letters",
        "redrive",
        "--older-than",
        "365d",
        "--accept-forgotten",
        "--yes",
    ];
    fixture
        .run(&redrive)
        .await
        .exits_with(0)
        .prints("1 redriven");
    // The consumed queue is read like a destination.
    let name = &fixture.cli.name;
    fixture.cli.configure(&format!(
        "{}dead-letters = \"{name}\"\n",
        fixture.settings()
    ));
    let copy = fixture
        .json(&["dead-letters", "show", "old", "--accept-delivery-counts"])
        .await;
    let headers: Vec<&str> = copy[0]["headers"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it[0].as_str().expect("a name"))
        .collect();
    assert!(
        headers.contains(&"kept") && headers.contains(&"payment-id"),
        "{copy}"
    );
    let ours = headers.iter().filter(|name| {
        name.starts_with("oncegate-") || (name.starts_with("x-") && **name != "x-delivery-count")
    });
    assert_eq!(
        ours.count(),
        0,
        "the copy has no header of earlier deliveries: {copy}"
    );
    fixture.cli.configure(&fixture.settings());
    let left = if broker == Broker::Kafka { 1 } else { 0 };
    fixture.consume(PaymentProvider::Works, 1, left, 0).await;
    assert_eq!(fixture.charged(), ["old"]);
    fixture.end().await;
}
