//! A payload that serde cannot read.
// error: the trait bound `Payment: serde::Deserialize
// error: for local types consider adding `#[derive(serde::Deserialize)]` to your `Payment` type

use oncegate::{Context, Failure, Handler};

struct Print;
pub struct Payment;

impl Handler for Print {
    type Payload = Payment;

    async fn handle(&self, _: Payment, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

fn main() {}
