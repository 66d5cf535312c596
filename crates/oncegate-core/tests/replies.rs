//! Replies to the senders of messages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use oncegate_core::marker::{Operation, OperationKind, Verdict};
use oncegate_core::outbox::{NotPublished, OutboxMessage};
use oncegate_core::replies::{ReconciledReply, Replies, ReplyingHandler};
use oncegate_core::*;
use tokio::sync::Mutex;

/// The replies that were published, and how often publishing fails first.
#[derive(Clone, Default)]
struct ReplyQueues {
    published: Arc<Mutex<Vec<OutboxMessage>>>,
    failures: Arc<AtomicU32>,
    /// How often the queue is missing before that.
    missing_first: Arc<AtomicU32>,
    /// How often the queue is missing then.
    missing: Arc<AtomicU32>,
}

impl Publisher for ReplyQueues {
    fn described(&self) -> String {
        "the queues of the test".into()
    }

    async fn preflight(&self) -> Result<(), SourceError> {
        Ok(())
    }

    async fn publish(&self, message: &OutboxMessage) -> Result<(), NotPublished> {
        let count_down = |left: u32| left.checked_sub(1);
        // An outage after the first attempts at a missing queue.
        let missing_first =
            self.missing_first
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, count_down);
        if missing_first.is_ok() {
            return Err(NotPublished::NoDestination("the queue is missing".into()));
        }
        let failed = self
            .failures
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, count_down);
        if failed.is_ok() {
            return Err(NotPublished::NotConfirmed(
                "the broker is unavailable".into(),
            ));
        }
        assert!(message.destination != "panics", "the publisher panics");
        let missing = self
            .missing
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, count_down);
        if message.destination == "missing" || missing.is_ok() {
            return Err(NotPublished::NoDestination("the queue is missing".into()));
        }
        if message.destination == "refused" {
            return Err(NotPublished::Refused("it is too large".into()));
        }
        self.published.lock().await.push(message.clone());
        Ok(())
    }
}

impl ReplyQueues {
    /// Each reply: its queue, its headers and its body.
    async fn replies(&self) -> Vec<(String, HashMap<String, String>, String)> {
        let published = self.published.lock().await;
        let text = |body: &[u8]| String::from_utf8(body.to_vec()).expect("JSON is UTF-8");
        published
            .iter()
            .map(|reply| {
                let headers = reply.headers.iter().cloned().collect();
                (reply.destination.clone(), headers, text(&reply.body))
            })
            .collect()
    }
}

/// Counts its runs, and replies with the number of the run.
struct Charge {
    runs: Arc<AtomicU32>,
}

impl ReplyingHandler for Charge {
    type Payload = u32;
    type Reply = (u32, u32);

    async fn handle(&self, cents: u32, _: &Context) -> Result<(u32, u32), Failure> {
        let run = self.runs.fetch_add(1, Ordering::SeqCst) + 1;
        match cents {
            0 => Err(Failure::Reject("nothing to charge".into())),
            1 => Err(Failure::InDoubt("no answer".into())),
            cents => Ok((run, cents)),
        }
    }

    async fn reconcile(
        &self,
        cents: u32,
        _: &Context,
    ) -> Result<ReconciledReply<(u32, u32)>, Failure> {
        Ok(ReconciledReply::Happened((0, cents)))
    }
}

/// A consumer with its broker, and what it did.
struct Fixture {
    broker: MemoryBroker,
    queues: ReplyQueues,
    runs: Arc<AtomicU32>,
    store: MemoryStore,
}

impl Fixture {
    fn new() -> Self {
        Self {
            broker: MemoryBroker::new("charges"),
            queues: ReplyQueues::default(),
            runs: Arc::default(),
            store: MemoryStore::new(),
        }
    }

    fn request(&self, id: &str, cents: u32, queue: &str, correlation: &str) {
        let message = Message::new(cents.to_string()).with_message_id(id.to_owned());
        self.broker
            .publish(message.with_reply_to(queue, correlation));
    }

