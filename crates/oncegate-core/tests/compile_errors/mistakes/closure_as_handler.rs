//! A closure without `handler_fn`.

use oncegate_core::{Consumer, Context};

fn main() {
    let _ = Consumer::builder().handler(async |article: String, cx: Context| {
        println!("{} {article}", cx.id());
        Ok(())
    });
}
