//! What is stuck can be seen from outside: by id and place, and for how long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::*;
use tokio::sync::Semaphore;

/// Handles `a` when it is let, never finds an id that says so, and is done with all else at once.
struct Stuck {
    lets: Arc<Semaphore>,
}

#[async_trait]
impl Handler for Stuck {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        match cx.id() {
            "stuck-0" => drop(self.lets.acquire().await.retry()?),
            "fails" => return Err("not yet").retry(),
            _ => {}
        }
        Ok(())
    }
}

/// Waits until the status says so, and fails with what it says instead.
async fn until(
    status: &ConsumerStatus,
    what: impl Fn(&ConsumerSnapshot) -> bool,
) -> ConsumerSnapshot {
    let found = async {
        loop {
            let snapshot = status.snapshot();
            if what(&snapshot) {
                return snapshot;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), found)
        .await
        .unwrap_or_else(|_| panic!("{status:?}"))
}

#[tokio::test]
async fn what_is_stuck_is_named_with_its_place_and_what_it_waits_for() {
    let (broker, status, lets) = (
        MemoryBroker::new("payments"),
        ConsumerStatus::new(),
        Arc::new(Semaphore::new(0)),
    );
    for id in ["stuck-0", "stuck-1", "fails", "done"] {
        broker.publish(
            Message::new("x")
                .with_key(id[..4].to_owned())
                .with_message_id(id),
        );
    }
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .max_inline_retries(0)
        .backoff(Duration::from_secs(60), Duration::from_secs(60))
        .decode(RawBytes)
        .handler(Stuck { lets: lets.clone() })
        .status(status.clone());
    assert_eq!(
        status.snapshot(),
        ConsumerSnapshot::default(),
        "it has not started"
    );
    let (all, seen) = (broker.clone(), status.clone());
    let shutdown = async move {
        let doing = |snapshot: &ConsumerSnapshot, id: &str| {
            let held = snapshot
                .oldest
                .iter()
                .find(|held| held.id.as_ref().is_some_and(|it| it.as_str() == id));
            held.map(|held| (held.doing, held.attempt))
        };
        let first = until(&seen, |it| {
            doing(it, "stuck-0") == Some((DeliveryState::Handling, 1))
                && doing(it, "fails") == Some((DeliveryState::Waiting, 1))
        })
        .await;
        assert_eq!(doing(&first, "stuck-1"), Some((DeliveryState::Waiting, 0)));
        assert_eq!(
            (doing(&first, "done"), first.in_flight, first.waiting),
            (None, 1, 2)
        );
        let shown = first.oldest[0].to_string();
        assert!(
            shown.starts_with("stuck-0 of payments")
                && shown.contains("handling since ")
                && shown.ends_with("attempt 1"),
            "{shown}"
        );

        // It is told again though nothing moves, and what was told grows older by itself.
        let older = until(&seen, |it| {
            it.oldest
                .first()
                .is_some_and(|held| held.since >= Duration::from_millis(1200))
        })
        .await;
        assert_eq!(doing(&older, "stuck-0"), Some((DeliveryState::Handling, 1)));
        assert!(
            older
                .oldest
                .windows(2)
                .all(|two| two[0].since >= two[1].since),
            "{older:?}"
        );

        lets.add_permits(1);
        until(&seen, |it| it.in_flight == 0 && it.waiting == 1).await;
        drop(all);
    };
    consumer.run_until(shutdown).await.expect("a clean end");
    assert_eq!(
        status.snapshot(),
        ConsumerSnapshot::default(),
        "it has ended"
    );
}

#[tokio::test]
async fn the_oldest_are_named_and_the_others_counted() {
    let (broker, status) = (MemoryBroker::new("payments"), ConsumerStatus::new());
    for number in 0..300 {
        broker.publish(
            Message::new("x")
                .with_key("one")
                .with_message_id(format!("stuck-{number}")),
        );
    }
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .order(Order::ByKey)
        .drain_timeout(Duration::from_millis(1))
        .decode(RawBytes)
        .handler(Stuck {
            lets: Arc::new(Semaphore::new(0)),
        })
        .status(status.clone());
    let shutdown = async {
        let told = until(&status, |it| it.waiting == 299).await;
        assert_eq!((told.in_flight, told.oldest.len()), (1, 20));
        let ids: Vec<_> = told
            .oldest
            .iter()
            .filter_map(|held| held.id.as_ref().map(ToString::to_string))
            .collect();
        assert_eq!(
            ids,
            (0..20)
                .map(|number| format!("stuck-{number}"))
                .collect::<Vec<_>>()
        );
    };
    consumer.run_until(shutdown).await.expect("a clean end");
}

/// Answers nothing until it is there.
#[derive(Clone, Default)]
struct Late {
    store: MemoryStore,
    is_there: Arc<AtomicBool>,
}

#[async_trait]
impl Store for Late {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.is_there.load(Ordering::SeqCst) {
            return self.store.apply(operations).await;
        }
        operations
            .iter()
            .map(|_| Err(StoreError::Unknown("nobody answers".into())))
            .collect()
    }

    fn described(&self) -> String {
        "a late store".to_owned()
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        if self.is_there.load(Ordering::SeqCst) {
            return self.store.persistence().await;
        }
        Err(StoreError::NotApplied("nobody listens".into()))
    }
}

#[tokio::test]
async fn a_store_is_told_of_from_the_first_question_on_and_when_it_goes_and_is_back() {
    let (broker, status, store) = (
        MemoryBroker::new("payments"),
        ConsumerStatus::new(),
        Late::default(),
    );
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store.clone())
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(Stuck {
            lets: Arc::new(Semaphore::new(0)),
        })
        .status(status.clone());
    let (waits_for, there, all) = (status.clone(), store.is_there.clone(), broker.clone());
    let shutdown = async move {
        let away = |it: &ConsumerSnapshot| {
            matches!(
                &it.store,
                Some(StoreSnapshot {
                    state: StoreState::Away { .. },
                    ..
                })
            )
        };
        let told = until(&waits_for, away).await.store.expect("just seen");
        let text = told.last_error.map(|it| it.text);
        assert_eq!(
            (told.name.as_str(), text.as_deref()),
            (
                "a late store",
                Some("the store changed nothing, and asking again is safe: nobody listens")
            )
        );
        there.store(true, Ordering::SeqCst);
        let answers = |it: &ConsumerSnapshot| {
            matches!(
                &it.store,
                Some(StoreSnapshot {
                    state: StoreState::Answers { .. },
                    ..
                })
            )
        };
        until(&waits_for, answers).await;

        there.store(false, Ordering::SeqCst);
        all.publish(Message::new("x").with_message_id("done"));
        let told = until(&waits_for, away).await.store.expect("just seen");
        let text = told.last_error.map(|it| it.text);
        assert_eq!(
            text.as_deref(),
            Some(
                "no answer from the store, which may have made the change; asking again is safe: nobody answers"
            )
        );
        there.store(true, Ordering::SeqCst);
        all.drained().await;
        let told = until(&waits_for, answers).await.store.expect("just seen");
        assert!(told.last_error.is_some(), "what it said before stays");
    };
    consumer.run_until(shutdown).await.expect("a clean end");
    assert_eq!(
        status.snapshot(),
        ConsumerSnapshot::default(),
        "it has ended"
    );
}

#[test]
fn a_shadow_says_that_the_store_does_not_answer_for_itself() {
    let shadow = Shadow::new(Late::default(), ShadowReport::new());
    assert_eq!(
        shadow.described(),
        "a late store, behind a shadow that answers in its place"
    );
}