    fn consumer(&self, guarantee: Guarantee) -> Result<Consumer, Error> {
        self.consumer_with(guarantee, self.store.clone())
    }

    fn consumer_with(
        &self,
        guarantee: Guarantee,
        store: impl Store + 'static,
    ) -> Result<Consumer, Error> {
        let handler = Charge {
            runs: self.runs.clone(),
        };
        let replies = Replies::by(self.queues.clone())
            .max_bytes("[2004,4200]".len())
            .timeout(Duration::from_millis(300));
        Consumer::builder()
            .source(self.broker.source())
            .store(store)
            .scope("tests")
            .id(IdSource::message_id())
            .guarantee(guarantee)
            .allow_volatile_store()
            .replying_handler(handler, replies)
            .build()
    }

    async fn until_settled(&self, guarantee: Guarantee) {
        let consumer = self.consumer(guarantee).expect("the settings are right");
        let all_settled = tokio::time::timeout(Duration::from_secs(20), self.broker.all_settled());
        consumer.run_until(all_settled).await.expect("no error");
        assert_eq!(self.broker.unsettled(), 0);
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }
}

#[tokio::test]
async fn each_copy_of_a_request_gets_the_reply_of_the_first_run() {
    for guarantee in [Guarantee::AtMostOnce, Guarantee::EffectivelyOnce] {
        let fixture = Fixture::new();
        for correlation in ["first", "second", "third"] {
            fixture.request("payment-1", 4200, "answers", correlation);
        }
        let silent = Message::new("7").with_message_id("payment-2");
        fixture.broker.publish(silent);
        fixture.until_settled(guarantee).await;
        assert_eq!(fixture.runs(), 2);

        // After a restart, too.
        fixture.request("payment-1", 4200, "others", "fourth");
        fixture.until_settled(guarantee).await;
        assert_eq!(fixture.runs(), 2);
        let mut replies = fixture.queues.replies().await;
        replies.sort_by_key(|(_, headers, _)| headers["correlation-id"].clone());
        let queues: Vec<_> = replies
            .iter()
            .map(|(queue, headers, _)| (&**queue, &*headers["correlation-id"]))
            .collect();
        assert_eq!(
            queues,
            [
                ("answers", "first"),
                ("others", "fourth"),
                ("answers", "second"),
                ("answers", "third")
            ]
        );
        let bodies: Vec<_> = replies.iter().map(|(_, _, body)| &**body).collect();
        assert!(
            bodies
                .iter()
                .all(|body| *body == bodies[0] && body.ends_with(",4200]")),
            "{bodies:?}"
        );
    }
}

/// A request on Kafka names its reply topic in headers.
#[tokio::test]
async fn a_reply_address_may_be_in_headers() {
    let fixture = Fixture::new();
    let message = Message::new("4200")
        .with_message_id("payment-1")
        .with_header("reply-topic", "answers")
        .with_header("correlation-id", "first");
    fixture.broker.publish(message);
    fixture.until_settled(Guarantee::EffectivelyOnce).await;
    let replies = fixture.queues.replies().await;
    let [(queue, headers, body)] = &replies[..] else {
        panic!("{replies:?}");
    };
    assert_eq!((&**queue, &**body), ("answers", "[1,4200]"));
    assert_eq!(headers["correlation-id"], "first");
    assert_eq!(headers["content-type"], "application/json");
}

