//! The source under the consumer's own loop.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use oncegate_amqp::QueueKind;
use oncegate_core::source::headers;
use oncegate_core::{Consumer, Context, Failure, Handler, IdSource, MemoryStore, async_trait};

use crate::rig::{Proxy, Rig, header};

#[derive(Clone, Default)]
struct Effects(Arc<Mutex<BTreeMap<u32, u32>>>);

#[async_trait]
impl Handler for Effects {
    type Payload = u32;

    async fn handle(&self, number: u32, cx: &Context) -> Result<(), Failure> {
        assert_eq!(cx.id(), format!("n-{number}"));
        if number == 13 {
            return Err(Failure::Reject("thirteen".into()));
        }
        if number.is_multiple_of(7) && cx.attempt() == 1 && fastrand::bool() {
            return Err(Failure::Retry("not yet".into()));
        }
        *self.0.lock().expect("no handler panics").entry(number).or_default() += 1;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_id_is_handled_once_though_messages_are_doubled_and_the_connection_is_cut() {
    let (rig, proxy) = (Rig::new().await, Proxy::start().await);
    let effects = Effects::default();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let consumer = Consumer::builder()
        .source(rig.source(QueueKind::Quorum).url(&proxy.url).prefetch(64))
        .store(MemoryStore::new())
        .id(IdSource::message_id())
        .handler(effects.clone());
    let running = tokio::spawn(consumer.run_until(async { drop(stopped.await) }));
    let id = |number: u32| BasicProperties::default().with_message_id(format!("n-{number}").as_str().into());
    let patience = Instant::now() + Duration::from_secs(40);
    while !rig.reaches("0", id(0)).await {
        assert!(Instant::now() < patience, "the consumer declared no queue");
    }
    for number in 0..300 {
        rig.publish_with(&number.to_string(), id(number)).await;
        if number % 3 == 0 {
            rig.publish_with(&number.to_string(), id(number)).await;
        }
        if number % 100 == 50 {
            proxy.cut();
        }
    }
    while effects.0.lock().expect("no handler panics").len() < 299 {
        assert!(Instant::now() < patience, "{} handled", effects.0.lock().expect("no handler panics").len());
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let dead = rig.take(&rig.dead_letters()).await.delivery;
    assert_eq!((&dead.data[..], header(&dead, headers::ID).as_deref()), (&b"13"[..], Some("n-13")));
    assert_eq!(header(&dead, headers::REASON).as_deref(), Some("refused"));
    assert!(header(&dead, headers::LAST_ERROR).is_some_and(|error| error.contains("thirteen")));
    stop.send(()).expect("the consumer runs");
    running.await.expect("no panic").expect("a clean end");
    let effects = effects.0.lock().expect("no handler panics").clone();
    assert!(effects.values().all(|count| *count == 1), "{effects:?}");
    rig.done().await;
}
