//! The kit reports handlers that their guarantee does not protect, and no others.

use std::sync::Mutex;
use std::time::Duration;

use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::{
    Context, Execution, Failure, FailureExt, Guarantee, Handler, IdSource, Message, Order, Raw,
    RawBytes, Reconciled, Router, handler_fn,
};
use oncegate_testkit::kit::HandlerResult;
use oncegate_testkit::{Effects, Kit};

use Guarantee::{AtMostOnce, Bare};

/// What the sink of a handler does with a known id.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sink {
    Adds,
    Upserts,
}

/// A handler that waits before and after its effect.
struct Works {
    effects: Effects,
    sink: Sink,
}

impl Works {
    fn on(sink: Sink) -> (Self, Effects) {
        let effects = Effects::default();
        (
            Self {
                effects: effects.clone(),
                sink,
            },
            effects,
        )
    }
}

impl Handler for Works {
    type Payload = String;

    async fn handle(&self, payload: String, cx: &Context) -> Result<(), Failure> {
        tokio::time::sleep(Duration::from_secs(5)).await;
        if payload == "refuse" {
            Err("no such account").reject()?;
        }
        if self.sink == Sink::Adds || self.effects.count(cx.id()) == 0 {
            self.effects.happened(cx.id());
        }
        tokio::time::sleep(Duration::from_secs(5)).await;
        Ok(())
    }

    async fn reconcile(&self, payload: String, cx: &Context) -> Result<Reconciled, Failure> {
        tokio::time::sleep(Duration::from_secs(5)).await;
        Ok(match (payload.as_str(), self.effects.count(cx.id())) {
            ("unknown outcome", _) => Reconciled::Unknown,
            (_, 0) => Reconciled::DidNotHappen, // no request is in flight: the handler's future was the only one
            _ => Reconciled::Happened,
        })
    }
}

fn three(payload: &str) -> Vec<(String, String)> {
    (1..=3)
        .map(|id| (format!("id-{id}"), payload.to_owned()))
        .collect()
}

fn panics(assertion: impl FnOnce()) -> String {
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(assertion))
        .expect_err("the assertion fails");
    panic.downcast_ref::<String>().cloned().expect("a text")
}

