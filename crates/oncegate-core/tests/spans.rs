//! The spans and log lines of a delivery. A test binary of its own, because the subscriber is global.

use std::sync::Mutex;
use std::time::Duration;

use oncegate_core::marker::{Operation, OperationKind, Terms, Token, Verdict};
use oncegate_core::*;
use tracing_subscriber::fmt::MakeWriter;

/// A handler that behaves as the body says.
struct Scripted;

impl Handler for Scripted {
    type Payload = Raw;

    async fn handle(&self, body: Raw, cx: &Context) -> Result<(), Failure> {
        match &body.0[..] {
            b"slow once" if cx.attempt() == 1 => std::future::pending().await,
            b"doubt" => Err("no answer").in_doubt(),
            b"fail" => Err("not yet").retry(),
            b"panic" => panic!("the card is no number"),
            _ => Ok(()),
        }
    }
}

/// Refuses to renew leases, as if another consumer had taken them over.
struct NoRenewals(MemoryStore);

#[async_trait]
impl Store for NoRenewals {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let mut answers = self.0.apply(operations).await;
        for (operation, answer) in operations.iter().zip(&mut answers) {
            if operation.kind == OperationKind::Renew {
                *answer = Ok(Verdict::Lost);
            }
        }
        answers
    }
}

/// The same, with a `reconcile` that always fails.
struct Reconciling;

impl Handler for Reconciling {
    type Payload = Raw;

    async fn handle(&self, body: Raw, cx: &Context) -> Result<(), Failure> {
        Scripted.handle(body, cx).await
    }

    async fn reconcile(&self, body: Raw, _: &Context) -> Result<Reconciled, Failure> {
        assert!(body.0[..] != b"panic"[..], "reconcile has a bug");
        Err("the provider does not answer").retry()
    }
}

/// Claims an id like a process that crashes before it records an outcome.
async fn claim_without_end(store: &MemoryStore, id: &str, token: u128, lease: Duration) {
    let claim = Operation {
        key: Key::new(&MessageId::new(id).expect("an id")),
        kind: OperationKind::Claim,
        token: Token(token),
        attempt: 0,
        terms: Terms {
            guarantee: Guarantee::EffectivelyOnce,
            lease,
            window: Duration::from_secs(60),
            fingerprint: None,
        },
    };
    let verdict = store.apply(&[claim]).await.remove(0).expect("a verdict");
    assert!(matches!(verdict, Verdict::Granted(_)), "{verdict:?}");
}

async fn consume(
    handler: impl Handler<Payload = Raw>,
    broker: &MemoryBroker,
    store: &MemoryStore,
    guarantee: Guarantee,
) {
    let all = broker.clone();
    Consumer::builder()
        .source(broker.source())
        .store(store.clone())
        .handler(handler)
        .decode(RawBytes)
        .guarantee(guarantee)
        .id(IdSource::header("id"))
        .allow_volatile_store()
        .max_reconciles(1)
        .order(Order::ByKey)
        .max_queued(1)
        .backoff(Duration::from_millis(1), Duration::from_millis(1))
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");
}

