//! `.reject()` on an error that does not implement `std::error::Error`.

use oncegate_core::{Failure, FailureExt};

#[derive(Debug)]
pub struct Refusal;

pub fn charge(answer: Result<(), Refusal>) -> Result<(), Failure> {
    answer.reject()
}

fn main() {}
