//! A consumer that is configured by `oncegate.toml`, or by the file that `ONCEGATE_CONFIG` names.
#![forbid(unsafe_code)]

use oncegate::{Context, Failure, Handler};
use oncegate_config::{Config, Error};

#[derive(serde::Deserialize)]
struct Payment {
    card: String,
    amount: u64,
}

struct Print;

impl Handler for Print {
    type Payload = Payment;

    async fn handle(&self, payment: Payment, cx: &Context) -> Result<(), Failure> {
        println!("{}: {} cents of {}", cx.id(), payment.amount, payment.card); // the effect that must happen once
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    Config::load()?.run(Print).await
}
