//! Counts the messages that a gate would block, without blocking any: `cargo run -p oncegate --features
//! kafka --example trial`.

use oncegate::{
    Consumer, Context, Error, Failure, Guarantee, Handler, IdSource, Kafka, Raw, RawBytes, Redis,
    Shadow, ShadowReport, shutdown_signal,
};

struct Print;

impl Handler for Print {
    type Payload = Raw;

    async fn handle(&self, _: Raw, cx: &Context) -> Result<(), Failure> {
        println!("{}", cx.id());
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let redis = Redis::at("redis://localhost:6379");
    let report = ShadowReport::new();

    Consumer::builder()
        .store(Shadow::new(redis, report.clone()))
        // … all other settings as in production
        .source(
            Kafka::topic("payments")
                .brokers("localhost:9092")
                .group("ledger"),
        )
        .id(IdSource::header("payment-id"))
        .guarantee(Guarantee::EffectivelyOnce)
        .decode(RawBytes)
        .handler(Print)
        .run_until(shutdown_signal())
        .await?;
    println!("{report}");
    Ok(())
}
