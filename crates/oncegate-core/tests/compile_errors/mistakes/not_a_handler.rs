//! A handler that does not implement `Handler`.

use oncegate_core::Consumer;

struct Print;

fn main() {
    let _ = Consumer::builder().handler(Print);
}
