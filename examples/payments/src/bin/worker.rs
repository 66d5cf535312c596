//! A program that is wired from a file alone: `oncegate.toml`, or what `ONCEGATE_CONFIG` names.
#![forbid(unsafe_code)]

use oncegate::{Context, Failure, Handler, async_trait};
use oncegate_config::{Config, Error};

#[derive(serde::Deserialize)]
struct Payment {
    card: String,
    amount: u64,
}

struct Print;

#[async_trait]
impl Handler for Print {
    type Payload = Payment;

    async fn handle(&self, payment: Payment, cx: &Context) -> Result<(), Failure> {
        println!("{}: {} cents of {}", cx.id(), payment.amount, payment.card); // here: what is to happen once
        Ok(())
    }
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    Config::load()?.run(Print).await
}