#[tokio::test(start_paused = true)]
async fn without_faults_each_message_has_one_run() {
    let (handler, effects) = Works::on(Sink::Adds);
    let report = Kit::new(handler)
        .messages(three("work"))
        .duplicates(3)
        .run()
        .await;
    report
        .assert_none_lost(|id| effects.count(id))
        .assert_none_twice(|id| effects.count(id))
        .assert_none_rejected();
    assert_eq!(
        (effects.total(), report.runs().len(), report.starts("id-2")),
        (3, 3, 1)
    );
    assert!(
        report
            .runs()
            .iter()
            .all(|run| (run.attempt, run.result) == (1, HandlerResult::Succeeded))
    );
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_is_not_idempotent_fails_effectively_once() {
    let (handler, effects) = Works::on(Sink::Adds);
    let report = Kit::new(handler)
        .messages(three("work"))
        .crash_after_handler(1)
        .run()
        .await;
    report.assert_none_lost(|id| effects.count(id));
    let panic = panics(|| _ = report.assert_none_twice(|id| effects.count(id)));
    assert!(
        panic.contains(
            "happened 2 times. Its runs: attempt 1 returned Ok, then attempt 2 returned Ok"
        ),
        "{panic}"
    );
}

#[tokio::test(start_paused = true)]
async fn an_idempotent_handler_passes_effectively_once() {
    let (handler, effects) = Works::on(Sink::Upserts);
    let kit = Kit::new(handler)
        .messages(three("work"))
        .duplicates(2)
        .lost_replies(2);
    let report = kit
        .crash_before_handler(1)
        .crash_in_handler(2)
        .crash_after_handler(1)
        .run()
        .await;
    report
        .assert_none_lost(|id| effects.count(id))
        .assert_none_twice(|id| effects.count(id))
        .assert_none_rejected();
    assert!(
        report.runs().iter().any(|run| run.attempt > 1),
        "{:?}",
        report.runs()
    );
}

#[tokio::test(start_paused = true)]
async fn each_crash_in_the_handler_is_at_the_next_wait() {
    for (crashes, effects_twice) in [(1, 0), (2, 1)] {
        let (handler, effects) = Works::on(Sink::Adds);
        let report = Kit::new(handler)
            .messages([("a", "work")])
            .crash_in_handler(crashes)
            .run()
            .await;
        assert_eq!(
            effects.count("a"),
            1 + effects_twice,
            "the second wait comes after the effect"
        );
        assert_eq!(report.starts("a"), crashes as usize + 1);
        assert_eq!(report.runs()[0].result, HandlerResult::Interrupted);
    }
}

#[tokio::test(start_paused = true)]
async fn at_most_once_has_no_second_effect_and_loses_nothing() {
    // After one crash all claimed ids are in doubt; if their outcome stays unknown, no further
    // handler runs in which a crash could occur.
    let cases = [
        ("work", 1, Execution::Spawned),
        ("work", 1, Execution::Inline),
        ("unknown outcome", 0, Execution::Spawned),
    ];
    for (payload, crashes_before, handlers) in cases {
        let (handler, effects) = Works::on(Sink::Adds);
        let kit = Kit::new(handler)
            .guarantee(AtMostOnce)
            .settings(|consumer| consumer.execution(handlers));
        let kit = kit.messages(three(payload)).duplicates(2).lost_replies(2);
        let report = kit
            .crash_before_handler(crashes_before)
            .crash_after_handler(1)
            .run()
            .await;
        report
            .assert_none_twice(|id| effects.count(id))
            .assert_none_lost(|id| effects.count(id));
        let unknown = report
            .in_doubt()
            .iter()
            .any(|rejected| rejected.reason == Reason::InDoubt(DoubtCause::Interrupted));
        assert_eq!(
            unknown,
            payload == "unknown outcome",
            "{:?}",
            report.in_doubt()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn at_most_once_calls_reconcile_after_each_crash() {
    let (handler, effects) = Works::on(Sink::Adds);
    let kit = Kit::new(handler)
        .guarantee(AtMostOnce)
        .messages([("a", "work")]);
    let report = kit
        .crash_before_handler(1)
        .crash_in_handler(1)
        .crash_after_handler(1)
        .run()
        .await;
    report.assert_none_rejected();
    assert_eq!(
        (effects.count("a"), report.starts("a")),
        (1, 3),
        "{:?}",
        report.runs()
    );
    let last = report
        .reconciles()
        .last()
        .map(|it| (it.attempt, it.result.clone(), it.after));
    assert_eq!(
        last,
        Some((6, Some(Ok(Reconciled::Happened)), 3)),
        "{:?}",
        report.reconciles()
    );
    let panic = panics(|| _ = report.assert_none_lost(|_| 0));
    let first = "Its runs: attempt 1 was interrupted, then reconcile (attempt 2) returned DidNotHappen, then attempt 3";
    assert!(
        panic.contains(first) && panic.ends_with("then reconcile (attempt 6) returned Happened"),
        "{panic}"
    );
}

/// The report of an in-doubt message has the results of `reconcile`.
#[tokio::test(start_paused = true)]
async fn the_report_of_an_in_doubt_message_has_the_results_of_reconcile() {
    let (handler, _) = Works::on(Sink::Adds);
    let report = Kit::new(handler)
        .guarantee(AtMostOnce)
        .messages([("a", "unknown outcome")])
        .crash_after_handler(1)
        .run()
        .await;
    let panic = panics(|| _ = report.assert_none_rejected());
    assert!(
        panic.contains(
            "Its runs: attempt 1 returned Ok, then reconcile (attempt 2) returned Unknown, 5 times"
        ),
        "{panic}"
    );
}

#[tokio::test(start_paused = true)]
async fn bare_is_reported_to_lose_messages() {
    let (handler, effects) = Works::on(Sink::Adds);
    let report = Kit::new(handler)
        .guarantee(Bare)
        .messages([("a", "work")])
        .crash_before_handler(1)
        .run()
        .await;
    let panic = panics(|| _ = report.assert_none_lost(|id| effects.count(id)));
    assert!(
        panic.contains("`a` was accepted, and its effect never happened"),
        "{panic}"
    );
    let (handler, effects) = Works::on(Sink::Adds);
    let report = Kit::new(handler)
        .guarantee(Bare)
        .messages([("a", "work")])
        .lost_replies(1)
        .run()
        .await;
    panics(|| _ = report.assert_none_lost(|id| effects.count(id)));
}

#[tokio::test(start_paused = true)]
async fn a_router_is_tested_with_its_routes() {
    let effects = Effects::default();
    let happened = effects.clone();
    let router = Router::by_header("type").route(
        "created",
        handler_fn(move |_: u32, cx| {
            happened.happened(cx.id());
            async { Ok(()) }
        }),
    );
    let kit = Kit::new(router)
        .message(
            Message::new("1")
                .with_message_id("a")
                .with_header("type", "created"),
        )
        .message(Message::new("1").with_message_id("b"));
    let report = kit.run().await;
    assert_eq!((effects.count("a"), effects.count("b")), (1, 0));
    assert_eq!(report.dead_letters()[0].reason, Reason::NoRoute);
}

#[tokio::test(start_paused = true)]
async fn a_rejected_message_is_not_lost_and_is_reported() {
    let (handler, effects) = Works::on(Sink::Adds);
    let kit = Kit::new(handler)
        .messages([("a", "refuse")])
        .message(Message::new("{").with_message_id("b"))
        .message(Message::new("\"no id\""));
    let report = kit.run().await;
    report.assert_none_lost(|id| effects.count(id));
    let mut reasons: Vec<_> = report
        .dead_letters()
        .iter()
        .map(|rejected| rejected.reason.as_str())
        .collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["missing-id", "refused", "unreadable"]);
    let panic = panics(|| _ = report.assert_none_rejected());
    assert!(panic.contains("was rejected"), "{panic}");
}

#[tokio::test]
#[should_panic(expected = "crash_after_handler: 3 of 4 planned faults occurred")]
async fn a_planned_fault_that_did_not_occur_is_an_error() {
    let (handler, _) = Works::on(Sink::Upserts);
    tokio::time::pause();
    let _ = Kit::new(handler)
        .messages([("a", "work")])
        .settings(|it| it.max_crashes(2))
        .crash_after_handler(4)
        .run()
        .await;
}

/// As quick as a handler on a busy machine.
struct Quick(Effects);

impl Handler for Quick {
    type Payload = String;

    async fn handle(&self, _: String, cx: &Context) -> Result<(), Failure> {
        tokio::task::yield_now().await;
        self.0.happened(cx.id());
        tokio::task::yield_now().await;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_handler_of_a_crashed_consumer_runs_on_many_threads() {
    for _ in 0..20 {
        let effects = Effects::default();
        let messages = (0..20).map(|id| (format!("id-{id}"), "work"));
        let kit = Kit::new(Quick(effects.clone()))
            .guarantee(AtMostOnce)
            .messages(messages)
            .duplicates(1);
        let report = kit.crash_after_handler(1).run().await;
        report
            .assert_none_twice(|id| effects.count(id))
            .assert_none_lost(|id| effects.count(id));
        let happened = report
            .runs()
            .iter()
            .filter(|run| run.result == HandlerResult::Succeeded)
            .count();
        assert!(effects.total() >= happened && effects.total() <= report.runs().len());
    }
}

/// Notes what it was given.
#[derive(Default)]
struct Notes(Mutex<Vec<Vec<u8>>>);

impl Handler for &'static Notes {
    type Payload = Raw;

    async fn handle(&self, body: Raw, _: &Context) -> Result<(), Failure> {
        self.0.lock().expect("no panic inside").push(body.0);
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn settings_and_id_source_are_used() {
    let notes: &Notes = Box::leak(Box::default());
    let kit = Kit::new(notes)
        .id(IdSource::header("order"))
        .settings(|it| it.decode(RawBytes).order(Order::ByKey).max_in_flight(1));
    let kit = kit
        .message(Message::new("tea").with_header("order", "1"))
        .message(Message::new("milk").with_header("order", "2"));
    let report = kit.duplicates(1).run().await;
    assert_eq!(
        *notes.0.lock().expect("no panic inside"),
        [b"tea".to_vec(), b"milk".to_vec()]
    );
    assert_eq!((report.starts("1"), report.starts("2")), (1, 1));
}
