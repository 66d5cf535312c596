//! Markers of earlier runs without a known outcome, and what the next consumer or message does.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::lifecycle::{DoubtCause, Reason};
use oncegate_core::marker::{Operation, OperationKind, Terms, Token};
use oncegate_core::*;
use tracing_subscriber::fmt::MakeWriter;

/// Hangs, is in doubt, rejects, or succeeds, by the body; counts its runs, and has no `reconcile`.
#[derive(Clone, Default)]
struct Scripted(Arc<AtomicU32>);

impl Handler for Scripted {
    type Payload = Raw;

    async fn handle(&self, body: Raw, _: &Context) -> Result<(), Failure> {
        self.0.fetch_add(1, Ordering::Relaxed);
        match &body.0[..] {
            b"hang" => std::future::pending().await,
            b"no answer" => Err("no answer").in_doubt(),
            b"hopeless" => Err("hopeless").reject(),
            _ => Ok(()),
        }
    }
}

/// A broker, a store and a handler.
struct Fixture {
    broker: MemoryBroker,
    store: MemoryStore,
    handler: Scripted,
}

impl Fixture {
    fn new() -> Self {
        Self {
            broker: MemoryBroker::new("q"),
            store: MemoryStore::new(),
            handler: Scripted::default(),
        }
    }

    fn publish(&self, body: &str) {
        self.broker
            .publish(Message::new(body.to_owned()).with_header("id", "a"));
    }

    fn consumer(
        &self,
        guarantee: Guarantee,
    ) -> Builder<MemorySource, MemoryStore, Scripted, RawBytes> {
        Consumer::builder()
            .source(self.broker.source())
            .store(self.store.clone())
            .handler(self.handler.clone())
            .decode(RawBytes)
            .guarantee(guarantee)
            .id(IdSource::header("id"))
            .allow_volatile_store()
            .lease(Duration::from_millis(200))
            .max_attempts(1)
            .max_reconciles(1)
            .backoff(Duration::from_millis(5), Duration::from_millis(20))
    }

    async fn drain(&self, guarantee: Guarantee) {
        let broker = self.broker.clone();
        self.consumer(guarantee)
            .run_until(async move { broker.all_settled().await })
            .await
            .expect("a clean end");
    }

    /// Why messages were dead-lettered or sent to the in-doubt queue.
    fn reasons(&self) -> Vec<Reason> {
        self.broker
            .dead_letters()
            .into_iter()
            .chain(self.broker.in_doubt())
            .map(|dead_letter| dead_letter.reason)
            .collect()
    }
}

#[tokio::test]
async fn at_most_once_does_not_run_an_id_whose_outcome_is_unknown_since_effectively_once() {
    let fixture = Fixture::new();
    fixture.publish("no answer");
    fixture.drain(Guarantee::EffectivelyOnce).await;
    assert_eq!(fixture.reasons(), [Reason::AttemptsSpent]);
    fixture.publish("works");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!(
        fixture.handler.0.load(Ordering::Relaxed),
        1,
        "the handler ran again"
    );
    assert_eq!(
        fixture.reasons(),
        [
            Reason::AttemptsSpent,
            Reason::InDoubt(DoubtCause::Interrupted)
        ]
    );
}

/// The process of the holder crashed, and its message is never redelivered: another message with this
/// id does not wait until the marker expires after ten years.
#[tokio::test]
async fn another_body_does_not_wait_for_a_crashed_holder() {
    let fixture = Fixture::new();
    fixture.publish("hang");
    let first = fixture
        .consumer(Guarantee::AtMostOnce)
        .run_until(std::future::pending::<()>());
    assert!(
        tokio::time::timeout(Duration::from_millis(100), first)
            .await
            .is_err(),
        "it hangs, and is killed"
    );
    let other_queue = Fixture {
        broker: MemoryBroker::new("q"),
        ..fixture
    };
    other_queue.publish("works");
    let drained = tokio::time::timeout(
        Duration::from_secs(5),
        other_queue.drain(Guarantee::AtMostOnce),
    )
    .await;
    assert!(drained.is_ok(), "it still waits after 25 leases");
    assert_eq!(other_queue.reasons(), [Reason::Conflict]);
    assert_eq!(other_queue.handler.0.load(Ordering::Relaxed), 1);
}

/// The dead letter of a duplicate of a rejected message carries the last attempt number, although it
/// did not run: it may be the only dead letter.
#[tokio::test]
async fn the_dead_letter_of_a_duplicate_has_the_attempt_number_of_the_rejected_message() {
    let fixture = Fixture::new();
    for body in ["hopeless", "hopeless"] {
        fixture.publish(body);
        fixture.drain(Guarantee::AtMostOnce).await;
    }
    let dead_letters = fixture.broker.dead_letters();
    let numbers: Vec<_> = dead_letters
        .iter()
        .map(|dead_letter| {
            (
                dead_letter.reason,
                dead_letter.failure_history.as_ref().map(|failure_history| {
                    (failure_history.attempts, failure_history.last_attempt)
                }),
            )
        })
        .collect();
    assert_eq!(
        numbers,
        [
            (Reason::Refused, Some((1, 1))),
            (Reason::RejectedBefore, Some((0, 1)))
        ]
    );
    assert_eq!(fixture.handler.0.load(Ordering::Relaxed), 1);
}