#[tokio::test]
async fn spans_of_a_delivery_have_id_attempt_and_outcome() {
    static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    let log = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::DEBUG)
        .with_ansi(false)
        .with_span_events(tracing_subscriber::fmt::format::FmtSpan::CLOSE)
        .with_writer(|| LOG.make_writer())
        .finish();
    tracing::subscriber::set_global_default(log).expect("the first");
    let (broker, store) = (MemoryBroker::new("q"), MemoryStore::new());
    broker.publish(Message::new("work").with_header("id", "pay-1"));
    consume(Scripted, &broker, &store, Guarantee::EffectivelyOnce).await;
    broker.publish(Message::new("doubt").with_header("id", "pay-2"));
    broker.publish(Message::new("panic").with_header("id", "pay-4"));
    consume(Scripted, &broker, &store, Guarantee::AtMostOnce).await;
    (0..150).for_each(|_| broker.publish(Message::new("without an id")));
    consume(Scripted, &broker, &store, Guarantee::EffectivelyOnce).await;
    broker.publish(Message::new("doubt").with_header("id", "pay-5"));
    broker.publish(Message::new("panic").with_header("id", "pay-9"));
    consume(Reconciling, &broker, &store, Guarantee::AtMostOnce).await;
    let gate = Gate::builder().store(store).open().await.expect("a gate");
    gate.run("job-3", || async { Ok(()) })
        .await
        .expect("it runs");

    broker.publish(Message::new("slow once").with_header("id", "pay-6"));
    let all = broker.clone();
    Consumer::builder()
        .source(broker.source())
        .store(NoRenewals(MemoryStore::new()))
        .handler(Scripted)
        .decode(RawBytes)
        .id(IdSource::header("id"))
        .lease(Duration::from_millis(300))
        .run_until(async move { all.all_settled().await })
        .await
        .expect("a clean end");

    // Another process holds pay-7 when it crashes, and two have crashed with pay-8.
    let crashed = MemoryStore::new();
    claim_without_end(&crashed, "pay-8", 1, Duration::from_millis(1)).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    claim_without_end(&crashed, "pay-8", 2, Duration::from_millis(1)).await;
    claim_without_end(&crashed, "pay-7", 3, Duration::from_millis(200)).await;
    for id in ["pay-7", "pay-8"] {
        broker.publish(Message::new("work").with_header("id", id));
    }
    consume(Scripted, &broker, &crashed, Guarantee::EffectivelyOnce).await;

    let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
    let expected = [
        (
            "oncegate.claim{",
            "id=pay-1",
            "outcome=Granted(Attempts { number: 1,",
        ),
        (
            "oncegate.handle{",
            "id=pay-1 attempt=1",
            "outcome=Returned(Done)",
        ),
        ("oncegate.complete{", "id=pay-1 attempt=1", "outcome=Done"),
        ("oncegate.settle{", "id=pay-1 attempt=1", "outcome=Accept"),
        ("oncegate.doubt{", "id=pay-2 attempt=1", "outcome=Applied"),
        (
            "oncegate.reconcile{",
            "id=pay-2 attempt=1",
            "outcome=CannotReconcile",
        ),
        (
            "oncegate.reconcile{",
            "id=pay-5 attempt=1",
            "outcome=Reconciled(None)",
        ),
        ("oncegate.settle{", "id=pay-2 attempt=1", "outcome=Reject"),
        ("oncegate.claim{", "id=job-3", "outcome=Granted"),
        ("oncegate.handle{", "id=job-3 attempt=1", "outcome=Done"),
        ("oncegate.complete{", "id=job-3 attempt=1", "outcome=Done"),
    ];
    for (span, fields, outcome) in expected {
        let found = log
            .lines()
            .any(|line| line.contains(span) && line.contains(fields) && line.contains(outcome));
        assert!(found, "no {span} {fields} {outcome} in\n{log}");
    }
    // At most once needs max_age, which cannot be checked without a timestamp.
    let without_timestamp: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("WARN") && line.contains("max_age is not checked"))
        .collect();
    assert!(
        matches!(without_timestamp[..], [line, _] if line.contains("origin=q") && line.contains("max_age")),
        "{without_timestamp:#?}"
    );
    let lines = |level: &str, text: &str| -> Vec<&str> {
        log.lines()
            .filter(|line| line.contains(level) && line.contains(text))
            .collect()
    };
    let has = |line: &str, fields: &[&str]| {
        fields
            .iter()
            .for_each(|field| assert!(line.contains(field), "{field} in {line}"))
    };
    let in_doubt = lines("WARN", "message in doubt");
    let [reported, panicked, _, _] = in_doubt[..] else {
        panic!("{in_doubt:#?}")
    };
    let cause = r#"error="it may have happened: no answer" last_error="the handler has no `reconcile`" origin=q"#;
    has(
        reported,
        &[
            r#"reason="in-doubt-handler-reported""#,
            r#"id="pay-2""#,
            "attempts=1",
            cause,
            "oncegate in-doubt resolve",
        ],
    );
    has(
        panicked,
        &[
            r#"reason="in-doubt-panicked""#,
            r#"id="pay-4""#,
            "the card is no number",
        ],
    );
    let panics = lines("ERROR", "handler panicked");
    assert_eq!(panics.len(), 2, "{panics:#?}");
    let in_reconcile = lines("ERROR", "reconcile panicked");
    assert_eq!(in_reconcile.len(), 1, "{in_reconcile:#?}");
    has(
        in_reconcile[0],
        &[r#"id="pay-9""#, "reconcile has a bug", "origin=q"],
    );
    has(
        panics[0],
        &[
            r#"id="pay-4""#,
            "attempt=1",
            "the card is no number",
            "origin=q",
        ],
    );
    let reconciled = lines("INFO", "reconcile ended");
    assert_eq!(reconciled.len(), 1, "{reconciled:#?}");
    has(
        reconciled[0],
        &[
            r#"id="pay-5""#,
            r#"found="unknown""#,
            "the provider does not answer",
        ],
    );
    let lost = lines("WARN", "lease lost, the handler or `reconcile` is dropped");
    assert_eq!(lost.len(), 1, "{lost:#?}");
    has(lost[0], &[r#"id="pay-6""#, "attempt=1", "origin=q"]);
    let mut waits = lines(
        "INFO",
        "message waits: another delivery holds the lease of its id",
    );
    waits.retain(|line| line.contains("pay-7"));
    assert_eq!(waits.len(), 1, "{waits:#?}");
    has(waits[0], &[r#"id="pay-7""#, "remaining=", "origin=q"]);
    let taken_over = lines("INFO", "message taken over");
    for (id, attempt, crashes) in [("pay-7", 2, 1), ("pay-8", 3, 2)] {
        let of_id: Vec<_> = taken_over.iter().filter(|line| line.contains(id)).collect();
        assert_eq!(of_id.len(), 1, "{id}: {taken_over:#?}");
        let (attempt, crashes) = (format!("attempt={attempt}"), format!("crashes={crashes}"));
        has(of_id[0], &[&attempt, &crashes, "origin=q"]);
    }
    let crash_loop = lines("WARN", "possible crash loop");
    assert_eq!(crash_loop.len(), 1, "{crash_loop:#?}");
    has(
        crash_loop[0],
        &[r#"id="pay-8""#, "crashes=2", "max_crashes=10", "origin=q"],
    );
    let failed = lines("WARN", "handler failed, its outcome is unknown");
    assert!(!failed.is_empty(), "the failure is logged: {log}");
    has(failed[0], &["id=", "attempt=1", "no answer", "origin=q"]);
    let rejected = lines("WARN", "message rejected, sending it to the dead letters");
    assert_eq!(
        rejected.len(),
        100,
        "of 150, the throttle allows 100: {rejected:#?}"
    );
    let not_logged = lines("WARN", "more messages rejected than logged");
    assert_eq!(not_logged.len(), 1, "{not_logged:#?}");
    has(not_logged[0], &["suppressed_lines=50"]);
    // Each throttle reports its last lines, not only that of rejected messages.
    let more = lines("WARN", "more events than logged");
    let more = more
        .iter()
        .find(|line| line.contains("message without a timestamp"));
    has(more.expect("a line"), &["suppressed_lines=1"]);
    let missing = r#"error="no id in the header `id`, or an empty one""#;
    has(
        rejected[0],
        &[r#"reason="missing-id""#, missing, "origin=q"],
    );
    let claim = log
        .lines()
        .find(|line| line.contains("oncegate.claim{"))
        .expect("a claim");
    assert!(claim.contains(" attempt=1"), "{claim}");

    let keyed = |id: &str, body: &'static str| {
        broker.publish(Message::new(body).with_key("k").with_header("id", id))
    };
    keyed("first", "fail");
    (0..10).for_each(|number| keyed(&format!("behind-{number}"), "work"));
    consume(
        Scripted,
        &broker,
        &MemoryStore::new(),
        Guarantee::EffectivelyOnce,
    )
    .await;
    let log = String::from_utf8(LOG.lock().expect("no panic").clone()).expect("text");
    let queue_full: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("receiving is paused"))
        .collect();
    let [queue_full] = queue_full[..] else {
        panic!("{queue_full:#?}")
    };
    assert!(
        queue_full.contains("WARN")
            && queue_full.contains("queued=")
            && queue_full.contains("raise `max_queued`"),
        "{queue_full}"
    );
}
