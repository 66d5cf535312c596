//! `.retry()` without an import of `FailureExt`.

use oncegate_core::Failure;

pub fn read() -> Result<String, Failure> {
    std::fs::read_to_string("entries.txt").retry()
}

fn main() {}
