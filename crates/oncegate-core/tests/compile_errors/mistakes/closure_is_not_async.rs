//! A closure that returns no future.

use oncegate_core::{Consumer, handler_fn};

fn main() {
    let _ = Consumer::builder().handler(handler_fn(|article: String, cx| {
        println!("{} {article}", cx.id());
        Ok(())
    }));
}
