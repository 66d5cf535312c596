//! Dead letters and messages in doubt, on both brokers: what a real consumer set aside, looked at,
//! and dealt with.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use lapin::BasicProperties;
use lapin::types::AMQPValue;
use oncegate::{Open, RabbitMq, Source};
use oncegate_testkit::servers::RabbitServer;
use serde_json::Value;

use crate::desk::Desk;
use crate::world::{Broker, PATIENCE, Provider, World, publish_properties};

/// Makes a test of each scenario for each broker.
macro_rules! on_both_brokers {
    ($($scenario:ident),+ $(,)?) => {
        mod on_kafka {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::world::Broker::Kafka).await;
            })+
        }

        mod on_rabbitmq {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $scenario() {
                super::$scenario(crate::world::Broker::RabbitMq).await;
            })+
        }
    };
}

pub(crate) use on_both_brokers;

on_both_brokers!(
    dead_letters_are_listed_shown_redriven_and_charged_once,
    what_is_dropped_is_not_offered_again,
    a_doubt_is_resolved_either_way,
    what_was_handled_meanwhile_or_is_in_doubt_is_not_redriven,
    an_id_that_was_never_in_the_store_is_redriven_all_the_same,
);

pub(crate) fn ids(listed: &Value) -> Vec<String> {
    let mut ids: Vec<String> = listed["letters"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|it| it["id"].as_str().unwrap_or("-").to_owned())
        .collect();
    ids.sort();
    ids
}

async fn world(broker: Broker) -> Arc<World> {
    Arc::new(World::on(broker).await)
}

async fn dead_letters_are_listed_shown_redriven_and_charged_once(broker: Broker) {
    let world = world(broker).await;
    world
        .publish(&[
            ("a", "works"),
            ("b", "declined"),
            ("c", "declined"),
            ("d", "declined"),
        ])
        .await;
    world.consume(Provider::Judges, 1, 3, 0).await;

    let listed = world.json(&["dead-letters", "list"]).await;
    assert_eq!(ids(&listed), ["b", "c", "d"]);
    let letter = &listed["letters"][0];
    assert_eq!(
        (&letter["reason"], &letter["state"]),
        (&"refused".into(), &"waiting".into()),
        "{letter}"
    );
    assert!(
        letter["last_error"]
            .as_str()
            .is_some_and(|error| error.contains("declined")),
        "{letter}"
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
            ids(&world.json(&arguments).await).len(),
            found,
            "{filter:?}"
        );
    }
    world
        .run(&["dead-letters", "list"])
        .await
        .ended(0)
        .says("REASON")
        .says("3 shown");
    let shown = world.json(&["dead-letters", "show", "b"]).await;
    assert!(
        shown[0]["headers"]
            .as_array()
            .is_some_and(|headers| headers.len() > 4)
            && shown[0]["body"].is_null(),
        "{shown}"
    );
    world
        .run(&["dead-letters", "show", "b", "--body"])
        .await
        .ended(0)
        .says("\"card\":\"declined\"")
        .says("payment-id: b");
    world.run(&["dead-letters", "show", "a"]).await.ended(1);

    // Nothing happens that was not asked for.
    world
        .run(&["dead-letters", "redrive", "--yes"])
        .await
        .ended(2)
        .says("--all");
    world
        .run(&["dead-letters", "redrive", "--all", "--dry-run"])
        .await
        .ended(0)
        .says("would be freed, and sent to")
        .says("3 would be redriven");
    world
        .run(&["dead-letters", "redrive", "--id", "b"])
        .await
        .ended(4)
        .says("1 would be redriven");
    assert_eq!(
        world.json(&["marker", "show", "b"]).await["state"],
        "rejected"
    );
    assert_eq!(
        world.json(&["audit"]).await.as_array().map(Vec::len),
        Some(0)
    );

    let redriven = world
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
        ids(&world.json(&["dead-letters", "list"]).await),
        ["c", "d"]
    );
    assert_eq!(
        world.json(&["marker", "show", "b"]).await["state"],
        "cleared"
    );
    let rest = world
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
    world.consume(Provider::Works, 3, left_on_kafka, 0).await;
    let mut charged = world.charged();
    charged.sort();
    assert_eq!(charged.len(), 3, "{charged:?}");
    assert_eq!(&charged[..2], ["a", "b"]);
    assert_eq!(world.json(&["marker", "show", "b"]).await["state"], "done");

    let audit = world.json(&["audit", "--id", "b"]).await;
    let act = &audit[0];
    assert_eq!(
        (&act["who"], &act["what"], &act["stage"]),
        (
            &"ann".into(),
            &"dead-letters redrive".into(),
            &"done".into()
        ),
        "{audit}"
    );
    assert_eq!(
        (&act["before"], &act["why"]),
        (
            &"set aside, rejected, attempt 1".into(),
            &"the card was mended".into()
        )
    );
    assert_eq!(act["place"]["broker"], world.broker_name());
    world.end().await;
}

