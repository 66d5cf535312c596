//! A payload in place of a decoder.
// says: `Raw` does not decode bodies
// says: pass `Json` (the default) or `RawBytes`

use oncegate::{Consumer, Raw};

fn main() {
    let _ = Consumer::builder().decode(Raw::default());
}
