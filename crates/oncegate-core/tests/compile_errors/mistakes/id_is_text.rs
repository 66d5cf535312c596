//! The name of a header in place of an `IdSource`.

use oncegate_core::Consumer;

fn main() {
    let _ = Consumer::builder().id("payment-id");
}