#[tokio::test]
async fn a_missing_reply_queue_stops_neither_the_consumer_nor_the_message() {
    let fixture = Fixture::new();
    fixture.queues.failures.store(1, Ordering::SeqCst);
    fixture.request("payment-1", 2, "missing", "first");
    fixture.request("payment-2", 3, "refused", "second");
    fixture.request("payment-3", 4, "answers", "third");
    fixture.request("payment-4", 5, "panics", "fourth");
    // After the first timeout, replies to the queue are tried once.
    for id in 0..2_000 {
        fixture.request(&format!("unroutable-{id}"), 6, "missing", "unused");
    }
    fixture.until_settled(Guarantee::AtMostOnce).await;
    assert_eq!(fixture.runs(), 2_004);
    let replies = fixture.queues.replies().await;
    assert_eq!(replies.len(), 1, "{replies:?}");
    // The sender asks again, and names a queue that exists.
    fixture.request("payment-1", 2, "answers", "again");
    fixture.until_settled(Guarantee::AtMostOnce).await;
    assert_eq!(fixture.runs(), 2_004);
    assert_eq!(fixture.queues.replies().await.len(), 2);
}

/// After an outage of the broker, a missing queue still has the whole timeout to appear.
#[tokio::test]
async fn an_outage_of_the_broker_does_not_use_up_the_timeout_of_a_reply() {
    let fixture = Fixture::new();
    // About a second of outage, with a timeout of 300 ms, then a queue that appears late.
    fixture.queues.failures.store(4, Ordering::SeqCst);
    fixture.queues.missing_first.store(1, Ordering::SeqCst);
    fixture.queues.missing.store(1, Ordering::SeqCst);
    fixture.request("payment-1", 2, "answers", "first");
    fixture.until_settled(Guarantee::AtMostOnce).await;
    assert_eq!(fixture.queues.replies().await.len(), 1);
}

/// A reply that cannot be stored does not repeat the effect, and another body gets no reply.
#[tokio::test]
async fn a_reply_that_is_too_large_and_another_body_get_none() {
    let fixture = Fixture::new();
    fixture.request("large", u32::MAX, "answers", "first");
    fixture.until_settled(Guarantee::EffectivelyOnce).await;
    fixture.request("payment-1", 2, "answers", "second");
    fixture.until_settled(Guarantee::EffectivelyOnce).await;
    fixture.request("payment-1", 3, "answers", "third");
    fixture.until_settled(Guarantee::EffectivelyOnce).await;
    assert_eq!(fixture.runs(), 2);
    assert_eq!(fixture.queues.replies().await.len(), 1);
    let dead = fixture.broker.dead_letters();
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert_eq!(dead[0].reason.as_str(), "conflict");
}

#[tokio::test]
async fn a_failure_gets_no_reply_and_a_reconciled_outcome_does() {
    let fixture = Fixture::new();
    fixture.request("rejected", 0, "answers", "first");
    fixture.request("in-doubt", 1, "answers", "second");
    fixture.until_settled(Guarantee::AtMostOnce).await;
    assert_eq!(fixture.broker.dead_letters().len(), 1);
    assert_eq!(fixture.broker.in_doubt(), []);
    let replies = fixture.queues.replies().await;
    let [(_, headers, body)] = &replies[..] else {
        panic!("{replies:?}");
    };
    assert_eq!((&*headers["correlation-id"], &**body), ("second", "[0,1]"));
}

/// A process that crashes between the completion and the reply leaves a message that is delivered
/// again, and that then gets its reply.
#[tokio::test]
async fn a_message_stays_unsettled_until_its_reply_was_sent() {
    let fixture = Fixture::new();
    fixture.queues.failures.store(u32::MAX, Ordering::SeqCst);
    fixture.request("payment-1", 4200, "answers", "first");
    let replies = Replies::by(fixture.queues.clone()).timeout(Duration::from_secs(60));
    let runs = fixture.runs.clone();
    let consumer = Consumer::builder()
        .source(fixture.broker.source())
        .store(fixture.store.clone())
        .scope("tests")
        .id(IdSource::message_id())
        .drain_timeout(Duration::from_millis(50))
        .replying_handler(Charge { runs }, replies);
    let key = Scope::named("tests").expect("a scope");
    let key = key.key(&MessageId::new("payment-1").expect("an id"));
    let is_done = async {
        while !matches!(fixture.store.marker(&key).0, marker::Marker::Done(_)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    consumer.run_until(is_done).await.expect("no error");
    assert_eq!(fixture.broker.unsettled(), 1);

    fixture.queues.failures.store(0, Ordering::SeqCst);
    fixture.until_settled(Guarantee::EffectivelyOnce).await;
    assert_eq!(fixture.runs(), 1);
    let replies = fixture.queues.replies().await;
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0].2, "[1,4200]");
}