/// The cause that the handler reported is in the log of the process that ended.
#[tokio::test]
async fn the_log_says_where_the_cause_of_an_interrupted_message_is() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let subscriber = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(|| LOG.make_writer())
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);
    // A callsite that another test registers at the same time misses this subscriber.
    tokio::time::sleep(Duration::from_millis(50)).await;
    tracing::callsite::rebuild_interest_cache();
    let fixture = Fixture::new();
    let (id, first) = (MessageId::new("a").expect("an id"), Token(1));
    let operation = |kind, attempt| Operation {
        key: Key::new(&id),
        kind,
        token: first,
        attempt,
        terms: Terms {
            guarantee: Guarantee::AtMostOnce,
            lease: Duration::from_millis(200),
            window: Duration::from_secs(3600),
            fingerprint: None,
        },
    };
    // Another process reported the doubt, and ended before it reconciled.
    for operation in [
        operation(OperationKind::Claim, 0),
        operation(OperationKind::Doubt, 1),
    ] {
        fixture.store.apply(&[operation]).await[0]
            .as_ref()
            .expect("a verdict");
    }
    fixture.publish("works");
    fixture.drain(Guarantee::AtMostOnce).await;
    assert_eq!(
        fixture.reasons(),
        [Reason::InDoubt(DoubtCause::Interrupted)]
    );
    let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
    let line = log
        .lines()
        .find(|line| line.contains("message in doubt, sending it to the in-doubt queue"))
        .expect("the line");
    for words in ["reason=\"in-doubt-interrupted\"", "the log of that process"] {
        assert!(line.contains(words), "{words}: {line}");
    }
}

/// Time is paused: a pause between calls of `reconcile` would be measured.
#[tokio::test(start_paused = true)]
async fn without_reconcile_an_unknown_outcome_is_in_doubt_at_once() {
    let fixture = Fixture::new();
    fixture.publish("no answer");
    let began = tokio::time::Instant::now();
    let broker = fixture.broker.clone();
    fixture
        .consumer(Guarantee::AtMostOnce)
        .max_reconciles(5)
        .run_until(async move { broker.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(
        fixture.reasons(),
        [Reason::InDoubt(DoubtCause::HandlerReported)]
    );
    assert_eq!(began.elapsed(), Duration::ZERO);
}

/// Reports an unknown outcome twice, and finds out each time that nothing happened.
struct NothingHappened(AtomicU32);

impl Handler for NothingHappened {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        match self.0.fetch_add(1, Ordering::Relaxed) {
            0 | 1 => Err("no answer").in_doubt(),
            _ => Ok(()),
        }
    }

    async fn reconcile(&self, _: Raw, _: &Context) -> Result<Reconciled, Failure> {
        Ok(Reconciled::DidNotHappen)
    }
}

fn nothing_happened(
    fixture: &Fixture,
) -> Builder<MemorySource, MemoryStore, NothingHappened, RawBytes> {
    Consumer::builder()
        .source(fixture.broker.source())
        .store(fixture.store.clone())
        .handler(NothingHappened(AtomicU32::new(0)))
        .decode(RawBytes)
        .guarantee(Guarantee::AtMostOnce)
        .id(IdSource::header("id"))
        .allow_volatile_store()
}

#[tokio::test(start_paused = true)]
async fn the_dead_letter_after_unknown_outcomes_that_did_not_happen_has_the_error_of_the_handler() {
    let fixture = Fixture::new();
    fixture.publish("pay");
    let broker = fixture.broker.clone();
    nothing_happened(&fixture)
        .max_attempts(2)
        .run_until(async move { broker.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(fixture.reasons(), [Reason::AttemptsSpent]);
    let failures = fixture.broker.dead_letters()[0].failure_history.clone();
    let last_error = failures.and_then(|history| history.last_error);
    assert_eq!(
        last_error.as_deref(),
        Some("it may have happened: no answer")
    );
}

/// So that an outage of a second does not use up all attempts.
#[tokio::test(start_paused = true)]
async fn after_an_unknown_outcome_that_did_not_happen_the_next_attempt_waits() {
    let fixture = Fixture::new();
    fixture.publish("pay");
    let began = tokio::time::Instant::now();
    let broker = fixture.broker.clone();
    nothing_happened(&fixture)
        .backoff(Duration::from_secs(1), Duration::from_secs(60))
        .run_until(async move { broker.all_settled().await })
        .await
        .expect("a clean end");
    assert_eq!(fixture.reasons(), []);
    // Twice and four times the first backoff, each with 25 % jitter.
    assert!(
        began.elapsed() >= Duration::from_millis(4_500),
        "{:?}",
        began.elapsed()
    );
}
