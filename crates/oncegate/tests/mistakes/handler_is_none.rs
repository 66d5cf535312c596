//! A handler that does not implement the trait.
// says: `Print` is not a handler
// says: implement it: `impl Handler for

use oncegate::Consumer;

struct Print;

fn main() {
    let _ = Consumer::builder().handler(Print);
}
