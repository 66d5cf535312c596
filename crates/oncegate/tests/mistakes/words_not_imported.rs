//! The words, without the trait that has them.
// says: use oncegate::FailureExt;

use oncegate::Failure;

pub fn read() -> Result<String, Failure> {
    std::fs::read_to_string("entries.txt").retry()
}

fn main() {}
