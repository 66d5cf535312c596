//! A consumer with an admin port, as in the book.

use oncegate::{
    Consumer, ConsumerStatus, Context, Failure, Handler, IdSource, Kafka, KafkaStatus, Readiness,
    Redis, shutdown_signal,
};
use oncegate_admin::{Admin, LastErrors, Metrics};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

struct Print;

impl Handler for Print {
    type Payload = serde_json::Value;

    async fn handle(&self, payload: serde_json::Value, cx: &Context) -> Result<(), Failure> {
        println!("{}: {payload}", cx.id());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let metrics = Metrics::install()?; // before the first consumer is built
    let errors = LastErrors::new();
    tracing_subscriber::registry()
        .with(tracing_subscriber::filter::LevelFilter::INFO)
        .with(tracing_subscriber::fmt::layer())
        .with(errors.clone())
        .init();

    let (readiness, status, kafka) = (Readiness::new(), ConsumerStatus::new(), KafkaStatus::new());
    let admin = Admin::new()
        .consumer("payments", readiness.clone(), status.clone())
        .kafka("payments", kafka.clone())
        .last_errors(errors)
        .metrics(metrics)
        .serve()?;
    println!("http://{}/status", admin.address());

    Consumer::builder()
        .source(
            Kafka::topic("payments")
                .brokers("localhost:9092")
                .group("ledger")
                .status(kafka),
        )
        .store(Redis::at("redis://localhost:6379"))
        .id(IdSource::header("payment-id"))
        .handler(Print)
        .readiness(readiness)
        .status(status)
        .run_until(shutdown_signal())
        .await?;
    Ok(())
}
