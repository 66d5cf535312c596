//! A gate that was given no store.
// error: `()` is not a store
// error: `()` means that no store is set: call `.store(…)`

use oncegate::{Error, Gate};

pub async fn open() -> Result<Gate, Error> {
    Gate::builder().scope("ledger").open().await
}

fn main() {}