async fn what_is_dropped_is_not_offered_again(broker: Broker) {
    let world = world(broker).await;
    world.publish(&[("a", "declined"), ("b", "declined")]).await;
    world.consume(Provider::Judges, 0, 2, 0).await;
    world
        .run(&["dead-letters", "drop", "--id", "a"])
        .await
        .ended(4)
        .says("would be dropped");
    assert_eq!(
        ids(&world.json(&["dead-letters", "list"]).await),
        ["a", "b"]
    );
    world
        .run(&["dead-letters", "drop", "--id", "a", "--yes"])
        .await
        .ended(0)
        .says("1 dropped");
    assert_eq!(ids(&world.json(&["dead-letters", "list"]).await), ["b"]);
    let everything = world.json(&["dead-letters", "list", "--everything"]).await;
    match broker {
        Broker::Kafka => {
            assert_eq!(ids(&everything), ["a", "b"], "nothing can be deleted there");
            let states: Vec<&Value> = everything["letters"]
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
        Broker::RabbitMq => world.until_there_are(1, ".dead-letters").await,
    }
    // It stays rejected: another copy is not run.
    assert_eq!(
        world.json(&["marker", "show", "a"]).await["state"],
        "rejected"
    );
    assert_eq!(world.json(&["audit"]).await[0]["what"], "dead-letters drop");
    let again = world
        .json(&["dead-letters", "redrive", "--all", "--yes"])
        .await;
    assert_eq!(again["done"], 1, "the other one alone: {again}");
    world.end().await;
}

async fn a_doubt_is_resolved_either_way(broker: Broker) {
    let world = world(broker).await;
    world.publish(&[("yes", "silent"), ("no", "silent")]).await;
    world.consume(Provider::Judges, 0, 0, 2).await;
    assert_eq!(ids(&world.json(&["in-doubt", "list"]).await), ["no", "yes"]);
    world
        .run(&["in-doubt", "list"])
        .await
        .ended(0)
        .says("in-doubt-said")
        .says("the handler has no `reconcile`");
    world
        .run(&["in-doubt", "show", "yes"])
        .await
        .ended(0)
        .says("payment-id: yes")
        .says("no answer from the provider");
    world.run(&["in-doubt", "resolve", "yes"]).await.ended(2);
    world
        .run(&["in-doubt", "resolve", "yes", "--happened"])
        .await
        .ended(4)
        .says("would be recorded as done");
    assert_eq!(
        world.json(&["marker", "show", "yes"]).await["state"],
        "in-doubt"
    );

    world
        .run(&["in-doubt", "resolve", "yes", "--happened", "--yes"])
        .await
        .ended(0)
        .says("1 resolved");
    assert_eq!(
        world.json(&["marker", "show", "yes"]).await["state"],
        "done"
    );
    world
        .run(&["in-doubt", "resolve", "no", "--did-not-happen", "--yes"])
        .await
        .ended(0)
        .says("sent to");
    assert_eq!(
        world.json(&["marker", "show", "no"]).await["state"],
        "cleared"
    );
    assert_eq!(ids(&world.json(&["in-doubt", "list"]).await), [""; 0]);

    let left = if broker == Broker::Kafka { 2 } else { 0 };
    world.consume(Provider::Works, 1, 0, left).await;
    assert_eq!(
        world.charged(),
        ["no"],
        "what happened is not charged again"
    );
    world
        .run(&["in-doubt", "resolve", "no", "--did-not-happen", "--yes"])
        .await
        .ended(1)
        .says("it was handled");
    let what: Vec<String> = world
        .json(&["audit"])
        .await
        .as_array()
        .expect("a list")
        .iter()
        .map(|act| act["after"].to_string())
        .collect();
    assert_eq!(what.len(), 4, "the marker and the letter of each: {what:?}");
    world.end().await;
}

async fn what_was_handled_meanwhile_or_is_in_doubt_is_not_redriven(broker: Broker) {
    let world = world(broker).await;
    world
        .publish(&[("done", "declined"), ("doubt", "silent")])
        .await;
    world.consume(Provider::Judges, 0, 1, 1).await;
    // An operator frees the id, and the producer sends it again.
    world
        .run(&["marker", "forget", "done", "--yes"])
        .await
        .ended(0);
    world.publish(&[("done", "works")]).await;
    world.consume(Provider::Works, 1, 1, 1).await;
    // And one that is in doubt stands in the dead letters too.
    let headers = [
        ("oncegate-id", "doubt"),
        ("oncegate-reason", "attempts-spent"),
    ];
    world
        .publish_to(
            &format!("{}.dead-letters", world.desk.name),
            "doubt",
            "{}",
            &headers,
        )
        .await;
    let said = world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1);
    let said = said
        .says("would be a duplicate")
        .says("`oncegate in-doubt resolve` first")
        .says("0 redriven, 2 left");
    assert!(!said.out.contains("sent to"), "{said:?}");
    assert_eq!(
        ids(&world.json(&["dead-letters", "list"]).await),
        ["done", "doubt"],
        "both are still there"
    );
    assert_eq!(
        world.json(&["marker", "show", "done"]).await["state"],
        "done"
    );
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn looking_joins_no_group_and_moves_no_offset_on_kafka() {
    let world = world(Broker::Kafka).await;
    world.publish(&[("a", "declined")]).await;
    world.consume(Provider::Judges, 0, 1, 0).await;
    let before = crate::world::groups().await;
    for _ in 0..3 {
        assert_eq!(ids(&world.json(&["dead-letters", "list"]).await), ["a"]);
    }
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0);
    let new: Vec<String> = crate::world::groups()
        .await
        .into_iter()
        .filter(|group| !before.contains(group))
        .collect();
    assert!(
        !new.iter().any(|group| group.starts_with("oncegate-cli")),
        "{new:?}"
    );
    world.end().await;
}

