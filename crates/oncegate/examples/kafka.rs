//! Charges payments from a Kafka topic, at most once.

use oncegate::{
    Consumer, Context, Error, Failure, FailureExt, Guarantee, Handler, IdSource, Kafka, Redis,
    shutdown_signal,
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
        charge(&payment, cx.id()).await.in_doubt()
    }
}

/// Placeholder for your payment provider.
async fn charge(payment: &Payment, id: &str) -> Result<(), std::io::Error> {
    println!("{id}: {} cents from {}", payment.cents, payment.card);
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt().init();
    Consumer::builder()
        .source(
            Kafka::topic("payments")
                .brokers("localhost:9092")
                .group("ledger"),
        )
        .store(Redis::at("redis://localhost:6379"))
        .scope("ledger")
        .guarantee(Guarantee::AtMostOnce)
        .id(IdSource::header("payment-id"))
        .handler(Charge)
        .run_until(shutdown_signal())
        .await
}
