//! A consumer that was given no handler.

use oncegate_core::{Consumer, Error, IdSource, MemoryBroker, MemoryStore, shutdown_signal};

pub async fn run(queue: MemoryBroker) -> Result<(), Error> {
    let consumer = Consumer::builder()
        .source(queue.source())
        .store(MemoryStore::new())
        .id(IdSource::message_id());
    consumer.run_until(shutdown_signal()).await
}

fn main() {}