/// What RabbitMQ does with what is looked at: a classic queue counts nothing, a quorum queue of
/// 3.10 each look.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_that_counts_looks_is_looked_into_only_if_its_limit_is_out_of_reach() {
    let world = world(Broker::RabbitMq).await;
    let name = world.desk.name.clone();
    let counted = async |queue: &str, extra: &[&str]| {
        let settings = world.settings().replace(crate::world::COUNTS_ACCEPTED, "");
        world
            .desk
            .configure(&format!("{settings}dead-letters = \"{queue}\"\n"));
        world
            .publish_to(queue, "x", "{}", &[("oncegate-id", "x")])
            .await;
        for _ in 0..2 {
            let arguments: Vec<&str> = ["dead-letters", "list", "--json"]
                .into_iter()
                .chain(extra.iter().copied())
                .collect();
            let said = world.run(&arguments).await;
            if said.code != 0 {
                said.ended(3).says("--accept-delivery-counts");
                return None;
            }
            assert_eq!(ids(&said.json()), ["x"]);
            world.until(queue, 1).await;
        }
        let taken = crate::world::take_all(queue).await;
        assert_eq!(taken.len(), 1, "{taken:?}");
        Some(taken[0].2)
    };
    let (classic, limited) = (format!("{name}.classic"), format!("{name}.limited"));
    crate::world::declare(&classic, &[("x-queue-type", "classic")], None).await;
    crate::world::declare(&limited, &[("x-queue-type", "quorum")], Some(5)).await;
    assert_eq!(counted(&classic, &[]).await, Some(0));
    // Its header tells of the queue that it came from.
    let table: BTreeMap<_, _> = [
        ("oncegate-id".into(), crate::world::text("z")),
        ("x-delivery-count".into(), AMQPValue::LongLongInt(9)),
    ]
    .into();
    let properties = BasicProperties::default().with_headers(table.into());
    publish_properties(&crate::world::rabbitmq(), &classic, "{}", properties).await;
    let listed = world.json(&["dead-letters", "list"]).await;
    assert_eq!(
        (ids(&listed), &listed["letters"][0]["looks"]),
        (vec!["z".to_owned()], &Value::Null),
        "{listed}"
    );
    assert_eq!(
        counted(&limited, &[]).await,
        None,
        "what is dropped after five looks is not looked into"
    );
    crate::world::take_all(&limited).await;
    assert_eq!(
        counted(&limited, &["--accept-delivery-counts"]).await,
        Some(2)
    );
    assert_eq!(
        counted(&format!("{name}.dead-letters"), &[]).await,
        Some(2),
        "towards a limit of two thousand million"
    );
    for queue in [classic, limited] {
        crate::world::delete(&queue).await;
    }
    world.end().await;
}

