//! A URL in place of a store.

use oncegate_core::Consumer;

fn main() {
    let _ = Consumer::builder().store("redis://localhost:6379");
}
