//! A type in `handler_fn`.

use oncegate_core::{Consumer, handler_fn};

struct Print;

fn main() {
    let _ = Consumer::builder().handler(handler_fn(Print));
}
