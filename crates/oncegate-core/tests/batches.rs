//! When the consumer sends batches to its store.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use oncegate_core::marker::{Operation, Verdict};
use oncegate_core::*;

/// A store that takes ten milliseconds for each call, and records the size of each batch.
#[derive(Clone, Default)]
struct SlowStore {
    store: MemoryStore,
    batch_sizes: Arc<Mutex<Vec<usize>>>,
}

#[async_trait]
impl Store for SlowStore {
    async fn apply(&self, operations: &[Operation]) -> Vec<Result<Verdict, StoreError>> {
        self.batch_sizes
            .lock()
            .expect("no panic inside")
            .push(operations.len());
        tokio::time::sleep(Duration::from_millis(10)).await;
        self.store.apply(operations).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_sent_at_once_and_messages_during_it_share_the_next() {
    let (broker, store) = (MemoryBroker::new("q"), SlowStore::default());
    let batch_sizes = store.batch_sizes.clone();
    let publish =
        |broker: &MemoryBroker, id: String| broker.publish(Message::new("x").with_message_id(id));
    let (source, messages) = (broker.source(), broker.clone());
    let all_sent = async move {
        for number in 0..20 {
            let start = tokio::time::Instant::now();
            publish(&messages, format!("alone-{number}"));
            messages.all_settled().await;
            assert_eq!(
                start.elapsed(),
                Duration::from_millis(20),
                "a claim and a completion"
            );
        }
        assert_eq!(
            std::mem::take(&mut *batch_sizes.lock().expect("no panic inside")),
            [1; 40]
        );
        // Messages that arrive during a call share the next batch, sent as soon as the call returns.
        let start = tokio::time::Instant::now();
        publish(&messages, "first".to_owned());
        tokio::time::sleep(Duration::from_millis(5)).await;
        (0..20).for_each(|number| publish(&messages, format!("second-{number}")));
        messages.all_settled().await;
        assert_eq!(start.elapsed(), Duration::from_millis(30));
        assert_eq!(*batch_sizes.lock().expect("no panic inside"), [1, 21, 20]);
    };
    let consumer = Consumer::builder()
        .source(source)
        .store(store)
        .id(IdSource::message_id())
        .decode(RawBytes)
        .handler(ReturnsAtOnce);
    consumer.run_until(all_sent).await.expect("a clean end");
    assert_eq!(broker.dead_letters(), []);
}

/// A handler that returns at once.
struct ReturnsAtOnce;

impl Handler for ReturnsAtOnce {
    type Payload = Raw;

    async fn handle(&self, _: Raw, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}
