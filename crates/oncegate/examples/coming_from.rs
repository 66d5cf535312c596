//! A Kafka consumer with the settings that other frameworks have: errors without a retry, the number of
//! attempts, the backoff, and the dead-letter topic.

use std::time::Duration;

use oncegate::{
    Consumer, Context, Error, Failure, FailureExt, Handler, IdSource, Kafka, Redis, shutdown_signal,
};

#[derive(serde::Deserialize)]
struct Payment {
    card: String,
    cents: u64,
}
struct Charge;

impl Handler for Charge {
    type Payload = Payment;
    async fn handle(&self, payment: Payment, cx: &Context) -> Result<(), Failure> {
        if payment.cents == 0 {
            Err("a payment of 0 cents").reject()?; // dead letter, no retry
        }
        charge(&payment.card, payment.cents, cx.id())
            .await
            .in_doubt() // it may have happened: runs again with this id
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt().init();
    Consumer::builder()
        .source(
            Kafka::topic("payments")
                .brokers("localhost:9092")
                .group("ledger")
                .dead_letters("payments-dlt"),
        )
        .store(Redis::at("redis://localhost:6379"))
        .scope("ledger")
        .id(IdSource::header("payment-id"))
        .max_attempts(5)
        .backoff(Duration::from_secs(1), Duration::from_secs(60))
        .handler(Charge)
        .run_until(shutdown_signal())
        .await
}

/// A call to the payment provider, with the id of the message as the idempotency key.
async fn charge(card: &str, cents: u64, key: &str) -> Result<(), std::io::Error> {
    println!("{key}: {cents} cents from {card}");
    Ok(())
}
