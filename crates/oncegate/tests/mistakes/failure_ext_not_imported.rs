//! `.retry()` without an import of `FailureExt`.
// error: use oncegate::FailureExt;

use oncegate::Failure;

pub fn read() -> Result<String, Failure> {
    std::fs::read_to_string("entries.txt").retry()
}

fn main() {}
