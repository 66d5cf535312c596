//! A payload in place of a decoder.

use oncegate_core::{Consumer, Raw};

fn main() {
    let _ = Consumer::builder().decode(Raw::default());
}
