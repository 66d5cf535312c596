//! A function that takes its context by reference, as the method of the trait does.

use oncegate_core::{Consumer, Context, Failure, handler_fn};

async fn print(article: String, cx: &Context) -> Result<(), Failure> {
    println!("{} {article}", cx.id());
    Ok(())
}

fn main() {
    let _ = Consumer::builder().handler(handler_fn(print));
}
