//! The macro `async_trait` on a handler, whose methods are native `async fn`s.

use oncegate_core::{Context, Failure, Handler, Reconciled, async_trait};

struct Print;

#[async_trait]
impl Handler for Print {
    type Payload = String;

    async fn handle(&self, text: String, _: &Context) -> Result<(), Failure> {
        println!("{text}");
        Ok(())
    }

    async fn reconcile(&self, _: String, _: &Context) -> Result<Reconciled, Failure> {
        Ok(Reconciled::Unknown)
    }
}

fn main() {}
