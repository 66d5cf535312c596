//! A handler that does not implement `Handler`.
// error: `Print` is not a handler
// error: implement it: `impl Handler for

use oncegate::Consumer;

struct Print;

fn main() {
    let _ = Consumer::builder().handler(Print);
}
