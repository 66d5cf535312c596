//! The memory broker in place of one of its sources.
// error: `MemoryBroker` is not a source of messages
// error: pass one of `Kafka::topic(…)`, `RabbitMq::queue(…)` and `MemoryBroker::source()`

use oncegate::{Consumer, MemoryBroker};

fn main() {
    let _ = Consumer::builder().source(MemoryBroker::new("payments"));
}
