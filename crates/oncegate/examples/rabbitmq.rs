//! Takes stock levels from a RabbitMQ queue, effectively once.

use oncegate::{
    Consumer, Context, Error, Failure, IdSource, RabbitMq, Redis, handler_fn, shutdown_signal,
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
    Consumer::builder()
        .source(RabbitMq::queue("stock").url("amqp://guest:guest@localhost:5672/%2f"))
        .store(Redis::at("redis://localhost:6379"))
        .scope("shelf")
        .id(IdSource::message_id())
        .handler(handler_fn(set_level))
        .run_until(shutdown_signal())
        .await
}
