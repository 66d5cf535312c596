//! The words on an error that is none for the compiler.
// says: `Refusal` cannot be the cause of a `Failure`
// says: implement `std::error::Error` for it, or pass its text

use oncegate::{Failure, FailureExt};

#[derive(Debug)]
pub struct Refusal;

pub fn charge(answer: Result<(), Refusal>) -> Result<(), Failure> {
    answer.reject()
}

fn main() {}
