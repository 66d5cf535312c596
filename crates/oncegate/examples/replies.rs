//! A service that charges on request and replies over RabbitMQ: a request that is sent twice is charged
//! once, and gets the same reply twice.

use oncegate::replies::{Replies, ReplyingHandler};
use oncegate::{Consumer, Context, Error, Failure, IdSource, RabbitMq, Redis, shutdown_signal};

#[derive(serde::Deserialize)]
struct Charge {
    cents: u64,
}
#[derive(serde::Serialize)]
struct Charged {
    receipt: String,
}
struct Till;

impl ReplyingHandler for Till {
    type Payload = Charge;
    type Reply = Charged;
    async fn handle(&self, charge: Charge, cx: &Context) -> Result<Charged, Failure> {
        println!("{}: {} cents", cx.id(), charge.cents); // here: charge
        let receipt = format!("receipt-{}", cx.id());
        Ok(Charged { receipt })
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt().init();
    let queue = RabbitMq::queue("charges").url("amqp://guest:guest@localhost:5672/%2f");
    let replies = Replies::by(queue.publisher());
    Consumer::builder()
        .source(queue)
        .store(Redis::at("redis://localhost:6379"))
        .scope("till")
        .id(IdSource::message_id())
        .replying_handler(Till, replies)
        .run_until(shutdown_signal())
        .await
}
