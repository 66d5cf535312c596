//! The status of a consumer: its oldest deliveries, with id, position and age, and its store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::*;
use tokio::sync::Semaphore;

/// `stuck-0` waits for a permit, `fails` always fails, and all others return at once.
struct AwaitsPermit {
    permits: Arc<Semaphore>,
}

impl Handler for AwaitsPermit {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        match cx.id() {
            "stuck-0" => drop(self.permits.acquire().await.retry()?),
            "fails" => return Err("not yet").retry(),
            _ => {}
        }
        Ok(())
    }
}

/// Waits for a status that meets the condition. Panics with the last status after 30 s.
async fn until(
    status: &ConsumerStatus,
    condition: impl Fn(&ConsumerSnapshot) -> bool,
) -> ConsumerSnapshot {
    let found = async {
        loop {
            let snapshot = status.snapshot();
            if condition(&snapshot) {
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
async fn deliveries_are_listed_with_their_origin_state_and_attempt() {
    let (broker, status, permits) = (
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
        .handler(AwaitsPermit {
            permits: permits.clone(),
        })
        .status(status.clone());
    assert_eq!(
        status.snapshot(),
        ConsumerSnapshot::default(),
        "it has not started"
    );
    let seen = status.clone();
    let shutdown = async move {
        let state_of = |snapshot: &ConsumerSnapshot, id: &str| {
            let found = snapshot.oldest.iter().find(|delivery| {
                delivery
                    .id
                    .as_ref()
                    .is_some_and(|delivery_id| delivery_id.as_str() == id)
            });
            found.map(|delivery| (delivery.state, delivery.attempt))
        };
        let first = until(&seen, |snapshot| {
            state_of(snapshot, "stuck-0") == Some((DeliveryState::Handling, 1))
                && state_of(snapshot, "fails") == Some((DeliveryState::Waiting, 1))
        })
        .await;
        assert_eq!(
            state_of(&first, "stuck-1"),
            Some((DeliveryState::Waiting, 0))
        );
        assert_eq!(
            (state_of(&first, "done"), first.in_flight, first.queued),
            (None, 1, 2)
        );
        let shown = first.oldest[0].to_string();
        assert!(
            shown.starts_with("stuck-0 of payments")
                && shown.contains("handling, received ")
                && shown.ends_with("attempt 1"),
            "{shown}"
        );

        // The status is updated without an event of a delivery, and ages increase between updates.
        let older = until(&seen, |snapshot| {
            snapshot
                .oldest
                .first()
                .is_some_and(|delivery| delivery.elapsed >= Duration::from_millis(1200))
        })
        .await;
        assert_eq!(
            state_of(&older, "stuck-0"),
            Some((DeliveryState::Handling, 1))
        );
        assert!(
            older
                .oldest
                .windows(2)
                .all(|two| two[0].elapsed >= two[1].elapsed),
            "{older:?}"
        );

        permits.add_permits(1);
        until(&seen, |snapshot| {
            snapshot.in_flight == 0 && snapshot.queued == 1
        })
        .await;
    };
    consumer.run_until(shutdown).await.expect("a clean end");
    assert_eq!(
        status.snapshot(),
        ConsumerSnapshot::default(),
        "it has ended"
    );
}

#[tokio::test]
async fn the_oldest_deliveries_are_listed_and_the_others_counted() {
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
        .handler(AwaitsPermit {
            permits: Arc::new(Semaphore::new(0)),
        })
        .status(status.clone());
    let shutdown = async {
        let reported = until(&status, |snapshot| snapshot.queued == 299).await;
        assert_eq!((reported.in_flight, reported.oldest.len()), (1, 20));
        let ids: Vec<_> = reported
            .oldest
            .iter()
            .filter_map(|delivery| delivery.id.as_ref().map(ToString::to_string))
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

/// A store that is unavailable until `available` is set.
#[derive(Clone, Default)]
struct SwitchedStore {
    store: MemoryStore,
    available: Arc<AtomicBool>,
}

#[async_trait]
impl Store for SwitchedStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        if self.available.load(Ordering::SeqCst) {
            return self.store.apply(operations).await;
        }
        operations
            .iter()
            .map(|_| Err(StoreError::Unknown("no reply".into())))
            .collect()
    }

    fn described(&self) -> String {
        "a store of this test".to_owned()
    }

    async fn persistence(&self) -> Result<Persistence, StoreError> {
        if self.available.load(Ordering::SeqCst) {
            return self.store.persistence().await;
        }
        Err(StoreError::NotApplied("connection refused".into()))
    }
}

#[tokio::test]
async fn an_outage_of_the_store_is_reported_at_start_and_later() {
    let (broker, status, store) = (
        MemoryBroker::new("payments"),
        ConsumerStatus::new(),
        SwitchedStore::default(),
    );
    let consumer = Consumer::builder()
        .source(broker.source())
        .store(store.clone())
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(AwaitsPermit {
            permits: Arc::new(Semaphore::new(0)),
        })
        .status(status.clone());
    let (seen, available, all) = (status.clone(), store.available.clone(), broker.clone());
    let shutdown = async move {
        let unavailable = |snapshot: &ConsumerSnapshot| {
            matches!(
                &snapshot.store,
                Some(StoreSnapshot {
                    state: StoreState::Unavailable { .. },
                    ..
                })
            )
        };
        let reported = until(&seen, unavailable).await.store.expect("just seen");
        let text = reported.last_error.map(|error| error.text);
        assert_eq!(
            (reported.name.as_str(), text.as_deref()),
            (
                "a store of this test",
                Some("connection refused (the store did not apply the operation; a retry is safe)")
            )
        );
        available.store(true, Ordering::SeqCst);
        let is_available = |snapshot: &ConsumerSnapshot| {
            matches!(
                &snapshot.store,
                Some(StoreSnapshot {
                    state: StoreState::Available { .. },
                    ..
                })
            )
        };
        until(&seen, is_available).await;

        available.store(false, Ordering::SeqCst);
        all.publish(Message::new("x").with_message_id("done"));
        let reported = until(&seen, unavailable).await.store.expect("just seen");
        let text = reported.last_error.map(|error| error.text);
        assert_eq!(
            text.as_deref(),
            Some("no reply (the store may have applied the operation; a retry is safe)")
        );
        available.store(true, Ordering::SeqCst);
        all.all_settled().await;
        let reported = until(&seen, is_available).await.store.expect("just seen");
        assert!(reported.last_error.is_some(), "the last error is kept");
    };
    consumer.run_until(shutdown).await.expect("a clean end");
    assert_eq!(
        status.snapshot(),
        ConsumerSnapshot::default(),
        "it has ended"
    );
}

#[test]
fn the_description_of_a_store_names_its_shadow() {
    let shadow = Shadow::new(SwitchedStore::default(), ShadowReport::new());
    assert_eq!(
        shadow.described(),
        "a store of this test, behind a shadow that lets every message run"
    );
}

#[tokio::test]
async fn a_running_consumer_is_observed_and_drained_through_its_handles() {
    let (broker, permits) = (MemoryBroker::new("payments"), Arc::new(Semaphore::new(0)));
    broker.publish(Message::new("x").with_message_id("stuck-0"));
    let builder = || {
        Consumer::builder()
            .source(broker.source())
            .store(MemoryStore::new())
            .handler(AwaitsPermit {
                permits: permits.clone(),
            })
    };
    let refused = builder().build().expect_err("it has no id");
    assert!(
        matches!(refused, Error::Misconfigured { setting: "id", .. }),
        "{refused}"
    );

    let consumer = builder().id(IdSource::message_id()).build().expect("built");
    let (status, readiness, drain) = (consumer.status(), consumer.readiness(), consumer.drain());
    assert!(!readiness.is_ready());
    let running = tokio::spawn(consumer.run_until(std::future::pending::<()>()));
    until(&status, |snapshot| snapshot.in_flight == 1).await;
    assert!(readiness.is_ready());
    drain.start();
    permits.add_permits(1);
    let drained = tokio::time::timeout(Duration::from_secs(30), running).await;
    let drained = drained.expect("the handle starts the drain");
    drained.expect("no panic").expect("drained");
    assert!(!readiness.is_ready());
    assert_eq!(broker.unsettled(), 0, "its handler ended within the drain");

    let stopped = builder().id(IdSource::message_id()).build().expect("built");
    stopped.drain().start();
    let ended = stopped.run_until(std::future::pending::<()>());
    let ended = tokio::time::timeout(Duration::from_secs(30), ended).await;
    let ended = ended.expect("a drain before the start ends it");
    ended.expect("no error");
}
