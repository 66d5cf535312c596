//! A payload in place of a decoder.
// error: `Raw` does not decode bodies
// error: pass `Json` (the default) or `RawBytes`

use oncegate::{Consumer, Raw};

fn main() {
    let _ = Consumer::builder().decode(Raw::default());
}
