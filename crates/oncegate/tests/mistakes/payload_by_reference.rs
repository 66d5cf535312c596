//! A payload that is taken by reference.
// error: expected `String`, found `&String`
// error: change the parameter type to match the trait

use oncegate::{Context, Failure, Handler, Reconciled};

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