/// A store that loses the reply to each first completion.
struct LosesReplies {
    store: MemoryStore,
    completions: AtomicU32,
}

#[async_trait]
impl Store for LosesReplies {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        let completions = operations
            .iter()
            .filter(|it| it.kind == OperationKind::Complete);
        assert_eq!(completions.count(), 0, "a completion without its reply");
        self.store.apply(operations).await
    }

    fn results(&self) -> Option<&dyn ResultStore> {
        Some(self)
    }
}

#[async_trait]
impl ResultStore for LosesReplies {
    async fn complete(
        &self,
        completion: &Operation,
        result: &[u8],
    ) -> Result<Completion, StoreError> {
        let answer = self.store.complete(completion, result).await;
        match self.completions.fetch_add(1, Ordering::SeqCst) % 2 {
            0 => Err(StoreError::Unknown("the reply was lost".into())),
            _ => answer,
        }
    }

    async fn read(
        &self,
        key: &Key,
        fingerprint: Option<Fingerprint>,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        self.store.read(key, fingerprint).await
    }
}

#[tokio::test]
async fn a_completion_that_is_repeated_keeps_its_reply() {
    let fixture = Fixture::new();
    for id in 2..40 {
        fixture.request(&format!("payment-{id}"), id, "answers", &id.to_string());
    }
    let store = LosesReplies {
        store: fixture.store.clone(),
        completions: AtomicU32::new(0),
    };
    let consumer = fixture.consumer_with(Guarantee::EffectivelyOnce, store);
    let all_settled = tokio::time::timeout(Duration::from_secs(20), fixture.broker.all_settled());
    let run = consumer
        .expect("the settings are right")
        .run_until(all_settled);
    run.await.expect("no error");
    assert_eq!((fixture.runs(), fixture.broker.unsettled()), (38, 0));
    let replies = fixture.queues.replies().await;
    assert_eq!(replies.len(), 38);
    for (_, headers, body) in replies {
        let cents = format!(",{}]", headers["correlation-id"]);
        assert!(body.ends_with(&cents), "{body} for {cents}");
    }
}

#[tokio::test]
async fn settings_with_which_no_reply_would_be_sent_are_refused() {
    let fixture = Fixture::new();
    let handler = || Charge {
        runs: fixture.runs.clone(),
    };
    let builder = || {
        Consumer::builder()
            .source(fixture.broker.source())
            .store(fixture.store.clone())
            .id(IdSource::message_id())
            .replying_handler(handler(), Replies::by(fixture.queues.clone()))
    };
    builder().check().expect("the settings are right");
    let replaced = [
        builder().source(fixture.broker.source()).check(),
        builder().store(fixture.store.clone()).check(),
        builder().handler(kit::Nothing).check(),
    ];
    for error in replaced {
        let error = error.expect_err("no reply would be sent").to_string();
        assert!(error.contains("after .source(…) and .store(…)"), "{error}");
    }
    let error = builder().outage(Outage::PassThrough).check();
    assert!(
        error
            .expect_err("no store")
            .to_string()
            .contains("Outage::Hold")
    );
    let bare = builder().guarantee(Guarantee::Bare);
    let error = bare.run_until(std::future::pending::<()>()).await;
    let error = error.expect_err("no replies").to_string();
    assert!(error.contains("use another guarantee"), "{error}");
}

mod kit {
    use super::{Context, Failure, Handler};

    pub(crate) struct Nothing;

    impl Handler for Nothing {
        type Payload = ();

        async fn handle(&self, (): (), _: &Context) -> Result<(), Failure> {
            Ok(())
        }
    }
}
