//! A payload that serde cannot read.

use oncegate_core::{Context, Failure, Handler};

struct Print;
pub struct Payment;

impl Handler for Print {
    type Payload = Payment;

    async fn handle(&self, _: Payment, _: &Context) -> Result<(), Failure> {
        Ok(())
    }
}

fn main() {}
