//! A text in place of a failure. The compiler names the trait whose documentation says what to write, and
//! leaves out our text, because the bound is that of `Into`.

use oncegate_core::{Context, Failure, Handler};

struct Print;

impl Handler for Print {
    type Payload = String;

    async fn handle(&self, _: String, _: &Context) -> Result<(), Failure> {
        Err("no such account".into())
    }
}

fn main() {}
