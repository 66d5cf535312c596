//! `?` on an error that does not say whether the effect happened.

use oncegate_core::{Context, Failure, Handler};

struct Print;

impl Handler for Print {
    type Payload = String;

    async fn handle(&self, file: String, _: &Context) -> Result<(), Failure> {
        println!("{}", std::fs::read_to_string(file)?);
        Ok(())
    }
}

fn main() {}
