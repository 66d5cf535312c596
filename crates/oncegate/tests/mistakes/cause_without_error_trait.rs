//! `.reject()` on an error that does not implement `std::error::Error`.
// error: `Refusal` cannot be the cause of a `Failure`
// error: implement `std::error::Error` for it, or pass its text

use oncegate::{Failure, FailureExt};

#[derive(Debug)]
pub struct Refusal;

pub fn charge(answer: Result<(), Refusal>) -> Result<(), Failure> {
    answer.reject()
}

fn main() {}
