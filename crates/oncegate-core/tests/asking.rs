//! When the consumer asks its store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::*;

/// A store that takes ten milliseconds for each call, and writes down how much it was asked at
/// once.
#[derive(Clone, Default)]
struct TakesItsTime {
    store: MemoryStore,
    asked: Arc<Mutex<Vec<usize>>>,
}

#[async_trait]
impl Store for TakesItsTime {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.asked
            .lock()
            .expect("no panic inside")
            .push(operations.len());
        tokio::time::sleep(Duration::from_millis(10)).await;
        self.store.apply(operations).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_message_waits_for_no_other_to_be_asked_for_with_it() {
    let (broker, store) = (MemoryBroker::new("q"), TakesItsTime::default());
    let asked = store.asked.clone();
    let publish =
        |broker: &MemoryBroker, id: String| broker.publish(Message::new("x").with_message_id(id));
    let (source, messages) = (broker.source(), broker.clone());
    let all_sent = async move {
        for number in 0..20 {
            let begun = tokio::time::Instant::now();
            publish(&messages, format!("alone-{number}"));
            messages.drained().await;
            assert_eq!(
                begun.elapsed(),
                Duration::from_millis(20),
                "a claim and a completion"
            );
        }
        assert_eq!(
            std::mem::take(&mut *asked.lock().expect("no panic inside")),
            [1; 40]
        );
        // What comes while the store is busy is asked for together, as soon as it has answered.
        let begun = tokio::time::Instant::now();
        publish(&messages, "first".to_owned());
        tokio::time::sleep(Duration::from_millis(5)).await;
        (0..20).for_each(|number| publish(&messages, format!("meanwhile-{number}")));
        messages.drained().await;
        assert_eq!(begun.elapsed(), Duration::from_millis(30));
        assert_eq!(*asked.lock().expect("no panic inside"), [1, 21, 20]);
    };
    let consumer = Consumer::builder()
        .source(source)
        .store(store)
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(AtOnce);
    consumer.run_until(all_sent).await.expect("a clean end");
    assert_eq!(broker.dead_letters(), []);
}

/// A handler that is over at once.
struct AtOnce;

#[async_trait]
impl Handler for AtOnce {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}
