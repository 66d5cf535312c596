//! A first consumer, which needs no server.

use oncegate::{
    Consumer, Context, Error, Failure, IdSource, MemoryBroker, Message, Sqlite, handler_fn,
};

#[derive(serde::Deserialize)]
struct Stock {
    article: String,
    level: u32,
}

async fn set_level(stock: Stock, cx: Context) -> Result<(), Failure> {
    println!("{}: {} of {}", cx.id(), stock.level, stock.article); // here: write the level to your database
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt().init();
    let queue = MemoryBroker::new("stock");
    queue.publish(Message::new(r#"{"article": "tea", "level": 3}"#).with_message_id("stock-1"));
    queue.publish(Message::new(r#"{"article": "tea", "level": 3}"#).with_message_id("stock-1")); // a duplicate
    queue.publish(Message::new(r#"{"article": "milk", "level": 7}"#).with_message_id("stock-2"));
    let empty = queue.clone();
    Consumer::builder()
        .source(queue.source())
        .store(Sqlite::file("stock.db"))
        .scope("shelf")
        .id(IdSource::message_id())
        .handler(handler_fn(set_level))
        .run_until(async move { empty.all_settled().await })
        .await
}
