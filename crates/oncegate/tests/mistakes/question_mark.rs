//! `?` on an error that does not say whether the effect happened.
// error: say what is known: `.retry()?` if nothing happened, `.reject()?` if it will never work, `.in_doubt()?` if it may have happened
// error: with `use oncegate::FailureExt;`

use oncegate::{Context, Failure, Handler};

struct Print;

impl Handler for Print {
    type Payload = String;

    async fn handle(&self, file: String, _: &Context) -> Result<(), Failure> {
        println!("{}", std::fs::read_to_string(file)?);
        Ok(())
    }
}

fn main() {}
