//! The name of a header in place of where ids are read.
// says: expected `IdSource`, found `&str`

use oncegate::Consumer;

fn main() {
    let _ = Consumer::builder().id("payment-id");
}
