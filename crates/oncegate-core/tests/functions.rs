//! Functions and closures as handlers, the router, and composed ids, on the in-memory source and store.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::*;

type Seen = Arc<Mutex<Vec<String>>>;

fn seen(lines: &Seen) -> Vec<String> {
    let mut lines = lines.lock().expect("no panic inside").clone();
    lines.sort();
    lines
}

fn record(lines: &Seen, line: impl Into<String>) {
    lines.lock().expect("no panic inside").push(line.into());
}

#[derive(serde::Deserialize)]
struct Created {
    cents: u64,
}

#[derive(serde::Deserialize)]
struct Refunded {
    reason: String,
}

fn message(id: &str, kind: Option<&str>, body: &str) -> Message {
    let message = Message::new(body.to_owned()).with_message_id(id.to_owned());
    match kind {
        Some(kind) => message.with_header("type", kind),
        None => message,
    }
}

/// Runs a consumer until every message is settled.
async fn drain<H: Handler>(broker: &MemoryBroker, guarantee: Guarantee, handler: H) {
    let settled = broker.clone();
    Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .guarantee(guarantee)
        .allow_volatile_store()
        .id(IdSource::message_id())
        .backoff(Duration::from_millis(1), Duration::from_millis(2))
        .handler(handler)
        .run_until(async move { settled.all_settled().await })
        .await
        .expect("a clean end");
}

fn reasons(rejected: Vec<DeadLetter>) -> Vec<(String, Reason, Option<u32>)> {
    let mut reasons: Vec<_> = rejected
        .into_iter()
        .map(|dead_letter| {
            let history = dead_letter.failure_history.expect("a history");
            let id = history.id.unwrap_or_default();
            (id, dead_letter.reason, Some(history.attempts))
        })
        .collect();
    reasons.sort_by(|a, b| a.0.cmp(&b.0));
    reasons
}

