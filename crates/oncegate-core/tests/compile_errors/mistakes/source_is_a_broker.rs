//! The memory broker in place of one of its sources.

use oncegate_core::{Consumer, MemoryBroker};

fn main() {
    let _ = Consumer::builder().source(MemoryBroker::new("payments"));
}
