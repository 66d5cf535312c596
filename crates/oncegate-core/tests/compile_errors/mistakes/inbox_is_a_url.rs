//! A URL in place of an inbox.

use oncegate_core::Consumer;

fn main() {
    let _ = Consumer::builder().inbox("postgres://localhost/ledger");
}
