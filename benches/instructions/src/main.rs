//! Handles messages of the memory broker with the memory store and an empty handler, on a runtime
//! with one thread.
//!
//! `oncegate-bench-instructions MESSAGES [inline|spawned|fixture]`. `cargo xtask bench --guard` runs
//! it under callgrind with few and with many messages, and divides the difference. With `fixture` it
//! only creates and publishes the messages: the guard subtracts that cost.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use oncegate_core::{
    Consumer, Context, Execution, Failure, Handler, Headers, IdSource, MemoryBroker, MemoryStore,
    Message, RawBytes,
};
use serde::de::IgnoredAny;
use tokio::sync::Notify;

/// Counts down handled messages, and notifies after the last.
struct NotifyAtZero(AtomicUsize, Arc<Notify>);

impl Handler for NotifyAtZero {
    type Payload = IgnoredAny;

    async fn handle(&self, _: IgnoredAny, _: &Context) -> Result<(), Failure> {
        if self.0.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.1.notify_one();
        }
        Ok(())
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let messages: usize = arguments
        .next()
        .ok_or("usage: oncegate-bench-instructions MESSAGES [inline|spawned|fixture]")?
        .parse()?;
    let execution = match arguments.next().as_deref() {
        None | Some("inline") => Some(Execution::Inline),
        Some("spawned") => Some(Execution::Spawned),
        Some("fixture") => None,
        Some(other) => {
            return Err(format!("`{other}` is none of `inline`, `spawned`, `fixture`").into());
        }
    };
    let broker = MemoryBroker::new("messages");
    // One block of headers for all messages, as sources create it.
    let mut block = Vec::new();
    let headers: Vec<_> = (0..messages)
        .map(|number| {
            let start = block.len();
            Headers::encode(&mut block, b"id", Some(format!("{number:016}").as_bytes()));
            start..block.len()
        })
        .collect();
    let block = Bytes::from(block);
    let message = Message::new(Bytes::from_static(&[b'x'; 100]));
    for range in headers {
        let headers = Headers::from_block(block.slice(range));
        broker.publish(message.clone().with_headers(headers));
    }
    let Some(execution) = execution else {
        std::mem::forget(broker); // in the other modes the consumer drops the messages
        return Ok(());
    };
    let over = Arc::new(Notify::new());
    let all = over.clone();
    Consumer::builder()
        .source(broker.source())
        .store(MemoryStore::new())
        .id(IdSource::header("id"))
        .decode(RawBytes)
        .execution(execution)
        .handler(NotifyAtZero(AtomicUsize::new(messages), over))
        .run_until(async move { all.notified().await })
        .await?;
    assert_eq!(
        broker.unsettled(),
        0,
        "all messages are settled before the consumer ends"
    );
    Ok(())
}
