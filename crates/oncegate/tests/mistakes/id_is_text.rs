//! The name of a header in place of an `IdSource`.
// error: `&str` does not say where the id is read from
// error: pass `IdSource::header("…")`

use oncegate::Consumer;

fn main() {
    let _ = Consumer::builder().id("payment-id");
}