#[tokio::test]
async fn a_closure_with_state_handles_messages_and_uses_its_context_after_an_await() {
    let (broker, lines) = (MemoryBroker::new("q"), Seen::default());
    broker.publish(message("a", None, r#"{"cents":5}"#));
    broker.publish(message("a", None, r#"{"cents":5}"#));
    broker.publish(message("b", None, r#"{"cents":0}"#));
    let state = lines.clone();
    let handler = handler_fn(move |created: Created, cx| {
        let lines = state.clone();
        async move {
            tokio::task::yield_now().await;
            if created.cents == 0 {
                Err("nothing to pay").reject()?;
            }
            record(
                &lines,
                format!("{} {} {}", cx.id(), cx.attempt(), created.cents),
            );
            Ok(())
        }
    });
    drain(&broker, Guarantee::EffectivelyOnce, handler).await;
    assert_eq!(seen(&lines), ["a 1 5"]);
    let refused = ("b".to_owned(), Reason::Refused, Some(1));
    assert_eq!(reasons(broker.dead_letters()), [refused]);
}

#[tokio::test]
async fn an_async_fn_and_an_async_closure_are_handlers() {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    async fn count(_: String, cx: Context) -> Result<(), Failure> {
        tokio::task::yield_now().await;
        RUNS.fetch_add(cx.attempt(), Ordering::Relaxed);
        Ok(())
    }
    let broker = MemoryBroker::new("q");
    broker.publish(message("a", None, "\"x\""));
    drain(&broker, Guarantee::EffectivelyOnce, handler_fn(count)).await;
    broker.publish(message("b", None, "\"x\""));
    let closure = handler_fn(async |body: String, cx: Context| count(body, cx).await);
    drain(&broker, Guarantee::EffectivelyOnce, closure).await;
    assert_eq!(RUNS.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn at_most_once_a_closure_is_reconciled_by_its_second_closure() {
    let (broker, lines) = (MemoryBroker::new("q"), Seen::default());
    for id in ["happened", "unknown"] {
        broker.publish(message(id, None, "\"work\""));
    }
    let (runs, reconciles) = (lines.clone(), lines.clone());
    let handler = handler_fn(move |_: String, cx| {
        record(&runs, format!("handle {}", cx.id()));
        async { Err("no answer").in_doubt() }
    })
    .reconcile(move |body: String, cx| {
        let lines = reconciles.clone();
        async move {
            tokio::task::yield_now().await;
            if cx.id() == "unknown" {
                return Ok(Reconciled::Unknown);
            }
            record(&lines, format!("reconcile {} {body}", cx.id()));
            Ok(Reconciled::Happened)
        }
    });
    drain(&broker, Guarantee::AtMostOnce, handler).await;
    let expected = [
        "handle happened",
        "handle unknown",
        "reconcile happened work",
    ];
    assert_eq!(seen(&lines), expected);
    let in_doubt = Reason::InDoubt(DoubtCause::HandlerReported);
    assert_eq!(
        reasons(broker.in_doubt()),
        [("unknown".to_owned(), in_doubt, Some(1))]
    );
}

#[tokio::test]
async fn at_most_once_a_function_without_reconcile_is_in_doubt_at_once() {
    let broker = MemoryBroker::new("q");
    broker.publish(message("a", None, "\"work\""));
    let handler = handler_fn(|_: String, _| async { Err("no answer").in_doubt() });
    drain(&broker, Guarantee::AtMostOnce, handler).await;
    let in_doubt = broker.in_doubt();
    let history = in_doubt[0].failure_history.as_ref().expect("a history");
    assert_eq!(in_doubt.len(), 1);
    assert!(
        history
            .last_error
            .as_deref()
            .is_some_and(|error| error.contains("no `reconcile`")),
        "{history:?}"
    );
}

/// Records what each of three handlers gets.
fn router(by: Router, lines: &Seen) -> impl Handler {
    let (created, refunded, closed) = (lines.clone(), lines.clone(), lines.clone());
    by.route(
        "created",
        handler_fn(move |payload: Created, cx| {
            record(&created, format!("created {} {}", cx.id(), payload.cents));
            async { Ok(()) }
        }),
    )
    .route(
        "refunded",
        handler_fn(move |payload: Refunded, cx| {
            record(
                &refunded,
                format!("refunded {} {}", cx.id(), payload.reason),
            );
            async { Err("no answer").in_doubt() }
        })
        .reconcile({
            let lines = lines.clone();
            move |payload: Refunded, cx| {
                record(&lines, format!("reconcile {} {}", cx.id(), payload.reason));
                async { Ok(Reconciled::Happened) }
            }
        }),
    )
    .route(
        "closed",
        handler_fn(move |days: Vec<u32>, cx| {
            record(&closed, format!("closed {} {days:?}", cx.id()));
            async { Ok(()) }
        }),
    )
}

#[tokio::test]
async fn each_message_goes_to_the_handler_of_its_type_and_without_one_to_the_dead_letters() {
    for guarantee in [Guarantee::EffectivelyOnce, Guarantee::AtMostOnce] {
        let (broker, lines) = (MemoryBroker::new("q"), Seen::default());
        let refunds = guarantee == Guarantee::AtMostOnce;
        for (id, kind, body) in [
            ("1", Some("created"), r#"{"cents":5}"#),
            ("2", Some("closed"), "[1,2]"),
            ("3", Some("created"), "[1,2]"),
            ("4", Some("create"), r#"{"cents":5}"#),
            ("5", None, "not json"),
        ] {
            broker.publish(message(id, kind, body));
        }
        broker.publish(message("6", Some("created"), "{}").with_header("type", "closed"));
        if refunds {
            broker.publish(message("7", Some("refunded"), r#"{"reason":"late"}"#));
        }
        drain(
            &broker,
            guarantee,
            router(Router::by_header("type"), &lines),
        )
        .await;
        let mut expected = vec!["closed 2 [1, 2]", "created 1 5"];
        if refunds {
            expected.extend(["reconcile 7 late", "refunded 7 late"]);
        }
        assert_eq!(seen(&lines), expected);
        let errors: Vec<_> = broker
            .dead_letters()
            .into_iter()
            .filter_map(|dead_letter| dead_letter.failure_history?.first_error)
            .collect();
        let of = |id: &str, reason| (id.to_owned(), reason, Some(0));
        assert_eq!(
            reasons(broker.dead_letters()),
            [
                of("3", Reason::Unreadable),
                of("4", Reason::NoRoute),
                of("5", Reason::NoRoute),
                of("6", Reason::NoRoute)
            ],
        );
        for text in [
            "no route for the value of the header `type`",
            "no value of the header `type`",
            "`type` is ambiguous",
        ] {
            let found = errors.iter().filter(|error| error.contains(text)).count();
            assert_eq!(found, 1, "{text}: {errors:?}");
        }
    }
}

#[tokio::test]
async fn the_handler_of_all_other_messages_gets_those_without_a_route() {
    let (broker, lines) = (MemoryBroker::new("q"), Seen::default());
    broker.publish(message("1", Some("created"), r#"{"cents":5}"#));
    broker.publish(message("2", Some("other"), "\"x\""));
    broker.publish(message("3", None, "\"x\""));
    let (created, others) = (lines.clone(), lines.clone());
    let router = Router::by_header("type")
        .otherwise(handler_fn(move |_: String, cx| {
            record(&others, format!("other {}", cx.id()));
            async { Ok(()) }
        }))
        .route(
            "created",
            handler_fn(move |_: Created, cx| {
                record(&created, format!("created {}", cx.id()));
                async { Ok(()) }
            }),
        );
    drain(&broker, Guarantee::EffectivelyOnce, router).await;
    assert_eq!(seen(&lines), ["created 1", "other 2", "other 3"]);
    assert_eq!(broker.dead_letters().len(), 0);
}

#[tokio::test]
async fn the_route_is_the_key_the_cloud_events_type_or_the_result_of_a_function() {
    let first_byte = |message: &Message| message.body.first().map(|byte| vec![*byte]);
    for (by, message) in [
        (Router::by_key(), Message::new("[1]").with_key("[")),
        (
            Router::by_cloud_events_type(),
            Message::new("[1]").with_header("ce_type", "["),
        ),
        (Router::by(first_byte), Message::new("[1]")),
    ] {
        let (broker, lines) = (MemoryBroker::new("q"), Seen::default());
        broker.publish(message.with_message_id("1"));
        broker.publish(Message::default().with_message_id("2"));
        let state = lines.clone();
        let router = by.route(
            "[",
            handler_fn(move |numbers: Vec<u32>, _| {
                record(&state, format!("{numbers:?}"));
                async { Ok(()) }
            }),
        );
        drain(&broker, Guarantee::EffectivelyOnce, router).await;
        assert_eq!(seen(&lines), ["[1]"]);
        let no_route = ("2".to_owned(), Reason::NoRoute, Some(0));
        assert_eq!(reasons(broker.dead_letters()), [no_route]);
    }
}

#[test]
fn a_router_with_two_handlers_for_one_value_is_refused_at_the_start() {
    let print = || handler_fn(async |_: String, _: Context| Ok(()));
    let problem = |router| {
        let broker = MemoryBroker::new("q");
        let consumer = Consumer::builder()
            .source(broker.source())
            .store(MemoryStore::new())
            .id(IdSource::message_id())
            .handler(router);
        consumer.build().expect_err("a wrong router").to_string()
    };
    let twice = Router::by_key().route("a", print()).route("a", print());
    assert!(problem(twice).contains("two routes for `a`"));
    let twice = Router::by_key().route("a", print()).route("a", print());
    let outer = Router::by_header("type")
        .route("x", twice)
        .route("y", print());
    let broker = MemoryBroker::new("q");
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .handler(outer);
    let error = consumer
        .build()
        .expect_err("a wrong inner router")
        .to_string();
    assert!(error.contains("two routes for `a`"), "{error}");
    let others = Router::by_key().otherwise(print()).otherwise(print());
    assert!(problem(others).contains("two handlers for all other messages"));
    let unnamed = Router::by_header("")
        .route("a", print())
        .route("b", print());
    assert!(problem(unnamed).contains("header is empty"));
}

#[tokio::test]
async fn ids_of_several_sources_deduplicate_and_an_ambiguous_one_is_refused() {
    let lines = Seen::default();
    let consume = async |id: IdSource, messages: Vec<Message>| {
        let broker = MemoryBroker::new("q");
        messages
            .into_iter()
            .for_each(|message| broker.publish(message));
        let (settled, state) = (broker.clone(), lines.clone());
        Consumer::builder()
            .source(broker.source())
            .store(MemoryStore::new())
            .id(id)
            .decode(RawBytes)
            .handler(handler_fn(move |_: Raw, cx| {
                record(&state, cx.id());
                async { Ok(()) }
            }))
            .run_until(async move { settled.all_settled().await })
            .await
            .expect("a clean end");
        broker.dead_letters()
    };
    let first = IdSource::first_of([IdSource::header("id"), IdSource::message_id()]);
    let rejected = consume(
        first,
        vec![
            Message::new("x").with_header("id", "a"),
            Message::new("x").with_message_id("a"),
            Message::new("x")
                .with_message_id("b")
                .with_header("id", "c"),
            Message::new("x"),
        ],
    )
    .await;
    assert_eq!(seen(&lines), ["a"]);
    let mut reasons: Vec<_> = rejected.iter().map(|it| it.reason.as_str()).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["missing-id", "unusable-id"]);

    let both = IdSource::all_of([IdSource::header("tenant"), IdSource::message_id()]);
    let of = |tenant, id: &'static str| {
        Message::new("x")
            .with_header("tenant", tenant)
            .with_message_id(id)
    };
    let messages = vec![of("a", "bc"), of("ab", "c"), of("a", "bc")];
    assert_eq!(consume(both, messages).await.len(), 0);
    assert_eq!(seen(&lines), ["a", "a/bc", "ab/c"]);
}
