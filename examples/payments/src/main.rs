//! The payments demo.
fn main() {}
