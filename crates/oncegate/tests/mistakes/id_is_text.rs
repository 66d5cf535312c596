//! The name of a header in place of an `IdSource`.
// error: expected `IdSource`, found `&str`

use oncegate::Consumer;

fn main() {
    let _ = Consumer::builder().id("payment-id");
}
