//! A gate that was given no store.
// error: `()` is not a store
// error: `()` says that no store was given: call `.store(…)`

use oncegate::{Error, Gate};

pub async fn open() -> Result<Gate, Error> {
    Gate::builder().scope("ledger").open().await
}

fn main() {}
