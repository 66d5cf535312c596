//! A payload that is taken by reference.

use oncegate_core::{Context, Failure, Handler, Reconciled};

struct Print;

impl Handler for Print {
    type Payload = String;

    async fn handle(&self, text: String, _: &Context) -> Result<(), Failure> {
        println!("{text}");
        Ok(())
    }

    async fn reconcile(&self, _: &String, _: &Context) -> Result<Reconciled, Failure> {
        Ok(Reconciled::Unknown)
    }
}

fn main() {}