/// A policy may give a queue a limit that no client is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn letters_are_always_seen_on_queues_that_oncegate_declared_and_none_is_dropped_at_the_limit_of_a_policy()
 {
    let server = tokio::task::spawn_blocking(RabbitServer::start)
        .await
        .expect("no panic")
        .expect("a server");
    let source: Box<dyn Source> = Box::new(
        RabbitMq::queue("payments")
            .url(server.url())
            .open()
            .await
            .expect("the queues are declared"),
    );
    source
        .close(Instant::now() + PATIENCE)
        .await
        .expect("a clean end");
    let limit = [
        "-q",
        "set_policy",
        "limit",
        "dead-letters",
        r#"{"delivery-limit": 5}"#,
        "--apply-to",
        "queues",
    ];
    server.control(&limit).expect("a policy");
    let desk = Desk::new();
    desk.configure(&format!(
        "[gate]\nid = \"header payment-id\"\n[rabbitmq]\nurl = \"{}\"\nqueue = \"payments\"\n",
        server.url()
    ));
    for id in ["x", "y"] {
        let headers = [
            ("payment-id", id),
            ("oncegate-id", id),
            ("oncegate-reason", "refused"),
            ("oncegate-attempts", "5"),
            ("oncegate-fence", "6"),
        ];
        let table: BTreeMap<_, _> = headers
            .iter()
            .map(|(name, value)| ((*name).into(), crate::world::text(value)))
            .collect();
        let properties = BasicProperties::default()
            .with_headers(table.into())
            .with_timestamp(1_000)
            .with_message_id("m".into());
        publish_properties(
            &server.url(),
            "payments.dead-letters",
            r#"{"card":"works"}"#,
            properties,
        )
        .await;
    }
    let first = desk.json(&["dead-letters", "show", "x"])[0].clone();
    for look in 0..20 {
        let mut seen = ids(&desk.json(&["dead-letters", "list"]));
        seen.sort_unstable();
        assert_eq!(seen, ["x", "y"], "at look {look}");
    }
    let story = desk.json(&["explain", "x"]);
    assert_eq!(
        (&story["verdict"], &story["not_looked_at"]),
        (&"dead-lettered".into(), &serde_json::json!([])),
        "{story}"
    );
    let (letter, last) = (
        &story["dead_letters"][0],
        desk.json(&["dead-letters", "show", "x", "--body"])[0].clone(),
    );
    assert_eq!(
        (&letter["attempts"], &letter["fence"]),
        (&5.into(), &6.into()),
        "{letter}"
    );
    desk.run(&["dead-letters", "list"])
        .ended(0)
        .says("ATTEMPTS  FENCE");
    let named = |letter: &Value| -> BTreeMap<String, String> {
        let headers = letter["headers"].as_array().expect("a list").iter();
        let text = |it: &Value| it.as_str().expect("a text").to_owned();
        headers
            .map(|it| (text(&it[0]), text(&it[1])))
            .filter(|(name, _)| {
                !["x-delivery-count", "oncegate-replaced-by"].contains(&name.as_str())
            })
            .collect()
    };
    assert_eq!(
        (named(&last), &last["from_ms"], &last["body"]),
        (
            named(&first),
            &first["from_ms"],
            &r#"{"card":"works"}"#.into()
        ),
        "a copy is the letter"
    );
    // A user who may not write there cannot have a letter replaced: it says that it did not look.
    server
        .control(&[
            "-q",
            "set_permissions",
            "guest",
            ".*",
            "^(?!amq.default$).*$",
            ".*",
        ])
        .expect("rights");
    let blind = desk.run(&["explain", "x", "--json"]).ended(3).json();
    assert_eq!(
        (&blind["verdict"], &blind["dead_letters"]),
        (&"not-looked-at".into(), &Value::Null),
        "{blind}"
    );
    assert_eq!(
        blind["not_looked_at"][0]["where"], "the dead-letter destination on rabbitmq",
        "{blind}"
    );
    desk.run(&["explain", "x"])
        .ended(3)
        .says("x: not known, since not all was looked at; not looked at: the dead-letter destination on rabbitmq");
    desk.run(&["dead-letters", "list"])
        .ended(3)
        .says("Not looked at: the dead-letter destination on rabbitmq")
        .says("list_policies");
    let listed = desk
        .run(&["dead-letters", "list", "--json"])
        .ended(3)
        .json();
    assert_eq!(
        (&listed["all"], &listed["not_looked_at"][0]["where"]),
        (&false.into(), &blind["not_looked_at"][0]["where"]),
        "{listed}"
    );
    server
        .control(&["-q", "set_permissions", "guest", ".*", ".*", ".*"])
        .expect("rights");
    assert_eq!(
        ids(&desk.json(&["dead-letters", "list"])).len(),
        2,
        "what was not looked at was not counted"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_letter_whose_copy_is_not_taken_stays_where_it_is() {
    let world = world(Broker::RabbitMq).await;
    world.publish(&[("a", "declined"), ("b", "declined")]).await;
    world.consume(Provider::Judges, 0, 2, 0).await;
    crate::world::delete(&world.desk.name).await;
    let said = world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(3);
    said.says("is not there, or is full")
        .says("0 redriven, 1 left");
    world.until_there_are(2, ".dead-letters").await;
    let act = world.json(&["audit"]).await[0].clone();
    assert_eq!(
        act["stage"], "not-sent",
        "its marker was freed, and no copy stands"
    );
    // Either of them may stand first.
    let first = act["id"].as_str().expect("an id");
    assert_eq!(
        world.json(&["marker", "show", first]).await["state"],
        "cleared"
    );
    // The queue is declared again by whoever consumes; nothing is lost.
    crate::world::declare_as_the_source_does(&world.desk.name).await;
    world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(0)
        .says("2 redriven");
    world.consume(Provider::Works, 2, 0, 0).await;
    world.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_letter_without_its_body_is_not_sent_back_and_a_copy_goes_to_its_partition() {
    let world = world(Broker::Kafka).await;
    let name = world.desk.name.clone();
    let set_aside = |id: &'static str,
                     partition: i32,
                     omitted: &'static [(&'static str, &'static str)]| {
        let (world, name, origin) = (&world, &name, format!("{}/{partition}/7", world.desk.name));
        async move {
            let headers = [
                ("oncegate-id", id),
                ("oncegate-reason", "refused"),
                ("oncegate-origin", origin.as_str()),
            ];
            let headers: Vec<(&str, &str)> = headers.iter().chain(omitted).copied().collect();
            world
                .publish_to(
                    &format!("{name}.dead-letters"),
                    id,
                    r#"{"card":"works"}"#,
                    &headers,
                )
                .await;
        }
    };
    set_aside("large", 0, &[("oncegate-body-omitted", "2000000")]).await;
    set_aside("first", 0, &[]).await;
    set_aside("second", 1, &[]).await;
    set_aside("gone", 9, &[]).await;
    let said = world
        .run(&["dead-letters", "redrive", "--all", "--yes"])
        .await
        .ended(1);
    let said = said
        .says("body of 2000000 bytes")
        .says("3 redriven, 1 left");
    assert!(
        said.out.contains(&format!("{name}/0/7 alone")),
        "it says where the whole one is: {said:?}"
    );
    assert_eq!(ids(&world.json(&["dead-letters", "list"]).await), ["large"]);
    world
        .desk
        .configure(&format!("{}dead-letters = \"{name}\"\n", world.settings()));
    let sent = world.json(&["dead-letters", "list", "--everything"]).await;
    let partition = |id: &str| {
        sent["letters"]
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
        "to another one, where its own is gone: {sent}"
    );
    world.end().await;
}

/// What RabbitMQ itself sets aside has no header of ours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_broker_set_aside_is_known_by_its_own_id() {
    let world = world(Broker::RabbitMq).await;
    world
        .publish_to(
            &format!("{}.dead-letters", world.desk.name),
            "plain",
            r#"{"card":"works"}"#,
            &[],
        )
        .await;
    assert_eq!(
        ids(&world.json(&["dead-letters", "list", "--id", "plain"]).await),
        ["plain"]
    );
    // Nothing says how old it is.
    world
        .run(&["dead-letters", "redrive", "--id", "plain", "--dry-run"])
        .await
        .ended(0)
        .says("to be reconciled");
    world
        .run(&[
            "dead-letters",
            "redrive",
            "--id",
            "plain",
            "--accept-forgotten",
            "--yes",
        ])
        .await
        .ended(0);
    world.consume(Provider::Works, 1, 0, 0).await;
    assert_eq!(world.charged(), ["plain"]);
    world.end().await;
}

async fn an_id_that_was_never_in_the_store_is_redriven_all_the_same(broker: Broker) {
    let world = world(broker).await;
    // As old as it says, it would be in doubt at once; and it has failed more often than is
    // allowed.
    let headers = [
        ("oncegate-id", "old"),
        ("oncegate-first-seen", "1000"),
        ("oncegate-failures", "99"),
        ("kept", "yes"),
    ];
    let body = r#"{"id":"old","card":"works","amount":1}"#;
    world
        .publish_to(
            &format!("{}.dead-letters", world.desk.name),
            "old",
            body,
            &headers,
        )
        .await;
    assert_eq!(
        ids(&world
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
    world.run(&redrive).await.ended(0).says("1 redriven");
    // Where it was sent, it is looked at as if letters stood there.
    let name = &world.desk.name;
    world
        .desk
        .configure(&format!("{}dead-letters = \"{name}\"\n", world.settings()));
    let copy = world
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
    assert_eq!(ours.count(), 0, "it begins anew: {copy}");
    world.desk.configure(&world.settings());
    let left = if broker == Broker::Kafka { 1 } else { 0 };
    world.consume(Provider::Works, 1, left, 0).await;
    assert_eq!(world.charged(), ["old"]);
    world.end().await;
}
